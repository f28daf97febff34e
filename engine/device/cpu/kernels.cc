#include "engine/device/cpu/kernels.h"

#include "engine/device/cpu/gemm_dot.h"

#include "hwy/targets.h"

namespace stretto::engine::cpu {
namespace {
int64_t TargetBit(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512:
      return HWY_AVX3;
    case InstructionSet::kAvx2:
      return HWY_AVX2;
    case InstructionSet::kSse4:
      return HWY_SSE4;
    case InstructionSet::kScalar:
      return 0;
  }
  return 0;
}
}  // namespace

bool Supported(InstructionSet set) {
  if (set == InstructionSet::kAvx512Bf16 && GetDotKernels() == nullptr) return false;
  const int64_t bit = TargetBit(set);
  return bit == 0 || (hwy::SupportedTargets() & bit) != 0;
}

InstructionSet BestInstructionSet() {
  for (InstructionSet set : {InstructionSet::kAvx512Bf16, InstructionSet::kAvx512,
                             InstructionSet::kAvx2, InstructionSet::kSse4}) {
    if (Available(set)) return set;
  }
  return InstructionSet::kScalar;
}

bool Available(InstructionSet set) {
  return Supported(set) && GetGemmKernels(set, false) != nullptr;
}

Kernels SelectKernels(InstructionSet set, bool allow_fma, bool exact) {
  const bool wide = set != InstructionSet::kScalar && set != InstructionSet::kSse4;
  Kernels k;
  k.set = set;
  k.fma = allow_fma && wide;
  k.gemm = GetGemmKernels(set, k.fma);
  k.quant = GetQuantKernels(set, k.fma);
  k.row = GetRowKernels(set, k.fma);
  k.softmax = GetSoftmaxKernels(set, k.fma);
  if (set == InstructionSet::kAvx512Bf16 && k.fma) k.dot = GetDotKernels();
  k.exact = exact || k.dot == nullptr;
  return k;
}
}  // namespace stretto::engine::cpu
