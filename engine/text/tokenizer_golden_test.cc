// The tokenizers of tests/golden against what Hugging Face's `tokenizers` makes of the same lines:
// ids with and without special tokens, decoded text with and without them, random id sequences.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/testing.h"
#include "engine/text/json_node.h"
#include "engine/text/stream_decoder.h"
#include "engine/text/tokenizer.h"

namespace stretto::engine {
namespace {

const std::string kFolder = STRETTO_SOURCE_DIR "/tests/golden/tokenizers/";

Json ReadGolden(const std::string& name) {
  auto bytes = Files::Real().ReadAll(kFolder + name);
  REQUIRE_OK(bytes);
  auto json = ParseJson(*bytes, name);
  REQUIRE_OK(json);
  return *json;
}

std::string Streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  StreamDecoder stream(tokenizer, skip);
  std::string text;
  for (const int32_t id : ids) text += stream.Push(id);
  return text + stream.Finish();
}

void CheckText(const Tokenizer& tokenizer, const Json& entry) {
  const auto ids = entry["ids"].get<std::vector<int32_t>>();
  const auto text = entry["text"].get<std::string>();
  const auto text_skip = entry.value("text_skip", text);
  REQUIRE(tokenizer.Decode(ids, /*skip_special=*/false) == text);
  REQUIRE(tokenizer.Decode(ids, /*skip_special=*/true) == text_skip);
  REQUIRE(Streamed(tokenizer, ids, false) == text);
}

void CheckGolden(const Tokenizer& tokenizer, const Json& golden) {
  const Json corpus = ReadGolden("corpus.json");
  REQUIRE(corpus.size() == golden["lines"].size());
  REQUIRE(corpus.size() > 200);
  for (size_t i = 0; i < corpus.size(); ++i) {
    const std::string line = corpus[i];
    const Json& entry = golden["lines"][i];
    INFO("line " << i << ": " << line);
    const auto ids = entry["ids"].get<std::vector<int32_t>>();
    const auto plain =
        entry.contains("ids_plain") ? entry["ids_plain"].get<std::vector<int32_t>>() : ids;
    const auto encoded = tokenizer.Encode(line);
    REQUIRE_OK(encoded);
    REQUIRE(*encoded == ids);
    EncodeOptions options;
    options.add_special_tokens = false;
    REQUIRE(*tokenizer.Encode(line, options) == plain);
    CheckText(tokenizer, entry);
  }
  if (!golden.contains("decode")) return;
  for (const Json& entry : golden["decode"]) {
    INFO("ids " << entry["ids"].dump());
    CheckText(tokenizer, entry);
  }
}

}  // namespace

TEST_CASE("Ids and text equal those of the reference library") {
  const std::string name = GENERATE("gpt2", "llama3", "qwen2", "smollm2_style", "llama2",
                                    "metaspace", "metaspace_always");
  INFO(name);
  auto tokenizer = Tokenizer::FromFile(kFolder + name + ".tokenizer.json");
  REQUIRE_OK(tokenizer);
  CheckGolden(**tokenizer, ReadGolden(name + ".golden.json"));
}

}  // namespace stretto::engine
