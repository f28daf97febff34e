#include "services/trainer/delta_encoder.h"

#include <algorithm>

#include "absl/time/time.h"
#include "base/clock.h"
#include "services/common/log.h"

namespace stretto::services {
using engine::WeightsVersion;

DeltaEncoder::DeltaEncoder(engine::WeightsStore* store) : store_(store) {
  thread_ = std::thread([this] { Run(); });
}

DeltaEncoder::~DeltaEncoder() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void DeltaEncoder::Encode(std::shared_ptr<const WeightsVersion> version) {
  absl::MutexLock lock(&mutex_);
  wanted_ = std::move(version);
}

void DeltaEncoder::WaitFor(int64_t number, int64_t timeout_ms) {
  absl::MutexLock lock(&mutex_);
  const auto settled = [this, number]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return (wanted_ == nullptr || wanted_->number != number) &&
           (working_on_ == nullptr || working_on_->number != number);
  };
  mutex_.AwaitWithTimeout(absl::Condition(&settled), absl::Milliseconds(timeout_ms));
}

void DeltaEncoder::Run() {
  while (true) {
    std::shared_ptr<const WeightsVersion> version;
    {
      absl::MutexLock lock(&mutex_);
      working_on_ = nullptr;
      const auto woken = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || wanted_ != nullptr;
      };
      mutex_.Await(absl::Condition(&woken));
      if (stopping_) return;
      version = working_on_ = std::move(wanted_);
      wanted_ = nullptr;
    }
    std::vector<std::shared_ptr<const WeightsVersion>> bases = store_->Versions();
    std::reverse(bases.begin(), bases.end());
    for (const auto& base : bases) {
      if (base->number >= version->number) continue;
      const int64_t start_ns = Clock::Real().NowNs();
      std::shared_ptr<const engine::VersionDelta> delta = EncodeVersionDelta(*base, *version);
      LogDebug("delta ", base->number, " to ", version->number, ": ", delta->NumBytes(),
               " bytes of ", version->NumBytes(), " in ",
               (Clock::Real().NowNs() - start_ns) / 1000000, " ms");
      store_->PutDelta(std::move(delta));
    }
  }
}
}  // namespace stretto::services
