#include "engine/collectives/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_join.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr uint32_t kMagic = 0x46525453;  // "STRF"
constexpr uint8_t kData = 1, kFarewell = 2;
constexpr int64_t kFarewellNs = 1'000'000'000, kGreetingNs = 2'000'000'000;
constexpr int64_t kHearsayNs = 5'000'000'000;  // to be told by a peer who is to blame, at most
constexpr int64_t kSliceNs = 500'000'000;      // between looks at whether a group is wanted
constexpr int kMaxPollMs = 1000;
constexpr int64_t kWorthwhileBytes = 256 << 10;
constexpr int64_t kStoppedNs = 1'000'000'000;  // of delay that no scheduler makes
constexpr size_t kMaxFarewellBytes = 2000;
constexpr absl::string_view kProtocol = "stretto-group-1";

struct Header {
  uint32_t magic = kMagic;
  uint8_t type = kData, kind = 0, dtype = 0, phase = 0;
  int64_t sequence = 0;
  int64_t payload_bytes = 0;
  uint64_t agreement = 0;
  int64_t epoch = 0;
};
static_assert(sizeof(Header) == Mesh::kHeaderBytes);

template <class Spans>
int64_t TotalBytes(const Spans& spans) {
  int64_t total = 0;
  for (const auto& s : spans) total += static_cast<int64_t>(s.size());
  return total;
}

std::string Title(CollectiveKind kind, int64_t sequence) {
  return absl::StrCat(Name(kind), " #", sequence);
}

// A wait for time's sake: a peer that doesn't listen yet looks the same.
bool RanOut(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status);
}
template <class T>
bool RanOut(const absl::StatusOr<T>& result) {
  return RanOut(result.status());
}

absl::Span<uint8_t> BytesOf(Header& header) {
  return {reinterpret_cast<uint8_t*>(&header), sizeof(header)};
}
}  // namespace

// Where an exchange with one peer stands.
struct Mesh::Progress {
  PeerFrames* frames = nullptr;
  Header out, in;
  std::vector<absl::Span<const uint8_t>> to_send;  // what is left, the header first
  std::vector<absl::Span<uint8_t>> to_receive;     // likewise, reversed: the next piece is the last
  bool header_checked = false;
  int low_water = 1;  // bytes that must have come before a poll is told of them
  bool wants_send() const { return !to_send.empty(); }
  bool wants_receive() const { return !to_receive.empty(); }
};

absl::StatusOr<Mesh> Mesh::Connect(Listener listener, const GroupTable& group, int rank,
                                   const MeshPatience& patience) {
  if (rank < 0 || rank >= group.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " is not in group ", group.group, " of ", group.size()));
  }
  Mesh mesh(group, rank);
  mesh.sockets_.resize(group.size());
  mesh.unsent_.resize(group.size());
  mesh.wake_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!mesh.wake_.open()) return absl::ResourceExhaustedError("eventfd: no descriptor is left");
  RETURN_IF_ERROR(mesh.ConnectBelow(patience));
  RETURN_IF_ERROR(mesh.AcceptAbove(listener, patience));
  return mesh;
}

std::string Mesh::Hello(int to) const {
  MessageWriter w;
  w.Add(kProtocol);
  w.Add(group_.group);
  w.Add(group_.epoch);
  w.Add(int64_t{group_.size()});
  w.Add(int64_t{rank_});
  w.Add(int64_t{to});
  w.Add(group_.members[rank_].name);
  return w.text();
}

namespace {
// Until `wait` does something else than run out of its time, which is a slice of the patience.
template <class Wait>
auto InSlices(const MeshPatience& patience, const Wait& wait) -> decltype(wait(DeadlineNs{})) {
  for (;;) {
    if (patience.is_cancelled && patience.is_cancelled()) {
      return absl::CancelledError("the group is no longer wanted");
    }
    auto result = wait(std::min(patience.deadline, AfterNs(kSliceNs)));
    if (PollMs(patience.deadline) == 0 || !RanOut(result)) return result;
  }
}
}  // namespace

absl::Status Mesh::ConnectBelow(const MeshPatience& patience) {
  for (int r = 0; r < rank_; ++r) {
    RETURN_IF_ERROR(Annotate(ConnectTo(r, patience),
                             absl::StrCat(group_.Describe(r), " at ", group_.members[r].address)));
  }
  return absl::OkStatus();
}

absl::Status Mesh::ConnectTo(int rank, const MeshPatience& patience) {
  ASSIGN_OR_RETURN(Socket socket, InSlices(patience, [&](DeadlineNs deadline) {
                     return engine::ConnectTo(group_.members[rank].address, deadline);
                   }));
  const std::string hello = Hello(rank);
  RETURN_IF_ERROR(socket.SendMessage(hello, patience.deadline));
  overhead_bytes_sent_ += static_cast<int64_t>(hello.size());
  RETURN_IF_ERROR(
      InSlices(patience, [&](DeadlineNs deadline) { return socket.AwaitReadable(deadline); }));
  ASSIGN_OR_RETURN(const std::string answer, socket.ReceiveMessage(patience.deadline));
  MessageReader reader(answer);
  const auto code = static_cast<absl::StatusCode>(reader.Integer());
  const std::string text = reader.String();
  if (!reader.ok()) return absl::DataLossError("damaged answer");
  if (code != absl::StatusCode::kOk) return absl::Status(code, text);
  sockets_[rank] = std::move(socket);
  return absl::OkStatus();
}

std::string Mesh::MissingAbove() const {
  std::vector<std::string> missing;
  for (int r = rank_ + 1; r < group_.size(); ++r) {
    if (!sockets_[r].open()) missing.push_back(group_.Describe(r));
  }
  return absl::StrJoin(missing, ", ");
}

absl::Status Mesh::AcceptAbove(const Listener& listener, const MeshPatience& patience) {
  for (std::string missing = MissingAbove(); !missing.empty(); missing = MissingAbove()) {
    absl::StatusOr<Socket> socket =
        InSlices(patience, [&](DeadlineNs deadline) { return listener.Accept(deadline); });
    if (absl::IsDeadlineExceeded(socket.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat("group ", group_.group, ": no connection from ", missing));
    }
    RETURN_IF_ERROR(socket.status());
    RETURN_IF_ERROR(Receive(*std::move(socket), patience.deadline));
  }
  return absl::OkStatus();
}

absl::Status Mesh::Receive(Socket socket, DeadlineNs deadline) {
  const absl::StatusOr<std::string> hello =
      socket.ReceiveMessage(std::min(deadline, AfterNs(kGreetingNs)));
  if (!hello.ok()) return absl::OkStatus();  // not a member
  MessageReader reader(*hello);
  if (reader.String() != kProtocol) return absl::OkStatus();
  const std::string group = reader.String();
  const int64_t epoch = reader.Integer(), size = reader.Integer();
  const int64_t from = reader.Integer(), to = reader.Integer();
  const std::string name = reader.String();
  if (!reader.ok()) return absl::OkStatus();
  const std::string who = absl::StrCat("rank ", from, " (", name, ")");
  absl::Status refusal, own;
  if (group != group_.group || epoch < group_.epoch) {
    refusal = absl::FailedPreconditionError(absl::StrCat(who, " comes from epoch ", epoch,
                                                         " of group ", group, "; this is epoch ",
                                                         group_.epoch, " of group ", group_.group));
  } else if (epoch > group_.epoch) {
    own = refusal = absl::FailedPreconditionError(absl::StrCat(
        "epoch ", group_.epoch, " of group ", group, " is over: ", who, " is at epoch ", epoch));
  } else if (size != group_.size()) {
    own = refusal = absl::InvalidArgumentError(absl::StrCat(who, " is in a group of ", size,
                                                            " ranks, ", group_.Describe(rank_),
                                                            " in one of ", group_.size()));
  } else if (to != rank_ || from <= rank_ || from >= size || group_.members[from].name != name ||
             sockets_[from].open()) {
    refusal = absl::InvalidArgumentError(
        absl::StrCat(who, " was not expected at ", group_.Describe(rank_)));
  }
  MessageWriter answer;
  answer.Add(static_cast<int64_t>(refusal.code()));
  answer.Add(refusal.message());
  const absl::Status sent = socket.SendMessage(answer.text(), AfterNs(kGreetingNs));
  if (refusal.ok() && sent.ok()) sockets_[from] = std::move(socket);
  return own;
}

absl::Status Mesh::Exchange(const FrameLabel& label, absl::Span<PeerFrames> frames,
                            absl::Duration timeout) {
  std::vector<Progress> all(frames.size());
  for (size_t i = 0; i < frames.size(); ++i) {
    Progress& p = all[i];
    p.frames = &frames[i];
    p.out.kind = static_cast<uint8_t>(frames[i].sent_kind);
    p.out.dtype = static_cast<uint8_t>(label.dtype);
    p.out.phase = label.phase;
    p.out.sequence = label.sequence;
    p.out.payload_bytes = frames[i].send_bytes();
    p.out.agreement = label.agreement;
    p.out.epoch = group_.epoch;
    p.to_send.push_back(BytesOf(p.out));
    for (const auto& s : frames[i].send) {
      if (!s.empty()) p.to_send.push_back(s);
    }
    p.to_receive.assign(frames[i].receive.rbegin(), frames[i].receive.rend());
    std::erase_if(p.to_receive, [](const auto& s) { return s.empty(); });
    p.to_receive.push_back(BytesOf(p.in));
    overhead_bytes_sent_ += kHeaderBytes;
  }
  DeadlineNs deadline = AfterNs(absl::ToInt64Nanoseconds(timeout));
  bool waited_on = false;
  absl::Status status;
  const auto busy = [&all] {
    return std::any_of(all.begin(), all.end(),
                       [](const Progress& p) { return p.wants_send() || p.wants_receive(); });
  };
  while (status.ok() && busy()) {
    for (Progress& p : all) SetLowWater(p);
    status = Poll(all, deadline);
    if (absl::IsDeadlineExceeded(status) && !waited_on && NumSilent(all) > 1) {
      // A rank that waits for another one in the operation before looks as silent as that one. It
      // began to wait earlier, and is about to say for whom.
      waited_on = true;
      status = absl::OkStatus();
      deadline = AfterNs(std::min(absl::ToInt64Nanoseconds(timeout) / 4, kHearsayNs));
    }
    if (absl::IsDeadlineExceeded(status)) status = Late(label, all, timeout);
    // What has arrived is read before what has gone is noticed.
    for (Progress& p : all) {
      if (status.ok() && p.wants_receive()) status = ReceiveSome(label, p);
    }
    for (Progress& p : all) {
      if (status.ok() && p.wants_send()) status = SendSome(p);
    }
  }
  for (Progress& p : all) {
    p.header_checked = false;  // the next exchange begins with headers
    SetLowWater(p);
  }
  if (!status.ok()) {
    for (const Progress& p : all) {
      std::vector<uint8_t>& rest = unsent_[p.frames->peer];
      const bool begun = p.wants_send() && p.to_send.front().size() != kHeaderBytes;
      for (const auto& s : p.to_send) {
        if (begun) rest.insert(rest.end(), s.begin(), s.end());
      }
    }
  }
  return status;
}

// A payload is received in pieces that are worth a wake-up: every one interrupts the computation.
void Mesh::SetLowWater(Progress& p) const {
  int64_t wanted = 1;  // a header, or a farewell
  if (p.header_checked) wanted = std::clamp<int64_t>(TotalBytes(p.to_receive), 1, kWorthwhileBytes);
  if (p.low_water == wanted) return;
  p.low_water = static_cast<int>(wanted);
  // Where it can't be set there are more wake-ups.
  setsockopt(sockets_[p.frames->peer].fd(), SOL_SOCKET, SO_RCVLOWAT, &p.low_water,
             sizeof(p.low_water));
}

absl::Status Mesh::Poll(const std::vector<Progress>& all, DeadlineNs& deadline) const {
  std::vector<pollfd> fds = {{wake_.fd(), POLLIN, 0}};
  for (const Progress& p : all) {
    const int events = (p.wants_send() ? POLLOUT : 0) | (p.wants_receive() ? POLLIN : 0);
    if (events != 0) {
      fds.push_back({sockets_[p.frames->peer].fd(), static_cast<short>(events), 0});
    }
  }
  const int wait_ms = std::min(PollMs(deadline), kMaxPollMs);
  const DeadlineNs begin = AfterNs(0);
  const int ready = poll(fds.data(), fds.size(), wait_ms);
  const int64_t late_ns = AfterNs(0) - begin - int64_t{wait_ms} * 1'000'000;
  // Time in which this process itself was stopped is not its peers' fault.
  if (late_ns > kStoppedNs) deadline += late_ns;
  if (ready < 0 && errno != EINTR) {
    return absl::InternalError(absl::StrCat("poll: ", std::strerror(errno)));
  }
  if (ready == 0 && PollMs(deadline) == 0) return absl::DeadlineExceededError("");
  if (ready > 0 && fds[0].revents != 0) return absl::CancelledError("interrupted");
  return absl::OkStatus();
}

absl::Status Mesh::SendSome(Progress& p) {
  while (p.wants_send()) {
    iovec pieces[16];
    msghdr message{};
    message.msg_iov = pieces;
    for (const auto& s : p.to_send) {
      if (message.msg_iovlen == std::size(pieces)) break;
      pieces[message.msg_iovlen++] = {const_cast<uint8_t*>(s.data()), s.size()};
    }
    ssize_t n = sendmsg(sockets_[p.frames->peer].fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return absl::OkStatus();
    if (n < 0 && errno != EPIPE && errno != ECONNRESET && errno != ENOTCONN) {
      return absl::InternalError(absl::StrCat("can't send to ", group_.Describe(p.frames->peer),
                                              ": ", std::strerror(errno)));
    }
    if (n < 0) {
      // The peer has gone; why is what its connection still holds to be read.
      p.to_send.clear();
      return absl::OkStatus();
    }
    while (n > 0) {
      const auto step = std::min<size_t>(static_cast<size_t>(n), p.to_send.front().size());
      p.to_send.front().remove_prefix(step);
      n -= static_cast<ssize_t>(step);
      if (p.to_send.front().empty()) p.to_send.erase(p.to_send.begin());
    }
  }
  return absl::OkStatus();
}

absl::Status Mesh::ReceiveSome(const FrameLabel& label, Progress& p) {
  while (p.wants_receive()) {
    absl::Span<uint8_t>& next = p.to_receive.back();
    const ssize_t n = recv(sockets_[p.frames->peer].fd(), next.data(), next.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return absl::OkStatus();
    if (n <= 0) return Lost(label, p.frames->peer);
    next.remove_prefix(static_cast<size_t>(n));
    if (!next.empty()) continue;
    p.to_receive.pop_back();
    if (!p.header_checked) {
      RETURN_IF_ERROR(CheckHeader(label, p));
      p.header_checked = true;
    }
  }
  return absl::OkStatus();
}

absl::Status Mesh::CheckHeader(const FrameLabel& label, const Progress& p) const {
  const Header& in = p.in;
  const std::string who = group_.Describe(p.frames->peer);
  if (in.magic != kMagic || in.epoch != group_.epoch) {
    return absl::DataLossError(absl::StrCat(who, " sent what is no frame of this group"));
  }
  if (in.type == kFarewell) return ReadFarewell(p);
  const int64_t expected = p.frames->receive_bytes();
  const auto kind = static_cast<CollectiveKind>(in.kind);
  if (kind == p.frames->expected_kind && in.sequence == label.sequence && in.phase == label.phase &&
      in.dtype == static_cast<uint8_t>(label.dtype) && in.payload_bytes == expected &&
      in.agreement == label.agreement) {
    return absl::OkStatus();
  }
  const auto in_words = [](CollectiveKind k, int64_t sequence, int64_t bytes, uint8_t dtype) {
    return absl::StrCat(Title(k, sequence), " (", bytes, " bytes of ",
                        Name(static_cast<DType>(dtype)), ")");
  };
  const std::string theirs = in_words(kind, in.sequence, in.payload_bytes, in.dtype);
  const std::string ours = in_words(p.frames->expected_kind, label.sequence, expected,
                                    static_cast<uint8_t>(label.dtype));
  return absl::FailedPreconditionError(
      absl::StrCat("ranks disagree: ", who, " is in ", theirs, ", ", group_.Describe(rank_),
                   " expects ", ours, theirs == ours ? " with other shares or another root" : ""));
}

absl::Status Mesh::ReadFarewell(const Progress& p) const {
  std::string text(std::min<size_t>(p.in.payload_bytes, kMaxFarewellBytes), '\0');
  const absl::Status read = sockets_[p.frames->peer].ReceiveAll(
      {reinterpret_cast<uint8_t*>(text.data()), text.size()}, AfterNs(kFarewellNs));
  const std::string who = group_.Describe(p.frames->peer);
  if (!read.ok()) return absl::UnavailableError(absl::StrCat(who, " left the group"));
  // Told once, the first teller's name is enough.
  if (text.find(" (as told by ") == std::string::npos) {
    absl::StrAppend(&text, " (as told by ", who, ")");
  }
  return absl::Status(static_cast<absl::StatusCode>(p.in.kind), text);
}

absl::Status Mesh::Lost(const FrameLabel& label, int peer) const {
  return absl::UnavailableError(absl::StrCat(group_.Describe(peer), " left the group before ",
                                             Title(label.kind, label.sequence), " was done"));
}

int Mesh::NumSilent(const std::vector<Progress>& all) {
  return static_cast<int>(
      std::count_if(all.begin(), all.end(), [](const Progress& p) { return !p.header_checked; }));
}

absl::Status Mesh::Late(const FrameLabel& label, const std::vector<Progress>& all,
                        absl::Duration timeout) const {
  std::vector<std::string> silent, stopped, deaf;
  for (const Progress& p : all) {
    const std::string who = group_.Describe(p.frames->peer);
    if (!p.header_checked) {
      silent.push_back(who);
    } else if (p.wants_receive()) {
      stopped.push_back(who);
    } else if (p.wants_send()) {
      deaf.push_back(who);
    }
  }
  const std::string what = absl::StrCat(Title(label.kind, label.sequence), " within ",
                                        absl::ToDoubleSeconds(timeout), " s");
  const auto late = [&](const std::vector<std::string>& who, absl::string_view did) {
    return absl::DeadlineExceededError(absl::StrCat(absl::StrJoin(who, ", "), " ", did, " ", what));
  };
  if (!silent.empty()) return late(silent, "didn't take part in");
  if (!stopped.empty()) return late(stopped, "stopped sending in");
  return late(deaf, "stopped receiving in");
}

void Mesh::Farewell(const absl::Status& why) {
  const std::string text(why.message().substr(0, kMaxFarewellBytes));
  Header header;
  header.type = kFarewell;
  header.kind = static_cast<uint8_t>(why.code());
  header.payload_bytes = static_cast<int64_t>(text.size());
  header.epoch = group_.epoch;
  const DeadlineNs deadline = AfterNs(kFarewellNs);
  for (int r = 0; r < group_.size(); ++r) {
    if (!sockets_[r].open()) continue;
    std::vector<uint8_t>& bytes = unsent_[r];
    const absl::Span<uint8_t> head = BytesOf(header);
    bytes.insert(bytes.end(), head.begin(), head.end());
    bytes.insert(bytes.end(), text.begin(), text.end());
    // Whoever can't be told finds the connection closed.
    sockets_[r].SendAll(bytes, deadline).IgnoreError();
    shutdown(sockets_[r].fd(), SHUT_WR);
    bytes.clear();
  }
}

void Mesh::Interrupt() {
  const uint64_t one = 1;
  const ssize_t written = write(wake_.fd(), &one, sizeof(one));
  static_cast<void>(written);  // fails only when it is set already
}
}  // namespace stretto::engine
