// A quantised KV cache: attention over what was written is attention over the values that
// quantize.h makes of each token's keys and values, on every backend, and has the same bits however
// it was written and read.
#include <limits>

#include "engine/device/conformance_support.h"
#include "engine/device/quantize.h"

namespace stretto::engine::conformance {
namespace {
constexpr WeightFormat kFormats[] = {WeightFormat::kInt8, WeightFormat::kFp8};

struct Heads {
  int64_t h, g, c, window;
};
// SmolLM2's heads, sizes that fill panels and that don't, windows inside a block and over several.
std::vector<Heads> HeadShapes() {
  return {{9, 3, 64, 0}, {4, 4, 12, 0}, {6, 2, 20, 0}, {7, 1, 32, 29}, {2, 2, 16, 5}};
}
AttentionShape ShapeOf(const Heads& heads) {
  AttentionShape shape;
  shape.num_heads = heads.h;
  shape.num_kv_heads = heads.g;
  shape.head_dim = heads.c;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(heads.c));
  shape.sliding_window = heads.window;
  return shape;
}

// Every head of every row as the cache keeps it: scale · value, in double.
DVec Kept(const Host& rows, int64_t head_dim, WeightFormat format) {
  DVec kept;
  std::vector<int8_t> q(static_cast<size_t>(head_dim));
  for (int64_t r = 0; r < rows.rows; ++r) {
    for (int64_t begin = 0; begin < rows.cols; begin += head_dim) {
      const float scale = QuantizeKv(format, &rows.v[static_cast<size_t>(r * rows.cols + begin)],
                                     head_dim, q.data());
      for (const int8_t x : q) {
        kept.push_back(double{scale} * (format == WeightFormat::kInt8 ? x : Fp8ToF32(x)));
      }
    }
  }
  return kept;
}

// One sequence in blocks of a wild order, in layer 1 of 2.
struct Sequence {
  static constexpr int64_t kLength = 83;
  std::vector<int32_t> blocks = {4, 9, 1, 0, 7, 2};
  Host q, k, v;

  Sequence(PhiloxStream& rng, const Heads& heads, DType dtype)
      : q(Random(rng, kLength, heads.h * heads.c, dtype)),
        k(Random(rng, kLength, heads.g * heads.c, dtype)),
        v(Random(rng, kLength, heads.g * heads.c, dtype)) {}
  int32_t Slot(int64_t position) const {
    return blocks[static_cast<size_t>(position / kBlockTokens)] * kBlockTokens +
           static_cast<int32_t>(position % kBlockTokens);
  }
  void Write(Lab& lab, KvCache& cache, DType dtype, int64_t begin, int64_t end) const {
    std::vector<int32_t> slots;
    for (int64_t p = begin; p < end; ++p) slots.push_back(Slot(p));
    lab->WriteKv(lab.stream(), cache, 1, lab.Put(k.Rows(begin, end - begin), dtype, 2),
                 lab.Put(v.Rows(begin, end - begin), dtype), lab.Ints(slots));
  }
  Host Attend(Lab& lab, const KvCache& cache, const AttentionShape& shape, DType dtype,
              int64_t begin, int64_t end) const {
    std::vector<int32_t> context;
    for (int64_t p = begin; p < end; ++p) context.push_back(static_cast<int32_t>(p + 1));
    PagedAttention args;
    args.shape = shape;
    args.layer = 1;
    args.q = lab.Put(q.Rows(begin, end - begin), dtype);
    args.out = lab.New(end - begin, q.cols, dtype);
    args.row_sequence_T = lab.Ints(std::vector<int32_t>(context.size(), 0));
    args.context_length_T = lab.Ints(context);
    args.block_tables_SM = lab.Ints(blocks);
    lab->Attention(lab.stream(), cache, args);
    return lab.Get(args.out);
  }
};

std::unique_ptr<KvCache> MakeCache(Lab& lab, const Heads& heads, DType dtype, WeightFormat format) {
  auto cache = lab->AllocateKvCache({2, 10, heads.g, heads.c, dtype, format});
  REQUIRE_OK(cache);
  return *std::move(cache);
}

TEST_CASE("attention over a quantised cache is attention over what it keeps") {
  STRETTO_CONFORMANCE_CASE(c);
  const Heads heads = GENERATE(from_range(HeadShapes()));
  const WeightFormat format = GENERATE(from_range(std::begin(kFormats), std::end(kFormats)));
  INFO(Name(format) << ", heads " << heads.h << "/" << heads.g << ", size " << heads.c
                    << ", window " << heads.window);
  const AttentionShape shape = ShapeOf(heads);
  Sequence s(rng, heads, c.dtype);
  const auto cache = MakeCache(lab, heads, c.dtype, format);
  s.Write(lab, *cache, c.dtype, 0, s.kLength);
  const Host whole = s.Attend(lab, *cache, shape, c.dtype, 0, s.kLength);
  std::vector<std::vector<int64_t>> context(s.kLength);
  for (size_t t = 0; t < context.size(); ++t) {
    for (size_t j = 0; j <= t; ++j) context[t].push_back(static_cast<int64_t>(j));
  }
  const AttentionOracle oracle{heads.h, heads.g, heads.c, shape.scale, heads.window};
  const DVec out =
      oracle.Forward(Doubles(s.q), Kept(s.k, heads.c, format), Kept(s.v, heads.c, format), context);
  Want want(s.kLength, heads.h * heads.c);
  for (size_t i = 0; i < out.size(); ++i) want.Set(0, static_cast<int64_t>(i), out[i], 2.0);
  RequireClose(whole, want, c.dtype, 1e-6, "attention");

  // Chunks of rows, written and read by turns into memory that held something else.
  for (const int64_t chunk : {1, 2, 5, 16, 30}) {
    for (int64_t begin = 0; begin < s.kLength; begin += chunk) {
      const int64_t end = std::min(s.kLength, begin + chunk);
      s.Write(lab, *cache, c.dtype, begin, end);
      RequireSameBits(s.Attend(lab, *cache, shape, c.dtype, begin, end),
                      whole.Rows(begin, end - begin), "chunk of " + std::to_string(chunk));
    }
  }
  // Copied to other blocks, scales included.
  lab->CopyKvBlocks(lab.stream(), *cache, {4, 9}, {5, 3});
  lab->CopyKvBlocks(lab.stream(), *cache, {1}, {8});
  lab->CopyKvBlocks(lab.stream(), *cache, {0}, {6});
  s.blocks = {5, 3, 8, 6, 7, 2};
  RequireSameBits(s.Attend(lab, *cache, shape, c.dtype, 0, s.kLength), whole, "copied blocks");
}

TEST_CASE("a first token's attention is its own value, to the bit") {
  STRETTO_CONFORMANCE_CASE(c);
  const WeightFormat format = GENERATE(from_range(std::begin(kFormats), std::end(kFormats)));
  const Heads heads{6, 2, 20, 0};
  const Sequence s(rng, heads, c.dtype);
  const auto cache = MakeCache(lab, heads, c.dtype, format);
  s.Write(lab, *cache, c.dtype, 0, 1);
  const Host out = s.Attend(lab, *cache, ShapeOf(heads), c.dtype, 0, 1);
  const DVec kept = Kept(s.v, heads.c, format);
  for (int64_t i = 0; i < out.cols; ++i) {
    const int64_t head = i / heads.c / 3;
    const auto value = static_cast<float>(kept[head * heads.c + i % heads.c]);
    REQUIRE(out(0, i) == RoundTo(value, c.dtype));
  }
}

TEST_CASE("threads and instruction sets do not show in a quantised cache") {
  using cpu::InstructionSet;
  INFO("seed " << testing::Seed());
  const WeightFormat format = GENERATE(from_range(std::begin(kFormats), std::end(kFormats)));
  const Heads heads = GENERATE(from_range(HeadShapes()));
  const auto run = [&](const Backend& backend) {
    PhiloxStream rng(testing::Seed());
    Lab lab(backend);
    const Sequence s(rng, heads, DType::kBF16);
    const auto cache = MakeCache(lab, heads, DType::kBF16, format);
    s.Write(lab, *cache, DType::kBF16, 0, s.kLength);
    return s.Attend(lab, *cache, ShapeOf(heads), DType::kBF16, 0, s.kLength);
  };
  const Host plain = run({"cpu", false, 1, InstructionSet::kScalar});
  std::optional<Host> fused;
  for (const InstructionSet set : {InstructionSet::kSse4, InstructionSet::kAvx2,
                                   InstructionSet::kAvx512, InstructionSet::kAvx512Bf16}) {
    if (!cpu::Supported(set)) continue;
    RequireSameBits(run({"cpu", false, 3, set}), plain, "not fused");
    if (set == InstructionSet::kSse4) continue;
    const Host with = run({"cpu", true, 2, set});
    if (fused) RequireSameBits(with, *fused, "fused");
    fused = with;
  }
}

TEST_CASE("what is not finite shows in its own head, zeros are zeros") {
  STRETTO_CONFORMANCE_CASE(c);
  const WeightFormat format = GENERATE(from_range(std::begin(kFormats), std::end(kFormats)));
  const float bad =
      GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN());
  const Heads heads{4, 2, 16, 0};
  Sequence s(rng, heads, c.dtype);
  s.v(3, 20) = bad;  // of the second head
  std::fill(s.v.v.begin(), s.v.v.begin() + heads.g * heads.c, 0.0f);
  const auto cache = MakeCache(lab, heads, c.dtype, format);
  s.Write(lab, *cache, c.dtype, 0, s.kLength);
  const Host out = s.Attend(lab, *cache, ShapeOf(heads), c.dtype, 0, s.kLength);
  for (int64_t t = 0; t < out.rows; ++t) {
    for (int64_t i = 0; i < out.cols; ++i) {
      INFO("token " << t << ", column " << i);
      REQUIRE(std::isfinite(out(t, i)) == (t < 3 || i < 2 * heads.c));
      if (t == 0) REQUIRE(out(t, i) == 0.0f);
    }
  }
}

TEST_CASE("sizes, profiles and names of quantised caches") {
  KvCacheShape shape{30, 7, 3, 64, DType::kBF16};
  CHECK(shape.block_bytes() == 30 * 3 * 16 * 2 * 64 * 2);
  for (const WeightFormat format : kFormats) {
    shape.format = format;
    CHECK(shape.block_bytes() == 30 * 3 * 16 * 2 * (64 + 4));
    Lab lab({"cpu", true, 1, {}});
    auto cache = lab->AllocateKvCache(shape);
    REQUIRE_OK(cache);
    CHECK(static_cast<int64_t>((*cache)->bytes()) == 7 * shape.block_bytes());
    CHECK(ParseKvFormat(Name(format)).value() == format);
  }
  CHECK(ParseKvFormat("bf16").value() == WeightFormat::kPlain);
  CHECK(ParseKvFormat("int4").status().message() == "KV dtype 'int4': expected bf16, int8 or fp8");
  NumericProfile profile{"cpu", "fma", DType::kBF16, 1};
  profile.kv = WeightFormat::kFp8;
  CHECK(profile.ToString() == "cpu/fma/bf16+kv-fp8/1");
  profile.weights = WeightFormat::kInt8;
  CHECK(profile.ToString() == "cpu/fma/bf16+int8+kv-fp8/1");
}
}  // namespace
}  // namespace stretto::engine::conformance
