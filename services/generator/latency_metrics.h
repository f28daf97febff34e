// How long completions take, as Prometheus histograms, and why they end, for rollouts (api="grpc")
// and for people and harnesses (api="http") apart. One thread's.
//
//   submitted ──queue──► first computed ──prefill──► first token ──► … ──► last token
//   └──────────── time_to_first_token ─────────────────┘ └ inter_token ┘
//   └──────────────────────────── request ─────────────────────────────────────────┘
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/inference/request.h"
#include "services/common/metrics.h"

namespace stretto::services {
enum class Api : uint8_t { kGrpc, kHttp };

// Of one completion.
struct CompletionTimes {
  Api api = Api::kGrpc;
  int64_t submitted_ns = 0;
  int64_t last_token_ns = -1;  // -1: there is none yet
};

class LatencyMetrics {
 public:
  // `metrics` outlives this.
  explicit LatencyMetrics(Metrics* metrics);
  // Computing has begun; only for those that hadn't.
  void Begun(const CompletionTimes& times, int64_t now_ns) const;
  // `num_tokens` (at least 1) came together: each has its share of the time since the last ones.
  void Tokens(CompletionTimes* times, int64_t num_tokens, int64_t now_ns) const;
  void Ended(const CompletionTimes& times, engine::FinishReason reason, int64_t now_ns) const;

 private:
  struct Series {
    Histogram queue, first_token, inter_token, request;
    std::array<Counter, 4> ended;  // by engine::FinishReason
  };
  static Counter Ends(Metrics* metrics, const char* api, engine::FinishReason reason);
  static Series Make(Metrics* metrics, const char* api);
  const Series& Of(Api api) const { return series_[static_cast<size_t>(api)]; }
  std::array<Series, 2> series_;
};
}  // namespace stretto::services
