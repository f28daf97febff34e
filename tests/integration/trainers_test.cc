// Several trainers that train one run as ranks of a group: real processes, killed and stopped.
#include <algorithm>
#include <catch2/catch.hpp>
#include <csignal>
#include <map>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "base/philox.h"
#include "nlohmann/json.hpp"
#include "stretto/v1/coordinator.grpc.pb.h"
#include "stretto/v1/trainer.grpc.pb.h"
#include "tests/integration/client.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
using nlohmann::json;
constexpr int64_t kRunTimeoutMs = 180000;
// Enough that what a test does at a step comes before the end.
constexpr int kSteps = 12;
constexpr char kLeaves[] = "train.reduction_leaves=16";
constexpr char kSmallBatches[] = "train.micro_batch_tokens=48";

std::vector<std::string> SetArguments(const std::vector<std::string>& sets) {
  std::vector<std::string> arguments;
  for (const std::string& set : sets) {
    arguments.push_back("--set");
    arguments.push_back(set);
  }
  return arguments;
}

// A trainer that the test drives itself.
struct Rank {
  Rank(const TestRun& run, const std::string& name, const std::vector<std::string>& sets)
      : name(name), process(run.Start("trainer", name, 0, SetArguments(sets))) {
    stub = Connect<v1::Trainer>(run.WaitForAddress(process, name));
  }
  grpc::Status Prepare(uint64_t epoch, std::string* address) {
    CallContext context;
    v1::PrepareGroupRequest request;
    request.set_group_epoch(epoch);
    v1::PrepareGroupResponse response;
    const grpc::Status status = stub->PrepareGroup(&context, request, &response);
    *address = response.peer_address();
    return status;
  }
  grpc::Status Step(int64_t step, const v1::PolicyVersion& base, uint64_t epoch,
                    const std::vector<v1::ExperienceGroup>& groups, v1::TrainStepResponse* taken) {
    CallContext context;
    auto writer = stub->TrainStep(&context, taken);
    v1::TrainStepChunk chunk;
    chunk.mutable_header()->set_step(step);
    *chunk.mutable_header()->mutable_base_version() = base;
    chunk.mutable_header()->set_group_epoch(epoch);
    chunk.mutable_header()->set_num_groups(static_cast<uint32_t>(groups.size()));
    writer->Write(chunk);
    for (const v1::ExperienceGroup& group : groups) {
      *chunk.mutable_group() = group;
      if (!writer->Write(chunk)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }

  std::string name;
  Process process;
  std::unique_ptr<v1::Trainer::Stub> stub;
};

std::vector<v1::ExperienceGroup> RandomGroups(PhiloxStream& random) {
  std::vector<v1::ExperienceGroup> groups;
  for (int g = 0; g < 3; ++g) {
    v1::ExperienceGroup& group = groups.emplace_back();
    group.mutable_prompt_id()->set_index(static_cast<uint64_t>(g));
    for (int t = 0; t < 6; ++t) group.add_prompt_ids(1 + static_cast<int>(random.Below(250)));
    for (uint32_t c = 0; c < 4; ++c) {
      v1::Experience* experience = group.add_experiences();
      v1::Completion* completion = experience->mutable_completion();
      completion->set_sample_index(c);
      for (uint64_t t = 0; t < 4 + random.Below(12); ++t) {
        completion->add_ids(1 + static_cast<int>(random.Below(250)));
        completion->add_logprobs(static_cast<float>(-3 - random.NextDouble()));
        completion->add_versions(0);
      }
      experience->set_reward(c % 2);
      experience->set_advantage(c % 2 == 0 ? 0.7 : -0.7);
    }
  }
  return groups;
}

// Calls `call(rank index)` for every rank at the same time.
template <class Call>
std::vector<grpc::Status> OnAll(int num_ranks, const Call& call) {
  std::vector<grpc::Status> statuses(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) {
    threads.emplace_back([&, r] { statuses[static_cast<size_t>(r)] = call(r); });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

// The group of the first `num_ranks` ranks, prepared under this epoch.
v1::TrainerGroup PrepareGroup(std::vector<Rank>& ranks, int num_ranks, uint64_t epoch,
                              const std::string& layout) {
  v1::TrainerGroup group;
  group.set_epoch(epoch);
  group.set_layout(layout);
  group.set_collective_timeout_ms(20000);
  for (int r = 0; r < num_ranks; ++r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    v1::RankAddress* entry = group.add_ranks();
    entry->set_name(rank.name);
    const grpc::Status status = rank.Prepare(epoch, entry->mutable_peer_address());
    INFO(status.error_message());
    REQUIRE(status.ok());
  }
  return group;
}

std::vector<v1::PolicyVersion> Join(std::vector<Rank>& ranks, const v1::TrainerGroup& group) {
  std::vector<v1::PolicyVersion> versions(static_cast<size_t>(group.ranks_size()));
  const auto statuses = OnAll(group.ranks_size(), [&](int r) {
    CallContext context;
    v1::JoinGroupRequest request;
    *request.mutable_group() = group;
    request.set_rank(static_cast<uint32_t>(r));
    v1::JoinGroupResponse response;
    const auto i = static_cast<size_t>(r);
    const grpc::Status status = ranks[i].stub->JoinGroup(&context, request, &response);
    versions[i] = response.version();
    return status;
  });
  for (const grpc::Status& status : statuses) {
    INFO(status.error_message());
    REQUIRE(status.ok());
  }
  return versions;
}

void CheckLayouts(std::vector<std::string> sets, const std::vector<const char*>& names) {
  PhiloxStream random(Seed(), 5);
  INFO("seed " << Seed());
  std::vector<std::vector<v1::ExperienceGroup>> batches;
  for (int i = 0; i < 3; ++i) batches.push_back(RandomGroups(random));
  sets.insert(sets.end(), {kLeaves, kSmallBatches});
  const TestRun alone_run;
  Rank alone(alone_run, "trainer-0", sets);
  std::vector<v1::TrainStepResponse> expected(batches.size());
  v1::PolicyVersion base;
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto step = static_cast<int64_t>(i) + 1;
    const grpc::Status status = alone.Step(step, base, 0, batches[i], &expected[i]);
    INFO(status.error_message());
    REQUIRE(status.ok());
    base = expected[i].version();
  }
  CHECK(expected[0].metrics().at("micro_batches") > 2);

  const TestRun run;
  std::vector<std::string> of_several = sets;
  of_several.push_back("cluster.trainers=3");
  std::vector<Rank> ranks;
  for (int r = 0; r < 3; ++r) ranks.emplace_back(run, absl::StrCat("trainer-", r), of_several);
  uint64_t epoch = 0;
  for (const char* layout : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (int n = 2; n <= 3; ++n) {
      INFO(layout << " on " << n);
      const v1::TrainerGroup group = PrepareGroup(ranks, n, ++epoch, layout);
      base = Join(ranks, group)[0];
      CHECK(base.number() == 0);
      for (size_t i = 0; i < batches.size(); ++i) {
        std::vector<v1::TrainStepResponse> taken(static_cast<size_t>(n));
        const auto statuses = OnAll(n, [&](int r) {
          const auto at = static_cast<size_t>(r);
          return ranks[at].Step(static_cast<int64_t>(i) + 1, base, epoch, batches[i], &taken[at]);
        });
        for (int r = 0; r < n; ++r) {
          const auto at = static_cast<size_t>(r);
          INFO(statuses[at].error_message());
          REQUIRE(statuses[at].ok());
          CHECK(taken[at].version().hash() == expected[i].version().hash());
          for (const char* name : names) {
            INFO(name);
            CHECK(taken[at].metrics().at(name) == expected[i].metrics().at(name));
          }
        }
        base = taken[0].version();
      }
    }
  }
  // What is of an older group is refused, with the present one.
  v1::TrainStepResponse late;
  const grpc::Status old = ranks[0].Step(4, base, epoch - 1, batches[0], &late);
  CHECK(old.error_code() == grpc::StatusCode::FAILED_PRECONDITION);
  CHECK(old.error_message().find(absl::StrCat("group epoch is ", epoch)) != std::string::npos);
  std::string address;
  CHECK(ranks[0].Prepare(epoch - 1, &address).error_code() ==
        grpc::StatusCode::FAILED_PRECONDITION);
  // A new group's preparation ends a step that waits for a silent rank; the error says why.
  ranks[1].process.Signal(SIGSTOP);
  grpc::Status waiting;
  std::thread step([&] {
    v1::TrainStepResponse response;
    waiting = ranks[0].Step(4, base, epoch, batches[0], &response);
  });
  SleepMs(200);
  CHECK(ranks[0].Prepare(epoch + 1, &address).ok());
  step.join();
  ranks[1].process.Signal(SIGCONT);
  CHECK(waiting.error_code() == grpc::StatusCode::CANCELLED);
  CHECK(waiting.error_message().find("is being formed") != std::string::npos);
}

TEST_CASE("ranks of every layout take the steps of one trainer alone, to the bit") {
  CheckLayouts({}, {"loss", "grad_norm", "entropy", "ratio_max", "clip_fraction"});
}

TEST_CASE("ranks of every layout take ppo's steps of one trainer alone, to the bit") {
  CheckLayouts({"algorithm.name=ppo", "ppo.epochs=2", "ppo.mini_batch=5"},
               {"loss", "grad_norm", "entropy", "ratio_max", "clip_fraction", "value_loss",
                "explained_variance", "critic_grad_norm"});
}

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
