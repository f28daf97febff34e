#include "engine/weights/version.h"

#include <limits>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/xxh3.h"

namespace stretto::engine {
namespace {
constexpr int64_t kMaxTensors = 1 << 20;
constexpr int64_t kMaxRank = 8;
constexpr size_t kHashDigits = 32;

std::string Hex(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest)));
}

void AppendU64(std::string& out, uint64_t value) {
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

void AppendText(std::string& out, absl::string_view text) {
  AppendU64(out, text.size());
  out.append(text.data(), text.size());
}

std::string SerializeForHash(const Manifest& manifest) {
  std::string out;
  AppendU64(out, manifest.size());
  for (const TensorEntry& entry : manifest) {
    AppendText(out, entry.name);
    AppendText(out, Name(entry.dtype));
    AppendU64(out, entry.shape.size());
    for (const int64_t extent : entry.shape) AppendU64(out, static_cast<uint64_t>(extent));
    AppendText(out, entry.hash);
  }
  return out;
}

bool IsHash(const std::string& hash) {
  if (hash.size() != kHashDigits) return false;
  for (const char c : hash) {
    if (!absl::ascii_isdigit(c) && (c < 'a' || c > 'f')) return false;
  }
  return true;
}

// The version's hash has been checked or made by the caller.
std::shared_ptr<const WeightsVersion> Build(int64_t number, std::string hash, Manifest manifest,
                                            std::vector<SharedBytes> tensors) {
  auto version = std::make_shared<WeightsVersion>();
  version->number = number;
  version->hash = std::move(hash);
  version->manifest = std::move(manifest);
  version->tensors = std::move(tensors);
  return version;
}
}  // namespace

int64_t TensorEntry::NumElements() const {
  int64_t product = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return -1;
  }
  return product;
}

int64_t TensorEntry::NumBytes() const {
  int64_t bytes = 0;
  const int64_t elements = NumElements();
  if (elements < 0) return -1;
  if (__builtin_mul_overflow(elements, static_cast<int64_t>(SizeOf(dtype)), &bytes)) return -1;
  return bytes;
}

std::string TensorHash(absl::Span<const uint8_t> bytes) {
  return Hex(XXH3_128bits(bytes.data(), bytes.size()));
}

// Its members want to be aligned.
struct TensorHasher::State {
  XXH3_state_t hash;
};
TensorHasher::TensorHasher() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->hash);
}
TensorHasher::~TensorHasher() = default;
void TensorHasher::Add(absl::Span<const uint8_t> piece) {
  XXH3_128bits_update(&state_->hash, piece.data(), piece.size());
}
std::string TensorHasher::Hash() const { return Hex(XXH3_128bits_digest(&state_->hash)); }

std::string VersionName(int64_t number, absl::string_view hash) {
  return absl::StrCat("version ", number, hash.empty() ? "" : absl::StrCat(" (", hash, ")"));
}

std::string ManifestHash(const Manifest& manifest) {
  const std::string text = SerializeForHash(manifest);
  return Hex(XXH3_128bits(text.data(), text.size()));
}

absl::Status ValidateManifest(const Manifest& manifest, int64_t max_bytes) {
  if (static_cast<int64_t>(manifest.size()) > kMaxTensors) {
    return absl::InvalidArgumentError(absl::StrCat("manifest: ", manifest.size(), " tensors"));
  }
  std::set<absl::string_view> names;
  int64_t total = 0;
  for (const TensorEntry& entry : manifest) {
    if (entry.name.empty()) return absl::InvalidArgumentError("manifest: a tensor without a name");
    const auto bad = [&entry](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat("manifest: tensor ", entry.name, ": ", what));
    };
    if (!names.insert(entry.name).second) return bad("is there twice");
    if (static_cast<int64_t>(entry.shape.size()) > kMaxRank) return bad("too many dimensions");
    if (!IsHash(entry.hash)) return bad("its hash is not 32 hex digits");
    const int64_t bytes = entry.NumBytes();
    if (bytes < 0) return bad("impossible shape");
    if (__builtin_add_overflow(total, bytes, &total) || total > max_bytes) {
      return bad(absl::StrCat("the version is larger than ", max_bytes, " bytes"));
    }
  }
  return absl::OkStatus();
}

bool SameTensors(const Manifest& a, const Manifest& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].name != b[i].name || a[i].dtype != b[i].dtype || a[i].shape != b[i].shape) {
      return false;
    }
  }
  return true;
}

int64_t WeightsVersion::NumBytes() const {
  int64_t total = 0;
  for (const SharedBytes& bytes : tensors) total += static_cast<int64_t>(bytes.size());
  return total;
}

std::shared_ptr<const WeightsVersion> MakeVersion(int64_t number, Manifest manifest,
                                                  std::vector<SharedBytes> tensors) {
  STRETTO_CHECK(manifest.size() == tensors.size());
  for (size_t i = 0; i < manifest.size(); ++i) {
    STRETTO_CHECK(manifest[i].NumBytes() == static_cast<int64_t>(tensors[i].size()));
    manifest[i].hash = TensorHash(tensors[i].span());
  }
  std::string hash = ManifestHash(manifest);
  return Build(number, std::move(hash), std::move(manifest), std::move(tensors));
}

absl::StatusOr<std::shared_ptr<const WeightsVersion>> VerifyVersion(
    int64_t number, const std::string& hash, Manifest manifest, std::vector<SharedBytes> tensors) {
  if (manifest.size() != tensors.size()) {
    return absl::DataLossError(absl::StrCat("version ", number, ": ", tensors.size(),
                                            " tensors, the manifest has ", manifest.size()));
  }
  for (size_t i = 0; i < manifest.size(); ++i) {
    const TensorEntry& entry = manifest[i];
    if (!tensors[i].IsSet() || entry.NumBytes() != static_cast<int64_t>(tensors[i].size())) {
      return absl::DataLossError(absl::StrCat("version ", number, ": tensor ", entry.name, " has ",
                                              tensors[i].size(), " bytes, expected ",
                                              entry.NumBytes()));
    }
    if (TensorHash(tensors[i].span()) != entry.hash) {
      return absl::DataLossError(absl::StrCat("version ", number, ": the bytes of tensor ",
                                              entry.name, " do not have the manifest's hash"));
    }
  }
  return VerifiedVersion(number, hash, std::move(manifest), std::move(tensors));
}

absl::StatusOr<std::shared_ptr<const WeightsVersion>> VerifiedVersion(
    int64_t number, const std::string& hash, Manifest manifest, std::vector<SharedBytes> tensors) {
  const std::string tree = ManifestHash(manifest);
  if (tree != hash) {
    return absl::DataLossError(absl::StrCat("version ", number, ": the manifest hashes to ", tree,
                                            ", announced was ", hash));
  }
  return Build(number, hash, std::move(manifest), std::move(tensors));
}
}  // namespace stretto::engine
