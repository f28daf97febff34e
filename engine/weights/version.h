// What a policy version is made of: named tensors in host memory, each with a hash of its bytes,
// and the hash of them all. Two versions with the same hash are the same weights to the bit. Knows
// no model code.
//
// Hashes are XXH3 128-bit (xxHash 0.8 specification), written as 32 hex digits of its canonical
// form:
//   tensor  over its elements' little-endian bytes, row-major
//   tree    over, for each tensor in order: name, dtype name, shape, and the tensor's hash, each
//   with
//           its length before it (SerializeForHash), so that no two lists read the same
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/dtype.h"

namespace stretto::engine {
using Bytes = std::vector<uint8_t>;

// Immutable bytes together with whatever keeps them alive. Copies share.
class SharedBytes {
 public:
  SharedBytes() = default;  // nothing: IsSet() is false
  explicit SharedBytes(Bytes bytes) {
    auto owner = std::make_shared<const Bytes>(std::move(bytes));
    span_ = *owner;
    owner_ = std::move(owner);
  }
  SharedBytes(std::shared_ptr<const void> owner, absl::Span<const uint8_t> span)
      : owner_(std::move(owner)), span_(span) {}

  bool IsSet() const { return owner_ != nullptr; }
  absl::Span<const uint8_t> span() const { return span_; }
  size_t size() const { return span_.size(); }
  // The bytes and what keeps them.
  std::shared_ptr<const void> shared() const { return {owner_, span_.data()}; }

 private:
  std::shared_ptr<const void> owner_;
  absl::Span<const uint8_t> span_;
};

struct TensorEntry {
  std::string name;
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;
  std::string hash;

  // Product of the shape; negative when an extent is negative or the product overflows.
  int64_t NumElements() const;
  // Bytes of all elements; negative likewise.
  int64_t NumBytes() const;
  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

using Manifest = std::vector<TensorEntry>;

std::string TensorHash(absl::Span<const uint8_t> bytes);
// The same of bytes that come in pieces.
class TensorHasher {
 public:
  TensorHasher();
  ~TensorHasher();
  TensorHasher(const TensorHasher&) = delete;
  void Add(absl::Span<const uint8_t> piece);
  std::string Hash() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};
std::string ManifestHash(const Manifest& manifest);

// Shapes are sane, names unique and not empty, hashes 32 hex digits, no more than `max_bytes` in
// all. For manifests that come from outside.
absl::Status ValidateManifest(const Manifest& manifest, int64_t max_bytes);
// Whether both have the same names, dtypes and shapes in the same order.
bool SameTensors(const Manifest& a, const Manifest& b);

// Immutable once made; shared between threads.
struct WeightsVersion {
  int64_t number = 0;
  std::string hash;  // ManifestHash(manifest)
  Manifest manifest;
  std::vector<SharedBytes> tensors;  // as many as the manifest, in its order

  int64_t NumBytes() const;
};

// As messages tell it: "version 3 (its hash)", or "version 3" where no hash was given.
std::string VersionName(int64_t number, absl::string_view hash);

// Hashes every tensor and the tree. The entries' hash fields are ignored. CHECKs that sizes agree
// with shapes.
std::shared_ptr<const WeightsVersion> MakeVersion(int64_t number, Manifest manifest,
                                                  std::vector<SharedBytes> tensors);
// The same from bytes that came from outside: DATA_LOSS names the first tensor whose size or hash
// is not the manifest's, or tells that the tree's hash is not `hash`.
absl::StatusOr<std::shared_ptr<const WeightsVersion>> VerifyVersion(
    int64_t number, const std::string& hash, Manifest manifest, std::vector<SharedBytes> tensors);
// The same where the tensors have been verified already.
absl::StatusOr<std::shared_ptr<const WeightsVersion>> VerifiedVersion(
    int64_t number, const std::string& hash, Manifest manifest, std::vector<SharedBytes> tensors);
}  // namespace stretto::engine
