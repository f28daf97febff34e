// Log-probs, their gradient and sampling of the reference backend.
#include <algorithm>
#include <numeric>

#include "engine/device/reference/reference_memory.h"

namespace stretto::engine::reference {
namespace {
// z = logits / temperature, less its maximum; e = exp(z); their sum and its logarithm.
struct Softmax {
  Row z, e;
  float max = 0, sum = 0, log_sum = 0;

  Softmax(Row logits, float temperature) : z(std::move(logits)) {
    const float inverse = 1.0f / temperature;
    for (float& x : z) x *= inverse;
    max = *std::max_element(z.begin(), z.end());
    e.resize(z.size());
    for (size_t i = 0; i < z.size(); ++i) {
      z[i] -= max;
      e[i] = std::exp(z[i]);
    }
    sum = OrderedSum(0, z.size(), [&](int64_t i) { return e[i]; });
    log_sum = std::log(sum);
  }
  float LogProb(int64_t token) const { return z[token] - log_sum; }
  // − sum p log p = log sum − sum(e z) / sum.
  float Entropy() const {
    return log_sum - OrderedSum(0, z.size(), [&](int64_t i) { return e[i] * z[i]; }) / sum;
  }
};

// The tokens that truncation leaves, in order of ids.
std::vector<int32_t> KeptTokens(const Softmax& softmax, const SamplingRow& row) {
  std::vector<int32_t> ids(softmax.e.size());
  std::iota(ids.begin(), ids.end(), 0);
  const bool top_k = row.top_k > 0 && row.top_k < static_cast<int32_t>(ids.size());
  if (!top_k && row.top_p >= 1.0f && row.min_p <= 0.0f) return ids;
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return softmax.z[a] > softmax.z[b]; });
  if (top_k) ids.resize(row.top_k);
  if (row.top_p < 1.0f) {  // the fewest most probable tokens that reach top_p
    float total = 0, cumulative = 0;
    for (int32_t id : ids) total += softmax.e[id];
    size_t count = 0;
    while (count < ids.size() && (count == 0 || cumulative < row.top_p * total)) {
      cumulative += softmax.e[ids[count++]];
    }
    ids.resize(count);
  }
  if (row.min_p > 0.0f) {  // at least min_p of the most probable token
    std::erase_if(ids, [&](int32_t id) { return softmax.e[id] < row.min_p * softmax.e[ids[0]]; });
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

Sampled SampleRow(const Row& logits, const SamplingRow& row) {
  Sampled out;
  if (row.temperature == 0.0f) {
    out.token = std::max_element(logits.begin(), logits.end()) - logits.begin();
    out.logprob = Softmax(logits, 1.0f).LogProb(out.token);
    return out;
  }
  const Softmax softmax(logits, row.temperature);
  const auto kept = KeptTokens(softmax, row);
  float total = 0;
  for (int32_t id : kept) total += softmax.e[id];
  const float threshold = row.uniform * total;
  float cumulative = 0;
  out.token = kept.back();
  for (int32_t id : kept) {
    cumulative += softmax.e[id];
    if (cumulative > threshold) {
      out.token = id;
      break;
    }
  }
  out.logprob = softmax.LogProb(out.token);
  out.sampling_logprob =
      kept.size() == logits.size() ? out.logprob : softmax.z[out.token] - std::log(total);
  return out;
}
}  // namespace

void LogProbsForward(const Tensor& logprobs_T, const Tensor& entropy_T, const Tensor& logits_TV,
                     const Tensor& targets_T, float temperature, const Tensor& stats_T3) {
  const auto targets = LoadInts(targets_T);
  STRETTO_CHECK(static_cast<int64_t>(targets.size()) == logits_TV.rows);
  STRETTO_CHECK(logprobs_T.size() == logits_TV.rows);
  for (int64_t t = 0; t < logits_TV.rows; ++t) {
    const Softmax softmax(LoadRow(logits_TV, t), temperature);
    Address<float>(logprobs_T)[t] = softmax.LogProb(targets[t]);
    const float entropy = entropy_T ? softmax.Entropy() : 0.0f;
    if (entropy_T) Address<float>(entropy_T)[t] = entropy;
    if (stats_T3) StoreRow(stats_T3, t, {softmax.max, softmax.log_sum, entropy});
  }
}

// With p = softmax(z), z = logits / temperature and H its entropy:
//   d logprob / d z_i = [i = target] − p_i;   d H / d z_i = −p_i (log p_i + H).
// Finds the statistics again, whether it is given them or not.
void LogProbsGradient(const Device::LogitsGradient& args) {
  const auto targets = LoadInts(args.targets_T);
  const Row d_logprobs = LoadAll(args.d_logprobs_T);
  for (int64_t t = 0; t < args.logits_TV.rows; ++t) {
    const Softmax softmax(LoadRow(args.logits_TV, t), args.temperature);
    const float d_entropy = args.d_entropy_T ? Address<float>(args.d_entropy_T)[t] : 0.0f;
    const float entropy = args.d_entropy_T ? softmax.Entropy() : 0.0f;
    Row d_logits(args.logits_TV.cols);
    for (int64_t i = 0; i < args.logits_TV.cols; ++i) {
      const float p = softmax.e[i] / softmax.sum;
      const float hit = i == targets[t] ? 1.0f : 0.0f;
      float d_z = d_logprobs[t] * (hit - p);
      if (d_entropy != 0.0f) d_z -= d_entropy * p * (softmax.LogProb(i) + entropy);
      d_logits[i] = d_z / args.temperature;
    }
    StoreRow(args.d_logits_TV, t, d_logits);
  }
}

void SampleRows(const Tensor& logits_BV, absl::Span<const SamplingRow> rows,
                absl::Span<Sampled> sampled) {
  STRETTO_CHECK(static_cast<int64_t>(rows.size()) == logits_BV.rows);
  STRETTO_CHECK(rows.size() == sampled.size());
  for (size_t b = 0; b < rows.size(); ++b) sampled[b] = SampleRow(LoadRow(logits_BV, b), rows[b]);
}
}  // namespace stretto::engine::reference
