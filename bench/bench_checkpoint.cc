// What checkpoints cost a training step of SmolLM2-135M's shape (random weights and ids): steps
// without saves and with one at every step take turns, in one process.
//
//   bench_checkpoint [--rounds=N] [--tokens=N] [--layers=N] [--threads=N] [--nice=N]
//                    [--folder=build/bench/checkpoints]
//
// A save is in the training thread's way while it begins (Start) and if an update has to wait for
// the snapshot to be whole: "blocked". The rest of what it costs is that it hashes and writes on
// the same cores: "slower".
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "base/philox.h"
#include "bench/report.h"
#include "bench/smollm2.h"
#include "engine/training/checkpoint_writer.h"

namespace stretto::bench {
namespace {
using engine::CheckpointWriter;
using engine::SaveReport;
using engine::TrainerEngine;

struct BenchOptions {
  int64_t rounds = 2, tokens = 2048, layers = 30;
  int threads = 0, nice = 0;
  std::string folder = "build/bench/checkpoints";
};

constexpr int64_t kSequence = 256;

engine::TrainBatch RandomBatch(int64_t tokens, int64_t vocab_size) {
  PhiloxStream random(1);
  engine::TrainBatch batch;
  for (int64_t i = 0; i < std::max<int64_t>(1, tokens / kSequence); ++i) {
    engine::TrainGroup& group = batch.groups.emplace_back();
    group.prompt_ids = {1};
    auto& ids = group.completions.emplace_back().ids;
    for (int64_t t = 1; t < kSequence; ++t) {
      ids.push_back(static_cast<int32_t>(random.Below(vocab_size)));
    }
  }
  return batch;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Step(TrainerEngine& engine, const engine::TrainBatch& batch) {
  const double begin = SecondsNow();
  Must(engine.Step(batch, engine::CrossEntropy()));
  return SecondsNow() - begin;
}

// A step that begins with a save of the state before it; the save ends by itself.
double StepWithSave(TrainerEngine& engine, CheckpointWriter& writer,
                    const engine::TrainBatch& batch) {
  const double begin = SecondsNow();
  if (!writer.Start(engine, "{}").ok()) std::exit(1);
  Must(engine.Step(batch, engine::CrossEntropy()));
  return SecondsNow() - begin;
}

SaveReport Finished(CheckpointWriter& writer) {
  SaveReport report = *writer.Wait();
  if (!report.status.ok()) {
    std::fprintf(stderr, "%s\n", report.status.ToString().c_str());
    std::exit(1);
  }
  return report;
}

int Run(const BenchOptions& o) {
  std::error_code ec;
  std::filesystem::remove_all(o.folder, ec);
  engine::DeviceOptions device_options;
  device_options.num_threads = o.threads;
  const auto device = Must(engine::CreateDevice(device_options));
  engine::ModelConfig config = SmolLm2Config();
  config.num_layers = o.layers;
  engine::TrainerOptions options;
  options.max_sequence_length = kSequence;
  options.micro_batch_tokens = o.tokens;
  const auto engine = Must(TrainerEngine::Create(*device, config, options));
  if (!engine->InitRandom(1).ok()) return 1;
  const engine::TrainBatch batch = RandomBatch(o.tokens, config.vocab_size);
  Report report("bench_checkpoint");
  engine::CheckpointWriterOptions writer_options;
  writer_options.root = o.folder;
  writer_options.keep = 1;
  writer_options.nice = o.nice;
  CheckpointWriter writer(Files::Real(), writer_options);
  Step(*engine, batch);
  StepWithSave(*engine, writer, batch);
  Finished(writer);
  std::vector<double> plain, with_save, blocked, saved, copied;
  for (int64_t i = 0; i < o.rounds; ++i) {
    plain.push_back(Step(*engine, batch));
    with_save.push_back(StepWithSave(*engine, writer, batch));
    const SaveReport r = Finished(writer);
    blocked.push_back(r.blocked_seconds);
    saved.push_back(r.seconds);
    copied.push_back(r.copy_seconds);
  }
  const double step = Median(plain);
  report.Add("bytes of a checkpoint", static_cast<double>(writer.last()->bytes_written) * 1e-9,
             "GB");
  report.Add("step without a save", step, "s");
  report.Add("step with a save, which goes on meanwhile", Median(with_save), "s");
  report.Add("snapshot whole after", Median(copied), "s");
  report.Add("checkpoint durable after", Median(saved), "s");
  report.Add("training blocked by a save at every step", 100 * Median(blocked) / step, "% of step",
             3, /*smaller_is_better=*/true);
  report.Add("step slower by a save at every step", 100 * (Median(with_save) / step - 1),
             "% of step");
  const double begin = SecondsNow();
  Must(engine::SaveCheckpoint(Files::Real(), {o.folder, 1}, *engine, "{}"));
  report.Add("a save that is waited for", SecondsNow() - begin, "s");
  const double load = SecondsNow();
  Must(engine::LoadNewestCheckpoint(Files::Real(), o.folder, *engine,
                                    [](const auto&, const auto&) {}));
  report.Add("loading it", SecondsNow() - load, "s");
  std::filesystem::remove_all(o.folder, ec);
  return report.Write() ? 0 : 1;
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  stretto::bench::BenchOptions o;
  CLI::App app("Measures what checkpoints cost a training step of SmolLM2-135M's shape.");
  app.add_option("--rounds", o.rounds, "steps of each kind");
  app.add_option("--tokens", o.tokens, "of a step");
  app.add_option("--layers", o.layers);
  app.add_option("--threads", o.threads, "0: what the machine grants");
  app.add_option("--nice", o.nice, "of the thread that writes");
  app.add_option("--folder", o.folder, "where to write; emptied");
  CLI11_PARSE(app, argc, argv);
  return stretto::bench::Run(o);
}
