// A step is a pure function of state, batch and objective; training learns; what is wrong is
// refused or skipped without harm.
#include "engine/training/trainer_engine.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "base/testing.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)
constexpr int64_t kLength = 48;

TEST_CASE("weights after three steps have the same bits for every number of threads") {
  PhiloxStream random(stretto::testing::Seed(), 30);
  for (int round = 0; round < 3; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const ModelConfig config = RandomConfig(random);
    std::vector<TrainBatch> batches;
    for (int i = 0; i < 3; ++i) batches.push_back(RandomBatch(config, kLength, random));
    TrainerOptions options = SmallOptions(kLength);
    options.dtype = round == 2 ? DType::kF32 : DType::kBF16;
    std::vector<float> first;
    for (int threads : {1, 2, 4}) {
      const auto device = MakeDevice("cpu", threads);
      const auto engine = MakeEngine(*device, config, options, 7);
      for (const TrainBatch& batch : batches) {
        const auto result = engine->Step(batch, TestObjective());
        REQUIRE_OK(result);
        CHECK_FALSE(result->skipped);
      }
      CHECK(engine->version() == 3);
      const auto state = FullState(*engine);
      if (first.empty()) first = state;
      CHECK(SameBits(state, first));
    }
  }
}

TEST_CASE("products may read gradients in bf16: as exact, and near") {
  PhiloxStream random(stretto::testing::Seed(), 41);
  INFO("seed " << stretto::testing::Seed());
  const ModelConfig config = RandomConfig(random);
  const TrainBatch batch = RandomBatch(config, kLength, random);
  TrainerOptions options = SmallOptions(kLength);
  options.max_grad_norm = 0;
  const auto device = MakeDevice("cpu", 1);
  const auto wide = MakeEngine(*device, config, options, 7)->Step(batch, TestObjective());
  REQUIRE_OK(wide);
  options.gradient_dtype = DType::kBF16;
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    for (const auto checkpointing : {Checkpointing::kNone, Checkpointing::kFull}) {
      const auto other = MakeDevice("cpu", threads);
      options.checkpointing = checkpointing;
      options.logits_bytes = threads * 8192;
      const auto engine = MakeEngine(*other, config, options, 7);
      const auto result = engine->Step(batch, TestObjective());
      REQUIRE_OK(result);
      CHECK(result->loss == wide->loss);
      CHECK(result->grad_norm == Approx(wide->grad_norm).epsilon(0.01));
      CHECK(result->grad_norm != wide->grad_norm);
      if (first.empty()) first = FullState(*engine);
      CHECK(SameBits(FullState(*engine), first));
    }
  }
  options.dtype = DType::kF32;
  CHECK(absl::IsInvalidArgument(TrainerEngine::Create(*device, config, options).status()));
}

TEST_CASE("log-probs have the same bits for every micro-batch budget") {
  PhiloxStream random(stretto::testing::Seed(), 31);
  for (int round = 0; round < 4; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const ModelConfig config = RandomConfig(random);
    const TrainBatch batch = RandomBatch(config, kLength, random);
    const auto device = MakeDevice(round == 3 ? "reference" : "cpu");
    std::vector<float> first;
    for (const int64_t budget : {1, 30, 64, 5000}) {
      TrainerOptions options = SmallOptions(kLength);
      options.micro_batch_tokens = budget;
      const auto logprobs = MakeEngine(*device, config, options, 7)->LogProbs(batch);
      REQUIRE_OK(logprobs);
      std::vector<float> all;
      for (size_t g = 0; g < batch.groups.size(); ++g) {
        for (size_t c = 0; c < batch.groups[g].completions.size(); ++c) {
          REQUIRE(logprobs->logprobs[g][c].size() == batch.groups[g].completions[c].ids.size());
          for (float x : logprobs->logprobs[g][c]) all.push_back(x);
          for (float x : logprobs->entropy[g][c]) all.push_back(x);
        }
      }
      if (first.empty()) first = all;
      CHECK(SameBits(all, first));
    }
  }
}

TEST_CASE("the mismatch is exactly 0 on fresh tokens and counts no stale ones") {
  PhiloxStream random(stretto::testing::Seed(), 32);
  const ModelConfig config = RandomConfig(random);
  const auto device = MakeDevice("cpu");
  TrainerOptions options = SmallOptions(kLength);
  const auto engine = MakeEngine(*device, config, options, 7);
  TrainBatch batch = RandomBatch(config, kLength, random);
  const auto fresh = engine->LogProbs(batch);
  REQUIRE_OK(fresh);
  int64_t stale = 0;
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    for (size_t c = 0; c < batch.groups[g].completions.size(); ++c) {
      TrainCompletion& completion = batch.groups[g].completions[c];
      completion.behaviour_logprobs = fresh->logprobs[g][c];
      completion.policy_versions.assign(completion.ids.size(), 0);
      completion.policy_versions[0] = -1;  // from before: its log-prob may differ
      completion.behaviour_logprobs[0] -= 1.0f;
      ++stale;
    }
  }
  auto result = engine->Step(batch, TestObjective());
  REQUIRE_OK(result);
  CHECK(result->logprob_mismatch_max == 0.0);
  CHECK(result->num_compared_tokens == batch.num_tokens() - stale);
  // Under the new version nothing is fresh.
  result = engine->Step(batch, TestObjective());
  REQUIRE_OK(result);
  CHECK(result->num_compared_tokens == 0);

  // A true difference shows.
  const auto again = MakeEngine(*device, config, options, 7);
  auto& completion = batch.groups[0].completions[0];
  completion.policy_versions[0] = 0;
  result = again->Step(batch, TestObjective());
  REQUIRE_OK(result);
  CHECK(result->logprob_mismatch_max == Approx(1.0));
  CHECK(result->logprob_mismatch_sum == Approx(1.0));
}

// Log-probs of the trainer's current weights from its own pass, from paged inference, and from the
// pass that scorers make, all in k_leaves.
void CheckLogProbsOfAll(const ModelConfig& config, int64_t k_leaves, PhiloxStream& random) {
  const auto trainer_device = MakeDevice("cpu", 2), generator_device = MakeDevice("cpu", 1);
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.k_leaves = k_leaves;
  const auto engine = MakeEngine(*trainer_device, config, options, 7);
  REQUIRE_OK(engine->Step(RandomBatch(config, kLength, random), TestObjective()));
  const auto host = engine->GetWeights();
  CHECK(host->version() == 1);

  const auto groups = RandomGroups(config, kLength, random);
  TrainBatch batch;
  for (const TestGroup& g : groups) {
    TrainGroup& group = batch.groups.emplace_back();
    group.prompt_ids = g.prompt;
    for (const auto& ids : g.completions) group.completions.emplace_back().ids = ids;
  }
  const auto expected = engine->LogProbs(batch);
  REQUIRE_OK(expected);
  std::vector<float> flat;
  for (const auto& g : expected->logprobs) {
    for (const auto& c : g) flat.insert(flat.end(), c.begin(), c.end());
  }
  TestModel generator(*generator_device, config, DType::kBF16, kLength,
                      RandomParameters(config, random));
  auto transformer =
      Transformer::Create(*generator_device, config, {DType::kBF16, kLength, k_leaves});
  REQUIRE_OK(transformer);
  generator.transformer = *std::move(transformer);
  WeightsOptions weights_options;
  weights_options.k_leaves = k_leaves;
  auto loaded = ModelWeights::Load(
      *generator_device, *generator.stream, config, DType::kBF16,
      [&](const Parameter& p, DType, void* dst) -> absl::Status {
        const auto bytes = host->bytes(p);
        std::memcpy(dst, bytes.data(), bytes.size());
        return absl::OkStatus();
      },
      weights_options);
  REQUIRE_OK(loaded);
  generator.weights = *std::move(loaded);
  CHECK(SameBits(PagedLogProbs(generator, groups, 1.0f, random), flat));

  const PackedBatch packed = Pack(groups, /*share=*/true);
  PackedPassOptions pass_options;
  pass_options.max_rows = packed.num_rows();
  pass_options.max_targets = packed.num_targets();
  pass_options.train = false;
  pass_options.logits_bytes = 3 * sizeof(float) * static_cast<size_t>(config.vocab_size);
  auto pass = PackedPass::Create(*generator.transformer, pass_options);
  REQUIRE_OK(pass);
  std::vector<float> scored(flat.size());
  (*pass)->Forward(*generator.stream, *generator.weights, packed, absl::MakeSpan(scored), {});
  CHECK(SameBits(scored, flat));
}

TEST_CASE(
    "the trainer's weights are the generator's: paged inference gives the trainer's log-probs") {
  PhiloxStream random(stretto::testing::Seed(), 33);
  for (int round = 0; round < 3; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    CheckLogProbsOfAll(RandomConfig(random), 1, random);
  }
}

TEST_CASE("sums in several leaves: generators and scorers give the trainer's log-probs as well") {
  PhiloxStream random(stretto::testing::Seed(), 36);
  for (const int64_t k_leaves : {2, 3, 6}) {
    INFO("seed " << stretto::testing::Seed() << " k_leaves " << k_leaves);
    ModelConfig config = RandomConfig(random);
    config.num_heads = 6;
    config.num_kv_heads = k_leaves == 3 ? 2 : 3;
    config.head_dim = 8;
    CheckLogProbsOfAll(config, k_leaves, random);
  }
}

TEST_CASE("a step that is not finite is skipped: nothing changes but the version") {
  PhiloxStream random(stretto::testing::Seed(), 34);
  const ModelConfig config = RandomConfig(random);
  for (const char* backend : {"cpu", "reference"}) {
    const auto device = MakeDevice(backend);
    const auto engine = MakeEngine(*device, config, SmallOptions(kLength), 7);
    const TrainBatch batch = RandomBatch(config, kLength, random);
    REQUIRE_OK(engine->Step(batch, TestObjective()));
    const auto before = FullState(*engine);
    class NanObjective final : public Objective {
     public:
      void Evaluate(const ObjectiveInput&, ObjectiveOutput& out) const override {
        out.d_logprobs[0] = NAN;
      }
    };
    const auto result = engine->Step(batch, NanObjective());
    REQUIRE_OK(result);
    CHECK(result->skipped);
    CHECK_THAT(result->skip_reason, Catch::Contains("not finite"));
    CHECK(engine->version() == 2);
    CHECK(engine->counters().optimizer_steps == 1);
    CHECK(SameBits(FullState(*engine), before));
  }
}

TEST_CASE("the gradient is clipped to its largest norm and the rate follows the schedule") {
  PhiloxStream random(stretto::testing::Seed(), 35);
  const ModelConfig config = RandomConfig(random);
  const auto device = MakeDevice("reference");
  const TrainBatch batch = RandomBatch(config, kLength, random);
  TrainerOptions options = SmallOptions(kLength);
  options.dtype = DType::kF32;
  options.schedule.warmup_steps = 4;
  options.max_grad_norm = 0;
  const auto free = MakeEngine(*device, config, options, 7);
  const auto unclipped = free->Step(batch, TestObjective());
  REQUIRE_OK(unclipped);
  CHECK(unclipped->lr == Approx(options.schedule.lr / 4));
  options.max_grad_norm = unclipped->grad_norm / 10;
  const auto clipped = MakeEngine(*device, config, options, 7);
  REQUIRE_OK(clipped->Step(batch, TestObjective()));
  // After one step m = (1 − β₁) · gradient.
  double free_norm = 0, clipped_norm = 0;
  const auto& layout = free->layout();
  for (const Parameter& p : layout.parameters()) {
    std::vector<float> a(p.view.size()), b(p.view.size());
    REQUIRE_OK(free->DownloadState(TrainerEngine::StateTensor::kM, p, a.data()));
    REQUIRE_OK(clipped->DownloadState(TrainerEngine::StateTensor::kM, p, b.data()));
    for (float x : a) free_norm += double{x} * x;
    for (float x : b) clipped_norm += double{x} * x;
  }
  CHECK(std::sqrt(free_norm) == Approx(0.1 * unclipped->grad_norm).epsilon(1e-3));
  CHECK(std::sqrt(clipped_norm) == Approx(0.1 * options.max_grad_norm).epsilon(1e-3));
}

TEST_CASE("supervised training learns a sequence by heart") {
  ModelConfig config;
  config.vocab_size = 50;
  config.hidden_size = 32;
  config.intermediate_size = 64;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  config.tie_word_embeddings = true;
  const auto device = MakeDevice("cpu");
  TrainerOptions options = SmallOptions(32);
  auto engine = TrainerEngine::Create(*device, config, options);
  REQUIRE_OK(engine);
  REQUIRE_OK((*engine)->InitRandom(3));
  PhiloxStream random(1);
  std::vector<SupervisedSequence> data(4);
  for (SupervisedSequence& s : data) {
    for (int i = 0; i < 20; ++i) s.ids.push_back(static_cast<int32_t>(random.Below(50)));
    s.loss_begin = 2;
  }
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    const auto result = (*engine)->SupervisedStep(data);
    REQUIRE_OK(result);
    CHECK(result->num_trained_tokens == 4 * 18);
    if (step == 0) first = result->loss;
    last = result->loss;
  }
  CHECK(first == Approx(std::log(50.0)).epsilon(0.1));
  CHECK(last < 0.3);
}

TEST_CASE("options and batches that make no sense are refused") {
  PhiloxStream random(stretto::testing::Seed(), 36);
  const ModelConfig config = RandomConfig(random);
  const auto device = MakeDevice("reference");
  TrainerOptions options = SmallOptions(kLength);
  options.temperature = 0;
  CHECK_THAT(std::string(TrainerEngine::Create(*device, config, options).status().message()),
             Catch::Contains("temperature must be positive"));
  const auto engine = MakeEngine(*device, config, SmallOptions(kLength), 7);
  const auto before = FullState(*engine);
  CHECK_FALSE(engine->Step({}, TestObjective()).ok());
  TrainBatch bad = RandomBatch(config, kLength, random);
  bad.groups[0].completions[0].ids[0] = static_cast<int32_t>(config.vocab_size);
  CHECK_FALSE(engine->Step(bad, TestObjective()).ok());
  CHECK(engine->version() == 0);
  CHECK(SameBits(FullState(*engine), before));
}

TEST_CASE("schedules warm up, stay or fall") {
  LrSchedule s{LrSchedule::Kind::kLinear, 1.0, 10, 110};
  CHECK(s.At(1) == Approx(0.1));
  CHECK(s.At(10) == Approx(1.0));
  CHECK(s.At(60) == Approx(0.5));
  CHECK(s.At(110) == Approx(0.0).margin(1e-12));
  CHECK(s.At(500) == Approx(0.0).margin(1e-12));
  s.kind = LrSchedule::Kind::kCosine;
  CHECK(s.At(60) == Approx(0.5));
  CHECK(s.At(35) == Approx(0.5 * (1 + std::sqrt(0.5))));
  s.kind = LrSchedule::Kind::kConstant;
  CHECK(s.At(5000) == Approx(1.0));
  CHECK(LrSchedule{LrSchedule::Kind::kConstant, 2.0, 0, 0}.At(1) == Approx(2.0));
  CHECK(*ParseScheduleKind("cosine") == LrSchedule::Kind::kCosine);
  CHECK_THAT(std::string(ParseScheduleKind("step").status().message()),
             Catch::Contains("constant, linear or cosine"));
}
}  // namespace
}  // namespace stretto::engine
