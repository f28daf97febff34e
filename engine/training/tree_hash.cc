#include "engine/training/tree_hash.h"

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/xxh3.h"

namespace stretto::engine {
Hash128 RawHash(absl::Span<const uint8_t> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

namespace {
std::string TextOf(const Hash128& hash) {
  return absl::StrFormat("%016x%016x", hash.high, hash.low);
}
XXH3_state_t* StateOf(void* state) { return static_cast<XXH3_state_t*>(state); }
}  // namespace

std::string HashBytes(absl::Span<const uint8_t> bytes) { return TextOf(RawHash(bytes)); }

RunningHash::RunningHash() : state_(XXH3_createState()) {
  STRETTO_CHECK(state_ != nullptr);
  XXH3_128bits_reset(StateOf(state_));
}
RunningHash::~RunningHash() { XXH3_freeState(StateOf(state_)); }

void RunningHash::Add(absl::Span<const uint8_t> bytes) {
  XXH3_128bits_update(StateOf(state_), bytes.data(), bytes.size());
}

Hash128 RunningHash::Raw() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(StateOf(state_));
  return {hash.high64, hash.low64};
}
std::string RunningHash::Text() const { return TextOf(Raw()); }

std::string TreeHash::Finish() const {
  return HashBytes({reinterpret_cast<const uint8_t*>(text_.data()), text_.size()});
}
}  // namespace stretto::engine
