#include "services/generator/policy_holder.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/recycled_bytes.h"
#include "base/status.h"
#include "engine/device/background.h"
#include "services/common/log.h"

namespace stretto::services {
namespace {
constexpr int kReserveNice = 10;
constexpr absl::Duration kPoll = absl::Milliseconds(20);  // how soon a wait that is given up ends
}  // namespace

absl::StatusOr<std::unique_ptr<PolicyHolder>> PolicyHolder::Create(const ModelHost* host,
                                                                   WeightsFetcher fetcher) {
  std::unique_ptr<PolicyHolder> holder(new PolicyHolder(host, std::move(fetcher)));
  absl::MutexLock lock(&holder->mutex_);
  ASSIGN_OR_RETURN(holder->current_.version, ReadInitialVersion(*host));
  ASSIGN_OR_RETURN(holder->current_.weights, BuildWeights(*host, *holder->current_.version));
  host->files.tensors->LetPagesGo();
  return holder;
}

PolicyHolder::~PolicyHolder() {
  is_ending_ = true;
  if (reserver_.joinable()) reserver_.join();
}

void PolicyHolder::ReserveMemory() {
  // As one that came from a trainer.
  auto next = std::make_shared<engine::WeightsVersion>();
  {
    absl::MutexLock lock(&mutex_);
    *next = *current_.version;
  }
  ++next->number;
  reserver_ = std::thread([this, next] {
    // A run's first step comes before its first version: others go first.
    (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kReserveNice);
    // The first version is the files'; two others take turns.
    std::vector<size_t> sizes;
    for (const engine::SharedBytes& tensor : next->tensors) {
      sizes.insert(sizes.end(), 2, tensor.size());
    }
    ReserveBytes(sizes, is_ending_);
    if (is_ending_) return;
    // What it is laid out in is let go.
    const std::shared_ptr<void> borrowed = engine::BorrowThread(*host_->device);
    const auto weights = BuildWeights(*host_, *next);
    if (!weights.ok())
      LogDebug("no memory is ready for new versions: ", weights.status().message());
  });
}

absl::Status PolicyHolder::Wanted(const Turn& turn) const {
  if (is_stopping_) return absl::UnavailableError("the generator is stopping");
  const int64_t number = turn.request.number;
  int64_t newest = turn.superseded_by;
  for (const Turn* other : turns_) {
    if (other->counts) newest = std::max(newest, other->request.number);
  }
  if (newest <= number) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("version ", newest, " has been announced: version ",
                                         number, " is not prepared any more"));
}

absl::Status PolicyHolder::AwaitTurn(const Turn& turn) {
  const auto is_free = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !is_preparing_; };
  while (!mutex_.AwaitWithTimeout(absl::Condition(&is_free), kPoll)) {
    RETURN_IF_ERROR(Wanted(turn));
    // Asks the caller alone, and nothing that locks.
    if (turn.cancelled && turn.cancelled()) return absl::CancelledError("no longer wanted");
  }
  return Wanted(turn);
}

absl::Status PolicyHolder::TakeTurn(Turn* turn) {
  absl::MutexLock lock(&mutex_);
  if (turn->is_taken) return absl::OkStatus();
  turn->counts = true;
  const int64_t number = turn->request.number;
  for (Turn* other : turns_) {
    if (other->request.number < number) {
      other->superseded_by = std::max(other->superseded_by, number);
    }
  }
  RETURN_IF_ERROR(AwaitTurn(*turn));
  turn->is_taken = is_preparing_ = true;
  FindBase(turn);
  return turn->is_here ? absl::CancelledError("it is here") : absl::OkStatus();
}

void PolicyHolder::FindBase(Turn* turn) {
  FetchRequest& request = turn->request;
  turn->is_here =
      current_.Is(request.number, request.hash) || prepared_.Is(request.number, request.hash);
  if (turn->is_here) return;
  const Held& base = prepared_.version != nullptr ? prepared_ : current_;
  request.base = base.version;
  turn->base_weights = base.weights;
  // The same weights under another number: a skipped step, or a run that begins.
  if (request.base->hash != request.hash) return;
  auto version = std::make_shared<engine::WeightsVersion>(*request.base);
  version->number = request.number;
  relay_.Hold(version);
  prepared_ = {.version = std::move(version), .weights = turn->base_weights};
  turn->is_here = true;
}

bool PolicyHolder::Holds(const std::string& hash) const {
  absl::MutexLock lock(&mutex_);
  return current_.version->hash == hash ||
         (prepared_.version != nullptr && prepared_.version->hash == hash);
}

absl::StatusOr<PreparedInfo> PolicyHolder::Prepare(int64_t number, const std::string& hash,
                                                   const std::string& run_id,
                                                   const std::vector<std::string>& sources,
                                                   const std::function<bool()>& cancelled) {
  if (hash.empty()) return absl::InvalidArgumentError("a version without a hash proves nothing");
  Turn turn{.request = {.run_id = run_id,
                        .number = number,
                        .hash = hash,
                        .sources = sources,
                        .expected = expected_,
                        .relay = &relay_,
                        .cancelled = {},
                        .begin_computing = [this] { return engine::BorrowThread(*host_->device); }},
            .cancelled = cancelled};
  turn.request.cancelled = [&] {
    absl::MutexLock lock(&mutex_);
    return (cancelled && cancelled()) || !Wanted(turn).ok();
  };
  {
    absl::MutexLock lock(&mutex_);
    turns_.insert(&turn);
  }
  absl::Status taken;
  turn.request.found = [&] { return taken = TakeTurn(&turn); };
  // What is here needs no source to stand behind it.
  absl::StatusOr<PreparedInfo> info = PreparedInfo();
  if (Holds(hash)) info = turn.request.found().ok() ? info : taken;
  if (info.ok()) info = Fetch(&turn);
  absl::MutexLock lock(&mutex_);
  if (turn.is_here) {
    info = PreparedInfo();
  } else if (absl::IsCancelled(info.status())) {
    if (absl::Status why = Wanted(turn); !why.ok()) info = std::move(why);
  }
  if (turn.is_taken) is_preparing_ = false;
  turns_.erase(&turn);
  return info;
}

absl::StatusOr<PreparedInfo> PolicyHolder::Fetch(Turn* turn) {
  const int64_t start_ns = Clock::Real().NowNs();
  ASSIGN_OR_RETURN(FetchedWeights fetched, fetcher_(turn->request));
  const int64_t verified_ns = Clock::Real().NowNs();
  Held held{.version = fetched.version};
  const std::shared_ptr<void> borrowed = engine::BorrowThread(*host_->device);
  ASSIGN_OR_RETURN(held.weights, BuildWeights(*host_, *held.version,
                                              {.version = turn->request.base.get(),
                                               .weights = turn->base_weights.get()}));
  absl::MutexLock lock(&mutex_);
  prepared_ = std::move(held);
  const int64_t end_ns = Clock::Real().NowNs();
  return PreparedInfo{.bytes_received = fetched.bytes_received,
                      .was_delta = fetched.was_delta,
                      .seconds = static_cast<double>(end_ns - start_ns) * 1e-9,
                      .transfer_seconds = fetched.transfer_seconds,
                      .layout_seconds = static_cast<double>(end_ns - verified_ns) * 1e-9,
                      .num_sources_left = fetched.num_sources_left};
}

void PolicyHolder::StopPreparing() {
  absl::MutexLock lock(&mutex_);
  is_stopping_ = true;
  relay_.Stop();
}

absl::StatusOr<engine::ServedWeights> PolicyHolder::Get(int64_t number,
                                                        const std::string& hash) const {
  absl::MutexLock lock(&mutex_);
  if (prepared_.Is(number, hash)) return prepared_.Served();
  if (current_.Is(number, hash)) return current_.Served();
  return absl::FailedPreconditionError(absl::StrCat(
      engine::VersionName(number, hash), " is not prepared; ",
      engine::VersionName(current_.version->number, current_.version->hash), " is in use"));
}

void PolicyHolder::Committed(int64_t number, const std::string& hash) {
  absl::MutexLock lock(&mutex_);
  if (!prepared_.Is(number, hash)) return;
  current_ = std::move(prepared_);
  prepared_ = Held();
  host_->files.tensors->LetPagesGo();  // those of version 0
}

std::pair<int64_t, std::string> PolicyHolder::Current() const {
  absl::MutexLock lock(&mutex_);
  return {current_.version->number, current_.version->hash};
}

engine::ServedWeights PolicyHolder::CurrentWeights() const {
  absl::MutexLock lock(&mutex_);
  return current_.Served();
}
}  // namespace stretto::services
