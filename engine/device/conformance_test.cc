// One body for all backends and element types: every operation against a double-precision oracle
// with a stated tolerance. Products and attention are in conformance_products_test.cc and
// conformance_attention_test.cc, exact properties in conformance_exactness_test.cc.
#include "engine/device/conformance_support.h"

namespace stretto::engine::conformance {
namespace {
TEST_CASE("copies convert, fill and add") {
  STRETTO_CONFORMANCE_CASE(c);
  for (int64_t cols : {1, 15, 16, 37, 128}) {
    const Host x = Random(rng, 5, cols), y = Random(rng, 5, cols, c.dtype);
    Tensor tx = lab.Put(x, DType::kF32, 3), ty = lab.Put(y, c.dtype);
    Tensor narrow = lab.New(5, cols, c.dtype, 5), sum = lab.New(5, cols, c.dtype);
    lab->Copy(lab.stream(), narrow, tx);
    lab->Add(lab.stream(), sum, tx, ty);
    Host want = x, want_sum = x;
    for (size_t i = 0; i < x.v.size(); ++i) {
      want.v[i] = RoundTo(x.v[i], c.dtype);
      want_sum.v[i] = RoundTo(x.v[i] + y.v[i], c.dtype);
    }
    RequireSameBits(lab.Get(narrow), want, "copy");
    RequireSameBits(lab.Get(sum), want_sum, "add");
    lab->Fill(lab.stream(), narrow, 1.00390625f);
    RequireSameBits(lab.Get(narrow), Host(5, cols, RoundTo(1.00390625f, c.dtype)), "fill");
    lab->Scale(lab.stream(), tx, 0.3f);
    for (float& v : want.v) v = 0;
    for (size_t i = 0; i < x.v.size(); ++i) want.v[i] = x.v[i] * 0.3f;
    RequireSameBits(lab.Get(tx), want, "scale");
    Tensor in_place = tx;  // rows of bf16 where the f32 were
    in_place.dtype = DType::kBF16;
    in_place.row_stride *= 2;
    lab->Copy(lab.stream(), in_place, tx);
    for (float& v : want.v) v = RoundTo(v, DType::kBF16);
    RequireSameBits(lab.Get(in_place), want, "copy in place");
  }
}

TEST_CASE("special values survive conversion") {
  STRETTO_CONFORMANCE_CASE(c);
  Host x(1, 6);
  x.v = {INFINITY, -INFINITY, NAN, -0.0f, 3.4e38f, 1e-41f};
  Tensor tx = lab.Put(x, DType::kF32), out = lab.New(1, 6, c.dtype);
  lab->Copy(lab.stream(), out, tx);
  const Host got = lab.Get(out);
  for (size_t i = 0; i < x.v.size(); ++i) {
    const float want = RoundTo(x.v[i], c.dtype);
    INFO("element " << i);
    REQUIRE(((std::isnan(want) && std::isnan(got.v[i])) ||
             std::memcmp(&want, &got.v[i], sizeof(float)) == 0));
  }
}

TEST_CASE("conversion rounds every bit pattern as base/bfloat16.h does") {
  const Backend backend = GENERATE(from_range(Backends()));
  INFO(backend.ToString() << ", seed " << testing::Seed());
  Lab lab(backend);
  PhiloxStream rng(testing::Seed());
  std::vector<uint32_t> bits = {0x7fffffff, 0xffffffff, 0x7f800001, 0xff800001, 0x7f7fffff,
                                0x00000001, 0x807fffff, 0x3f808000, 0x3f818000, 0x3f807fff};
  while (bits.size() < 20000) bits.push_back(rng.NextU32());
  const auto n = static_cast<int64_t>(bits.size());
  Tensor wide = lab.New(1, n, DType::kF32), narrow = lab.New(1, n, DType::kBF16);
  lab->Upload(lab.stream(), wide, bits.data());
  lab->Copy(lab.stream(), narrow, wide);
  std::vector<uint16_t> got(bits.size());
  lab->Download(lab.stream(), narrow, got.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    if (got[i] == F32ToBf16(std::bit_cast<float>(bits[i]))) continue;
    INFO("pattern " << std::hex << bits[i] << " became " << got[i]);
    REQUIRE(got[i] == F32ToBf16(std::bit_cast<float>(bits[i])));
  }
}

TEST_CASE("embedding, gather and their transposes") {
  STRETTO_CONFORMANCE_CASE(c);
  const int64_t d = 37;
  const Host table = Random(rng, 11, d, c.dtype);
  const std::vector<int32_t> ids = {3, 0, 10, 3, 3, 7};
  Tensor t_table = lab.Put(table, c.dtype), t_ids = lab.Ints(ids);
  Tensor out = lab.New(6, d, DType::kF32), gathered = lab.New(6, d, c.dtype);
  lab->Embedding(lab.stream(), out, t_table, t_ids);
  lab->GatherRows(lab.stream(), gathered, t_table, t_ids);
  Host want(6, d);
  for (int64_t i = 0; i < 6; ++i) {
    for (int64_t j = 0; j < d; ++j) want(i, j) = table(ids[i], j);
  }
  RequireSameBits(lab.Get(out), want, "embedding");
  RequireSameBits(lab.Get(gathered), want, "gather");

  const Host d_out = Random(rng, 6, d), start = Random(rng, 11, d);
  Tensor grad = lab.Put(start, DType::kF32), t_d_out = lab.Put(d_out, DType::kF32);
  lab->EmbeddingBackward(lab.stream(), grad, t_d_out, t_ids);
  Host sum = start;
  for (int64_t i = 0; i < 6; ++i) {
    for (int64_t j = 0; j < d; ++j) sum(ids[i], j) += d_out(i, j);
  }
  RequireSameBits(lab.Get(grad), sum, "embedding backward");

  const std::vector<int32_t> rows = {9, 2, 5, 0, 1, 10};
  Tensor dst = lab.Put(start, DType::kF32);
  lab->ScatterAddRows(lab.stream(), dst, t_d_out, lab.Ints(rows));
  Host scattered = start;
  for (int64_t i = 0; i < 6; ++i) {
    for (int64_t j = 0; j < d; ++j) scattered(rows[i], j) += d_out(i, j);
  }
  RequireSameBits(lab.Get(dst), scattered, "scatter-add");
}

// x / sqrt(mean(x²) + eps) · w without roundings.
DVec RmsNormOracle(const DVec& x, const DVec& w, double eps, int64_t rows, int64_t groups) {
  const int64_t n = static_cast<int64_t>(w.size());
  DVec out(x.size());
  for (int64_t g = 0; g < rows * groups; ++g) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[g * n + i] * x[g * n + i];
    const double inv = 1.0 / std::sqrt(sum / static_cast<double>(n) + eps);
    for (int64_t i = 0; i < n; ++i) out[g * n + i] = x[g * n + i] * inv * w[i];
  }
  return out;
}

TEST_CASE("root-mean-square norm and its gradient") {
  STRETTO_CONFORMANCE_CASE(c);
  const auto sizes =
      GENERATE(std::pair<int64_t, int64_t>{24, 1}, std::pair<int64_t, int64_t>{8, 3},
               std::pair<int64_t, int64_t>{37, 2}, std::pair<int64_t, int64_t>{576, 1});
  const int64_t n = sizes.first, groups = sizes.second, rows = 4;
  const float eps = 1e-5f;
  const Host x = Random(rng, rows, n * groups, c.dtype), w = Random(rng, 1, n, c.dtype);
  Tensor tx = lab.Put(x, c.dtype, 4), tw = lab.Put(w, c.dtype);
  Tensor out = lab.New(rows, n * groups, c.dtype);
  lab->RmsNorm(lab.stream(), out, tx, tw, eps, groups);
  const DVec oracle = RmsNormOracle(Doubles(x), Doubles(w), eps, rows, groups);
  Want want(rows, n * groups);
  for (int64_t i = 0; i < rows * n * groups; ++i) want.Set(0, i, oracle[i]);
  // The normalised value is rounded to x's type first: half a unit more.
  RequireClose(lab.Get(out), want, c.dtype, c.dtype == DType::kBF16 ? 0x1.04p-8 : 2e-6, "rms norm");
  if (n == 576) return;  // finite differences of this size say nothing new

  const Host d_out = Random(rng, rows, n * groups), start_w = Random(rng, 1, n);
  const Host start_x = Random(rng, rows, n * groups);
  const auto loss = [&](const DVec& xs, const DVec& ws) {
    const DVec y = RmsNormOracle(xs, ws, eps, rows, groups);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * d_out.v[i];
    return sum;
  };
  Want want_x = Gradient(
      rows, n * groups, Doubles(x), [&](const DVec& xs) { return loss(xs, Doubles(w)); }, 4.0);
  Want want_w = Gradient(
      1, n, Doubles(w), [&](const DVec& ws) { return loss(Doubles(x), ws); }, 10.0);
  for (size_t i = 0; i < want_w.v.size(); ++i) want_w.v[i] += start_w.v[i];
  Tensor d_w = lab.Put(start_w, DType::kF32), d_x = lab.New(rows, n * groups, DType::kF32);
  Tensor t_d_out = lab.Put(d_out, DType::kF32);
  lab->RmsNormBackward(lab.stream(), d_x, d_w, t_d_out, tx, tw, eps, groups, false);
  RequireClose(lab.Get(d_x), want_x, DType::kF32, 2e-6, "rms norm d_x");
  RequireClose(lab.Get(d_w), want_w, DType::kF32, 2e-6, "rms norm d_weight");
  Tensor d_x2 = lab.Put(start_x, DType::kF32);
  lab->RmsNormBackward(lab.stream(), d_x2, d_w, t_d_out, tx, tw, eps, groups, true);
  for (size_t i = 0; i < want_x.v.size(); ++i) want_x.v[i] += start_x.v[i];
  RequireClose(lab.Get(d_x2), want_x, DType::kF32, 2e-6, "rms norm d_x, accumulated");
}

TEST_CASE("rotary positions turn and turn back") {
  STRETTO_CONFORMANCE_CASE(c);
  const auto [heads, half] =
      GENERATE(std::pair<int64_t, int64_t>{3, 4}, std::pair<int64_t, int64_t>{2, 32},
               std::pair<int64_t, int64_t>{1, 20});
  const int64_t rows = 5;
  const std::vector<int32_t> positions = {0, 1, 6, 3, 3};
  Host cos(7, half), sin(7, half);
  for (int64_t p = 0; p < 7; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) *
                           std::pow(100.0, -static_cast<double>(i) / static_cast<double>(half));
      cos(p, i) = static_cast<float>(std::cos(angle));
      sin(p, i) = static_cast<float>(std::sin(angle));
    }
  }
  const Host x = Random(rng, rows, heads * 2 * half, c.dtype);
  for (bool inverse : {false, true}) {
    Tensor tx = lab.Put(x, c.dtype, 2);
    lab->Rope(lab.stream(), tx, lab.Ints(positions), lab.Put(cos, DType::kF32),
              lab.Put(sin, DType::kF32), heads, inverse);
    Want want(rows, heads * 2 * half);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < half; ++i) {
          const int64_t a = h * 2 * half + i, b = a + half;
          const double co = cos(positions[t], i), si = (inverse ? -1 : 1) * sin(positions[t], i);
          const double size = std::abs(x(t, a)) + std::abs(x(t, b));
          want.Set(t, a, x(t, a) * co - x(t, b) * si, size);
          want.Set(t, b, x(t, b) * co + x(t, a) * si, size);
        }
      }
    }
    RequireClose(lab.Get(tx), want, c.dtype, 3e-7, "rope");
  }
}

DVec SwiGluOracle(const DVec& gate_up, int64_t rows, int64_t f) {
  DVec out(static_cast<size_t>(rows * f));
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < f; ++i) {
      const double g = gate_up[t * 2 * f + i], u = gate_up[t * 2 * f + f + i];
      out[t * f + i] = g / (1 + std::exp(-g)) * u;
    }
  }
  return out;
}

TEST_CASE("gated activation and its gradient") {
  STRETTO_CONFORMANCE_CASE(c);
  const int64_t rows = 3, f = GENERATE(5, 16, 43);
  Host gate_up = Random(rng, rows, 2 * f, c.dtype, 3.0);
  gate_up(0, 0) = -60.0f;
  gate_up(1, 1) = 60.0f;
  Tensor t = lab.Put(gate_up, c.dtype), out = lab.New(rows, f, c.dtype, 1);
  lab->SwiGlu(lab.stream(), out, t);
  const DVec oracle = SwiGluOracle(Doubles(gate_up), rows, f);
  Want want(rows, f);
  for (int64_t i = 0; i < rows * f; ++i) want.Set(0, i, oracle[i]);
  RequireClose(lab.Get(out), want, c.dtype, 1e-6, "swiglu");

  const Host d_out = Random(rng, rows, f);
  Want want_d = Gradient(
      rows, 2 * f, Doubles(gate_up),
      [&](const DVec& x) {
        const DVec y = SwiGluOracle(x, rows, f);
        double sum = 0;
        for (size_t i = 0; i < y.size(); ++i) sum += y[i] * d_out.v[i];
        return sum;
      },
      1.0);
  const Tensor t_d_out = lab.Put(d_out, DType::kF32);
  Tensor d = lab.New(rows, 2 * f, DType::kF32), again = lab.New(rows, f, c.dtype);
  lab->SwiGluBackward(lab.stream(), d, Tensor{}, t_d_out, t);
  RequireClose(lab.Get(d), want_d, DType::kF32, 2e-6, "swiglu gradient");
  Tensor narrow = lab.New(rows, 2 * f, DType::kBF16), rounded = lab.New(rows, 2 * f, DType::kBF16);
  lab->SwiGluBackward(lab.stream(), narrow, again, t_d_out, t);
  lab->Copy(lab.stream(), rounded, d);
  RequireSameBits(lab.Get(narrow), lab.Get(rounded), "swiglu gradient in bf16");
  RequireSameBits(lab.Get(again), lab.Get(out), "swiglu once more");
}

TEST_CASE("AdamW, scale and the norm of gradients") {
  STRETTO_CONFORMANCE_CASE(c);
  const int64_t n = GENERATE(7, 4096, 40001);
  const Host master = Random(rng, 1, n), grad = Random(rng, 1, n);
  Host m = Random(rng, 1, n, DType::kF32, 0.1), v = Random(rng, 1, n, DType::kF32, 0.1);
  for (float& x : v.v) x *= x;
  AdamWStep step;
  step.lr = 1e-2f;
  step.weight_decay = 0.1f;
  step.grad_scale = 0.5f;
  step.step = 3;
  Tensor t_w = lab.New(1, n, c.dtype), t_master = lab.Put(master, DType::kF32);
  Tensor t_m = lab.Put(m, DType::kF32), t_v = lab.Put(v, DType::kF32);
  Tensor t_grad = lab.Put(grad, DType::kF32);
  lab->AdamW(lab.stream(), t_w, t_master, t_m, t_v, t_grad, step);
  Want want(1, n), want_m(1, n), want_v(1, n);
  for (int64_t i = 0; i < n; ++i) {
    const double g = static_cast<double>(grad.v[i]) * step.grad_scale;
    const double m1 =
        step.beta1 * static_cast<double>(m.v[i]) + (1 - static_cast<double>(step.beta1)) * g;
    const double v1 =
        step.beta2 * static_cast<double>(v.v[i]) + (1 - static_cast<double>(step.beta2)) * g * g;
    const double m_hat = m1 / (1 - std::pow(static_cast<double>(step.beta1), 3));
    const double v_hat = v1 / (1 - std::pow(static_cast<double>(step.beta2), 3));
    const double w = master.v[i] - static_cast<double>(step.lr) *
                                       (m_hat / (std::sqrt(v_hat) + step.eps) +
                                        static_cast<double>(step.weight_decay) * master.v[i]);
    want.Set(0, i, w, std::abs(master.v[i]) + 0.1);
    want_m.Set(0, i, m1, 1.0);
    want_v.Set(0, i, v1, 1.0);
  }
  const Host got = lab.Get(t_master);
  RequireClose(got, want, DType::kF32, 1e-6, "master");
  RequireClose(lab.Get(t_m), want_m, DType::kF32, 1e-6, "m");
  RequireClose(lab.Get(t_v), want_v, DType::kF32, 1e-6, "v");
  Host rounded = got;
  for (float& x : rounded.v) x = RoundTo(x, c.dtype);
  RequireSameBits(lab.Get(t_w), rounded, "weights are the rounded masters");

  double sum = 0;
  for (float x : grad.v) sum += static_cast<double>(x) * x;
  REQUIRE(lab->SquaredNorm(lab.stream(), t_grad) == Approx(sum).epsilon(1e-12));
  Host bad = grad;
  bad.v[static_cast<size_t>(n - 1)] = NAN;
  REQUIRE(!std::isfinite(lab->SquaredNorm(lab.stream(), lab.Put(bad, DType::kF32))));
}

TEST_CASE("impossible allocations are refused") {
  const Backend backend = GENERATE(from_range(Backends()));
  INFO(backend.ToString());
  Lab lab(backend);
  const auto buffer = lab->Allocate(size_t{1} << 50);
  REQUIRE(!buffer.ok());
  REQUIRE(buffer.status().code() == absl::StatusCode::kResourceExhausted);
  auto good = lab->Allocate(1 << 20);
  REQUIRE_OK(good);
}

TEST_CASE("memory of zeros is zero, whatever lay there before") {
  STRETTO_CONFORMANCE_CASE(c);
  for (const int64_t size : {1, 300, 100'000, 1'500'000}) {
    for (int i = 0; i < 2; ++i) {
      const auto buffer = lab->AllocateZeros(static_cast<size_t>(size) * sizeof(float));
      REQUIRE_OK(buffer);
      const Tensor tensor = buffer->View(DType::kF32, 1, size);
      const Host got = lab.Get(tensor);
      REQUIRE(std::all_of(got.v.begin(), got.v.end(), [](float x) { return x == 0.0f; }));
      lab->Fill(lab.stream(), tensor, 1.0f);
    }
  }
}

TEST_CASE("devices are created by name and name their profile") {
  DeviceOptions options;
  options.backend = "abacus";
  const auto unknown = CreateDevice(options);
  REQUIRE(unknown.status().code() == absl::StatusCode::kInvalidArgument);
  options.backend = "cpu";
  options.num_threads = -1;
  REQUIRE(CreateDevice(options).status().code() == absl::StatusCode::kInvalidArgument);
  options.num_threads = 3;
  options.allow_fma = false;
  auto device = CreateDevice(options);
  REQUIRE_OK(device);
  REQUIRE((*device)->num_threads() == 3);
  REQUIRE((*device)->Profile(DType::kBF16).ToString() == "cpu/nofma/bf16/1");
}
}  // namespace
}  // namespace stretto::engine::conformance
