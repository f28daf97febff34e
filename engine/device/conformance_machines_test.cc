// Every operation, forward and backward, on devices that differ in threads and instruction set:
// equal profiles must give equal bits.
#include "engine/device/conformance_support.h"

namespace stretto::engine::conformance {
namespace {
struct Result {
  std::string what;
  Host value;
};
using Results = std::vector<Result>;

void Products(Lab& lab, DType dtype, PhiloxStream& rng, Results& results) {
  const int64_t m = 117, n = 83, k = 345;
  Tensor x = lab.Put(Random(rng, m, k, dtype), dtype), w = lab.Put(Random(rng, n, k, dtype), dtype);
  Tensor d_y = lab.Put(Random(rng, m, n), DType::kF32);
  auto packed = lab->Pack(lab.stream(), {w});
  REQUIRE_OK(packed);
  for (int64_t rows : {int64_t{1}, int64_t{5}, m}) {
    Tensor y = lab.New(rows, n, dtype);
    lab->Linear(lab.stream(), y, x.Rows(0, rows), **packed, Tensor{});
    results.push_back({"linear", lab.Get(y)});
  }
  Tensor d_x = lab.New(m, k, DType::kF32), d_w = lab.Put(Host(n, k, 0.5f), DType::kF32);
  Tensor d_b = lab.Put(Host(1, n, 0.5f), DType::kF32);
  lab->LinearBackwardInput(lab.stream(), d_x, d_y, w, false);
  lab->LinearBackwardWeight(lab.stream(), d_w, d_y, x);
  lab->BiasBackward(lab.stream(), d_b, d_y);
  results.push_back({"linear d_x", lab.Get(d_x)});
  results.push_back({"linear d_w", lab.Get(d_w)});
  Tensor narrow_d_y = lab.New(m, n, DType::kBF16, 3);
  lab->Copy(lab.stream(), narrow_d_y, d_y);
  for (int64_t rows : {int64_t{1}, int64_t{30}, m}) {  // also an odd number, and one tile
    lab->LinearBackwardInput(lab.stream(), d_x.Rows(0, rows), narrow_d_y.Rows(0, rows), w, true);
    lab->LinearBackwardWeight(lab.stream(), d_w, narrow_d_y.Rows(0, rows), x.Rows(0, rows));
  }
  results.push_back({"linear d_x of bf16", lab.Get(d_x)});
  results.push_back({"linear d_w of bf16", lab.Get(d_w)});
  results.push_back({"bias", lab.Get(d_b)});
}

void Rows(Lab& lab, DType dtype, PhiloxStream& rng, Results& results) {
  const int64_t t = 300, d = 136;
  Tensor x = lab.Put(Random(rng, t, d, dtype), dtype), w = lab.Put(Random(rng, 1, d, dtype), dtype);
  Tensor d_out = lab.Put(Random(rng, t, d), DType::kF32), out = lab.New(t, d, dtype);
  Tensor d_x = lab.New(t, d, DType::kF32), d_w = lab.Put(Host(1, d), DType::kF32);
  lab->RmsNorm(lab.stream(), out, x, w, 1e-5f, 1);
  lab->RmsNormBackward(lab.stream(), d_x, d_w, d_out, x, w, 1e-5f, 1, false);
  results.push_back({"rms norm", lab.Get(out)});
  results.push_back({"rms norm d_x", lab.Get(d_x)});
  results.push_back({"rms norm d_weight", lab.Get(d_w)});
  Tensor act = lab.New(t, d / 2, dtype), d_act = lab.Put(Random(rng, t, d / 2), DType::kF32);
  lab->SwiGlu(lab.stream(), act, x);
  lab->SwiGluBackward(lab.stream(), d_x, Tensor{}, d_act, x);
  results.push_back({"swiglu", lab.Get(act)});
  Tensor rounded = lab.New(t, d, DType::kBF16);
  lab->SwiGluBackward(lab.stream(), rounded, act, d_act, x);
  results.push_back({"swiglu again", lab.Get(act)});
  results.push_back({"swiglu backward in bf16", lab.Get(rounded)});
  results.push_back({"swiglu backward", lab.Get(d_x)});
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < t; ++i) ids.push_back(static_cast<int32_t>(rng.Below(7)));
  Tensor table = lab.Put(Host(7, d), DType::kF32);
  lab->EmbeddingBackward(lab.stream(), table, d_out, lab.Ints(ids));
  results.push_back({"embedding backward", lab.Get(table)});
  Tensor cos = lab.Put(Random(rng, 7, d / 4), DType::kF32);
  Tensor sin = lab.Put(Random(rng, 7, d / 4), DType::kF32);
  lab->Rope(lab.stream(), x, lab.Ints(ids), cos, sin, 2, false);
  results.push_back({"rope", lab.Get(x)});
}

void AttentionOf(Lab& lab, DType dtype, PhiloxStream& rng, Results& results) {
  SegmentTable table;
  table.row_begin = {0, 21, 40, 70};
  table.num_rows = {21, 19, 30, 17};
  table.parent = {-1, 0, 0, -1};
  const int64_t rows = 87;
  PackedAttentionBackward b;
  b.forward.shape.num_heads = 6;
  b.forward.shape.num_kv_heads = 2;
  b.forward.shape.head_dim = 40;
  b.forward.shape.scale = 0.15f;
  b.forward.segments = &table;
  b.forward.q = lab.Put(Random(rng, rows, 240, dtype), dtype);
  b.forward.k = lab.Put(Random(rng, rows, 80, dtype), dtype);
  b.forward.v = lab.Put(Random(rng, rows, 80, dtype), dtype);
  b.forward.out = lab.New(rows, 240, dtype);
  b.d_out = lab.Put(Random(rng, rows, 240), DType::kF32);
  b.d_q = lab.New(rows, 240, DType::kF32);
  b.d_k = lab.New(rows, 80, DType::kF32);
  b.d_v = lab.New(rows, 80, DType::kF32);
  lab->Attention(lab.stream(), b.forward);
  lab->AttentionBackward(lab.stream(), b);
  results.push_back({"attention", lab.Get(b.forward.out)});
  results.push_back({"attention d_q", lab.Get(b.d_q)});
  results.push_back({"attention d_k", lab.Get(b.d_k)});
  results.push_back({"attention d_v", lab.Get(b.d_v)});
}

void Vocabulary(Lab& lab, PhiloxStream& rng, Results& results) {
  const int64_t rows = 21, n = 2333;
  const Host logits = Random(rng, rows, n, DType::kF32, 3.0);
  Tensor t = lab.Put(logits, DType::kF32);
  std::vector<int32_t> targets;
  std::vector<SamplingRow> settings(static_cast<size_t>(rows));
  for (SamplingRow& r : settings) {
    targets.push_back(static_cast<int32_t>(rng.Below(n)));
    r.temperature = 0.5f + static_cast<float>(rng.NextDouble());
    r.top_k = static_cast<int32_t>(rng.Below(3) * 20);
    r.top_p = rng.Below(2) == 0 ? 1.0f : 0.9f;
    r.uniform = static_cast<float>(rng.Below(1 << 24)) * 0x1p-24f;
  }
  Tensor lp = lab.New(1, rows, DType::kF32), h = lab.New(1, rows, DType::kF32);
  lab->LogProbs(lab.stream(), lp, h, t, lab.Ints(targets), 0.8f);
  std::vector<Sampled> sampled(static_cast<size_t>(rows));
  lab->Sample(lab.stream(), t, settings, absl::MakeSpan(sampled));
  Host tokens(rows, 3);
  for (int64_t i = 0; i < rows; ++i) {
    tokens(i, 0) = static_cast<float>(sampled[i].token);
    tokens(i, 1) = sampled[i].logprob;
    tokens(i, 2) = sampled[i].sampling_logprob;
  }
  lab->LogProbsBackward(lab.stream(), {t, t, lp, h, lab.Ints(targets), 0.8f, Tensor{}});
  results.push_back({"log-probs", lab.Get(lp)});
  results.push_back({"entropy", lab.Get(h)});
  results.push_back({"samples", tokens});
  results.push_back({"log-probs backward", lab.Get(t)});
}

void Optimizer(Lab& lab, DType dtype, PhiloxStream& rng, Results& results) {
  const int64_t n = 150001;
  Tensor w = lab.New(1, n, dtype), master = lab.Put(Random(rng, 1, n), DType::kF32);
  Tensor m = lab.Put(Host(1, n, 0.1f), DType::kF32), v = lab.Put(Host(1, n, 0.2f), DType::kF32);
  Tensor grad = lab.Put(Random(rng, 1, n), DType::kF32);
  AdamWStep step;
  step.lr = 1e-3f;
  step.weight_decay = 0.1f;
  step.step = 7;
  lab->AdamW(lab.stream(), w, master, m, v, grad, step);
  const double norm = lab->SquaredNorm(lab.stream(), grad);
  Host bits(1, 2);
  std::memcpy(bits.v.data(), &norm, sizeof(norm));
  results.push_back({"AdamW master", lab.Get(master)});
  results.push_back({"AdamW v", lab.Get(v)});
  results.push_back({"AdamW weights", lab.Get(w)});
  results.push_back({"squared norm", bits});
}

Results Everything(const Backend& backend, DType dtype) {
  Lab lab(backend);
  PhiloxStream rng(testing::Seed());
  Results results;
  Products(lab, dtype, rng, results);
  Rows(lab, dtype, rng, results);
  AttentionOf(lab, dtype, rng, results);
  Vocabulary(lab, rng, results);
  Optimizer(lab, dtype, rng, results);
  return results;
}

void RequireSameResults(const Results& a, const Results& b, const std::string& where) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    RequireSameBits(a[i].value, b[i].value, where + ": " + a[i].what);
  }
}

TEST_CASE("the number of threads does not show") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const bool fma = GENERATE(true, false);
  INFO(std::string(Name(dtype)) << ", fma " << fma << ", seed " << testing::Seed());
  const Results one = Everything({"cpu", fma, 1, {}}, dtype);
  for (int threads : {2, 3, 4, 7}) {
    const Backend backend{"cpu", fma, threads, {}};
    RequireSameResults(one, Everything(backend, dtype), backend.ToString());
  }
}

TEST_CASE("the instruction set does not show within one arithmetic") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  INFO(std::string(Name(dtype)) << ", seed " << testing::Seed());
  using cpu::InstructionSet;
  const Results plain = Everything({"cpu", false, 2, InstructionSet::kScalar}, dtype);
  std::optional<Results> fused;
  for (InstructionSet set : {InstructionSet::kSse4, InstructionSet::kAvx2, InstructionSet::kAvx512,
                             InstructionSet::kAvx512Bf16}) {
    if (!cpu::Supported(set)) continue;
    const Backend without{"cpu", false, 2, set};
    RequireSameResults(plain, Everything(without, dtype), without.ToString());
    if (set == InstructionSet::kSse4) continue;
    const Backend with{"cpu", true, 2, set};
    const Results results = Everything(with, dtype);
    if (fused) RequireSameResults(*fused, results, with.ToString());
    fused = results;
  }
  if (!fused) return;
  // Two arithmetics do differ somewhere (not in products of bf16, which are exact in f32), or the
  // comparison shows nothing.
  int64_t different = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    different += FirstDifference(plain[i].value, (*fused)[i].value) >= 0 ? 1 : 0;
  }
  REQUIRE(different > 0);
}

// A bf16 number whose exponent lies in a range: 0 gives denormals, 255 infinities.
float RandomBf16(PhiloxStream& rng, uint32_t least_exponent, uint32_t most_exponent) {
  const auto exponent =
      least_exponent + static_cast<uint32_t>(rng.Below(most_exponent - least_exponent + 1));
  const auto fraction = exponent == 255 ? 0 : static_cast<uint32_t>(rng.Below(128));
  const auto sign = static_cast<uint32_t>(rng.Below(2));
  return Bf16ToF32(static_cast<uint16_t>(sign << 15 | exponent << 7 | fraction));
}

Host Down(const Host& h) {
  Host t(h.cols, h.rows);
  for (int64_t r = 0; r < h.rows; ++r) {
    for (int64_t c = 0; c < h.cols; ++c) t(c, r) = h(r, c);
  }
  return t;
}

// Instructions that read small numbers as zero must not be used where that would show.
TEST_CASE("products of numbers of every size have the same bits on every instruction set") {
  PhiloxStream rng(testing::Seed());
  INFO("seed " << testing::Seed());
  using cpu::InstructionSet;
  struct Range {
    uint32_t least, most;
  };
  const Range usual{110, 130}, tiny{40, 80}, smallest{0, 30}, huge{180, 254}, any{0, 255};
  int64_t small = 0;
  for (const Range of_w : {usual, tiny, any}) {
    for (const Range of_x : {usual, tiny, smallest, huge, any}) {
      const int64_t rows = 1 + static_cast<int64_t>(rng.Below(40)), n = 37;
      const int64_t k = 2 * (1 + static_cast<int64_t>(rng.Below(700)));
      Host x(rows, k), w(n, k);
      // Some rows and some weights are of the usual size: they share tiles with the others.
      for (int64_t i = 0; i < rows * k; ++i) {
        const Range r = i / k % 3 == 0 ? usual : of_x;
        x.v[i] = rng.Below(9) == 0 ? 0.0f : RandomBf16(rng, r.least, r.most);
      }
      for (float& v : w.v) v = RandomBf16(rng, of_w.least, of_w.most);
      std::optional<Host> expected;
      for (const InstructionSet set :
           {InstructionSet::kAvx2, InstructionSet::kAvx512, InstructionSet::kAvx512Bf16}) {
        if (!cpu::Supported(set)) continue;
        Lab lab({"cpu", true, 2, set});
        auto packed = lab->Pack(lab.stream(), {lab.Put(w, DType::kBF16)});
        REQUIRE_OK(packed);
        // The same product by the ways of the backward pass, from factors that lie the other way.
        Tensor d_x = lab.New(rows, n, DType::kF32), d_w = lab.Put(Host(rows, n), DType::kF32);
        const Tensor w_down = lab.Put(Down(w), DType::kBF16);
        lab->LinearBackwardInput(lab.stream(), d_x, lab.Put(x, DType::kBF16), w_down, false);
        lab->LinearBackwardWeight(lab.stream(), d_w, lab.Put(Down(x), DType::kBF16), w_down);
        RequireSameBits(lab.Get(d_w), lab.Get(d_x), "d_w and d_x");
        if (expected) RequireSameBits(lab.Get(d_x), *expected, "backward");
        for (const DType of_rows : {DType::kBF16, DType::kF32}) {
          Tensor y = lab.New(rows, n, DType::kF32);
          lab->Linear(lab.stream(), y, lab.Put(x, of_rows), **packed, Tensor{});
          const Host result = lab.Get(y);
          if (expected) {
            RequireSameBits(result, *expected, "set " + std::to_string(static_cast<int>(set)));
          }
          expected = result;
        }
      }
      if (!expected) return;
      for (const float v : expected->v) small += v != 0 && std::abs(v) < 0x1p-126f ? 1 : 0;
    }
  }
  REQUIRE(small > 0);  // or the case shows nothing
}

TEST_CASE("fast numerics differ in tiny numbers only, and say so") {
  PhiloxStream rng(testing::Seed());
  INFO("seed " << testing::Seed());
  const auto product = [](bool exact, const Host& x, const Host& w) {
    Lab lab({"cpu", true, 2, {}}, exact);
    auto packed = lab->Pack(lab.stream(), {lab.Put(w, DType::kBF16)});
    REQUIRE_OK(packed);
    Tensor y = lab.New(x.rows, w.rows, DType::kF32);
    lab->Linear(lab.stream(), y, lab.Put(x, DType::kBF16), **packed, Tensor{});
    return lab.Get(y);
  };
  Host x = Random(rng, 9, 300), w = Random(rng, 40, 300);
  RequireSameBits(product(false, x, w), product(true, x, w), "numbers of the usual size");
  for (float& v : x.v) v *= 0x1p-70f;
  for (float& v : w.v) v *= 0x1p-70f;
  const Host exact = product(true, x, w), fast = product(false, x, w);
  bool differ = false;
  for (size_t i = 0; i < exact.v.size(); ++i) {
    REQUIRE(std::abs(exact.v[i] - fast.v[i]) <= 300 * 0x1p-126f);
    differ = differ || exact.v[i] != fast.v[i];
  }
  const bool pairs = cpu::BestInstructionSet() == cpu::InstructionSet::kAvx512Bf16;
  REQUIRE(differ == pairs);
  Lab lab({"cpu", true, 2, {}}, false);
  REQUIRE(lab->Profile(DType::kBF16).ToString() == (pairs ? "cpu/fast/bf16/1" : "cpu/fma/bf16/1"));
}

TEST_CASE("devices of both arithmetics live side by side") {
  INFO("seed " << testing::Seed());
  PhiloxStream rng(testing::Seed());
  const Host x = Random(rng, 3, 300), w = Random(rng, 40, 300);
  Lab with({"cpu", true, 2, {}}), without({"cpu", false, 2, {}});
  const auto multiply = [&](Lab& lab) {
    auto packed = lab->Pack(lab.stream(), {lab.Put(w, DType::kF32)});
    REQUIRE_OK(packed);
    Tensor y = lab.New(3, 40, DType::kF32);
    lab->Linear(lab.stream(), y, lab.Put(x, DType::kF32), **packed, Tensor{});
    return lab.Get(y);
  };
  const Host fused = multiply(with), plain = multiply(without);
  RequireSameBits(multiply(with), fused, "fused");
  RequireSameBits(multiply(without), plain, "not fused");
  REQUIRE(without->Profile(DType::kF32).instruction_set == "nofma");
}
}  // namespace
}  // namespace stretto::engine::conformance
