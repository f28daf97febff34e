// The vocabulary in leaves: against the operations over a whole vocabulary, on every backend, and
// to the bit where the order of device.h fixes it.
#include <algorithm>

#include "engine/device/conformance_support.h"

namespace stretto::engine::conformance {
namespace {
Host Joined(const std::vector<Host>& leaves) {
  Host sum = leaves[0];
  for (size_t i = 1; i < leaves.size(); ++i) {
    for (size_t j = 0; j < sum.v.size(); ++j) sum.v[j] += leaves[i].v[j];
  }
  return sum;
}

TEST_CASE("log-probs over a vocabulary in leaves are those over a whole one") {
  const Backend backend = GENERATE(from_range(Backends()));
  const int64_t n = GENERATE(3, 37, 1000);
  const float temperature = GENERATE(1.0f, 0.7f);
  INFO(backend.ToString() << ", n " << n << ", seed " << testing::Seed());
  Lab lab(backend);
  PhiloxStream rng(testing::Seed(), 7);
  const int64_t rows = 4, num_leaves = 3;
  Host logits = Random(rng, rows, n, DType::kF32, 4.0);
  logits(0, 0) = -400.0f;  // a token whose probability is 0
  std::vector<int32_t> targets;
  for (int64_t t = 0; t < rows; ++t) targets.push_back(static_cast<int32_t>(1 + rng.Below(n - 1)));
  const Tensor t_logits = lab.Put(logits, DType::kF32, 3), t_targets = lab.Ints(targets);

  Host max(1, rows, -INFINITY);
  const Tensor t_max = lab.New(1, rows, DType::kF32);
  const auto leaf = [&](const Tensor& t, int64_t i) {
    return t.Cols(i * n / num_leaves, (i + 1) * n / num_leaves - i * n / num_leaves);
  };
  for (int64_t i = 0; i < num_leaves; ++i) {
    lab->VocabularyMax(lab.stream(), t_max, leaf(t_logits, i), temperature);
    const Host mine = lab.Get(t_max);
    for (int64_t t = 0; t < rows; ++t) max(0, t) = std::max(max(0, t), mine(0, t));
  }
  lab->VocabularyMax(lab.stream(), t_max, t_logits, temperature);
  RequireSameBits(lab.Get(t_max), max, "maximum");
  std::vector<Host> sums;
  const Tensor t_sums = lab.New(rows, 3, DType::kF32);
  for (int64_t i = 0; i < num_leaves; ++i) {
    lab->VocabularySums(lab.stream(), t_sums, leaf(t_logits, i), t_max, t_targets,
                        i * n / num_leaves, temperature);
    sums.push_back(lab.Get(t_sums));
  }
  lab.Set(t_sums, Joined(sums));

  const Tensor lp = lab.New(1, rows, DType::kF32), h = lab.New(1, rows, DType::kF32);
  const Tensor want_lp = lab.New(1, rows, DType::kF32), want_h = lab.New(1, rows, DType::kF32);
  lab->VocabularyLogProbs(lab.stream(), lp, h, t_sums);
  lab->LogProbs(lab.stream(), want_lp, want_h, t_logits, t_targets, temperature);
  const auto close = [](const Host& got, const Host& want, double size, double error,
                        const char* what) {
    Want w(want.rows, want.cols);
    for (int64_t r = 0; r < want.rows; ++r) {
      for (int64_t c = 0; c < want.cols; ++c) w.Set(r, c, want(r, c), size);
    }
    RequireClose(got, w, DType::kF32, error, what);
  };
  close(lab.Get(lp), lab.Get(want_lp), 20.0, 4e-7, "log-prob");
  close(lab.Get(h), lab.Get(want_h), 8.0, 1e-6, "entropy");
  const Tensor alone = lab.New(1, rows, DType::kF32);
  lab->VocabularyLogProbs(lab.stream(), alone, Tensor{}, t_sums);
  RequireSameBits(lab.Get(alone), lab.Get(lp), "log-probs with and without entropy");

  const Tensor d_lp = lab.Put(Random(rng, 1, rows), DType::kF32);
  const Tensor d_h = lab.Put(Random(rng, 1, rows), DType::kF32);
  for (const Tensor& entropy : {d_h, Tensor{}}) {
    const Tensor whole = lab.Put(logits, DType::kF32, 1), one = lab.Put(logits, DType::kF32);
    const Tensor parts = lab.Put(logits, DType::kF32, 5);
    lab->LogProbsBackward(lab.stream(),
                          {whole, whole, d_lp, entropy, t_targets, temperature, Tensor{}});
    lab->VocabularyBackward(lab.stream(),
                            {one, t_max, t_sums, t_targets, d_lp, entropy, 0, temperature});
    for (int64_t i = 0; i < num_leaves; ++i) {
      lab->VocabularyBackward(lab.stream(), {leaf(parts, i), t_max, t_sums, t_targets, d_lp,
                                             entropy, i * n / num_leaves, temperature});
    }
    RequireSameBits(lab.Get(parts), lab.Get(one), "gradient in leaves and in one piece");
    close(lab.Get(one), lab.Get(whole), 1.0, 4e-6, "gradient of logits");
  }
}

// A leaf's sums don't depend on who else is there: rows and threads.
TEST_CASE("sums of a leaf have the same bits on every instruction set of one arithmetic") {
  PhiloxStream rng(testing::Seed(), 8);
  const Host logits = Random(rng, 5, 333, DType::kF32, 5.0);
  const std::vector<int32_t> targets = {10, 5, 400, 99, 332};
  for (const bool fma : {true, false}) {
    std::optional<Host> first;
    for (const auto set : {cpu::InstructionSet::kScalar, cpu::InstructionSet::kSse4,
                           cpu::InstructionSet::kAvx2, cpu::InstructionSet::kAvx512}) {
      if (!cpu::Supported(set) || cpu::SelectKernels(set, fma).fma != fma) continue;
      Lab lab({"cpu", fma, 3, set});
      const Tensor t_logits = lab.Put(logits, DType::kF32), sums = lab.New(5, 3, DType::kF32);
      const Tensor max = lab.New(1, 5, DType::kF32);
      lab->VocabularyMax(lab.stream(), max, t_logits, 0.9f);
      lab->VocabularySums(lab.stream(), sums, t_logits, max, lab.Ints(targets), 0, 0.9f);
      if (!first) first = lab.Get(sums);
      RequireSameBits(lab.Get(sums), *first, "sums");
      CHECK(lab.Get(sums)(2, 2) == 0.0f);  // its target is elsewhere
    }
  }
}
}  // namespace
}  // namespace stretto::engine::conformance
