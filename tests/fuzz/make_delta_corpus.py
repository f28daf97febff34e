#!/usr/bin/env python3
"""Makes the seeds of fuzz_delta: tests/fuzz/make_delta_corpus.py"""
import pathlib

OUT = pathlib.Path(__file__).parent / "corpus" / "delta"


def frame(raw):
    """A zstd frame of one raw block (RFC 8878)."""
    block = (len(raw) << 3 | 1).to_bytes(3, "little")
    return bytes.fromhex("28b52ffd20") + bytes([len(raw)]) + block + raw


def sparse(gaps, steps):
    return bytes([1, len(gaps), len(gaps), len(steps)]) + frame(bytes(gaps + steps))


def write(name, dtype, base, delta, element):
    (OUT / name).write_bytes(bytes([dtype, len(base) // element]) + base + delta)


OUT.mkdir(parents=True, exist_ok=True)
bf16 = bytes.fromhex("803f80bf0000008000c07fff7f80ff80")
f32 = bytes.fromhex("0000803f000080bf00000000000000800000c07f")
write("unchanged", 0, bf16, b"\0", 2)
write("sparse_bf16", 0, bf16, sparse([0, 1, 2], [2, 1, 4]), 2)
write("sparse_f32", 1, f32, sparse([1, 0], [3, 8]), 4)
write("whole_bf16", 0, bf16, b"\2" + frame(bf16[::-1]), 2)
write("whole_u8", 2, b"abcdef", b"\2" + frame(b"fedcba"), 1)
write("outside", 0, bf16, sparse([9], [2]), 2)
write("off_the_grid", 0, bf16, sparse([3], [255, 255, 7]), 2)
