#include "engine/device/cpu/vocabulary.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "engine/device/cpu/memory.h"

namespace stretto::engine::cpu {
namespace {
float LogProb(const SoftmaxStats& stats, float logit, float inv_temperature) {
  return logit * inv_temperature - stats.max - stats.log_sum;
}

int32_t Target(const Tensor& targets_T, int64_t row, int64_t vocabulary) {
  const int32_t target = Ints(targets_T)[row];
  STRETTO_CHECK(target >= 0 && target < vocabulary);
  return target;
}

// The smallest id whose logit is `max`; 0 when none is (NaN).
int32_t ArgMax(const float* logits, int64_t n, float max) {
  for (int64_t j = 0; j < n; ++j) {
    if (logits[j] == max) return static_cast<int32_t>(j);
  }
  return 0;
}

// exp(z − max) of a whole row, with sums of blocks of kSumBlock.
struct Exponentials {
  const float* e;
  const float* block_sums;
  int64_t num_blocks;
  double total = 0;
};

Exponentials ComputeExponentials(const Kernels& kernels, const float* logits, int64_t n,
                                 float inv_temperature, float max) {
  Exponentials x;
  x.num_blocks = (n + kSumBlock - 1) / kSumBlock;
  float* e = FloatScratch(ScratchUse::kScores, static_cast<size_t>(n + x.num_blocks));
  kernels.softmax->exponentials(e, e + n, logits, n, inv_temperature, max);
  x.e = e;
  x.block_sums = e + n;
  for (int64_t b = 0; b < x.num_blocks; ++b) x.total += x.block_sums[b];
  return x;
}

int32_t SampleUntruncated(const Exponentials& x, int64_t n, float uniform) {
  const double threshold = static_cast<double>(uniform) * x.total;
  double cumulative = 0;
  int64_t block = 0;
  while (block + 1 < x.num_blocks && cumulative + x.block_sums[block] <= threshold) {
    cumulative += x.block_sums[block++];
  }
  const int64_t end = std::min(n, (block + 1) * kSumBlock);
  int64_t last = 0;  // with a probability above 0, in case rounding leaves the threshold unreached
  for (int64_t j = block * kSumBlock; j < end; ++j) {
    if (x.e[j] > 0) last = j;
    cumulative += x.e[j];
    if (cumulative > threshold) return static_cast<int32_t>(j);
  }
  return static_cast<int32_t>(last);
}

// The ids with e >= least, in rising order.
std::vector<int32_t> AtLeast(const Exponentials& x, int64_t n, float least) {
  std::vector<int32_t> ids(static_cast<size_t>(n) + 1);
  size_t count = 0;
  for (int64_t j = 0; j < n; ++j) {
    ids[count] = static_cast<int32_t>(j);
    count += x.e[j] >= least ? 1 : 0;
  }
  ids.resize(count);
  return ids;
}

// Walks candidates from the most probable on, sorting no more of them than are looked at.
class FallingOrder {
 public:
  FallingOrder(std::vector<int32_t>& ids, const float* logits) : ids_(ids), logits_(logits) {}
  int32_t operator[](size_t i) {
    if (i >= sorted_) Extend(i);
    return ids_[i];
  }

 private:
  void Extend(size_t i) {
    const auto before = [this](int32_t a, int32_t b) {
      return logits_[a] > logits_[b] || (logits_[a] == logits_[b] && a < b);
    };
    const size_t end = std::min(ids_.size(), std::max<size_t>(64, 4 * i));
    const auto first = ids_.begin() + static_cast<int64_t>(sorted_);
    const auto last = ids_.begin() + static_cast<int64_t>(end);
    if (end < ids_.size()) std::nth_element(first, last, ids_.end(), before);
    std::sort(first, last, before);
    sorted_ = end;
  }
  std::vector<int32_t>& ids_;
  const float* logits_;
  size_t sorted_ = 0;
};

// Cuts candidates to those that top-k and top-p keep, the most probable first. False when more
// candidates are needed; `complete` says that there are none.
bool Cut(const SamplingRow& row, const Exponentials& x, const float* logits,
         std::vector<int32_t>& ids, bool complete) {
  FallingOrder order(ids, logits);
  double total = x.total;
  size_t most = ids.size();
  if (row.top_k > 0) {
    if (ids.size() < static_cast<size_t>(row.top_k) && !complete) return false;
    most = std::min(most, static_cast<size_t>(row.top_k));
    total = 0;
    for (size_t i = 0; i < most; ++i) total += x.e[order[i]];
  }
  if (row.top_p < 1.0f) {
    double cumulative = 0;
    for (size_t i = 0; i < most; ++i) {
      cumulative += x.e[order[i]];
      if (cumulative < static_cast<double>(row.top_p) * total) continue;
      ids.resize(i + 1);
      return true;
    }
    if (!complete && row.top_k == 0) return false;
  }
  ids.resize(most);
  return true;
}

// The ids that the truncations of `row` keep, in rising order. Candidates are tokens above a
// probability that falls until enough are found; the result doesn't depend on where it stops.
std::vector<int32_t> Keep(const SamplingRow& row, const Exponentials& x, const float* logits,
                          int64_t n) {
  if (row.top_k <= 0 && row.top_p >= 1.0f) return AtLeast(x, n, row.min_p);
  std::vector<int32_t> ids;
  for (float floor : {0x1p-7f, 0x1p-14f, 0x1p-28f, 0.0f}) {
    ids = AtLeast(x, n, floor);
    if (Cut(row, x, logits, ids, floor == 0.0f)) break;
  }
  std::erase_if(ids, [&](int32_t id) { return x.e[id] < row.min_p; });
  std::sort(ids.begin(), ids.end());
  return ids;
}
}  // namespace

void ComputeLogProbs(const Kernels& kernels, ThreadPool& pool, const LogProbsArgs& args) {
  const float inv = 1.0f / args.temperature;
  const int64_t n = args.logits_TV.cols;
  float* logprobs = MutableF32Row(args.logprobs_T, 0);
  pool.ParallelFor(args.logits_TV.rows, [&](int64_t t) {
    const float* logits = F32Row(args.logits_TV, t);
    const SoftmaxStats stats =
        kernels.softmax->stats(logits, n, inv, static_cast<bool>(args.entropy_T));
    logprobs[t] = LogProb(stats, logits[Target(args.targets_T, t, n)], inv);
    if (args.entropy_T) MutableF32Row(args.entropy_T, 0)[t] = stats.entropy;
    if (!args.stats_T3) return;
    float* kept = MutableF32Row(args.stats_T3, t);
    kept[0] = stats.max;
    kept[1] = stats.log_sum;
    kept[2] = stats.entropy;
  });
}

void ComputeLogProbsBackward(const Kernels& kernels, ThreadPool& pool,
                             const Device::LogitsGradient& args) {
  const float inv = 1.0f / args.temperature;
  const int64_t n = args.logits_TV.cols;
  pool.ParallelFor(args.logits_TV.rows, [&](int64_t t) {
    const float* logits = F32Row(args.logits_TV, t);
    const float d_entropy = args.d_entropy_T ? F32Row(args.d_entropy_T, 0)[t] : 0.0f;
    SoftmaxStats stats;
    if (args.stats_T3) {
      const float* kept = F32Row(args.stats_T3, t);
      stats = {kept[0], kept[1], kept[2]};
    } else {
      stats = kernels.softmax->stats(logits, n, inv, d_entropy != 0.0f);
    }
    kernels.softmax->log_probs_backward(MutableRowOf(args.d_logits_TV, t), logits, n, inv, stats,
                                        Target(args.targets_T, t, n),
                                        F32Row(args.d_logprobs_T, 0)[t], d_entropy);
  });
}

Sampled SampleRow(const Kernels& kernels, const float* logits, int64_t n, const SamplingRow& row) {
  const bool greedy = row.temperature == 0.0f;
  const float inv = greedy ? 1.0f : 1.0f / row.temperature;
  const SoftmaxStats stats = kernels.softmax->stats(logits, n, inv, false);
  Sampled sampled;
  if (greedy) {
    sampled.token = ArgMax(logits, n, stats.max);
    sampled.logprob = LogProb(stats, logits[sampled.token], inv);
    return sampled;
  }
  const Exponentials x = ComputeExponentials(kernels, logits, n, inv, stats.max);
  const bool truncated = (row.top_k > 0 && row.top_k < n) || row.top_p < 1.0f || row.min_p > 0.0f;
  if (!truncated) {
    sampled.token = SampleUntruncated(x, n, row.uniform);
    sampled.logprob = LogProb(stats, logits[sampled.token], inv);
    sampled.sampling_logprob = sampled.logprob;
    return sampled;
  }
  const std::vector<int32_t> ids = Keep(row, x, logits, n);
  if (ids.empty()) {  // only NaN logits leave none
    sampled.token = 0;
    sampled.logprob = sampled.sampling_logprob = LogProb(stats, logits[sampled.token], inv);
    return sampled;
  }
  double total = 0;
  for (int32_t id : ids) total += x.e[id];
  const double threshold = static_cast<double>(row.uniform) * total;
  double cumulative = 0;
  sampled.token = ids.back();
  for (int32_t id : ids) {
    cumulative += x.e[id];
    if (cumulative > threshold) {
      sampled.token = id;
      break;
    }
  }
  sampled.logprob = LogProb(stats, logits[sampled.token], inv);
  sampled.sampling_logprob =
      logits[sampled.token] * inv - stats.max - kernels.softmax->log(static_cast<float>(total));
  return sampled;
}
}  // namespace stretto::engine::cpu
