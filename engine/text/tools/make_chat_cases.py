#!/usr/bin/env python3
"""Writes testdata/chat.json: chat prompts as Jinja renders them and `tokenizers` encodes them, with
templates of the families' shapes and the small tokenizers of tests/golden.

Run from engine/text: tools/make_chat_cases.py > testdata/chat.json   (needs: pip install jinja2 tokenizers)
"""
import json

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

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
NL = "\n"
ALTERNATING = "{%- for message in rest %}{%- if message['role'] == 'user' %}"
SPLIT_SYSTEM = ("{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
                "{%- else %}{%- set system = false %}{%- set rest = messages %}{%- endif %}")
TEMPLATES |= {
    # One [INST] a turn between BOS and EOS, the system message inside the first.
    "llama2": SPLIT_SYSTEM + ALTERNATING +
              "{%- if loop.first and system != false %}{%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
              "{%- else %}{%- set content = message['content'] %}{%- endif %}"
              "{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
              "{%- else %}{{- ' ' + message['content'].strip() + ' ' + eos_token }}{%- endif %}{%- endfor %}",
    # The first Mistral: no system message, a space behind EOS.
    "mistral_v1": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
                  "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
                  "{{ message['content'] + eos_token + ' ' }}{% endif %}{% endfor %}",
    # Later ones: [INST] is a token, the system message stands with the last question.
    "mistral_v3": "{%- if messages[0][\"role\"] == \"system\" %}{%- set system_message = messages[0][\"content\"] %}"
                  "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
                  "{%- for message in rest %}{%- if message[\"role\"] == \"user\" %}"
                  "{%- if loop.last and system_message is defined %}{{- \"[INST] \" + system_message + \"\\n\\n\" + message[\"content\"] + \"[/INST]\" }}"
                  "{%- else %}{{- \"[INST] \" + message[\"content\"] + \"[/INST]\" }}{%- endif %}"
                  "{%- else %}{{- \" \" + message[\"content\"]|trim + eos_token }}{%- endif %}{%- endfor %}",
    # And before the first one.
    "mistral_first": "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
                     "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
                     "{%- for message in rest %}{%- if message['role'] == 'user' %}"
                     "{%- if loop.first and system_message is defined %}{{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}"
                     "{%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}"
                     "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}",
    "gemma2": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
              "{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
              "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "gemma3": "{{ bos_token }}" + SPLIT_SYSTEM +
              "{%- for message in rest %}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
              "{{- '<start_of_turn>' + role + '\n' + (system + '\n\n' if loop.first and messages[0]['role'] == 'system' else '') }}"
              "{{- message['content'] | trim }}{{- '<end_of_turn>\n' }}{%- endfor %}"
              "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}",
    "phi3": "{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}"
            "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}"
            "{% else %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "phi4": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    "zephyr": NL.join(["{% for message in messages %}", "{% if message['role'] == 'user' %}", "{{ '<|user|>\n' + message['content'] + eos_token }}",
                       "{% elif message['role'] == 'system' %}", "{{ '<|system|>\n' + message['content'] + eos_token }}",
                       "{% else %}", "{{ '<|assistant|>\n' + message['content'] + eos_token }}", "{% endif %}",
                       "{% if loop.last and add_generation_prompt %}", "{{ '<|assistant|>' }}", "{% endif %}", "{% endfor %}"]),
    "deepseek": "{%- set ns = namespace(system='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
                "{%- set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}{{- bos_token + ns.system }}"
                "{%- for message in messages %}{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}"
                "{%- elif message['role'] == 'assistant' %}{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token }}{%- endif %}{%- endfor %}"
                "{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}",
    # Qwen3's shape: thoughts of answers before the last question are left out.
    "qwen3": "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
             "{%- for message in messages %}{%- if message.role != 'assistant' %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
             "{%- else %}{%- set content = message.content %}{%- set thought = '' %}{%- if '</think>' in content %}"
             "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
             "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
             "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
             "{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}"
             "{%- else %}{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
             "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
             "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
}
# What templates that ask a clock are told (kChatDate in engine/text/chat_template.h).
DATES = {"%Y-%m-%d": "2025-01-01", "%d %B %Y": "01 January 2025"}
MISTRAL_V7 = ("{%- for message in rest %}{%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}"
              "{%- elif message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}"
              "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}{%- endif %}{%- endfor %}")
TEMPLATES |= {
    # Mistral Large 2411's shape: system messages between markers of their own, spaces behind them.
    "mistral_v7": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
                  "{% elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT] ' + message['content'] + '[/SYSTEM_PROMPT]' }}"
                  "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}",
    # Mistral Small 3's: no spaces, and a system message with the date where there is none.
    "mistral_v7_dated": "{%- set today = strftime_now(\"%Y-%m-%d\") %}{%- set default_system_message = \"You are Mistral.\\nIt is \" + today + \".\\n\\n"
                        "Ask back (e.g. \\\"What do you mean?\\\" => \\\"This.\\\")\" %}{{- bos_token }}"
                        "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set rest = messages[1:] %}"
                        "{%- else %}{%- set system_message = default_system_message %}{%- set rest = messages %}{%- endif %}"
                        "{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}" + MISTRAL_V7,
    # SmolLM3's shape: a system message that is always there and says whether the model thinks.
    "smollm3": NL.join([
        "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}",
        "{%- set reasoning_mode = \"/think\" if enable_thinking else \"/no_think\" -%}", "{{- \"<|im_start|>system\\n\" -}}",
        "{%- if messages[0].role == \"system\" -%}", "  {%- set system_message = messages[0].content -%}",
        "  {%- if \"/no_think\" in system_message -%}", "    {%- set reasoning_mode = \"/no_think\" -%}",
        "  {%- elif \"/think\" in system_message -%}", "    {%- set reasoning_mode = \"/think\" -%}", "  {%- endif -%}",
        "  {%- set custom = system_message.replace(\"/no_think\", \"\").replace(\"/think\", \"\").rstrip() -%}", "{%- endif -%}",
        "{%- if \"/system_override\" in system_message -%}", "  {{- custom.replace(\"/system_override\", \"\").rstrip() + \"<|im_end|>\\n\" -}}",
        "{%- else -%}", "  {{- \"## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\n\" -}}", "  {%- set today = strftime_now(\"%d %B %Y\") -%}",
        "  {{- \"Today Date: \" ~ today ~ \"\\n\" -}}", "  {{- \"Reasoning Mode: \" + reasoning_mode + \"\\n\\n\" -}}",
        "  {{- \"## Custom Instructions\\n\\n\" -}}", "  {%- if custom -%}", "    {{- custom + \"\\n\\n\" -}}",
        "  {%- elif reasoning_mode == \"/think\" -%}", "    {{- \"You are thorough: <think> a thought </think> a solution.\\n\\n\" -}}",
        "  {%- else -%}", "    {{- \"You are brief.\\n\\n\" -}}", "  {%- endif -%}", "  {{- \"<|im_end|>\\n\" -}}", "{%- endif -%}",
        "{%- for message in messages -%}", "  {%- if message.role == \"user\" -%}",
        "    {{ \"<|im_start|>user\\n\" + message.content + \"<|im_end|>\\n\" }}", "  {%- elif message.role == \"assistant\" -%}",
        "    {{ \"<|im_start|>assistant\\n\" + (\"\" if reasoning_mode == \"/think\" else \"<think>\\n\\n</think>\\n\") -}}",
        "    {{ message.content.lstrip(\"\\n\") + \"<|im_end|>\\n\" }}", "  {%- endif -%}", "{%- endfor -%}",
        "{%- if add_generation_prompt -%}", "  {{ \"<|im_start|>assistant\\n\" + (\"\" if reasoning_mode == \"/think\" else \"<think>\\n\\n</think>\\n\") }}",
        "{%- endif -%}"]),
}
# Which tokenizer writes a family, and the tokens that it gets for it (with rstrip: Phi-3's).
FAMILIES = {
    "llama2": ("llama2", []), "mistral_v1": ("llama2", []), "zephyr": ("llama2", []),
    "mistral_v3": ("llama2", ["[INST]", "[/INST]"]), "mistral_first": ("llama2", []),
    "gemma2": ("llama2", ["<start_of_turn>", "<end_of_turn>"]), "gemma3": ("metaspace", ["<start_of_turn>", "<end_of_turn>"]),
    "phi3": ("llama2", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]), "phi4": ("qwen2", ["<|im_sep|>"]),
    "deepseek": ("llama3", ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]), "qwen3": ("qwen2", ["<think>", "</think>"]),
    "mistral_v7": ("llama2", ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]),
    "mistral_v7_dated": ("llama2", ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]), "smollm3": ("qwen2", ["<think>", "</think>"]),
}
NO_THINK = {"qwen3": "qwen3-nothink", "smollm3": "smollm3-nothink"}
NO_SYSTEM = ("mistral_v1", "gemma2")
THOUGHTS = [[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
             {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\nagain\n\n</think>\n\n4"}],
            [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
             {"role": "user", "content": "2+2?"}]]
USER = {"role": "user", "content": "What is 17 plus 25?"}
CHATS = [
    [USER],
    [{"role": "system", "content": "You add numbers."}, USER],
    [USER, {"role": "assistant", "content": "42"}, {"role": "user", "content": "\n\n  And\ttwice?  \n"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "日本語 e\u0301 \u00a0\u2003x\u001c"}, {"role": "assistant", "content": " "}],
]
# Of these the last message is left open, as continue_final_message of transformers does it.
OPEN = [[USER, {"role": "assistant", "content": "The sum is"}], [USER, {"role": "assistant", "content": " It is:\n"}],
        [{"role": "system", "content": "You add numbers."}, {"role": "user", "content": "17 and "}]]
SWITCHES = [[{"role": "system", "content": text}, USER, {"role": "assistant", "content": "\n42"}]
            for text in ("Be brief. /no_think", "/think Be brief.\n", "Only this. /system_override", "/no_think/system_override A ")]
BOS = {"qwen2": "<|endoftext|>", "smollm2_style": "<|endoftext|>", "llama3": "<|begin_of_text|>", "llama2": "<s>", "metaspace": "<s>"}
EOS = {"llama2": "</s>", "metaspace": "</s>"}  # elsewhere the same as BOS


def open_last(rendered, content):
    at = rendered.rindex(content.strip())
    if rendered[at:at + len(content.lstrip())] == content:
        return rendered[:at + len(content)]
    return rendered[:at + len(content.strip())]


def open_cases(env, name, tokenizer, tok, common):
    for messages in OPEN:
        if name in NO_SYSTEM and messages[0]["role"] == "system":
            continue
        out = env.from_string(TEMPLATES[name]).render(messages=messages, add_generation_prompt=False, bos_token=BOS[tokenizer],
                                                      eos_token=EOS.get(tokenizer, BOS[tokenizer]))
        out = open_last(out, messages[-1]["content"])
        yield common | {"messages": messages, "generate": False, "open": True, "text": out, "ids": tok.encode(out, add_special_tokens=False).ids}


def cases_of_family(env, name):
    tokenizer, extra = FAMILIES[name]
    tok = Tokenizer.from_file(f"../../tests/golden/tokenizers/{tokenizer}.tokenizer.json")
    tok.add_special_tokens([AddedToken(t, rstrip=name == "phi3", normalized=False) for t in extra])
    for messages in CHATS + (THOUGHTS if name in ("qwen3", "deepseek") else []) + (SWITCHES if name == "smollm3" else []):
        if name in NO_SYSTEM and messages[0]["role"] == "system":
            continue
        for generate, thinks in ((True, True), (False, True)) + (((True, False),) if name in NO_THINK else ()):
            out = env.from_string(TEMPLATES[name]).render(messages=messages, add_generation_prompt=generate, bos_token=BOS[tokenizer],
                                                          eos_token=EOS.get(tokenizer, BOS[tokenizer]), enable_thinking=thinks)
            yield {"template": name, "tokenizer": tokenizer, "extra": extra, "rstrip": name == "phi3",
                   "format": "" if thinks else NO_THINK[name], "messages": messages, "generate": generate, "text": out,
                   "ids": tok.encode(out, add_special_tokens=False).ids}
    yield from open_cases(env, name, tokenizer, tok, {"template": name, "tokenizer": tokenizer, "extra": extra, "rstrip": name == "phi3"})


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as transformers has it
    env.globals["strftime_now"] = DATES.__getitem__
    cases = []
    for name, text in TEMPLATES.items():
        if name in FAMILIES:
            cases += cases_of_family(env, name)
            continue
        for tokenizer in ("llama3",) if name.startswith("llama3") else ("qwen2", "smollm2_style"):
            tok = Tokenizer.from_file(f"../../tests/golden/tokenizers/{tokenizer}.tokenizer.json")
            for messages in CHATS:
                for generate in (True, False):
                    out = env.from_string(text).render(messages=messages, add_generation_prompt=generate,
                                                       bos_token=BOS[tokenizer])
                    cases.append({"template": name, "tokenizer": tokenizer, "messages": messages, "generate": generate,
                                  "text": out, "ids": tok.encode(out, add_special_tokens=False).ids})
            cases += open_cases(env, name, tokenizer, tok, {"template": name, "tokenizer": tokenizer})
    print(json.dumps({"templates": TEMPLATES, "bos": BOS, "eos": EOS}, indent=1)[:-2] + ',\n"cases":[')
    print(",\n".join(json.dumps(c, separators=(",", ":")) for c in cases))
    print("]}")


if __name__ == "__main__":
    main()
