// A model in leaves: gradients against PyTorch's, the same bits on any number of ranks that share
// them and in every data-parallel layout, and clear errors where the model can't be divided.
#include "engine/training/tensor_parallel.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "base/files.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/formats/model_files.h"
#include "engine/formats/safetensors.h"
#include "engine/training/checkpoint.h"
#include "engine/training/tensor_parallel_pass.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using testing::FullState;
using testing::MakeDevice;
using testing::RandomBatch;
using testing::RunRanks;
using testing::SameBits;
using testing::SmallOptions;
using testing::TestObjective;

constexpr int64_t kLength = 40;

double RelativeError(absl::Span<const float> a, absl::Span<const float> b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// A random model whose heads divide by `heads`.
ModelConfig LeafConfig(PhiloxStream& random, int64_t heads) {
  ModelConfig c = testing::RandomConfig(random);
  c.num_heads = heads;
  c.num_kv_heads = 1 + static_cast<int64_t>(random.Below(heads));
  while (heads % c.num_kv_heads != 0) --c.num_kv_heads;
  c.head_dim = 8;
  return c;
}

std::vector<TrainBatch> Batches(const ModelConfig& config, int num_steps, uint64_t stream) {
  PhiloxStream random(stretto::testing::Seed(), stream);
  std::vector<TrainBatch> batches;
  for (int i = 0; i < num_steps; ++i) batches.push_back(RandomBatch(config, kLength, random));
  return batches;
}

struct Outcome {
  std::vector<double> losses, norms, entropies;
  std::vector<float> state;
  std::vector<uint8_t> weights;
};
bool Same(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}
// "" or what differs.
std::string Difference(const Outcome& a, const Outcome& b) {
  if (!Same(a.losses, b.losses)) return "losses";
  if (!Same(a.entropies, b.entropies)) return "entropies";
  if (!Same(a.norms, b.norms)) return "gradient norms";
  if (!SameBits(a.state, b.state)) return "masters or moments";
  return a.weights == b.weights ? "" : "weights";
}

std::unique_ptr<TrainerEngine> EngineIn(Communicator* group, Device& device,
                                        const ModelConfig& config, const TrainerOptions& options) {
  auto engine = TrainerEngine::Create(device, config, options, Clock::Real(), group);
  STRETTO_CHECK_MSG(engine.ok(), std::string(engine.status().message()).c_str());
  STRETTO_CHECK((*engine)->InitRandom(7, 0.2).ok());
  return *std::move(engine);
}

void Take(TrainerEngine& engine, const std::vector<TrainBatch>& batches, Outcome& out) {
  for (const TrainBatch& batch : batches) {
    const auto result = engine.Step(batch, TestObjective());
    STRETTO_CHECK_MSG(result.ok(), std::string(result.status().message()).c_str());
    out.losses.push_back(result->loss);
    out.norms.push_back(result->grad_norm);
    out.entropies.push_back(result->entropy);
  }
  out.state = FullState(engine);
  const auto weights = engine.GatherWeights();
  STRETTO_CHECK(weights.ok());
  out.weights.clear();
  for (const Parameter& p : (*weights)->parameters()) {
    const auto bytes = (*weights)->bytes(p);
    out.weights.insert(out.weights.end(), bytes.begin(), bytes.end());
  }
}

Outcome RunIn(Communicator* group, const ModelConfig& config, const TrainerOptions& options,
              const std::vector<TrainBatch>& batches, int num_threads = 1,
              const std::string& backend = "cpu") {
  const auto device = MakeDevice(backend, num_threads);
  const auto engine = EngineIn(group, *device, config, options);
  Outcome out;
  Take(*engine, batches, out);
  return out;
}

struct Layout {
  DataParallel kind;
  int num_ranks, tensor_parallel;
};
void CheckLayouts(const ModelConfig& config, TrainerOptions options,
                  const std::vector<TrainBatch>& batches, const std::vector<Layout>& layouts) {
  const Outcome alone = RunIn(nullptr, config, options, batches);
  CHECK(Difference(alone, RunIn(nullptr, config, options, batches, 2)) == "");
  for (const Layout& layout : layouts) {
    INFO(Name(layout.kind) << " on " << layout.num_ranks << ", of which " << layout.tensor_parallel
                           << " share a model of " << config.num_heads << " heads, "
                           << config.num_kv_heads << " of keys");
    options.parallel.kind = layout.kind;
    options.parallel.tensor_parallel = layout.tensor_parallel;
    const auto all = RunRanks<Outcome>(layout.num_ranks, [&](Communicator& c) {
      return RunIn(&c, config, options, batches, 1 + c.rank() % 2);
    });
    for (const Outcome& outcome : all) CHECK(Difference(alone, outcome) == "");
  }
}

TEST_CASE("one to four ranks that share a model end several steps with the same bits") {
  PhiloxStream random(stretto::testing::Seed(), 120);
  INFO("seed " << stretto::testing::Seed());
  for (int round = 0; round < 4; ++round) {
    const int64_t heads = round % 2 == 0 ? 4 : 12;
    const ModelConfig config = LeafConfig(random, heads);
    TrainerOptions options = SmallOptions(kLength);
    options.parallel.k_leaves = heads;
    options.parallel.reduction_leaves = 64;
    options.recompute_activations = round == 2;
    options.weight_decay = round == 3 ? 0.1 : 0;
    options.dtype = round == 1 ? DType::kF32 : DType::kBF16;
    if (round == 3) options.logits_bytes = 3000;  // the head in chunks
    std::vector<Layout> layouts = {{DataParallel::kDdp, 2, 2},   {DataParallel::kDdp, 4, 4},
                                   {DataParallel::kFsdp, 4, 2},  {DataParallel::kDdp, 4, 2},
                                   {DataParallel::kFsdp, 2, 1}};
    if (heads % 3 == 0) layouts.push_back({DataParallel::kDdp, 3, 3});
    if (round == 2) {
      layouts.push_back({DataParallel::kZero1, 4, 2});
      layouts.push_back({DataParallel::kZero2, 4, 2});
    }
    CheckLayouts(config, options, Batches(config, 3, 121 + round), layouts);
  }
}

// Log-probs and gradients of the pass itself against transformers' (tests/golden/models).
void CheckGolden(const std::string& name, const std::string& backend, int64_t num_leaves) {
  INFO("model " << name << " in " << num_leaves << " leaves on " << backend);
  const std::string folder = std::string(STRETTO_SOURCE_DIR "/tests/golden/models/") + name;
  const auto files = OpenModel(folder);
  REQUIRE_OK(files);
  const auto golden = OpenSafetensors(folder + "/golden.safetensors");
  REQUIRE_OK(golden);
  const auto read = [&](const std::string& tensor) {
    const TensorInfo* t = (*golden)->Find(tensor);
    REQUIRE(t != nullptr);
    std::vector<float> out(NumElements(*t));
    REQUIRE_OK((*golden)->ReadAll(tensor, DType::kF32, out.data()));
    return out;
  };
  const TensorInfo* ids = (*golden)->Find("input_ids");
  REQUIRE(ids != nullptr);
  const auto* data = reinterpret_cast<const int32_t*>(ids->bytes.data());
  const int64_t T = ids->shape[1];
  TrainBatch batch;
  std::vector<SupervisedSequence> sequences;
  PackedBatch packed;
  for (int64_t b = 0; b < ids->shape[0]; ++b) {
    const std::vector<int32_t> row(data + b * T, data + (b + 1) * T);
    const int32_t segment = packed.AddSegment(row, -1);
    for (int64_t t = 0; t + 1 < T; ++t) {
      packed.target_rows_N.push_back(packed.segments.row_begin[segment] + static_cast<int32_t>(t));
      packed.targets_N.push_back(row[t + 1]);
    }
  }
  const auto device = MakeDevice(backend);
  const auto stream = device->CreateStream();
  const ModelConfig& config = files->config;
  const ParameterLayout whole(config), layout(config, {num_leaves, 0, num_leaves});
  DeviceMemory memory;
  const auto flat = memory.Make(*device, DType::kF32, 1, layout.size());
  const auto gradients = memory.Make(*device, DType::kF32, 1, layout.size());
  REQUIRE_OK(flat);
  REQUIRE_OK(gradients);
  device->Fill(*stream, *flat, 0.0f);
  device->Fill(*stream, *gradients, 0.0f);
  const auto parameters = testing::ParametersFrom(config, *files->tensors);
  // Between a piece and its place in the whole parameter.
  const auto each = [&](size_t i, std::vector<float>& all, std::vector<float>& piece, bool take) {
    const PieceOrigin& o = layout.origins()[i];
    const ParameterView& view = layout.parameters()[i].view;
    const int64_t stride = whole.parameters()[o.parameter].view.cols;
    piece.resize(view.size());
    for (int64_t r = 0; r < view.rows; ++r) {
      for (int64_t c = 0; c < view.cols; ++c) {
        float& there = all[(o.row + r) * stride + o.col + c];
        (take ? piece[r * view.cols + c] : there) = take ? there : piece[r * view.cols + c];
      }
    }
  };
  std::vector<float> piece;
  for (size_t i = 0; i < layout.parameters().size(); ++i) {
    std::vector<float> all = parameters.at(layout.parameters()[i].spec.name);
    each(i, all, piece, true);
    device->Upload(*stream, layout.parameters()[i].view.In(*flat), piece.data());
  }
  const auto transformer = Transformer::Create(*device, config, {DType::kF32, T});
  const auto weights = ModelWeights::View(*device, *stream, layout, *flat);
  REQUIRE_OK(transformer);
  REQUIRE_OK(weights);
  PackedPassOptions options;
  options.max_rows = packed.num_rows();
  options.max_targets = packed.num_targets();
  const auto pass =
      TensorParallelPass::Create(**transformer, options, *stream, nullptr, num_leaves);
  REQUIRE_OK(pass);
  std::vector<float> logprobs(packed.num_targets());
  (*pass)->Forward(*stream, **weights, packed, absl::MakeSpan(logprobs), {});
  CHECK(RelativeError(logprobs, read("logprobs")) < 1e-5);
  const std::vector<float> d_logprobs(logprobs.size(), -1.0f / static_cast<float>(logprobs.size()));
  (*pass)->Backward(*stream, **weights, layout, *flat, *gradients, d_logprobs, {});
  std::map<std::string, std::vector<float>> found;
  for (size_t i = 0; i < layout.parameters().size(); ++i) {
    const Parameter& p = layout.parameters()[i];
    piece.resize(p.view.size());
    device->Download(*stream, p.view.In(*gradients), piece.data());
    std::vector<float>& all = found[p.spec.name];
    all.resize(parameters.at(p.spec.name).size(), NAN);
    each(i, all, piece, false);
  }
  CHECK(found.size() == whole.parameters().size());
  for (const auto& [parameter, gradient] : found) {
    INFO("parameter " << parameter);
    CHECK(RelativeError(gradient, read("grad." + parameter)) < 1e-4);
  }
}

TEST_CASE("a model in leaves agrees with transformers in log-probs and gradients") {
  for (const char* backend : {"reference", "cpu"}) {
    for (const char* name : {"llama", "mistral", "qwen2", "qwen3", "llama_rope_yarn"}) {
      CheckGolden(name, backend, 2);
      CheckGolden(name, backend, 4);
    }
    CheckGolden("smollm2", backend, 3);
  }
}
}  // namespace
}  // namespace stretto::engine
