#!/usr/bin/env python3
"""Trains small tokenizers on the corpus and writes what Hugging Face `tokenizers` makes of it.

For each NAME in TOKENIZERS: tokenizers/NAME.tokenizer.json and tokenizers/NAME.golden.json with
  lines:  per line of corpus.json
            ids        encode(line, add_special_tokens=True)
            ids_plain  the same with False, where it differs
            text       decode(ids, skip_special_tokens=False)
            text_skip  decode(ids, skip_special_tokens=True), where it differs from text
  decode: {ids, text, text_skip} of random id sequences, many of which are not valid UTF-8.
With a folder that holds another tokenizer.json (SmolLM2's), also tokenizers/smollm2_ids.json in the
same layout, without the tokenizer itself.
Usage: make_tokenizers.py [--only NAME] [--smollm2 FOLDER]
"""

import argparse
import collections
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent / "tokenizers"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
         r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def corpus():
    return json.loads((HERE / "corpus.json").read_text(encoding="utf-8"))


def special(text, **kw):
    return AddedToken(text, special=True, normalized=kw.pop("normalized", False), **kw)


def plain(text, **kw):
    return AddedToken(text, special=False, normalized=kw.pop("normalized", False), **kw)


def train_byte_level(vocab_size, pre, normalizer=None, first=(), ignore_merges=False):
    tok = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tok.normalizer = normalizer
    tok.pre_tokenizer = pre
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, show_progress=False,
                                  initial_alphabet=alphabet, special_tokens=list(first))
    tok.train_from_iterator(corpus(), trainer)
    return tok


def edit(tok, change):
    """The tokenizer after a change of its tokenizer.json."""
    data = json.loads(tok.to_str())
    change(data)
    return Tokenizer.from_str(json.dumps(data))


def make_gpt2():
    """GPT-2: ByteLevel with its own pattern; every kind of added token."""
    tok = train_byte_level(900, pre_tokenizers.ByteLevel(add_prefix_space=False),
                           first=[special("<|endoftext|>")])
    tok.add_special_tokens([special("<mask>", lstrip=True), special("[RS]", rstrip=True),
                            special("[BOTH]", lstrip=True, rstrip=True)])
    tok.add_tokens([plain("stretto", single_word=True), plain("NORM", normalized=True),
                    plain("longtok"), plain("longtokens"), plain("<|long"), plain("<|long|>"),
                    plain("<|longer|>"), plain("  leading")])
    return tok


def make_llama3():
    """Llama 3: Split, then ByteLevel without a pattern; ignore_merges; a template with BOS."""
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    tok = train_byte_level(900, pre, ignore_merges=True)

    def unreachable(data):
        # Words that no merge makes: only ignore_merges finds them.
        vocab = data["model"]["vocab"]
        for word in ["Ġinternationalization", "internationalization", "Ġbrown", "Ġtrailing", "hello", "ĠHello"]:
            vocab.setdefault(word, len(vocab))

    tok = edit(tok, unreachable)
    tok.add_special_tokens([special(t) for t in [
        "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|start_header_id|>",
        "<|end_header_id|>", "<|eot_id|>"]])
    bos = ("<|begin_of_text|>", tok.token_to_id("<|begin_of_text|>"))
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]}:1 $B:1",
                                      special_tokens=[bos])])
    return tok


def make_qwen2():
    """Qwen2: NFC, one digit a piece, added tokens that are not special."""
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tok = train_byte_level(1000, pre, normalizer=normalizers.NFC())
    tok.add_special_tokens([special(t) for t in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]])
    tok.add_tokens([plain(t) for t in ["<tool_call>", "</tool_call>", "<think>", "</think>"]] +
                   [plain("cafe\u0301_tok", normalized=True)])
    return tok


def make_smollm2_style():
    """SmolLM2: single digits, then ByteLevel with its pattern; specials first in the vocabulary."""
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)])
    return train_byte_level(800, pre, first=[special(t) for t in [
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]])


def train_sentencepiece(vocab_size):
    """Vocabulary and merges of a BPE over "▁" words, with Llama's 3 + 256 first entries."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, show_progress=False,
                                  special_tokens=["<unk>", "<s>", "</s>"])
    # The rarer characters have no entry and fall back to bytes. (The trainer's own limit_alphabet
    # breaks ties by chance.)
    counts = collections.Counter("".join(corpus()))
    common = set(sorted(counts, key=lambda c: (-counts[c], c))[:220])
    tok.train_from_iterator(["".join(c for c in line if c in common) for line in corpus()], trainer)
    model = json.loads(tok.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    # A run of spaces is one piece in such vocabularies; made here by merges of "▁".
    merges = [tuple(m) for m in model["merges"]]
    for a, b in [("▁", "▁"), ("▁▁", "▁▁"), ("▁▁▁▁", "▁▁▁▁")]:
        if (a, b) not in merges:
            merges.append((a, b))
        model["vocab"].setdefault(a + b, 1 << 20)
    names += [t for t, _ in sorted(model["vocab"].items(), key=lambda kv: kv[1]) if t not in names]
    return {name: i for i, name in enumerate(names)}, merges


def sentencepiece_model():
    vocab, merges = train_sentencepiece(700)
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True,
                                byte_fallback=True))


def template(tok, single):
    tokens = [t for t in single.split() if t != "$A"]
    return processors.TemplateProcessing(single=single, special_tokens=[
        (t, tok.token_to_id(t)) for t in dict.fromkeys(tokens)])


def make_llama2():
    """Llama 2 as converted with legacy=true: normalizer Prepend and Replace, no pre-tokenizer."""
    tok = sentencepiece_model()
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                     decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok.add_special_tokens([special(t) for t in ["<unk>", "<s>", "</s>"]])
    tok.add_tokens([plain("<tool_call>"), plain("<think>", normalized=True)])
    tok.post_processor = template(tok, "<s> $A")
    return tok


def make_metaspace():
    """Llama 2 or Mistral with legacy=false: Metaspace, prepended to the first piece, no split."""
    tok = sentencepiece_model()
    tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                     decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok.add_special_tokens([special(t) for t in ["<unk>", "<s>", "</s>"]])
    tok.post_processor = template(tok, "<s> $A </s>")
    return tok


def make_metaspace_always():
    """Metaspace with prepend_scheme "always" and split, and the Metaspace decoder."""
    tok = sentencepiece_model()
    tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tok.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(
        replacement="▁", prepend_scheme="always", split=True)])
    tok.add_special_tokens([special(t) for t in ["<unk>", "<s>", "</s>"]])
    return tok


TOKENIZERS = {
    "gpt2": make_gpt2, "llama3": make_llama3, "qwen2": make_qwen2, "smollm2_style": make_smollm2_style,
    "llama2": make_llama2, "metaspace": make_metaspace, "metaspace_always": make_metaspace_always,
}
OLD_MERGES = {"gpt2", "llama2"}  # written as "a b", as files before tokenizers 0.20 have them


def decoded(tok, ids):
    text = tok.decode(ids, skip_special_tokens=False)
    skip = tok.decode(ids, skip_special_tokens=True)
    return {"text": text} if skip == text else {"text": text, "text_skip": skip}


def golden(tok, seed, num_random=60):
    lines = []
    for line in corpus():
        ids = tok.encode(line, add_special_tokens=True).ids
        ids_plain = tok.encode(line, add_special_tokens=False).ids
        entry = {"ids": ids}
        if ids_plain != ids:
            entry["ids_plain"] = ids_plain
        lines.append(entry | decoded(tok, ids))
    rng = random.Random(seed)
    decode = []
    for i in range(num_random):
        # Half from the first 300 ids, where the bytes are; half from everywhere.
        top = min(300, tok.get_vocab_size()) if i % 2 else tok.get_vocab_size()
        ids = [rng.randrange(top) for _ in range(rng.randrange(1, 16))]
        decode.append({"ids": ids} | decoded(tok, ids))
    return lines, decode


def write_golden(path, lines, decode):
    def rows(items):
        return ",\n".join(json.dumps(x, ensure_ascii=True, separators=(",", ":")) for x in items)

    path.write_text(f'{{"lines":[\n{rows(lines)}\n],\n"decode":[\n{rows(decode)}\n]}}\n', encoding="ascii")


def save(tok, name):
    data = json.loads(tok.to_str())
    if name in OLD_MERGES:
        data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
    text = json.dumps(data, ensure_ascii=False, indent=None, separators=(",", ":"))
    path = HERE / f"{name}.tokenizer.json"
    path.write_text(text + "\n", encoding="utf-8")
    return Tokenizer.from_file(str(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--smollm2", help="folder with SmolLM2's tokenizer.json")
    args = parser.parse_args()
    for i, (name, make) in enumerate(TOKENIZERS.items()):
        if args.only in (None, name):
            tok = save(make(), name)
            write_golden(HERE / f"{name}.golden.json", *golden(tok, seed=i))
            print(name, "vocabulary", tok.get_vocab_size())
    if args.smollm2:
        tok = Tokenizer.from_file(str(pathlib.Path(args.smollm2) / "tokenizer.json"))
        write_golden(HERE / "smollm2_ids.json", *golden(tok, seed=99))
        print("smollm2_ids", tok.get_vocab_size())


if __name__ == "__main__":
    main()
