#include "services/common/metrics.h"

#include <exception>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "prometheus/counter.h"
#include "prometheus/exposer.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

namespace stretto::services {
struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::unique_ptr<prometheus::Exposer> exposer;
};

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
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

absl::StatusOr<int> Metrics::Serve(const std::string& address, int port) {
  STRETTO_CHECK(impl_->exposer == nullptr);
  const std::string where = absl::StrCat(address, ":", port);
  try {
    impl_->exposer = std::make_unique<prometheus::Exposer>(where, /*num_threads=*/1);
    impl_->exposer->RegisterCollectable(impl_->registry);
    return impl_->exposer->GetListeningPorts().at(0);
  } catch (const std::exception& e) {
    return absl::UnavailableError(absl::StrCat("metrics at ", where, ": ", e.what(),
                                               "; is the port in use? (--metrics-port)"));
  }
}
}  // namespace stretto::services
