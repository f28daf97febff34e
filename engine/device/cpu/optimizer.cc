#include "engine/device/cpu/optimizer.h"

#include <algorithm>
#include <vector>

namespace stretto::engine::cpu {
namespace {
constexpr int64_t kBlock = 4096;
constexpr int64_t kLanesOfBlocks = 8;  // blocks summed side by side, to hide the adder's latency
constexpr int64_t kElementsPerTask = 65536;

// x^n by repeated squaring: the same bits everywhere, unlike the C library's pow.
double Power(double x, int64_t n) {
  double result = 1;
  for (; n > 0; n /= 2, x *= x) {
    if (n % 2 == 1) result *= x;
  }
  return result;
}

// Of one block: the same sum, without the detour through memory.
double SumBlock(const float* x) {
  double sum = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const double value = x[i];
    sum += value * value;
  }
  return sum;
}

// sums[b] = Σ x² of block b, for whole blocks [0, count).
void SumBlocks(const float* x, double* sums, int64_t count) {
  double sum[kLanesOfBlocks] = {};
  for (int64_t i = 0; i < kBlock; ++i) {
    for (int64_t b = 0; b < count; ++b) {
      const double value = x[b * kBlock + i];
      sum[b] += value * value;
    }
  }
  std::copy(sum, sum + count, sums);
}
}  // namespace

void AdamWUpdate(const Kernels& kernels, ThreadPool& pool, const AdamWTensors& t,
                 const AdamWStep& step) {
  AdamWParams p;
  p.lr = step.lr;
  p.beta1 = step.beta1;
  p.beta2 = step.beta2;
  p.eps = step.eps;
  p.weight_decay = step.weight_decay;
  p.grad_scale = step.grad_scale;
  p.correction1 = static_cast<float>(1.0 / (1.0 - Power(step.beta1, step.step)));
  p.correction2 = static_cast<float>(1.0 / (1.0 - Power(step.beta2, step.step)));
  pool.ParallelRanges(t.master.size(), kElementsPerTask, [&](int64_t begin, int64_t end) {
    kernels.row->adamw(MutableRowOf(t.weights, 0) + begin, MutableF32Row(t.master, 0) + begin,
                       MutableF32Row(t.m, 0) + begin, MutableF32Row(t.v, 0) + begin,
                       F32Row(t.grad, 0) + begin, end - begin, p);
  });
}

double SumOfSquares(ThreadPool& pool, const float* x, int64_t n) {
  const int64_t whole = n / kBlock;
  std::vector<double> sums(static_cast<size_t>(whole) + 1, 0.0);
  const int64_t strips = (whole + kLanesOfBlocks - 1) / kLanesOfBlocks;
  pool.ParallelRanges(strips, 2, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = s * kLanesOfBlocks;
      const int64_t count = std::min(kLanesOfBlocks, whole - first);
      if (count == kLanesOfBlocks) {
        SumBlocks(x + first * kBlock, sums.data() + first, kLanesOfBlocks);
      } else {
        for (int64_t b = first; b < first + count; ++b) sums[b] = SumBlock(x + b * kBlock);
      }
    }
  });
  for (int64_t i = whole * kBlock; i < n; ++i) {
    sums[static_cast<size_t>(whole)] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}
}  // namespace stretto::engine::cpu
