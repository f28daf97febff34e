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
  // One row: most leaves, and most ranks, have none.
  if (num_steps > 1) batches[1].groups = {{{3}, {{{5}, {-1.0f}, {-2.0f}, {}, 1.0f}}}};
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
  if (!SameBits(a.state, b.state)) return "masters, moments or log-probs";
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
  const auto logprobs = engine.LogProbs(batches.back());
  STRETTO_CHECK(logprobs.ok());
  for (const auto& values : {logprobs->logprobs, logprobs->entropy}) {
    for (const auto& group : values) {
      for (const auto& c : group) out.state.insert(out.state.end(), c.begin(), c.end());
    }
  }
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

TEST_CASE("a checkpoint loads into any other layout of the same leaves") {
  PhiloxStream random(stretto::testing::Seed(), 140);
  const ModelConfig config = LeafConfig(random, 4);
  const std::vector<TrainBatch> batches = Batches(config, 4, 141);
  const std::vector<TrainBatch> first(batches.begin(), batches.begin() + 2);
  const std::vector<TrainBatch> rest(batches.begin() + 2, batches.end());
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.k_leaves = 4;
  options.parallel.reduction_leaves = 64;
  const stretto::testing::TempDir dir, other;
  Outcome undisturbed;
  std::string hash;
  {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(nullptr, *device, config, options);
    Outcome ignored;
    Take(*engine, first, ignored);
    const auto saved = SaveCheckpoint(Files::Real(), {other.path(), 3}, *engine, "{}");
    REQUIRE_OK(saved);
    hash = saved->checkpoint_hash;
    // Masters as an export reads them.
    std::vector<float> whole, rows;
    for (const Parameter& p : engine->layout().parameters()) {
      whole.resize(p.view.size());
      rows.resize(p.view.size());
      REQUIRE_OK(engine->DownloadState(StateTensor::kMaster, p, whole.data()));
      const int64_t half = p.view.rows / 2;
      REQUIRE_OK(engine->ReadRows(p, 0, half, DType::kF32, rows.data()));
      REQUIRE_OK(
          engine->ReadRows(p, half, p.view.rows, DType::kF32, rows.data() + half * p.view.cols));
      CHECK(SameBits(whole, rows));
    }
    Take(*engine, rest, undisturbed);
  }
  options.parallel.kind = DataParallel::kFsdp;
  options.parallel.tensor_parallel = 2;
  const stretto::testing::TempDir shards;
  const auto hashes = RunRanks<std::string>(4, [&](Communicator& c) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(&c, *device, config, options);
    Outcome out;
    Take(*engine, first, out);
    CheckpointWriterOptions sharded;
    sharded.root = shards.path();
    CheckpointWriter writer(Files::Real(), sharded);
    STRETTO_CHECK(writer.Start(*engine, "{}").ok());
    const auto saved =
        SaveCheckpoint(Files::Real(), {c.rank() == 2 ? dir.path() : "", 3}, *engine, "{}");
    STRETTO_CHECK(saved.ok());
    const auto report = writer.Wait();
    STRETTO_CHECK_MSG(report && report->status.ok(), std::string(report->status.message()).c_str());
    return saved->checkpoint_hash;
  });
  for (const std::string& h : hashes) CHECK(h == hash);
  {
    // A rank that is alone writes its leaves' rectangles.
    TrainerOptions alone = options;
    alone.parallel.tensor_parallel = 1;
    const auto device = MakeDevice("cpu", 1);
    const auto engine = EngineIn(nullptr, *device, config, alone);
    Outcome out;
    Take(*engine, first, out);
    stretto::testing::TempDir folder;
    CheckpointWriterOptions background;
    background.root = folder.path();
    CheckpointWriter writer(Files::Real(), background);
    REQUIRE_OK(writer.Start(*engine, "{}"));
    const auto report = writer.Wait();
    REQUIRE(report.has_value());
    CHECK(report->info.checkpoint_hash == hash);
  }
  // Each rank's share in files of its own: rectangles of the same state.
  const auto in_shards = LatestCheckpoint(Files::Real(), shards.path());
  REQUIRE_OK(in_shards);
  CHECK(ReadCheckpointInfo(Files::Real(), *in_shards)->checkpoint_hash == hash);
  const auto latest = LatestCheckpoint(Files::Real(), dir.path());
  REQUIRE_OK(latest);
  options.parallel.kind = DataParallel::kDdp;
  options.parallel.tensor_parallel = 4;
  for (const std::string& folder : {*latest, *in_shards}) {
    const auto outcomes = RunRanks<Outcome>(4, [&](Communicator& c) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = EngineIn(&c, *device, config, options);
      STRETTO_CHECK(LoadCheckpoint(Files::Real(), folder, *engine).ok());
      Outcome out;
      Take(*engine, rest, out);
      return out;
    });
    for (const Outcome& out : outcomes) CHECK(Difference(undisturbed, out) == "");
  }
}

TEST_CASE(
    "a rank that leaves ends the step for everybody, in its copy of the model and in others") {
  PhiloxStream random(stretto::testing::Seed(), 150);
  const ModelConfig config = LeafConfig(random, 4);
  const std::vector<TrainBatch> batches = Batches(config, 2, 151);
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.k_leaves = 4;
  options.parallel.tensor_parallel = 2;
  options.parallel.reduction_leaves = 64;
  for (const DataParallel kind : {DataParallel::kDdp, DataParallel::kFsdp}) {
    INFO(Name(kind));
    options.parallel.kind = kind;
    const auto last = RunRanks<absl::Status>(4, [&](Communicator& c) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = EngineIn(&c, *device, config, options);
      absl::Status status = engine->Step(batches[0], TestObjective()).status();
      if (status.ok() && c.rank() != 1) status = engine->Step(batches[1], TestObjective()).status();
      return status;
    });
    CHECK(last[1].ok());
    for (const int r : {0, 2, 3}) {
      INFO("rank " << r << ": " << last[r].message());
      CHECK_FALSE(last[r].ok());
      CHECK_THAT(std::string(last[r].message()), Catch::Contains("(b)"));
    }
  }
}

TEST_CASE("models that can't be divided are refused, each with its reason") {
  ModelConfig config;
  config.vocab_size = 60;
  config.hidden_size = 48;
  config.intermediate_size = 64;
  config.num_layers = 1;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  const auto why = [&](int num_ranks, int64_t tensor_parallel, int64_t k_leaves) {
    ParallelOptions options;
    options.tensor_parallel = tensor_parallel;
    options.k_leaves = k_leaves;
    const absl::Status status = CheckTensorParallel(config, options, num_ranks);
    CHECK((status.ok() || absl::IsInvalidArgument(status)));
    return std::string(status.message());
  };
  using Catch::Contains;
  CHECK(why(6, 3, 6) == "");
  CHECK(why(4, 2, 2) == "");
  CHECK_THAT(why(4, 4, 4), Contains("6 query heads don't divide into tensor_parallel = 4"));
  CHECK_THAT(why(4, 2, 4), Contains("6 query heads don't divide into k_leaves = 4"));
  CHECK_THAT(why(3, 2, 2), Contains("tensor_parallel = 2 doesn't divide the 3 ranks"));
  CHECK_THAT(why(2, 2, 3), Contains("k_leaves = 3 must be a multiple of tensor_parallel = 2"));
  CHECK_THAT(why(2, 2, 1), Contains("k_leaves = 1 must be a multiple of tensor_parallel = 2"));
  CHECK_THAT(why(1, 0, 1), Contains("tensor_parallel must be at least 1, not 0"));
  CHECK_THAT(why(1, 1, 0), Contains("k_leaves must be at least 1, not 0"));
  config.intermediate_size = 4;
  CHECK_THAT(why(1, 1, 6), Contains("4 MLP columns don't divide into k_leaves = 6"));
  config.intermediate_size = 64;
  TrainerOptions options = SmallOptions(kLength);
  options.parallel.tensor_parallel = 2;
  options.parallel.k_leaves = 2;
  const auto device = MakeDevice("cpu", 1);
  CHECK_THAT(std::string(TrainerEngine::Create(*device, config, options).status().message()),
             Contains("doesn't divide the 1 ranks"));
  const auto refused = RunRanks<absl::Status>(2, [&](Communicator& c) {
    const auto reference = MakeDevice("reference");
    return TrainerEngine::Create(*reference, config, options, Clock::Real(), &c).status();
  });
  for (const absl::Status& s : refused) {
    CHECK_THAT(std::string(s.message()), Contains("a device whose memory the host reaches"));
  }
}
}  // namespace
}  // namespace stretto::engine
