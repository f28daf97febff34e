#include "bench/trainer_lab.h"

#include <algorithm>
#include <cstdlib>

#include "base/clock.h"
#include "base/philox.h"
#include "bench/smollm2.h"
#include "engine/model/memory.h"

namespace stretto::bench {
namespace {
using engine::Tensor;

DType DTypeOf(const std::string& name) { return name == "f32" ? DType::kF32 : DType::kBF16; }
}  // namespace

TrainerLab::TrainerLab(const TrainerLabOptions& o, int64_t max_sequence_length) {
  engine::DeviceOptions device_options;
  device_options.backend = o.backend;
  device_options.num_threads = o.threads;
  device_ = Must(engine::CreateDevice(device_options));
  engine::TrainerOptions options;
  options.dtype = DTypeOf(o.dtype);
  options.gradient_dtype = o.gradient_dtype == "bf16" ? DType::kBF16 : DType::kF32;
  options.max_sequence_length = max_sequence_length;
  options.micro_batch_tokens = o.micro_batch;
  options.logits_bytes = static_cast<size_t>(o.logits_mb) << 20;
  options.checkpointing = Must(engine::ParseCheckpointing(o.checkpointing));
  engine::ModelConfig config = SmolLm2Config();
  config.num_layers = o.layers;
  engine_ = Must(engine::TrainerEngine::Create(*device_, config, options));
  if (!engine_->InitRandom(1).ok()) std::exit(1);
}

engine::TrainBatch TrainerLab::RandomBatch(const BatchShape& shape) const {
  PhiloxStream random(1);
  const auto ids = [&](int64_t count) {
    std::vector<int32_t> out(count);
    for (int32_t& id : out) {
      id = static_cast<int32_t>(random.Below(engine_->config().vocab_size));
    }
    return out;
  };
  engine::TrainBatch batch;
  batch.groups.resize(shape.groups);
  for (engine::TrainGroup& g : batch.groups) {
    g.prompt_ids = ids(shape.prompt);
    g.completions.resize(shape.group_size);
    for (engine::TrainCompletion& c : g.completions) c.ids = ids(shape.completion);
  }
  return batch;
}

engine::StepResult TrainerLab::Step(const engine::TrainBatch& batch, double* seconds) {
  const double begin = Clock::Real().NowSeconds();
  engine::StepResult result = Must(engine_->Step(batch, engine::CrossEntropy()));
  *seconds = Clock::Real().NowSeconds() - begin;
  return result;
}

double TrainerLab::ProductFlops(const engine::StepResult& r) const {
  const engine::ModelConfig& c = engine_->config();
  const auto head = static_cast<double>(c.vocab_size * c.hidden_size);
  const double body = static_cast<double>(engine_->num_parameters()) - head;
  return 6.0 * (body * static_cast<double>(r.num_computed_tokens) +
                head * static_cast<double>(r.num_trained_tokens));
}

double BestProductFlops(engine::Device& device, DType dtype) {
  constexpr int64_t kRows = 1024, kN = 2048, kK = 2048;
  const auto stream = device.CreateStream();
  engine::DeviceMemory memory;
  const Tensor w = Must(memory.Make(device, dtype, kN, kK));
  const Tensor x = Must(memory.Make(device, dtype, kRows, kK));
  const Tensor y = Must(memory.Make(device, dtype, kRows, kN));
  device.Fill(*stream, w, 0.5f);
  device.Fill(*stream, x, 0.25f);
  const auto packed = Must(device.Pack(*stream, {w}));
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double begin = Clock::Real().NowSeconds();
    device.Linear(*stream, y, x, *packed, {});
    device.Synchronize(*stream);
    const double seconds = Clock::Real().NowSeconds() - begin;
    best = std::max(best, 2.0 * kRows * kN * kK / seconds);
  }
  return best;
}
}  // namespace stretto::bench
