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


def grid(group, changes, parts):
    """All classes of exponents in one group, whose gaps have no low bits to begin with."""
    head = bytes([110] + [group | group << 4] * 8 + [len(changes)])
    head += b"".join(bytes([0, count]) for count in changes)
    return b"\6" + head + bytes(len(part) for part in parts) + b"".join(parts)


def symbols(steps):
    """Elements that stay or move by a step: one context of two symbols, 512 of 1024 each."""
    state = 1 << 16
    for step in reversed(steps):
        state = (state // 512 << 10) + state % 512 + 512 * step
    return bytes([1, 255, 0, 0, 0x60, 0x11, 0x60, 4]) + state.to_bytes(4, "little")


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
write("bits", 0, bf16, b"\5" + frame(bytes([0x12, 0x0C, 2])), 2)
# Ranks 1 and 4 of 8 change, up and down; element 6 by 4 steps.
write("grid_ranks", 0, bf16, grid(0, [2], [b"\x12", b"\x01", b"", b"\x06\x08"]), 2)
write("grid_dense", 0, bf16, grid(7, [], [b"", symbols([0, 1, 1, 0, 0, 0, 1, 0]), b""]), 2)
