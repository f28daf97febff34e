"""Serves reward functions in Python to a run's scorers, as they are written for TRL.

    pip install grpcio grpcio-tools
    python examples/reward_service.py 50061                       # the function below
    python examples/reward_service.py 50061 my_rewards.py:score   # yours

and in the run file:  rewards: [{type: service, address: "localhost:50061"}]

A function, which may be a coroutine, gets lists with one item a completion: `prompts`, `completions`, `completion_ids`
(empty ones: the service sees texts), and each field of the dataset line by its name (`answer`, …). Where the line has `messages` (or a list as `prompt`), prompts are lists of messages and completions
lists of one, as TRL has them. It returns a finite number for each; an exception is told to the scorer, which asks again.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from concurrent import futures

import grpc
from grpc_tools import protoc


def short_and_complete(completions, max_words=None, **_):
    """Rewards completions for being short and for ending with a full stop."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    limits = max_words or [20] * len(texts)
    return [(len(t.split()) <= limit) * 0.5 + t.strip().endswith(".") * 0.5 for t, limit in zip(texts, limits)]


def load(place):
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        sys.exit(f"{path} has no function {name!r}")
    return getattr(module, name)


def compile_protos():
    """Makes stretto.v1.reward_pb2 and reward_pb2_grpc importable."""
    protos = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "protos")
    out = tempfile.mkdtemp()
    if protoc.main(["protoc", f"-I{protos}", f"--python_out={out}", f"--grpc_python_out={out}",
                    os.path.join(protos, "stretto/v1/reward.proto")]) != 0:
        sys.exit("the protos cannot be compiled")
    sys.path.insert(0, out)


def rewards_of(function, line, texts):
    messages = line.pop("messages", None) or line.get("prompt")
    is_chat = isinstance(messages, list)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
    columns = {name: [value] * len(texts) for name, value in line.items()}
    columns |= {"prompts": [messages] * len(texts), "completion_ids": [[] for _ in texts]}
    takes = inspect.signature(function).parameters
    if not any(p.kind == p.VAR_KEYWORD for p in takes.values()):
        columns = {name: column for name, column in columns.items() if name in takes}
    rewards = function(completions=completions, **columns)
    if inspect.isawaitable(rewards):
        async def wait():
            return await rewards
        rewards = asyncio.run(wait())
    if any(reward is None for reward in rewards):
        raise ValueError("None: a reward that doesn't apply has to be a number here, such as 0")
    return [float(reward) for reward in rewards]


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    port, function = sys.argv[1], load(sys.argv[2]) if len(sys.argv) > 2 else short_and_complete
    compile_protos()
    from stretto.v1 import reward_pb2, reward_pb2_grpc

    class Reward(reward_pb2_grpc.RewardServicer):
        def GetRewards(self, request, context):
            try:
                rewards = rewards_of(function, json.loads(request.prompt_json), list(request.completions))
            except Exception as error:  # the run's log is where its author looks
                text = f"{function.__name__}: {type(error).__name__}: {error}"
                context.abort(grpc.StatusCode.INTERNAL, text.encode("ascii", "replace").decode()[:500])
            return reward_pb2.GetRewardsResponse(rewards=rewards)

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    reward_pb2_grpc.add_RewardServicer_to_server(Reward(), server)
    try:
        bound = server.add_insecure_port(f"localhost:{port}")
    except RuntimeError:
        bound = 0
    if bound == 0:
        sys.exit(f"port {port} is in use")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
