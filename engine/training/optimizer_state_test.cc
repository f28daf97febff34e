// Moments in 8 bits and optimizer state in files: what the format keeps, the same bits whoever
// holds what, less memory, and learning that isn't worse for it.
#include "engine/training/optimizer_state.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "absl/strings/match.h"
#include "base/files.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/training/checkpoint.h"
#include "engine/training/checkpoint_writer.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)
constexpr int64_t kLength = 40;

// Values of a block whose magnitudes differ by many orders.
std::vector<float> RandomBlock(Moment which, PhiloxStream& random) {
  std::vector<float> values(kMomentBlock);
  const double size = std::exp(20 * random.NextDouble() - 15);
  for (float& x : values) {
    const double g = random.NextGaussian() * std::exp(2 * random.NextGaussian()) * size;
    x = static_cast<float>(which == Moment::kM ? g : g * g);
    if (random.Below(20) == 0) x = 0;
  }
  return values;
}

ModelConfig SomeConfig() {  // of several windows
  ModelConfig c;
  c.vocab_size = 300;
  c.hidden_size = 48;
  c.intermediate_size = 100;
  c.num_layers = 3;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 12;
  c.max_position_embeddings = 128;
  return c;
}

std::vector<TrainBatch> Batches(const ModelConfig& config, int num_steps, uint64_t stream) {
  PhiloxStream random(stretto::testing::Seed(), stream);
  std::vector<TrainBatch> batches;
  for (int i = 0; i < num_steps; ++i) batches.push_back(RandomBatch(config, kLength, random));
  return batches;
}

std::unique_ptr<TrainerEngine> Open(Device& device, const TrainerOptions& options,
                                    Communicator* group = nullptr, uint64_t seed = 7) {
  auto engine = TrainerEngine::Create(device, SomeConfig(), options, Clock::Real(), group);
  STRETTO_CHECK_MSG(engine.ok(), std::string(engine.status().message()).c_str());
  STRETTO_CHECK((*engine)->InitRandom(seed, 0.2).ok());
  return *std::move(engine);
}

void Take(TrainerEngine& engine, const std::vector<TrainBatch>& batches) {
  for (const TrainBatch& batch : batches) {
    const auto result = engine.Step(batch, TestObjective());
    STRETTO_CHECK_MSG(result.ok(), std::string(result.status().message()).c_str());
  }
}

TrainerOptions EightBit() {
  TrainerOptions options = SmallOptions(kLength);
  options.storage.eight_bit_moments = true;
  options.weight_decay = 0.1;
  return options;
}
}  // namespace

TEST_CASE("8-bit moments are near, above zero where they were, and kept when encoded again") {
  PhiloxStream random(stretto::testing::Seed(), 220);
  for (int round = 0; round < 200; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const Moment which = round % 2 == 0 ? Moment::kM : Moment::kV;
    const std::vector<float> values = RandomBlock(which, random);
    const auto count = static_cast<int64_t>(1 + random.Below(kMomentBlock));
    uint8_t codes[kMomentBlock], again[kMomentBlock];
    float decoded[kMomentBlock];
    const float scale = EncodeMoments(which, values.data(), count, MomentRounding(round), codes);
    DecodeMoments(which, codes, count, scale, decoded);
    double largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(double{values[i]}));
    bool near = true, positive = true;
    for (int64_t i = 0; i < count; ++i) {
      const double x = which == Moment::kM ? values[i] : std::sqrt(double{values[i]});
      const double y = which == Moment::kM ? decoded[i] : std::sqrt(double{decoded[i]});
      // A step is an eighth or a sixteenth of the lower power of two, or that of the least one.
      const double relative = which == Moment::kM ? 1.0 / 8 : 1.0 / 16;
      near = near && std::abs(y - x) <= relative * std::max(std::abs(x), 0x1p-15 * double{scale});
      positive = positive && (which == Moment::kM || (decoded[i] > 0) == (values[i] > 0));
      CHECK(std::signbit(decoded[i]) == std::signbit(values[i]));
    }
    CHECK(near);
    CHECK(positive);
    CHECK(EncodeMoments(which, decoded, count, MomentRounding(round + 1), again) == scale);
    CHECK(std::memcmp(codes, again, static_cast<size_t>(count)) == 0);
  }
}

TEST_CASE("rounding of moments is right on the average, so that small changes add up") {
  // A moment that decays by 2 % a step: with the nearest value it would stay where it is.
  float m[kMomentBlock], v[kMomentBlock];
  uint8_t codes[kMomentBlock];
  for (int i = 0; i < kMomentBlock; ++i) m[i] = v[i] = i == 0 ? 1.0f : 0.3f;
  for (int64_t step = 1; step <= 100; ++step) {
    for (int i = 1; i < kMomentBlock; ++i) m[i] *= 0.98f, v[i] *= 0.98f;
    const MomentRounding rounding(step);
    DecodeMoments(Moment::kM, codes, kMomentBlock,
                  EncodeMoments(Moment::kM, m, kMomentBlock, rounding, codes), m);
    m[0] = 1.0f;
    DecodeMoments(Moment::kV, codes, kMomentBlock,
                  EncodeMoments(Moment::kV, v, kMomentBlock, rounding, codes), v);
    v[0] = 1.0f;
  }
  double mean_m = 0, mean_v = 0;
  for (int i = 1; i < kMomentBlock; ++i) mean_m += m[i] / 255, mean_v += v[i] / 255;
  const double expected = 0.3 * std::pow(0.98, 100);
  CHECK(mean_m == Approx(expected).epsilon(0.15));
  CHECK(mean_v == Approx(expected).epsilon(0.15));
}

TEST_CASE("training with 8-bit moments has the same bits for all threads, ranks and layouts") {
  const auto batches = Batches(SomeConfig(), 3, 221);
  TrainerOptions options = EightBit();
  options.parallel.reduction_leaves = 64;
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    const auto device = MakeDevice("cpu", threads);
    const auto engine = Open(*device, options);
    Take(*engine, batches);
    if (first.empty()) first = FullState(*engine);
    CHECK(SameBits(FullState(*engine), first));
  }
  {
    TrainerOptions plain = options;
    plain.storage = {};
    const auto device = MakeDevice("cpu");
    const auto engine = Open(*device, plain);
    Take(*engine, batches);
    CHECK_FALSE(SameBits(FullState(*engine), first));  // there is something to compare
  }
  for (const DataParallel kind :
       {DataParallel::kDdp, DataParallel::kZero1, DataParallel::kZero2, DataParallel::kFsdp}) {
    options.parallel.kind = kind;
    const int num_ranks = kind == DataParallel::kFsdp ? 2 : 3;
    const auto states = RunRanks<std::vector<float>>(num_ranks, [&](Communicator& group) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = Open(*device, options, &group);
      Take(*engine, batches);
      return FullState(*engine);
    });
    INFO(Name(kind));
    for (const std::vector<float>& state : states) CHECK(SameBits(state, first));
  }
}

TEST_CASE("optimizer state in files has the bits of that in memory, and takes none") {
  const auto batches = Batches(SomeConfig(), 3, 222);
  stretto::testing::TempDir dir;
  const auto device = MakeDevice("cpu");
  for (const bool eight_bit : {false, true}) {
    TrainerOptions options = EightBit();
    options.storage.eight_bit_moments = eight_bit;
    options.parallel.reduction_leaves = 64;
    const auto memory = Open(*device, options);
    options.storage.offload_folder = dir.File("offload");
    const auto files = Open(*device, options);
    Take(*memory, batches);
    Take(*files, batches);
    CHECK(SameBits(FullState(*files), FullState(*memory)));
    // What exports read.
    const Parameter& p = memory->layout().parameters()[3];
    std::vector<float> a(p.view.size()), b(p.view.size());
    REQUIRE_OK(memory->ReadRows(p, 0, p.view.rows, DType::kF32, a.data()));
    REQUIRE_OK(files->ReadRows(p, 0, p.view.rows, DType::kF32, b.data()));
    CHECK(SameBits(a, b));

    const auto P = static_cast<size_t>(memory->layout().size());
    const double moments = eight_bit ? 2 * (1 + 4.0 / kMomentBlock) : 8;
    CHECK(static_cast<double>(memory->memory().optimizer) ==
          Approx((4 + moments) * static_cast<double>(P)).epsilon(0.02));
    CHECK(memory->memory().offloaded == 0);
    CHECK(files->memory().optimizer == (eight_bit ? memory->memory().optimizer - 4 * P : 0));
    CHECK(files->memory().offloaded == (eight_bit ? 4 : 12) * P);
    CHECK(
        Files::Real().List(dir.File("offload"))->empty());  // without names, gone with the process

    for (const DataParallel kind : {DataParallel::kZero1, DataParallel::kFsdp}) {
      options.parallel.kind = kind;
      const auto states = RunRanks<std::vector<float>>(2, [&](Communicator& group) {
        const auto alone = MakeDevice("cpu", 1);
        const auto engine = Open(*alone, options, &group);
        Take(*engine, batches);
        return FullState(*engine);
      });
      INFO(Name(kind));
      for (const std::vector<float>& state : states) CHECK(SameBits(state, FullState(*memory)));
    }
  }
}

TEST_CASE("checkpoints hold 8-bit moments and offloaded state, and training goes on from them") {
  const auto batches = Batches(SomeConfig(), 4, 223);
  const auto device = MakeDevice("cpu");
  stretto::testing::TempDir dir;
  for (const bool offloads : {false, true}) {
    TrainerOptions options = EightBit();
    if (offloads) options.storage.offload_folder = dir.File("offload");
    const auto straight = Open(*device, options);
    Take(*straight, {batches.begin(), batches.begin() + 2});
    const std::string root = dir.File(offloads ? "b" : "a");
    const auto saved = SaveCheckpoint(Files::Real(), {root}, *straight, "");
    REQUIRE_OK(saved);
    // In the background, while the next step changes the state.
    CheckpointWriterOptions background;
    background.root = dir.File(offloads ? "d" : "c");
    CheckpointWriter writer(Files::Real(), background);
    REQUIRE_OK(writer.Start(*straight, ""));
    Take(*straight, {batches.begin() + 2, batches.end()});
    const auto report = writer.Wait();
    REQUIRE(report.has_value());
    REQUIRE_OK(report->status);
    CHECK(report->info.checkpoint_hash == saved->checkpoint_hash);

    const auto restored = Open(*device, options, nullptr, 8);
    Take(*restored, {batches[3]});  // what was there before leaves no trace
    REQUIRE_OK(LoadCheckpoint(Files::Real(), saved->path, *restored));
    Take(*restored, {batches.begin() + 2, batches.end()});
    CHECK(SameBits(FullState(*restored), FullState(*straight)));
  }
}

TEST_CASE("training with 8-bit moments learns as well") {
  std::vector<SupervisedSequence> sequences(4);
  for (int i = 0; i < 30; ++i) {
    for (int s = 0; s < 4; ++s) sequences[s].ids.push_back(20 * s + (i * (s + 2)) % 7);
  }
  const auto device = MakeDevice("cpu");
  double losses[2];
  for (const bool eight_bit : {false, true}) {
    TrainerOptions options = SmallOptions(kLength);
    options.schedule.lr = 3e-3;
    options.storage.eight_bit_moments = eight_bit;
    const auto engine = Open(*device, options);
    for (int step = 0; step < 40; ++step) {
      const auto result = engine->SupervisedStep(sequences);
      REQUIRE_OK(result);
      losses[eight_bit ? 1 : 0] = result->loss;
    }
  }
  INFO("f32 " << losses[0] << ", 8 bits " << losses[1]);
  CHECK(losses[1] < 1.2 * losses[0] + 0.02);
}

TEST_CASE("optimizer state that can't be kept is refused when the trainer is made") {
  const auto device = MakeDevice("cpu", 1);
  stretto::testing::TempDir dir;
  REQUIRE_OK(Files::Real().WriteAtomically(dir.File("file"), "x"));
  TrainerOptions options = SmallOptions(kLength);
  options.storage.offload_folder = dir.File("file/offload");
  CHECK_FALSE(TrainerEngine::Create(*device, SomeConfig(), options).ok());
  options = EightBit();
  options.parallel.k_leaves = 2;
  const auto status = TrainerEngine::Create(*device, SomeConfig(), options).status();
  CHECK(absl::IsInvalidArgument(status));
  CHECK(absl::StrContains(status.message(), "k_leaves"));
  CHECK(absl::IsInvalidArgument(ParseOptimizerState("int4").status()));
  CHECK(*ParseOptimizerState("8bit"));
}
}  // namespace stretto::engine
