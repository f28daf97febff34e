"""A reward service in Python: rewards completions for being short and for ending with a full stop.

    pip install grpcio grpcio-tools
    python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. protos/stretto/v1/reward.proto
    python examples/reward_service.py 50061

and in the run file:  rewards: [{type: service, address: "localhost:50061"}]
"""

import json
import sys
from concurrent import futures

import grpc

sys.path.insert(0, ".")  # where protoc wrote stretto/v1
from stretto.v1 import reward_pb2, reward_pb2_grpc


class Reward(reward_pb2_grpc.RewardServicer):
    def GetRewards(self, request, context):
        prompt = json.loads(request.prompt_json)  # the dataset line: prompt, answer, and whatever else
        limit = prompt.get("max_words", 20)
        rewards = [(len(c.split()) <= limit) * 0.5 + c.strip().endswith(".") * 0.5 for c in request.completions]
        return reward_pb2.GetRewardsResponse(rewards=rewards)


server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
reward_pb2_grpc.add_RewardServicer_to_server(Reward(), server)
if server.add_insecure_port(f"localhost:{sys.argv[1]}") == 0:
    sys.exit(f"port {sys.argv[1]} is in use")
server.start()
server.wait_for_termination()
