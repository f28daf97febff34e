#include "engine/training/memory_plan.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "base/testing.h"
#include "engine/model/testing.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
constexpr int64_t kLength = 128;

ModelConfig Config(bool tied, bool qk_norm) {
  ModelConfig c;
  c.vocab_size = 512;
  c.hidden_size = 64;
  c.intermediate_size = 160;
  c.num_layers = 5;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 16;
  c.max_position_embeddings = kLength;
  c.tie_word_embeddings = tied;
  c.qk_norm = qk_norm;
  if (qk_norm) c.architecture = Architecture::kQwen3;
  return c;
}

TrainBatch Batch() {
  TrainBatch batch;
  TrainGroup& g = batch.groups.emplace_back();
  g.prompt_ids.assign(kLength / 2, 3);
  g.completions.emplace_back().ids.assign(kLength / 2, 5);
  return batch;
}

// Zeros, for a base that only takes place.
class Zeros final : public TensorSource {
 public:
  explicit Zeros(const ModelConfig& config) {
    size_t largest = 0;
    for (const TensorSpec& spec : ExpectedTensors(config)) {
      TensorInfo info{spec.name, StorageType::kF32, spec.shape, {}};
      largest = std::max(largest, static_cast<size_t>(NumElements(info)) * sizeof(float));
      tensors_.push_back(std::move(info));
    }
    bytes_.resize(largest);
    for (TensorInfo& info : tensors_) {
      info.bytes = absl::MakeConstSpan(bytes_).first(NumElements(info) * sizeof(float));
    }
    std::sort(tensors_.begin(), tensors_.end(),
              [](const auto& a, const auto& b) { return a.name < b.name; });
  }
  const std::string& path() const override { return path_; }
  absl::Span<const TensorInfo> tensors() const override { return tensors_; }

 private:
  std::string path_ = "zeros";
  std::vector<uint8_t> bytes_;
  std::vector<TensorInfo> tensors_;
};

// Held after a step.
size_t Held(const ModelConfig& config, const TrainerOptions& options) {
  DeviceOptions device_options;
  device_options.num_threads = 1;
  const auto device = CreateDevice(device_options);
  REQUIRE(device.ok());
  const auto engine = TrainerEngine::Create(**device, config, options);
  REQUIRE(engine.ok());
  const Zeros base(config);
  REQUIRE((options.lora ? (*engine)->LoadModel(base) : (*engine)->InitRandom(1)).ok());
  REQUIRE((*engine)->Step(Batch(), CrossEntropy()).ok());
  return (*engine)->device_bytes();
}
}  // namespace

TEST_CASE("the memory plan is what a trainer holds") {
  for (const Checkpointing checkpointing :
       {Checkpointing::kNone, Checkpointing::kSelective, Checkpointing::kFull}) {
    for (const DataParallel kind :
         {DataParallel::kDdp, DataParallel::kZero1, DataParallel::kZero2, DataParallel::kFsdp}) {
      for (const int variant : {0, 1}) {
        const ModelConfig config = Config(variant == 0, variant == 1);
        TrainerOptions options;
        options.dtype = variant == 0 ? DType::kBF16 : DType::kF32;
        options.max_sequence_length = kLength;
        options.micro_batch_tokens = 2 * kLength;
        options.checkpointing = checkpointing;
        options.parallel.kind = kind;
        options.logits_bytes = 64 << 10;
        INFO(Name(kind) << ", checkpointing " << static_cast<int>(checkpointing) << ", variant "
                        << variant);
        const auto held = static_cast<double>(Held(config, options));
        const auto planned = static_cast<double>(PlanMemory(config, options, 1).total());
        CHECK(held / planned == Approx(1).margin(0.03));
      }
    }
  }
}

TEST_CASE("the memory plan knows adapters") {
  for (const int64_t rank : {8, 20}) {
    for (const int variant : {0, 1}) {
      const ModelConfig config = Config(variant == 0, variant == 1);
      TrainerOptions options;
      options.dtype = variant == 0 ? DType::kBF16 : DType::kF32;
      options.max_sequence_length = kLength;
      options.micro_batch_tokens = 2 * kLength;
      options.logits_bytes = 64 << 10;
      for (const DataParallel kind :
           {DataParallel::kDdp, DataParallel::kZero1, DataParallel::kZero2, DataParallel::kFsdp}) {
        INFO(Name(kind) << ", rank " << rank << ", variant " << variant);
        options.parallel.kind = kind;
        options.lora = {rank, 16, {}};
        REQUIRE(NormalizeLora(config, options.lora).ok());
        const auto held = static_cast<double>(Held(config, options));
        const MemoryPlan plan = PlanMemory(config, options, 1);
        CHECK(held / static_cast<double>(plan.total()) == Approx(1).margin(0.03));
        options.lora = {};
        CHECK(plan.state < PlanMemory(config, options, 1).state);
      }
    }
  }
}

TEST_CASE("the memory plan knows 8-bit moments and files") {
  stretto::testing::TempDir dir;
  const ModelConfig config = Config(true, false);
  for (const DataParallel kind : {DataParallel::kDdp, DataParallel::kFsdp}) {
    for (const bool eight_bit : {false, true}) {
      for (const bool offloads : {false, true}) {
        TrainerOptions options;
        options.max_sequence_length = kLength;
        options.micro_batch_tokens = 2 * kLength;
        options.logits_bytes = 64 << 10;
        options.parallel.kind = kind;
        options.storage.eight_bit_moments = eight_bit;
        if (kind == DataParallel::kDdp) options.gradient_dtype = DType::kBF16;
        if (offloads) options.storage.offload_folder = dir.File("offload");
        INFO(Name(kind) << ", 8 bits " << eight_bit << ", files " << offloads);
        const auto held = static_cast<double>(Held(config, options));
        const MemoryPlan plan = PlanMemory(config, options, 1);
        CHECK(held / static_cast<double>(plan.total()) == Approx(1).margin(0.03));
        const bool less = eight_bit || offloads;
        options.storage = {};
        CHECK((plan.state < PlanMemory(config, options, 1).state) == less);
      }
    }
  }
}

TEST_CASE("checkpointing keeps less, and more ranks hold less") {
  const ModelConfig config = Config(true, false);
  TrainerOptions options;
  options.max_sequence_length = kLength;
  size_t last = SIZE_MAX;
  for (const Checkpointing checkpointing :
       {Checkpointing::kNone, Checkpointing::kSelective, Checkpointing::kFull}) {
    options.checkpointing = checkpointing;
    const size_t activations = PlanMemory(config, options, 1).activations;
    CHECK(activations < last);
    last = activations;
  }
  options.parallel.kind = DataParallel::kFsdp;
  const MemoryPlan one = PlanMemory(config, options, 1), four = PlanMemory(config, options, 4);
  CHECK(four.state == (one.state + 3) / 4);
  CHECK(four.gathered == one.gathered);
}
}  // namespace stretto::engine
