// Speed and memory of training steps of a model of SmolLM2-135M's shape; writes
// build/bench/trainer.json. Ceilings are read beside every step, since what a machine grants
// changes from second to second. bench/rivals/trainer_rivals.py compares with PyTorch; it takes
// turns with
//   bench_trainer --worker     for each line `supervised` or `groups` read: one step, then a line
//   of
//                              its seconds and of the tokens of its whole sequences.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>

#include "bench/ceilings.h"
#include "bench/report.h"
#include "bench/trainer_lab.h"
#include "engine/training/memory_plan.h"

namespace stretto::bench {
namespace {
double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Steps of one batch: medians of tokens a second and of the share of the ceiling.
struct Measured {
  double tokens_per_second = 0, share = 0, product_share = 0;
  engine::StepResult last;
};

Measured Measure(TrainerLab& lab, const BatchShape& shape, int64_t steps) {
  CeilingMeter meter(lab.device().num_threads());
  const DType dtype = lab.engine().options().dtype;
  const engine::TrainBatch batch = lab.RandomBatch(shape);
  std::vector<double> speeds, shares, product_shares;
  Measured m;
  for (int64_t i = 0; i < steps; ++i) {
    const Ceilings before = meter.Read();
    const double product = BestProductFlops(lab.device(), dtype);
    double seconds = 0;
    m.last = lab.Step(batch, &seconds);
    const double flops = lab.ProductFlops(m.last) / seconds;
    speeds.push_back(static_cast<double>(shape.tokens()) / seconds);
    shares.push_back(2 * flops / (before.flops + meter.Read().flops));
    product_shares.push_back(flops / product);
    const engine::StepResult& r = m.last;
    std::printf("  step of %.2f s: forward %.2f, backward %.2f, optimizer %.2f; %ld rows\n",
                seconds, r.forward_seconds, r.backward_seconds, r.optimizer_seconds,
                r.num_computed_tokens);
  }
  m.tokens_per_second = Median(speeds);
  m.share = Median(shares);
  m.product_share = Median(product_shares);
  return m;
}

// What the process held at most, of which some megabytes are not the trainer's.
double PeakBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

void ReportMemory(Report& report, TrainerLab& lab) {
  const engine::MemoryPlan plan =
      engine::PlanMemory(lab.engine().config(), lab.engine().options(), 1);
  const auto planned = static_cast<double>(plan.total());
  report.Add("peak memory", PeakBytes() * 1e-9, "GB");
  report.Add("state, packed layers, activations and workspace by formula", planned * 1e-9, "GB");
  report.Add("peak memory beside the formula, off by", std::abs(PeakBytes() / planned - 1), "of it",
             0.10, /*smaller_is_better=*/true);
}

// What a row of the report is of.
std::string NameOf(const TrainerLabOptions& o, const std::string& batch, const std::string& what) {
  const bool rounds = o.gradient_dtype == "bf16";
  return batch + (rounds ? ", gradients of activations in bf16: " : ": ") + what;
}

// The process's peak of memory tells something of its first trainer alone.
void RunSupervised(Report& report, const TrainerLabOptions& o, int64_t steps,
                   bool measures_memory) {
  TrainerLab lab(o, kSupervisedBatch.sequence());
  double seconds = 0;
  lab.Step(lab.RandomBatch(kSupervisedBatch), &seconds);  // touches all memory
  if (measures_memory) ReportMemory(report, lab);
  const Measured m = Measure(lab, kSupervisedBatch, steps);
  const std::string batch = "8 x 256 tokens";
  report.Add(NameOf(o, batch, "forward, backward and AdamW"), m.tokens_per_second, "tokens/s");
  report.Add(NameOf(o, batch, "products' share of the multiply-add peak"), m.share, "of peak",
             0.65);
  report.Add(NameOf(o, batch, "products' share of the best product"), m.product_share, "of best");
  report.Add(NameOf(o, batch, "optimizer"), m.last.optimizer_seconds, "s");
}

void RunGroups(Report& report, TrainerLabOptions o, int64_t steps) {
  o.micro_batch = std::max<int64_t>(o.micro_batch, 3072);
  TrainerLab lab(o, kGroupBatch.sequence());
  double seconds = 0;
  lab.Step(lab.RandomBatch(kGroupBatch), &seconds);
  const Measured m = Measure(lab, kGroupBatch, steps);
  const std::string batch = "8 x 8 x (128 + 32) tokens";
  report.Add(NameOf(o, batch, "whole sequences"), m.tokens_per_second, "tokens/s");
  report.Add(NameOf(o, batch, "products' share of the peak"), m.share, "of peak");
}

// Without a word on it, with gradients of both kinds.
void Run(TrainerLabOptions o, int64_t steps, const std::string& only) {
  Report report("trainer");
  std::vector<std::string> kinds = {o.gradient_dtype};
  if (kinds[0].empty()) kinds = {"f32", "bf16"};
  for (const std::string& kind : kinds) {
    if (kind == "bf16" && o.dtype != "bf16") continue;
    o.gradient_dtype = kind;
    if (only != "groups") RunSupervised(report, o, steps, kind == kinds[0]);
    if (only != "supervised") RunGroups(report, o, steps);
  }
  if (!report.Write()) std::exit(1);
}

void Work(TrainerLabOptions o) {
  o.micro_batch = std::max<int64_t>(o.micro_batch, 3072);
  TrainerLab lab(o, std::max(kSupervisedBatch.sequence(), kGroupBatch.sequence()));
  const engine::TrainBatch supervised = lab.RandomBatch(kSupervisedBatch);
  const engine::TrainBatch groups = lab.RandomBatch(kGroupBatch);
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const bool grouped = line == "groups";
    double seconds = 0;
    lab.Step(grouped ? groups : supervised, &seconds);
    const BatchShape& shape = grouped ? kGroupBatch : kSupervisedBatch;
    std::printf("%.6f %ld\n", seconds, shape.tokens());
    std::fflush(stdout);
  }
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  stretto::bench::TrainerLabOptions o;
  int64_t steps = 3;
  bool worker = false;
  std::string only;
  CLI::App app("Measures training steps of a model of SmolLM2-135M's shape.");
  app.add_option("--steps", steps, "of each kind, after one to warm up");
  app.add_option("--threads", o.threads, "0: what the machine grants");
  app.add_option("--micro-batch", o.micro_batch, "tokens");
  app.add_option("--layers", o.layers);
  app.add_option("--backend", o.backend);
  app.add_option("--dtype", o.dtype)->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--gradient-dtype", o.gradient_dtype,
                 "that products of the backward pass read; both, one after the other")
      ->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--logits-mb", o.logits_mb, "of logits at once");
  app.add_option("--checkpointing", o.checkpointing)
      ->check(CLI::IsMember({"none", "selective", "full"}));
  app.add_option("--only", only)->check(CLI::IsMember({"supervised", "groups"}));
  app.add_flag("--worker", worker);
  CLI11_PARSE(app, argc, argv);
  worker ? stretto::bench::Work(o) : stretto::bench::Run(o, steps, only);
}
