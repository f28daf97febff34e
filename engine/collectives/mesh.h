// One connection between every two ranks of a group, and frames over them. An exchange sends one
// frame to each of some peers and receives one from each of them, all at once; it ends when all are
// through, or with the status that names who was silent, left, or is doing something else.
//
// Not thread-safe but for Interrupt().
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/collectives/frame_exchange.h"
#include "engine/collectives/socket.h"

namespace stretto::engine {
// How long a mesh that is being made waits for others.
struct MeshPatience {
  DeadlineNs deadline = 0;
  std::function<bool()> is_cancelled = nullptr;  // CommunicatorOptions
};

class Mesh final : public FrameExchange {
 public:
  // Connects to the ranks below and accepts those above. Refuses, and is refused by, ranks of
  // another epoch or group. Errors name the rank.
  static absl::StatusOr<Mesh> Connect(Listener listener, const GroupTable& group, int rank,
                                      const MeshPatience& patience);
  Mesh(Mesh&&) = default;
  Mesh& operator=(Mesh&&) = default;

  absl::Status Exchange(const FrameLabel& label, absl::Span<PeerFrames> frames,
                        absl::Duration timeout) override;
  void Farewell(const absl::Status& why) override;
  void Interrupt() override;
  int64_t overhead_bytes_sent() const override { return overhead_bytes_sent_; }

  static constexpr size_t kHeaderBytes = 40;

 private:
  struct Progress;
  Mesh(GroupTable group, int rank) : group_(std::move(group)), rank_(rank) {}
  absl::Status ConnectBelow(const MeshPatience& patience);
  absl::Status ConnectTo(int rank, const MeshPatience& patience);
  absl::Status AcceptAbove(const Listener& listener, const MeshPatience& patience);
  // OK: `socket` is a member now, or has been turned away. An error: this rank is the one that must
  // go.
  absl::Status Receive(Socket socket, DeadlineNs deadline);
  std::string Hello(int to) const;
  std::string MissingAbove() const;
  // Waits until something can be done. Moves the deadline by the time that this process was
  // stopped.
  absl::Status Poll(const std::vector<Progress>& all, DeadlineNs& deadline) const;
  void SetLowWater(Progress& p) const;
  absl::Status SendSome(Progress& p);
  absl::Status ReceiveSome(const FrameLabel& label, Progress& p);
  absl::Status CheckHeader(const FrameLabel& label, const Progress& p) const;
  absl::Status ReadFarewell(const Progress& p) const;
  // Peers of which nothing has come yet.
  static int NumSilent(const std::vector<Progress>& all);
  absl::Status Late(const FrameLabel& label, const std::vector<Progress>& all,
                    absl::Duration timeout) const;
  absl::Status Lost(const FrameLabel& label, int peer) const;

  GroupTable group_;
  int rank_;
  std::vector<Socket> sockets_;  // by rank; none for this one
  Socket wake_;                  // an eventfd
  // Frames that an ended exchange left half sent: a farewell may only follow their end.
  std::vector<std::vector<uint8_t>> unsent_;
  int64_t overhead_bytes_sent_ = 0;
};
}  // namespace stretto::engine
