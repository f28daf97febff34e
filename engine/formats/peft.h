// LoRA adapters (Hu et al. 2021) in files: folders as PEFT writes and reads them,
// adapter_config.json and adapter_model.safetensors. An adapter adds (alpha / rank) · B · A to
// matrices of a model's layers, A [rank, inputs] and B [outputs, rank].
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/files.h"
#include "engine/formats/model_config.h"
#include "engine/formats/tensor_file.h"

namespace stretto::engine {
// The linear maps of a layer, by the names that PEFT's `target_modules` has for them.
inline constexpr const char* kLoraModules[] = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                               "gate_proj", "up_proj", "down_proj"};

struct LoraOptions {
  int64_t rank = 0;  // 0: no adapter
  double alpha = 0;
  std::vector<std::string> targets;  // of kLoraModules, in that order (NormalizeLora)

  explicit operator bool() const { return rank > 0; }
  float scale() const { return static_cast<float>(alpha / static_cast<double>(rank)); }
  bool operator==(const LoraOptions&) const = default;
};
// Puts targets in order; none: all. InvalidArgument names the option: a rank below 1 or beyond the
// model's width, alpha not positive, a target that there is not or that is given twice.
absl::Status NormalizeLora(const ModelConfig& config, LoraOptions& lora);

// "model.layers.3.self_attn.q_proj".
std::string LoraModulePath(int64_t layer, absl::string_view module);
// "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"; `which` is 'A' or 'B'.
std::string LoraTensorName(absl::string_view module_path, char which);
// Every A and B of an adapter, in the order of layers and targets, A before B.
std::vector<TensorSpec> LoraTensors(const ModelConfig& config, const LoraOptions& lora);

// The elements of a tensor of LoraTensors as f32.
using LoraReader = std::function<absl::Status(const TensorSpec& tensor, float* dst)>;
struct PeftExport {
  std::string path;  // the folder; replaced where it holds an adapter and `overwrite` is set
  std::string base;  // base_model_name_or_path
  bool overwrite = false;
};
// Writes a folder that PEFT loads, in f32. It appears complete or not at all.
absl::Status ExportPeft(Files& files, const PeftExport& options, const ModelConfig& config,
                        const LoraOptions& lora, const LoraReader& read);

struct PeftAdapter {
  std::string path;
  LoraOptions lora;
  std::shared_ptr<const TensorSource> tensors;
};
// Opens an adapter for a model. What this program doesn't compute (other kinds of adapters, DoRA,
// rsLoRA, ranks by pattern, biases, modules saved whole, some layers only) is Unimplemented naming
// the field; a tensor that is missing, too many, or of another shape is InvalidArgument.
absl::StatusOr<PeftAdapter> OpenPeft(const std::string& path, const ModelConfig& config);

// What a run's adapter is and starts from: what is wanted (rank 0: not said; alpha 0: twice the
// rank), a folder to start from (may be empty), or both, which must agree. Without either the
// answer has rank 0. `tensors` is null without a folder.
absl::StatusOr<PeftAdapter> ResolveLora(const ModelConfig& config, LoraOptions wanted,
                                        const std::string& adapter_folder);
}  // namespace stretto::engine
