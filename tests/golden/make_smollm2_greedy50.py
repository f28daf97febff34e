#!/usr/bin/env python3
"""Writes what transformers continues greedily, in fp32, after 50 prompts of many kinds (SmolLM2).

Prose, code, arithmetic, lists, several languages and scripts, chats, from 1 to 238 tokens.
Each is continued by 48 tokens, past EOS (the id stays in `completion_ids`: whoever stops there has a
prefix). With every token goes its gap, the difference between the best and the second logit: where
another implementation turns a token, it tells a tie (a gap of some 1e-5) from a fault.
Usage: make_smollm2_greedy50.py HF_FOLDER OUT.json      (HF_FOLDER: as make_smollm2.py writes it)
"""

import json
import pathlib
import sys

import torch
import transformers

NUM_TOKENS = 48

PROSE = [
    "The", "Once upon a time", "The old lighthouse keeper climbed the stairs for the last time, and",
    "In the beginning of the twentieth century, physics was changed by two ideas:",
    "Photosynthesis is the process by which plants", "Dear Sir or Madam,\n\nI am writing to complain about",
    "The three most important things to remember when you learn to swim are",
    "\"I don't think so,\" said the fox, and", "Abstract. We study the problem of",
    "Ingredients:\n- 2 cups of flour\n- 1 cup of sugar\n-",
]
CODE = [
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n", "import", "for (int i = 0; i < n; ++i) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE", "#include <vector>\n\nint main() {\n",
    "{\"name\": \"Alice\", \"age\": 30, \"languages\": [", "#!/bin/bash\nset -e\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "<html>\n<head>\n<title>",
]
NUMBERS = [
    "2 + 2 =", "1, 1, 2, 3, 5, 8, 13,", "Question: What is 17 * 3?\nAnswer:", "3.14159", "The year 1969 was",
    "If a train travels 60 miles in 1.5 hours, its average speed is",
]
LANGUAGES = [
    "La capital de España es", "Il était une fois une petite fille qui", "Die Würde des Menschen ist",
    "Nel mezzo del cammin di nostra vita", "O Brasil é um país", "Москва — это столица", "東京は日本の", "我喜欢吃",
    "안녕하세요, 저는", "مرحبا بكم في", "Η Αθήνα είναι", "naïve café — “quotes” … 🙂🚀", "¿Qué hora es?",
]
CHATS = [
    ["What is the capital of France?"], ["Explain gravity to a child in three sentences."],
    ["Write a Python function that reverses a string."], ["List five fruits."],
    ["Hi!", "Hello! How can I help you today?", "Tell me a joke about computers."],
    ["What is 12 divided by 4?"], ["Summarize the story of Romeo and Juliet."],
]
LONG = [
    "The river began as a thread of meltwater high in the mountains. " * 12 + "By the time it reached the plain, it",
    "".join(f"Item {i}: the price is {7 * i % 31} dollars and {13 * i % 97} cents.\n" for i in range(1, 14)) + "Item 14:",
    "def area(shape):\n" + "".join(
        f"    if shape.kind == 'kind_{i}':\n        return shape.width * {i} + shape.height\n" for i in range(8)) + "    if",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was "
    "the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it "
    "was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before us, we were",
    "Q: Where do cows live?\nA: On farms.\n\nQ: Where do fish live?\nA: In water.\n\nQ: Where do birds build nests?\nA: In "
    "trees.\n\nQ: Where do bees live?\nA:",
]


def main():
    folder, out = sys.argv[1], pathlib.Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    tok = transformers.AutoTokenizer.from_pretrained(folder)

    def chat(turns):
        messages = [dict(role="assistant" if i % 2 else "user", content=t) for i, t in enumerate(turns)]
        return tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    prompts = PROSE + CODE + NUMBERS + LANGUAGES + [chat(c) for c in CHATS] + LONG
    assert len(prompts) == len(set(prompts)) == 50, len(prompts)
    rows = []
    for prompt in prompts:
        ids = tok(prompt, add_special_tokens=False).input_ids
        completion, gaps, past, step = [], [], None, torch.tensor([ids])
        for _ in range(NUM_TOKENS):
            r = model(input_ids=step, past_key_values=past, use_cache=True)
            past, top = r.past_key_values, r.logits[0, -1].topk(2)
            completion.append(int(top.indices[0]))
            gaps.append(round(float(top.values[0] - top.values[1]), 5))
            step = torch.tensor([completion[-1:]])
        rows.append(dict(prompt=prompt, prompt_ids=ids, completion_ids=completion,
                         text=tok.decode(completion, clean_up_tokenization_spaces=False), gaps=gaps))
        print(f"{len(ids):4d} tokens, least gap {min(gaps):.5f}  {prompt[-40:]!r} -> {rows[-1]['text'][:50]!r}", flush=True)
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
