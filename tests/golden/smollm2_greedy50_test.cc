// Greedy text of SmolLM2 in fp32 against Hugging Face transformers: 50 prompts of many kinds in one
// batch of the inference engine (smollm2_greedy50.json, made by make_smollm2_greedy50.py). Needs
// the folder that make_smollm2.py writes, in STRETTO_SMOLLM2.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>

#include "engine/formats/model_files.h"
#include "engine/inference/inference_fixture.h"
#include "engine/text/tokenizer.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
constexpr int32_t kEos = 2;
constexpr uint64_t kStopping = 1000;  // added to the id of a request that heeds EOS

struct Golden {
  std::string prompt, text;
  std::vector<int32_t> prompt_ids, completion_ids;
  std::vector<double> gaps;  // of the best logit to the second, by token
};

std::vector<Golden> ReadGolden() {
  std::ifstream file(STRETTO_SOURCE_DIR "/tests/golden/smollm2_greedy50.json");
  const nlohmann::json json = nlohmann::json::parse(file);
  std::vector<Golden> rows;
  for (const auto& row : json) {
    rows.push_back(
        {row["prompt"], row["text"], row["prompt_ids"], row["completion_ids"], row["gaps"]});
  }
  return rows;
}

testing::Model OpenSmolLm2(const ModelFiles& files, int64_t max_context) {
  testing::Model model;
  auto device = CreateDevice({});
  REQUIRE_OK(device);
  model.device = *std::move(device);
  auto transformer = Transformer::Create(*model.device, files.config, {DType::kF32, max_context});
  REQUIRE_OK(transformer);
  model.transformer = *std::move(transformer);
  return model;
}

Request MakeRequest(const Golden& golden, uint64_t id, bool ignore_eos) {
  Request request;
  request.id = id;
  request.prompt_ids = golden.prompt_ids;
  request.sampling.temperature = 0;
  request.sampling.max_tokens = static_cast<int32_t>(golden.completion_ids.size());
  request.sampling.ignore_eos = ignore_eos;
  return request;
}

// Nothing, or where they part and how near a tie that token was.
std::string Difference(const Golden& golden, const std::vector<int32_t>& ids) {
  const auto [expected, found] = std::mismatch(golden.completion_ids.begin(),
                                               golden.completion_ids.end(), ids.begin(), ids.end());
  if (expected == golden.completion_ids.end() && found == ids.end()) return "";
  const auto at = static_cast<size_t>(expected - golden.completion_ids.begin());
  std::ostringstream text;
  text << "token " << at << " of " << ids.size();
  if (at < golden.gaps.size()) {
    text << ": expected " << golden.completion_ids[at] << " before the next best by a logit gap of "
         << golden.gaps[at];
  }
  if (found != ids.end()) text << ", found " << *found;
  return text.str();
}
}  // namespace

TEST_CASE("greedy text of 50 prompts is that of transformers in fp32") {
  const char* folder = std::getenv("STRETTO_SMOLLM2");
  if (folder == nullptr) {
    WARN("STRETTO_SMOLLM2 names no folder: SmolLM2's greedy text is not tested");
    return;
  }
  const std::vector<Golden> golden = ReadGolden();
  REQUIRE(golden.size() == 50);
  const auto files = OpenModel(folder);
  REQUIRE_OK(files);
  const auto tokenizer = Tokenizer::FromFolder(folder);
  REQUIRE_OK(tokenizer);
  const testing::Model model = OpenSmolLm2(*files, 1024);
  const auto stream = model.device->CreateStream();
  auto weights =
      ModelWeights::Load(*model.device, *stream, files->config, DType::kF32, *files->tensors);
  REQUIRE_OK(weights);
  EngineOptions options;
  options.num_kv_blocks = 1000;
  options.max_running = 128;
  options.eos_ids = {kEos};
  auto engine =
      InferenceEngine::Create(*model.transformer, {*std::move(weights), 0, "smollm2"}, options);
  REQUIRE_OK(engine);

  for (size_t i = 0; i < golden.size(); ++i) {
    const Golden& g = golden[i];
    const auto ids = (*tokenizer)->Encode(g.prompt, {.add_special_tokens = false});
    REQUIRE_OK(ids);
    CHECK(*ids == g.prompt_ids);
    REQUIRE_OK((*engine)->Submit(MakeRequest(g, i, /*ignore_eos=*/true)));
    if (std::count(g.completion_ids.begin(), g.completion_ids.end(), kEos) == 0) continue;
    REQUIRE_OK((*engine)->Submit(MakeRequest(g, kStopping + i, /*ignore_eos=*/false)));
  }
  testing::Results results;
  RunToEnd(**engine, results);
  int num_stopped = 0;
  for (size_t i = 0; i < golden.size(); ++i) {
    const Golden& g = golden[i];
    INFO("prompt " << i << ": " << g.prompt.substr(0, 60));
    INFO(Difference(g, results[i].ids));
    CHECK(results[i].ids == g.completion_ids);
    CHECK((*tokenizer)->Decode(results[i].ids, /*skip_special=*/false) == g.text);
    const auto eos = std::find(g.completion_ids.begin(), g.completion_ids.end(), kEos);
    if (eos == g.completion_ids.end()) continue;
    ++num_stopped;
    CHECK(results[kStopping + i].ids == std::vector<int32_t>(g.completion_ids.begin(), eos + 1));
    CHECK(results[kStopping + i].end.reason == FinishReason::kStop);
  }
  CHECK(num_stopped > 0);
}
}  // namespace stretto::engine
