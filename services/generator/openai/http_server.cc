#include "services/generator/openai/http_server.h"

#include <httplib.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "services/common/log.h"
#include "services/generator/openai/openai_api.h"

namespace stretto::services {
namespace {
constexpr int64_t kTickMs = 100;    // how soon an idle connection notices the end
constexpr int64_t kLingerMs = 200;  // for a client to read the answer to what it still sends
constexpr int kRequestsPerConnection = 1000;

int64_t NowMs() { return Clock::Real().NowNs() / 1'000'000; }

bool WaitFor(int fd, short events, int64_t timeout_ms) {
  pollfd entry{.fd = fd, .events = events, .revents = 0};
  const int64_t bounded = std::clamp<int64_t>(timeout_ms, 0, INT32_MAX);
  return poll(&entry, 1, static_cast<int>(bounded)) > 0;
}

// A connection's bytes. Reading has a deadline for the whole request, so that a client that sends
// byte by byte can't stay; writing fails when the client takes nothing for a while.
class Connection final : public httplib::Stream {
 public:
  // `stopping` ends every wait, so that no client can hold up the end of the process.
  Connection(int fd, const HttpServerOptions& options, const std::atomic<bool>& stopping)
      : fd_(fd), options_(options), stopping_(stopping) {}

  // Whether a request begins before the time is over.
  bool WaitForRequest() {
    if (begin_ == end_ && !Wait(POLLIN, NowMs() + options_.keep_alive_timeout_ms)) return false;
    deadline_ms_ = NowMs() + options_.request_timeout_ms;
    return true;
  }
  // After what wasn't read as HTTP nobody knows where the next request would begin.
  void SetBroken() { broken_ = true; }
  bool broken() const { return broken_; }
  // The client has closed the connection, or its sending half.
  bool Gone() const {
    char byte = 0;
    const ssize_t got = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  }
  void Close() {
    shutdown(fd_, SHUT_WR);
    const int64_t end_ms = NowMs() + kLingerMs;
    char sink[4096];
    while (NowMs() < end_ms && WaitFor(fd_, POLLIN, end_ms - NowMs()) &&
           recv(fd_, sink, sizeof(sink), MSG_DONTWAIT) > 0) {
    }
    close(fd_);
  }

  bool is_readable() const override { return begin_ < end_ || Wait(POLLIN, deadline_ms_); }
  bool is_writable() const override {
    return !Gone() && Wait(POLLOUT, NowMs() + options_.write_timeout_ms);
  }
  ssize_t read(char* out, size_t size) override {
    if (begin_ == end_) {
      if (!Wait(POLLIN, deadline_ms_)) return -1;
      const ssize_t got = recv(fd_, buffer_, sizeof(buffer_), 0);
      if (got <= 0) return got;
      begin_ = 0;
      end_ = static_cast<size_t>(got);
    }
    const size_t count = std::min(size, end_ - begin_);
    std::copy_n(buffer_ + begin_, count, out);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* data, size_t size) override {
    if (!Wait(POLLOUT, NowMs() + options_.write_timeout_ms)) return -1;
    return send(fd_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  void get_remote_ip_and_port(std::string& ip, int& port) const override { ip = "", port = 0; }
  void get_local_ip_and_port(std::string& ip, int& port) const override { ip = "", port = 0; }
  socket_t socket() const override { return fd_; }

 private:
  bool Wait(short events, int64_t end_ms) const {
    while (!WaitFor(fd_, events, std::min(kTickMs, end_ms - NowMs()))) {
      if (stopping_ || NowMs() >= end_ms) return false;
    }
    return true;
  }

  const int fd_;
  const HttpServerOptions& options_;
  const std::atomic<bool>& stopping_;
  int64_t deadline_ms_ = 0;
  bool broken_ = false;
  char buffer_[8192];
  size_t begin_ = 0, end_ = 0;
};

thread_local Connection* current_connection = nullptr;  // of the thread that serves it

// A thread for each connection. Blocks the accepting thread while there are too many.
class ConnectionThreads final : public httplib::TaskQueue {
 public:
  explicit ConnectionThreads(int max_threads) : max_threads_(max_threads) {}
  void enqueue(std::function<void()> task) override {
    WaitForFewer(max_threads_);
    {
      absl::MutexLock lock(&state_->mutex);
      ++state_->num_threads;
    }
    std::thread([state = state_, task = std::move(task)] {
      task();
      absl::MutexLock lock(&state->mutex);
      --state->num_threads;
    }).detach();
  }
  void shutdown() override { WaitForFewer(1); }

 private:
  struct State {  // also the threads', whose last step may come after shutdown
    absl::Mutex mutex;
    int num_threads ABSL_GUARDED_BY(mutex) = 0;
  };
  // Only the accepting thread adds threads.
  void WaitForFewer(int limit) {
    State& state = *state_;
    absl::MutexLock lock(&state.mutex);
    const auto fewer = [&state, limit]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
      return state.num_threads < limit;
    };
    state.mutex.Await(absl::Condition(&fewer));
  }

  const int max_threads_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

class HttpServerImpl final : public HttpServer, private httplib::Server {
 public:
  HttpServerImpl(OpenAiApi* api, const HttpServerOptions& options) : api_(api), options_(options) {
    new_task_queue = [this] { return new ConnectionThreads(options_.max_connections); };
    set_payload_max_length(options_.max_body_bytes);
    set_tcp_nodelay(true);
    set_keep_alive_timeout(options_.keep_alive_timeout_ms / 1000);  // as told to the client
    set_keep_alive_max_count(kRequestsPerConnection);
    // Without the library's SO_REUSEPORT, so that a port in use is an error.
    set_socket_options([](socket_t fd) {
      const int on = 1;
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    });
    const auto handle = [this](const httplib::Request& request, httplib::Response& response) {
      Answer(request, response);
    };
    Get(".*", handle);
    Post(".*", handle);
    Put(".*", handle);
    Patch(".*", handle);
    Delete(".*", handle);
    set_exception_handler(
        [](const httplib::Request&, httplib::Response& response, const std::exception_ptr&) {
          Fill(OpenAiApi::Error(absl::InternalError("the server has failed")), response);
        });
    set_error_handler(HandlerWithResponse([](const httplib::Request&, httplib::Response& response) {
      if (!response.body.empty()) return HandlerResponse::Unhandled;
      FillLibraryError(response);
      return HandlerResponse::Handled;
    }));
  }
  ~HttpServerImpl() override { Stop(); }

  absl::Status Bind() {
    port_ = options_.port == 0 ? bind_to_any_port(options_.bind)
                               : (bind_to_port(options_.bind, options_.port) ? options_.port : -1);
    if (port_ < 0) {
      return absl::UnavailableError(absl::StrCat("HTTP at ", options_.bind, ":", options_.port,
                                                 ": cannot listen; is the port in use? "
                                                 "(--http-port)"));
    }
    thread_ = std::thread([this] { listen_after_bind(); });
    // stop() does nothing before the loop runs.
    while (!is_running()) Clock::Real().SleepNs(100'000);
    return absl::OkStatus();
  }
  int port() const override { return port_; }
  void Stop() override {
    if (!thread_.joinable()) return;
    stopping_ = true;
    stop();
    thread_.join();
  }

 private:
  bool process_and_close_socket(socket_t fd) override {
    Connection connection(fd, options_, stopping_);
    current_connection = &connection;
    bool closed = false;
    for (int left = kRequestsPerConnection; !closed && !connection.broken() && left > 0; --left) {
      if (!connection.WaitForRequest()) break;
      // Answers are small or must leave at once: they are neither compressed nor cut into ranges.
      const auto prepare = [](httplib::Request& request) {
        request.headers.erase("Accept-Encoding");
        request.ranges.clear();
      };
      if (!process_request(connection, left == 1 || stopping_, closed, prepare)) break;
    }
    connection.Close();
    current_connection = nullptr;
    return true;
  }

  void Answer(const httplib::Request& request, httplib::Response& response) {
    HttpRequest call{.method = request.method, .path = request.path, .body = request.body};
    call.gone = [connection = current_connection] { return connection->Gone(); };
    Fill(api_->Handle(call), response);
  }

  static void Fill(HttpReply reply, httplib::Response& response) {
    response.status = reply.status;
    for (const auto& [name, value] : reply.headers) response.set_header(name, value);
    if (reply.stream == nullptr) {
      response.set_content(reply.body, reply.content_type);
      return;
    }
    const std::shared_ptr<BodyStream> stream = std::move(reply.stream);
    response.set_chunked_content_provider(
        reply.content_type, [stream](size_t, httplib::DataSink& sink) {
          const std::optional<std::string> bytes = stream->Next();
          if (!bytes.has_value()) {
            sink.done();
            return true;
          }
          if (bytes->empty()) return !current_connection->Gone();
          return sink.is_writable() && sink.write(bytes->data(), bytes->size());
        });
  }

  // What the library has refused before it became a request of ours.
  static void FillLibraryError(httplib::Response& response) {
    const int status = response.status;
    absl::Status reason = absl::InvalidArgumentError("not an HTTP request that this server reads");
    if (status == 404) reason = absl::NotFoundError("there is nothing here");
    if (status == 413) reason = absl::OutOfRangeError("the body is too large");
    Fill(OpenAiApi::Error(reason), response);
    response.status = status;
    response.set_header("Connection", "close");
    current_connection->SetBroken();
  }

  OpenAiApi* const api_;
  const HttpServerOptions options_;
  std::atomic<bool> stopping_ = false;
  int port_ = -1;
  std::thread thread_;
};
}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(OpenAiApi* api,
                                                              const HttpServerOptions& options) {
  auto server = std::make_unique<HttpServerImpl>(api, options);
  if (absl::Status status = server->Bind(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(std::move(server));
}
}  // namespace stretto::services
