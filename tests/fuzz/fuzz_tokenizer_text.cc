// Any bytes as a text, and as ids, for the small tokenizers of tests/golden: text survives the
// round trip where the tokenizer promises it, and streaming never takes back what it said.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "base/check.h"
#include "engine/text/stream_decoder.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

namespace {
using namespace stretto::engine;

struct Subject {
  std::unique_ptr<Tokenizer> tokenizer;
  bool keeps_text;  // Decode(Encode(x)) is x
};

const std::vector<Subject>& Subjects() {
  static const auto* subjects = [] {
    auto* out = new std::vector<Subject>;
    const std::pair<const char*, bool> names[] = {{"gpt2", true},
                                                  {"llama3", true},
                                                  {"qwen2", false},
                                                  {"smollm2_style", true},
                                                  {"llama2", false},
                                                  {"metaspace", false},
                                                  {"metaspace_always", false}};
    for (const auto& [name, keeps_text] : names) {
      auto tokenizer = Tokenizer::FromFile(std::string(STRETTO_SOURCE_DIR) +
                                           "/tests/golden/tokenizers/" + name + ".tokenizer.json");
      STRETTO_CHECK(tokenizer.ok());
      out->push_back({*std::move(tokenizer), keeps_text});
    }
    return out;
  }();
  return *subjects;
}

void CheckText(const Subject& subject, absl::string_view text) {
  EncodeOptions options;
  options.add_special_tokens = false;
  options.parse_added = false;
  const auto ids = subject.tokenizer->Encode(text, options);
  STRETTO_CHECK(ids.ok());
  std::string valid;
  AppendValidUtf8(text, /*flush=*/true, &valid);
  if (subject.keeps_text) STRETTO_CHECK(subject.tokenizer->Decode(*ids, false) == valid);
  STRETTO_CHECK(subject.tokenizer->Encode(text).ok());
}

void CheckIds(const Subject& subject, const uint8_t* data, size_t size) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i + 1 < size; i += 2) ids.push_back(data[i] | (data[i + 1] & 3) << 8);
  StreamDecoder stream(*subject.tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    text += stream.Push(id);
    STRETTO_CHECK(IsValidUtf8(text));
  }
  text += stream.Finish();
  STRETTO_CHECK(text == subject.tokenizer->Decode(ids));
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || size > 4096) return 0;
  const Subject& subject = Subjects()[data[0] % Subjects().size()];
  CheckText(subject, {reinterpret_cast<const char*>(data) + 1, size - 1});
  CheckIds(subject, data + 1, size - 1);
  return 0;
}
