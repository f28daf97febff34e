// Reward models on texts, against transformers' scores of the same (tests/golden).
#include "services/scorer/reward_model.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/testing.h"
#include "engine/formats/export_hf.h"
#include "nlohmann/json.hpp"

namespace stretto::services {
namespace {
const std::string kTinyModel = STRETTO_SOURCE_DIR "/examples/tiny-model";

// The folder that tests/golden/make_reward_model.py gave to transformers.
std::string WriteRewardModel(const testing::TempDir& folder) {
  const auto model = engine::OpenModel(kTinyModel);
  REQUIRE_OK(model);
  engine::ExportOptions options;
  options.path = folder.File("judge");
  options.type = DType::kF32;
  options.config = engine::WithValueHead(model->config);
  options.tokenizer_folder = kTinyModel;
  REQUIRE_OK(engine::ExportHf(
      Files::Real(), options,
      [&](const engine::TensorSpec& tensor, int64_t begin, int64_t end, DType type, void* dst) {
        if (tensor.name != "score.weight") {
          return model->tensors->ReadRows(tensor.name, begin, end, type, dst);
        }
        for (int64_t i = 0; i < options.config.hidden_size; ++i) {
          static_cast<float*>(dst)[i] = static_cast<float>((37 * i) % 101 - 50) / 200;
        }
        return absl::OkStatus();
      }));
  return options.path;
}

RunConfig RunWith(const std::string& path, const std::string& dtype) {
  RunConfig run;
  run.model.dtype = dtype;
  RewardSpec spec;
  spec.type = spec.name = "model";
  spec.path = path;
  spec.chat_format = "none";
  run.rewards = {spec};
  return run;
}

JudgeQuery Query(const std::string& prompt, const std::vector<std::string>& completions) {
  JudgeQuery query;
  query.line_json = nlohmann::json{{"prompt", prompt}, {"answer", "x"}}.dump();
  for (const std::string& text : completions) {
    query.completions.push_back({text, static_cast<int64_t>(text.size())});
  }
  return query;
}

TEST_CASE("a reward model's scores are those of transformers, and know no company") {
  const testing::TempDir folder;
  const RunConfig run = RunWith(WriteRewardModel(folder), "f32");
  const auto model = RewardModel::Create(OptionsOfRewardModel(run, run.rewards[0], 2));
  REQUIRE_OK(model);
  const auto text = Files::Real().ReadAll(STRETTO_SOURCE_DIR "/tests/golden/reward_model.json");
  REQUIRE_OK(text);
  const auto cases = nlohmann::json::parse(*text);
  REQUIRE(cases.size() >= 5);
  for (const auto& c : cases) {
    const auto prompt = c["prompt"].get<std::string>(), answer = c["completion"].get<std::string>();
    INFO(prompt << answer);
    const auto alone = (*model)->Score(Query(prompt, {answer}));
    REQUIRE(alone.size() == 1);
    REQUIRE_OK(alone[0]);
    CHECK(std::abs(*alone[0] - c["score"].get<double>()) < 1e-4);
    const auto beside =
        (*model)->Score(Query(prompt, {"1", answer, std::string(200, '7'), answer}));
    REQUIRE(beside.size() == 4);
    for (const size_t i : {size_t{1}, size_t{3}}) {
      REQUIRE_OK(beside[i]);
      CHECK(*beside[i] == *alone[0]);  // the same bits
    }
  }
}

TEST_CASE("a judge weighs a reward model's scores; what it can't read is an error, not a zero") {
  const testing::TempDir folder;
  RunConfig run = RunWith(WriteRewardModel(folder), "bf16");
  run.rewards[0].weight = 0.5;
  run.rewards.emplace_back();
  run.rewards[1].type = run.rewards[1].name = "length";
  run.rewards[1].target_tokens = 4;
  Metrics metrics;
  const auto judge = Judge::Create(run.rewards, {16, &metrics, RewardModelsOf(run, 1)});
  REQUIRE_OK(judge);
  const auto judged =
      (*judge)->Score(Query("25+24=", {"49", std::string(400, '1')}), [] { return false; });
  REQUIRE_OK(judged);
  REQUIRE_OK((*judged)[0].status);
  CHECK(std::abs((*judged)[0].parts[0].value - 1.796) < 0.1);
  CHECK((*judged)[0].reward == 0.5 * (*judged)[0].parts[0].value + 1.0);
  CHECK(absl::IsInvalidArgument((*judged)[1].status));
  CHECK(absl::StrContains((*judged)[1].status.message(), "reads 255 at most"));
}

TEST_CASE("a model that writes is no reward model, and isn't taken for one") {
  const RunConfig run = RunWith(kTinyModel, "bf16");
  const auto model = RewardModel::Create(OptionsOfRewardModel(run, run.rewards[0], 1));
  CHECK(absl::IsInvalidArgument(model.status()));
  CHECK(absl::StrContains(model.status().message(), "expected a reward model"));
  Metrics metrics;
  const auto judge = Judge::Create(run.rewards, {16, &metrics, RewardModelsOf(run, 1)});
  CHECK(absl::StrContains(judge.status().message(), "rewards[0] (model)"));
}
}  // namespace
}  // namespace stretto::services
