// A model's files with a LoRA adapter merged into them, for those who compute with the policy and
// train nothing: the same values as a trainer's merged weights (lora.h), before they are rounded to
// the dtype of computation.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/model/lora.h"

namespace stretto::engine {
// `base` (CheckShapes passed) with the matrices of `adapter`'s targets merged, in f32 and in
// memory. `values`: those of the adapter, in its layout. `path`: what messages call it.
absl::StatusOr<std::shared_ptr<const TensorSource>> MergeAdapter(
    Device& device, LoraAdapter& adapter, absl::Span<const float> values, const std::string& path,
    std::shared_ptr<const TensorSource> base);

// The same of a folder as PEFT writes it. Errors: those of OpenPeft.
absl::StatusOr<std::shared_ptr<const TensorSource>> OpenMergedPeft(
    Device& device, const ModelConfig& config, const std::string& folder,
    std::shared_ptr<const TensorSource> base);
}  // namespace stretto::engine
