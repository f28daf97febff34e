// What a service measures, exposed to Prometheus over HTTP at /metrics. Handles (Counter, Gauge,
// Histogram) are small copyable values that live as long as the registry; updating one is a few
// atomic operations and thread-safe. The only file that includes the Prometheus package is
// metrics.cc.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stretto::services {
using Labels = std::map<std::string, std::string>;

class Counter {
 public:
  void Add(double value = 1) const;

 private:
  friend class Metrics;
  explicit Counter(void* impl) : impl_(impl) {}
  void* impl_;
};

class Gauge {
 public:
  void Set(double value) const;
  void Add(double value) const;

 private:
  friend class Metrics;
  explicit Gauge(void* impl) : impl_(impl) {}
  void* impl_;
};

class Histogram {
 public:
  void Observe(double value) const;

 private:
  friend class Metrics;
  explicit Histogram(void* impl) : impl_(impl) {}
  void* impl_;
};

// The media type of Metrics::Text().
inline constexpr char kPrometheusText[] = "text/plain; version=0.0.4; charset=utf-8";

// Names are made of [a-z0-9_], begin with "stretto_" and end with their unit (_seconds, _bytes,
// _total for counters). Asking for the same name and labels again gives the same series.
class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  Counter counter(const std::string& name, const std::string& help, const Labels& labels = {});
  Gauge gauge(const std::string& name, const std::string& help, const Labels& labels = {});
  // Buckets suit latencies: 0.5 ms to 2 minutes.
  Histogram histogram(const std::string& name, const std::string& help, const Labels& labels = {});

  // All series, and those of the process, in Prometheus's text format.
  std::string Text() const;
  // Serves /metrics at address:port (port 0: a free one); the port. UNAVAILABLE when it can't be
  // had. At most once.
  absl::StatusOr<int> Serve(const std::string& address, int port);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
}  // namespace stretto::services
