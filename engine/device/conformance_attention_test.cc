// Attention, paged and packed, and its gradient against a double-precision oracle on every backend
// and element type.
#include "engine/device/conformance_support.h"

namespace stretto::engine::conformance {
namespace {
struct Heads {
  int64_t h, g, c, window;
};
// Group sizes 1, 3 and 7, head sizes that fill vectors and that don't.
std::vector<Heads> HeadShapes() {
  return {{3, 1, 64, 0}, {4, 4, 8, 0}, {6, 2, 20, 0}, {7, 1, 16, 5}, {2, 2, 16, 21}};
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
AttentionOracle OracleOf(const AttentionShape& s) {
  return {s.num_heads, s.num_kv_heads, s.head_dim, s.scale, s.sliding_window};
}

// A prompt with two completions, one of which has a child; and a sequence by itself.
SegmentTable Segments() {
  SegmentTable table;
  table.row_begin = {0, 19, 23, 41, 52};
  table.num_rows = {19, 4, 18, 11, 9};
  table.parent = {-1, 0, 0, 2, -1};
  return table;
}
constexpr int64_t kRows = 61;

TEST_CASE("packed attention and its gradient") {
  STRETTO_CONFORMANCE_CASE(c);
  const Heads heads = GENERATE(from_range(HeadShapes()));
  INFO("heads " << heads.h << "/" << heads.g << ", size " << heads.c << ", window "
                << heads.window);
  const SegmentTable table = Segments();
  const AttentionShape shape = ShapeOf(heads);
  const AttentionOracle oracle = OracleOf(shape);
  const auto context = ContextRows(table, kRows);
  const Host q = Random(rng, kRows, heads.h * heads.c, c.dtype);
  const Host k = Random(rng, kRows, heads.g * heads.c, c.dtype);
  const Host v = Random(rng, kRows, heads.g * heads.c, c.dtype);
  PackedAttention args;
  args.shape = shape;
  args.segments = &table;
  args.q = lab.Put(q, c.dtype, 3);
  args.k = lab.Put(k, c.dtype, 1);
  args.v = lab.Put(v, c.dtype);
  args.out = lab.New(kRows, heads.h * heads.c, c.dtype);
  lab->Attention(lab.stream(), args);
  const DVec out = oracle.Forward(Doubles(q), Doubles(k), Doubles(v), context);
  Want want(kRows, heads.h * heads.c);
  for (size_t i = 0; i < out.size(); ++i) want.Set(0, static_cast<int64_t>(i), out[i], 2.0);
  RequireClose(lab.Get(args.out), want, c.dtype, 1e-6, "attention");

  // Gradients by differences in random directions: one number for each input.
  PackedAttentionBackward backward;
  backward.forward = args;
  const Host d_out = Random(rng, kRows, heads.h * heads.c);
  backward.d_out = lab.Put(d_out, DType::kF32);
  backward.d_q = lab.New(kRows, heads.h * heads.c, DType::kF32, 2);
  backward.d_k = lab.New(kRows, heads.g * heads.c, DType::kF32);
  backward.d_v = lab.New(kRows, heads.g * heads.c, DType::kF32);
  lab->AttentionBackward(lab.stream(), backward);
  const DVec inputs[3] = {Doubles(q), Doubles(k), Doubles(v)};
  const Host grads[3] = {lab.Get(backward.d_q), lab.Get(backward.d_k), lab.Get(backward.d_v)};
  const auto loss = [&](int which, const DVec& x) {
    const DVec y = oracle.Forward(which == 0 ? x : inputs[0], which == 1 ? x : inputs[1],
                                  which == 2 ? x : inputs[2], context);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * d_out.v[i];
    return sum;
  };
  // The gradient is taken at `out` rounded to its type where a backend uses it.
  const double error = c.dtype == DType::kBF16 ? 2e-2 : 2e-5;
  for (int which = 0; which < 3; ++which) {
    for (int trial = 0; trial < 6; ++trial) {
      // Trials 0 to 3 look at one row each, the others at all.
      const int64_t cols = grads[which].cols, row = static_cast<int64_t>(rng.Below(kRows));
      DVec up = inputs[which], down = up;
      double want_slope = 0, size = 1.0;
      for (size_t i = 0; i < up.size(); ++i) {
        if (trial < 4 && static_cast<int64_t>(i) / cols != row) continue;
        const double direction = rng.NextGaussian();
        up[i] += 1e-5 * direction;
        down[i] -= 1e-5 * direction;
        want_slope += grads[which].v[i] * direction;
        size += std::abs(grads[which].v[i] * direction);
      }
      const double slope = (loss(which, up) - loss(which, down)) / 2e-5;
      INFO("gradient of input " << which << ", trial " << trial << ", row " << row);
      REQUIRE(std::abs(slope - want_slope) <= error * size);
    }
  }
}

TEST_CASE("paged attention over scattered blocks, copies and skipped slots") {
  STRETTO_CONFORMANCE_CASE(c);
  const Heads heads = GENERATE(from_range(HeadShapes()));
  INFO("heads " << heads.h << "/" << heads.g << ", size " << heads.c << ", window "
                << heads.window);
  const AttentionShape shape = ShapeOf(heads);
  const AttentionOracle oracle = OracleOf(shape);
  // Two sequences of 37 and 18 tokens in blocks taken in a wild order, in layer 1 of 2.
  const std::vector<std::vector<int32_t>> blocks = {{5, 0, 3}, {2, 6, 0}};
  const int64_t lengths[2] = {37, 18}, total = 55;
  const Host q = Random(rng, total, heads.h * heads.c, c.dtype);
  const Host k = Random(rng, total + 1, heads.g * heads.c, c.dtype);
  const Host v = Random(rng, total + 1, heads.g * heads.c, c.dtype);
  std::vector<int32_t> slots, sequence, length, table;
  std::vector<std::vector<int64_t>> context;
  for (int32_t s = 0; s < 2; ++s) {
    std::vector<int64_t> seen;
    for (int64_t p = 0; p < lengths[s]; ++p) {
      seen.push_back(static_cast<int64_t>(slots.size()));
      slots.push_back(blocks[s][p / kBlockTokens] * kBlockTokens +
                      static_cast<int32_t>(p % kBlockTokens));
      sequence.push_back(s);
      length.push_back(static_cast<int32_t>(p + 1));
      context.push_back(seen);
    }
    table.insert(table.end(), blocks[s].begin(), blocks[s].end());
  }
  slots.push_back(-1);  // a row that is not stored
  auto cache = lab->AllocateKvCache({2, 9, heads.g, heads.c, c.dtype});
  REQUIRE_OK(cache);
  REQUIRE((*cache)->num_blocks() == 9);
  lab->WriteKv(lab.stream(), **cache, 1, lab.Put(k, c.dtype, 2), lab.Put(v, c.dtype),
               lab.Ints(slots));
  PagedAttention args;
  args.shape = shape;
  args.layer = 1;
  args.q = lab.Put(q, c.dtype);
  args.out = lab.New(total, heads.h * heads.c, c.dtype, 4);
  args.row_sequence_T = lab.Ints(sequence);
  args.context_length_T = lab.Ints(length);
  args.block_tables_SM = lab.Ints(table, 2);
  lab->Attention(lab.stream(), **cache, args);
  const DVec out = oracle.Forward(Doubles(q), Doubles(k), Doubles(v), context);
  Want want(total, heads.h * heads.c);
  for (size_t i = 0; i < out.size(); ++i) want.Set(0, static_cast<int64_t>(i), out[i], 2.0);
  const Host got = lab.Get(args.out);
  RequireClose(got, want, c.dtype, 1e-6, "paged attention");

  // Sequence 0 moves to other blocks: the same bits.
  lab->CopyKvBlocks(lab.stream(), **cache, {5, 0, 3}, {7, 1, 8});
  args.block_tables_SM = lab.Ints({7, 1, 8, 2, 6, 0}, 2);
  lab->Attention(lab.stream(), **cache, args);
  RequireSameBits(lab.Get(args.out), got, "attention over copied blocks");
}
}  // namespace
}  // namespace stretto::engine::conformance
