#!/usr/bin/env python3
"""Makes the seeds of fuzz_tokenizer_json (small files that use every part of the format) and of
fuzz_tokenizer_text (a byte that chooses the tokenizer, then a line of the golden corpus)."""
import json
import pathlib

HERE = pathlib.Path(__file__).parent
CORPUS = HERE / "corpus"
MARK = "\u2581"


def bpe(vocab, merges, **settings):
    return dict({"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                 "vocab": {t: i for i, t in enumerate(vocab)}, "merges": merges}, **settings)


def added(token_id, content, **flags):
    return dict({"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": False}, **flags)


def seq(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def byte_level():
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def files():
    letters = list("Helo wrdaĠĊÃĤ")
    yield "byte_level", {
        "version": "1.0", "added_tokens": [added(16, "<s>", special=True), added(17, "</s>", rstrip=True, normalized=True)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": seq("pretokenizers", {"type": "Digits", "individual_digits": True},
                             {"type": "Split", "pattern": {"Regex": r"\s+(?!\S)|[^\r\n\p{L}]?\p{L}+"},
                              "behavior": "Isolated", "invert": False}, byte_level()),
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [16], "tokens": ["<s>"]}}},
        "decoder": byte_level(), "model": bpe(letters + ["He", "Hel"], ["H e", "He l"], ignore_merges=True)}
    chars = ["<unk>", MARK, "a", "b", "<0xFF>", "<0xE6>", "<0x97>", "<0xA5>", "aa"]
    yield "sentencepiece", {
        "added_tokens": [added(0, "<unk>", special=True), added(9, "<s>", single_word=True, lstrip=True)],
        "normalizer": seq("normalizers", {"type": "Prepend", "prepend": MARK},
                          {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
                          {"type": "Strip", "strip_left": True, "strip_right": False}),
        "decoder": seq("decoders", {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
                       {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}),
        "model": bpe(chars, [["a", "a"]], unk_token="<unk>", fuse_unk=True, byte_fallback=True)}
    yield "metaspace", {
        "added_tokens": [], "normalizer": seq("normalizers", {"type": "NFKD"}, {"type": "Lowercase"}),
        "pre_tokenizer": seq("pretokenizers", {"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "Contiguous"},
                             {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": True}),
        "decoder": {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True},
        "post_processor": seq("processors", byte_level()),
        "model": bpe(["?", "a", "##a", "##a@@", "a##"], [], unk_token="?", continuing_subword_prefix="##", end_of_word_suffix="@@")}


def main():
    for kind in ("tokenizer_json", "tokenizer_text"):
        (CORPUS / kind).mkdir(parents=True, exist_ok=True)
    for name, content in files():
        (CORPUS / "tokenizer_json" / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))
    lines = json.loads((HERE.parent / "golden" / "tokenizers" / "corpus.json").read_text())
    chosen = sorted(lines, key=lambda t: -sum(ord(c) > 0x7F for c in t))[:14] + lines[::40]
    for i, line in enumerate(chosen):
        (CORPUS / "tokenizer_text" / f"{i:02}").write_bytes(bytes([i % 7]) + line.encode())


if __name__ == "__main__":
    main()
