#include "engine/training/checkpoint_snapshot.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace stretto::engine {
namespace {
constexpr int64_t kPieceElements = 1 << 19;  // 2 MB: what one waits for at most is short
}

void StateSnapshot::Take(const std::shared_ptr<StateSnapshot>& snapshot, TrainerEngine& engine,
                         TrainerEngine* critic) {
  StateSnapshot& s = *snapshot;
  s.sources_ = engine.PartsToWrite();
  const size_t num_of_engine = s.sources_.size();
  if (critic != nullptr) {
    for (StatePart& part : critic->PartsToWrite()) s.sources_.push_back(std::move(part));
  }
  const std::vector<StatePart>& parts = s.sources_;
  s.parts_.clear();
  s.pieces_.clear();
  s.num_elements_ = 0;
  for (const StatePart& p : parts) s.num_elements_ += p.count;
  if (s.capacity_ < s.num_elements_) {
    s.memory_.reset();
    s.memory_.reset(new float[s.num_elements_]);  // its pages are touched by whoever copies
    s.capacity_ = s.num_elements_;
    s.has_copied_ = false;
  }
  float* to = s.memory_.get();
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_critic = i >= num_of_engine;
    STRETTO_CHECK(!is_critic || critic != nullptr);
    s.AddPart(parts[i], is_critic ? kCriticPrefix : "", to, is_critic ? *critic : engine);
    to += parts[i].count;
  }
  s.next_ = 0;
  s.blocked_seconds_ = 0;
  for (std::atomic<bool>& released : s.released_) released = false;
  {
    absl::MutexLock lock(&s.live_mutex_);
    s.is_live_ = true;
  }
  {
    absl::MutexLock lock(&s.mutex_);
    s.num_copied_ = 0;
    s.status_ = absl::OkStatus();
  }
  if (s.pieces_.empty()) return;
  engine.AddStateReader(snapshot);
  if (critic != nullptr) critic->AddStateReader(snapshot);
}

void StateSnapshot::AddPart(const StatePart& part, absl::string_view prefix, float* to,
                            TrainerEngine& engine) {
  const float* from = nullptr;
  if (!part.read) {
    from = static_cast<const float*>(engine.device().HostMemory(part.values));
    if (from == nullptr) engine.device().Download(engine.stream(), part.values, to);
  }
  for (int64_t done = 0; (from || part.read) && done < part.count; done += kPieceElements) {
    pieces_.push_back({from != nullptr ? from + done : nullptr, to + done,
                       std::min(kPieceElements, part.count - done), &part, done});
  }
  parts_.push_back({part.which,
                    absl::StrCat(prefix, part.parameter->spec.name),
                    part.parameter->spec.shape,
                    {part.row_begin, part.row_end, part.col_begin, part.col_end},
                    part.begin,
                    absl::MakeConstSpan(to, part.count),
                    from,
                    part.read ? &part : nullptr});
}

void StateSnapshot::Copy() {
  size_t copied = 0;
  absl::Status status;
  for (size_t i = next_.fetch_add(1); i < pieces_.size(); i = next_.fetch_add(1)) {
    const Piece& p = pieces_[i];
    if (released_[static_cast<size_t>(p.part->which)]) {
      ++copied;
      continue;
    }
    has_copied_ = true;
    if (p.from != nullptr) {
      std::memcpy(p.to, p.from, static_cast<size_t>(p.count) * sizeof(float));
    } else {
      status.Update(p.part->read(p.first, p.count, p.to));
    }
    ++copied;
  }
  absl::MutexLock lock(&mutex_);
  status_.Update(status);
  num_copied_ += copied;
  const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return num_copied_ == pieces_.size();
  };
  mutex_.Await(absl::Condition(&done));
}

void StateSnapshot::ForRuns(const SnapshotPart& part, int64_t begin, int64_t count,
                            absl::FunctionRef<void(absl::Span<const float>)> run) const {
  std::vector<float> room;
  for (int64_t done = 0; done < count; done += kPieceElements) {
    const int64_t n = std::min(kPieceElements, count - done);
    absl::ReaderMutexLock lock(&live_mutex_);
    run({Find(part, begin + done, n, room), static_cast<size_t>(n)});
  }
}

const float* StateSnapshot::Find(const SnapshotPart& part, int64_t begin, int64_t count,
                                 std::vector<float>& room) const {
  if (is_live_ && part.live != nullptr) return part.live + begin;
  if (!is_live_ || part.source == nullptr) return part.values.data() + begin;
  room.resize(static_cast<size_t>(count));
  const absl::Status status = part.source->read(begin, count, room.data());
  if (!status.ok()) {
    absl::MutexLock lock(&mutex_);
    status_.Update(status);
  }
  return room.data();
}

void StateSnapshot::FinishReading() {
  const double begin = clock_.NowSeconds();
  Copy();
  {
    absl::MutexLock lock(&live_mutex_);
    is_live_ = false;
  }
  blocked_seconds_ = blocked_seconds_ + clock_.NowSeconds() - begin;
}
}  // namespace stretto::engine
