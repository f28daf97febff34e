// What the trainer's benchmarks work on: a model of SmolLM2-135M's shape with random weights and
// the two batches that are compared, one of whole sequences and one of groups that share prompts.
#pragma once

#include <memory>
#include <string>

#include "engine/training/trainer_engine.h"

namespace stretto::bench {
struct TrainerLabOptions {
  int threads = 0;  // 0: what the machine grants
  std::string backend = "cpu", dtype = "bf16";
  int64_t layers = 30;
  int64_t micro_batch = 2048;  // tokens
  std::string gradient_dtype;  // that products of the backward pass read; empty: f32
  std::string checkpointing = "none";
  int64_t logits_mb = 400;  // MiB of rows of the LM head at once: all of a batch
};

// Groups of completions that share a prompt.
struct BatchShape {
  int64_t groups = 8, group_size = 1, prompt = 1, completion = 255;

  int64_t sequence() const { return prompt + completion; }
  // Of the whole sequences, as a trainer counts them that shares nothing.
  int64_t tokens() const { return groups * group_size * sequence(); }
};
inline constexpr BatchShape kSupervisedBatch = {8, 1, 1, 255};  // 8 sequences of 256 tokens
inline constexpr BatchShape kGroupBatch = {8, 8, 128, 32};

class TrainerLab {
 public:
  // Ends the process with a message where something can't be made.
  TrainerLab(const TrainerLabOptions& options, int64_t max_sequence_length);

  engine::TrainBatch RandomBatch(const BatchShape& shape) const;
  // One step; seconds on the wall in `seconds`.
  engine::StepResult Step(const engine::TrainBatch& batch, double* seconds);
  // Of the step's products, forward and backward: 6 a weight and row; the head's rows are targets.
  double ProductFlops(const engine::StepResult& result) const;

  engine::Device& device() { return *device_; }
  engine::TrainerEngine& engine() { return *engine_; }

 private:
  std::unique_ptr<engine::Device> device_;
  std::unique_ptr<engine::TrainerEngine> engine_;
};

// Operations a second of the device's best product, at a shape that fits its caches well.
double BestProductFlops(engine::Device& device, DType dtype);
}  // namespace stretto::bench
