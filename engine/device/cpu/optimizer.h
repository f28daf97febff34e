// The optimizer's step and the gradient's norm over contiguous tensors.
#pragma once

#include "engine/device/cpu/kernels.h"
#include "engine/device/cpu/thread_pool.h"
#include "engine/device/device.h"

namespace stretto::engine::cpu {
struct AdamWTensors {
  Tensor weights, master, m, v, grad;
};
void AdamWUpdate(const Kernels& kernels, ThreadPool& pool, const AdamWTensors& tensors,
                 const AdamWStep& step);

// Σ x² in double: blocks of 4096 elements, each in order, joined in order. Squares of floats are
// exact in double, so this is the same on every machine.
double SumOfSquares(ThreadPool& pool, const float* x, int64_t n);
}  // namespace stretto::engine::cpu
