// Every step of a tokenizer.json in many settings, against what Hugging Face's `tokenizers` does
// (testdata/cases.json, written by tools/make_cases.py). STRETTO_TEXT_CASES names another file of
// the same form, such as a long random one.
#include <catch2/catch.hpp>
#include <cstdlib>
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

using Ids = std::vector<int32_t>;

void CheckRow(const Tokenizer& tokenizer, const Json& row) {
  const auto text = row["text"].get<std::string>();
  INFO("text " << row["text"].dump(-1, ' ', true));
  const auto ids = tokenizer.Encode(text);
  REQUIRE_OK(ids);
  CHECK(*ids == row["ids"].get<Ids>());
  EncodeOptions options;
  options.add_special_tokens = false;
  options.parse_special = false;
  const auto plain = tokenizer.Encode(text, options);
  REQUIRE_OK(plain);
  CHECK(*plain == row.value("as_text", row["ids"].get<Ids>()));
}

void CheckDecode(const Tokenizer& tokenizer, const Json& entry) {
  const Ids ids = entry["ids"].get<Ids>();
  INFO("ids " << entry["ids"].dump());
  CHECK(tokenizer.Decode(ids, false) == entry["text"].get<std::string>());
  CHECK(tokenizer.Decode(ids, true) == entry["skip"].get<std::string>());
}

}  // namespace

TEST_CASE("Every step works as in the reference library") {
  const char* other = std::getenv("STRETTO_TEXT_CASES");
  const std::string path =
      other != nullptr ? other : STRETTO_SOURCE_DIR "/engine/text/testdata/cases.json";
  auto bytes = Files::Real().ReadAll(path);
  REQUIRE_OK(bytes);
  auto file = ParseJson(*bytes, path);
  REQUIRE_OK(file);
  REQUIRE((*file)["cases"].size() > 50);
  for (const Json& entry : (*file)["cases"]) {
    Json root = entry["sections"];
    INFO("model " << entry["model"] << " sections " << root.dump());
    root["model"] = (*file)["models"][entry["model"].get<std::string>()];
    auto tokenizer = Tokenizer::FromJson(root.dump(), "case");
    REQUIRE_OK(tokenizer);
    for (const Json& row : entry["rows"]) CheckRow(**tokenizer, row);
    for (const Json& ids : entry["decode"]) CheckDecode(**tokenizer, ids);
  }
}

}  // namespace stretto::engine
