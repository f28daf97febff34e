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
#include "engine/training/checkpoint_writer.h"
#include "engine/training/tensor_parallel_pass.h"
#include "engine/training/tensor_parallel_testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)

TEST_CASE("one to four ranks that share a model end several steps with the same bits") {
  PhiloxStream random(stretto::testing::Seed(), 120);
  INFO("seed " << stretto::testing::Seed());
  for (int round = 0; round < 4; ++round) {
    const int64_t heads = round % 2 == 0 ? 4 : 12;
    ModelConfig config = LeafConfig(random, heads);
    if (round == 2) {  // layers in which leaves share more than in the head
      config.num_kv_heads = 2;
      config.head_dim = 16;
      config.hidden_size = 160;
    }
    TrainerOptions options = SmallOptions(kLength);
    options.parallel.k_leaves = heads;
    options.parallel.reduction_leaves = 64;
    options.checkpointing = round == 2 ? Checkpointing::kFull : Checkpointing::kNone;
    options.weight_decay = round == 3 ? 0.1 : 0;
    options.dtype = round == 1 ? DType::kF32 : DType::kBF16;
    if (round == 3) options.logits_bytes = 3000;  // the head in chunks
    std::vector<Layout> layouts = {{DataParallel::kDdp, 2, 2},
                                   {DataParallel::kDdp, 4, 4},
                                   {DataParallel::kFsdp, 4, 2},
                                   {DataParallel::kDdp, 4, 2},
                                   {DataParallel::kFsdp, 2, 1}};
    if (heads % 3 == 0) layouts.push_back({DataParallel::kDdp, 3, 3});
    if (round == 2) {
      layouts.push_back({DataParallel::kZero1, 4, 2});
      layouts.push_back({DataParallel::kZero2, 4, 2});
    }
    CheckLayouts(config, options, Batches(config, round == 0 ? 20 : 3, 121 + round), layouts);
  }
}

TEST_CASE("a critic in leaves has the same bits on any ranks, and learns what a whole one does") {
  PhiloxStream random(stretto::testing::Seed(), 160);
  INFO("seed " << stretto::testing::Seed());
  const ModelConfig config = WithValueHead(LeafConfig(random, 4));
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.k_leaves = 4;
  options.parallel.reduction_leaves = 64;
  const std::vector<TrainBatch> batches = Batches(config, 3, 161);
  for (const size_t logits_bytes : {size_t{1} << 20, size_t{3000}}) {  // at once, and in chunks
    options.logits_bytes = logits_bytes;
    CheckLayouts(config, options, batches,
                 {{DataParallel::kDdp, 2, 2},
                  {DataParallel::kDdp, 4, 4},
                  {DataParallel::kFsdp, 4, 2},
                  {DataParallel::kZero2, 4, 2}});
  }
  // After one update moments are gradients: those of the head, too.
  options.dtype = DType::kF32;
  const std::vector<TrainBatch> first(batches.begin(), batches.begin() + 1);
  const Outcome in_leaves = RunIn(nullptr, config, options, first);
  options.parallel.k_leaves = 1;
  const Outcome whole = RunIn(nullptr, config, options, first);
  REQUIRE(whole.norms[0] > 0);
  CHECK(in_leaves.norms[0] == Approx(whole.norms[0]).epsilon(1e-5));
  CHECK(RelativeError(in_leaves.state, whole.state) < 1e-4);
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
    for (const char* name : {"llama", "mistral", "qwen2", "qwen3"}) {
      CheckGolden(name, backend, 2);
      CheckGolden(name, backend, 4);
    }
    CheckGolden("smollm2", backend, 3);
  }
}

TEST_CASE("leaves change the order of sums, not what is learned; one leaf is no leaf") {
  PhiloxStream random(stretto::testing::Seed(), 130);
  ModelConfig config = LeafConfig(random, 4);
  const std::vector<TrainBatch> batches = Batches(config, 1, 131);
  TrainerOptions options = SmallOptions(kLength);
  options.dtype = DType::kF32;
  const Outcome plain = RunIn(nullptr, config, options, batches);
  for (const int64_t leaves : {2, 4}) {
    options.parallel.k_leaves = leaves;
    const Outcome divided = RunIn(nullptr, config, options, batches);
    CHECK(divided.losses[0] == Approx(plain.losses[0]).epsilon(1e-4));
    CHECK(divided.norms[0] == Approx(plain.norms[0]).epsilon(1e-4));
    CHECK(divided.entropies[0] == Approx(plain.entropies[0]).epsilon(1e-4));
  }
  const auto device = MakeDevice("cpu", 1);
  CHECK(EngineIn(nullptr, *device, config, options)->profile().ToString() == "cpu/fma/f32/4");
}

// As formulas: W bytes of a weight, tensors of P elements divided over n ranks.
TEST_CASE("bytes held and bytes sent of ranks that share a model are those of the formulas") {
  ModelConfig config;
  config.vocab_size = 256;
  config.hidden_size = 128;
  config.intermediate_size = 512;
  config.num_layers = 3;
  config.num_heads = config.num_kv_heads = 4;
  config.head_dim = 32;
  config.max_position_embeddings = 64;
  config.tie_word_embeddings = true;
  const auto P = static_cast<double>(ParameterLayout(config).size());
  TrainBatch batch;
  batch.groups.resize(1);
  batch.groups[0].prompt_ids = {1, 2, 3, 4, 5, 6, 7, 8};
  batch.groups[0].completions.resize(4);
  for (int i = 0; i < 4; ++i) {
    auto& c = batch.groups[0].completions[i];
    for (int t = 0; t < 15; ++t) c.ids.push_back(10 + 16 * t + i);
    c.advantage = 1;
  }
  TrainerOptions options = SmallOptions(kLength);
  options.micro_batch_tokens = 100;
  options.dtype = DType::kBF16;
  options.parallel.k_leaves = 4;
  const double T = 64, N = 60, D = 128, W = 2, G = 4, L = 3;  // rows: a prompt and 4 × 14
  struct Seen {
    MemoryLedger memory;
    CollectiveTraffic gathered, scattered, reduced, exchanged;
  };
  for (const int n : {2, 4}) {
    INFO(n << " ranks");
    options.parallel.tensor_parallel = n;
    Seen total;
    double held = 0;
    for (const Seen& s : RunRanks<Seen>(n, [&](Communicator& c) {
           const auto device = MakeDevice("cpu", 1);
           const auto engine = EngineIn(&c, *device, config, options);
           STRETTO_CHECK(engine->Step(batch, TestObjective()).ok());
           Seen seen{engine->memory(), {}, {}, {}, {}};
           const Communicator* leaves = engine->leaves_group();
           seen.gathered = leaves->traffic(CollectiveKind::kAllGather);
           seen.scattered = leaves->traffic(CollectiveKind::kReduceScatter);
           seen.reduced = leaves->traffic(CollectiveKind::kAllReduce);
           seen.exchanged = leaves->traffic(CollectiveKind::kAllToAll);
           return seen;
         })) {
      held += static_cast<double>(s.memory.weights + s.memory.gradients + s.memory.optimizer) / n;
      total.gathered.bytes_sent += s.gathered.bytes_sent;
      total.scattered.bytes_sent += s.scattered.bytes_sent;
      total.reduced.bytes_sent += s.reduced.bytes_sent;
      total.exchanged.bytes_sent += s.exchanged.bytes_sent;
    }
    // Padding to blocks of 4096 and norms on every rank: little of a model, much of one so small.
    const double own = (W + G + 12) * P / n;
    CHECK(held >= own);
    CHECK(held <= own + (W + G + 12) * 4096 * (2 * L + 4));
    const double share = (n - 1.0) / n;  // of what all ranks of a ring would send together: × n
    // Norms' outputs: 2 a layer forward, 2 again backward, the last one once; gradients that
    // arrive: 2 a layer; maxima: from everybody to everybody. The norm's blocks are few bytes.
    const double gathered = n * share * ((4 * L + 1) * T * D * W + 2 * L * T * D * G);
    CHECK(static_cast<double>(total.gathered.bytes_sent) ==
          Approx(gathered + n * (n - 1) * N * 4).epsilon(0.02));
    // Sums: 2 a layer in either direction, and of the rows that have targets.
    CHECK(static_cast<double>(total.scattered.bytes_sent) ==
          Approx(n * share * (4 * L * T + N) * D * G).epsilon(0.01));
    // Sums of exponentials; gradients of norms (padded to a block a unit).
    CHECK(static_cast<double>(total.reduced.bytes_sent) ==
          Approx(n * share * 2 * G * (3 * N + (L + 1) * 4096)).epsilon(0.01));
    // Rows of the embedding: those whose token is another rank's, to and fro.
    CHECK(static_cast<double>(total.exchanged.bytes_sent) <= T * D * (W + G));
    CHECK(total.exchanged.bytes_sent > 0);
  }
}

}  // namespace
}  // namespace stretto::engine
