// Tokenizers from GGUF metadata: the golden tokenizers, taken apart into metadata and put together
// again, give the golden ids; SentencePiece's scores merge as its algorithm says; what is exported
// reads back to the same behaviour. STRETTO_SMOLLM2 (a Hugging Face folder of SmolLM2-Instruct)
// lets the last test run on that model's own tokenizer.
#include "engine/text/gguf_json.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "base/files.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

const std::string kFolder = STRETTO_SOURCE_DIR "/tests/golden/tokenizers/";

Json ReadJson(const std::string& path) {
  const auto bytes = Files::Real().ReadAll(path);
  REQUIRE_OK(bytes);
  auto json = ParseJson(*bytes, path);
  REQUIRE_OK(json);
  return *json;
}

// The metadata that a byte-level tokenizer.json would have in a GGUF file.
GgufVocab Metadata(const Json& root, const std::string& pre) {
  GgufVocab vocab;
  vocab.model = "gpt2";
  vocab.pre = pre;
  std::map<int, std::string> tokens;
  for (const auto& [token, id] : root["model"]["vocab"].items()) tokens[id] = token;
  std::map<int, int> types;
  for (const Json& token : root["added_tokens"]) {
    tokens[token["id"]] = token["content"];
    types[token["id"]] = token["special"] ? kGgufTokenControl : kGgufTokenUserDefined;
  }
  for (const auto& [id, token] : tokens) {
    REQUIRE(id == static_cast<int>(vocab.tokens.size()));
    vocab.tokens.push_back(token);
    vocab.token_types.push_back(types.count(id) != 0 ? types[id] : int{kGgufTokenNormal});
  }
  for (const Json& m : root["model"]["merges"]) {
    vocab.merges.push_back(m.is_string() ? m.get<std::string>()
                                         : m[0].get<std::string>() + " " + m[1].get<std::string>());
  }
  return vocab;
}

void CheckIds(const Tokenizer& tokenizer, const std::string& golden_name) {
  const Json corpus = ReadJson(kFolder + "corpus.json");
  const Json golden = ReadJson(kFolder + golden_name);
  for (size_t i = 0; i < corpus.size(); ++i) {
    INFO("line " << i << ": " << corpus[i].dump());
    const auto ids = tokenizer.Encode(corpus[i].get<std::string>());
    REQUIRE_OK(ids);
    REQUIRE(*ids == golden["lines"][i]["ids"].get<std::vector<int32_t>>());
    REQUIRE(tokenizer.Decode(*ids, false) == golden["lines"][i]["text"].get<std::string>());
  }
}

// What was exported must mean the same.
void CheckExport(const Tokenizer& tokenizer, const std::string& golden_name) {
  testing::TempDir dir;
  REQUIRE_OK(
      Files::Real().WriteAtomically(dir.File("tokenizer.json"), tokenizer.ToTokenizerJson()));
  REQUIRE_OK(Files::Real().WriteAtomically(dir.File("tokenizer_config.json"),
                                           tokenizer.ToTokenizerConfigJson()));
  const auto again = Tokenizer::FromFolder(dir.path());
  REQUIRE_OK(again);
  CHECK((*again)->bos_id() == tokenizer.bos_id());
  CHECK((*again)->eos_id() == tokenizer.eos_id());
  CHECK((*again)->pad_id() == tokenizer.pad_id());
  CHECK((*again)->chat_template() == tokenizer.chat_template());
  CheckIds(**again, golden_name);
}

// SentencePiece's algorithm in its plainest form: of all neighbours that join to a piece, the one
// of best score, the leftmost of equals.
std::vector<std::string> MergeByScore(const GgufVocab& vocab, std::vector<std::string> symbols) {
  std::map<std::string, float> scores;
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    if (vocab.token_types[i] == kGgufTokenNormal) scores[vocab.tokens[i]] = vocab.scores[i];
  }
  for (;;) {
    size_t best = symbols.size();
    float best_score = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto it = scores.find(symbols[i] + symbols[i + 1]);
      if (it != scores.end() && (best == symbols.size() || it->second > best_score)) {
        best = i;
        best_score = it->second;
      }
    }
    if (best == symbols.size()) return symbols;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<int64_t>(best) + 1);
  }
}

GgufVocab SentencePieceVocab(PhiloxStream* random) {
  GgufVocab vocab;
  vocab.model = "llama";
  const auto add = [&](const std::string& token, float score, int32_t type) {
    vocab.tokens.push_back(token);
    vocab.scores.push_back(score);
    vocab.token_types.push_back(type);
  };
  add("<unk>", 0, kGgufTokenUnknown);
  add("<s>", 0, kGgufTokenControl);
  add("</s>", 0, kGgufTokenControl);
  for (int b = 0; b < 256; ++b) {
    char text[8];
    std::snprintf(text, sizeof(text), "<0x%02X>", b);
    add(text, 0, kGgufTokenByte);
  }
  std::vector<std::string> pieces = {"\u2581", "a", "b", "c", "d", "s", "<", ">", "/"};
  for (const std::string& p : pieces) add(p, -1e6F, kGgufTokenNormal);
  for (int i = 0; i < 30; ++i) {  // each joins two that are there, so each has one way at least
    const std::string joined =
        pieces[random->Below(pieces.size())] + pieces[random->Below(pieces.size())];
    if (joined.size() > 12 || joined == "</s>" || joined == "<s>") continue;
    bool known = false;
    for (const std::string& p : pieces) known = known || p == joined;
    if (known) continue;
    pieces.push_back(joined);
    add(joined, -static_cast<float>(random->Below(1000000)), kGgufTokenNormal);
  }
  vocab.bos = 1;
  vocab.eos = 2;
  vocab.unk = 0;
  vocab.add_bos = true;
  return vocab;
}

// Leaves ties out: pieces that can be cut in two ways may tie with themselves at overlapping
// places, where SentencePiece takes the leftmost and a merge list the first cut.
bool HasOneCutEach(const GgufVocab& vocab) {
  std::map<std::string, int> known;
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    if (vocab.token_types[i] == kGgufTokenNormal) known[vocab.tokens[i]] = 1;
  }
  for (const auto& [piece, unused] : known) {
    int cuts = 0;
    for (size_t cut = Utf8Length(piece[0]); cut < piece.size(); cut += Utf8Length(piece[cut])) {
      cuts += static_cast<int>(known.count(piece.substr(0, cut)) != 0 &&
                               known.count(piece.substr(cut)) != 0);
    }
    if (cuts > 1) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("Byte-level metadata gives the ids of the tokenizer.json it came from") {
  const std::pair<const char*, const char*> cases[] = {{"llama3", "llama-bpe"},
                                                       {"smollm2_style", "smollm"}};
  for (const auto& [name, pre] : cases) {
    INFO(name);
    GgufVocab vocab = Metadata(ReadJson(kFolder + name + ".tokenizer.json"), pre);
    if (DefaultAddBos(vocab.model, vocab.pre)) {
      for (size_t i = 0; i < vocab.tokens.size(); ++i) {
        if (vocab.tokens[i] == "<|begin_of_text|>") vocab.bos = static_cast<int>(i);
      }
      vocab.add_bos = true;
    }
    vocab.eos = 0;
    vocab.chat_template = "<|im_start|>";
    const auto tokenizer = Tokenizer::FromGguf(vocab);
    REQUIRE_OK(tokenizer);
    CheckIds(**tokenizer, std::string(name) + ".golden.json");
    CheckExport(**tokenizer, std::string(name) + ".golden.json");
  }
}

TEST_CASE("Qwen2's metadata brings NFC and its pattern along") {
  const Json root = ReadJson(kFolder + "qwen2.tokenizer.json");
  const auto from_gguf = Tokenizer::FromGguf(Metadata(root, "qwen2"));
  REQUIRE_OK(from_gguf);
  const auto from_json = Tokenizer::FromJson(root.dump(), "qwen2");
  REQUIRE_OK(from_json);
  for (const std::string text : {"e\u0301 cafe\u0301 12345 don't\n\n x",
                                 "<tool_call><|im_start|>\u1100\u1161 ", "  IT'S \u212b  "}) {
    CHECK(*(*from_gguf)->Encode(text) == *(*from_json)->Encode(text));
  }
}

TEST_CASE("Scores merge as SentencePiece merges") {
  const uint64_t seed = testing::Seed();
  INFO("seed " << seed);
  PhiloxStream random(seed, 4);
  int num_checked = 0;
  for (int round = 0; round < 400; ++round) {
    const GgufVocab vocab = SentencePieceVocab(&random);
    const auto tokenizer = Tokenizer::FromGguf(vocab);
    REQUIRE_OK(tokenizer);
    const bool exact = HasOneCutEach(vocab);
    for (int i = 0; i < 10; ++i) {
      std::string text;
      std::vector<std::string> symbols = {"\u2581"};
      for (uint64_t n = random.Below(30) + 1; n > 0; --n) {
        text += " abcds<>/"[random.Below(9)];
        symbols.push_back(text.back() == ' ' ? "\u2581" : text.substr(text.size() - 1));
      }
      INFO("text \"" << text << "\"");
      EncodeOptions options;
      options.parse_special = false;
      const auto ids = *(*tokenizer)->Encode(text, options);
      REQUIRE(ids[0] == 1);
      for (size_t k = 1; k < ids.size(); ++k) REQUIRE(ids[k] > 2);  // text makes no special token
      REQUIRE((*tokenizer)->Decode(ids) == text);
      if (!exact) continue;
      std::vector<std::string> pieces;
      for (size_t k = 1; k < ids.size(); ++k) pieces.emplace_back((*tokenizer)->TokenText(ids[k]));
      REQUIRE(pieces == MergeByScore(vocab, symbols));
      ++num_checked;
    }
  }
  CHECK(num_checked > 20);
}

TEST_CASE("SentencePiece metadata: byte fallback, space prefix, special tokens") {
  PhiloxStream random(5);
  GgufVocab vocab = SentencePieceVocab(&random);
  const auto tokenizer = *Tokenizer::FromGguf(vocab);
  const auto ids = *tokenizer->Encode("日");
  REQUIRE(ids.size() == 5);
  CHECK(tokenizer->TokenBytes(ids[2]) == "\xE6");
  CHECK(tokenizer->Decode(ids) == "日");
  CHECK(tokenizer->unk_id() == 0);
  CHECK(tokenizer->Encode("</s>").value().back() == 2);
  vocab.add_space_prefix = false;
  vocab.add_bos = false;
  vocab.add_eos = true;
  const auto bare = *Tokenizer::FromGguf(vocab);
  const auto bare_ids = *bare->Encode("日");
  REQUIRE(bare_ids.size() == 4);
  CHECK(bare_ids.back() == 2);
  CHECK(bare->Decode(*bare->Encode(" 日")) == " 日");
}

TEST_CASE("Bad GGUF metadata is an error that names the field") {
  const GgufVocab good = Metadata(ReadJson(kFolder + "smollm2_style.tokenizer.json"), "smollm");
  const auto message = [&](auto spoil) {
    GgufVocab vocab = good;
    spoil(vocab);
    const auto result = Tokenizer::FromGguf(vocab);
    REQUIRE_FALSE(result.ok());
    CHECK(absl::StartsWith(result.status().message(), "GGUF tokenizer"));
    return std::string(result.status().message());
  };
  using absl::StrContains;
  CHECK(StrContains(message([](auto& v) { v.pre = "viking"; }), "supported are default, gpt-2"));
  CHECK(StrContains(message([](auto& v) { v.model = "t5"; }), "supported are gpt2 and llama"));
  CHECK(StrContains(message([](auto& v) { v.model = "llama"; }), "0 scores"));
  CHECK(StrContains(message([](auto& v) { v.tokens.clear(); }), "no tokens"));
  CHECK(StrContains(message([](auto& v) { v.tokens[9] = v.tokens[8]; }), "appears twice"));
  CHECK(StrContains(message([](auto& v) { v.tokens[9] = "\xFF"; }), "token 9 is not valid UTF-8"));
  CHECK(StrContains(message([](auto& v) { v.token_types.pop_back(); }), "token types"));
  CHECK(StrContains(message([](auto& v) { v.merges[3] = "ab"; }), "merge 3"));
  CHECK(StrContains(message([](auto& v) { v.merges[3] = "a ?!?"; }), "model.merges[3]"));
  CHECK(StrContains(message([](auto& v) { v.eos = 1 << 20; }), "the special token id 1048576"));
  CHECK(StrContains(message([](auto& v) { v.add_bos = true; }), "there is no BOS"));
}

TEST_CASE("SmolLM2's own tokenizer gives the reference ids, from its folder and from metadata") {
  const char* folder = std::getenv("STRETTO_SMOLLM2");
  if (folder == nullptr) {
    WARN("STRETTO_SMOLLM2 names no folder: SmolLM2's tokenizer is not tested");
    return;
  }
  const auto from_folder = Tokenizer::FromFolder(folder);
  REQUIRE_OK(from_folder);
  CheckIds(**from_folder, "smollm2_ids.json");
  GgufVocab vocab = Metadata(*ParseJson((*from_folder)->ToTokenizerJson(), folder), "smollm");
  vocab.bos = (*from_folder)->bos_id();
  vocab.eos = (*from_folder)->eos_id();
  vocab.chat_template = (*from_folder)->chat_template();
  const auto from_metadata = Tokenizer::FromGguf(vocab);
  REQUIRE_OK(from_metadata);
  CheckIds(**from_metadata, "smollm2_ids.json");
  CheckExport(**from_metadata, "smollm2_ids.json");
  const auto chat = MakeChatTemplate((*from_folder)->chat_template());
  REQUIRE_OK(chat);
  CHECK(chat->default_system ==
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
}

}  // namespace stretto::engine
