#include "engine/collectives/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr int64_t kTickNs = 50'000'000, kGreetingNs = 1'000'000'000;
constexpr absl::string_view kProtocol = "stretto-rendezvous-1";
constexpr int kMaxRanks = 4096;

std::string Encode(const Registration& r, absl::Duration timeout) {
  MessageWriter w;
  w.Add(kProtocol);
  w.Add(r.group);
  w.Add(r.epoch);
  w.Add(int64_t{r.rank});
  w.Add(int64_t{r.world_size});
  w.Add(r.name);
  w.Add(r.address);
  w.Add(absl::ToInt64Nanoseconds(timeout));
  return w.text();
}

std::string Refusal(const absl::Status& status) {
  MessageWriter w;
  w.Add(static_cast<int64_t>(status.code()));
  w.Add(status.message());
  return w.text();
}

// A member that waits for the others.
struct Waiting {
  Socket socket;
  Registration registration;
  DeadlineNs deadline = 0;
};

// The group that is being gathered, and what was before.
class Gathering {
 public:
  void Take(Socket socket, const std::string& message) {
    MessageReader r(message);
    Waiting w;
    if (r.String() != kProtocol) return;
    w.registration.group = r.String();
    w.registration.epoch = r.Integer();
    w.registration.rank = static_cast<int>(r.Integer());
    w.registration.world_size = static_cast<int>(r.Integer());
    w.registration.name = r.String();
    w.registration.address = r.String();
    w.deadline = AfterNs(std::max<int64_t>(0, r.Integer()));
    if (!r.ok()) return;
    w.socket = std::move(socket);
    if (absl::Status s = Admit(w); !s.ok()) {
      Tell(w, Refusal(s));
      return;
    }
    const int rank = w.registration.rank;
    members_[rank] = std::move(w);
    if (static_cast<int>(members_.size()) == world_size_) Form();
  }
  // Those whose time is over are told who is missing.
  void Expire() {
    for (auto it = members_.begin(); it != members_.end();) {
      if (PollMs(it->second.deadline) > 0) {
        ++it;
        continue;
      }
      Tell(it->second, Refusal(absl::DeadlineExceededError(
                           absl::StrCat("group ", group_, ", epoch ", *epoch_, ": ", Missing(),
                                        " did not register in time"))));
      it = members_.erase(it);
    }
  }
  void RefuseAll(const absl::Status& why) {
    for (auto& [rank, w] : members_) Tell(w, Refusal(why));
    members_.clear();
  }

 private:
  absl::Status Admit(const Waiting& w) {
    const Registration& r = w.registration;
    if (r.world_size < 1 || r.world_size > kMaxRanks || r.rank < 0 || r.rank >= r.world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", r.rank, " of ", r.world_size, " ranks is no place in a group"));
    }
    if (epoch_ && r.group != group_) {
      return absl::InvalidArgumentError(
          absl::StrCat("group '", r.group, "' is not gathered here, but '", group_, "'"));
    }
    if (epoch_ && r.epoch < *epoch_) {
      return absl::FailedPreconditionError(absl::StrCat("epoch ", r.epoch, " of group ", group_,
                                                        " is over; the current one is ", *epoch_));
    }
    if (!epoch_ || r.epoch > *epoch_) {
      RefuseAll(absl::FailedPreconditionError(
          absl::StrCat("epoch ", epoch_.value_or(0), " of group ", r.group,
                       " is over; the current one is ", r.epoch)));
      group_ = r.group;
      epoch_ = r.epoch;
      world_size_ = r.world_size;
      formed_ = false;
    }
    if (formed_) {
      return absl::FailedPreconditionError(
          absl::StrCat("group ", group_, " has been formed at epoch ", *epoch_,
                       " already; who joins now needs a higher one"));
    }
    if (r.world_size != world_size_) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", r.rank, " (", r.name, ") expects ",
                                                     r.world_size, " ranks, the others ",
                                                     world_size_));
    }
    for (const auto& [rank, other] : members_) {
      const bool same_name = other.registration.name == r.name;
      if (rank != r.rank && same_name) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", r.name, "' is rank ", rank, " already, now also ", r.rank));
      }
      // The same member may come again: its earlier try is dead.
      if (rank == r.rank && !same_name) {
        return absl::InvalidArgumentError(absl::StrCat(
            "rank ", rank, " is '", other.registration.name, "', now also '", r.name, "'"));
      }
    }
    return absl::OkStatus();
  }
  void Form() {
    MessageWriter w;
    w.Add(static_cast<int64_t>(absl::StatusCode::kOk));
    w.Add(group_);
    w.Add(*epoch_);
    w.Add(int64_t{world_size_});
    for (const auto& [rank, member] : members_) {
      w.Add(member.registration.name);
      w.Add(member.registration.address);
    }
    for (auto& [rank, member] : members_) Tell(member, w.text());
    members_.clear();
    formed_ = true;
  }
  static void Tell(Waiting& w, const std::string& message) {
    // One that no longer listens has given up by itself.
    w.socket.SendMessage(message, AfterNs(kGreetingNs)).IgnoreError();
  }
  std::string Missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < world_size_; ++r) {
      if (members_.count(r) == 0) ranks.push_back(r);
    }
    return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "), " of ",
                        world_size_);
  }

  std::string group_;
  std::optional<int64_t> epoch_;
  int world_size_ = 0;
  bool formed_ = false;
  std::map<int, Waiting> members_;
};
}  // namespace

RendezvousHost::RendezvousHost(Listener listener)
    : listener_(std::move(listener)), thread_([this] { Serve(); }) {}

RendezvousHost::~RendezvousHost() {
  stop_ = true;
  thread_.join();
}

void RendezvousHost::Serve() {
  Gathering gathering;
  while (!stop_) {
    absl::StatusOr<Socket> socket = listener_.Accept(AfterNs(kTickNs));
    if (socket.ok()) {
      // Whoever says nothing, or something else, is not a member.
      const absl::StatusOr<std::string> message = socket->ReceiveMessage(AfterNs(kGreetingNs));
      if (message.ok()) gathering.Take(*std::move(socket), *message);
    } else if (!absl::IsDeadlineExceeded(socket.status())) {
      Clock::Real().SleepNs(kTickNs);
    }
    gathering.Expire();
  }
  gathering.RefuseAll(absl::UnavailableError("the rendezvous has ended"));
}

absl::StatusOr<GroupTable> Register(const std::string& host, const Registration& registration,
                                    absl::Duration timeout) {
  const std::string where = absl::StrCat("rendezvous at ", host);
  const DeadlineNs deadline = AfterNs(absl::ToInt64Nanoseconds(timeout));
  absl::StatusOr<Socket> socket = ConnectTo(host, deadline);
  if (!socket.ok()) return Annotate(socket.status(), where);
  RETURN_IF_ERROR(Annotate(socket->SendMessage(Encode(registration, timeout), deadline), where));
  // The host answers at the deadline at the latest.
  const absl::StatusOr<std::string> answer = socket->ReceiveMessage(deadline + 4 * kGreetingNs);
  if (!answer.ok()) return Annotate(answer.status(), where);
  MessageReader r(*answer);
  const auto code = static_cast<absl::StatusCode>(r.Integer());
  if (code != absl::StatusCode::kOk)
    return absl::Status(code, absl::StrCat(where, ": ", r.String()));
  GroupTable table;
  table.group = r.String();
  table.epoch = r.Integer();
  const int64_t size = r.Integer();
  for (int64_t i = 0; i < size && i < kMaxRanks; ++i) {
    GroupMember member;
    member.name = r.String();
    member.address = r.String();
    table.members.push_back(std::move(member));
  }
  if (!r.ok()) return absl::DataLossError(absl::StrCat(where, ": damaged answer"));
  return table;
}
}  // namespace stretto::engine
