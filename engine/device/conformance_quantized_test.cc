// Quantised weights: what rows become (quantize.h), and that every backend's products over them are
// the chains that device.h states, to the bit.
#include <bit>
#include <limits>

#include "engine/device/conformance_support.h"
#include "engine/device/quantize.h"

namespace stretto::engine::conformance {
namespace {
constexpr WeightFormat kFormats[] = {WeightFormat::kInt8, WeightFormat::kInt4, WeightFormat::kFp8};

// W as its products see it: values [N, K], and the factor of each finished chain (1 for int4).
struct Dequantized {
  Host values, scales;
};
Dequantized Dequantize(const Host& w, WeightFormat format) {
  Dequantized d{Host(w.rows, w.cols), Host(1, w.rows, 1.0f)};
  std::vector<int8_t> q(static_cast<size_t>(w.cols));
  for (int64_t n = 0; n < w.rows; ++n) {
    const float* row = &w.v[static_cast<size_t>(n * w.cols)];
    if (format == WeightFormat::kInt8) d.scales(0, n) = QuantizeInt8(row, w.cols, q.data());
    if (format == WeightFormat::kFp8) d.scales(0, n) = QuantizeFp8(row, w.cols, q.data());
    for (int64_t k = 0; k < w.cols; ++k) {
      if (format == WeightFormat::kInt8) {
        d.values(n, k) = q[static_cast<size_t>(k)];
      } else if (format == WeightFormat::kFp8) {
        d.values(n, k) = Fp8ToF32(q[static_cast<size_t>(k)]);
      } else {
        const int64_t begin = k / kInt4Group * kInt4Group;
        const float scale = Bf16ToF32(
            QuantizeInt4Group(row + begin, std::min(kInt4Group, w.cols - begin), q.data()));
        d.values(n, k) = scale * static_cast<float>(q[static_cast<size_t>(k - begin)]);
      }
    }
  }
  return d;
}

Host ChainOracle(const Host& x, const Dequantized& w, bool fused) {
  Host out(x.rows, w.values.rows);
  for (int64_t m = 0; m < x.rows; ++m) {
    for (int64_t n = 0; n < out.cols; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < x.cols; ++k) {
        const float product = x(m, k) * w.values(n, k);
        sum = fused ? std::fma(x(m, k), w.values(n, k), sum) : sum + product;
      }
      out(m, n) = sum * w.scales(0, n);
    }
  }
  return out;
}

struct Shape {
  int64_t m, n, k;
};

TEST_CASE("products over quantised weights are the stated chains") {
  STRETTO_CONFORMANCE_CASE(c);
  const WeightFormat format = GENERATE(from_range(std::begin(kFormats), std::end(kFormats)));
  const Shape s = GENERATE(Shape{1, 1, 1}, Shape{1, 150, 64}, Shape{2, 37, 19}, Shape{7, 96, 33},
                           Shape{20, 50, 700}, Shape{130, 35, 48});
  INFO(std::string(Name(format)) << ", m " << s.m << ", n " << s.n << ", k " << s.k);
  const Host x = Random(rng, s.m, s.k, c.dtype), w = Random(rng, s.n, s.k, c.dtype, 0.1);
  const Host bias = Random(rng, 1, s.n, c.dtype);
  Tensor tx = lab.Put(x, c.dtype, 3), tw = lab.Put(w, c.dtype, 1);
  const int64_t cut = s.n / 3;
  std::vector<Tensor> parts = {tw.Rows(0, cut), tw.Rows(cut, s.n - cut)};
  if (cut == 0) parts = {tw};
  auto packed = lab->Pack(lab.stream(), parts, format);
  REQUIRE_OK(packed);
  REQUIRE((*packed)->format() == format);
  REQUIRE((*packed)->n() == s.n);
  REQUIRE((*packed)->k() == s.k);
  const bool fused = lab->Profile(c.dtype).instruction_set == "fma";
  Host want = ChainOracle(x, Dequantize(w, format), fused);
  Tensor y = lab.New(s.m, s.n, DType::kF32, 2);
  lab->Linear(lab.stream(), y, tx, **packed, Tensor{});
  RequireSameBits(lab.Get(y), want, "chain");
  // Each row alone has the bits that it has among the others.
  for (int64_t m = 0; m < s.m; m += 5) {
    Tensor alone = lab.New(1, s.n, DType::kF32);
    lab->Linear(lab.stream(), alone, tx.Rows(m, 1), **packed, Tensor{});
    RequireSameBits(lab.Get(alone), want.Rows(m, 1), "alone");
  }
  Tensor narrow = lab.New(s.m, s.n, c.dtype);
  lab->Linear(lab.stream(), narrow, tx, **packed, lab.Put(bias, c.dtype));
  for (int64_t m = 0; m < s.m; ++m) {
    for (int64_t n = 0; n < s.n; ++n) want(m, n) = RoundTo(want(m, n) + bias(0, n), c.dtype);
  }
  RequireSameBits(lab.Get(narrow), want, "with bias");

  const Host w2 = Random(rng, s.n, s.k, c.dtype);
  lab->Repack(lab.stream(), **packed, {lab.Put(w2, c.dtype)});
  lab->Linear(lab.stream(), y, tx, **packed, Tensor{});
  RequireSameBits(lab.Get(y), ChainOracle(x, Dequantize(w2, format), fused), "repacked");
}

TEST_CASE("a weight that is not finite shows in the products of its row alone") {
  STRETTO_CONFORMANCE_CASE(c);
  const WeightFormat format = GENERATE(from_range(std::begin(kFormats), std::end(kFormats)));
  const float bad =
      GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN());
  Host x = Random(rng, 8, 70, c.dtype), w = Random(rng, 20, 70, c.dtype);
  w(17, 40) = bad;
  auto packed = lab->Pack(lab.stream(), {lab.Put(w, c.dtype)}, format);
  REQUIRE_OK(packed);
  Tensor y = lab.New(8, 20, DType::kF32);
  lab->Linear(lab.stream(), y, lab.Put(x, c.dtype), **packed, Tensor{});
  const Host got = lab.Get(y);
  for (int64_t m = 0; m < 8; ++m) {
    for (int64_t n = 0; n < 20; ++n) REQUIRE(std::isfinite(got(m, n)) == (n != 17));
  }
}

TEST_CASE("rows are quantised to the nearest value") {
  PhiloxStream rng(testing::Seed());
  INFO("seed " << testing::Seed());
  for (int trial = 0; trial < 200; ++trial) {
    const double size = std::ldexp(1.0, static_cast<int>(rng.Below(60)) - 30);
    const Host w = Random(rng, 1, 1 + static_cast<int64_t>(rng.Below(100)), DType::kBF16, size);
    double max = 0;
    for (const float x : w.v) max = std::max(max, std::abs(double{x}));
    for (const WeightFormat format : kFormats) {
      const Dequantized d = Dequantize(w, format);
      for (int64_t k = 0; k < w.cols; ++k) {
        const double got = double{d.values(0, k)} * d.scales(0, 0), want = w(0, k);
        double step = max / 127;
        // A group's range is lopsided: 8 steps one way and 7 the other, where half a step more may
        // be cut, and the scale itself is rounded to bf16.
        if (format == WeightFormat::kInt4) step = max / 8 * 2.1;
        if (format == WeightFormat::kFp8) {
          step = std::max(max / 448 * 0x1p-9, std::abs(want) * 0x1p-3);
        }
        INFO(std::string(Name(format)) << ": " << want << " became " << got);
        REQUIRE(std::abs(got - want) <= step * 0.50001);
      }
    }
  }
}

TEST_CASE("what needs no rounding is kept, and zeros are") {
  std::vector<float> w(64);
  std::vector<int8_t> q(w.size());
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(static_cast<int>(i % 16) - 8);
  CHECK(Bf16ToF32(QuantizeInt4Group(w.data(), 32, q.data())) == 1.0f);
  for (size_t i = 0; i < 32; ++i) REQUIRE(static_cast<float>(q[i]) == w[i]);
  for (float& x : w) x = 127.0f - std::abs(x);
  CHECK(QuantizeInt8(w.data(), 64, q.data()) == 1.0f);
  for (size_t i = 0; i < w.size(); ++i) REQUIRE(static_cast<float>(q[i]) == w[i]);
  const std::vector<float> zeros = {0.0f, -0.0f, 1e-40f};
  CHECK(QuantizeInt8(zeros.data(), 3, q.data()) == 0.0f);
  CHECK(QuantizeFp8(zeros.data(), 3, q.data()) == 0.0f);
  CHECK(QuantizeInt4Group(zeros.data(), 3, q.data()) == 0);
}

// Every e4m3 number against the definition (OCP 8-bit floating point specification, 2023), and the
// rounding of the midpoints between neighbours to the even one.
TEST_CASE("e4m3 numbers are what their definition says") {
  std::vector<float> values;
  for (int bits = 0; bits < 127; ++bits) {
    const int exponent = bits >> 3, mantissa = bits & 7;
    const double want =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    REQUIRE(double{Fp8ToF32(static_cast<int8_t>(bits))} == want);
    REQUIRE(double{Fp8ToF32(static_cast<int8_t>(bits | 0x80))} == -want);
    values.push_back(static_cast<float>(want));
  }
  REQUIRE(values.back() == 448.0f);
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    // 448 last makes the scale 1.
    const float row[] = {values[i], -values[i], (values[i] + values[i + 1]) / 2, 448.0f};
    int8_t q[4];
    REQUIRE(QuantizeFp8(row, 4, q) == 1.0f);
    CHECK(Fp8ToF32(q[0]) == values[i]);
    CHECK(Fp8ToF32(q[1]) == -values[i]);
    CHECK(Fp8ToF32(q[2]) == values[i % 2 == 0 ? i : i + 1]);
  }
}

TEST_CASE("profiles and names of quantised weights") {
  NumericProfile profile{"cpu", "fma", DType::kBF16, 1};
  CHECK(profile.ToString() == "cpu/fma/bf16/1");
  profile.weights = WeightFormat::kInt8;
  CHECK(profile.ToString() == "cpu/fma/bf16+int8/1");
  for (const WeightFormat format : kFormats) {
    const auto parsed = ParseWeightFormat(Name(format));
    REQUIRE_OK(parsed);
    CHECK(*parsed == format);
  }
  CHECK(ParseWeightFormat("bf16").value() == WeightFormat::kPlain);
  CHECK(ParseWeightFormat("int5").status().message() ==
        "weight dtype 'int5': expected bf16, int8, int4 or fp8");
}
}  // namespace
}  // namespace stretto::engine::conformance
