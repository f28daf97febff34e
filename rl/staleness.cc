#include "rl/staleness.h"

#include <algorithm>

namespace stretto::rl {
int64_t Staleness(int64_t trainer_version, absl::Span<const int64_t> token_versions) {
  if (token_versions.empty()) return 0;
  return trainer_version - *std::min_element(token_versions.begin(), token_versions.end());
}
}  // namespace stretto::rl
