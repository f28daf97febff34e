#include "services/common/weights_relay.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace stretto::services {
using engine::GrowingTensors;
using engine::WeightsVersion;

namespace {
constexpr size_t kMaxEntries = 2;

bool Same(const v1::PolicyVersion& a, const v1::PolicyVersion& b) {
  return a.number() == b.number() && a.hash() == b.hash();
}
}  // namespace

const WeightsRelay::Entry* WeightsRelay::Find(const v1::PolicyVersion& version) const {
  if (version.number() < 0) return entries_.empty() ? nullptr : &entries_.back();
  const auto it = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    const v1::PolicyVersion& here = entry.manifest.version();
    return here.number() == version.number() &&
           (version.hash().empty() || here.hash() == version.hash());
  });
  return it == entries_.end() ? nullptr : &*it;
}

WeightsRelay::Entry& WeightsRelay::At(const v1::WeightsManifest& manifest) {
  for (Entry& entry : entries_) {
    if (Same(entry.manifest.version(), manifest.version())) return entry;
  }
  entries_.emplace_back().manifest = manifest;
  entries_.back().manifest.clear_delta_bases();
  while (entries_.size() > kMaxEntries) entries_.pop_front();
  return entries_.back();
}

void WeightsRelay::Stop() {
  absl::MutexLock lock(&mutex_);
  is_stopping_ = true;
}

absl::Status WeightsRelay::NotHere(const v1::PolicyVersion& version) const {
  if (is_stopping_) return absl::UnavailableError("the generator is stopping: ask another source");
  const auto format = [](std::string* out, const Entry& entry) {
    const v1::PolicyVersion& here = entry.manifest.version();
    *out += engine::VersionName(here.number(), here.hash());
  };
  return absl::NotFoundError(absl::StrCat(
      engine::VersionName(version.number(), version.hash()), " is not held here; held: ",
      entries_.empty() ? "none" : absl::StrJoin(entries_, ", ", format)));
}

void WeightsRelay::Begin(const v1::WeightsManifest& manifest, const WeightsVersion* base,
                         std::shared_ptr<const GrowingTensors> tensors) {
  absl::MutexLock lock(&mutex_);
  Entry& entry = At(manifest);
  if (base == nullptr) {
    entry.snapshot = tensors;
    entry.delta = nullptr;  // there was none, or it was damaged
    return;
  }
  entry.delta_base = ToProto(base->number, base->hash);
  entry.delta = std::move(tensors);
}

void WeightsRelay::Hold(const std::shared_ptr<const WeightsVersion>& version) {
  const v1::WeightsManifest manifest = ToProto(*version);
  absl::MutexLock lock(&mutex_);
  At(manifest).version = version;
}

absl::StatusOr<v1::WeightsManifest> WeightsRelay::Manifest(const v1::PolicyVersion& version) {
  absl::MutexLock lock(&mutex_);
  const auto is_known = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || Find(version) != nullptr;
  };
  mutex_.AwaitWithTimeout(absl::Condition(&is_known), wait_);
  const Entry* entry = Find(version);
  if (entry == nullptr) return NotHere(version);
  v1::WeightsManifest manifest = entry->manifest;
  if (entry->delta != nullptr) *manifest.add_delta_bases() = entry->delta_base;
  return manifest;
}

absl::StatusOr<std::shared_ptr<const GrowingTensors>> WeightsRelay::Snapshot(
    const v1::PolicyVersion& version) {
  absl::MutexLock lock(&mutex_);
  const auto is_there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Entry* entry = Find(version);
    return is_stopping_ ||
           (entry != nullptr && (!entry->version.expired() || !entry->snapshot.expired()));
  };
  mutex_.AwaitWithTimeout(absl::Condition(&is_there), wait_);
  const Entry* entry = Find(version);
  if (entry == nullptr) return NotHere(version);
  if (const auto held = entry->version.lock(); held != nullptr) {
    return std::make_shared<const GrowingTensors>(held->tensors);
  }
  if (auto snapshot = entry->snapshot.lock(); snapshot != nullptr) return snapshot;
  return NotHere(version);
}

absl::StatusOr<std::shared_ptr<const GrowingTensors>> WeightsRelay::Delta(
    const v1::PolicyVersion& base, const v1::PolicyVersion& version) {
  absl::MutexLock lock(&mutex_);
  const Entry* entry = Find(version);
  if (entry == nullptr || entry->delta == nullptr || !Same(entry->delta_base, base)) {
    return absl::FailedPreconditionError(absl::StrCat("no delta from version ", base.number(),
                                                      " to ", version.number(),
                                                      " is held here; fetch the snapshot"));
  }
  return entry->delta;
}
}  // namespace stretto::services
