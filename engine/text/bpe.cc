#include "engine/text/bpe.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {
constexpr size_t kMaxCachedWordBytes = 128;
constexpr size_t kMaxCachedWords = 1 << 16;
constexpr size_t kMaxMerges = 1 << 24;
}  // namespace

absl::StatusOr<Bpe> Bpe::FromJson(const JsonNode& node) {
  ASSIGN_OR_RETURN(const std::string type, node.StringOr("type", "BPE"));
  if (type != "BPE") {
    return absl::UnimplementedError(absl::StrCat(node.where(), ": the model type \"", type,
                                                 "\" is not supported; supported is BPE"));
  }
  Bpe bpe;
  RETURN_IF_ERROR(bpe.ReadVocabulary(node));
  RETURN_IF_ERROR(bpe.ReadOptions(node));
  RETURN_IF_ERROR(bpe.ReadMerges(node));
  bpe.IndexCharacters();
  return bpe;
}

absl::Status Bpe::ReadVocabulary(const JsonNode& node) {
  ASSIGN_OR_RETURN(const JsonNode vocab, node.Object("vocab"));
  std::vector<std::pair<std::string, int64_t>> tokens;
  tokens.reserve(vocab.value().size());
  for (const auto& [token, id] : vocab.value().items()) {
    if (!id.is_number_integer()) {
      return vocab.Error(absl::StrCat("the id of \"", token, "\" is not a whole number"));
    }
    const JsonNode entry(id, absl::StrCat(vocab.where(), "[\"", token, "\"]"));
    ASSIGN_OR_RETURN(const int64_t value, entry.AsInt());
    tokens.emplace_back(token, value);
  }
  if (tokens.empty()) return vocab.Error("the vocabulary is empty");
  return Annotate(vocabulary_.Build(std::move(tokens)), vocab.where());
}

absl::Status Bpe::ReadOptions(const JsonNode& node) {
  ASSIGN_OR_RETURN(byte_fallback_, node.BoolOr("byte_fallback", false));
  ASSIGN_OR_RETURN(fuse_unk_, node.BoolOr("fuse_unk", false));
  ASSIGN_OR_RETURN(ignore_merges_, node.BoolOr("ignore_merges", false));
  ASSIGN_OR_RETURN(continuing_prefix_, node.StringOr("continuing_subword_prefix", ""));
  ASSIGN_OR_RETURN(end_of_word_suffix_, node.StringOr("end_of_word_suffix", ""));
  if (node.Has("dropout") && node.value()["dropout"] != 0) {
    return node.Error("dropout is not supported: the same text must give the same ids");
  }
  ASSIGN_OR_RETURN(const std::string unk, node.StringOr("unk_token", ""));
  if (!unk.empty()) {
    unk_id_ = vocabulary_.Find(unk);
    if (unk_id_ < 0) {
      return node.Error(absl::StrCat("unk_token \"", unk, "\" is not in the vocabulary"));
    }
  }
  return absl::OkStatus();
}

// Reads "a b" strings and ["a", "b"] pairs.
absl::Status Bpe::ReadMerges(const JsonNode& node) {
  ASSIGN_OR_RETURN(const auto merges, node.Array("merges"));
  if (merges.size() > kMaxMerges) return node.Error("too many merges");
  merges_.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const Json& merge = merges[i].value();
    std::string left, right;
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else if (merge.is_string()) {
      const std::string both = merge.get<std::string>();
      const size_t space = both.find(' ');
      if (space == std::string::npos || both.find(' ', space + 1) != std::string::npos) {
        return merges[i].Error(absl::StrCat("\"", both, "\" is not two tokens and a space"));
      }
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else {
      return merges[i].Error("expected \"left right\" or [\"left\", \"right\"]");
    }
    RETURN_IF_ERROR(AddMerge(merges[i], static_cast<int32_t>(i), left, right));
  }
  return absl::OkStatus();
}

absl::Status Bpe::AddMerge(const JsonNode& where, int32_t rank, absl::string_view left,
                           absl::string_view right) {
  if (right.size() < continuing_prefix_.size()) {
    return where.Error(absl::StrCat("\"", right, "\" is shorter than continuing_subword_prefix"));
  }
  const std::string whole = absl::StrCat(left, right.substr(continuing_prefix_.size()));
  for (const absl::string_view token : {left, right, absl::string_view(whole)}) {
    if (vocabulary_.Find(token) < 0) {
      return where.Error(absl::StrCat("the merge of \"", left, "\" and \"", right, "\" names \"",
                                      token, "\", which is not in the vocabulary"));
    }
  }
  merges_[PairKey(vocabulary_.Find(left), vocabulary_.Find(right))] = {rank,
                                                                       vocabulary_.Find(whole)};
  return absl::OkStatus();
}

void Bpe::IndexCharacters() {
  for (char32_t c = 0; c < low_characters_.size(); ++c) {
    std::string text;
    AppendUtf8(c, &text);
    low_characters_[c] = vocabulary_.Find(text);
  }
  for (int b = 0; b < 256; ++b) byte_ids_[b] = vocabulary_.Find(absl::StrFormat("<0x%02X>", b));
}

int32_t Bpe::FindCharacter(absl::string_view character) const {
  if (static_cast<unsigned char>(character[0]) < 0xC6) {  // U+0180 is C6 80
    size_t position = 0;
    return low_characters_[NextCodePoint(character, &position)];
  }
  return vocabulary_.Find(character);
}

void BpeEncoder::Encode(absl::string_view word, std::vector<int32_t>* ids) {
  if (bpe_.ignore_merges_) {
    if (const int32_t id = bpe_.vocabulary_.Find(word); id >= 0) {
      ids->push_back(id);
      return;
    }
  }
  const bool cacheable = word.size() <= kMaxCachedWordBytes;
  if (cacheable) {
    if (const auto it = cache_.find(word); it != cache_.end()) {
      const auto begin = cached_.begin() + it->second.first;
      ids->insert(ids->end(), begin, begin + it->second.second);
      return;
    }
  }
  MakeSymbols(word);
  MergeAll();
  const size_t first = ids->size();
  for (const Symbol& symbol : symbols_) {
    if (symbol.alive) ids->push_back(symbol.id);
  }
  if (cacheable && cache_.size() < kMaxCachedWords) {
    cache_.emplace(word, std::make_pair(cached_.size(), ids->size() - first));
    cached_.insert(cached_.end(), ids->begin() + first, ids->end());
  }
}

void BpeEncoder::AddSymbol(int32_t id) {
  const auto index = static_cast<int32_t>(symbols_.size());
  symbols_.push_back({id, index - 1, index + 1, true});
}

int32_t BpeEncoder::FindSymbol(absl::string_view character, bool first, bool last) {
  const bool prefixed = !first && !bpe_.continuing_prefix_.empty();
  const bool suffixed = last && !bpe_.end_of_word_suffix_.empty();
  if (!prefixed && !suffixed) return bpe_.FindCharacter(character);
  return bpe_.vocabulary_.Find(absl::StrCat(prefixed ? bpe_.continuing_prefix_ : "", character,
                                            suffixed ? bpe_.end_of_word_suffix_ : ""));
}

// One symbol a character; a character without a token becomes its bytes, where all of them have
// tokens, else the unknown token (one for a run of them with fuse_unk), else nothing. A pending
// unknown is added before the next known character, after bytes in between: so do `tokenizers`.
void BpeEncoder::MakeSymbols(absl::string_view word) {
  symbols_.clear();
  bool unk_pending = false;
  for (size_t i = 0; i < word.size();) {
    const absl::string_view character = word.substr(i, Utf8Length(word[i]));
    const bool first = i == 0;
    i += character.size();
    const int32_t id = FindSymbol(character, first, i == word.size());
    if (id >= 0) {
      if (unk_pending) AddSymbol(bpe_.unk_id_);
      unk_pending = false;
      AddSymbol(id);
      continue;
    }
    const auto byte_id = [&](char b) { return bpe_.byte_ids_[static_cast<uint8_t>(b)]; };
    if (bpe_.byte_fallback_ &&
        std::all_of(character.begin(), character.end(), [&](char b) { return byte_id(b) >= 0; })) {
      for (const char b : character) AddSymbol(byte_id(b));
      continue;
    }
    if (bpe_.unk_id_ >= 0) {
      if (unk_pending && !bpe_.fuse_unk_) AddSymbol(bpe_.unk_id_);
      unk_pending = true;
    }
  }
  if (unk_pending) AddSymbol(bpe_.unk_id_);
  if (!symbols_.empty()) symbols_.back().next = -1;
}

void BpeEncoder::PushCandidate(int32_t left, int32_t right) {
  const auto it = bpe_.merges_.find(Bpe::PairKey(symbols_[left].id, symbols_[right].id));
  if (it == bpe_.merges_.end()) return;
  heap_.push_back({it->second.rank, left, it->second.new_id});
  std::push_heap(heap_.begin(), heap_.end());
}

// Merges the pair of lowest rank, the leftmost of equals, until none is left. Entries of the heap
// that no longer describe their pair are skipped when they come up.
void BpeEncoder::MergeAll() {
  heap_.clear();
  for (size_t i = 0; i + 1 < symbols_.size(); ++i) {
    PushCandidate(static_cast<int32_t>(i), static_cast<int32_t>(i + 1));
  }
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Candidate top = heap_.back();
    heap_.pop_back();
    Symbol& left = symbols_[top.position];
    if (!left.alive || left.next < 0) continue;
    Symbol& right = symbols_[left.next];
    const auto it = bpe_.merges_.find(Bpe::PairKey(left.id, right.id));
    if (it == bpe_.merges_.end() || it->second.new_id != top.new_id) continue;
    left.id = top.new_id;
    right.alive = false;
    left.next = right.next;
    if (right.next >= 0) symbols_[right.next].previous = top.position;
    if (left.previous >= 0) PushCandidate(left.previous, top.position);
    if (left.next >= 0) PushCandidate(top.position, left.next);
  }
}

}  // namespace stretto::engine
