// Generators with quantised weights, keys and values beside a trainer that has neither: it measures
// the gap, says what causes it, and goes on.
#include <catch2/catch.hpp>

#include "absl/strings/str_cat.h"
#include "tests/integration/trainer_client.h"

namespace stretto::testing {
namespace {
TestRunOptions Fast(const std::string& rollout) {
  TestRunOptions options;
  options.rollout = rollout;
  options.algorithm = "algorithm: {importance_cap: 2.0}\n";
  options.schedule = "schedule: {max_staleness: 0, numerics: fast}\n";
  return options;
}
}  // namespace

TEST_CASE("the log-prob gap of quantised generators is measured, labelled and corrected for") {
  struct Case {
    std::string rollout, profile, labels;
  };
  for (const Case& c : {Case{"weight_dtype: int8", "bf16+int8",
                             "kv_dtype=\"bf16\",statistic=\"mean\",weight_dtype=\"int8\""},
                        Case{"kv_dtype: int8", "bf16+kv-int8",
                             "kv_dtype=\"int8\",statistic=\"mean\",weight_dtype=\"bf16\""},
                        Case{"weight_dtype: int4, kv_dtype: fp8", "bf16+int4+kv-fp8",
                             "kv_dtype=\"fp8\",statistic=\"mean\",weight_dtype=\"int4\""}}) {
    INFO(c.rollout);
    const TestRun run(Fast(c.rollout));
    const int metrics_port = FreePort();
    Trainer trainer(run, {"--metrics-port", absl::StrCat(metrics_port)});
    GeneratorMember generator(run);
    CHECK(generator.Status().profile().dtype() == c.profile);
    v1::TrainStepResponse step;
    REQUIRE(trainer.Step(1, trainer.Status().version(), Rollouts(generator), &step).ok());
    CHECK(step.metrics().at("logprob_mismatch_mean") > 0);
    CHECK(step.metrics().at("logprob_mismatch_max") > step.metrics().at("logprob_mismatch_mean"));
    CHECK(!step.skipped());
    CHECK(trainer.process->Log().find("LOG-PROB MISMATCH") == std::string::npos);
    CHECK(Eventually([&] {
      return HttpGet(metrics_port, "/metrics")
                 .find(absl::StrCat("stretto_trainer_quantization_logprob_gap{", c.labels, "}")) !=
             std::string::npos;
    }));
    // The next version is quantised as it comes.
    generator.Take(step.version(), trainer.address);
    CHECK(generator.Status().version().number() == 1);
    CHECK(Generate(*generator.stub, MakeGenerateRequest(PromptOf(0), 2, 8)).status.ok());
  }
}

TEST_CASE("without quantising there is no gap and no such metric") {
  const TestRun run(Fast(""));
  const int metrics_port = FreePort();
  Trainer trainer(run, {"--metrics-port", absl::StrCat(metrics_port)});
  GeneratorMember generator(run);
  v1::TrainStepResponse step;
  REQUIRE(trainer.Step(1, trainer.Status().version(), Rollouts(generator), &step).ok());
  CHECK(step.metrics().at("logprob_mismatch_max") == 0);
  CHECK(Eventually([&] {
    return HttpGet(metrics_port, "/metrics").find("stretto_trainer_grad_norm") != std::string::npos;
  }));
  CHECK(HttpGet(metrics_port, "/metrics").find("quantization_logprob_gap") == std::string::npos);
}

TEST_CASE("a generator's flag cannot quantise what an exact run must have exact") {
  const TestRun run;
  for (const char* flag : {"--weight-dtype", "--kv-dtype"}) {
    Process process = run.Start("generator", "generator-0", 0, {flag, "int8"});
    CHECK(process.WaitForExit(20000) == 2);
    CHECK(process.Log().find("schedule.numerics is exact, but int8") != std::string::npos);
  }
}

TEST_CASE("the KV cache has the share of memory that it was given") {
  TestRunOptions options;
  options.cluster = "kv_cache_share: 0.001";
  const TestRun run(options);
  GeneratorMember generator(run);
  CHECK(generator.process.Log().find("MiB that this process may use") != std::string::npos);
  CHECK(Generate(*generator.stub, MakeGenerateRequest(PromptOf(0), 2, 8)).status.ok());
}
}  // namespace stretto::testing
