#include "engine/text/vocabulary.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace stretto::engine {

absl::Status Vocabulary::Build(std::vector<std::pair<std::string, int64_t>> tokens) {
  int64_t last = -1;
  size_t bytes = 0;
  for (const auto& [text, id] : tokens) {
    if (id < 0) return absl::InvalidArgumentError(absl::StrCat("token \"", text, "\" has id ", id));
    last = std::max(last, id);
    bytes += text.size();
  }
  const int64_t most = 4 * static_cast<int64_t>(tokens.size()) + 65536;
  if (last >= most || bytes >= kHole) {
    return absl::InvalidArgumentError(absl::StrCat("the largest id is ", last, " for ",
                                                   tokens.size(), " tokens of ", bytes,
                                                   " bytes; ids must stay below ", most));
  }
  arena_.clear();
  arena_.reserve(bytes);  // never reallocated: ids_ has views into it
  spans_.assign(last + 1, Span());
  ids_.clear();
  ids_.reserve(tokens.size());
  for (const auto& [text, id] : tokens) {
    if (spans_[id].begin != kHole) {
      return absl::InvalidArgumentError(absl::StrCat("tokens \"", Text(static_cast<int32_t>(id)),
                                                     "\" and \"", text, "\" both have id ", id));
    }
    spans_[id] = {static_cast<uint32_t>(arena_.size()), static_cast<uint32_t>(text.size())};
    arena_ += text;
    if (!ids_.emplace(Text(static_cast<int32_t>(id)), static_cast<int32_t>(id)).second) {
      return absl::InvalidArgumentError(absl::StrCat("token \"", text, "\" appears twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace stretto::engine
