// Trainers as ranks of groups that the test forms itself: each layout gives the same bits.
#include <catch2/catch.hpp>
#include <csignal>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/philox.h"
#include "stretto/v1/trainer.grpc.pb.h"
#include "tests/integration/client.h"
#include "tests/integration/test_run.h"
#include "tests/integration/trainer_sets.h"

namespace stretto::testing {
namespace {
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
                              const std::string& layout, uint32_t tensor_parallel = 1) {
  v1::TrainerGroup group;
  group.set_epoch(epoch);
  group.set_layout(layout);
  group.set_tensor_parallel(tensor_parallel);
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

const std::vector<const char*> kMetrics = {"loss", "grad_norm", "entropy", "ratio_max",
                                           "clip_fraction"};
using Batch = std::vector<v1::ExperienceGroup>;

// The steps of a trainer that is alone.
std::vector<v1::TrainStepResponse> StepsAlone(Rank& alone, const std::vector<Batch>& batches) {
  std::vector<v1::TrainStepResponse> taken(batches.size());
  v1::PolicyVersion base;
  for (size_t i = 0; i < batches.size(); ++i) {
    const grpc::Status status =
        alone.Step(static_cast<int64_t>(i) + 1, base, 0, batches[i], &taken[i]);
    INFO(status.error_message());
    REQUIRE(status.ok());
    base = taken[i].version();
  }
  CHECK(taken[0].metrics().at("micro_batches") > 2);
  return taken;
}

// That a new group takes the same steps; the version it comes to.
v1::PolicyVersion CheckSteps(std::vector<Rank>& ranks, const v1::TrainerGroup& group,
                             const std::vector<Batch>& batches,
                             const std::vector<v1::TrainStepResponse>& expected,
                             const std::vector<const char*>& metrics = kMetrics) {
  const int n = group.ranks_size();
  v1::PolicyVersion base = Join(ranks, group)[0];
  CHECK(base.number() == 0);
  for (size_t i = 0; i < batches.size(); ++i) {
    std::vector<v1::TrainStepResponse> taken(static_cast<size_t>(n));
    const auto statuses = OnAll(n, [&](int r) {
      const auto at = static_cast<size_t>(r);
      return ranks[at].Step(static_cast<int64_t>(i) + 1, base, group.epoch(), batches[i],
                            &taken[at]);
    });
    for (int r = 0; r < n; ++r) {
      const auto at = static_cast<size_t>(r);
      INFO(statuses[at].error_message());
      REQUIRE(statuses[at].ok());
      CHECK(taken[at].version().hash() == expected[i].version().hash());
      for (const char* name : metrics) {
        INFO(name);
        CHECK(taken[at].metrics().at(name) == expected[i].metrics().at(name));
      }
    }
    base = taken[0].version();
  }
  return base;
}

// The model file of an export, or the error.
std::string Exported(Rank& rank, const std::string& folder, const std::string& dtype) {
  CallContext context;
  v1::ExportPolicyRequest request;
  request.set_path(folder);
  request.set_dtype(dtype);
  v1::ExportPolicyResponse response;
  const grpc::Status status = rank.stub->ExportPolicy(&context, request, &response);
  if (!status.ok()) return status.error_message();
  return Files::Real().ReadAll(folder + "/model.safetensors").value_or("");
}

void CheckLayouts(std::vector<std::string> sets, const std::vector<const char*>& metrics) {
  PhiloxStream random(Seed(), 5);
  INFO("seed " << Seed());
  std::vector<Batch> batches;
  for (int i = 0; i < 3; ++i) batches.push_back(RandomGroups(random));
  sets.insert(sets.end(), {kLeaves, kSmallBatches});
  const TestRun alone_run;
  Rank alone(alone_run, "trainer-0", sets);
  const auto expected = StepsAlone(alone, batches);

  const TestRun run;
  std::vector<std::string> of_several = sets;
  of_several.push_back("cluster.trainers=3");
  std::vector<Rank> ranks;
  for (int r = 0; r < 3; ++r) ranks.emplace_back(run, absl::StrCat("trainer-", r), of_several);
  uint64_t epoch = 0;
  v1::PolicyVersion base;
  for (const char* layout : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (int n = 2; n <= 3; ++n) {
      INFO(layout << " on " << n);
      base = CheckSteps(ranks, PrepareGroup(ranks, n, ++epoch, layout), batches, expected, metrics);
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
  CheckLayouts({}, kMetrics);
}

TEST_CASE("ranks of every layout take ppo's steps of one trainer alone, to the bit") {
  std::vector<const char*> metrics = kMetrics;
  metrics.insert(metrics.end(), {"value_loss", "explained_variance", "critic_grad_norm"});
  CheckLayouts({"algorithm.name=ppo", "ppo.epochs=2", "ppo.mini_batch=5"}, metrics);
}

TEST_CASE("ranks that share a model take the steps of one trainer alone, and export what it does") {
  PhiloxStream random(Seed(), 6);
  INFO("seed " << Seed());
  std::vector<Batch> batches;
  for (int i = 0; i < 2; ++i) batches.push_back(RandomGroups(random));
  std::vector<std::string> sets = {kLeaves, kSmallBatches, kSharedLeaves};
  const TestRun alone_run;
  Rank alone(alone_run, "trainer-0", sets);
  const auto expected = StepsAlone(alone, batches);
  sets.insert(sets.end(), {"cluster.trainers=4", "cluster.tensor_parallel=2"});
  const TestRun run;
  std::vector<Rank> ranks;
  for (int r = 0; r < 4; ++r) ranks.emplace_back(run, absl::StrCat("trainer-", r), sets);
  CheckSteps(ranks, PrepareGroup(ranks, 4, 1, "fsdp", 2), batches, expected);
  const std::string weights = Exported(alone, run.File("alone"), "bf16");
  CHECK(weights.size() > 1000);
  CHECK(Exported(ranks[0], run.File("weights"), "bf16") == weights);
  CHECK(absl::StrContains(Exported(ranks[1], run.File("none"), "bf16"), "rank 0 of the group"));

  const v1::PolicyVersion at =
      CheckSteps(ranks, PrepareGroup(ranks, 2, 2, "ddp", 2), batches, expected);
  CHECK(Exported(ranks[0], run.File("weights"), "bf16") == weights);
  CHECK(absl::StrContains(Exported(ranks[0], run.File("masters"), "f32"),
                          "save a checkpoint of it first"));
  OnAll(2, [&](int r) {
    CallContext context;
    v1::SaveCheckpointRequest request;
    request.set_group_epoch(2);
    request.set_version(at.number());
    v1::SaveCheckpointResponse response;
    return ranks[static_cast<size_t>(r)].stub->SaveCheckpoint(&context, request, &response);
  });
  const std::string masters = Exported(alone, run.File("alone-f32"), "f32");
  CHECK(masters.size() > weights.size());
  CHECK(Exported(ranks[0], run.File("masters"), "f32") == masters);

  // A rank that dies after it has been prepared holds its peers up until the next group is.
  v1::TrainerGroup group = PrepareGroup(ranks, 2, 3, "ddp", 2);
  group.set_collective_timeout_ms(600000);
  ranks[1].process.Kill();
  grpc::Status joining;
  std::thread join([&] {
    CallContext context;
    v1::JoinGroupRequest request;
    *request.mutable_group() = group;
    v1::JoinGroupResponse response;
    joining = ranks[0].stub->JoinGroup(&context, request, &response);
  });
  SleepMs(200);
  std::string address;
  CHECK(ranks[0].Prepare(4, &address).ok());
  join.join();
  CHECK(joining.error_code() == grpc::StatusCode::CANCELLED);
}

TEST_CASE("a disk that fails in the middle of an update: the trainer goes back, and on") {
  PhiloxStream random(Seed(), 7);
  INFO("seed " << Seed());
  std::vector<Batch> batches;
  for (int i = 0; i < 2; ++i) batches.push_back(RandomGroups(random));
  std::vector<std::string> sets = {kLeaves, kSmallBatches};
  const TestRun undisturbed_run, run;
  Rank undisturbed(undisturbed_run, "trainer-0", sets);
  const auto expected = StepsAlone(undisturbed, batches);
  sets.push_back("cluster.offload_optimizer=true");
  Rank rank(run, "trainer-0", sets);
  v1::TrainStepResponse taken;
  REQUIRE(rank.Step(1, {}, 0, batches[0], &taken).ok());
  CallContext context;
  v1::SaveCheckpointResponse saved;
  REQUIRE(rank.stub->SaveCheckpoint(&context, {}, &saved).ok());
  REQUIRE(saved.error().empty());
  const v1::PolicyVersion base = taken.version();
  LimitFiles(rank.process.pid(), 4096);
  const grpc::Status failed = rank.Step(2, base, 0, batches[1], &taken);
  INFO(failed.error_message());
  CHECK(failed.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(absl::StrContains(failed.error_message(), "File too large"));
  LimitFiles(rank.process.pid(), RLIM_INFINITY);
  CHECK(Eventually([&] { return rank.Step(2, base, 0, batches[1], &taken).ok(); }, 20000));
  CHECK(taken.version().hash() == expected[1].version().hash());
}
}  // namespace
}  // namespace stretto::testing
