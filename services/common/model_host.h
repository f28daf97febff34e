// A model as a service holds it: its files, a device, the transformer on it, its tokenizer, and its
// weights as a policy version. What generator, scorer and trainer share of the engine; the
// coordinator does not link this.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "engine/device/device.h"
#include "engine/formats/model_files.h"
#include "engine/model/transformer.h"
#include "engine/prompt/prompt_encoder.h"
#include "engine/weights/version.h"
#include "stretto/v1/common.pb.h"

namespace stretto::services {
struct ModelHostOptions {
  std::string path;
  std::string adapter;                // PEFT folder, merged into the weights; empty: none
  std::string dtype = "bf16";         // bf16 or f32
  std::string weight_dtype = "bf16";  // bf16 (as dtype says), int8, int4 or fp8: of matrices
  std::string kv_dtype = "bf16";      // bf16 (as dtype says), int8 or fp8: of the KV cache
  bool scores = false;  // a reward model (one score a sequence) instead of one that writes
  engine::PromptOptions prompts;    // chat format and system prompt, as in the run file
  int64_t k_leaves = 1;             // of sums over what leaves share, as in the run file
  int64_t max_sequence_length = 0;  // 0: the model's own, at most
  int64_t most_by_default = 4096;   // so many
  std::string backend = "cpu";
  bool exact = true;  // DeviceOptions::exact
  int threads = 0;
};
// Of a run: `threads` is the flag's value or else the section's.
ModelHostOptions OptionsOfRun(const RunConfig& run, int threads);

// Tokens that a sequence may have. InvalidArgument: more than the model was made for.
absl::StatusOr<int64_t> ContextOf(const ModelHostOptions& options,
                                  const engine::ModelConfig& config);

// The model's files with all that their headers say checked. Weights are not read.
absl::StatusOr<engine::ModelFiles> OpenFiles(const ModelHostOptions& options);

struct ModelHost {
  engine::ModelFiles files;
  DType dtype = DType::kBF16;
  engine::WeightFormat weight_format = engine::WeightFormat::kPlain;
  std::unique_ptr<engine::Device> device;
  std::unique_ptr<engine::Transformer> transformer;
  std::unique_ptr<engine::PromptEncoder> prompts;  // tokenizer, chat format, stop ids
  v1::NumericProfile profile;
  std::shared_ptr<const engine::ModelWeights> loaded;  // by OpenModelHost's `meanwhile`, if any
};

// Opens and checks files, makes device, transformer and tokenizer. Weights are not read. Errors
// name path and reason. With an adapter the files' tensors are merged ones, in memory and in f32,
// which the host needs no longer once a version has been read from them. Blocks. `meanwhile`, if
// any, is called while another thread reads the tokenizer, with all of the host but `prompts`. What
// it makes on the device belongs into the host: when the tokenizer can't be read the host ends
// before this returns, and the device with it.
absl::StatusOr<std::unique_ptr<ModelHost>> OpenModelHost(
    const ModelHostOptions& options, const std::function<absl::Status(ModelHost&)>& meanwhile = {});

// Version 0: the weights as the files have them, in the dtype of computation. The same files and
// dtype give the same hash in every service. A NaN or infinity is an error that names the tensor.
// Tensors that a safetensors file stores in that dtype are not copied: the version keeps the file
// mapped, which must not be written to meanwhile (replacing it by renaming is safe).
absl::StatusOr<std::shared_ptr<const engine::WeightsVersion>> ReadInitialVersion(
    const ModelHost& host);

// The tensors that versions of this model have, hashes left empty.
engine::Manifest ManifestOf(const ModelHost& host);

// A version and what BuildWeights made of it.
struct BuiltVersion {
  const engine::WeightsVersion* version = nullptr;
  const engine::ModelWeights* weights = nullptr;
};
// The version laid out for the device's products, matrices in host.weight_format. Those of which no
// tensor has another hash than in `base` (may be empty) are shared with it. Any thread. Blocks.
absl::StatusOr<std::shared_ptr<const engine::ModelWeights>> BuildWeights(
    const ModelHost& host, const engine::WeightsVersion& version, const BuiltVersion& base = {});

v1::NumericProfile ToProto(const engine::NumericProfile& profile);
}  // namespace stretto::services
