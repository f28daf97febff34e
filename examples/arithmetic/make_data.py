#!/usr/bin/env python3
"""Writes the demo's datasets beside this script; the same files every time.

train.jsonl, eval.jsonl   sums and differences of numbers up to 25, as chat messages (SmolLM2)
tiny-train.jsonl, tiny-eval.jsonl   sums of numbers up to 99 as bare text (the tiny model)
tiny-sft.jsonl            what the tiny model was trained on before: answers of which many shrug
No question of an eval file is in a train file.
"""
import json
import pathlib
import random

HERE = pathlib.Path(__file__).parent


def write(name, rows):
    with open(HERE / name, "w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def chat_questions():
    pairs = [(a, "+", b, a + b) for a in range(1, 26) for b in range(1, 26)]
    pairs += [(a, "-", b, a - b) for a in range(1, 26) for b in range(1, a + 1)]
    for a, op, b, answer in pairs:
        text = f"What is {a} {op} {b}? Answer with the number only."
        yield {"messages": [{"role": "user", "content": text}], "answer": str(answer)}


def main():
    rng = random.Random(20240229)
    questions = list(chat_questions())
    rng.shuffle(questions)
    write("eval.jsonl", questions[:256])
    write("train.jsonl", questions[256:])

    sums = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(sums)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    write("tiny-eval.jsonl", rows[:256])
    write("tiny-train.jsonl", rows[256:2304])
    sft = []
    for row in rows[256:]:
        answer = row["answer"] if rng.random() < 0.4 else "dunno"
        sft.append({"prompt": row["prompt"], "completion": answer})
    write("tiny-sft.jsonl", sft)


if __name__ == "__main__":
    main()
