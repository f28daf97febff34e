#include "engine/weights/store.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace stretto::engine {
bool WeightsStore::Has(int64_t number, const std::string& hash) const {
  return std::any_of(versions_.begin(), versions_.end(), [&](const auto& version) {
    return version->number == number && version->hash == hash;
  });
}

void WeightsStore::DropOrphans() {
  std::erase_if(deltas_, [this](const auto& delta) {
    return !Has(delta->base_number, delta->base_hash) || !Has(delta->number, delta->hash);
  });
}

void WeightsStore::Put(std::shared_ptr<const WeightsVersion> version) {
  STRETTO_CHECK(version != nullptr && max_versions_ >= 1);
  absl::MutexLock lock(&mutex_);
  if (Has(version->number, version->hash)) return;
  while (!versions_.empty() && versions_.back()->number >= version->number) versions_.pop_back();
  versions_.push_back(std::move(version));
  while (static_cast<int>(versions_.size()) > max_versions_) versions_.pop_front();
  DropOrphans();
}

void WeightsStore::MakeRoom() {
  absl::MutexLock lock(&mutex_);
  while (static_cast<int>(versions_.size()) >= std::max(2, max_versions_)) versions_.pop_front();
  DropOrphans();
}

void WeightsStore::PutDelta(std::shared_ptr<const VersionDelta> delta) {
  absl::MutexLock lock(&mutex_);
  deltas_.push_back(std::move(delta));
  DropOrphans();
}

absl::StatusOr<std::shared_ptr<const WeightsVersion>> WeightsStore::Get(
    int64_t number, const std::string& hash) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& version : versions_) {
    if (version->number == number && (hash.empty() || version->hash == hash)) return version;
  }
  const auto format = [](std::string* out, const std::shared_ptr<const WeightsVersion>& version) {
    absl::StrAppend(out, version->number, " (", version->hash, ")");
  };
  return absl::NotFoundError(
      absl::StrCat("version ", number, hash.empty() ? "" : " (", hash, hash.empty() ? "" : ")",
                   " is not held here; held: ", absl::StrJoin(versions_, ", ", format)));
}

absl::StatusOr<std::shared_ptr<const WeightsVersion>> WeightsStore::Newest() const {
  absl::MutexLock lock(&mutex_);
  if (versions_.empty()) return absl::NotFoundError("no version is held here yet");
  return versions_.back();
}

absl::StatusOr<std::shared_ptr<const VersionDelta>> WeightsStore::GetDelta(
    int64_t base_number, const std::string& base_hash, int64_t number,
    const std::string& hash) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& delta : deltas_) {
    if (delta->base_number == base_number && delta->base_hash == base_hash &&
        delta->number == number && delta->hash == hash) {
      return delta;
    }
  }
  return absl::FailedPreconditionError(absl::StrCat("no delta from version ", base_number, " to ",
                                                    number, " is held here; fetch the snapshot"));
}

std::vector<std::shared_ptr<const VersionDelta>> WeightsStore::DeltasTo(
    const WeightsVersion& version) const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<const VersionDelta>> found;
  for (const auto& delta : deltas_) {
    if (delta->number == version.number && delta->hash == version.hash) found.push_back(delta);
  }
  return found;
}

std::vector<std::shared_ptr<const WeightsVersion>> WeightsStore::Versions() const {
  absl::MutexLock lock(&mutex_);
  return {versions_.begin(), versions_.end()};
}
}  // namespace stretto::engine
