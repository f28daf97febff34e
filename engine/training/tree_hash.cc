#include "engine/training/tree_hash.h"

#include <xxhash.h>

#include "absl/strings/str_format.h"

namespace stretto::engine {
Hash128 RawHash(absl::Span<const uint8_t> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

std::string HashBytes(absl::Span<const uint8_t> bytes) {
  const Hash128 hash = RawHash(bytes);
  return absl::StrFormat("%016x%016x", hash.high, hash.low);
}

std::string TreeHash::Finish() const {
  return HashBytes({reinterpret_cast<const uint8_t*>(text_.data()), text_.size()});
}
}  // namespace stretto::engine
