#include "cli/local_model.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "base/files.h"
#include "base/testing.h"
#include "cli/checkpoint_lookup.h"

namespace stretto::cli {
namespace {
TEST_CASE("a checkpoint is found by its step, its name, its path, or as the latest") {
  const testing::TempDir run;
  const std::string root = run.File("checkpoints");
  for (const char* name : {"step-00000005", "step-00000012"}) {
    std::filesystem::create_directories(JoinPath(root, name));
    std::ofstream(JoinPath(JoinPath(root, name), "manifest.json")) << "{}";
  }
  const auto found = [&run](const std::string& which) {
    const auto folder = FindCheckpoint(run.path(), which);
    INFO(which << ": " << folder.status());
    REQUIRE(folder.ok());
    return std::filesystem::path(*folder).filename().string();
  };
  for (const char* newest : {"", "latest", "12", "step-00000012", "checkpoints/step-00000012"}) {
    CHECK(found(newest) == "step-00000012");
  }
  CHECK(found("5") == "step-00000005");
  CHECK(found(JoinPath(root, "step-00000005")) == "step-00000005");
  CHECK(found(std::filesystem::relative(JoinPath(root, "step-00000005")).string()) ==
        "step-00000005");
  for (const char* none : {"7", "step-5", "/nowhere", "later"}) {
    const auto absent = FindCheckpoint(run.path(), none);
    CHECK(absl::IsNotFound(absent.status()));
    CHECK(absl::StrContains(absent.status().message(), "holds step-00000005, step-00000012"));
  }
}

TEST_CASE("a folder that is no model is told what it is") {
  const testing::TempDir dir;
  const auto fault = [&dir] {
    LocalModelOptions options;
    options.host.path = dir.path();
    return std::string(LocalModel::Open(options).status().message());
  };
  CHECK(absl::EndsWith(fault(), "or a GGUF file"));
  std::ofstream(dir.File("small.gguf")) << "";
  CHECK(absl::EndsWith(fault(), "did you mean " + dir.File("small.gguf") + "?"));
  std::ofstream(dir.File("large.gguf")) << "";
  CHECK(absl::StrContains(fault(), "it holds 2 GGUF files: name one"));
  std::ofstream(dir.File("run.yaml")) << "";
  CHECK(absl::StrContains(fault(), "it is a run's folder"));
}

TEST_CASE("a run's context is the model's where the run names none, and never more") {
  const std::string examples = STRETTO_SOURCE_DIR "/examples/";
  const auto open = [&examples](const std::string& length, const std::string& more = "") {
    const auto run = ParseRunConfig(
        "model: {path: tiny-model, chat_format: none" + length +
            "}\ndata: {train: arithmetic/tiny-train.jsonl}\nrewards: [{type: integer}]\n" + more,
        examples + "run.yaml");
    REQUIRE_OK(run);
    LocalModelOptions options;
    options.host = services::OptionsOfRun(*run, /*threads=*/1);
    return LocalModel::Open(options);
  };
  const auto model = open("");
  REQUIRE_OK(model);
  CHECK((*model)->context() == 256);
  const auto shorter = open(", max_sequence_length: 128", "rollout: {max_tokens: 64}\n");
  REQUIRE_OK(shorter);
  CHECK((*shorter)->context() == 128);
  CHECK(absl::StrContains(open(", max_sequence_length: 1024").status().message(),
                          "was made for 256"));
}

// Weights are loaded while the tokenizer is read: what has been loaded is freed before its device.
TEST_CASE("a model whose tokenizer can't be read is an error, not a crash") {
  const std::string good = STRETTO_SOURCE_DIR "/examples/tiny-model";
  const testing::TempDir dir;
  const std::string broken = dir.path() + "/model";
  std::filesystem::copy(good, broken);
  std::ofstream(broken + "/tokenizer.json", std::ios::trunc) << "{\"a";
  LocalModelOptions options;
  options.host.threads = 1;
  options.host.path = broken;
  options.host.prompts.chat_format = "none";
  CHECK(!LocalModel::Open(options).ok());
  options.host.path = good;
  options.host.prompts.chat_format = "no such format";
  CHECK(!LocalModel::Open(options).ok());
  options.host.prompts.chat_format = "none";
  CHECK(LocalModel::Open(options).ok());
}
}  // namespace
}  // namespace stretto::cli
