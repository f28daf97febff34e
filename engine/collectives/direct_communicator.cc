#include "engine/collectives/direct_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/synchronization/mutex.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/collectives/mesh.h"

namespace stretto::engine {
namespace {
using Bytes = absl::Span<const uint8_t>;
using MutableBytes = absl::Span<uint8_t>;

Bytes At(const void* base, int64_t begin, int64_t count, size_t element) {
  return {static_cast<const uint8_t*>(base) + static_cast<size_t>(begin) * element,
          static_cast<size_t>(count) * element};
}
MutableBytes At(void* base, int64_t begin, int64_t count, size_t element) {
  return {static_cast<uint8_t*>(base) + static_cast<size_t>(begin) * element,
          static_cast<size_t>(count) * element};
}

std::vector<int64_t> RunningSum(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size(), 0);
  for (size_t i = 1; i < counts.size(); ++i) offsets[i] = offsets[i - 1] + counts[i - 1];
  return offsets;
}

void CopyUnlessSame(MutableBytes to, Bytes from) {
  if (!from.empty() && to.data() != from.data()) std::memmove(to.data(), from.data(), from.size());
}

std::vector<float> ToF32(Bytes bytes, DType dtype) {
  std::vector<float> values(bytes.size() / SizeOf(dtype));
  if (dtype == DType::kF32) {
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    values[i] = Bf16ToF32(bits);
  }
  return values;
}

void FromF32(absl::Span<const float> values, DType dtype, MutableBytes out) {
  if (dtype == DType::kF32) {
    if (!values.empty()) std::memcpy(out.data(), values.data(), out.size());
    return;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = F32ToBf16(values[i]);
    std::memcpy(out.data() + i * sizeof(bits), &bits, sizeof(bits));
  }
}

// FNV-1a over integers: what ranks must agree on.
class Agreement {
 public:
  void Add(int64_t value) {
    hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 0x100000001b3ull;
    hash_ ^= hash_ >> 29;
  }
  void Add(const std::vector<int64_t>& values) {
    Add(static_cast<int64_t>(values.size()));
    for (const int64_t v : values) Add(v);
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

struct Pending {
  CollectiveCall call;
  std::shared_ptr<CollectiveHandle::State> handle;
};

class DirectCommunicator final : public Communicator {
 public:
  DirectCommunicator(std::unique_ptr<FrameExchange> exchange, GroupTable group, int rank,
                     const CommunicatorOptions& options)
      : exchange_(std::move(exchange)),
        group_(std::move(group)),
        rank_(rank),
        options_(options),
        pair_sequence_(group_.size(), 0),
        worker_([this] { Work(); }) {}
  ~DirectCommunicator() override {
    {
      absl::MutexLock lock(&mutex_);
      closing_ = true;
      if (ended_.ok()) exchange_->Interrupt();
    }
    worker_.join();
  }

  const GroupTable& group() const override { return group_; }
  int rank() const override { return rank_; }
  FrameCarrier carrier() const override { return options_.carrier; }
  CollectiveHandle Start(CollectiveCall call) override;
  void Abort(absl::string_view reason) override {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok() || !abort_.ok()) return;
    abort_ =
        absl::CancelledError(absl::StrCat(group_.Describe(rank_), " ended the group: ", reason));
    exchange_->Interrupt();
  }
  absl::Status status() const override {
    absl::MutexLock lock(&mutex_);
    return ended_.ok() ? abort_ : ended_;
  }
  CollectiveTraffic traffic(CollectiveKind kind) const override {
    absl::MutexLock lock(&mutex_);
    return traffic_[static_cast<size_t>(kind)];
  }
  int64_t overhead_bytes_sent() const override {
    absl::MutexLock lock(&mutex_);
    return overhead_bytes_sent_;
  }

 private:
  void Work();
  absl::Status Run(CollectiveCall& call);
  void CheckCall(CollectiveCall& call) const;
  absl::Status Gather(const CollectiveCall& call, const FrameLabel& label);
  absl::Status Sum(const CollectiveCall& call, FrameLabel label);
  absl::Status ExchangeParts(const CollectiveCall& call, const FrameLabel& label);
  absl::Status Spread(const CollectiveCall& call, const FrameLabel& label);
  absl::Status AllPairs(const CollectiveCall& call, const FrameLabel& label);
  absl::Status Pair(const CollectiveCall& call);
  std::vector<PeerFrames> FramesToAll(CollectiveKind kind) const;
  absl::Status Exchange(const CollectiveCall& call, const FrameLabel& label,
                        std::vector<PeerFrames>& frames);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closing_ || !queue_.empty() || !abort_.ok();
  }

  // Memory of an earlier sum.
  std::vector<float> Spare() {
    if (spare_.empty()) return {};
    std::vector<float> spare = std::move(spare_.back());
    spare_.pop_back();
    return spare;
  }

  static constexpr size_t kMostSpare = 2;
  std::vector<std::vector<float>> spare_;  // the worker's
  const std::unique_ptr<FrameExchange> exchange_;
  const GroupTable group_;
  const int rank_;
  const CommunicatorOptions options_;
  int64_t sequence_ = 0;                // of collectives; the worker's
  std::vector<int64_t> pair_sequence_;  // of Send and Recv with each rank; the worker's
  mutable absl::Mutex mutex_;
  std::deque<Pending> queue_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  absl::Status abort_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::array<CollectiveTraffic, kNumCollectiveKinds> traffic_ ABSL_GUARDED_BY(mutex_);
  int64_t overhead_bytes_sent_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread worker_;
};

CollectiveHandle DirectCommunicator::Start(CollectiveCall call) {
  CheckCall(call);
  auto state = std::make_shared<CollectiveHandle::State>();
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok() || !abort_.ok() || closing_) {
    state->status = ended_.ok() ? abort_ : ended_;
    state->finished.Notify();
  } else {
    queue_.push_back({std::move(call), state});
  }
  return CollectiveHandle(state);
}

// Fills in what may be left out, and finds what only a bug can cause.
void DirectCommunicator::CheckCall(CollectiveCall& call) const {
  const auto n = static_cast<size_t>(size());
  if (call.timeout == absl::ZeroDuration()) call.timeout = options_.timeout;
  const auto complete = [n](std::vector<int64_t>& v) { STRETTO_CHECK(v.size() == n); };
  STRETTO_CHECK(call.root >= 0 && call.root < size());
  switch (call.kind) {
    case CollectiveKind::kAllGather:
      if (call.counts.empty()) call.counts.assign(n, call.num_elements);
      complete(call.counts);
      STRETTO_CHECK(call.counts[rank_] == call.num_elements);
      break;
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllReduce:
      STRETTO_CHECK(call.dtype == DType::kF32 || call.dtype == DType::kBF16);
      if (call.counts.empty()) call.counts = EvenShares(call.num_elements, size());
      complete(call.counts);
      STRETTO_CHECK(call.plan.nodes_of_rank.size() == n && !call.plan.used.empty());
      STRETTO_CHECK(call.plan.nodes_of_rank[rank_].size() == call.parts.size());
      for (size_t i = 0; i < call.parts.size(); ++i) {
        STRETTO_CHECK(call.parts[i].node == call.plan.nodes_of_rank[rank_][i]);
      }
      break;
    case CollectiveKind::kAllToAll:
      if (call.counts.empty()) {
        STRETTO_CHECK(call.num_elements % size() == 0);
        call.counts.assign(n, call.num_elements / size());
        call.receive_counts = call.counts;
      }
      complete(call.counts);
      complete(call.receive_counts);
      break;
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      STRETTO_CHECK(call.root != rank_);
      break;
    case CollectiveKind::kBarrier:
    case CollectiveKind::kBroadcast:
      break;
  }
  if (call.offsets.empty()) call.offsets = RunningSum(call.counts);
  STRETTO_CHECK(call.offsets.size() == call.counts.size());
}

void DirectCommunicator::Work() {
  for (;;) {
    Pending next;
    absl::Status ended;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &DirectCommunicator::HasWork));
      if (!abort_.ok()) {
        ended = abort_;
      } else if (closing_) {
        ended = absl::UnavailableError(absl::StrCat(group_.Describe(rank_), " has left the group"));
      } else {
        next = std::move(queue_.front());
        queue_.pop_front();
      }
    }
    if (ended.ok()) {
      absl::Status status = Run(next.call);
      absl::MutexLock lock(&mutex_);
      overhead_bytes_sent_ = exchange_->overhead_bytes_sent();
      if (absl::IsCancelled(status) && !abort_.ok()) status = abort_;
      if (absl::IsCancelled(status) && closing_) {
        status =
            absl::UnavailableError(absl::StrCat(group_.Describe(rank_), " has left the group"));
      }
      ended = status;
    }
    if (!ended.ok()) {
      // The peers are told before the caller, who may end the process.
      exchange_->Farewell(ended);
      std::deque<Pending> rest;
      {
        absl::MutexLock lock(&mutex_);
        ended_ = ended;
        rest.swap(queue_);
      }
      if (next.handle != nullptr) rest.push_front(std::move(next));
      for (const Pending& p : rest) {
        p.handle->status = ended;
        p.handle->finished.Notify();
      }
      return;
    }
    next.handle->finished.Notify();
  }
}

absl::Status DirectCommunicator::Run(CollectiveCall& call) {
  if (call.kind == CollectiveKind::kSend || call.kind == CollectiveKind::kRecv) return Pair(call);
  FrameLabel label;
  label.kind = call.kind;
  label.dtype = call.dtype;
  label.sequence = ++sequence_;
  Agreement agreement;
  agreement.Add(call.root);
  if (call.kind != CollectiveKind::kAllToAll) agreement.Add(call.counts);
  for (const auto& nodes : call.plan.nodes_of_rank) {
    for (const SumNode& n : nodes) agreement.Add({n.begin, n.end});
    agreement.Add(int64_t{-1});
  }
  for (const bool used : call.plan.used) agreement.Add(int64_t{used});
  label.agreement = agreement.hash();
  switch (call.kind) {
    case CollectiveKind::kBroadcast:
      return Spread(call, label);
    case CollectiveKind::kAllGather:
      return Gather(call, label);
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllReduce:
      return Sum(call, label);
    case CollectiveKind::kAllToAll:
      return AllPairs(call, label);
    default: {
      std::vector<PeerFrames> frames = FramesToAll(call.kind);
      return Exchange(call, label, frames);
    }
  }
}

std::vector<PeerFrames> DirectCommunicator::FramesToAll(CollectiveKind kind) const {
  std::vector<PeerFrames> frames;
  // From the next rank on, so that not all begin with rank 0.
  for (int i = 1; i < size(); ++i) {
    PeerFrames& f = frames.emplace_back();
    f.peer = (rank_ + i) % size();
    f.sent_kind = f.expected_kind = kind;
  }
  return frames;
}

absl::Status DirectCommunicator::Exchange(const CollectiveCall& call, const FrameLabel& label,
                                          std::vector<PeerFrames>& frames) {
  const double begin = Clock::Real().NowSeconds();
  RETURN_IF_ERROR(exchange_->Exchange(label, absl::MakeSpan(frames), call.timeout));
  absl::MutexLock lock(&mutex_);
  CollectiveTraffic& t = traffic_[static_cast<size_t>(label.kind)];
  t.seconds += Clock::Real().NowSeconds() - begin;
  t.calls += label.phase == 0 ? 1 : 0;
  for (const PeerFrames& f : frames) {
    for (const auto& s : f.send) t.bytes_sent += static_cast<int64_t>(s.size());
    for (const auto& s : f.receive) t.bytes_received += static_cast<int64_t>(s.size());
  }
  return absl::OkStatus();
}

absl::Status DirectCommunicator::Spread(const CollectiveCall& call, const FrameLabel& label) {
  std::vector<PeerFrames> frames = FramesToAll(call.kind);
  const size_t element = SizeOf(call.dtype);
  for (PeerFrames& f : frames) {
    if (rank_ == call.root) f.send.push_back(At(call.input, 0, call.num_elements, element));
    if (f.peer == call.root) f.receive.push_back(At(call.output, 0, call.num_elements, element));
  }
  return Exchange(call, label, frames);
}

absl::Status DirectCommunicator::Gather(const CollectiveCall& call, const FrameLabel& label) {
  std::vector<PeerFrames> frames = FramesToAll(call.kind);
  const size_t element = SizeOf(call.dtype);
  const Bytes mine = At(call.input, 0, call.counts[rank_], element);
  for (PeerFrames& f : frames) {
    f.send.push_back(mine);
    f.receive.push_back(At(call.output, call.offsets[f.peer], call.counts[f.peer], element));
  }
  CopyUnlessSame(At(call.output, call.offsets[rank_], call.counts[rank_], element), mine);
  return Exchange(call, label, frames);
}

absl::Status DirectCommunicator::Sum(const CollectiveCall& call, FrameLabel label) {
  RETURN_IF_ERROR(ExchangeParts(call, label));
  if (call.kind != CollectiveKind::kAllReduce) return absl::OkStatus();
  CollectiveCall gather = call;
  gather.input = At(call.output, call.offsets[rank_], 0, SizeOf(call.dtype)).data();
  label.phase = 1;
  return Gather(gather, label);
}

// ReduceScatter: everybody sends each rank its share of every part, and adds up its own.
absl::Status DirectCommunicator::ExchangeParts(const CollectiveCall& call,
                                               const FrameLabel& label) {
  std::vector<PeerFrames> frames = FramesToAll(call.kind);
  const size_t element = SizeOf(call.dtype);
  const int64_t count = call.counts[rank_];
  std::vector<std::vector<std::vector<uint8_t>>> raw(size());  // [rank][part], bf16 alone
  std::vector<std::vector<std::vector<float>>> shares(size());
  for (PeerFrames& f : frames) {
    for (const SumPart& part : call.parts) {
      f.send.push_back(At(part.data, call.offsets[f.peer], call.counts[f.peer], element));
    }
    const size_t num_parts = call.plan.nodes_of_rank[f.peer].size();
    shares[f.peer].resize(num_parts);
    raw[f.peer].resize(num_parts);
    for (size_t i = 0; i < num_parts; ++i) {
      if (call.dtype == DType::kF32) {
        shares[f.peer][i] = Spare();
        shares[f.peer][i].resize(count);
        f.receive.push_back(At(shares[f.peer][i].data(), 0, count, element));
      } else {
        raw[f.peer][i].resize(static_cast<size_t>(count) * element);
        f.receive.push_back(absl::MakeSpan(raw[f.peer][i]));
      }
    }
  }
  RETURN_IF_ERROR(Exchange(call, label, frames));
  TreeSum whole(call.plan.used, call.sum == nullptr ? count : 0);
  TreeSum& sum = call.sum == nullptr ? whole : *call.sum;
  // This rank's own last: they join what has come without being copied.
  for (int i = 1; i <= size(); ++i) {
    const int r = (rank_ + i) % size();
    const std::vector<SumNode>& nodes = call.plan.nodes_of_rank[r];
    for (size_t p = 0; p < nodes.size(); ++p) {
      const bool is_f32 = call.dtype == DType::kF32;
      if (r != rank_) {
        sum.Add(nodes[p], is_f32 ? std::move(shares[r][p]) : ToF32(raw[r][p], call.dtype));
        continue;
      }
      const Bytes own = At(call.parts[p].data, call.offsets[r], count, element);
      if (is_f32) {
        sum.AddBorrowed(nodes[p], reinterpret_cast<const float*>(own.data()));
      } else {
        sum.Add(nodes[p], ToF32(own, call.dtype));
      }
    }
  }
  if (call.output == nullptr || !sum.complete()) return absl::OkStatus();
  const int64_t begin = call.kind == CollectiveKind::kAllReduce ? call.offsets[rank_] : 0;
  std::vector<float> values = sum.Take();
  FromF32(values, call.dtype, At(call.output, begin, count, element));
  if (spare_.size() < kMostSpare) spare_.push_back(std::move(values));
  return absl::OkStatus();
}

absl::Status DirectCommunicator::AllPairs(const CollectiveCall& call, const FrameLabel& label) {
  std::vector<PeerFrames> frames = FramesToAll(call.kind);
  const size_t element = SizeOf(call.dtype);
  const std::vector<int64_t>&to = call.offsets, from = RunningSum(call.receive_counts);
  for (PeerFrames& f : frames) {
    f.send.push_back(At(call.input, to[f.peer], call.counts[f.peer], element));
    f.receive.push_back(At(call.output, from[f.peer], call.receive_counts[f.peer], element));
  }
  CopyUnlessSame(At(call.output, from[rank_], call.receive_counts[rank_], element),
                 At(call.input, to[rank_], call.counts[rank_], element));
  return Exchange(call, label, frames);
}

// The receiver answers with an empty frame, so that a sender knows that it is there.
absl::Status DirectCommunicator::Pair(const CollectiveCall& call) {
  FrameLabel label;
  label.kind = call.kind;
  label.dtype = call.dtype;
  label.sequence = ++pair_sequence_[call.root];
  std::vector<PeerFrames> frames(1);
  PeerFrames& f = frames[0];
  f.peer = call.root;
  f.sent_kind = call.kind;
  const bool sends = call.kind == CollectiveKind::kSend;
  f.expected_kind = sends ? CollectiveKind::kRecv : CollectiveKind::kSend;
  const size_t element = SizeOf(call.dtype);
  if (sends) f.send.push_back(At(call.input, 0, call.num_elements, element));
  if (!sends) f.receive.push_back(At(call.output, 0, call.num_elements, element));
  return Exchange(call, label, frames);
}
}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> ConnectGroup(Listener listener,
                                                           const GroupTable& group, int rank,
                                                           const CommunicatorOptions& options) {
  const DeadlineNs deadline = AfterNs(absl::ToInt64Nanoseconds(options.connect_timeout));
  ASSIGN_OR_RETURN(
      Mesh mesh, Mesh::Connect(std::move(listener), group, rank, {deadline, options.is_cancelled}));
  std::unique_ptr<FrameExchange> exchange = std::make_unique<Mesh>(std::move(mesh));
  if (options.carrier != nullptr) {
    ASSIGN_OR_RETURN(exchange,
                     options.carrier(std::move(exchange), group, rank, options.connect_timeout));
  }
  return std::make_unique<DirectCommunicator>(std::move(exchange), group, rank, options);
}

absl::StatusOr<std::unique_ptr<Communicator>> GroupOfOne(const std::string& name) {
  ASSIGN_OR_RETURN(Listener listener, Listener::Open("127.0.0.1"));
  const GroupTable group{name, 0, {{name, listener.address()}}};
  return ConnectGroup(std::move(listener), group, 0, {});
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinGroup(const std::string& rendezvous,
                                                        Registration registration,
                                                        const CommunicatorOptions& options) {
  std::string host = registration.address;
  int port = 0;
  if (const size_t colon = host.rfind(':'); colon != std::string::npos) {
    if (!absl::SimpleAtoi(host.substr(colon + 1), &port)) {
      return absl::InvalidArgumentError(absl::StrCat("'", host, "' is not host:port"));
    }
    host.resize(colon);
  }
  ASSIGN_OR_RETURN(Listener listener, Listener::Open(host, port));
  registration.address = listener.address();
  ASSIGN_OR_RETURN(const GroupTable group,
                   Register(rendezvous, registration, options.connect_timeout));
  return ConnectGroup(std::move(listener), group, registration.rank, options);
}
}  // namespace stretto::engine
