#include "services/common/http_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <deque>
#include <exception>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "services/common/http_connection.h"
#include "services/common/listen.h"
#include "services/common/log.h"

namespace stretto::services {
namespace {
using State = HttpConnection::State;
using Client = std::unique_ptr<HttpConnection>;

constexpr int kTickMs = 100;             // how exact deadlines are
constexpr int64_t kLingerMs = 2000;      // for a client to read the answer to what it still sends
constexpr int64_t kLastWriteMs = 1000;   // for a client to read an answer when the process ends
constexpr int64_t kAcceptPauseMs = 200;  // when the process has no descriptor left
constexpr int kMaxInARow = 8;            // of a connection, before the others have their turn
constexpr size_t kFreeBytes = size_t{64} << 10;  // of a body, without a share of the common room
constexpr int64_t kSlowMs = 1000;    // a head that takes longer may be given up for another
constexpr size_t kMaxRefused = 256;  // connections over the limit that are told so at a time

class Descriptor {
 public:
  ~Descriptor() { Reset(-1); }
  void Reset(int fd) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

size_t HalfOfDescriptors(size_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted;
  return std::max<size_t>(1, std::min<size_t>(wanted, limit.rlim_cur / 2));
}

int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return -1;
  // The port is at the same place in both families.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

class HttpServerImpl final : public HttpServer {
 public:
  HttpServerImpl(HttpHandler* handler, const HttpServerOptions& options)
      : handler_(handler),
        options_(options),
        max_connections_(HalfOfDescriptors(options.max_connections)) {}
  ~HttpServerImpl() override { Stop(); }

  absl::Status Begin() {
    const absl::StatusOr<int> listener = ListenAt(options_.bind, options_.port);
    if (!listener.ok()) return listener.status();
    listener_.Reset(*listener);
    epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
    wake_.Reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (epoll_.get() < 0 || wake_.get() < 0) {
      return absl::UnavailableError("HTTP: no descriptor is left for the server (ulimit -n)");
    }
    port_ = PortOf(listener_.get());
    Watch(listener_.get(), EPOLLIN, EPOLL_CTL_ADD);
    Watch(wake_.get(), EPOLLIN, EPOLL_CTL_ADD);
    thread_ = std::thread([this] { ThreadMain(); });
    return absl::OkStatus();
  }
  int port() const override { return port_; }
  void AnnounceEnd() override { last_answers_ = true; }
  void Stop() override {
    if (!thread_.joinable()) return;
    stopping_ = true;
    Wake();
    thread_.join();
  }

 private:
  // --- the server's thread: everything up to Answer()

  void ThreadMain() {
    std::array<epoll_event, 64> events;
    while (true) {
      const int timeout_ms = !ready_.empty() ? 0 : kTickMs;
      const int count = epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
      for (int i = 0; i < count; ++i) OnEvent(events[static_cast<size_t>(i)].data.fd);
      TakeBack();
      for (const int fd : std::exchange(ready_, {})) {
        if (const auto found = clients_.find(fd); found != clients_.end()) Advance(*found->second);
      }
      StartWaiting();
      Sweep();
      if (stopping_ && EndIfIdle()) return;
    }
  }

  void OnEvent(int fd) {
    if (fd == wake_.get()) {
      uint64_t count = 0;
      (void)!read(fd, &count, sizeof(count));
      return;
    }
    if (fd == listener_.get()) return Accept();
    const auto found = clients_.find(fd);
    if (found == clients_.end()) return;
    HttpConnection& client = *found->second;
    switch (client.state) {
      case State::kReading:
        if (!client.Receive()) return Drop(fd);
        return Advance(client);
      case State::kWriting:
        Flush(client);
        if (clients_.contains(fd)) Advance(client);
        return;
      default:
        if (!client.Receive()) return Drop(fd);
        client.received.clear();
    }
  }

  void Accept() {
    while (true) {
      const int fd = accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
        if (DropLingering() || HasRoom()) continue;
        Watch(listener_.get(), 0, EPOLL_CTL_MOD);
        accept_again_ms_ = HttpNowMs() + kAcceptPauseMs;
      }
      if (fd < 0) return;
      const int on = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      const bool fits = clients_.size() + num_away_ < max_connections_ || HasRoom();
      if (clients_.size() + num_away_ >=
              max_connections_ + std::min(kMaxRefused, max_connections_ / 2) &&
          !DropLingering()) {
        close(fd);
        continue;
      }
      HttpConnection& client =
          *clients_.emplace(fd, std::make_unique<HttpConnection>(fd, options_.limits))
               .first->second;
      Watch(fd, EPOLLIN, EPOLL_CTL_ADD);
      AwaitRequest(client);
      if (!fits) Refuse(client, 503, "too many connections are open: try again later");
    }
  }

  // Whether one more may be served: those that only wait for their end don't count, and one that
  // has asked for nothing makes way. One whose request is on its way isn't given up for another,
  // unless it has kept everybody waiting.
  bool HasRoom() {
    size_t num_lingering = 0;
    HttpConnection* least = nullptr;
    const auto rank = [](const HttpConnection& client) {
      return std::make_pair(client.parser.started(), client.since_ms);
    };
    for (const auto& [fd, client] : clients_) {
      if (client->state == State::kLingering) ++num_lingering;
      if (client->state != State::kReading || client->HasUnread()) continue;
      if (client->parser.started() && HttpNowMs() < client->since_ms + kSlowMs) continue;
      if (least == nullptr || rank(*client) < rank(*least)) least = client.get();
    }
    if (clients_.size() + num_away_ - num_lingering < max_connections_) return true;
    if (least == nullptr) return false;
    Drop(least->fd());
    return true;
  }

  // The longest of those whose answer is sent. False if there is none.
  bool DropLingering() {
    HttpConnection* longest = nullptr;
    for (const auto& [fd, client] : clients_) {
      if (client->state != State::kLingering) continue;
      if (longest == nullptr || client->since_ms < longest->since_ms) longest = client.get();
    }
    if (longest == nullptr) return false;
    Drop(longest->fd());
    return true;
  }

  void AwaitRequest(HttpConnection& client) {
    client.state = State::kReading;
    client.has_sent_continue = false;
    client.since_ms = HttpNowMs();
    client.deadline_ms = client.since_ms + options_.keep_alive_timeout_ms;
  }

  // Gives the parser what was received, and answers what comes of it.
  void Advance(HttpConnection& client) {
    for (int i = 0; client.state == State::kReading && !client.received.empty(); ++i) {
      if (i == kMaxInARow) {
        ready_.push_back(client.fd());
        return;
      }
      const bool had_started = client.parser.started();
      const size_t used = client.parser.Feed(client.received);
      client.received.erase(0, used);
      if (!had_started) client.since_ms = HttpNowMs();
      switch (client.parser.state()) {
        case HttpParser::State::kRefused:
          Refuse(client, client.parser.refusal_status(), client.parser.refusal());
          return;  // the connection may be gone
        case HttpParser::State::kDone:
          if (!Begin(client)) return;
          break;
        default:
          AwaitRest(client);
          return;
      }
    }
  }

  // A part of a request is there.
  void AwaitRest(HttpConnection& client) {
    if (!client.parser.started()) return;
    const bool in_body = client.parser.state() == HttpParser::State::kBody;
    client.deadline_ms =
        client.since_ms + (in_body ? options_.request_timeout_ms : options_.head_timeout_ms);
    if (!Charge(client, client.parser.body_bytes())) {
      return Refuse(client, 503, "too many long requests are under way: try again later");
    }
    if (in_body && client.parser.expects_continue() && !client.has_sent_continue) {
      client.has_sent_continue = true;
      constexpr absl::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      (void)!send(client.fd(), kContinue.data(), kContinue.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }

  // A request is complete. False if its connection isn't the thread's any more, or is gone.
  bool Begin(HttpConnection& client) {
    client.keep_alive = client.parser.keep_alive() && !stopping_ && !last_answers_;
    client.reads_chunks = client.parser.reads_chunks();
    client.request = client.parser.Take();
    client.wants_body = client.request.method != "HEAD";
    if (handler_->IsQuick(client.request)) {
      const HttpReply reply = HandleSafely(client.request);
      client.request = HttpRequest();
      (void)Charge(client, 0);
      return Reply(client, reply);
    }
    Watch(client.fd(), 0, EPOLL_CTL_DEL);
    client.state = State::kAnswering;
    const auto found = clients_.find(client.fd());
    waiting_.push_back(std::move(found->second));
    clients_.erase(found);
    ++num_away_;
    return false;
  }

  HttpReply HandleSafely(const HttpRequest& request) {
    try {
      return handler_->Handle(request);
    } catch (const std::exception& e) {
      LogError("HTTP: ", request.method, " failed: ", e.what());
      return handler_->Refuse(500, "the server has failed");
    }
  }

  // False if the connection is gone.
  bool Reply(HttpConnection& client, const HttpReply& reply) {
    client.Queue(reply);
    client.state = State::kWriting;
    client.since_ms = HttpNowMs();
    client.deadline_ms = client.since_ms + options_.write_timeout_ms;
    const int fd = client.fd();
    Flush(client);
    return clients_.contains(fd);
  }

  void Refuse(HttpConnection& client, int status, const std::string& message) {
    const HttpReply reply = handler_->Refuse(status, message);  // may be the parser's own
    client.keep_alive = false;
    client.wants_body = true;
    client.received.clear();
    client.parser = HttpParser(options_.limits);
    (void)Charge(client, 0);
    (void)Reply(client, reply);
  }

  void Flush(HttpConnection& client) {
    if (!client.SendPending()) return Drop(client.fd());
    if (client.has_pending()) return Watch(client.fd(), EPOLLOUT, EPOLL_CTL_MOD);
    Watch(client.fd(), EPOLLIN, EPOLL_CTL_MOD);
    GoOn(client);
  }

  // The answer is written: the next request, or the end.
  void GoOn(HttpConnection& client) {
    if (client.keep_alive && !stopping_) {
      AwaitRequest(client);
      return;
    }
    client.ShutDownSending();
    client.received.clear();
    client.state = State::kLingering;
    client.since_ms = HttpNowMs();
    client.deadline_ms = client.since_ms + kLingerMs;
  }

  // Counts `bytes` of the client's body against the common room. False if there is none.
  bool Charge(HttpConnection& client, size_t bytes) {
    const size_t wanted = bytes > kFreeBytes ? bytes - kFreeBytes : 0;
    num_charged_ = num_charged_ - client.charged_bytes + wanted;
    client.charged_bytes = wanted;
    return wanted == 0 || num_charged_ <= options_.max_buffered_bytes;
  }

  void Drop(int fd) {
    const auto found = clients_.find(fd);
    num_charged_ -= found->second->charged_bytes;
    clients_.erase(found);  // closing it ends the watch
  }

  void Watch(int fd, uint32_t events, int operation) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), operation, fd, &event);
  }

  // Connections whose answers other threads have given.
  void TakeBack() {
    std::vector<Client> returned;
    {
      absl::MutexLock lock(&shared_->mutex);
      returned.swap(shared_->returned);
    }
    num_running_ -= returned.size();
    for (Client& client : returned) {
      --num_away_;
      HttpConnection& entry = *client;
      clients_.emplace(entry.fd(), std::move(client));
      (void)Charge(entry, 0);
      Watch(entry.fd(), EPOLLIN, EPOLL_CTL_ADD);
      GoOn(entry);
      Advance(entry);
    }
  }

  void StartWaiting() {
    while (!waiting_.empty() && num_running_ < options_.max_running) {
      ++num_running_;
      Client client = std::move(waiting_.front());
      waiting_.pop_front();
      HttpConnection* raw = client.get();
      try {
        std::thread([this, raw, shared = shared_] {
          Client answered(raw);
          Answer(*answered);
          GiveBack(std::move(answered), *shared);
        }).detach();
        (void)client.release();
      } catch (const std::exception& e) {
        LogError("HTTP: no thread for a request: ", e.what());
        client->keep_alive = false;
        HttpReply reply = handler_->Refuse(503, "no thread for this request: try again later");
        (void)client->SendReply(reply, /*timeout_ms=*/0, stopping_);
        GiveBack(std::move(client), *shared_);
      }
    }
  }

  void Sweep() {
    const int64_t now_ms = HttpNowMs();
    if (now_ms < next_sweep_ms_) return;
    next_sweep_ms_ = now_ms + kTickMs;
    if (accept_again_ms_ > 0 && now_ms >= accept_again_ms_) {
      accept_again_ms_ = 0;
      Watch(listener_.get(), EPOLLIN, EPOLL_CTL_MOD);
    }
    std::vector<HttpConnection*> late;
    for (const auto& [fd, client] : clients_) {
      if (now_ms >= client->deadline_ms) late.push_back(client.get());
    }
    for (HttpConnection* client : late) {
      if (client->state != State::kReading || !client->parser.started()) {
        Drop(client->fd());
      } else {
        Refuse(*client, 408, "the request took too long to arrive");
      }
    }
  }

  // Nobody new; those who wait, or send, are let go. True when none is left.
  bool EndIfIdle() {
    if (listener_.get() >= 0) listener_.Reset(-1);
    std::vector<int> idle;
    for (const auto& [fd, client] : clients_) {
      const bool writes = client->state == State::kWriting;
      if (!writes || HttpNowMs() >= client->since_ms + kLastWriteMs) idle.push_back(fd);
    }
    for (const int fd : idle) Drop(fd);
    return clients_.empty() && num_away_ == 0;
  }

  // --- a thread for each request that isn't quick

  void Answer(HttpConnection& client) {
    client.request.gone = [&client] { return client.Gone(); };
    {
      HttpReply reply = HandleSafely(client.request);
      if (reply.status == kHttpClientGone) client.keep_alive = false;
      bool sent = false;
      if (last_answers_) client.keep_alive = false;
      try {
        sent = client.SendReply(reply, options_.write_timeout_ms, stopping_);
      } catch (const std::exception& e) {
        LogError("HTTP: an answer broke off: ", e.what());
      }
      client.keep_alive = client.keep_alive && sent;
    }  // what is behind a stream ends here
    client.request = HttpRequest();
  }

  // What the threads share that may outlast the server by their last step.
  struct Shared {
    absl::Mutex mutex;
    std::vector<Client> returned ABSL_GUARDED_BY(mutex);
  };
  // The server waits for every client, so that it is there until the lock is given up.
  void GiveBack(Client client, Shared& shared) {
    absl::MutexLock lock(&shared.mutex);
    shared.returned.push_back(std::move(client));
    Wake();
  }
  void Wake() {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));
  }

  HttpHandler* const handler_;
  const HttpServerOptions options_;
  const size_t max_connections_;
  std::atomic<bool> stopping_ = false, last_answers_ = false;
  int port_ = -1;
  Descriptor listener_, epoll_, wake_;
  std::thread thread_;

  // The server's thread's.
  std::unordered_map<int, Client> clients_;  // by descriptor
  std::deque<Client> waiting_;               // for a thread
  std::vector<int> ready_;                   // have received more than they had a turn for
  size_t num_away_ = 0;                      // waiting, or being answered
  size_t num_charged_ = 0;
  size_t num_running_ = 0;  // threads that answer
  int64_t accept_again_ms_ = 0, next_sweep_ms_ = 0;

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};
}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpHandler* handler,
                                                              const HttpServerOptions& options) {
  auto server = std::make_unique<HttpServerImpl>(handler, options);
  if (absl::Status status = server->Begin(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(std::move(server));
}
}  // namespace stretto::services
