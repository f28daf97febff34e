#include "engine/collectives/communicator.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace stretto::engine {
absl::string_view Name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kBarrier:
      return "Barrier";
    case CollectiveKind::kBroadcast:
      return "Broadcast";
    case CollectiveKind::kAllGather:
      return "AllGather";
    case CollectiveKind::kReduceScatter:
      return "ReduceScatter";
    case CollectiveKind::kAllReduce:
      return "AllReduce";
    case CollectiveKind::kAllToAll:
      return "AllToAll";
    case CollectiveKind::kSend:
      return "Send";
    case CollectiveKind::kRecv:
      return "Recv";
  }
  return "?";
}

std::string GroupTable::Describe(int rank) const {
  return absl::StrCat("rank ", rank, " (", members[rank].name, ")");
}

absl::Status CollectiveHandle::Wait() const {
  if (state_ == nullptr) return absl::OkStatus();
  state_->finished.WaitForNotification();
  return state_->status;
}

SumPlan SumPlan::OnePerRank(int num_ranks) {
  SumPlan plan;
  plan.used.assign(num_ranks, true);
  for (int64_t r = 0; r < num_ranks; ++r) plan.nodes_of_rank.push_back({{r, r + 1}});
  return plan;
}

int64_t EvenShare(int64_t total, int size, int rank) {
  return total / size + (rank < total % size ? 1 : 0);
}

std::vector<int64_t> EvenShares(int64_t total, int size) {
  std::vector<int64_t> shares(size);
  for (int r = 0; r < size; ++r) shares[r] = EvenShare(total, size, r);
  return shares;
}

absl::Status Communicator::Barrier(absl::Duration timeout) {
  CollectiveCall call;
  call.timeout = timeout;
  return Start(std::move(call)).Wait();
}

absl::Status Communicator::Broadcast(absl::Span<uint8_t> data, int root) {
  CollectiveCall call;
  call.kind = CollectiveKind::kBroadcast;
  call.num_elements = static_cast<int64_t>(data.size());
  call.input = call.output = data.data();
  call.root = root;
  return Start(std::move(call)).Wait();
}

absl::Status Communicator::AllGather(absl::Span<const uint8_t> mine, absl::Span<uint8_t> all) {
  STRETTO_CHECK(mine.size() * static_cast<size_t>(size()) == all.size());
  CollectiveCall call;
  call.kind = CollectiveKind::kAllGather;
  call.num_elements = static_cast<int64_t>(mine.size());
  call.input = mine.data();
  call.output = all.data();
  return Start(std::move(call)).Wait();
}

absl::Status Communicator::AllReduce(absl::Span<float> data) {
  CollectiveCall call;
  call.kind = CollectiveKind::kAllReduce;
  call.dtype = DType::kF32;
  call.num_elements = static_cast<int64_t>(data.size());
  call.parts = {{{rank(), rank() + 1}, data.data()}};
  call.plan = SumPlan::OnePerRank(size());
  call.output = data.data();
  return Start(std::move(call)).Wait();
}

absl::Status Communicator::ReduceScatter(absl::Span<const float> data, absl::Span<float> mine) {
  CollectiveCall call;
  call.kind = CollectiveKind::kReduceScatter;
  call.dtype = DType::kF32;
  call.num_elements = static_cast<int64_t>(data.size());
  STRETTO_CHECK(static_cast<int64_t>(mine.size()) == EvenShare(call.num_elements, size(), rank()));
  call.parts = {{{rank(), rank() + 1}, data.data()}};
  call.plan = SumPlan::OnePerRank(size());
  call.output = mine.data();
  return Start(std::move(call)).Wait();
}

absl::Status Communicator::AllToAll(absl::Span<const uint8_t> in, absl::Span<uint8_t> out) {
  STRETTO_CHECK(in.size() == out.size() && in.size() % static_cast<size_t>(size()) == 0);
  CollectiveCall call;
  call.kind = CollectiveKind::kAllToAll;
  call.num_elements = static_cast<int64_t>(in.size());
  call.input = in.data();
  call.output = out.data();
  return Start(std::move(call)).Wait();
}

absl::Status Communicator::Send(absl::Span<const uint8_t> data, int to) {
  CollectiveCall call;
  call.kind = CollectiveKind::kSend;
  call.num_elements = static_cast<int64_t>(data.size());
  call.input = data.data();
  call.root = to;
  return Start(std::move(call)).Wait();
}

absl::Status Communicator::Recv(absl::Span<uint8_t> data, int from) {
  CollectiveCall call;
  call.kind = CollectiveKind::kRecv;
  call.num_elements = static_cast<int64_t>(data.size());
  call.output = data.data();
  call.root = from;
  return Start(std::move(call)).Wait();
}
}  // namespace stretto::engine
