// Products and the vocabulary's operations against double-precision oracles, on every backend and
// element type.
#include <algorithm>
#include <numeric>

#include "engine/device/conformance_support.h"

namespace stretto::engine::conformance {
namespace {
// a [M, K] · bᵀ [N, K] (+ start) with the sum of absolute products as magnitude.
Want ProductOracle(const Host& a, const Host& b, const Host* start) {
  Want want(a.rows, b.rows);
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < b.rows; ++n) {
      double sum = start != nullptr ? (*start)(m, n) : 0.0, size = std::abs(sum);
      for (int64_t k = 0; k < a.cols; ++k) {
        const double product = static_cast<double>(a(m, k)) * b(n, k);
        sum += product;
        size += std::abs(product);
      }
      want.Set(m, n, sum, size);
    }
  }
  return want;
}
Host Transposed(const Host& h) {
  Host t(h.cols, h.rows);
  for (int64_t r = 0; r < h.rows; ++r) {
    for (int64_t c = 0; c < h.cols; ++c) t(c, r) = h(r, c);
  }
  return t;
}

struct Shape {
  int64_t m, n, k;
};

TEST_CASE("linear layers and their gradients") {
  STRETTO_CONFORMANCE_CASE(c);
  const Shape s = GENERATE(Shape{1, 1, 1}, Shape{1, 64, 40}, Shape{3, 37, 19}, Shape{7, 96, 33},
                           Shape{20, 50, 700}, Shape{33, 130, 24}, Shape{130, 35, 48});
  INFO("m " << s.m << ", n " << s.n << ", k " << s.k);
  const double error = 1e-6 * std::sqrt(static_cast<double>(s.k));
  const Host x = Random(rng, s.m, s.k, c.dtype), w = Random(rng, s.n, s.k, c.dtype);
  const Host bias = Random(rng, 1, s.n, c.dtype);
  Tensor tx = lab.Put(x, c.dtype, 3), tw = lab.Put(w, c.dtype, 1);
  const int64_t cut = s.n / 3;
  std::vector<Tensor> parts = {tw.Rows(0, cut), tw.Rows(cut, s.n - cut)};
  if (cut == 0) parts = {tw};
  auto packed = lab->Pack(lab.stream(), parts);
  REQUIRE_OK(packed);
  REQUIRE((*packed)->n() == s.n);
  REQUIRE((*packed)->k() == s.k);
  Tensor y = lab.New(s.m, s.n, DType::kF32, 2), y_narrow = lab.New(s.m, s.n, c.dtype);
  lab->Linear(lab.stream(), y, tx, **packed, Tensor{});
  RequireClose(lab.Get(y), ProductOracle(x, w, nullptr), DType::kF32, error, "linear");
  Host bias_rows(s.m, s.n);
  for (int64_t r = 0; r < s.m; ++r) {
    for (int64_t n = 0; n < s.n; ++n) bias_rows(r, n) = bias(0, n);
  }
  lab->Linear(lab.stream(), y_narrow, tx, **packed, lab.Put(bias, c.dtype));
  RequireClose(lab.Get(y_narrow), ProductOracle(x, w, &bias_rows), c.dtype, error, "with bias");

  const Host w2 = Random(rng, s.n, s.k, c.dtype);
  lab->Repack(lab.stream(), **packed, {lab.Put(w2, c.dtype)});
  lab->Linear(lab.stream(), y, tx, **packed, Tensor{});
  RequireClose(lab.Get(y), ProductOracle(x, w2, nullptr), DType::kF32, error, "repacked");

  const Host d_y = Random(rng, s.m, s.n), start_x = Random(rng, s.m, s.k);
  const Host start_w = Random(rng, s.n, s.k), start_b = Random(rng, 1, s.n);
  const double error_n = 1e-6 * std::sqrt(static_cast<double>(s.n));
  const double error_m = 1e-6 * std::sqrt(static_cast<double>(s.m));
  Tensor t_d_y = lab.Put(d_y, DType::kF32, 5), d_x = lab.New(s.m, s.k, DType::kF32, 1);
  lab->LinearBackwardInput(lab.stream(), d_x, t_d_y, tw, false);
  RequireClose(lab.Get(d_x), ProductOracle(d_y, Transposed(w), nullptr), DType::kF32, error_n,
               "d_x");
  lab.Set(d_x, start_x);
  lab->LinearBackwardInput(lab.stream(), d_x, t_d_y, tw, true);
  RequireClose(lab.Get(d_x), ProductOracle(d_y, Transposed(w), &start_x), DType::kF32, error_n,
               "d_x accumulated");
  Tensor d_w = lab.Put(start_w, DType::kF32, 2), d_b = lab.Put(start_b, DType::kF32);
  lab->LinearBackwardWeight(lab.stream(), d_w, t_d_y, tx);
  RequireClose(lab.Get(d_w), ProductOracle(Transposed(d_y), Transposed(x), &start_w), DType::kF32,
               error_m, "d_w");
  lab->BiasBackward(lab.stream(), d_b, t_d_y);
  RequireClose(lab.Get(d_b), ProductOracle(Host(1, s.m, 1.0f), Transposed(d_y), &start_b),
               DType::kF32, error_m, "d_b");
}

// A chain of fused multiply-adds, or of products and sums, is what device.h promises: to the bit.
TEST_CASE("products are the stated chains") {
  STRETTO_CONFORMANCE_CASE(c);
  // The larger weight is packed past the caches.
  const auto [num_out, num_in] = GENERATE(table<int64_t, int64_t>({{21, 77}, {539, 550}}));
  const Host x = Random(rng, 9, num_in, c.dtype), w = Random(rng, num_out, num_in, c.dtype);
  auto packed = lab->Pack(lab.stream(), {lab.Put(w, c.dtype)});
  REQUIRE_OK(packed);
  Tensor y = lab.New(9, num_out, DType::kF32);
  lab->Linear(lab.stream(), y, lab.Put(x, c.dtype), **packed, Tensor{});
  const bool fused = lab->Profile(c.dtype).instruction_set == "fma";
  Host want(9, num_out);
  for (int64_t m = 0; m < 9; ++m) {
    for (int64_t n = 0; n < num_out; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < num_in; ++k) {
        const float product = x(m, k) * w(n, k);
        sum = fused ? std::fma(x(m, k), w(n, k), sum) : sum + product;
      }
      want(m, n) = sum;
    }
  }
  RequireSameBits(lab.Get(y), want, "chain");
}

struct LogProbOracle {
  double logprob, entropy;
};
LogProbOracle LogProbsOf(const double* z_in, int64_t n, int64_t target, double temperature) {
  double max = -1e300, sum = 0, weighted = 0;
  for (int64_t j = 0; j < n; ++j) max = std::max(max, z_in[j] / temperature);
  for (int64_t j = 0; j < n; ++j) {
    const double z = z_in[j] / temperature - max;
    sum += std::exp(z);
    weighted += std::exp(z) * z;
  }
  return {z_in[target] / temperature - max - std::log(sum), std::log(sum) - weighted / sum};
}

TEST_CASE("log-probs, entropy and their gradients") {
  const Backend backend = GENERATE(from_range(Backends()));
  const int64_t n = GENERATE(1, 7, 16, 65, 1000);
  const float temperature = GENERATE(1.0f, 0.7f);
  INFO(backend.ToString() << ", n " << n << ", seed " << testing::Seed());
  Lab lab(backend);
  PhiloxStream rng(testing::Seed());
  const int64_t rows = 3;
  const Host logits = Random(rng, rows, n, DType::kF32, 4.0);
  std::vector<int32_t> targets;
  for (int64_t t = 0; t < rows; ++t) targets.push_back(static_cast<int32_t>(rng.Below(n)));
  Tensor t_logits = lab.Put(logits, DType::kF32, 3), t_targets = lab.Ints(targets);
  Tensor lp = lab.New(1, rows, DType::kF32), h = lab.New(1, rows, DType::kF32);
  lab->LogProbs(lab.stream(), lp, h, t_logits, t_targets, temperature);
  const DVec z = Doubles(logits);
  Want want_lp(1, rows), want_h(1, rows);
  for (int64_t t = 0; t < rows; ++t) {
    const LogProbOracle o = LogProbsOf(&z[t * n], n, targets[t], temperature);
    want_lp.Set(0, t, o.logprob, 20.0);
    want_h.Set(0, t, o.entropy, 8.0);
  }
  RequireClose(lab.Get(lp), want_lp, DType::kF32, 4e-7, "log-prob");
  RequireClose(lab.Get(h), want_h, DType::kF32, 1e-6, "entropy");
  Tensor alone = lab.New(1, rows, DType::kF32);
  lab->LogProbs(lab.stream(), alone, Tensor{}, t_logits, t_targets, temperature);
  RequireSameBits(lab.Get(alone), lab.Get(lp), "log-probs with and without entropy");

  const Host d_lp = Random(rng, 1, rows), d_h = Random(rng, 1, rows);
  for (bool entropy : {true, false}) {
    const auto loss = [&](const DVec& x) {
      double sum = 0;
      for (int64_t t = 0; t < rows; ++t) {
        const LogProbOracle o = LogProbsOf(&x[t * n], n, targets[t], temperature);
        sum += o.logprob * d_lp(0, t) + (entropy ? o.entropy * d_h(0, t) : 0.0);
      }
      return sum;
    };
    Want want = Gradient(rows, n, z, loss, 1.0);
    lab.Set(t_logits, logits);
    Tensor stats = lab.New(rows, 3, DType::kF32);
    lab->LogProbs(lab.stream(), lp, entropy ? h : Tensor{}, t_logits, t_targets, temperature,
                  stats);
    const Device::LogitsGradient gradient{t_logits,
                                          t_logits,
                                          lab.Put(d_lp, DType::kF32),
                                          entropy ? lab.Put(d_h, DType::kF32) : Tensor{},
                                          t_targets,
                                          temperature,
                                          Tensor{}};
    lab->LogProbsBackward(lab.stream(), gradient);
    const Host found = lab.Get(t_logits);
    RequireClose(found, want, DType::kF32, 4e-6, "gradient of logits");
    Device::LogitsGradient rounded = gradient;
    rounded.stats_T3 = stats;
    rounded.d_logits_TV.dtype = DType::kBF16;
    rounded.d_logits_TV.row_stride *= 2;
    Tensor narrow = lab.New(rows, n, DType::kBF16);
    lab->Copy(lab.stream(), narrow, t_logits);
    lab.Set(t_logits, logits);
    lab->LogProbsBackward(lab.stream(), rounded);
    RequireSameBits(lab.Get(rounded.d_logits_TV), lab.Get(narrow),
                    "gradient of logits in bf16, with what LogProbs found");
  }
}

// Kept tokens in order of id with their probabilities, by the rules of SamplingRow.
struct Kept {
  std::vector<int64_t> ids;
  DVec p;
};
Kept KeptOracle(const Host& logits, int64_t row, const SamplingRow& r) {
  const int64_t n = logits.cols;
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return logits(row, a) > logits(row, b); });
  if (r.top_k > 0 && r.top_k < n) order.resize(static_cast<size_t>(r.top_k));
  DVec e;
  double total = 0;
  for (int64_t id : order) {
    const double z = (static_cast<double>(logits(row, id)) - logits(row, order[0])) / r.temperature;
    e.push_back(std::exp(z));
    total += e.back();
  }
  size_t keep = order.size();
  double cumulative = 0;
  for (size_t i = 0; i < order.size() && r.top_p < 1.0f; ++i) {
    cumulative += e[i];
    if (cumulative >= r.top_p * total) {
      keep = i + 1;
      break;
    }
  }
  while (keep > 1 && e[keep - 1] < r.min_p) --keep;
  order.resize(keep);
  std::vector<std::pair<int64_t, double>> pairs;
  double kept_total = 0;
  for (size_t i = 0; i < keep; ++i) {
    pairs.push_back({order[i], e[i]});
    kept_total += e[i];
  }
  std::sort(pairs.begin(), pairs.end());
  Kept kept;
  for (const auto& [id, x] : pairs) {
    kept.ids.push_back(id);
    kept.p.push_back(x / kept_total);
  }
  return kept;
}

TEST_CASE("sampling follows the inverse of the cumulative distribution") {
  const Backend backend = GENERATE(from_range(Backends()));
  const int64_t n = GENERATE(5, 300, 2500);
  INFO(backend.ToString() << ", n " << n << ", seed " << testing::Seed());
  Lab lab(backend);
  PhiloxStream rng(testing::Seed());
  const int64_t rows = 200;
  Host logits = Random(rng, rows, n, DType::kF32, 2.0);
  for (int64_t i = 0; i < rows; ++i) logits(i, n - 1) = logits(i, 0);  // a tie
  std::vector<SamplingRow> settings(static_cast<size_t>(rows));
  for (SamplingRow& r : settings) {
    r.temperature = rng.Below(5) == 0 ? 0.0f : 0.5f + static_cast<float>(rng.NextDouble());
    if (rng.Below(2) == 0) r.top_k = static_cast<int32_t>(1 + rng.Below(20));
    if (rng.Below(2) == 0) r.top_p = 0.3f + 0.69f * static_cast<float>(rng.NextDouble());
    if (rng.Below(3) == 0) r.min_p = 0.1f * static_cast<float>(rng.NextDouble());
    r.uniform = static_cast<float>(rng.Below(1 << 24)) * 0x1p-24f;
  }
  Tensor t = lab.Put(logits, DType::kF32);
  std::vector<Sampled> sampled(static_cast<size_t>(rows));
  lab->Sample(lab.stream(), t, settings, absl::MakeSpan(sampled));
  for (int64_t i = 0; i < rows; ++i) {
    const SamplingRow& r = settings[i];
    const Sampled& s = sampled[i];
    INFO("row " << i << ": temperature " << r.temperature << ", top-k " << r.top_k << ", top-p "
                << r.top_p << ", min-p " << r.min_p << ", uniform " << r.uniform << ", token "
                << s.token);
    const float temperature = r.temperature == 0 ? 1.0f : r.temperature;
    Tensor lp = lab.New(1, 1, DType::kF32);
    lab->LogProbs(lab.stream(), lp, Tensor{}, t.Rows(i, 1), lab.Ints({s.token}), temperature);
    REQUIRE(lab.Get(lp).v[0] == s.logprob);
    if (r.temperature == 0) {
      for (int64_t j = 0; j < n; ++j) {
        REQUIRE((logits(i, j) < logits(i, s.token) ||
                 (logits(i, j) == logits(i, s.token) && j >= s.token)));
      }
      REQUIRE(s.sampling_logprob == 0.0f);
      continue;
    }
    const Kept kept = KeptOracle(logits, i, r);
    double before = 0;
    size_t at = 0;
    while (at < kept.ids.size() && kept.ids[at] != s.token) before += kept.p[at++];
    REQUIRE(at < kept.ids.size());
    REQUIRE(r.uniform >= before - 1e-5);
    REQUIRE(r.uniform < before + kept.p[at] + 1e-5);
    REQUIRE(s.sampling_logprob == Approx(std::log(kept.p[at])).margin(1e-5));
  }
}
}  // namespace
}  // namespace stretto::engine::conformance
