#!/usr/bin/env python3
"""Writes the scores that transformers' LlamaForSequenceClassification (one label) gives to answers.

The model is examples/tiny-model with a head h[i] = ((37 i) mod 101 - 50) / 200 in place of its LM head, in fp32. The
token that ends an answer (0) has the score.
reward_model.json: a list of {prompt, completion, score}.
Usage: make_reward_model.py TINY_MODEL reward_model.json
"""

import json
import pathlib
import sys

import torch
import transformers

PAIRS = [("25+24=", "49"), ("25+24=", "50"), ("1+1=", ""), ("7+8=", "15, for 7 + 8 = 15"),
         ("12+30=", "\u00e4\u20ac"), ("3+", "4=7\n\n3+5=8")]


def main():
    config = transformers.AutoConfig.from_pretrained(sys.argv[1])
    body = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    config.num_labels = 1
    model = transformers.LlamaForSequenceClassification(config).float().eval()
    model.model.load_state_dict(body.model.state_dict())
    head = [((37 * i) % 101 - 50) / 200 for i in range(config.hidden_size)]
    cases = []
    with torch.no_grad():
        model.score.weight.copy_(torch.tensor([head]))
        encode = transformers.PreTrainedTokenizerFast(tokenizer_file=str(pathlib.Path(sys.argv[1]) / "tokenizer.json"))
        for prompt, completion in PAIRS:
            ids = encode(prompt, add_special_tokens=False)["input_ids"] + \
                encode(completion, add_special_tokens=False)["input_ids"] + [config.eos_token_id]
            score = model(torch.tensor([ids])).logits[0, 0].item()
            cases.append({"prompt": prompt, "completion": completion, "score": score})
    pathlib.Path(sys.argv[2]).write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
