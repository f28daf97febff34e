// A token's log-prob is a pure function of its prefix and the weights: equal bits from the paged
// and the packed face, on random models and random batches; and what memory options must not
// change.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <set>

#include "base/testing.h"
#include "engine/model/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)
constexpr int64_t kLength = 48;

struct Outcome {
  std::vector<float> logprobs, entropy;
  HostParameters gradients;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Weights of the targets that differ from one another, reproducible from their index.
float TargetWeight(size_t n, uint64_t salt) {
  return static_cast<float>(PhiloxStream(salt, n).NextGaussian());
}

Outcome Run(TestModel& model, const PackedBatch& batch, const PackedPassOptions& base) {
  PackedPassOptions options = base;
  options.max_rows = batch.num_rows() + 5;
  options.max_targets = batch.num_targets() + 3;
  auto pass = PackedPass::Create(*model.transformer, options);
  REQUIRE_OK(pass);
  Outcome out;
  out.logprobs.resize(batch.num_targets());
  out.entropy.resize(batch.num_targets());
  (*pass)->Forward(*model.stream, *model.weights, batch, absl::MakeSpan(out.logprobs),
                   absl::MakeSpan(out.entropy));
  if (!options.train) return out;
  std::vector<float> d_logprobs(batch.num_targets()), d_entropy(batch.num_targets());
  for (size_t n = 0; n < d_logprobs.size(); ++n) {
    d_logprobs[n] = TargetWeight(n, 1);
    d_entropy[n] = TargetWeight(n, 2);
  }
  model.ZeroGradients();
  (*pass)->Backward(*model.stream, *model.weights, model.layout, model.flat, model.gradients,
                    d_logprobs, d_entropy);
  out.gradients = model.Gradients();
  return out;
}

struct Case {
  ModelConfig config;
  HostParameters parameters;
  std::vector<TestGroup> groups;

  explicit Case(PhiloxStream& random)
      : config(RandomConfig(random)),
        parameters(RandomParameters(config, random)),
        groups(RandomGroups(config, kLength, random)) {}
};

TEST_CASE("paged inference and packed training give the same log-prob bits") {
  PhiloxStream random(stretto::testing::Seed(), 1);
  for (int round = 0; round < 24; ++round) {
    const Case test(random);
    const std::string backend = round % 4 == 3 ? "reference" : "cpu";
    const DType dtype = round % 3 == 2 ? DType::kF32 : DType::kBF16;
    INFO("seed " << stretto::testing::Seed() << " round " << round << " " << backend << " "
                 << Name(dtype) << " " << Name(test.config.architecture));
    const auto device = MakeDevice(backend, 1 + round % 3);
    TestModel model(*device, test.config, dtype, kLength, test.parameters);
    PackedPassOptions options;
    options.temperature = round % 2 == 0 ? 1.0f : 0.7f;
    options.train = false;
    const auto shared = Run(model, Pack(test.groups, true), options);
    const auto unshared = Run(model, Pack(test.groups, false), options);
    CHECK(SameBits(shared.logprobs, unshared.logprobs));
    CHECK(SameBits(shared.entropy, unshared.entropy));
    for (int order = 0; order < 3; ++order) {
      CHECK(SameBits(PagedLogProbs(model, test.groups, options.temperature, random),
                     shared.logprobs));
    }
  }
}

TEST_CASE("loaded weights compute what flat weights compute") {
  PhiloxStream random(stretto::testing::Seed(), 2);
  for (int round = 0; round < 4; ++round) {
    const Case test(random);
    const auto device = MakeDevice(round % 2 == 0 ? "cpu" : "reference");
    TestModel model(*device, test.config, DType::kBF16, kLength, test.parameters);
    PackedPassOptions options;
    options.train = false;
    const auto flat = Run(model, Pack(test.groups, true), options);
    auto loaded = ModelWeights::Load(*device, *model.stream, test.config, DType::kBF16,
                                     Reader(test.parameters));
    REQUIRE_OK(loaded);
    model.weights = *std::move(loaded);
    CHECK(SameBits(Run(model, Pack(test.groups, true), options).logprobs, flat.logprobs));
  }
}

TEST_CASE("quantised weights give a token the same bits in any company") {
  PhiloxStream random(stretto::testing::Seed(), 5);
  for (int round = 0; round < 9; ++round) {
    const Case test(random);
    const auto device = MakeDevice(round % 3 == 2 ? "reference" : "cpu", 1 + round % 3);
    TestModel model(*device, test.config, DType::kBF16, kLength, test.parameters);
    PackedPassOptions options;
    options.train = false;
    const auto plain = Run(model, Pack(test.groups, true), options).logprobs;
    const WeightFormat format =
        std::vector{WeightFormat::kInt8, WeightFormat::kInt4, WeightFormat::kFp8}[round / 3];
    INFO("seed " << stretto::testing::Seed() << " round " << round << " " << Name(format));
    const size_t plain_bytes = model.weights->lm_head->bytes();
    auto loaded = ModelWeights::Load(*device, *model.stream, test.config, DType::kBF16,
                                     Reader(test.parameters), {.format = format});
    REQUIRE_OK(loaded);
    model.weights = *std::move(loaded);
    CHECK(model.weights->format() == format);
    CHECK(model.weights->lm_head->format() ==
          (format == WeightFormat::kInt4 ? WeightFormat::kInt8 : format));
    if (round % 3 != 2) CHECK(model.weights->lm_head->bytes() < plain_bytes);
    const auto packed = Run(model, Pack(test.groups, true), options).logprobs;
    CHECK(SameBits(Run(model, Pack(test.groups, false), options).logprobs, packed));
    CHECK(SameBits(PagedLogProbs(model, test.groups, 1.0f, random), packed));
    CHECK_FALSE(SameBits(packed, plain));  // it is another model, if a near one
    double gap = 0;
    for (size_t i = 0; i < plain.size(); ++i) gap += std::abs(packed[i] - plain[i]);
    CHECK(gap / static_cast<double>(plain.size()) < 0.5);
  }
}

TEST_CASE("a version lays out the matrices that changed and shares the others") {
  PhiloxStream random(stretto::testing::Seed(), 6);
  for (const WeightFormat format :
       {WeightFormat::kPlain, WeightFormat::kInt8, WeightFormat::kInt4}) {
    const Case test(random);
    INFO("seed " << stretto::testing::Seed() << " " << Name(format));
    const auto device = MakeDevice("cpu");
    TestModel model(*device, test.config, DType::kBF16, kLength, test.parameters);
    const auto load = [&](const HostParameters& parameters, const WeightsOptions& options) {
      auto loaded = ModelWeights::Load(*device, *model.stream, test.config, DType::kBF16,
                                       Reader(parameters), options);
      REQUIRE_OK(loaded);
      return *std::move(loaded);
    };
    HostParameters next = test.parameters;
    const std::set<std::string> names = {"model.layers.0.self_attn.k_proj.weight",
                                         "model.norm.weight"};
    for (const std::string& name : names) {
      for (float& x : next.at(name)) x *= 1.5f;
    }
    const auto first = load(test.parameters, {.format = format});
    const auto shared =
        load(next, {.format = format, .base = first.get(), .changed = [&](const auto& p) {
                      return names.contains(p.spec.name);
                    }});
    CHECK(shared->layers[0].qkv != first->layers[0].qkv);
    CHECK(shared->layers[0].o == first->layers[0].o);
    CHECK(shared->layers.back().down == first->layers.back().down);
    CHECK(shared->lm_head == first->lm_head);
    PackedPassOptions options;
    options.train = false;
    model.weights = load(next, {.format = format});
    const auto want = Run(model, Pack(test.groups, true), options).logprobs;
    model.weights =
        load(next, {.format = format, .base = first.get(), .changed = [&](const auto& p) {
                      return names.contains(p.spec.name);
                    }});
    CHECK(SameBits(Run(model, Pack(test.groups, true), options).logprobs, want));
    // Another format shares nothing.
    const WeightFormat other =
        format == WeightFormat::kPlain ? WeightFormat::kFp8 : WeightFormat::kPlain;
    const auto unlike =
        load(test.parameters,
             {.format = other, .base = first.get(), .changed = [](const auto&) { return false; }});
    CHECK(unlike->layers[0].o != first->layers[0].o);
    CHECK(unlike->layers[0].o->format() == other);
  }
}

TEST_CASE("keeping, recomputing and chunking change no bit of the gradients") {
  PhiloxStream random(stretto::testing::Seed(), 3);
  for (int round = 0; round < 8; ++round) {
    const Case test(random);
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const auto device = MakeDevice(round % 2 == 0 ? "cpu" : "reference");
    TestModel model(*device, test.config, round % 4 < 2 ? DType::kBF16 : DType::kF32, kLength,
                    test.parameters);
    const PackedBatch batch = Pack(test.groups, true);
    const Outcome kept = Run(model, batch, {});
    PackedPassOptions options;
    options.checkpointing = round % 3 == 0 ? Checkpointing::kSelective : Checkpointing::kFull;
    // Three rows at a time.
    options.logits_bytes =
        3 * HeadRowBytes(test.config, model.transformer->options().dtype, options);
    const Outcome frugal = Run(model, batch, options);
    options.train = false;
    const Outcome forward_only = Run(model, batch, options);
    CHECK(SameBits(kept.logprobs, frugal.logprobs));
    CHECK(SameBits(kept.logprobs, forward_only.logprobs));
    CHECK(SameBits(kept.entropy, forward_only.entropy));
    for (const auto& [name, gradient] : kept.gradients) {
      INFO("parameter " << name);
      CHECK(SameBits(gradient, frugal.gradients.at(name)));
    }
  }
}

TEST_CASE("gradients through a shared prompt are those of separate copies") {
  PhiloxStream random(stretto::testing::Seed(), 4);
  for (int round = 0; round < 8; ++round) {
    const Case test(random);
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const auto device = MakeDevice(round % 2 == 0 ? "cpu" : "reference");
    TestModel model(*device, test.config, DType::kF32, kLength, test.parameters);
    const Outcome shared = Run(model, Pack(test.groups, true), {});
    const Outcome separate = Run(model, Pack(test.groups, false), {});
    for (const auto& [name, gradient] : shared.gradients) {
      INFO("parameter " << name);
      const std::vector<float>& other = separate.gradients.at(name);
      double difference = 0, norm = 0;
      for (size_t i = 0; i < gradient.size(); ++i) {
        difference += std::pow(double{gradient[i]} - other[i], 2);
        norm += std::pow(double{other[i]}, 2);
      }
      CHECK(std::sqrt(difference) <= 1e-4 * std::sqrt(norm) + 1e-6);
    }
  }
}

TEST_CASE("the gradient of the entropy agrees with finite differences") {
  PhiloxStream random(stretto::testing::Seed(), 5);
  const Case test(random);
  const auto device = MakeDevice("reference");
  const PackedBatch batch = Pack(test.groups, true);
  const auto objective = [&](const HostParameters& parameters) {
    TestModel model(*device, test.config, DType::kF32, kLength, parameters);
    PackedPassOptions options;
    options.train = false;
    const Outcome out = Run(model, batch, options);
    double sum = 0;
    for (size_t n = 0; n < out.logprobs.size(); ++n) {
      sum += double{TargetWeight(n, 1)} * out.logprobs[n];
      sum += double{TargetWeight(n, 2)} * out.entropy[n];
    }
    return sum;
  };
  TestModel model(*device, test.config, DType::kF32, kLength, test.parameters);
  const HostParameters gradients = Run(model, batch, {}).gradients;
  // Along the gradient itself: the slope is its squared norm.
  double squared = 0;
  for (const auto& [name, g] : gradients) {
    for (float x : g) squared += double{x} * x;
  }
  const double step = 1e-3 / std::sqrt(squared);
  const auto moved = [&](double by) {
    HostParameters p = test.parameters;
    for (auto& [name, values] : p) {
      const auto& g = gradients.at(name);
      for (size_t i = 0; i < g.size(); ++i) values[i] += static_cast<float>(by * g[i]);
    }
    return objective(p);
  };
  const double slope = (moved(step) - moved(-step)) / (2 * step);
  CHECK(slope == Approx(squared).epsilon(0.02));
}
}  // namespace
}  // namespace stretto::engine
