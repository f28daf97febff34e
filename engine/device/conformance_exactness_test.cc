// The promise of device.h as properties on random inputs: a row's result has the same bits whatever
// rows are beside it, however rows are cut into calls, for every number of threads and every
// instruction set of one arithmetic, through views with any stride, paged or packed.
#include <algorithm>
#include <numeric>

#include "engine/device/background.h"
#include "engine/device/conformance_support.h"

namespace stretto::engine::conformance {
namespace {
std::vector<int64_t> RandomOrder(PhiloxStream& rng, int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.Below(i)]);
  return order;
}
Host PickRows(const Host& h, const std::vector<int64_t>& rows) {
  Host picked(static_cast<int64_t>(rows.size()), h.cols);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(h.v.begin() + rows[i] * h.cols, h.cols,
                picked.v.begin() + static_cast<int64_t>(i) * h.cols);
  }
  return picked;
}

// Runs `op` (rows in, rows out, each by itself) on all rows, then on batches of many sizes drawn in
// a random order, and requires every row's bits to be the same.
void RequireRowsAlone(PhiloxStream& rng, const Host& x, const std::string& what,
                      const std::function<Host(const Host&, const std::vector<int64_t>&)>& op) {
  std::vector<int64_t> all(static_cast<size_t>(x.rows));
  std::iota(all.begin(), all.end(), 0);
  const Host whole = op(x, all);
  for (int64_t size : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 25, 31, 48, 97, 130, 200}) {
    std::vector<int64_t> order = RandomOrder(rng, x.rows);
    order.resize(static_cast<size_t>(std::min(size, x.rows)));
    RequireSameBits(op(PickRows(x, order), order), PickRows(whole, order),
                    what + ", batch of " + std::to_string(size));
  }
}

TEST_CASE("rows of products do not depend on the batch") {
  STRETTO_CONFORMANCE_CASE(c);
  const auto sizes =
      GENERATE(std::pair<int64_t, int64_t>{75, 700}, std::pair<int64_t, int64_t>{200, 64});
  const int64_t n = sizes.first, k = sizes.second;
  const Host x = Random(rng, 200, k, c.dtype), w = Random(rng, n, k, c.dtype);
  auto packed = lab->Pack(lab.stream(), {lab.Put(w, c.dtype)});
  REQUIRE_OK(packed);
  for (DType out_type : {DType::kF32, c.dtype}) {
    RequireRowsAlone(rng, x, "linear", [&](const Host& rows, const std::vector<int64_t>&) {
      const int64_t padding = static_cast<int64_t>(rng.Below(4));
      Tensor y = lab.New(rows.rows, n, out_type, padding);
      lab->Linear(lab.stream(), y, lab.Put(rows, c.dtype, padding), **packed, Tensor{});
      return lab.Get(y);
    });
  }
  const Host d_y = Random(rng, 200, n);
  Tensor tw = lab.Put(w, c.dtype);
  RequireRowsAlone(rng, d_y, "input gradient", [&](const Host& rows, const std::vector<int64_t>&) {
    Tensor d_x = lab.New(rows.rows, k, DType::kF32);
    lab->LinearBackwardInput(lab.stream(), d_x, lab.Put(rows, DType::kF32), tw, false);
    return lab.Get(d_x);
  });
}

TEST_CASE("a device that has lent its threads gives the same bits") {
  STRETTO_CONFORMANCE_CASE(c);
  const Host x = Random(rng, 40, 64, c.dtype), w = Random(rng, 200, 64, c.dtype);
  auto packed = lab->Pack(lab.stream(), {lab.Put(w, c.dtype)});
  REQUIRE_OK(packed);
  const auto product = [&] {
    Tensor y = lab.New(x.rows, w.rows, DType::kF32);
    lab->Linear(lab.stream(), y, lab.Put(x, c.dtype), **packed, Tensor{});
    return lab.Get(y);
  };
  const Host expected = product();
  {
    const std::shared_ptr<void> one = BorrowThread(lab.device()), two = BorrowThread(lab.device());
    RequireSameBits(product(), expected, "while two are lent");
  }
  RequireSameBits(product(), expected, "when they are back");
}

TEST_CASE("rows of other operations do not depend on the batch") {
  STRETTO_CONFORMANCE_CASE(c);
  const int64_t d = 72;
  const Host x = Random(rng, 200, d, c.dtype), w = Random(rng, 1, d, c.dtype);
  Tensor tw = lab.Put(w, c.dtype);
  RequireRowsAlone(rng, x, "rms norm", [&](const Host& rows, const std::vector<int64_t>&) {
    Tensor y = lab.New(rows.rows, d, c.dtype);
    lab->RmsNorm(lab.stream(), y, lab.Put(rows, c.dtype), tw, 1e-5f, 1);
    return lab.Get(y);
  });
  RequireRowsAlone(rng, x, "swiglu", [&](const Host& rows, const std::vector<int64_t>&) {
    Tensor y = lab.New(rows.rows, d / 2, c.dtype);
    lab->SwiGlu(lab.stream(), y, lab.Put(rows, c.dtype));
    return lab.Get(y);
  });
  const Host logits = Random(rng, 200, 131, DType::kF32, 3.0);
  RequireRowsAlone(
      rng, logits, "log-probs", [&](const Host& rows, const std::vector<int64_t>& ids) {
        std::vector<int32_t> targets;
        for (int64_t id : ids) targets.push_back(static_cast<int32_t>(id % 131));
        Tensor lp = lab.New(1, rows.rows, DType::kF32), h = lab.New(1, rows.rows, DType::kF32);
        lab->LogProbs(lab.stream(), lp, h, lab.Put(rows, DType::kF32), lab.Ints(targets), 0.9f);
        Host both(rows.rows, 2);
        for (int64_t i = 0; i < rows.rows; ++i) {
          both(i, 0) = lab.Get(lp).v[static_cast<size_t>(i)];
          both(i, 1) = lab.Get(h).v[static_cast<size_t>(i)];
        }
        return both;
      });
}

// A sum whose order depends on the number of rows: what a careless product does. The comparison
// above must notice it, or it proves nothing.
TEST_CASE("the comparison notices a sum that depends on the batch") {
  INFO("seed " << testing::Seed());
  PhiloxStream rng(testing::Seed());
  const Host x = Random(rng, 40, 64);
  const auto sum = [](const Host& rows) {
    Host y(rows.rows, 1);
    const int64_t lanes = rows.rows >= 8 ? 4 : 1;
    for (int64_t r = 0; r < rows.rows; ++r) {
      std::vector<float> partial(static_cast<size_t>(lanes), 0.0f);
      for (int64_t i = 0; i < rows.cols; ++i) partial[i % lanes] += rows(r, i);
      for (float p : partial) y(r, 0) += p;
    }
    return y;
  };
  const Host whole = sum(x);
  int64_t differences = 0;
  for (int64_t r = 0; r < x.rows; ++r) {
    differences += FirstDifference(sum(x.Rows(r, 1)), whole.Rows(r, 1)) >= 0 ? 1 : 0;
  }
  REQUIRE(differences > 0);
}

struct Heads {
  int64_t h, g, c, window;
};
AttentionShape ShapeOf(const Heads& heads) {
  AttentionShape shape;
  shape.num_heads = heads.h;
  shape.num_kv_heads = heads.g;
  shape.head_dim = heads.c;
  shape.scale = 0.2f;
  shape.sliding_window = heads.window;
  return shape;
}

// Rows [begin, end) of one sequence of a paged cache, in one call.
Host Paged(Lab& lab, const KvCache& cache, const AttentionShape& shape, const Host& q, DType dtype,
           const Tensor& table, int64_t begin, int64_t end) {
  std::vector<int32_t> context;
  for (int64_t p = begin; p < end; ++p) context.push_back(static_cast<int32_t>(p + 1));
  PagedAttention args;
  args.shape = shape;
  args.q = lab.Put(q.Rows(begin, end - begin), dtype);
  args.out = lab.New(end - begin, q.cols, dtype);
  args.row_sequence_T = lab.Ints(std::vector<int32_t>(context.size(), 0));
  args.context_length_T = lab.Ints(context);
  args.block_tables_SM = table;
  lab->Attention(lab.stream(), cache, args);
  return lab.Get(args.out);
}

TEST_CASE("attention has the same bits whole, in chunks, token by token, paged and packed") {
  STRETTO_CONFORMANCE_CASE(c);
  const Heads heads =
      GENERATE(Heads{9, 3, 64, 0}, Heads{4, 4, 12, 0}, Heads{7, 1, 32, 29}, Heads{2, 1, 16, 16});
  INFO("heads " << heads.h << "/" << heads.g << ", size " << heads.c << ", window "
                << heads.window);
  const AttentionShape shape = ShapeOf(heads);
  const int64_t length = 83;
  const Host q = Random(rng, length, heads.h * heads.c, c.dtype);
  const Host k = Random(rng, length, heads.g * heads.c, c.dtype);
  const Host v = Random(rng, length, heads.g * heads.c, c.dtype);
  auto cache = lab->AllocateKvCache({1, 10, heads.g, heads.c, c.dtype});
  REQUIRE_OK(cache);
  const std::vector<int32_t> blocks = {4, 9, 1, 0, 7, 2};
  std::vector<int32_t> slots;
  for (int64_t p = 0; p < length; ++p) {
    slots.push_back(blocks[p / kBlockTokens] * kBlockTokens +
                    static_cast<int32_t>(p % kBlockTokens));
  }
  lab->WriteKv(lab.stream(), **cache, 0, lab.Put(k, c.dtype), lab.Put(v, c.dtype), lab.Ints(slots));
  const Tensor table = lab.Ints(blocks);
  const Host whole = Paged(lab, **cache, shape, q, c.dtype, table, 0, length);
  for (int64_t chunk : {1, 2, 5, 16, 30}) {
    for (int64_t begin = 0; begin < length; begin += chunk) {
      const int64_t end = std::min(length, begin + chunk);
      RequireSameBits(Paged(lab, **cache, shape, q, c.dtype, table, begin, end),
                      whole.Rows(begin, end - begin), "chunk of " + std::to_string(chunk));
    }
  }
  // Packed: as one segment, and cut into a chain of segments at odd places.
  for (const std::vector<int32_t>& cuts :
       {std::vector<int32_t>{0, 83}, std::vector<int32_t>{0, 21, 22, 48, 83}}) {
    SegmentTable segments;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      segments.row_begin.push_back(cuts[i]);
      segments.num_rows.push_back(cuts[i + 1] - cuts[i]);
      segments.parent.push_back(static_cast<int32_t>(i) - 1);
    }
    PackedAttention args;
    args.shape = shape;
    args.segments = &segments;
    args.q = lab.Put(q, c.dtype);
    args.k = lab.Put(k, c.dtype);
    args.v = lab.Put(v, c.dtype);
    args.out = lab.New(length, q.cols, c.dtype);
    lab->Attention(lab.stream(), args);
    RequireSameBits(lab.Get(args.out), whole, "packed");
  }
}

TEST_CASE("a shared prompt gives the bits of a prompt for each") {
  STRETTO_CONFORMANCE_CASE(c);
  const AttentionShape shape = ShapeOf({6, 2, 24, 0});
  const int64_t prompt = 27, completion = 14, copies = 3;
  // Shared: [prompt, completion 0, 1, 2]. Unshared: [prompt, completion 0, prompt, completion 1,
  // …].
  const int64_t rows = prompt + copies * completion;
  std::vector<int64_t> unshared_rows;
  SegmentTable shared, unshared;
  shared.row_begin = {0};
  shared.num_rows = {static_cast<int32_t>(prompt)};
  shared.parent = {-1};
  for (int64_t i = 0; i < copies; ++i) {
    const int64_t begin = prompt + i * completion;
    shared.row_begin.push_back(static_cast<int32_t>(begin));
    shared.num_rows.push_back(static_cast<int32_t>(completion));
    shared.parent.push_back(0);
    unshared.row_begin.push_back(static_cast<int32_t>(unshared_rows.size()));
    unshared.num_rows.push_back(static_cast<int32_t>(prompt + completion));
    unshared.parent.push_back(-1);
    for (int64_t r = 0; r < prompt; ++r) unshared_rows.push_back(r);
    for (int64_t r = 0; r < completion; ++r) unshared_rows.push_back(begin + r);
  }
  const Host q = Random(rng, rows, 6 * 24, c.dtype), k = Random(rng, rows, 2 * 24, c.dtype);
  const Host v = Random(rng, rows, 2 * 24, c.dtype);
  const auto attend = [&](const SegmentTable& table, const std::vector<int64_t>& order) {
    PackedAttention args;
    args.shape = shape;
    args.segments = &table;
    args.q = lab.Put(PickRows(q, order), c.dtype);
    args.k = lab.Put(PickRows(k, order), c.dtype);
    args.v = lab.Put(PickRows(v, order), c.dtype);
    args.out = lab.New(static_cast<int64_t>(order.size()), q.cols, c.dtype);
    lab->Attention(lab.stream(), args);
    return lab.Get(args.out);
  };
  std::vector<int64_t> in_order(static_cast<size_t>(rows));
  std::iota(in_order.begin(), in_order.end(), 0);
  RequireSameBits(attend(unshared, unshared_rows),
                  PickRows(attend(shared, in_order), unshared_rows), "shared and unshared prompts");
}
}  // namespace
}  // namespace stretto::engine::conformance
