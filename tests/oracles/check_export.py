#!/usr/bin/env python3
"""Compares greedy text of `stretto generate` with that of transformers on an exported folder.

Runs   STRETTO generate --model FOLDER --prompts PROMPTS --max-tokens N --greedy --json --dtype f32 [--raw]
whose output is JSON lines with prompt (the prompt's line), prompt_ids, completion_ids (EOS included)
and text; lines that are not JSON objects are passed over. A line of PROMPTS is a JSON string, an
object with prompt or messages, or plain text; the default file's lines hold their chat markup
themselves and so need --raw. Then transformers continues the same prompt_ids in fp32 from the
folder's weights. Also checked: that the folder loads without missing or unexpected tensors, that
prompt_ids are what the folder's tokenizer makes of the prompt (--raw: of its text; else of its chat
messages by the folder's template, or of its text where there is none), and that text is what it
makes of completion_ids.
Prints a table. A row that differs shows where, and by how much logit transformers prefers its own
token there: below --tie it counts as "tie" (bf16 activations), not as a failure. The default is 0.
Exit code: 0 all rows the same (or ties), 1 some differ, 2 nothing could be compared.
Usage: check_export.py --stretto BINARY --model FOLDER [--prompts FILE] [--raw] [--max-tokens 32] [--tie GAP]
"""

import argparse
import json
import pathlib
import subprocess
import sys

import torch
import transformers

PROMPTS = pathlib.Path(__file__).parent / "export_prompts.jsonl"


def fail(message):
    print(f"check_export: {message}", file=sys.stderr)
    sys.exit(2)


def run_stretto(args):
    command = [args.stretto, "generate", "--model", str(args.model), "--prompts", str(args.prompts),
               "--max-tokens", str(args.max_tokens), "--greedy", "--json",
               "--dtype", args.dtype] + ["--raw"] * args.raw
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        fail(str(error))
    if done.returncode != 0:
        fail(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr}")
    rows = []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            absent = {"prompt", "prompt_ids", "completion_ids", "text"} - row.keys()
            if absent:
                fail(f"a line of stretto's output lacks {sorted(absent)}: {line[:200]}")
            rows.append(row)
    expected = sum(1 for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip())
    if not rows or len(rows) != expected:
        fail(f"{args.prompts} has {expected} prompts, stretto printed {len(rows)} rows")
    return rows


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[kind]:
            fail(f"transformers reports {kind} in {folder}: {info[kind]}")
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def stop_ids(model):
    eos = model.generation_config.eos_token_id
    eos = model.config.eos_token_id if eos is None else eos
    return set(eos if isinstance(eos, list) else [eos])


def greedy(model, ids, max_tokens):
    """Greedy tokens, and for each the logits that it was chosen from."""
    out, logits, past, stop = [], [], None, stop_ids(model)
    step = torch.tensor([ids])
    for _ in range(max_tokens):
        r = model(input_ids=step, past_key_values=past, use_cache=True)
        past = r.past_key_values
        logits.append(r.logits[0, -1])
        out.append(int(logits[-1].argmax()))
        if out[-1] in stop:
            break
        step = torch.tensor([[out[-1]]])
    return out, logits


def prompt_of(line):
    """A line of the prompts file as its text or its list of messages."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return line
    if isinstance(value, dict):
        return value.get("messages", value.get("prompt"))
    return value if isinstance(value, str) else line


def prompt_matches(tok, row, raw):
    """The way in which prompt_ids come from the prompt, or None."""
    prompt, ids = prompt_of(row["prompt"]), row["prompt_ids"]
    if tok.chat_template and not raw:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = tok.apply_chat_template(messages, add_generation_prompt=True)
        return "chat" if chat == ids else None
    ways = {"text": tok(prompt, add_special_tokens=False).input_ids, "text+special": tok(prompt).input_ids}
    return next((way for way, expected in ways.items() if expected == ids), None)


def text_matches(tok, row):
    ids = row["completion_ids"]
    return row["text"] in (tok.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                           tok.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def compare(model, tok, row, args):
    """(verdict, detail) of one row; verdict is "same", "tie" or a word for what differs."""
    way = prompt_matches(tok, row, args.raw)
    if way is None:
        return "PROMPT", "prompt_ids are not what the folder's tokenizer makes of the prompt"
    if not text_matches(tok, row):
        return "TEXT", f"text {row['text']!r}, tokenizer {tok.decode(row['completion_ids'])!r}"
    ours, (theirs, logits) = row["completion_ids"], greedy(model, row["prompt_ids"], args.max_tokens)
    gaps = [float(x[0] - x[1]) for x in (l.topk(2).values for l in logits)]
    if ours == theirs:
        return "same", f"{way}, {len(ours)} tokens, least gap {min(gaps):.3f}"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    if at >= len(ours) or at >= len(theirs):
        return "LENGTH", f"stretto ends after {len(ours)} tokens, transformers after {len(theirs)}"
    gap = float(logits[at][theirs[at]] - logits[at][ours[at]])
    detail = f"at {at}: {tok.decode([ours[at]])!r}, transformers {tok.decode([theirs[at]])!r} by {gap:.4f}"
    return ("tie" if gap < args.tie else "DIFFERS"), detail


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stretto", required=True, help="the binary")
    parser.add_argument("--model", required=True, type=pathlib.Path, help="the exported folder")
    parser.add_argument("--prompts", default=PROMPTS, type=pathlib.Path, help="one prompt a line")
    parser.add_argument("--raw", action="store_true", help="prompts are text without a chat format")
    parser.add_argument("--max-tokens", default=32, type=int)
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"],
                        help="stretto's numerics; transformers always computes in fp32")
    parser.add_argument("--tie", default=0.0, type=float, help="logit difference that counts as a tie")
    parser.add_argument("--timeout", default=600, type=float, help="seconds for stretto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = run_stretto(args)
    model, tok = load(args.model)
    counts = {}
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, fp32; {len(rows)} prompts, "
          f"{args.max_tokens} tokens at most")
    for i, row in enumerate(rows):
        verdict, detail = compare(model, tok, row, args)
        counts[verdict] = counts.get(verdict, 0) + 1
        print(f"{i + 1:3d}  {verdict:8s} {row['prompt'][-28:]:28.28s}  {row['text'][:36]!r:40.40s} {detail}")
    print(", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())))
    sys.exit(0 if set(counts) <= {"same", "tie"} else 1)


if __name__ == "__main__":
    main()
