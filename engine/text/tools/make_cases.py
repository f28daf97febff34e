#!/usr/bin/env python3
"""Writes cases for pipeline_cases_test from Hugging Face's `tokenizers`: every step of a
tokenizer.json in many settings, on texts chosen to upset it.

Run: tools/make_cases.py > testdata/cases.json          (needs: pip install tokenizers)
     tools/make_cases.py SEED NUM > FILE                random combinations instead, for a longer run:
     STRETTO_TEXT_CASES=FILE pipeline_cases_test
"""
import json
import random
import sys

from tokenizers import Tokenizer, models, trainers

TEXTS = [
    "", " ", "a", "Hello world", " Hello  world ", "\n\n \n a\n", "tab\tand\r\nlines\r\n",
    "don't I'LL we've HE'S it'ſ", "x=1234567890, 3.14; ½ Ⅷ ٣٤٥ ２", "foo_bar-baz (qux) [x]{y} $5 <a>^`|~+",
    "e\u0301 \u00e9 A\u030a \u212b \u1e69 s\u0323\u0307 s\u0307\u0323 q\u0307\u0323", "\ufb01 \u2460 \u00bd \uff21 \u3392",
    "\u1100\u1161\u11a8 \uac01 \uac00\u11a8 \ud55c\uad6d\uc5b4", "ΑΣ ΣΑΣ İstanbul ǅ ẞ Ⅷ", "日本語 テスト、がｶﾞ", "مرحبا بالعالم",
    "नमस्ते दुनिया", "👩‍👩‍👧 👍🏽 🇫🇷 x", "\u00a0nbsp\u2003em\u3000ideo\u180emvs\u200bzw\u0085nel\u2028ls",
    "<s>a</s> <tok> <tok>b x<tok>y  <tok>  z", "<|im_end|>", "<TOK>lower</TOK> word aword words word", "▁▁ a▁b ▁", "\x00\x1f\x7f",
    "aaaa aaaaa aaaaaaaa", "the the there theatre other", "ab" * 20, "   " * 9 + "x", "hug hugs hugging\u0301",
]
EXTRA = ["Strip me \u00a0", "ÀÉ", "0x1F", "“quotes” — dash…", "𝒳𝟘", "\u0301lone", "mixed日本and語", "a\u0300\u0301\u0327b"]
MARK = "\u2581"


def train(vocab_size, alphabet=None, **kw):
    tok = Tokenizer(models.BPE(**kw))
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, min_frequency=2,
                                  initial_alphabet=alphabet or [])
    lines = [t.replace("\u0301", "") for t in TEXTS[:20]] + TEXTS[24:]
    corpus = [x for t in lines for x in (t, t + t, t.lower(), t.replace(" ", MARK), MARK + t, t[1:], t[:-1])]
    tok.train_from_iterator(corpus * 2, trainer)
    return json.loads(tok.to_str())["model"]


def byte_model():
    from tokenizers import normalizers, pre_tokenizers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, min_frequency=2,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tok.train_from_iterator([x for t in TEXTS + EXTRA for x in (t, t + t, " " + t)] * 2, trainer)
    return json.loads(tok.to_str())["model"]


def add(model, tokens):
    for t in tokens:
        model["vocab"].setdefault(t, len(model["vocab"]))
    return model


def make_models():
    out = {"byte": byte_model(), "char": train(450)}
    for name, settings in {
        "char_unk": {"unk_token": "<unk>"}, "char_fuse": {"unk_token": "<unk>", "fuse_unk": True},
        "fallback": {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
        "fallback_part": {"unk_token": "<unk>", "byte_fallback": True},
    }.items():
        model = json.loads(json.dumps(out["char"]))
        keep = {t for t in model["vocab"] if len(t) > 1 or ord(t) < 0x370 or t == MARK}
        model["merges"] = [m for m in model["merges"] if all(c in keep for c in [*m, "".join(m)])]
        kept = sorted((i, t) for t, i in model["vocab"].items() if t in keep)
        model["vocab"] = {t: n for n, (_, t) in enumerate(kept)}
        bytes_ = range(256) if name == "fallback" else range(0, 256, 2)
        add(model, ["<unk>"] + ([f"<0x{b:02X}>" for b in bytes_] if "fallback" in name else []))
        model.update(settings)
        out[name] = model
    out["ignore"] = dict(json.loads(json.dumps(out["byte"])), ignore_merges=True)
    add(out["ignore"], ["ĠworldĠ", "ĠHelloĠĠworldĠ", "theĠtheĠ"])
    out["affix"] = {"type": "BPE", "continuing_subword_prefix": "##", "end_of_word_suffix": "@@", "unk_token": "?",
                    "vocab": {t: i for i, t in enumerate(
                        ["?", "h", "##u", "##g", "##g@@", "a@@", "hu", "hug@@", "##s@@", "hug", "t", "##h", "th", "##e@@", "the@@"])},
                    "merges": [["h", "##u"], ["hu", "##g@@"], ["hu", "##g"], ["t", "##h"], ["th", "##e@@"]]}
    return out


def token(content, **kw):
    return dict({"id": 0, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": False}, **kw)


def re_(r):
    return {"Regex": r}


def seq(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def byte_level(prefix=False, regex=True):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def metaspace(scheme, cut=True):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": cut}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


BEHAVIORS = ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
NORMALIZERS = [{"type": t} for t in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")] + [
    {"type": "Strip", "strip_left": True, "strip_right": False}, {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Prepend", "prepend": MARK}, replace({"String": " "}, MARK), replace(re_(r"\s+"), " "),
    replace(re_("[aeiou]"), ""), replace({"String": "aa"}, "b"),
    seq("normalizers", {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Strip", "strip_left": True, "strip_right": True})]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
          r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
PRES = [split(re_(p), b, i) for b in BEHAVIORS for i in (False, True) for p in (r"\s+", "[a-m]")] + [
    split({"String": p}, b) for b in BEHAVIORS for p in (" ", "aa", ".")] + [
    split(re_(r"\w+|[^\w\s]+")), split(re_(r"^.|[^\S\n]+$")), split(re_("a*"), "Removed"), split(re_(LLAMA3)), split(re_(TEKKEN)),
    {"type": "Digits", "individual_digits": True}, {"type": "Digits", "individual_digits": False}, {"type": "Whitespace"},
    {"type": "WhitespaceSplit"}] + [{"type": "Punctuation", "behavior": b} for b in BEHAVIORS] + [
    metaspace(s, c) for s in ("always", "first", "never") for c in (True, False)] + [
    seq("pretokenizers", {"type": "WhitespaceSplit"}, {"type": "Digits", "individual_digits": True}, metaspace("first")),
    seq("pretokenizers", {"type": "Punctuation", "behavior": "Removed"}, metaspace("always"))]
BYTE_PRES = [byte_level(p, r) for p in (False, True) for r in (False, True)] + [
    seq("pretokenizers", {"type": "Digits", "individual_digits": True}, byte_level()),
    seq("pretokenizers", split(re_(LLAMA3)), byte_level(False, False)),
    seq("pretokenizers", split(re_(TEKKEN), "Removed", True), byte_level(False, False)),
    seq("pretokenizers", {"type": "WhitespaceSplit"}, byte_level(True, True))]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
DECODERS = [None, byte_level(), {"type": "Fuse"}, {"type": "ByteFallback"}, metaspace("always"), metaspace("never"),
            metaspace("first"), seq("decoders", replace({"String": MARK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP),
            seq("decoders", {"type": "Fuse"}, replace({"String": "aa"}, "b")), seq("decoders", {"type": "Fuse"}, {"type": "ByteFallback"}),
            seq("decoders", byte_level(), dict(STRIP, start=2)), seq("decoders", {"type": "Fuse"}, metaspace("always")),
            seq("decoders", replace(re_("[aeiou]"), "")), dict(STRIP, content="a", start=1), seq("decoders")]
ADDED = [token("<s>", special=True), token("</s>", special=True), token("<tok>", lstrip=True), token("<|im_end|>", special=True),
         token("word", single_word=True, normalized=True), token("theatre", normalized=True), token("  ", normalized=False),
         token("<", normalized=False), token("a</s>", rstrip=True), token("É", normalized=True)]


def default_decoder(model):
    return byte_level() if model in ("byte", "ignore") else {"type": "Fuse"}


def build(models_, name, rng, normalizer=None, pre=None, decoder="default", added=(), template=False, flip=False):
    model = models_[name]
    next_id = max(model["vocab"].values()) + 1
    tokens = []
    for t in added:
        t = dict(t)
        if flip:
            for key in ("lstrip", "rstrip", "single_word", "normalized"):
                t[key] = rng.random() < 0.4
        t["id"] = model["vocab"].get(t["content"], next_id)
        next_id += t["id"] == next_id
        tokens.append(t)
    post = None
    if template and added:
        special = lambda t: {"SpecialToken": {"id": t["content"], "type_id": 0}}
        first, last = tokens[0], tokens[1]
        post = {"type": "TemplateProcessing", "single": [special(first), {"Sequence": {"id": "A", "type_id": 0}}, special(last)],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {t["content"]: {"id": t["content"], "ids": [t["id"]], "tokens": [t["content"]]} for t in (first, last)}}
        post = seq("processors", byte_level(), post)
    sections = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": normalizer,
                "pre_tokenizer": pre, "post_processor": post,
                "decoder": default_decoder(name) if decoder == "default" else decoder}
    return {"model": name, "sections": sections}


def fill(case, models_, rng, num_texts):
    """Adds what the library makes of texts and random ids; None when the library itself fails."""
    tok = Tokenizer.from_str(json.dumps(dict(case["sections"], model=models_[case["model"]])))
    size = tok.get_vocab_size()
    texts = TEXTS + EXTRA
    if num_texts < len(texts):
        texts = rng.sample(texts, num_texts)
    rows = []
    for text in texts:
        tok.encode_special_tokens = True
        plain = tok.encode(text, add_special_tokens=False).ids
        tok.encode_special_tokens = False
        ids = tok.encode(text).ids
        rows.append({"text": text, "ids": ids, "as_text": plain} if plain != ids else {"text": text, "ids": ids})
    decode = []
    for k in range(4):
        ids = [rng.randrange(size + 2) for _ in range(rng.randrange(9))] if k else rows[-1]["ids"]
        decode.append({"ids": ids, "text": tok.decode(ids, skip_special_tokens=False), "skip": tok.decode(ids)})
    return dict(case, rows=rows, decode=decode)


def fixed_cases(models_, rng):
    chars = ["char", "char_unk", "char_fuse", "fallback", "fallback_part"]
    for i, n in enumerate(NORMALIZERS):
        yield build(models_, chars[i % len(chars)], rng, normalizer=n)
    yield build(models_, "byte", rng, normalizer={"type": "ByteLevel"})
    for i, p in enumerate(PRES):
        yield build(models_, chars[i % len(chars)], rng, pre=p)
    for i, p in enumerate(BYTE_PRES):
        yield build(models_, ("byte", "ignore")[i % 2], rng, pre=p, added=ADDED[:4], template=True)
    for i, d in enumerate(DECODERS):
        yield build(models_, ("fallback", "char_fuse", "byte")[i % 3], rng, decoder=d, added=ADDED[:3])
    yield build(models_, "affix", rng, pre={"type": "WhitespaceSplit"})
    for i in range(10):
        n = [None, NORMALIZERS[4], NORMALIZERS[7], NORMALIZERS[12]][i % 4]
        yield build(models_, ("byte", "fallback")[i % 2], rng, normalizer=n, pre=[byte_level(), metaspace("first")][i % 2],
                    added=ADDED, flip=i > 3, template=i % 3 == 0)


def random_cases(models_, rng, num):
    for _ in range(num):
        name = rng.choice([m for m in models_ if m != "affix"])
        pres = BYTE_PRES if name in ("byte", "ignore") else PRES
        yield build(models_, name, rng, normalizer=rng.choice([None] + NORMALIZERS), pre=rng.choice([None] + pres),
                    decoder=rng.choice(DECODERS), added=rng.sample(ADDED, rng.randrange(2, len(ADDED) + 1)), flip=True,
                    template=rng.random() < 0.3)


def main():
    models_ = make_models()
    many = len(sys.argv) > 2
    rng = random.Random(int(sys.argv[1]) if many else 7)
    cases = list(random_cases(models_, rng, int(sys.argv[2])) if many else fixed_cases(models_, rng))
    filled = []
    for case in cases:
        try:
            filled.append(fill(case, models_, rng, 99 if many else 16))
        except BaseException as e:  # a panic of the library
            print("skipped:", type(e).__name__, str(e)[:200], json.dumps(case["sections"])[:600], file=sys.stderr)
    print('{"models":{')
    print(",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in models_.items()))
    print('},"cases":[')
    print(",\n".join(json.dumps(c, separators=(",", ":")) for c in filled))
    print("]}")


if __name__ == "__main__":
    main()
