// Properties on random text and random ids, input that is not UTF-8, what stands in a folder, and
// what is wrong with a broken tokenizer.json.
#include "engine/text/tokenizer.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "base/files.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/text/json_node.h"
#include "engine/text/stream_decoder.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

const std::string kFolder = STRETTO_SOURCE_DIR "/tests/golden/tokenizers/";
const char* const kNames[] = {"gpt2",   "llama3",    "qwen2",           "smollm2_style",
                              "llama2", "metaspace", "metaspace_always"};

std::string ReadFile(const std::string& path) {
  auto bytes = Files::Real().ReadAll(path);
  REQUIRE_OK(bytes);
  return *std::move(bytes);
}

std::unique_ptr<Tokenizer> Load(const std::string& name) {
  auto tokenizer = Tokenizer::FromFile(kFolder + name + ".tokenizer.json");
  REQUIRE_OK(tokenizer);
  return *std::move(tokenizer);
}

// Characters of all lengths, clustered so that words, marks and digits meet.
std::string RandomText(PhiloxStream* random, size_t num_characters) {
  static constexpr char32_t kRanges[][2] = {{0x20, 0x7E},     {0x61, 0x7A},      {0x00, 0x20},
                                            {0xA0, 0x17F},    {0x300, 0x330},    {0x400, 0x44F},
                                            {0x4E00, 0x4F00}, {0xAC00, 0xAD00},  {0x1F300, 0x1F64F},
                                            {0x80, 0xD7FF},   {0xE000, 0x10FFFF}};
  std::string text;
  while (num_characters > 0) {
    const auto& range = kRanges[random->Below(std::size(kRanges))];
    for (uint64_t run = random->Below(6) + 1; run > 0 && num_characters > 0; --run) {
      AppendUtf8(range[0] + static_cast<char32_t>(random->Below(range[1] - range[0] + 1)), &text);
      --num_characters;
    }
  }
  return text;
}

std::vector<int32_t> RandomIds(PhiloxStream* random, int32_t vocab_size) {
  std::vector<int32_t> ids(random->Below(24));
  for (int32_t& id : ids) id = static_cast<int32_t>(random->Below(vocab_size + 2)) - 1;
  return ids;
}

}  // namespace

TEST_CASE("Byte-level: Decode(Encode(x)) is x for every valid text") {
  const uint64_t seed = testing::Seed();
  INFO("seed " << seed);
  PhiloxStream random(seed);
  for (const char* name : {"gpt2", "llama3", "smollm2_style"}) {
    const auto tokenizer = Load(name);
    EncodeOptions options;
    options.add_special_tokens = false;
    options.parse_added = false;
    for (int i = 0; i < 400; ++i) {
      const std::string text = RandomText(&random, random.Below(80));
      INFO(name << " text " << Json(text).dump(-1, ' ', true));
      const auto ids = tokenizer->Encode(text, options);
      REQUIRE_OK(ids);
      REQUIRE(tokenizer->Decode(*ids, false) == text);
      std::string bytes;
      for (const int32_t id : *ids) bytes += tokenizer->TokenBytes(id);
      REQUIRE(bytes == text);
    }
  }
}

TEST_CASE("Streaming: what was emitted is text, final, and in all equal to Decode") {
  const uint64_t seed = testing::Seed();
  INFO("seed " << seed);
  PhiloxStream random(seed, 1);
  for (const char* name : kNames) {
    const auto tokenizer = Load(name);
    for (int i = 0; i < 300; ++i) {
      const auto ids = RandomIds(&random, tokenizer->vocab_size());
      const auto other = RandomIds(&random, tokenizer->vocab_size());
      INFO(name << " ids " << Json(ids).dump() << " other " << Json(other).dump());
      StreamDecoder stream(*tokenizer, i % 2 == 0);
      std::string text;
      std::vector<int32_t> so_far;
      for (const int32_t id : ids) {
        text += stream.Push(id);
        so_far.push_back(id);
        REQUIRE(IsValidUtf8(text));
        auto continued = so_far;
        continued.insert(continued.end(), other.begin(), other.end());
        REQUIRE(absl::StartsWith(tokenizer->Decode(continued, i % 2 == 0), text));
      }
      text += stream.Finish();
      REQUIRE(text == tokenizer->Decode(ids, i % 2 == 0));
    }
  }
}

TEST_CASE("A stream emits as early as it may") {
  const auto tokenizer = Load("llama3");
  const auto ids = *tokenizer->Encode("a 日", {false, true, true});
  StreamDecoder stream(*tokenizer);
  std::vector<std::string> parts;
  for (const int32_t id : ids) parts.push_back(stream.Push(id));
  CHECK(parts.front() == "a");
  CHECK(absl::EndsWith(parts.back(), "日"));
  CHECK(stream.Finish().empty());
  stream.Push(*tokenizer->Find("æ"));  // the byte E6 alone
  CHECK(stream.Finish() == "\uFFFD");
  CHECK(stream.Push(ids[0]) == "a");  // a finished stream starts anew
}

TEST_CASE("Broken UTF-8 is read as U+FFFD for each maximal broken part") {
  const auto tokenizer = Load("gpt2");
  const std::pair<std::string, std::string> cases[] = {
      {"a\xFFz", "a\uFFFDz"},
      {"\xE6\x97", "\uFFFD"},
      {"\xE6\x97z", "\uFFFDz"},
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},  // a surrogate
      {"\xC0\xAF", "\uFFFD\uFFFD"},            // an overlong slash
      {"\xF0\x9F\x91\xF0\x9F\x91\x8D", "\uFFFD\U0001F44D"},
      {"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"}};
  for (const auto& [broken, repaired] : cases) {
    INFO(Json(repaired).dump(-1, ' ', true));
    CHECK(*tokenizer->Encode(broken) == *tokenizer->Encode(repaired));
    CHECK(tokenizer->Decode(*tokenizer->Encode(broken)) == repaired);
  }
}

TEST_CASE("Random bytes encode and decode without harm") {
  const uint64_t seed = testing::Seed();
  INFO("seed " << seed);
  PhiloxStream random(seed, 2);
  for (const char* name : kNames) {
    const auto tokenizer = Load(name);
    for (int i = 0; i < 200; ++i) {
      std::string bytes(random.Below(60), '\0');
      for (char& b : bytes) b = static_cast<char>(random.Below(256));
      const auto ids = tokenizer->Encode(bytes);
      REQUIRE_OK(ids);
      REQUIRE(IsValidUtf8(tokenizer->Decode(*ids)));
    }
  }
}

TEST_CASE("One tokenizer serves many threads") {
  const auto tokenizer = Load("qwen2");
  PhiloxStream random(testing::Seed(), 3);
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> expected;
  for (int i = 0; i < 50; ++i) {
    texts.push_back(RandomText(&random, 100));
    expected.push_back(*tokenizer->Encode(texts.back()));
  }
  std::vector<int> num_wrong(4, 0);
  std::vector<std::thread> threads;
  for (int& wrong : num_wrong) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < texts.size(); ++i) {
        const auto ids = tokenizer->Encode(texts[i]);
        if (!ids.ok() || *ids != expected[i]) ++wrong;
        tokenizer->Decode(expected[i]);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(num_wrong == std::vector<int>(4, 0));
}

TEST_CASE("A folder's tokenizer_config.json names special tokens and the chat template") {
  testing::TempDir dir;
  const auto write = [&](const std::string& name, const std::string& text) {
    REQUIRE_OK(Files::Real().WriteAtomically(dir.File(name), text));
  };
  REQUIRE_FALSE(Tokenizer::FromFolder(dir.path()).ok());
  write("tokenizer.json", ReadFile(kFolder + "qwen2.tokenizer.json"));
  auto bare = Tokenizer::FromFolder(dir.path());
  REQUIRE_OK(bare);
  CHECK((*bare)->bos_id() == -1);
  CHECK(ParseJson((*bare)->ToTokenizerConfigJson(), "made").ok());

  const std::string config =
      R"({"bos_token": null, "eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"},
          "chat_template": [{"name": "tool_use", "template": "no"},
                            {"name": "default", "template": "yes"}]})";
  write("tokenizer_config.json", config);
  auto full = Tokenizer::FromFolder(dir.path());
  REQUIRE_OK(full);
  CHECK((*full)->bos_id() == -1);
  CHECK((*full)->eos_id() == *(*full)->Find("<|im_end|>"));
  CHECK((*full)->pad_id() == *(*full)->Find("<|endoftext|>"));
  CHECK((*full)->chat_template() == "yes");
  CHECK((*full)->ToTokenizerConfigJson() == config);
  CHECK((*full)->ToTokenizerJson() == ReadFile(kFolder + "qwen2.tokenizer.json"));
  CHECK((*full)->IsSpecial((*full)->eos_id()));
  CHECK_FALSE((*full)->IsSpecial(*(*full)->Find("a")));
  CHECK_FALSE((*full)->IsSpecial(-1));
  CHECK_FALSE((*full)->Find("no such token").has_value());
  CHECK((*full)->TokenText((*full)->vocab_size()).empty());
  CHECK((*full)->Decode({-1, (*full)->vocab_size(), INT32_MAX, *(*full)->Find("a")}) == "a");

  write("chat_template.jinja", "newer");
  CHECK((*Tokenizer::FromFolder(dir.path()))->chat_template() == "newer");
  write("tokenizer_config.json", R"({"eos_token": "<gone>"})");
  const auto missing = Tokenizer::FromFolder(dir.path());
  REQUIRE_FALSE(missing.ok());
  CHECK(absl::StrContains(missing.status().message(), "eos_token is \"<gone>\""));
}

TEST_CASE("A broken tokenizer.json is an error that says where and why") {
  const Json good = *ParseJson(ReadFile(kFolder + "llama3.tokenizer.json"), "good");
  REQUIRE_OK(Tokenizer::FromJson(good.dump(), "good"));
  struct Case {
    std::function<void(Json&)> spoil;
    std::string message;
  };
  const Case cases[] = {
      {[](Json& j) { j = 3; }, "expected an object"},
      {[](Json& j) { j.erase("model"); }, "f.json: the field \"model\" is missing"},
      {[](Json& j) { j["model"] = "BPE"; }, "f.json: model: expected an object, found string"},
      {[](Json& j) { j["model"]["type"] = "Unigram"; }, "\"Unigram\" is not supported"},
      {[](Json& j) { j["model"]["vocab"] = Json::array(); }, "model.vocab: expected an object"},
      {[](Json& j) { j["model"]["vocab"] = Json::object(); }, "the vocabulary is empty"},
      {[](Json& j) { j["model"]["vocab"]["a"] = "1"; }, "the id of \"a\" is not a whole number"},
      {[](Json& j) { j["model"]["vocab"]["a"] = -1; }, "has id -1"},
      {[](Json& j) { j["model"]["vocab"]["a"] = 7; }, "both have id 7"},
      {[](Json& j) { j["model"]["vocab"]["a"] = 1ll << 40; }, "the largest id is 1099511627776"},
      {[](Json& j) { j["model"]["vocab"]["a"] = 18446744073709551615ull; }, "too large"},
      {[](Json& j) { j["model"]["dropout"] = 0.1; }, "dropout is not supported"},
      {[](Json& j) { j["model"]["unk_token"] = "?!?"; }, "unk_token \"?!?\" is not in the"},
      {[](Json& j) { j["model"]["byte_fallback"] = 1; }, "byte_fallback: expected true or false"},
      {[](Json& j) {
         j["model"]["merges"][0] = {"a", "?!?"};
       },
       "model.merges[0]: the merge of"},
      {[](Json& j) { j["model"]["merges"] = {"ab"}; }, "model.merges[0]: \"ab\" is not two"},
      {[](Json& j) { j["model"]["merges"] = {1}; }, "model.merges[0]: expected \"left right\""},
      {[](Json& j) { j["added_tokens"][0]["id"] = 3; }, "has id 3, which is"},
      {[](Json& j) { j["added_tokens"][0]["id"] = 1 << 23; }, "the largest id is 8388608"},
      {[](Json& j) { j["added_tokens"][0]["id"] = 1ll << 33; }, "is not between 0 and"},
      {[](Json& j) { j["added_tokens"][0]["content"] = "a"; }, "in model.vocab"},
      {[](Json& j) { j["added_tokens"][0]["content"] = ""; }, "the content is empty"},
      {[](Json& j) { j["added_tokens"][1] = j["added_tokens"][0]; }, "repeats an earlier"},
      {[](Json& j) {
         j["normalizer"] = {{"type", "Nmt"}};
       },
       "the normalizer \"Nmt\" is not"},
      {[](Json& j) {
         j["pre_tokenizer"] = {{"type", "Bert"}};
       },
       "the pre-tokenizer \"Bert\" is"},
      {[](Json& j) {
         j["decoder"] = {{"type", "CTC"}};
       },
       "the decoder \"CTC\" is not supported"},
      {[](Json& j) {
         j["post_processor"] = {{"type", "X"}};
       },
       "the post-processor \"X\" is not"},
      {[](Json& j) {
         j["normalizer"] = {{"kind", "NFC"}};
       },
       "normalizer: the field \"type\" is"},
      {[](Json& j) {
         for (int i = 0; i < 50; ++i) {
           j["decoder"] = {{"type", "Sequence"}, {"decoders", Json::array({j["decoder"]})}};
         }
       },
       "nested too deeply"},
      {[](Json& j) {
         j["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}};
       },
       "pre_tokenizer: the pattern \"(a\" does not compile"},
      {[](Json& j) {
         j["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"Regex", "[a&&b]"}}}, {"behavior", "Isolated"}};
       },
       "an intersection of classes, which is not supported"},
      {[](Json& j) {
         j["post_processor"] = {{"type", "TemplateProcessing"},
                                {"single", {{{"SpecialToken", {{"id", "<s>"}}}}}},
                                {"special_tokens", Json::object()}};
       },
       "special_tokens: the field \"<s>\" is missing"},
  };
  for (const Case& c : cases) {
    Json spoiled = good;
    c.spoil(spoiled);
    const auto result = Tokenizer::FromJson(spoiled.dump(), "f.json");
    INFO("expected: " << c.message);
    REQUIRE_FALSE(result.ok());
    INFO("got: " << result.status().ToString());
    CHECK(absl::StrContains(result.status().message(), c.message));
    CHECK(absl::StartsWith(result.status().message(), "f.json"));
  }
}

TEST_CASE("Every truncation of a tokenizer.json is an error") {
  const std::string good = ReadFile(kFolder + "smollm2_style.tokenizer.json");
  const size_t end = good.find_last_of('}');
  for (size_t size = 0; size < end; size += 1 + size / 40) {
    const auto result = Tokenizer::FromJson(absl::string_view(good).substr(0, size), "cut.json");
    REQUIRE_FALSE(result.ok());
    REQUIRE(absl::StartsWith(result.status().message(), "cut.json: not valid JSON"));
  }
  CHECK_FALSE(Tokenizer::FromFile("/no/such/tokenizer.json").ok());
}

TEST_CASE("Long words and runs are encoded in reasonable time") {
  // Not measured here, but anything quadratic in these lengths would run into the test's timeout.
  for (const char* name : {"llama3", "llama2", "smollm2_style"}) {
    const auto tokenizer = Load(name);
    for (const char* unit : {"a", " ", "\n", "the", "日", "\xCC\x81", "1"}) {
      std::string text;
      while (text.size() < 300000) text += unit;
      text += "x";
      REQUIRE_OK(tokenizer->Encode(text));
    }
  }
}

}  // namespace stretto::engine
