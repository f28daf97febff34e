// What a generator passes on: the newest versions that it receives, from their first byte on. Its
// receivers may ask before it has begun: they wait for a few seconds. Nothing is verified here:
// each receiver verifies for itself. Thread-safe; the complete versions belong to whoever uses them
// and are served for as long as that lasts.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "services/common/weights_rpc.h"

namespace stretto::services {
class WeightsRelay final : public WeightsProvider {
 public:
  // `wait`: how long who asks waits for what isn't here yet; longer than a trainer keeps a manifest
  // back for its deltas.
  explicit WeightsRelay(absl::Duration wait = absl::Seconds(4)) : wait_(wait) {}

  // A transfer of this version begins: its delta from `base`, or its snapshot where that is null.
  void Begin(const v1::WeightsManifest& manifest, const engine::WeightsVersion* base,
             std::shared_ptr<const engine::GrowingTensors> tensors);
  // From now on nobody waits for what isn't here.
  void Stop();
  // The version is here, whole and verified.
  void Hold(const std::shared_ptr<const engine::WeightsVersion>& version);

  absl::StatusOr<v1::WeightsManifest> Manifest(const v1::PolicyVersion& version) override;
  // Waits for the end of a delta's transfer.
  absl::StatusOr<std::shared_ptr<const engine::GrowingTensors>> Snapshot(
      const v1::PolicyVersion& version) override;
  absl::StatusOr<std::shared_ptr<const engine::GrowingTensors>> Delta(
      const v1::PolicyVersion& base, const v1::PolicyVersion& version) override;

 private:
  struct Entry {
    v1::WeightsManifest manifest;
    std::weak_ptr<const engine::WeightsVersion> version;  // once it is here
    v1::PolicyVersion delta_base;
    std::shared_ptr<const engine::GrowingTensors> delta;
    // A transfer alone: complete, its bytes are the version's.
    std::weak_ptr<const engine::GrowingTensors> snapshot;
  };
  const Entry* Find(const v1::PolicyVersion& version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Entry& At(const v1::WeightsManifest& manifest) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotHere(const v1::PolicyVersion& version) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Duration wait_;
  mutable absl::Mutex mutex_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // the newest last
};
}  // namespace stretto::services
