// What `stretto sft`, `dpo` and `reward-model` share: flags, the model to start from, the order of
// examples, the engine, and the folder that is written in the end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "base/philox.h"
#include "engine/formats/model_files.h"
#include "engine/prompt/prompt_encoder.h"
#include "engine/training/trainer_engine.h"

namespace CLI {
class App;
}  // namespace CLI

namespace stretto::cli {
struct FinetuneFlags {
  std::string model, config, tokenizer, data, out, dtype = "bf16";
  engine::PromptOptions prompts;
  int64_t steps = 200, batch = 32, max_sequence_length = 512, warmup = 20;
  double lr = 1e-4, weight_decay = 0;
  engine::LrSchedule::Kind schedule = engine::LrSchedule::Kind::kCosine;
  uint64_t seed = 1;
  int threads = 0;
  int64_t checkpoint_every = 100;  // steps; 0: only when interrupted
  bool overwrite = false;
  bool restart = false;  // removes the checkpoints of an earlier try
  std::string optimizer_state = "f32";
  bool offload_optimizer = false;
  int64_t lora_rank = 0;  // with one, or with an adapter to start from, that is trained
  double lora_alpha = 0;
  std::vector<std::string> lora_targets;
  std::string lora_adapter, adapter_out;
};
// All but --model and --config, which are the command's; `data` describes the dataset, `batch` what
// a step takes.
void AddFinetuneFlags(CLI::App& command, const std::string& data, const std::string& batch,
                      FinetuneFlags* flags);
// Of commands that train an adapter, too.
void AddLoraFlags(CLI::App& command, FinetuneFlags* flags);

// OUT.checkpoints, where training that isn't finished lies.
std::string CheckpointsOf(const FinetuneFlags& flags);
// Says before the work, not after it, that --out cannot be written.
absl::Status CheckOut(const FinetuneFlags& flags);
// The model to start from: files and, unless it starts from random weights, tensors.
absl::StatusOr<engine::ModelFiles> OpenStart(const FinetuneFlags& flags);
// An engine with that model. `device` outlives it.
absl::StatusOr<std::unique_ptr<engine::TrainerEngine>> CreateTrainer(
    engine::Device& device, const engine::ModelFiles& files, const FinetuneFlags& flags,
    int64_t micro_batch_tokens = engine::TrainerOptions().micro_batch_tokens);
// Writes --out and, where an adapter was trained, --adapter-out.
absl::Status ExportTrained(const FinetuneFlags& flags, const engine::ModelFiles& files,
                           const engine::PromptEncoder& prompts, engine::TrainerEngine& trainer);

// Calls `read` with each line of a JSONL file that is not empty; its errors name file and line. A
// file without such lines is an error.
absl::Status ReadExamples(const std::string& path,
                          absl::FunctionRef<absl::Status(const std::string& line)> read);
// The tokens of a text to imitate, and the end of sequence.
absl::StatusOr<std::vector<int32_t>> EncodeCompletion(const engine::PromptEncoder& prompts,
                                                      const std::string& text);

// Indices of examples, shuffled anew each epoch.
class EpochOrder {
 public:
  EpochOrder(size_t num_examples, uint64_t seed);
  size_t Next();

 private:
  std::vector<size_t> order_;
  PhiloxStream shuffle_;
  size_t cursor_;
};

// Stops training that has gone wrong before it spoils the model: nothing is written then.
absl::Status CheckFinite(int64_t step, const engine::StepResult& result);
// "step 20/200  loss 0.1234  grad norm 1.000<more>  3.1 s".
void PrintStep(const FinetuneFlags& flags, int64_t step, const engine::StepResult& result,
               const std::string& more, double seconds);
}  // namespace stretto::cli
