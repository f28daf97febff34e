#include "engine/constrain/token_trie.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/text/tokenizer.h"

namespace stretto::engine {
std::shared_ptr<const TokenTrie> TokenTrie::Of(const Tokenizer& tokenizer,
                                               absl::Span<const int32_t> silent_ids) {
  std::vector<std::string> bytes(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (tokenizer.IsSpecial(id)) continue;
    if (std::find(silent_ids.begin(), silent_ids.end(), id) != silent_ids.end()) continue;
    bytes[static_cast<size_t>(id)] = tokenizer.TokenBytes(id);
  }
  return std::make_shared<const TokenTrie>(std::move(bytes));
}

TokenTrie::TokenTrie(std::vector<std::string> bytes) : bytes_(std::move(bytes)) {
  std::vector<int32_t> order(bytes_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [this](int32_t a, int32_t b) { return bytes_[a] < bytes_[b]; });
  // The text of the last node, as a path of nodes: sorted texts visit the trie depth first.
  std::vector<int32_t> path;
  const std::string* last = nullptr;
  for (const int32_t token : order) {
    const std::string& text = bytes_[token];
    if (text.empty()) continue;
    max_bytes_ = std::max(max_bytes_, static_cast<int32_t>(text.size()));
    if (text.size() == 1) single_bytes_[static_cast<uint8_t>(text[0])] = true;
    size_t common = 0;
    if (last != nullptr) {
      while (common < std::min(last->size(), text.size()) && (*last)[common] == text[common]) {
        ++common;
      }
    }
    const auto num_nodes = static_cast<int32_t>(nodes_.size());
    for (; path.size() > common; path.pop_back()) nodes_[path.back()].end = num_nodes;
    for (size_t i = common; i < text.size(); ++i) {
      path.push_back(static_cast<int32_t>(nodes_.size()));
      TrieNode& node = nodes_.emplace_back();
      node.byte = static_cast<uint8_t>(text[i]);
      node.depth = static_cast<int32_t>(i) + 1;
      node.tokens_begin = node.tokens_end = static_cast<int32_t>(tokens_.size());
    }
    tokens_.push_back(token);
    nodes_[path.back()].tokens_end = static_cast<int32_t>(tokens_.size());
    last = &text;
  }
  for (const int32_t node : path) nodes_[node].end = static_cast<int32_t>(nodes_.size());
}
}  // namespace stretto::engine
