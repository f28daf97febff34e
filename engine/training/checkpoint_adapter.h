// Checkpoints whose policy is a base and an adapter, for those who want the policy or the adapter
// and no engine.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/files.h"
#include "engine/training/checkpoint.h"

namespace stretto::engine {
// The policy's weights in f32, before they are rounded for computing, as a model file's tensors: a
// checkpoint's masters or, where it has an adapter, `base` (CheckShapes passed) with the adapter
// merged in memory, in the trainer's order of sums. DataLoss names what is damaged;
// InvalidArgument: the adapter belongs to another base.
absl::StatusOr<std::shared_ptr<const TensorSource>> OpenPolicy(
    Files& files, const std::string& path, Device& device, const ModelConfig& config,
    std::shared_ptr<const TensorSource> base);

// Writes a checkpoint's adapter as a PEFT folder. FailedPrecondition: it has none.
absl::Status ExportCheckpointAdapter(Files& files, const std::string& path,
                                     const ModelConfig& config, const PeftExport& options);
// The same of an engine with LoRA; in a group all ranks call it, and `options` of those that don't
// write have no path.
absl::Status ExportEngineAdapter(Files& files, TrainerEngine& engine, const PeftExport& options);
}  // namespace stretto::engine
