// Several trainers that train one run as ranks of a group: real processes, killed and stopped.
#include <algorithm>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "nlohmann/json.hpp"
#include "stretto/v1/coordinator.grpc.pb.h"
#include "tests/integration/client.h"
#include "tests/integration/test_run.h"
#include "tests/integration/trainer_sets.h"

namespace stretto::testing {
namespace {
using nlohmann::json;
constexpr int64_t kRunTimeoutMs = 180000;
// Enough that what a test does at a step comes before the end.
constexpr int kSteps = 12;

// Coordinator, scorer, generator and trainers of one run.
class Cluster {
 public:
  Cluster(int num_trainers, std::vector<std::string> sets) : run_(Options()) {
    sets.insert(sets.begin(), {absl::StrCat("train.steps=", kSteps), "train.checkpoint_every=2",
                               "cluster.lease_ms=1500", kLeaves, kSmallBatches,
                               absl::StrCat("cluster.trainers=", num_trainers)});
    arguments_ = SetArguments(sets);
    for (int i = 0; i < num_trainers; ++i) trainers_.push_back(absl::StrCat("trainer-", i));
  }
  static TestRunOptions Options() {
    TestRunOptions options;
    options.rewards = "rewards: [{type: regex, name: letter, pattern: '[a-e]'}]\n";
    return options;
  }
  void Start(const std::string& name) {
    processes_.erase(name);
    processes_.emplace(name, run_.Start(name.substr(0, name.find('-')), name, 0, arguments_));
  }
  void StartAll() {
    for (const char* name : {"coordinator", "scorer-0", "generator-0"}) Start(name);
    for (const std::string& name : trainers_) Start(name);
  }
  Process& Of(const std::string& name) { return processes_.at(name); }
  v1::RunStatus Status() {
    v1::RunStatus status;
    const std::string address = run_.MemberField("coordinator", "address");
    if (address.empty()) return status;
    CallContext context(2000);
    (void)Connect<v1::Coordinator>(address)->GetRunStatus(&context, {}, &status);
    return status;
  }
  // Waits until the run has come so far; how many ranks train then.
  int AwaitStep(int64_t step) {
    v1::RunStatus status;
    const bool is_there = Eventually(
        [&] {
          status = Status();
          return status.step() >= step;
        },
        60000);
    INFO(Of("coordinator").Log());
    REQUIRE(is_there);
    int num_ranks = 0;
    for (const v1::MemberStatus& member : status.members()) num_ranks += member.has_rank() ? 1 : 0;
    return num_ranks;
  }
  json Finish() {
    const int code = Of("coordinator").WaitForExit(kRunTimeoutMs);
    INFO(Of("coordinator").Log());
    REQUIRE(code == 0);
    const auto text = Files::Real().ReadAll(run_.run_dir() + "/summary.json");
    const json summary = json::parse(text.value_or(""), nullptr, false);
    REQUIRE(summary.is_object());
    CHECK(summary["steps"] == kSteps);
    CHECK(summary["logprob_mismatch_max"] == 0.0);
    return summary;
  }
  void Set(const std::string& set) {
    arguments_.push_back("--set");
    arguments_.push_back(set);
  }
  void KillAll() {
    for (auto& [name, process] : processes_) process.Kill();
  }
  void SetTrainers(int num_trainers) {
    trainers_.resize(static_cast<size_t>(num_trainers));
    Set(absl::StrCat("cluster.trainers=", num_trainers));
  }
  std::string LogOf(const std::string& name) const {
    return Files::Real().ReadAll(run_.LogOf(name)).value_or("");
  }
  std::string run_dir() const { return run_.run_dir(); }

  std::string FinalHash() { return Finish()["checkpoint_hash"].get<std::string>(); }

 private:
  const TestRun run_;
  std::vector<std::string> arguments_, trainers_;
  std::map<std::string, Process> processes_;
};

std::string HashAlone() {
  static const std::string hash = [] {
    Cluster cluster(1, {});
    cluster.StartAll();
    return cluster.FinalHash();
  }();
  return hash;
}

TEST_CASE("a run with two trainers ends with the bits of a run with one") {
  Cluster cluster(2, {"cluster.trainer_layout=fsdp"});
  cluster.StartAll();
  CHECK(cluster.FinalHash() == HashAlone());
  const std::string log = cluster.Of("coordinator").Log();
  CHECK(log.find("trainers' group 1 of 2 (trainer-0, trainer-1) is at version 0") !=
        std::string::npos);
}

TEST_CASE("ranks that share a model: a run on 4 as 2 x 2, then on 2, ends with the bits of one") {
  Cluster alone(1, {kSharedLeaves});
  alone.StartAll();
  const std::string expected = alone.FinalHash();
  CHECK(expected != HashAlone());
  Cluster cluster(4, {kSharedLeaves, "cluster.tensor_parallel=2", "cluster.trainer_layout=fsdp"});
  cluster.Set("train.steps=6");
  cluster.StartAll();
  // A copy of the model that has lost a rank is of no use: the other copy waits for it.
  cluster.AwaitStep(2);
  cluster.Of("trainer-3").Kill();
  cluster.Start("trainer-3");
  CHECK(cluster.Of("coordinator").WaitForExit(kRunTimeoutMs) == 0);
  cluster.KillAll();
  cluster.SetTrainers(2);
  cluster.Set(absl::StrCat("train.steps=", kSteps));
  cluster.Set("cluster.trainer_layout=ddp");
  cluster.StartAll();
  CHECK(cluster.FinalHash() == expected);
}

TEST_CASE("a rank that is killed comes back, and the run ends with the same bits") {
  Cluster cluster(2, {"cluster.trainer_layout=zero1"});
  cluster.StartAll();
  for (const char* name : {"trainer-1", "trainer-0"}) {
    cluster.AwaitStep(name == std::string("trainer-1") ? 1 : 3);
    cluster.Of(name).Kill();
    SleepMs(100);
    cluster.Start(name);
  }
  CHECK(cluster.FinalHash() == HashAlone());
}

TEST_CASE("a rank that doesn't come back is done without, and may join later") {
  Cluster cluster(3, {"cluster.trainer_grace_ms=1000", "cluster.min_trainers=2"});
  cluster.StartAll();
  CHECK(cluster.AwaitStep(1) == 3);
  cluster.Of("trainer-1").Kill();
  CHECK(cluster.AwaitStep(4) == 2);
  cluster.Start("trainer-1");
  CHECK(cluster.FinalHash() == HashAlone());
}

TEST_CASE("a silent rank is named, and the others go on") {
  Cluster cluster(2, {"cluster.trainer_grace_ms=500", "cluster.trainer_layout=zero2"});
  cluster.StartAll();
  cluster.AwaitStep(1);
  cluster.Of("trainer-1").Signal(SIGSTOP);
  CHECK(cluster.FinalHash() == HashAlone());
  const std::string log = cluster.Of("coordinator").Log();
  INFO(log);
  CHECK(log.find("trainer-1 is silent") != std::string::npos);
  cluster.Of("trainer-1").Signal(SIGCONT);
}

TEST_CASE("a rank that computes no more but keeps its lease ends the step by its name") {
  // The lease outlasts the run: the ranks themselves find out.
  Cluster cluster(2, {"cluster.trainer_grace_ms=500", "cluster.lease_ms=600000",
                      "cluster.collective_timeout_ms=1500"});
  cluster.StartAll();
  cluster.AwaitStep(1);
  // Between two steps: behind a step's last collective its peers would miss nothing.
  cluster.Of("generator-0").Signal(SIGSTOP);
  SleepMs(1000);
  cluster.Of("trainer-1").Signal(SIGSTOP);
  cluster.Of("generator-0").Signal(SIGCONT);
  const bool is_named = Eventually(
      [&] {
        const std::string log = cluster.Of("coordinator").Log();
        return log.find("rank 1 (trainer-1) didn't take part in") != std::string::npos;
      },
      60000);
  INFO(cluster.Of("coordinator").Log());
  CHECK(is_named);
  cluster.Of("trainer-1").Signal(SIGCONT);
  CHECK(cluster.FinalHash() == HashAlone());
}

TEST_CASE("a coordinator that is killed forms a new group in its next life") {
  Cluster cluster(2, {"cluster.trainer_layout=fsdp"});
  cluster.StartAll();
  cluster.AwaitStep(1);
  cluster.Of("coordinator").Kill();
  cluster.Start("coordinator");
  CHECK(cluster.FinalHash() == HashAlone());
  const std::string log = cluster.LogOf("coordinator");
  INFO(log);
  CHECK(log.find("trainers' group 2 of 2") != std::string::npos);
}

TEST_CASE("a rank that leaves in good order isn't waited for") {
  Cluster cluster(2, {"cluster.trainer_grace_ms=600000"});
  cluster.StartAll();
  cluster.AwaitStep(1);
  cluster.Of("trainer-0").Signal(SIGTERM);
  CHECK(cluster.Of("trainer-0").WaitForExit(20000) == 0);
  CHECK(cluster.FinalHash() == HashAlone());
  CHECK(cluster.LogOf("coordinator").find("of 1 (trainer-1)") != std::string::npos);
}

TEST_CASE("all ranks pass over a damaged checkpoint and take the one before") {
  Cluster cluster(2, {"cluster.trainer_layout=zero1"});
  cluster.Set("train.steps=4");
  cluster.StartAll();
  REQUIRE(cluster.Of("coordinator").WaitForExit(kRunTimeoutMs) == 0);
  cluster.KillAll();
  const std::string masters =
      cluster.run_dir() + "/checkpoints/step-00000004/masters-00001-of-00002.safetensors";
  std::string bytes = Files::Real().ReadAll(masters).value_or("");
  REQUIRE(bytes.size() > 1000);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  REQUIRE_OK(Files::Real().WriteAtomically(masters, bytes));
  cluster.Set(absl::StrCat("train.steps=", kSteps));
  cluster.StartAll();
  CHECK(cluster.FinalHash() == HashAlone());
  for (const char* name : {"trainer-0", "trainer-1"}) {
    const std::string log = cluster.LogOf(name);
    INFO(log);
    CHECK(log.find("step-00000004 cannot be used") != std::string::npos);
    CHECK(log.find("masters-00001-of-00002.safetensors") != std::string::npos);
  }
}

// Whether a checkpoint is half written.
bool IsBeingSaved(const std::string& run_dir) {
  const auto entries = Files::Real().List(run_dir + "/checkpoints");
  return entries.ok() && std::any_of(entries->begin(), entries->end(), [](const auto& name) {
           return absl::EndsWith(name, ".partial");
         });
}

TEST_CASE("ranks that are killed in the middle of a save begin from the checkpoint before") {
  Cluster cluster(2, {"cluster.trainer_layout=zero1", "train.checkpoint_every=1",
                      "train.checkpoint_kind=incremental"});
  cluster.StartAll();
  const std::vector<std::string> ranks = {"trainer-0", "trainer-1"};
  for (int i = 0; i < 2; ++i) {
    cluster.AwaitStep(2 + 4 * i);
    const bool is_caught = Eventually(
        [&] {
          if (!IsBeingSaved(cluster.run_dir())) return false;
          for (const std::string& rank : ranks) cluster.Of(rank).Signal(SIGSTOP);
          if (IsBeingSaved(cluster.run_dir())) return true;
          for (const std::string& rank : ranks) cluster.Of(rank).Signal(SIGCONT);
          return false;
        },
        60000);
    INFO(cluster.Of("coordinator").Log());
    REQUIRE(is_caught);
    for (const std::string& rank : ranks) cluster.Of(rank).Kill();
    CHECK(IsBeingSaved(cluster.run_dir()));
    for (const std::string& rank : ranks) cluster.Start(rank);
  }
  CHECK(cluster.FinalHash() == HashAlone());
  CHECK_FALSE(IsBeingSaved(cluster.run_dir()));
}

TEST_CASE("a rank whose disk fails in the middle of an update keeps nobody waiting") {
  Cluster cluster(2, {"cluster.trainer_layout=zero1", "cluster.offload_optimizer=true"});
  cluster.StartAll();
  cluster.AwaitStep(2);
  LimitFiles(cluster.Of("trainer-1").pid(), 4096);
  CHECK(Eventually(
      [&] { return absl::StrContains(cluster.LogOf("coordinator"), "trainers' group 1 ends"); },
      30000));
  LimitFiles(cluster.Of("trainer-1").pid(), RLIM_INFINITY);
  CHECK(cluster.FinalHash() == HashAlone());
  CHECK(absl::StrContains(cluster.LogOf("coordinator"), "File too large"));
}

TEST_CASE("checkpoints that can't be written are told of, or end the run") {
  for (const char* policy : {"warn", "stop"}) {
    INFO(policy);
    Cluster cluster(1, {absl::StrCat("train.checkpoint_failure=", policy)});
    // Its name is taken by a folder.
    const std::string latest = cluster.run_dir() + "/checkpoints/latest";
    REQUIRE_OK(Files::Real().MakeDirs(latest));
    cluster.StartAll();
    if (policy == std::string("stop")) {
      CHECK(cluster.Of("coordinator").WaitForExit(kRunTimeoutMs) == 3);
      const std::string log = cluster.Of("coordinator").Log();
      INFO(log);
      CHECK(log.find("version 2 could not be saved (there is none yet)") != std::string::npos);
      continue;
    }
    cluster.AwaitStep(kSteps);
    v1::RunStatus status;
    const bool is_told = Eventually(
        [&] {
          status = cluster.Status();
          return status.detail().find("waiting to save: the checkpoint of version") == 0;
        },
        60000);
    INFO(status.ShortDebugString());
    CHECK(is_told);
    CHECK(status.checkpoint_error().find("latest") != std::string::npos);
    REQUIRE_OK(Files::Real().RemoveAll(latest));
    CHECK(cluster.FinalHash() == HashAlone());
  }
}

TEST_CASE("a gradient that spikes changes nothing, on all ranks alike, or ends the run") {
  // Every gradient is one, as soon as there are enough steps to compare with.
  constexpr char kFactor[] = "train.grad_spike_factor=0.01";
  std::string hash;
  for (const int num_trainers : {1, 2}) {
    Cluster cluster(num_trainers, {kFactor});
    cluster.StartAll();
    if (num_trainers == 2) {  // a step taken again is judged alike
      cluster.AwaitStep(10);
      cluster.Of("trainer-1").Kill();
      cluster.Start("trainer-1");
    }
    const std::string end = cluster.FinalHash();
    if (num_trainers == 1) hash = end;
    CHECK(end == hash);
    const std::string lines =
        Files::Real().ReadAll(cluster.run_dir() + "/metrics.jsonl").value_or("");
    INFO(lines);
    const std::vector<std::string> steps = absl::StrSplit(lines, '\n', absl::SkipEmpty());
    REQUIRE(steps.size() == kSteps);
    for (int step = 1; step <= kSteps; ++step) {
      const json line = json::parse(steps[static_cast<size_t>(step) - 1], nullptr, false);
      const bool is_skipped = step > 8;
      CHECK(line.contains("skip_reason") == is_skipped);
      CHECK(line.contains("skipped") == is_skipped);
      CHECK(line["mfu"].is_number());
    }
    CHECK(cluster.Of("coordinator").Log().find("step 9 changed nothing: gradient norm") !=
          std::string::npos);
  }
  Cluster stops(1, {kFactor, "train.grad_spike=stop"});
  stops.StartAll();
  CHECK(stops.Of("coordinator").WaitForExit(kRunTimeoutMs) == 3);
  CHECK(stops.Of("coordinator").Log().find("(train.grad_spike: stop;") != std::string::npos);
}

TEST_CASE("ranks and leaves that don't fit are refused where they stand") {
  const TestRun run;
  const auto log_of = [&](const std::string& name, const std::vector<std::string>& sets) {
    Process process = run.Start("trainer", name, 0, SetArguments(sets));
    CHECK(process.WaitForExit(30000) == 2);
    return process.Log();
  };
  CHECK(log_of("a", {"cluster.trainers=2"}).find("at most train.reduction_leaves (1)") !=
        std::string::npos);
  CHECK(log_of("b", {"cluster.trainer_layout=ddq"}).find("expected one of ddp, zero1") !=
        std::string::npos);
  CHECK(log_of("c", {"cluster.min_trainers=2"}).find("at most cluster.trainers (1)") !=
        std::string::npos);
  CHECK(log_of("d", {"cluster.tensor_parallel=2"}).find("a divisor of cluster.trainers (1)") !=
        std::string::npos);
  CHECK(log_of("e", {"cluster.collectives=rdma"}).find("expected one of tcp, nccl") !=
        std::string::npos);
  // The suite hides devices, where a machine has some, from a trainer that was built with NCCL.
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  CHECK(log_of("f", {"cluster.collectives=nccl"}).find("or set cluster.collectives=tcp") !=
        std::string::npos);
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST_CASE("more micro-batches than leaves: the run ends and says what to do") {
  Cluster cluster(2, {"cluster.trainer_layout=fsdp", "train.reduction_leaves=2",
                      "train.micro_batch_tokens=16"});
  cluster.StartAll();
  CHECK(cluster.Of("coordinator").WaitForExit(kRunTimeoutMs) == 3);
  const std::string log = cluster.Of("coordinator").Log();
  INFO(log);
  CHECK(log.find("reduction_leaves (2) must be at least the batch's") != std::string::npos);
}
}  // namespace
}  // namespace stretto::testing
