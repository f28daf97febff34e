#include "services/generator/latency_metrics.h"

namespace stretto::services {
namespace {
double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }
}  // namespace

LatencyMetrics::Series LatencyMetrics::Make(Metrics* metrics, const char* api) {
  const Labels labels{{"api", api}};
  return {
      .queue = metrics->histogram("stretto_generator_queue_seconds",
                                  "From a completion's request to its first computation.", labels),
      .first_token = metrics->histogram("stretto_generator_time_to_first_token_seconds",
                                        "From a completion's request to its first token.", labels),
      .inter_token =
          metrics->histogram("stretto_generator_inter_token_seconds",
                             "Between two tokens of a completion; those that came together share "
                             "the time.",
                             labels),
      .request = metrics->histogram("stretto_generator_request_seconds",
                                    "From a completion's request to its end.", labels),
      .ended = {Ends(metrics, api, engine::FinishReason::kStop),
                Ends(metrics, api, engine::FinishReason::kLength),
                Ends(metrics, api, engine::FinishReason::kAborted),
                Ends(metrics, api, engine::FinishReason::kError)}};
}

Counter LatencyMetrics::Ends(Metrics* metrics, const char* api, engine::FinishReason reason) {
  return metrics->counter("stretto_generator_completions_total",
                          "Completions that have ended, by the reason.",
                          {{"api", api}, {"finish_reason", std::string(engine::Name(reason))}});
}

LatencyMetrics::LatencyMetrics(Metrics* metrics)
    : series_{Make(metrics, "grpc"), Make(metrics, "http")} {}

void LatencyMetrics::Begun(const CompletionTimes& times, int64_t now_ns) const {
  Of(times.api).queue.Observe(Seconds(now_ns - times.submitted_ns));
}

void LatencyMetrics::Tokens(CompletionTimes* times, int64_t num_tokens, int64_t now_ns) const {
  const Series& series = Of(times->api);
  if (times->last_token_ns < 0) {
    series.first_token.Observe(Seconds(now_ns - times->submitted_ns));
  } else {
    const double each = Seconds(now_ns - times->last_token_ns) / static_cast<double>(num_tokens);
    for (int64_t i = 0; i < num_tokens; ++i) series.inter_token.Observe(each);
  }
  times->last_token_ns = now_ns;
}

void LatencyMetrics::Ended(const CompletionTimes& times, engine::FinishReason reason,
                           int64_t now_ns) const {
  Of(times.api).ended[static_cast<size_t>(reason)].Add();
  Of(times.api).request.Observe(Seconds(now_ns - times.submitted_ns));
}
}  // namespace stretto::services
