// Speed of one training step: tokens a second, time of each phase, and the share of the machine's
// matrix ceiling, which is measured first as this device's best product. Random weights and ids.
//   bench_trainer [--steps=N] [--groups=N] [--group-size=N] [--prompt=N] [--completion=N]
//                 [--threads=N] [--micro-batch=N] [--backend=cpu] [--dtype=bf16] [--layers=N]
//                 [--recompute]
#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/philox.h"
#include "bench/smollm2.h"
#include "engine/training/trainer_engine.h"

namespace stretto::engine {
namespace {
struct BenchOptions {
  int64_t steps = 2, groups = 8, group_size = 1, prompt = 1, completion = 255;
  int64_t micro_batch = 2048, layers = 30;
  int threads = 0;
  std::string backend = "cpu", dtype = "bf16";
  bool recompute = false;
};

using bench::Must;

// SmolLM2-135M, or fewer layers of it.
ModelConfig Shape(const BenchOptions& o) {
  ModelConfig c = bench::SmolLm2Config();
  c.num_layers = o.layers;
  return c;
}

// Floating-point operations a second of a large product in the dtype of computation.
double MatrixCeiling(Device& device, DType dtype) {
  constexpr int64_t kRows = 1024, kN = 2048, kK = 2048;
  const auto stream = device.CreateStream();
  DeviceMemory memory;
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

TrainBatch RandomBatch(const BenchOptions& o, int64_t vocab_size) {
  PhiloxStream random(1);
  const auto ids = [&](int64_t count) {
    std::vector<int32_t> out(count);
    for (int32_t& id : out) id = static_cast<int32_t>(random.Below(vocab_size));
    return out;
  };
  TrainBatch batch;
  batch.groups.resize(o.groups);
  for (TrainGroup& g : batch.groups) {
    g.prompt_ids = ids(o.prompt);
    g.completions.resize(o.group_size);
    for (TrainCompletion& c : g.completions) c.ids = ids(o.completion);
  }
  return batch;
}

// Of the products alone, forward and backward: 6 a weight and row; the head's rows are the targets.
double ProductFlops(const TrainerEngine& engine, const StepResult& r) {
  const ModelConfig& c = engine.config();
  const auto head = static_cast<double>(c.vocab_size * c.hidden_size);
  const double body = static_cast<double>(engine.num_parameters()) - head;
  return 6.0 * (body * static_cast<double>(r.num_computed_tokens) +
                head * static_cast<double>(r.num_trained_tokens));
}

void Run(const BenchOptions& o) {
  DeviceOptions device_options;
  device_options.backend = o.backend;
  device_options.num_threads = o.threads;
  const auto device = Must(CreateDevice(device_options));
  const DType dtype = o.dtype == "f32" ? DType::kF32 : DType::kBF16;
  const double ceiling = MatrixCeiling(*device, dtype);
  std::printf("device %s, %d threads: %.1f GFLOP/s in products\n",
              device->Profile(dtype).ToString().c_str(), device->num_threads(), ceiling * 1e-9);
  TrainerOptions options;
  options.dtype = dtype;
  options.max_sequence_length = o.prompt + o.completion;
  options.micro_batch_tokens = o.micro_batch;
  options.recompute_activations = o.recompute;
  const auto engine = Must(TrainerEngine::Create(*device, Shape(o), options));
  if (!engine->InitRandom(1).ok()) std::exit(1);
  std::printf("%.1f M parameters, %.2f GB on the device\n",
              static_cast<double>(engine->num_parameters()) * 1e-6,
              static_cast<double>(engine->device_bytes()) * 1e-9);
  const TrainBatch batch = RandomBatch(o, engine->config().vocab_size);
  for (int64_t step = 0; step < o.steps; ++step) {
    const StepResult r = Must(engine->Step(batch, CrossEntropy()));
    const double seconds =
        r.forward_seconds + r.objective_seconds + r.backward_seconds + r.optimizer_seconds;
    std::printf(
        "step %ld: %.2f s = forward %.2f + backward %.2f + optimizer %.2f; %ld rows, %ld targets, "
        "%ld "
        "micro-batches; %.0f rows/s; products %.0f %% of the ceiling; loss %.3f\n",
        r.version, seconds, r.forward_seconds, r.backward_seconds, r.optimizer_seconds,
        r.num_computed_tokens, r.num_trained_tokens, r.num_micro_batches,
        static_cast<double>(r.num_computed_tokens) / seconds,
        100.0 * ProductFlops(*engine, r) / seconds / ceiling, r.loss);
  }
}
}  // namespace
}  // namespace stretto::engine

int main(int argc, char** argv) {
  stretto::engine::BenchOptions o;
  CLI::App app("Measures one training step of a model of SmolLM2-135M's shape.");
  app.add_option("--steps", o.steps);
  app.add_option("--groups", o.groups);
  app.add_option("--group-size", o.group_size);
  app.add_option("--prompt", o.prompt);
  app.add_option("--completion", o.completion);
  app.add_option("--threads", o.threads, "0: what the machine grants");
  app.add_option("--micro-batch", o.micro_batch, "tokens");
  app.add_option("--layers", o.layers);
  app.add_option("--backend", o.backend);
  app.add_option("--dtype", o.dtype)->check(CLI::IsMember({"bf16", "f32"}));
  app.add_flag("--recompute", o.recompute);
  CLI11_PARSE(app, argc, argv);
  stretto::engine::Run(o);
}
