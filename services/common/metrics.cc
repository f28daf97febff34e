#include "services/common/metrics.h"

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "services/common/http_server.h"
#include "services/common/process_metrics.h"

namespace stretto::services {
struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::unique_ptr<HttpHandler> handler;
  std::unique_ptr<HttpServer> server;  // ends before what it reads
};

namespace {
// Serves nothing but the metrics.
class MetricsPage final : public HttpHandler {
 public:
  explicit MetricsPage(const Metrics* metrics) : metrics_(metrics) {}
  HttpReply Handle(const HttpRequest& request) override {
    if (request.path != "/metrics") return Refuse(404, "there is only /metrics here");
    if (request.method != "GET" && request.method != "HEAD") {
      HttpReply reply = Refuse(405, "only GET and HEAD are possible here");
      reply.headers.emplace_back("Allow", "GET, HEAD");
      return reply;
    }
    HttpReply reply;
    reply.content_type = kPrometheusText;
    reply.body = metrics_->Text();
    return reply;
  }
  HttpReply Refuse(int status, const std::string& message) override {
    HttpReply reply;
    reply.status = status;
    reply.content_type = "text/plain";
    reply.body = absl::StrCat(message, "\n");
    return reply;
  }
  bool IsQuick(const HttpRequest&) const override { return true; }

 private:
  const Metrics* const metrics_;
};
}  // namespace

void Counter::Add(double value) const {
  static_cast<prometheus::Counter*>(impl_)->Increment(value);
}
void Gauge::Set(double value) const { static_cast<prometheus::Gauge*>(impl_)->Set(value); }
void Gauge::Add(double value) const { static_cast<prometheus::Gauge*>(impl_)->Increment(value); }
void Histogram::Observe(double value) const {
  static_cast<prometheus::Histogram*>(impl_)->Observe(value);
}

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {}
Metrics::~Metrics() = default;

Counter Metrics::counter(const std::string& name, const std::string& help, const Labels& labels) {
  return Counter(
      &prometheus::BuildCounter().Name(name).Help(help).Register(*impl_->registry).Add(labels));
}

Gauge Metrics::gauge(const std::string& name, const std::string& help, const Labels& labels) {
  return Gauge(
      &prometheus::BuildGauge().Name(name).Help(help).Register(*impl_->registry).Add(labels));
}

Histogram Metrics::histogram(const std::string& name, const std::string& help,
                             const Labels& labels) {
  static const prometheus::Histogram::BucketBoundaries kSeconds = {
      0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120};
  return Histogram(&prometheus::BuildHistogram()
                        .Name(name)
                        .Help(help)
                        .Register(*impl_->registry)
                        .Add(labels, kSeconds));
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect()) + ProcessMetricsText();
}

absl::StatusOr<int> Metrics::Serve(const std::string& address, int port) {
  STRETTO_CHECK(impl_->server == nullptr);
  impl_->handler = std::make_unique<MetricsPage>(this);
  HttpServerOptions options;
  options.bind = address;
  options.port = port;
  options.max_connections = 64;
  auto server = HttpServer::Start(impl_->handler.get(), options);
  if (!server.ok()) return Annotate(server.status(), "--metrics-port");
  impl_->server = *std::move(server);
  return impl_->server->port();
}
}  // namespace stretto::services
