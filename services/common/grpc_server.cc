#include "services/common/grpc_server.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/status.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/support/server_interceptor.h"
#include "services/common/listen.h"

namespace stretto::services {
namespace {
// Nothing of ours is this large; a group of many long completions may pass gRPC's own 4 MiB.
constexpr int kMaxMessageBytes = 64 << 20;
constexpr const char* kStatusNames[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT", "DEADLINE",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "EXHAUSTED",        "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",         "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

std::string StatusName(int code) {
  return code >= 0 && code <= 16 ? kStatusNames[code] : absl::StrCat("CODE_", code);
}

// The series of one method, looked up once a call.
class RpcMetrics {
 public:
  explicit RpcMetrics(Metrics* metrics) : metrics_(metrics) {}

  void Began(const std::string& method) {
    ++num_in_flight_;
    InFlight(method).Add(1);
  }
  void Ended(const std::string& method, int code, double seconds) {
    InFlight(method).Add(-1);
    last_end_ns_ = Clock::Real().NowNs();
    --num_in_flight_;
    metrics_
        ->counter("stretto_rpcs_total", "Calls that ended, by method and status code.",
                  {{"method", method}, {"code", StatusName(code)}})
        .Add();
    metrics_->histogram("stretto_rpc_seconds", "Duration of calls.", {{"method", method}})
        .Observe(seconds);
  }
  // Waits for running calls, at most until `deadline_ns`, and then for their clients to have read
  // the answers: a connection that closes with bytes unread on one side loses those of the other.
  void AwaitAnswersRead(int64_t deadline_ns) const {
    Clock& clock = Clock::Real();
    while (num_in_flight_ > 0 && clock.NowNs() < deadline_ns) clock.SleepNs(kPollNs);
    const int64_t until_ns = last_end_ns_ + kReadNs;
    if (until_ns > clock.NowNs()) clock.SleepNs(until_ns - clock.NowNs());
  }

 private:
  static constexpr int64_t kPollNs = 2'000'000, kReadNs = 250'000'000;
  Gauge InFlight(const std::string& method) {
    return metrics_->gauge("stretto_rpcs_in_flight", "Calls under way.", {{"method", method}});
  }
  Metrics* metrics_;
  std::atomic<int64_t> num_in_flight_{0}, last_end_ns_{-kReadNs};
};

class CountingInterceptor final : public grpc::experimental::Interceptor {
 public:
  CountingInterceptor(RpcMetrics* metrics, const char* method)
      : metrics_(metrics),
        method_(absl::StripPrefix(method, "/")),
        start_ns_(Clock::Real().NowNs()) {
    metrics_->Began(method_);
  }
  ~CountingInterceptor() override {
    metrics_->Ended(method_, code_, static_cast<double>(Clock::Real().NowNs() - start_ns_) * 1e-9);
  }
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      code_ = methods->GetSendStatus().error_code();
    }
    methods->Proceed();
  }

 private:
  RpcMetrics* metrics_;
  std::string method_;
  int64_t start_ns_;
  int code_ = grpc::StatusCode::CANCELLED;  // of a call that never came to send its status
};

class CountingFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit CountingFactory(RpcMetrics* metrics) : metrics_(metrics) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new CountingInterceptor(metrics_, info->method());
  }

 private:
  RpcMetrics* metrics_;
};
}  // namespace

struct GrpcServer::Impl {
  std::unique_ptr<RpcMetrics> rpc_metrics;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrpcServer::~GrpcServer() { Shutdown(0); }

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options) {
  STRETTO_CHECK(options.metrics != nullptr);
  auto impl = std::make_unique<Impl>();
  impl->rpc_metrics = std::make_unique<RpcMetrics>(options.metrics);

  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  const std::string address = absl::StrCat(options.bind, ":", options.port);
  // Without this two processes would share a port and each get half of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &impl->port);
  for (grpc::Service* service : options.services) builder.RegisterService(service);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<CountingFactory>(impl->rpc_metrics.get()));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));

  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr || impl->port == 0) {
    // gRPC tells the log alone why. The system may tell it again.
    const absl::StatusOr<int> listener = ListenAt(options.bind, options.port);
    if (!listener.ok()) return Annotate(listener.status(), "--port");
    close(*listener);
    return absl::UnavailableError(
        absl::StrCat("cannot listen at ", address, " (choose another --port or --bind)"));
  }
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

int GrpcServer::port() const { return impl_->port; }

void GrpcServer::SetServing(bool serving) {
  if (auto* health = impl_->server->GetHealthCheckService()) health->SetServingStatus(serving);
}

void GrpcServer::Shutdown(int64_t grace_ms) {
  const int64_t deadline_ns = Clock::Real().NowNs() + grace_ms * 1'000'000;
  if (grace_ms > 0) impl_->rpc_metrics->AwaitAnswersRead(deadline_ns);
  const int64_t left_ns = std::max<int64_t>(deadline_ns - Clock::Real().NowNs(), 0);
  impl_->server->Shutdown(std::chrono::system_clock::now() + std::chrono::nanoseconds(left_ns));
  impl_->server->Wait();
}
}  // namespace stretto::services
