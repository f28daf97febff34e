#include "engine/text/gguf_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

// The patterns of the models' own tokenizer.json files (Llama 3, Qwen2, Mistral Nemo).
constexpr absl::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr absl::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr absl::string_view kTekkenPattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct BytePre {
  const char* name;
  absl::string_view pattern;  // empty: GPT-2's, inside ByteLevel
  bool individual_digits;
  bool ignore_merges;
  bool nfc;
};
constexpr BytePre kBytePres[] = {
    {"", "", false, false, false},
    {"default", "", false, false, false},
    {"gpt-2", "", false, false, false},
    {"gpt2", "", false, false, false},
    {"smollm", "", true, false, false},
    {"llama-bpe", kLlama3Pattern, false, true, false},
    {"llama3", kLlama3Pattern, false, true, false},
    {"llama-v3", kLlama3Pattern, false, true, false},
    {"qwen2", kQwen2Pattern, false, false, true},
    {"tekken", kTekkenPattern, false, true, false},
};

absl::Status Error(absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat(kGgufName, ": ", message));
}

absl::StatusOr<BytePre> FindPre(const std::string& name) {
  std::string known;
  for (const BytePre& pre : kBytePres) {
    if (name == pre.name) return pre;
    if (pre.name[0] != 0) absl::StrAppend(&known, known.empty() ? "" : ", ", pre.name);
  }
  return absl::UnimplementedError(absl::StrCat(kGgufName, ": tokenizer.ggml.pre is \"", name,
                                               "\", which is not supported; supported are ",
                                               known));
}

int32_t TypeOf(const GgufVocab& vocab, size_t id) {
  return id < vocab.token_types.size() ? vocab.token_types[id] : int32_t{kGgufTokenNormal};
}

absl::Status Check(const GgufVocab& vocab) {
  if (vocab.tokens.empty()) return Error("there are no tokens");
  if (!vocab.token_types.empty() && vocab.token_types.size() != vocab.tokens.size()) {
    return Error(absl::StrCat(vocab.tokens.size(), " tokens, but ", vocab.token_types.size(),
                              " token types"));
  }
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    if (!IsValidUtf8(vocab.tokens[i])) {
      return Error(absl::StrCat("token ", i, " is not valid UTF-8"));
    }
  }
  for (const std::string& merge : vocab.merges) {
    if (!IsValidUtf8(merge)) return Error("a merge is not valid UTF-8");
  }
  if (!IsValidUtf8(vocab.chat_template)) return Error("the chat template is not valid UTF-8");
  const auto size = static_cast<int64_t>(vocab.tokens.size());
  for (const int id : {vocab.bos, vocab.eos, vocab.pad, vocab.unk}) {
    if (id < -1 || id >= size) {
      return Error(
          absl::StrCat("the special token id ", id, " is not among the ", size, " tokens"));
    }
  }
  if (vocab.add_bos && vocab.bos < 0) return Error("add_bos_token is set, but there is no BOS");
  if (vocab.add_eos && vocab.eos < 0) return Error("add_eos_token is set, but there is no EOS");
  return absl::OkStatus();
}

absl::StatusOr<Json> VocabObject(const GgufVocab& vocab) {
  Json out = Json::object();
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    if (!out.emplace(vocab.tokens[i], i).second) {
      return Error(absl::StrCat("token ", i, " \"", vocab.tokens[i], "\" appears twice"));
    }
  }
  return out;
}

Json AddedTokenList(const GgufVocab& vocab) {
  Json out = Json::array();
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    const int32_t type = TypeOf(vocab, i);
    const bool special = type == kGgufTokenControl || type == kGgufTokenUnknown;
    if ((!special && type != kGgufTokenUserDefined) || vocab.tokens[i].empty()) continue;
    out.push_back({{"id", i},
                   {"content", vocab.tokens[i]},
                   {"single_word", false},
                   {"lstrip", false},
                   {"rstrip", false},
                   {"normalized", false},
                   {"special", special}});
  }
  return out;
}

Json ByteLevelJson(bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

Json PreTokenizerJson(const BytePre& pre) {
  if (pre.pattern.empty() && !pre.individual_digits) return ByteLevelJson(true);
  Json steps = Json::array();
  if (pre.individual_digits) {
    steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  }
  if (!pre.pattern.empty()) {
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", std::string(pre.pattern)}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back(ByteLevelJson(pre.pattern.empty()));
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

Json PostProcessorJson(const GgufVocab& vocab) {
  Json single = Json::array();
  Json specials = Json::object();
  const auto add = [&](int id) {
    const std::string& name = vocab.tokens[id];
    single.push_back({{"SpecialToken", {{"id", name}, {"type_id", 0}}}});
    specials[name] = {{"id", name}, {"ids", Json::array({id})}, {"tokens", Json::array({name})}};
  };
  if (vocab.add_bos) add(vocab.bos);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  if (vocab.add_eos) add(vocab.eos);
  if (specials.empty()) return nullptr;
  // The same for the second of two texts, which the format demands.
  Json pair = single;
  for (Json piece : single) {
    for (auto& field : piece) field["type_id"] = 1;
    if (piece.contains("Sequence")) piece["Sequence"]["id"] = "B";
    pair.push_back(piece);
  }
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", pair},
          {"special_tokens", specials}};
}

Json BpeJson(Json vocab, Json merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", std::move(vocab)},
          {"merges", std::move(merges)}};
}

absl::Status FillByteLevel(const GgufVocab& vocab, Json* root) {
  ASSIGN_OR_RETURN(const BytePre pre, FindPre(vocab.pre));
  ASSIGN_OR_RETURN(Json tokens, VocabObject(vocab));
  Json merges = Json::array();
  for (size_t i = 0; i < vocab.merges.size(); ++i) {
    // A token never begins with the separating space: byte-level BPE writes spaces as "Ġ".
    const std::pair<std::string, std::string> sides =
        absl::StrSplit(vocab.merges[i], absl::MaxSplits(' ', 1));
    if (sides.first.empty() || sides.second.empty()) {
      return Error(
          absl::StrCat("merge ", i, " \"", vocab.merges[i], "\" is not two tokens and a space"));
    }
    merges.push_back({sides.first, sides.second});
  }
  Json& model = (*root)["model"] = BpeJson(std::move(tokens), std::move(merges));
  model["ignore_merges"] = pre.ignore_merges;
  if (pre.nfc) (*root)["normalizer"] = {{"type", "NFC"}};
  (*root)["pre_tokenizer"] = PreTokenizerJson(pre);
  (*root)["decoder"] = ByteLevelJson(true);
  return absl::OkStatus();
}

struct ScoredMerge {
  size_t left, right;
  float score;
};

// All ways to put two normal pieces together to a third one, best score first; of equal scores, in
// the order of the made piece's id, then of the parts' ids.
absl::StatusOr<Json> MergesFromScores(const GgufVocab& vocab) {
  if (vocab.scores.size() != vocab.tokens.size()) {
    return Error(absl::StrCat(vocab.tokens.size(), " tokens, but ", vocab.scores.size(),
                              " scores (the model \"llama\" needs one for each)"));
  }
  absl::flat_hash_map<absl::string_view, size_t> pieces;
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    if (TypeOf(vocab, i) == kGgufTokenNormal) pieces.emplace(vocab.tokens[i], i);
  }
  std::vector<ScoredMerge> merges;
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    const absl::string_view piece = vocab.tokens[i];
    if (piece.empty() || TypeOf(vocab, i) != kGgufTokenNormal) continue;
    const size_t first = merges.size();
    for (size_t cut = Utf8Length(piece[0]); cut < piece.size(); cut += Utf8Length(piece[cut])) {
      const auto left = pieces.find(piece.substr(0, cut));
      const auto right = pieces.find(piece.substr(cut));
      if (left == pieces.end() || right == pieces.end()) continue;
      merges.push_back({left->second, right->second, vocab.scores[i]});
    }
    std::sort(merges.begin() + first, merges.end(), [](const auto& a, const auto& b) {
      return std::make_pair(a.left, a.right) < std::make_pair(b.left, b.right);
    });
  }
  std::stable_sort(merges.begin(), merges.end(),
                   [](const auto& a, const auto& b) { return a.score > b.score; });
  Json out = Json::array();
  for (const ScoredMerge& m : merges) {
    out.push_back({vocab.tokens[m.left], vocab.tokens[m.right]});
  }
  return out;
}

absl::Status FillSentencePiece(const GgufVocab& vocab, Json* root) {
  for (size_t i = 0; i < vocab.scores.size(); ++i) {
    if (vocab.scores[i] != vocab.scores[i]) return Error(absl::StrCat("score ", i, " is NaN"));
  }
  ASSIGN_OR_RETURN(Json merges, MergesFromScores(vocab));
  ASSIGN_OR_RETURN(Json tokens, VocabObject(vocab));
  Json& model = (*root)["model"] = BpeJson(std::move(tokens), std::move(merges));
  model["byte_fallback"] = true;
  model["fuse_unk"] = true;
  if (vocab.unk >= 0) model["unk_token"] = vocab.tokens[vocab.unk];
  const std::string mark = "\u2581";
  Json steps = Json::array();
  if (vocab.add_space_prefix) steps.push_back({{"type", "Prepend"}, {"prepend", mark}});
  steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", mark}});
  (*root)["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
  Json decoders = Json::array();
  decoders.push_back({{"type", "Replace"}, {"pattern", {{"String", mark}}}, {"content", " "}});
  decoders.push_back({{"type", "ByteFallback"}});
  decoders.push_back({{"type", "Fuse"}});
  if (vocab.add_space_prefix) {
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  (*root)["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Json> TokenizerJsonFromGguf(const GgufVocab& vocab) {
  RETURN_IF_ERROR(Check(vocab));
  Json root = {{"version", "1.0"},      {"truncation", nullptr},
               {"padding", nullptr},    {"added_tokens", AddedTokenList(vocab)},
               {"normalizer", nullptr}, {"pre_tokenizer", nullptr}};
  if (vocab.model == "gpt2") {
    RETURN_IF_ERROR(FillByteLevel(vocab, &root));
  } else if (vocab.model == "llama") {
    RETURN_IF_ERROR(FillSentencePiece(vocab, &root));
  } else {
    return absl::UnimplementedError(
        absl::StrCat(kGgufName, ": tokenizer.ggml.model is \"", vocab.model,
                     "\", which is not supported; supported are gpt2 and llama"));
  }
  root["post_processor"] = PostProcessorJson(vocab);
  return root;
}

Json TokenizerConfigFromGguf(const GgufVocab& vocab) {
  Json out = {{"tokenizer_class", "PreTrainedTokenizerFast"},
              {"clean_up_tokenization_spaces", false},
              {"add_bos_token", vocab.add_bos},
              {"add_eos_token", vocab.add_eos}};
  const std::pair<const char*, int> fields[] = {{"bos_token", vocab.bos},
                                                {"eos_token", vocab.eos},
                                                {"pad_token", vocab.pad},
                                                {"unk_token", vocab.unk}};
  for (const auto& [key, id] : fields) {
    if (id >= 0) out[key] = vocab.tokens[id];
  }
  if (!vocab.chat_template.empty()) out["chat_template"] = vocab.chat_template;
  return out;
}

}  // namespace stretto::engine
