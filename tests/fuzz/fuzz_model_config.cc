// config.json and generation_config.json: what is accepted is valid, and comes back the same from
// the JSON that is written of it.
#include "base/check.h"
#include "engine/formats/testing/exercise.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stretto::engine;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  auto config = ParseHfConfig("input", text);
  if (config.ok()) formats_testing::ExerciseConfig(*config);
  ModelConfig with_ids;
  with_ids.vocab_size = 100;
  auto defaults = ParseGenerationConfig("input", text, with_ids);
  if (defaults.ok()) {
    const std::string json = ToHfGenerationConfigJson(with_ids, *defaults);
    ModelConfig again;
    again.vocab_size = 100;
    const auto back = ParseGenerationConfig("written", json, again);
    STRETTO_CHECK(back.ok());
    STRETTO_CHECK(ToHfGenerationConfigJson(again, *back) == json);
  }
  return 0;
}
