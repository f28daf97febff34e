#!/usr/bin/env python3
"""Writes testdata/chat.json: chat prompts as Jinja renders them and `tokenizers` encodes them, with
templates of the families' shapes and the small tokenizers of tests/golden.

Run from engine/text: tools/make_chat_cases.py > testdata/chat.json   (needs: pip install jinja2 tokenizers)
"""
import json

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

CHATML_END = ("{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
TEMPLATES = {
    # SmolLM2's shape: the default is printed by the first message of a loop; real line breaks.
    "chatml_default": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
                      "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
                      "{% endif %}" + CHATML_END.replace("\\n", "\n"),
    "chatml_qwen": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
                   "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}" + CHATML_END,
    # Qwen2.5's shape: the message of a system turn stands in code before the default does.
    "chatml_branch": "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
                     "{%- else %}{{- \"<|im_start|>system\\nIt's \\\"you\\\".<|im_end|>\\n\" }}{%- endif %}"
                     "{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}"
                     "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
                     "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "chatml_plain": "{{ bos_token }}{% for message in messages %}" + CHATML_END,
    "llama3": "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
              " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
              "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    # Llama 3.1's shape: dates before the system message, which is always there.
    "llama3_dates": "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = \"26 Jul 2024\" %}{%- endif %}"
                    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
                    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = \"\" %}{%- endif %}"
                    "{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}{{- \"Cutting Knowledge Date: December 2023\\n\" }}"
                    "{{- \"Today Date: \" + date_string + \"\\n\\n\" }}{{- system_message }}{{- \"<|eot_id|>\" }}"
                    "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
                    " + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
                    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
}
USER = {"role": "user", "content": "What is 17 plus 25?"}
CHATS = [
    [USER],
    [{"role": "system", "content": "You add numbers."}, USER],
    [USER, {"role": "assistant", "content": "42"}, {"role": "user", "content": "\n\n  And\ttwice?  \n"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "日本語 e\u0301 \u00a0\u2003x\u001c"}, {"role": "assistant", "content": " "}],
]
BOS = {"qwen2": "<|endoftext|>", "smollm2_style": "<|endoftext|>", "llama3": "<|begin_of_text|>"}


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as transformers has it
    cases = []
    for name, text in TEMPLATES.items():
        for tokenizer in ("llama3",) if name.startswith("llama3") else ("qwen2", "smollm2_style"):
            tok = Tokenizer.from_file(f"../../tests/golden/tokenizers/{tokenizer}.tokenizer.json")
            for messages in CHATS:
                for generate in (True, False):
                    out = env.from_string(text).render(messages=messages, add_generation_prompt=generate,
                                                       bos_token=BOS[tokenizer])
                    cases.append({"template": name, "tokenizer": tokenizer, "messages": messages, "generate": generate,
                                  "text": out, "ids": tok.encode(out, add_special_tokens=False).ids})
    print(json.dumps({"templates": TEMPLATES, "bos": BOS}, indent=1)[:-2] + ',\n"cases":[')
    print(",\n".join(json.dumps(c, separators=(",", ":")) for c in cases))
    print("]}")


if __name__ == "__main__":
    main()
