// Collectives among the ranks of one group, behind one interface; direct_communicator.h has the
// implementation. A communicator is a member's seat in a group of one membership epoch.
//
// Order: the operations of a rank run one after another in the order in which it started them, and
// all ranks start the same collectives in the same order (Send and Recv match per pair of ranks).
// An operation returns OK only when every rank has taken part in it.
//
// Failure: nothing hangs. A rank that doesn't take part within the timeout, leaves, or takes part
// in something else ends the group for everybody: the operation at hand and all later ones return
// the status that names it, on every rank, and the group is to be formed anew with a higher epoch.
//   DEADLINE_EXCEEDED    a rank was silent: "rank 2 (c) didn't take part in AllReduce #17 within 60
//   s" UNAVAILABLE          a rank left: its process ended or it closed its group
//   FAILED_PRECONDITION  ranks disagree on what they are doing
//   CANCELLED            Abort()
//
// Memory: spans given to Start… stay valid, and outputs untouched, until the handle is done.
// Thread-safe, as far as several threads can agree on an order. No exception leaves.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "engine/collectives/sum_tree.h"

namespace stretto::engine {
enum class CollectiveKind : uint8_t {
  kBarrier,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kSend,
  kRecv,
};
inline constexpr int kNumCollectiveKinds = 8;
absl::string_view Name(CollectiveKind kind);  // "AllReduce"

// Of payload, between this rank and the others (what a rank keeps for itself is not counted).
struct CollectiveTraffic {
  int64_t calls = 0;
  int64_t bytes_sent = 0, bytes_received = 0;
  double seconds = 0;  // under way, waiting for other ranks included
};

struct GroupMember {
  std::string name;     // stable across restarts, for people
  std::string address;  // host:port at which it accepts its peers
};
// A group of one epoch; the members' order is their rank.
struct GroupTable {
  std::string group;
  int64_t epoch = 0;
  std::vector<GroupMember> members;

  int size() const { return static_cast<int>(members.size()); }
  std::string Describe(int rank) const;  // "rank 2 (c)"
};

// An operation under way. Copyable; all copies mean the same operation.
class CollectiveHandle {
 public:
  struct State {
    absl::Notification finished;
    absl::Status status;
  };
  CollectiveHandle() = default;  // of nothing: done, OK
  explicit CollectiveHandle(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool done() const { return state_ == nullptr || state_->finished.HasBeenNotified(); }
  // Blocks until it is done.
  absl::Status Wait() const;

 private:
  std::shared_ptr<State> state_;
};

// What a rank adds to a ReduceScatter or AllReduce: one run of elements for each node of the sum's
// tree that it holds. Ranks' nodes are disjoint; what no rank holds is not in the sum.
struct SumPart {
  SumNode node;
  const void* data = nullptr;
};
// The tree and who holds which nodes of it; the same on every rank.
struct SumPlan {
  std::vector<bool> used;                           // by leaf: whether it has a value
  std::vector<std::vector<SumNode>> nodes_of_rank;  // in the order of their parts

  // One leaf a rank.
  static SumPlan OnePerRank(int num_ranks);
};

// One operation, for Communicator::Start.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kU8;  // of elements; sums: kF32 or kBF16 (added in f32, rounded once)
  // AllGather, ReduceScatter: elements of each rank. AllToAll: elements for each rank. Empty: equal
  // parts (AllGather: each as `num_elements`), or one of which the size must be a multiple.
  std::vector<int64_t> counts;
  // AllGather (in the output), AllToAll (in the input), sums (in each part): where a rank's
  // elements begin. Empty: one
  // rank's after the other's.
  std::vector<int64_t> offsets;
  std::vector<int64_t> receive_counts;  // AllToAll: elements from each rank
  int64_t num_elements = 0;             // of the input
  const void* input = nullptr;          // Broadcast at the root, AllGather, AllToAll, Send
  void* output = nullptr;               // may be null where the call gives it to `sum`
  std::vector<SumPart> parts;           // sums
  SumPlan plan;                         // sums
  // Sums: where the parts of this rank's share are added, for sums that need several calls; once it
  // is complete it is taken to the output. Null: the call's parts are the whole sum.
  TreeSum* sum = nullptr;
  int root = 0;                                   // Broadcast; the peer of Send and Recv
  absl::Duration timeout = absl::ZeroDuration();  // zero: the group's
};

// Elements of `total` that rank `rank` of `size` has when they are split evenly: the first
// total % size ranks have one more.
int64_t EvenShare(int64_t total, int size, int rank);
std::vector<int64_t> EvenShares(int64_t total, int size);

// Makes what carries a group's payloads (frame_exchange.h); `control`, which connects the group's
// ranks already, carries what they must agree on. Blocks until every rank takes part.
class FrameExchange;
using FrameCarrier = std::function<absl::StatusOr<std::unique_ptr<FrameExchange>>(
    std::unique_ptr<FrameExchange> control, const GroupTable& group, int rank,
    absl::Duration timeout)>;

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual const GroupTable& group() const = 0;
  virtual int rank() const = 0;
  int size() const { return group().size(); }
  // What its payloads go through; groups among its members use the same. Null: TCP.
  virtual FrameCarrier carrier() const = 0;

  // Enqueues an operation. Sizes are checked (STRETTO_CHECK): a mismatch within a rank is a bug,
  // one between ranks an error of the operation.
  virtual CollectiveHandle Start(CollectiveCall call) = 0;
  // Ends the group with CANCELLED and this reason, here and on every other rank. Any thread.
  virtual void Abort(absl::string_view reason) = 0;
  // OK while the group lives, else why it ended.
  virtual absl::Status status() const = 0;
  virtual CollectiveTraffic traffic(CollectiveKind kind) const = 0;
  // Frame headers and handshakes, all kinds together.
  virtual int64_t overhead_bytes_sent() const = 0;

  // --- the usual calls; each blocks
  absl::Status Barrier(absl::Duration timeout = absl::ZeroDuration());
  absl::Status Broadcast(absl::Span<uint8_t> data, int root);
  // all = the ranks' `mine`, in order of rank; equal sizes. `mine` may lie at its place in `all`.
  absl::Status AllGather(absl::Span<const uint8_t> mine, absl::Span<uint8_t> all);
  // The sum of all ranks' `data` in the tree of one leaf a rank, in place.
  absl::Status AllReduce(absl::Span<float> data);
  // The share of that sum that EvenShares gives this rank.
  absl::Status ReduceScatter(absl::Span<const float> data, absl::Span<float> mine);
  // Parts of equal size: `in` holds one for each rank, `out` one from each.
  absl::Status AllToAll(absl::Span<const uint8_t> in, absl::Span<uint8_t> out);
  absl::Status Send(absl::Span<const uint8_t> data, int to);
  absl::Status Recv(absl::Span<uint8_t> data, int from);
};
}  // namespace stretto::engine
