// How much of the communication of a step is hidden behind its computation: two ranks, one thread
// each, on a link that carries a step's bytes in about the time that the step computes. Started by
// bench/overlap, which makes the network, as
//   bench_overlap plan LAYOUT RANK ADDRESS SHARE    prints the link's rate, in Mbit/s
//   bench_overlap measure LAYOUT RANK ADDRESS FILE  appends what it measured to FILE
//   bench_overlap report FILE                       writes build/bench/overlap.json
// by rank 0. ADDRESS is the rank's own; rank 0's, 10.77.0.2, is where they find one another.
//
// Three things are timed, each begun by both ranks at once and as long as the slower one takes:
//   compute         a step of the rank's micro-batch, alone, and of the optimizer what the rank has
//                   of it in the group
//   communication   the step's collectives, one after the other, with nothing else to do
//   step            in the group
// Hidden is communication that makes the step no longer: 1 − (step − compute) / communication.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/philox.h"
#include "bench/report.h"
#include "bench/smollm2.h"
#include "engine/collectives/direct_communicator.h"
#include "engine/training/trainer_engine.h"

namespace stretto::bench {
namespace {
using engine::CollectiveCall;
using engine::CollectiveKind;
using engine::Communicator;
using engine::DataParallel;
using engine::ShardMap;

constexpr int kRanks = 2;
constexpr int64_t kSequences = 16, kSequenceTokens = 128;  // of a rank
constexpr int kSteps = 2;
constexpr int kStepsOfPlan = 3;  // by whose median the link's rate is set
constexpr const char* kRendezvous = "10.77.0.2:7000";

// Some of SmolLM2-135M's layers and a part of its vocabulary: a step of seconds.
engine::ModelConfig Config() {
  engine::ModelConfig c = SmolLm2Config();
  c.num_layers = 8;
  c.vocab_size = 8192;
  return c;
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

struct Seconds {
  double compute = 0, backward = 0, communication = 0, step = 0;
};

class Rank {
 public:
  Rank(DataParallel kind, int rank, const std::string& address) : rank_(rank) {
    if (rank == 0) {
      host_ =
          std::make_unique<engine::RendezvousHost>(Must(engine::Listener::Open("10.77.0.2", 7000)));
    }
    group_ = Must(engine::JoinGroup(
        kRendezvous, {"overlap", 1, rank, kRanks, absl::StrCat("rank-", rank), address}, {}));
    device_ = Must(engine::CreateDevice({.num_threads = 1}));
    options_.max_sequence_length = kSequenceTokens;
    options_.micro_batch_tokens = kSequences * kSequenceTokens;
    options_.parallel.kind = kind;
    options_.parallel.reduction_leaves = kRanks;
  }

  // Alone, both at once: in `backward` the part of it that ddp communicates beside.
  Seconds Compute(int steps) {
    const auto engine = MakeEngine(nullptr);
    const engine::TrainBatch batch = Batch(1);
    std::vector<double> compute, backward;
    for (int i = 0; i <= steps; ++i) {
      Barrier();
      const double begin = SecondsNow();
      const engine::StepResult r = Must(engine->Step(batch, engine::CrossEntropy()));
      double seconds = SecondsNow() - begin;
      // The optimizer's part of a divided state.
      if (options_.parallel.kind != DataParallel::kDdp) {
        seconds -= r.optimizer_seconds * (kRanks - 1) / kRanks;
      }
      if (i == 0) continue;
      compute.push_back(Slowest(seconds));
      backward.push_back(Slowest(r.backward_seconds));
    }
    return {Median(compute), Median(backward), 0, 0};
  }
  // Sent by each rank: half of f32 gradients twice (ddp), or once and half of bf16 weights twice.
  static int64_t BytesOfStep() { return 4 * engine::ParameterLayout(Config()).size(); }

  Seconds InGroup() {
    const auto engine = MakeEngine(group_.get());
    const engine::TrainBatch batch = Batch(kRanks);
    std::vector<double> communication, step;
    for (int i = 0; i <= kSteps; ++i) {
      Barrier();
      double begin = SecondsNow();
      Must(engine->Step(batch, engine::CrossEntropy()));
      const double of_step = Slowest(SecondsNow() - begin);
      Barrier();
      begin = SecondsNow();
      Communicate();
      const double alone = Slowest(SecondsNow() - begin);
      if (i == 0) continue;
      step.push_back(of_step);
      communication.push_back(alone);
    }
    return {0, 0, Median(communication), Median(step)};
  }

 private:
  static void Check(const absl::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "bench_overlap: %s\n", status.ToString().c_str());
    std::exit(1);
  }
  void Barrier() { Check(group_->Barrier()); }
  double Slowest(double mine) {
    std::vector<double> all(kRanks);
    Check(group_->AllGather({reinterpret_cast<const uint8_t*>(&mine), sizeof(mine)},
                            {reinterpret_cast<uint8_t*>(all.data()), kRanks * sizeof(mine)}));
    return *std::max_element(all.begin(), all.end());
  }
  std::unique_ptr<engine::TrainerEngine> MakeEngine(Communicator* group) {
    auto engine =
        Must(engine::TrainerEngine::Create(*device_, Config(), options_, Clock::Real(), group));
    Check(engine->InitRandom(1));
    return engine;
  }
  // A micro-batch for each of `num_ranks`.
  static engine::TrainBatch Batch(int num_ranks) {
    PhiloxStream random(1);
    engine::TrainBatch batch;
    for (int64_t s = 0; s < num_ranks * kSequences; ++s) {
      std::vector<int32_t> ids(kSequenceTokens);
      for (int32_t& id : ids) id = static_cast<int32_t>(random.Below(Config().vocab_size));
      engine::TrainGroup& group = batch.groups.emplace_back();
      group.prompt_ids = {ids[0]};
      group.completions.emplace_back().ids.assign(ids.begin() + 1, ids.end());
    }
    return batch;
  }

  CollectiveCall CallOf(CollectiveKind kind, DType dtype, const ShardMap::Part& unit) {
    CollectiveCall call;
    call.kind = kind;
    call.dtype = dtype;
    call.counts = unit.counts;
    call.offsets = unit.offsets;
    call.num_elements = unit.counts[rank_];
    in_.resize(std::max<size_t>(in_.size(), unit.size()));
    out_.resize(in_.size());
    call.input = in_.data();
    call.output = out_.data();
    if (kind == CollectiveKind::kAllGather) return call;
    call.num_elements = unit.size();
    call.plan = engine::SumPlan::OnePerRank(kRanks);
    call.parts.push_back({call.plan.nodes_of_rank[rank_][0], in_.data()});
    return call;
  }
  // The collectives of a step with one micro-batch a rank.
  void Communicate() {
    const ShardMap map(engine::ParameterLayout(Config()), kRanks);
    const auto& units = map.parts();
    const auto run = [&](CollectiveKind kind, DType dtype, size_t unit) {
      Check(group_->Start(CallOf(kind, dtype, units[unit])).Wait());
    };
    if (options_.parallel.kind == DataParallel::kDdp) {
      for (size_t u = units.size(); u-- > 0;) run(CollectiveKind::kAllReduce, DType::kF32, u);
      return;
    }
    for (size_t u = 0; u < units.size(); ++u) run(CollectiveKind::kAllGather, DType::kBF16, u);
    for (size_t u = units.size(); u-- > 0;) {
      if (u > 0 && u + 1 < units.size()) run(CollectiveKind::kAllGather, DType::kBF16, u);
      run(CollectiveKind::kReduceScatter, DType::kF32, u);
    }
  }

  const int rank_;
  std::unique_ptr<engine::RendezvousHost> host_;
  std::unique_ptr<Communicator> group_;
  std::unique_ptr<engine::Device> device_;
  engine::TrainerOptions options_;
  std::vector<float> in_, out_;
};

int Plan(Rank& rank, bool prints, const std::string& share) {
  const Seconds s = rank.Compute(kStepsOfPlan);
  const double seconds = share == "backward" ? s.backward : s.compute;
  // TCP and Ethernet add some 5 % to what is sent.
  if (prints)
    std::printf("%.0f\n", 1.05 * 8e-6 * static_cast<double>(rank.BytesOfStep()) / seconds);
  return 0;
}

int MeasureTo(Rank& rank, bool writes, const std::string& layout, const std::string& path) {
  Seconds s = rank.Compute(kSteps);
  const Seconds group = rank.InGroup();
  if (!writes) return 0;
  std::ofstream file(path, std::ios::app);
  file << layout << " " << s.compute << " " << s.backward << " " << group.communication << " "
       << group.step << "\n";
  return file.flush() ? 0 : 1;
}

// Lines of MeasureTo.
int WriteReport(const std::string& path) {
  Report report("overlap");
  std::ifstream file(path);
  for (std::string name; file >> name;) {
    Seconds s;
    file >> s.compute >> s.backward >> s.communication >> s.step;
    report.Add(name + ": compute", s.compute, "s");
    report.Add(name + ": of it the backward pass", s.backward, "s");
    report.Add(name + ": communication", s.communication, "s");
    report.Add(name + ": step", s.step, "s");
    const double hidden = 1 - (s.step - s.compute) / s.communication;
    report.Add(name + ": communication hidden", hidden, "of it", 0.70);
  }
  return report.Write() ? 0 : 1;
}

int Main(const std::vector<std::string>& args) {
  if (args.size() == 2 && args[0] == "report") return WriteReport(args[1]);
  if (args.size() != 5) {
    std::fprintf(stderr, "bench_overlap is started by bench/overlap\n");
    return 2;
  }
  const int rank = std::atoi(args[2].c_str());
  Rank self(Must(engine::ParseDataParallel(args[1])), rank, args[3]);
  if (args[0] == "plan") return Plan(self, rank == 0, args[4]);
  return MeasureTo(self, rank == 0, args[1], args[4]);
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) { return stretto::bench::Main({argv + 1, argv + argc}); }
