// A vocabulary as a trie of bytes, laid out for walking it together with an automaton: nodes in
// depth-first order, each with the place where its subtree ends. Immutable.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace stretto::engine {
class Tokenizer;

struct TrieNode {
  uint8_t byte = 0;
  int32_t depth = 0;                         // of its text; the root, which isn't stored, has 0
  int32_t end = 0;                           // behind the last node of its subtree
  int32_t tokens_begin = 0, tokens_end = 0;  // in tokens(): those whose text ends here
};

class TokenTrie {
 public:
  // `bytes` of token id i; empty: a token that stands for no text (special ones), never allowed.
  explicit TokenTrie(std::vector<std::string> bytes);
  // The tokenizer's, without special tokens and those of `silent_ids`.
  static std::shared_ptr<const TokenTrie> Of(const Tokenizer& tokenizer,
                                             absl::Span<const int32_t> silent_ids);

  absl::Span<const TrieNode> nodes() const { return nodes_; }
  absl::Span<const int32_t> tokens() const { return tokens_; }
  const std::string& bytes(int32_t token) const { return bytes_[static_cast<size_t>(token)]; }
  int32_t vocab_size() const { return static_cast<int32_t>(bytes_.size()); }
  // Of the longest token.
  int32_t max_bytes() const { return max_bytes_; }
  // The bytes that are a token by themselves.
  const std::bitset<256>& single_bytes() const { return single_bytes_; }

 private:
  std::vector<std::string> bytes_;
  std::vector<TrieNode> nodes_;
  std::vector<int32_t> tokens_;
  int32_t max_bytes_ = 0;
  std::bitset<256> single_bytes_;
};
}  // namespace stretto::engine
