#include "services/trainer/delta_encoder.h"

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "engine/weights/delta.h"
#include "services/common/log.h"

namespace stretto::services {
using engine::GrowingTensors;

DeltaEncoder::~DeltaEncoder() {
  stopping_ = true;
  absl::MutexLock lock(&mutex_);
  for (Job& job : jobs_) job.thread.join();
}

// What leads nowhere any more.
void DeltaEncoder::DropOld() {
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    if (!job->is_over || (store_->Get(job->base_number, job->base_hash).ok() &&
                          store_->Get(job->number, job->hash).ok())) {
      ++job;
      continue;
    }
    job->thread.join();
    job = jobs_.erase(job);
  }
}

absl::StatusOr<std::shared_ptr<const GrowingTensors>> DeltaEncoder::Get(
    int64_t base_number, const std::string& base_hash, int64_t number, const std::string& hash) {
  absl::MutexLock lock(&mutex_);
  DropOld();
  const auto base = store_->Get(base_number, base_hash), next = store_->Get(number, hash);
  if (!base.ok() || !next.ok() || base_number >= number) {
    return absl::FailedPreconditionError(absl::StrCat("no delta from version ", base_number, " to ",
                                                      number,
                                                      " can be had here; fetch the snapshot"));
  }
  for (const Job& job : jobs_) {
    if (job.base_hash == (*base)->hash && job.hash == (*next)->hash &&
        job.base_number == base_number && job.number == number) {
      return job.delta;
    }
  }
  std::vector<int64_t> limits((*next)->manifest.size(), INT64_MAX);
  Job& job = jobs_.emplace_back();
  job.base_number = base_number;
  job.base_hash = (*base)->hash;
  job.number = number;
  job.hash = (*next)->hash;
  job.delta = std::make_shared<GrowingTensors>(std::move(limits), /*exact=*/false);
  job.thread = std::thread([this, &job, base = *base, next = *next]() mutable {
    Run(job, base, next);
    // A thread that has ended, but was not joined, may keep what it was given.
    base = next = nullptr;
  });
  return job.delta;
}

namespace {
// Tensors that are encoded in any order, and handed on in their own.
class Ordered {
 public:
  Ordered(size_t num_tensors, GrowingTensors* out) : encoded_(num_tensors), out_(out) {}

  void Add(size_t i, engine::Bytes delta) {
    absl::MutexLock lock(&mutex_);
    encoded_[i] = engine::SharedBytes(std::move(delta));
    for (; next_ < encoded_.size() && encoded_[next_].IsSet(); ++next_) {
      out_->AddTensor(std::move(encoded_[next_]));
    }
  }

 private:
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<engine::SharedBytes> encoded_ ABSL_GUARDED_BY(mutex_);
  GrowingTensors* out_;
};
}  // namespace

void DeltaEncoder::Run(Job& job, const Version& base, const Version& next) const {
  const int64_t start_ns = Clock::Real().NowNs();
  Ordered ordered(next->tensors.size(), job.delta.get());
  std::atomic<size_t> index{0};
  const auto work = [&](bool is_first) {
    while (!stopping_ && (is_first || !is_trainer_busy_)) {
      const size_t i = index.fetch_add(1);
      if (i >= next->tensors.size()) return;
      ordered.Add(i, engine::EncodeDelta(next->manifest[i].dtype, base->tensors[i].span(),
                                         next->tensors[i].span()));
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < num_threads_ && !is_trainer_busy_; ++t) helpers.emplace_back(work, false);
  work(/*is_first=*/true);
  for (std::thread& helper : helpers) helper.join();
  if (stopping_) job.delta->Fail(absl::UnavailableError("the trainer ends"));
  LogDebug("delta ", job.base_number, " to ", job.number, ": ", job.delta->bytes_added(),
           " bytes of ", next->NumBytes(), " in ", (Clock::Real().NowNs() - start_ns) / 1000000,
           " ms by ", helpers.size() + 1, " threads");
  job.is_over = true;
}
}  // namespace stretto::services
