// Frames between the ranks of a group, all at once: what collectives are made of. mesh.h carries
// them over TCP, nccl/nccl_exchange.h through NCCL.
//
// Not thread-safe but for Interrupt().
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/collectives/communicator.h"

namespace stretto::engine {
// What a frame says of itself; both sides of an exchange must say the same.
struct FrameLabel {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kU8;
  uint8_t phase = 0;
  int64_t sequence = 0;    // "#17"
  uint64_t agreement = 0;  // a hash over all that ranks must agree on
};

// The frames to and from one peer: payloads in pieces that are sent and received in order.
struct PeerFrames {
  int peer = 0;
  // Send and Recv label their frames differently on both sides.
  CollectiveKind sent_kind = CollectiveKind::kBarrier, expected_kind = CollectiveKind::kBarrier;
  std::vector<absl::Span<const uint8_t>> send;
  std::vector<absl::Span<uint8_t>> receive;

  int64_t send_bytes() const { return TotalBytes(send); }
  int64_t receive_bytes() const { return TotalBytes(receive); }

 private:
  template <class Spans>
  static int64_t TotalBytes(const Spans& spans) {
    int64_t total = 0;
    for (const auto& s : spans) total += static_cast<int64_t>(s.size());
    return total;
  }
};

class FrameExchange {
 public:
  virtual ~FrameExchange() = default;
  // Sends one frame to each of some peers and receives one from each of them. Blocks until all are
  // through. Errors name who was silent, left, or is doing something else; after one only
  // Farewell() may follow.
  virtual absl::Status Exchange(const FrameLabel& label, absl::Span<PeerFrames> frames,
                                absl::Duration timeout) = 0;
  // Tells every peer that is still there why this rank ends the group; for at most a second.
  virtual void Farewell(const absl::Status& why) = 0;
  // Lets an exchange, the current or the next, end with CANCELLED. Any thread.
  virtual void Interrupt() = 0;
  // Of headers and handshakes.
  virtual int64_t overhead_bytes_sent() const = 0;
};
}  // namespace stretto::engine
