// The block formats of GGUF, widened to f32. Layouts and formulas: ggml's ggml-common.h and
// ggml-quants.c (github.com/ggml-org/ggml); every product and sum is one f32 operation in the order
// written there, so the bits equal those of the reference.
#pragma once

#include <cstdint>

#include "engine/formats/tensor_file.h"

namespace stretto::engine {
// `src` holds num_blocks · BlockBytes(type) bytes of a block type (kQ4_0 … kQ8_K), in any
// alignment; `dst` has room for num_blocks · BlockElements(type) values.
void DequantizeBlocks(StorageType type, const uint8_t* src, int64_t num_blocks, float* dst);
}  // namespace stretto::engine
