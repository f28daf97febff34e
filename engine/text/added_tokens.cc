#include "engine/text/added_tokens.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

constexpr int64_t kMaxTokenId = (1 << 24) - 1;

absl::StatusOr<AddedToken> ReadToken(const JsonNode& node, const Vocabulary& vocabulary) {
  AddedToken token;
  ASSIGN_OR_RETURN(const int64_t id, node.Int("id"));
  ASSIGN_OR_RETURN(token.content, node.String("content"));
  ASSIGN_OR_RETURN(token.special, node.BoolOr("special", false));
  ASSIGN_OR_RETURN(token.single_word, node.BoolOr("single_word", false));
  ASSIGN_OR_RETURN(token.lstrip, node.BoolOr("lstrip", false));
  ASSIGN_OR_RETURN(token.rstrip, node.BoolOr("rstrip", false));
  ASSIGN_OR_RETURN(token.normalized, node.BoolOr("normalized", !token.special));
  if (id < 0 || id > kMaxTokenId) {
    return node.Error(absl::StrCat("the id ", id, " is not between 0 and ", kMaxTokenId));
  }
  token.id = static_cast<int32_t>(id);
  if (token.content.empty()) return node.Error("the content is empty");
  const int32_t known = vocabulary.Find(token.content);
  if (known >= 0 && known != token.id) {
    return node.Error(absl::StrCat("\"", token.content, "\" has id ", id, " here and id ", known,
                                   " in model.vocab"));
  }
  if (known < 0 && vocabulary.Has(token.id)) {
    return node.Error(absl::StrCat("\"", token.content, "\" has id ", id, ", which is \"",
                                   vocabulary.Text(token.id), "\" in model.vocab"));
  }
  return token;
}

}  // namespace

size_t SpaceStartBefore(absl::string_view text, size_t end) {
  while (end > 0) {
    const size_t previous = PreviousCharStart(text, end);
    size_t position = previous;
    if (!IsWhitespace(NextCodePoint(text, &position))) break;
    end = previous;
  }
  return end;
}

size_t SpaceEndAfter(absl::string_view text, size_t begin) {
  while (begin < text.size()) {
    size_t next = begin;
    if (!IsWhitespace(NextCodePoint(text, &next))) break;
    begin = next;
  }
  return begin;
}

void AddedTokens::Trie::Add(absl::string_view pattern, size_t token) {
  if (pattern.empty()) return;
  starts_[static_cast<uint8_t>(pattern[0])] = true;
  uint64_t node = 0;
  for (const char byte : pattern) {
    const auto [it, is_new] = children_.try_emplace(node << 8 | static_cast<uint8_t>(byte),
                                                    static_cast<uint32_t>(ends_.size()));
    if (is_new) ends_.push_back(kNone);
    node = it->second;
  }
  if (ends_[node] == kNone) ends_[node] = token;
}

size_t AddedTokens::Trie::Longest(absl::string_view text, size_t position, size_t* token) const {
  uint64_t node = 0;
  size_t longest = 0;
  for (size_t i = position; i < text.size(); ++i) {
    const auto it = children_.find(node << 8 | static_cast<uint8_t>(text[i]));
    if (it == children_.end()) break;
    node = it->second;
    if (ends_[node] != kNone) {
      longest = i + 1 - position;
      *token = ends_[node];
    }
  }
  return longest;
}

absl::StatusOr<AddedTokens> AddedTokens::FromJson(const JsonNode& node,
                                                  const Vocabulary& vocabulary,
                                                  const Normalizer& normalizer) {
  AddedTokens out;
  if (!node.Has("added_tokens")) return out;
  ASSIGN_OR_RETURN(const auto elements, node.Array("added_tokens"));
  for (const JsonNode& element : elements) {
    ASSIGN_OR_RETURN(AddedToken token, ReadToken(element, vocabulary));
    const size_t index = out.tokens_.size();
    if (!out.by_id_.emplace(token.id, index).second ||
        !out.by_content_.emplace(token.content, token.id).second) {
      return element.Error(absl::StrCat("\"", token.content, "\" with id ", token.id,
                                        " repeats an earlier added token"));
    }
    out.max_id_ = std::max(out.max_id_, token.id);
    if (token.single_word && out.word_character_ == nullptr) {
      ASSIGN_OR_RETURN(out.word_character_, Regex::Compile(R"([\w\p{Join_Control}])"));
    }
    out.tokens_.push_back(std::move(token));
  }
  RETURN_IF_ERROR(Annotate(out.BuildTries(normalizer), node.where()));
  const int64_t known = vocabulary.size() + static_cast<int64_t>(out.tokens_.size());
  if (out.max_id_ >= 4 * known + 65536) {
    return node.Error(
        absl::StrCat("added_tokens: the largest id is ", out.max_id_, " for ", known, " tokens"));
  }
  return out;
}

// Tokens that normalization makes equal: the first counts, special ones before others.
absl::Status AddedTokens::BuildTries(const Normalizer& normalizer) {
  for (const bool special : {true, false}) {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i].special != special) continue;
      std::string pattern = tokens_[i].content;
      bool at_start = false;
      if (tokens_[i].normalized) RETURN_IF_ERROR(normalizer.Apply(&pattern, &at_start));
      (tokens_[i].normalized ? normalized_ : raw_).Add(pattern, i);
    }
  }
  return absl::OkStatus();
}

const AddedToken* AddedTokens::Get(int32_t id) const {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : &tokens_[it->second];
}

int32_t AddedTokens::Find(absl::string_view content) const {
  const auto it = by_content_.find(content);
  return it == by_content_.end() ? -1 : it->second;
}

bool AddedTokens::IsWholeWord(absl::string_view text, size_t begin, size_t end) const {
  const auto is_word = [&](absl::string_view character) {
    bool found = false;
    const absl::Status status =
        word_character_->ForEachMatch(character, [&](size_t, size_t) { found = true; });
    return status.ok() && found;  // one class on one character: no limit can be reached
  };
  if (begin > 0) {
    const size_t previous = PreviousCharStart(text, begin);
    if (is_word(text.substr(previous, begin - previous))) return false;
  }
  return end == text.size() || !is_word(text.substr(end, Utf8Length(text[end])));
}

std::vector<TextPart> AddedTokens::Cut(absl::string_view text, bool normalized,
                                       bool parse_special) const {
  const Trie& trie = normalized ? normalized_ : raw_;
  std::vector<TextPart> parts;
  size_t done = 0;
  for (size_t i = trie.empty() ? text.size() : 0; i < text.size();) {
    size_t index = 0;
    const size_t length = trie.MayStart(text[i]) ? trie.Longest(text, i, &index) : 0;
    if (length == 0) {
      ++i;
      continue;
    }
    const AddedToken& token = tokens_[index];
    size_t begin = i, end = i + length;
    i = end;
    if (token.special && !parse_special) continue;
    if (token.single_word && !IsWholeWord(text, begin, end)) continue;
    if (token.lstrip) begin = std::max(SpaceStartBefore(text.substr(0, begin), begin), done);
    if (token.rstrip) end = SpaceEndAfter(text, end);
    if (begin > done) parts.push_back({done, begin, -1});
    // White space that an earlier rstrip took may leave nothing: then there is no token either.
    if (begin < end) parts.push_back({begin, end, token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({done, text.size(), -1});
  return parts;
}

}  // namespace stretto::engine
