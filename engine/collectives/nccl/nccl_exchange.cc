#include "engine/collectives/nccl/nccl_exchange.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "engine/collectives/frame_exchange.h"

namespace stretto::engine {
namespace {
constexpr uint8_t kAgreedPhase = 0x80, kRollCallPhase = 0x40;  // beside an operation's own phase
constexpr absl::Duration kRollCall = absl::Seconds(5), kLook = absl::Microseconds(50);
constexpr absl::Duration kGoodbye = absl::Seconds(2);

absl::Status CudaError(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}
absl::Status NcclError(absl::string_view what, ncclResult_t result) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", ncclGetErrorString(result)));
}

// Device memory that grows to the largest frame set so far.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }
  absl::Status Reserve(size_t bytes) {
    if (bytes <= size_) return absl::OkStatus();
    cudaFree(data_);
    data_ = nullptr;
    size_ = 0;
    RETURN_IF_ERROR(
        CudaError(absl::StrCat("cudaMalloc of ", bytes, " bytes"), cudaMalloc(&data_, bytes)));
    size_ = bytes;
    return absl::OkStatus();
  }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// What two ranks tell each other before a payload: a mismatch is seen by both.
struct Lengths {
  int64_t sent = 0, expected = 0;
};
template <class T>
absl::Span<uint8_t> BytesOf(T& value) {
  return {reinterpret_cast<uint8_t*>(&value), sizeof(value)};
}

class NcclExchange final : public FrameExchange {
 public:
  NcclExchange(std::unique_ptr<FrameExchange> control, GroupTable group, int rank, int device)
      : control_(std::move(control)), group_(std::move(group)), rank_(rank), device_(device) {}
  ~NcclExchange() override;

  absl::Status Open(absl::Duration timeout);
  absl::Status Exchange(const FrameLabel& label, absl::Span<PeerFrames> frames,
                        absl::Duration timeout) override;
  void Farewell(const absl::Status& why) override {
    AbortNccl();
    control_->Farewell(why);
  }
  void Interrupt() override {
    interrupted_ = true;
    control_->Interrupt();
  }
  int64_t overhead_bytes_sent() const override {
    return control_->overhead_bytes_sent() + overhead_bytes_sent_;
  }

 private:
  absl::Status ShareId(ncclUniqueId& id, absl::Duration timeout);
  absl::Status Agree(const FrameLabel& label, absl::Span<PeerFrames> frames,
                     absl::Duration timeout);
  absl::Status Launch(absl::Span<PeerFrames> frames);
  // Until NCCL's calls and then the stream are done.
  absl::Status Await(absl::Time deadline);
  absl::Status AwaitCalls(absl::Time deadline);
  absl::Status CopyOut(absl::Span<PeerFrames> frames);
  absl::Status RollCall(const FrameLabel& label, absl::Span<PeerFrames> frames,
                        const absl::Status& why);
  void AbortNccl() {
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  const std::unique_ptr<FrameExchange> control_;
  const GroupTable group_;
  const int rank_, device_;
  std::atomic<bool> interrupted_{false};
  int64_t overhead_bytes_sent_ = 0;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  DeviceBuffer outgoing_, incoming_;
};

NcclExchange::~NcclExchange() {
  cudaSetDevice(device_);
  if (comm_ != nullptr && ncclCommFinalize(comm_) <= ncclInProgress &&
      AwaitCalls(absl::Now() + kGoodbye).ok()) {
    ncclCommDestroy(comm_);
    comm_ = nullptr;
  }
  AbortNccl();
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status NcclExchange::Open(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  const int num_devices = NumNcclDevices();
  if (device_ < 0 || device_ >= num_devices) {
    return absl::FailedPreconditionError(absl::StrCat(
        group_.Describe(rank_), " has no CUDA device ", device_, " for NCCL: this process sees ",
        num_devices, "; give each rank one (CUDA_VISIBLE_DEVICES), or use collectives over tcp"));
  }
  RETURN_IF_ERROR(CudaError("cudaSetDevice", cudaSetDevice(device_)));
  RETURN_IF_ERROR(
      CudaError("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  ncclUniqueId id{};
  if (rank_ == 0) RETURN_IF_ERROR(NcclError("ncclGetUniqueId", ncclGetUniqueId(&id)));
  RETURN_IF_ERROR(ShareId(id, timeout));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  RETURN_IF_ERROR(NcclError("ncclCommInitRankConfig",
                            ncclCommInitRankConfig(&comm_, group_.size(), id, rank_, &config)));
  return Annotate(AwaitCalls(deadline), absl::StrCat("NCCL for group ", group_.group));
}

absl::Status NcclExchange::ShareId(ncclUniqueId& id, absl::Duration timeout) {
  std::vector<PeerFrames> frames;
  for (int r = 0; r < group_.size(); ++r) {
    if (r == rank_) continue;
    PeerFrames& f = frames.emplace_back();
    f.peer = r;
    f.sent_kind = f.expected_kind = CollectiveKind::kBroadcast;
    if (rank_ == 0) f.send.push_back(BytesOf(id));
    if (r == 0) f.receive.push_back(BytesOf(id));
  }
  FrameLabel label;
  label.kind = CollectiveKind::kBroadcast;
  return control_->Exchange(label, absl::MakeSpan(frames), timeout);
}

absl::Status NcclExchange::Exchange(const FrameLabel& label, absl::Span<PeerFrames> frames,
                                    absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  RETURN_IF_ERROR(Agree(label, frames, timeout));
  const bool has_payload = std::any_of(frames.begin(), frames.end(), [](const PeerFrames& f) {
    return f.send_bytes() + f.receive_bytes() > 0;
  });
  if (!has_payload) return absl::OkStatus();
  RETURN_IF_ERROR(CudaError("cudaSetDevice", cudaSetDevice(device_)));
  absl::Status status = Launch(frames);
  if (status.ok()) status = Await(deadline);
  if (status.ok()) return CopyOut(frames);
  AbortNccl();
  return RollCall(label, frames, status);
}

// Two rounds: after the first every pair of ranks has seen whether it fits; the second is only
// begun by ranks that have found nothing wrong, so one that has is heard by all.
absl::Status NcclExchange::Agree(const FrameLabel& label, absl::Span<PeerFrames> frames,
                                 absl::Duration timeout) {
  std::vector<PeerFrames> told(frames.size()), empty(frames.size());
  std::vector<std::array<Lengths, 2>> lengths(frames.size());  // ours, theirs
  for (size_t i = 0; i < frames.size(); ++i) {
    told[i].peer = empty[i].peer = frames[i].peer;
    told[i].sent_kind = empty[i].sent_kind = frames[i].sent_kind;
    told[i].expected_kind = empty[i].expected_kind = frames[i].expected_kind;
    lengths[i][0] = {frames[i].send_bytes(), frames[i].receive_bytes()};
    told[i].send.push_back(BytesOf(lengths[i][0]));
    told[i].receive.push_back(BytesOf(lengths[i][1]));
    overhead_bytes_sent_ += static_cast<int64_t>(sizeof(Lengths));
  }
  RETURN_IF_ERROR(control_->Exchange(label, absl::MakeSpan(told), timeout));
  for (size_t i = 0; i < frames.size(); ++i) {
    const auto& [ours, theirs] = lengths[i];
    if (theirs.sent == ours.expected && theirs.expected == ours.sent) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("ranks disagree: in ", Name(label.kind), " #", label.sequence, " ",
                     group_.Describe(frames[i].peer), " sends ", theirs.sent, " bytes and expects ",
                     theirs.expected, ", ", group_.Describe(rank_), " expects ", ours.expected,
                     " and sends ", ours.sent));
  }
  FrameLabel agreed = label;
  agreed.phase |= kAgreedPhase;
  return control_->Exchange(agreed, absl::MakeSpan(empty), timeout);
}

absl::Status NcclExchange::Launch(absl::Span<PeerFrames> frames) {
  size_t out_bytes = 0, in_bytes = 0;
  for (const PeerFrames& f : frames) {
    out_bytes += static_cast<size_t>(f.send_bytes());
    in_bytes += static_cast<size_t>(f.receive_bytes());
  }
  RETURN_IF_ERROR(outgoing_.Reserve(out_bytes));
  RETURN_IF_ERROR(incoming_.Reserve(in_bytes));
  uint8_t* out = outgoing_.data();
  for (const PeerFrames& f : frames) {
    for (const auto& piece : f.send) {
      if (piece.empty()) continue;
      RETURN_IF_ERROR(CudaError(
          "a payload's copy to the device",
          cudaMemcpyAsync(out, piece.data(), piece.size(), cudaMemcpyHostToDevice, stream_)));
      out += piece.size();
    }
  }
  const uint8_t* from = outgoing_.data();
  uint8_t* to = incoming_.data();
  RETURN_IF_ERROR(NcclError("ncclGroupStart", ncclGroupStart()));
  for (const PeerFrames& f : frames) {
    const auto sent = static_cast<size_t>(f.send_bytes());
    const auto received = static_cast<size_t>(f.receive_bytes());
    if (sent > 0) {
      RETURN_IF_ERROR(
          NcclError("ncclSend", ncclSend(from, sent, ncclUint8, f.peer, comm_, stream_)));
    }
    if (received > 0) {
      RETURN_IF_ERROR(
          NcclError("ncclRecv", ncclRecv(to, received, ncclUint8, f.peer, comm_, stream_)));
    }
    from += sent;
    to += received;
  }
  return NcclError("ncclGroupEnd", ncclGroupEnd());
}

absl::Status NcclExchange::AwaitCalls(absl::Time deadline) {
  for (;;) {
    ncclResult_t state = ncclSuccess;
    RETURN_IF_ERROR(NcclError("NCCL", ncclCommGetAsyncError(comm_, &state)));
    RETURN_IF_ERROR(NcclError("NCCL", state));
    if (state == ncclSuccess) return absl::OkStatus();
    if (interrupted_) return absl::CancelledError("interrupted");
    if (absl::Now() > deadline) return absl::DeadlineExceededError("NCCL is not done");
    absl::SleepFor(kLook);
  }
}

absl::Status NcclExchange::Await(absl::Time deadline) {
  RETURN_IF_ERROR(AwaitCalls(deadline));
  for (;;) {
    const cudaError_t done = cudaStreamQuery(stream_);
    if (done == cudaSuccess) return absl::OkStatus();
    if (done != cudaErrorNotReady) return CudaError("the exchange's stream", done);
    ncclResult_t state = ncclSuccess;
    RETURN_IF_ERROR(NcclError("NCCL", ncclCommGetAsyncError(comm_, &state)));
    RETURN_IF_ERROR(NcclError("NCCL", state));
    if (interrupted_) return absl::CancelledError("interrupted");
    if (absl::Now() > deadline) return absl::DeadlineExceededError("NCCL is not done");
    absl::SleepFor(kLook);
  }
}

absl::Status NcclExchange::CopyOut(absl::Span<PeerFrames> frames) {
  const uint8_t* from = incoming_.data();
  for (const PeerFrames& f : frames) {
    for (const auto& piece : f.receive) {
      if (piece.empty()) continue;
      RETURN_IF_ERROR(CudaError(
          "a payload's copy from the device",
          cudaMemcpyAsync(piece.data(), from, piece.size(), cudaMemcpyDeviceToHost, stream_)));
      from += piece.size();
    }
  }
  return CudaError("the exchange's stream", cudaStreamSynchronize(stream_));
}

// NCCL doesn't say who is to blame; the connections beside it do.
absl::Status NcclExchange::RollCall(const FrameLabel& label, absl::Span<PeerFrames> frames,
                                    const absl::Status& why) {
  if (absl::IsCancelled(why)) return why;
  std::vector<PeerFrames> empty(frames.size());
  for (size_t i = 0; i < frames.size(); ++i) {
    empty[i].peer = frames[i].peer;
    empty[i].sent_kind = frames[i].sent_kind;
    empty[i].expected_kind = frames[i].expected_kind;
  }
  FrameLabel call = label;
  call.phase |= kRollCallPhase;
  RETURN_IF_ERROR(control_->Exchange(call, absl::MakeSpan(empty), kRollCall));
  return Annotate(why, absl::StrCat(Name(label.kind), " #", label.sequence,
                                    " through NCCL, though every rank answers"));
}
}  // namespace

int NumNcclDevices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

FrameCarrier OverNccl(int device) {
  return [device](std::unique_ptr<FrameExchange> control, const GroupTable& group, int rank,
                  absl::Duration timeout) -> absl::StatusOr<std::unique_ptr<FrameExchange>> {
    if (group.size() == 1) return control;
    auto exchange = std::make_unique<NcclExchange>(std::move(control), group, rank, device);
    const absl::Status opened = exchange->Open(timeout);
    if (!opened.ok()) {
      exchange->Farewell(opened);
      return opened;
    }
    return exchange;
  };
}
}  // namespace stretto::engine
