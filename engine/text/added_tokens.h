// The "added_tokens" section of a tokenizer.json: tokens that are looked for in the text before
// anything else happens to it, special ones ("<|im_end|>") among them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/text/bpe.h"
#include "engine/text/json_node.h"
#include "engine/text/normalizer.h"
#include "engine/text/regex.h"

namespace stretto::engine {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool single_word = false;  // not inside a word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // looked for in the normalized text
  bool special = false;
};

// A part of a text: an added token, or (id -1) what lies between them.
struct TextPart {
  size_t begin = 0, end = 0;
  int32_t id = -1;
};

// Where the white space before `end` begins, and where that from `begin` on ends.
size_t SpaceStartBefore(absl::string_view text, size_t end);
size_t SpaceEndAfter(absl::string_view text, size_t begin);

// Immutable and thread-safe.
class AddedTokens {
 public:
  // `node` is the whole tokenizer.json; ids must agree with `vocabulary`.
  static absl::StatusOr<AddedTokens> FromJson(const JsonNode& node, const Vocabulary& vocabulary,
                                              const Normalizer& normalizer);

  // Null when `id` is not of an added token.
  const AddedToken* Get(int32_t id) const;
  int32_t Find(absl::string_view content) const;
  int32_t max_id() const { return max_id_; }

  // Cuts `text` (valid UTF-8) at the tokens of one kind: those looked for in the normalized text or
  // those looked for in the raw one. The leftmost match wins, then the longest. With
  // `parse_special` false, special tokens are passed over.
  std::vector<TextPart> Cut(absl::string_view text, bool normalized, bool parse_special) const;

 private:
  // Finds the longest pattern that starts at a place.
  class Trie {
   public:
    void Add(absl::string_view pattern, size_t token);
    bool MayStart(char byte) const { return starts_[static_cast<uint8_t>(byte)]; }
    // The length of the longest pattern at `position`, 0 for none.
    size_t Longest(absl::string_view text, size_t position, size_t* token) const;
    bool empty() const { return ends_.size() <= 1; }

   private:
    static constexpr size_t kNone = SIZE_MAX;
    std::array<bool, 256> starts_{};
    absl::flat_hash_map<uint64_t, uint32_t> children_;  // node << 8 | byte -> node
    std::vector<size_t> ends_{kNone};                   // node -> token that ends there
  };

  absl::Status BuildTries(const Normalizer& normalizer);
  bool IsWholeWord(absl::string_view text, size_t begin, size_t end) const;

  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<int32_t, size_t> by_id_;
  absl::flat_hash_map<std::string, int32_t> by_content_;
  Trie raw_, normalized_;
  std::shared_ptr<const Regex> word_character_;
  int32_t max_id_ = -1;
};

}  // namespace stretto::engine
