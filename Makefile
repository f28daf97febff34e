# The project's commands. The scripts work on a bare Debian 12, where there is no make yet.
.PHONY: build test demo bench bench-generator bench-trainer bench-sync bench-spread bench-overlap bench-pause bench-e2e bench-async same-bits simulate resume-chaos chaos trainer-chaos lint format asan tsan clang fuzz clean
build:            ; scripts/install-packages && scripts/build release
test:             ; scripts/test
demo:             ; scripts/demo $(ARGS)
# The random tests of the generator's promise with other seeds: make same-bits SEEDS=100
same-bits:        ; scripts/same-bits $(SEEDS)
# The coordinator's core through simulated runs: make simulate SEEDS=100000. A failing seed is named;
# STRETTO_SIM_SEED=n replays it and tells what happens.
SEEDS ?=
simulate:         ; scripts/build release coordinator_core_test && STRETTO_SIM_COUNT=$(or $(SEEDS),100000) build/release/tests/coordinator_core_test "whatever crashes*"
# Real processes, killed, stopped and cut off: make resume-chaos SEED=2 KILLS=20, make chaos SEED=2 STEPS=30
chaos_programs = stretto stretto-coordinator stretto-generator stretto-scorer stretto-trainer
chaos:            ; scripts/build release $(chaos_programs) && SEED=$(SEED) STEPS=$(STEPS) STALENESS=$(STALENESS) scripts/chaos
resume-chaos:     ; scripts/build release $(chaos_programs) && SEED=$(SEED) KILLS=$(KILLS) scripts/resume-chaos
# Kills trainers at random moments of a run: make trainer-chaos SEED=1
trainer-chaos:    ; scripts/trainer-chaos $(SEED)
lint:             ; scripts/lint
format:           ; scripts/lint --fix
asan:             ; scripts/build asan && ctest --test-dir build/asan --output-on-failure --no-tests=error
tsan:             ; scripts/build tsan && ctest --test-dir build/tsan --output-on-failure --no-tests=error
clang:            ; scripts/build clang && ctest --test-dir build/clang --output-on-failure --no-tests=error
fuzz:             ; scripts/fuzz $(SECONDS_EACH)
bench:            bench-device bench-trainer bench-generator
# Compares with llama.cpp and transformers as well, which it installs into build/bench/venv.
bench-generator:  ; scripts/build release bench_generator stretto && build/release/bin/bench_generator && bench/rivals/rivals.py
# Compares with PyTorch as well, which it installs into build/bench/venv.
bench-trainer:    ; scripts/build release bench_trainer && build/release/bin/bench_trainer && bench/rivals/trainer_rivals.py
# Weight deltas on real optimizer steps of SmolLM2.
bench-sync:       ; scripts/build release bench_sync stretto stretto-coordinator stretto-generator stretto-scorer stretto-trainer && bench/sync-steps
# New versions on their way to 1 to 8 generators behind rate-limited links (network namespaces: root).
bench-spread:     ; scripts/build release bench_spread stretto-generator && bench/spread
# How much of a step's communication is hidden behind its computation: two ranks on a rate-limited
# link (network namespaces: root).
bench-overlap:    ; scripts/build release bench_overlap && bench/overlap
# What new versions cost a generator that decodes 16 sequences.
bench-pause:      ; scripts/build release bench_pause && build/release/bin/bench_pause
# GRPO on SmolLM2 from end to end beside TRL, which it installs into build/bench/venv.
bench-e2e:        ; scripts/build release $(chaos_programs) && bench/e2e/e2e.py
# The tiny demo with completions of heavy-tailed length, on-policy and asynchronous.
bench-async:      ; scripts/build release $(chaos_programs) && bench/asynchrony/asynchrony.py
bench-%:          ; scripts/build release bench_$* && build/release/bin/bench_$*
clean:            ; rm -rf build/release build/debug build/asan build/tsan build/clang build/fuzz build/cuda
