// Trainer and generator as members of a test's run, and rollouts that go from one to the other.
#pragma once

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/client.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
inline constexpr int kNumGroups = 2, kGroupSize = 4;

inline std::vector<int32_t> PromptOf(int index) { return {21 + index, 14, 20, 32, 7 + index}; }

struct Trainer {
  explicit Trainer(const TestRun& run, std::vector<std::string> more = {}) : run(run) {
    Restart(std::move(more));
  }
  void Restart(std::vector<std::string> more = {}) {
    process = std::make_unique<Process>(run.Start("trainer", "trainer-0", 0, std::move(more)));
    address = run.WaitForAddress(*process, "trainer-0");
    stub = Connect<v1::Trainer>(address);
  }
  v1::TrainerStatus Status() {
    CallContext context;
    v1::TrainerStatus status;
    const grpc::Status result = stub->GetTrainerStatus(&context, {}, &status);
    INFO(result.error_message());
    REQUIRE(result.ok());
    return status;
  }
  grpc::Status Step(int64_t step, const v1::PolicyVersion& base,
                    const std::vector<v1::ExperienceGroup>& groups,
                    v1::TrainStepResponse* response) {
    CallContext context;
    auto writer = stub->TrainStep(&context, response);
    v1::TrainStepChunk chunk;
    chunk.mutable_header()->set_step(step);
    *chunk.mutable_header()->mutable_base_version() = base;
    chunk.mutable_header()->set_num_groups(static_cast<uint32_t>(groups.size()));
    writer->Write(chunk);
    for (const v1::ExperienceGroup& group : groups) {
      *chunk.mutable_group() = group;
      if (!writer->Write(chunk)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }
  v1::SaveCheckpointResponse Save(const std::string& extra) {
    CallContext context;
    v1::SaveCheckpointRequest request;
    request.set_extra_json(extra);
    v1::SaveCheckpointResponse response;
    const grpc::Status status = stub->SaveCheckpoint(&context, request, &response);
    INFO(status.error_message());
    REQUIRE(status.ok());
    return response;
  }

  const TestRun& run;
  std::unique_ptr<Process> process;
  std::string address;
  std::unique_ptr<v1::Trainer::Stub> stub;
};

struct GeneratorMember {
  explicit GeneratorMember(const TestRun& run, std::vector<std::string> more = {},
                           const std::string& name = "generator-0")
      : process(run.Start("generator", name, 0, std::move(more))),
        address(run.WaitForAddress(process, name)) {
    stub = Connect<v1::Generator>(address);
  }
  v1::GeneratorStatus Status() {
    CallContext context;
    v1::GeneratorStatus status;
    REQUIRE(stub->GetGeneratorStatus(&context, {}, &status).ok());
    return status;
  }
  v1::PrepareWeightsResponse Prepare(const v1::PolicyVersion& version,
                                     const std::vector<std::string>& sources) {
    CallContext context;
    v1::PrepareWeightsRequest request;
    *request.mutable_version() = version;
    for (const std::string& source : sources) request.add_sources(source);
    v1::PrepareWeightsResponse prepared;
    const grpc::Status status = stub->PrepareWeights(&context, request, &prepared);
    INFO(status.error_message());
    CHECK(status.ok());
    return prepared;
  }
  v1::PrepareWeightsResponse Take(const v1::PolicyVersion& version, const std::string& source) {
    v1::PrepareWeightsResponse prepared = Prepare(version, {source});
    CallContext context;
    v1::CommitWeightsRequest commit;
    *commit.mutable_version() = version;
    v1::CommitWeightsResponse committed;
    const grpc::Status status = stub->CommitWeights(&context, commit, &committed);
    INFO(status.error_message());
    REQUIRE(status.ok());
    return prepared;
  }

  Process process;
  std::string address;
  std::unique_ptr<v1::Generator::Stub> stub;
};

// Rollouts of two prompts, with rewards that favour even tokens.
inline std::vector<v1::ExperienceGroup> Rollouts(GeneratorMember& generator, int first_prompt = 0) {
  std::vector<v1::ExperienceGroup> groups;
  for (int g = 0; g < kNumGroups; ++g) {
    const std::vector<int32_t> prompt = PromptOf(first_prompt + g);
    const Generated result = Generate(*generator.stub, MakeGenerateRequest(prompt, kGroupSize, 24));
    INFO(result.status.error_message());
    REQUIRE(result.status.ok());
    v1::ExperienceGroup& group = groups.emplace_back();
    group.mutable_prompt_id()->set_index(static_cast<uint64_t>(first_prompt + g));
    group.mutable_prompt_ids()->Add(prompt.begin(), prompt.end());
    for (const auto& [index, completion] : result.completions) {
      v1::Experience* experience = group.add_experiences();
      *experience->mutable_completion() = completion;
      experience->set_reward(completion.ids(0) % 2 == 0 ? 1 : 0);
      experience->set_advantage(index % 2 == 0 ? 0.7 : -0.7);
    }
  }
  return groups;
}
}  // namespace stretto::testing
