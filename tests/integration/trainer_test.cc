// The trainer as a process of its own, and the way of its weights into a generator.
#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/integration/trainer_client.h"

namespace stretto::testing {
TEST_CASE("a step: same bits in generator and trainer, and the new version reaches the generator") {
  for (const char* backend : {"cpu", "reference"}) {
    DYNAMIC_SECTION(backend) {
      const TestRun run({.backend = backend});
      Trainer trainer(run);
      GeneratorMember generator(run, {"--threads", "2"});
      const v1::PolicyVersion v0 = trainer.Status().version();
      CHECK(v0.number() == 0);
      // Both read the same files: the same hash without a word between them.
      REQUIRE(generator.Status().version().hash() == v0.hash());

      v1::TrainStepResponse step1;
      const auto groups = Rollouts(generator);
      const grpc::Status status = trainer.Step(1, v0, groups, &step1);
      INFO(status.error_message());
      REQUIRE(status.ok());
      CHECK(step1.version().number() == 1);
      CHECK(step1.version().hash() != v0.hash());
      CHECK(step1.metrics().at("logprob_mismatch_max") == 0.0);
      CHECK(step1.metrics().at("compared_tokens") == step1.metrics().at("trained_tokens"));
      CHECK(step1.metrics().at("compared_tokens") > 0);
      for (const char* name : {"loss", "grad_norm", "lr", "entropy", "clip_fraction", "reward_mean",
                               "train_tokens_per_second", "forward_seconds"}) {
        CHECK(step1.metrics().count(name) == 1);
      }
      CHECK(!step1.skipped());

      const v1::PrepareWeightsResponse prepared = generator.Take(step1.version(), trainer.address);
      CHECK(prepared.was_delta());
      CHECK(prepared.bytes_received() > 0);
      CHECK(generator.Status().version().hash() == step1.version().hash());
      // Taking it again changes nothing.
      CHECK(generator.Take(step1.version(), trainer.address).bytes_received() == 0);

      {
        GeneratorMember late(run, {}, "generator-1");
        CHECK(late.Take(step1.version(), trainer.address).was_delta());
      }
      v1::TrainStepResponse step2;
      const auto more = Rollouts(generator, 2);
      CHECK(more[0].experiences(0).completion().versions(0) == 1);
      REQUIRE(trainer.Step(2, step1.version(), more, &step2).ok());
      CHECK(step2.metrics().at("logprob_mismatch_max") == 0.0);
      CHECK(step2.metrics().at("compared_tokens") > 0);

      // A generator that begins anew has version 0: from it there was a delta to the first, and
      // as the generators of this run are never two versions behind, there is none to the second.
      generator.process.Kill();
      GeneratorMember fresh(run);
      const v1::PrepareWeightsResponse whole = fresh.Take(step2.version(), trainer.address);
      CHECK(!whole.was_delta());
      CHECK(whole.bytes_received() > prepared.bytes_received());
      CHECK(fresh.Status().version().hash() == step2.version().hash());
    }
  }
}

namespace {
// Bytes of deltas that a member has sent to others.
int64_t SentDeltaBytes(const TestRun& run, const std::string& member) {
  const std::string page = HttpGet(std::stoi(run.MemberField(member, "metrics_port")), "/metrics");
  const std::string series = "stretto_weights_sent_bytes_total{kind=\"delta\"} ";
  const size_t at = page.find(series);
  return at == std::string::npos ? 0
                                 : static_cast<int64_t>(std::stod(page.substr(at + series.size())));
}
}  // namespace

TEST_CASE(
    "generators pass weights on; the trainer sends them once; a killed relay is passed over") {
  const TestRun run;
  Trainer trainer(run);
  GeneratorMember first(run, {}, "generator-0"), second(run, {}, "generator-1"),
      third(run, {}, "generator-2");
  v1::TrainStepResponse step1, step2;
  REQUIRE(trainer.Step(1, trainer.Status().version(), Rollouts(first), &step1).ok());
  // Those at the end of the chain ask before those at its head have anything.
  v1::PrepareWeightsResponse at_third, at_second;
  std::thread third_asks([&] {
    at_third = third.Prepare(step1.version(), {second.address, first.address, trainer.address});
  });
  std::thread second_asks([&] {
    at_second = second.Prepare(step1.version(), {first.address, trainer.address});
  });
  auto at_first = first.Take(step1.version(), trainer.address);
  second_asks.join();
  third_asks.join();
  for (auto* prepared : {&at_first, &at_second, &at_third}) CHECK(prepared->was_delta());
  const auto one_copy = static_cast<int64_t>(at_first.bytes_received());
  for (const char* sender : {"trainer-0", "generator-0", "generator-1"}) {
    CHECK(SentDeltaBytes(run, sender) == one_copy);
  }

  REQUIRE(trainer.Step(2, step1.version(), Rollouts(first, 2), &step2).ok());
  second.Take(step1.version(), trainer.address);
  third.Take(step1.version(), trainer.address);
  first.process.Kill();
  std::thread below([&] {
    at_third = third.Prepare(step2.version(), {second.address, first.address, trainer.address});
  });
  at_second = second.Prepare(step2.version(), {first.address, trainer.address});
  below.join();
  CHECK(at_second.was_delta());
  CHECK(at_third.was_delta());
  CHECK(SentDeltaBytes(run, "trainer-0") ==
        one_copy + static_cast<int64_t>(at_second.bytes_received()));
  third.Take(step2.version(), trainer.address);
  CHECK(third.Status().version().hash() == step2.version().hash());
}

TEST_CASE("a log-prob that differs in its last bit is found") {
  const TestRun run;
  Trainer trainer(run);
  GeneratorMember generator(run);
  auto groups = Rollouts(generator);
  // Wherever the step computes it: a group without an advantage stands before it.
  for (v1::Experience& experience : *groups[0].mutable_experiences()) experience.set_advantage(0);
  v1::Completion* completion = groups[1].mutable_experiences(2)->mutable_completion();
  completion->set_logprobs(0, std::nextafter(completion->logprobs(0), -100.0f));
  v1::TrainStepResponse step;
  REQUIRE(trainer.Step(1, trainer.Status().version(), groups, &step).ok());
  CHECK(step.metrics().at("logprob_mismatch_max") > 0);
  CHECK(trainer.process->Log().find("LOG-PROB MISMATCH in step 1") != std::string::npos);
  CHECK(trainer.process->Log().find("group 1, completion 2, token 0") != std::string::npos);
}

TEST_CASE("a step is taken once, and only from the right version") {
  const TestRun run;
  Trainer trainer(run);
  GeneratorMember generator(run);
  const auto groups = Rollouts(generator);
  const v1::PolicyVersion v0 = trainer.Status().version();
  using grpc::StatusCode;
  v1::TrainStepResponse response;

  SECTION("repeating it gives the first result") {
    v1::TrainStepResponse again;
    REQUIRE(trainer.Step(1, v0, groups, &response).ok());
    REQUIRE(trainer.Step(1, v0, groups, &again).ok());
    CHECK(again.version().hash() == response.version().hash());
    CHECK(again.metrics().at("loss") == response.metrics().at("loss"));
    CHECK(trainer.Status().version().number() == 1);
  }
  SECTION("the next one may be asked for before it, and waits for it") {
    v1::PolicyVersion next;  // has no hash yet
    next.set_number(1);
    v1::TrainStepResponse ahead, again;
    grpc::Status of_ahead;
    std::thread asks([&] { of_ahead = trainer.Step(2, next, groups, &ahead); });
    absl::SleepFor(absl::Milliseconds(100));
    CHECK(trainer.Step(1, v0, groups, &response).ok());
    asks.join();
    INFO(of_ahead.error_message());
    REQUIRE(of_ahead.ok());
    CHECK(ahead.version().number() == 2);
    // Whoever did not hear of both asks for both again.
    REQUIRE(trainer.Step(1, v0, groups, &again).ok());
    CHECK(again.version().hash() == response.version().hash());
    REQUIRE(trainer.Step(2, response.version(), groups, &again).ok());
    CHECK(again.version().hash() == ahead.version().hash());
    CHECK(trainer.Step(2, v0, groups, &again).error_code() == StatusCode::INVALID_ARGUMENT);
  }
  SECTION("another version, another hash") {
    v1::PolicyVersion other = v0;
    other.set_number(4);
    CHECK(trainer.Step(5, other, groups, &response).error_code() ==
          StatusCode::FAILED_PRECONDITION);
    other = v0;
    other.set_hash("00000000000000000000000000000000");
    CHECK(trainer.Step(1, other, groups, &response).error_code() ==
          StatusCode::FAILED_PRECONDITION);
    CHECK(trainer.Step(2, v0, groups, &response).error_code() == StatusCode::INVALID_ARGUMENT);
  }
  SECTION("a batch that makes no sense changes nothing") {
    auto bad = groups;
    bad[0].mutable_experiences(0)->mutable_completion()->mutable_ids()->Set(0, 4000);
    CHECK(trainer.Step(1, v0, bad, &response).error_code() == StatusCode::INVALID_ARGUMENT);
    bad = groups;
    bad[0].mutable_experiences(0)->mutable_completion()->mutable_logprobs()->RemoveLast();
    CHECK(trainer.Step(1, v0, bad, &response).error_code() == StatusCode::INVALID_ARGUMENT);
    bad = groups;
    bad[0].clear_prompt_ids();
    CHECK(trainer.Step(1, v0, bad, &response).error_code() == StatusCode::INVALID_ARGUMENT);
    bad = groups;
    bad[0].mutable_experiences(0)->set_reward(std::nan(""));
    CHECK(trainer.Step(1, v0, bad, &response).error_code() == StatusCode::INVALID_ARGUMENT);
    CHECK(trainer.Step(1, v0, {}, &response).error_code() == StatusCode::INVALID_ARGUMENT);
    CHECK(trainer.Status().version().hash() == v0.hash());
    CHECK(trainer.Step(1, v0, groups, &response).ok());
  }
  SECTION("a caller that breaks off in the middle has begun nothing") {
    {
      CallContext context;
      auto writer = trainer.stub->TrainStep(&context, &response);
      v1::TrainStepChunk chunk;
      chunk.mutable_header()->set_step(1);
      *chunk.mutable_header()->mutable_base_version() = v0;
      chunk.mutable_header()->set_num_groups(2);
      writer->Write(chunk);
      *chunk.mutable_group() = groups[0];
      writer->Write(chunk);
      context.TryCancel();
      CHECK(writer->Finish().error_code() == StatusCode::CANCELLED);
    }
    CHECK(trainer.Step(1, v0, groups, &response).ok());
    CHECK(response.version().number() == 1);
  }
}

TEST_CASE("a killed trainer goes on from its checkpoint to the same bits") {
  const TestRun run;
  Trainer trainer(run);
  GeneratorMember generator(run);
  v1::TrainStepResponse step1, step2, again;
  REQUIRE(trainer.Step(1, trainer.Status().version(), Rollouts(generator), &step1).ok());
  const v1::SaveCheckpointResponse saved = trainer.Save("{\"cursor\": 17}");
  CHECK(saved.version().number() == 1);
  CHECK(std::filesystem::exists(saved.path()));
  generator.Take(step1.version(), trainer.address);
  const auto groups = Rollouts(generator, 2);
  REQUIRE(trainer.Step(2, step1.version(), groups, &step2).ok());

  SECTION("from the newest") {
    trainer.process->Kill();
    trainer.Restart();
    const v1::TrainerStatus status = trainer.Status();
    CHECK(status.version().number() == 1);
    CHECK(status.version().hash() == step1.version().hash());
    CHECK(status.checkpoint_extra_json() == "{\"cursor\": 17}");
    CHECK(status.checkpoint_version() == 1);
    CHECK(status.checkpoint_hash() == saved.checkpoint_hash());
    // The step before the checkpoint is still known.
    REQUIRE(trainer.Step(1, {}, {}, &again).ok());
    CHECK(again.version().hash() == step1.version().hash());
    CHECK(again.metrics().at("loss") == step1.metrics().at("loss"));
  }
  SECTION("from the one before, when the newest is damaged") {
    const v1::SaveCheckpointResponse newest = trainer.Save("{}");
    trainer.process->Kill();
    const std::string masters = newest.path() + "/masters.safetensors";
    std::filesystem::resize_file(masters, std::filesystem::file_size(masters) - 64);
    trainer.Restart();
    CHECK(trainer.Status().version().number() == 1);
    CHECK(trainer.process->Log().find(newest.path()) != std::string::npos);
  }
  REQUIRE(trainer.Step(2, step1.version(), groups, &again).ok());
  CHECK(again.version().hash() == step2.version().hash());
  CHECK(again.metrics().at("loss") == step2.metrics().at("loss"));
}

TEST_CASE("when every checkpoint is damaged the trainer refuses to begin anew") {
  const TestRun run;
  std::string path;
  {
    Trainer trainer(run);
    path = trainer.Save("{}").path();
  }
  std::ofstream(path + "/manifest.json") << "{";
  Process process = run.Start("trainer", "trainer-0");
  CHECK(process.WaitForExit(20000) == 2);
  CHECK(process.Log().find("manifest.json") != std::string::npos);
}

TEST_CASE("the exported folder is the policy") {
  const TestRun run;
  Trainer trainer(run);
  GeneratorMember generator(run);
  v1::TrainStepResponse step1;
  REQUIRE(trainer.Step(1, trainer.Status().version(), Rollouts(generator), &step1).ok());
  CallContext context, again, refused;
  v1::ExportPolicyRequest request;
  request.set_path(run.File("exported"));
  v1::ExportPolicyResponse response;
  const grpc::Status status = trainer.stub->ExportPolicy(&context, request, &response);
  INFO(status.error_message());
  REQUIRE(status.ok());
  CHECK(response.version().hash() == step1.version().hash());
  CHECK(trainer.stub->ExportPolicy(&again, request, &response).ok());

  const int port = FreePort();
  Process server(
      "stretto-generator",
      {"--model", run.File("exported"), "--chat-format", "none", "--port", absl::StrCat(port)},
      run.LogOf("exported"));
  REQUIRE(WaitForPort(server, port));
  auto stub = Connect<v1::Generator>(absl::StrCat("127.0.0.1:", port));
  CallContext status_context;
  v1::GeneratorStatus exported;
  REQUIRE(stub->GetGeneratorStatus(&status_context, {}, &exported).ok());
  CHECK(exported.version().hash() == step1.version().hash());

  request.set_path(run.File("exported") + "/../model/config.json");
  CHECK(!trainer.stub->ExportPolicy(&refused, request, &response).ok());
}
}  // namespace stretto::testing
