"""llama.cpp as a worker of rivals.py: llama_worker.py MODEL THREADS."""
import ctypes
import os
import sys
import time

import llama_cpp as ll


def quiet(level, text, data):
    del level, text, data


def decode(context, batch):
    if ll.llama_decode(context, batch) != 0:
        sys.exit("llama_decode failed")


def fill(batch, rows):
    """rows: (token, position, sequence, whether its logits are wanted)."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, logits) in enumerate(rows):
        batch.token[i] = token
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = logits


def measure(context, batch, sequences, prompt, new):
    ll.llama_memory_clear(ll.llama_get_memory(context), True)
    begin = time.monotonic()
    rows = [((s * 7919 + i * 31) % 49152, i, s, i == prompt - 1)
            for s in range(sequences) for i in range(prompt)]
    for first in range(0, len(rows), 512):
        fill(batch, rows[first:first + 512])
        decode(context, batch)
    ll.llama_synchronize(context)
    prompts_done = time.monotonic()
    for step in range(new - 1):
        fill(batch, [((s * 31 + step) % 49152, prompt + step, s, True) for s in range(sequences)])
        decode(context, batch)
        ll.llama_synchronize(context)
    end = time.monotonic()
    return prompts_done - begin, end - prompts_done, sequences * (new - 1)


def main():
    path, threads = sys.argv[1], int(sys.argv[2])
    callback = ll.llama_log_callback(quiet)
    ll.llama_log_set(callback, ctypes.c_void_p(0))
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(os.fsencode(path), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx = 32 * 256
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = 32
    params.n_threads = params.n_threads_batch = threads
    if hasattr(params, "kv_unified"):
        params.kv_unified = True
    context = ll.llama_init_from_model(model, params)
    if not model or not context:
        sys.exit("llama.cpp could not open " + path)
    batch = ll.llama_batch_init(512, 0, 1)
    print("ready", flush=True)
    for line in sys.stdin:
        _, sequences, prompt, new = line.split()
        seconds = measure(context, batch, int(sequences), int(prompt), int(new))
        print("%.6f %.6f %d" % seconds, flush=True)


main()
