// Hashes of checkpoints: XXH3-128 as 32 hex digits.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace stretto::engine {
struct Hash128 {
  uint64_t high = 0, low = 0;
  bool operator==(const Hash128&) const = default;
};
Hash128 RawHash(absl::Span<const uint8_t> bytes);
std::string HashBytes(absl::Span<const uint8_t> bytes);

// RawHash and HashBytes of bytes that come one run after another.
class RunningHash {
 public:
  RunningHash();
  ~RunningHash();
  RunningHash(const RunningHash&) = delete;
  RunningHash& operator=(const RunningHash&) = delete;
  void Add(absl::Span<const uint8_t> bytes);
  Hash128 Raw() const;
  std::string Text() const;

 private:
  void* state_;  // XXH3_state_t
};

// The hash of named parts in the order they are added. A part is written as
// length:name=length:value so that no two sequences of parts read the same.
class TreeHash {
 public:
  void Add(absl::string_view name, absl::string_view value) {
    absl::StrAppend(&text_, name.size(), ":", name, "=", value.size(), ":", value, "\n");
  }
  std::string Finish() const;

 private:
  std::string text_;
};
}  // namespace stretto::engine
