// Tokens by id and ids by token: one arena of bytes, one table each way. Ids may have gaps, within
// reason. Immutable after loading.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace stretto::engine {

class Vocabulary {
 public:
  // All tokens at once; `tokens` is emptied. Errors: an id that is negative, that two tokens have,
  // or that is far beyond the number of tokens (a table of that size would be mostly holes).
  absl::Status Build(std::vector<std::pair<std::string, int64_t>> tokens);

  // One more than the largest id.
  int32_t size() const { return static_cast<int32_t>(spans_.size()); }
  // -1 when there is no such token.
  int32_t Find(absl::string_view token) const {
    const auto it = ids_.find(token);
    return it == ids_.end() ? -1 : it->second;
  }
  bool Has(int32_t id) const { return id >= 0 && id < size() && spans_[id].begin != kHole; }
  // Empty for ids without a token.
  absl::string_view Text(int32_t id) const {
    return Has(id) ? absl::string_view(arena_).substr(spans_[id].begin, spans_[id].size)
                   : absl::string_view();
  }

 private:
  static constexpr uint32_t kHole = UINT32_MAX;
  struct Span {
    uint32_t begin = kHole, size = 0;
  };
  std::string arena_;
  std::vector<Span> spans_;
  absl::flat_hash_map<absl::string_view, int32_t> ids_;  // views into arena_
};

}  // namespace stretto::engine
