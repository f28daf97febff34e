// Policies that are a base and an adapter: gradients against PyTorch and PEFT, one copy of weights,
// the same bits whoever computes, and files that others read.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/strings/match.h"
#include "base/files.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/formats/model_files.h"
#include "engine/formats/safetensors.h"
#include "engine/training/checkpoint.h"
#include "engine/training/checkpoint_adapter.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)
constexpr int64_t kLength = 40;
const char* const kGolden = STRETTO_SOURCE_DIR "/tests/golden/";

ModelFiles OpenGolden(const std::string& name) {
  auto files = OpenModel(absl::StrCat(kGolden, "models/", name));
  REQUIRE_OK(files);
  return *std::move(files);
}

std::vector<float> ReadF32(const TensorSource& source, const std::string& name) {
  const TensorInfo* info = source.Find(name);
  REQUIRE(info != nullptr);
  std::vector<float> values(static_cast<size_t>(NumElements(*info)));
  REQUIRE_OK(source.ReadAll(name, DType::kF32, values.data()));
  return values;
}

double RelativeError(absl::Span<const float> a, absl::Span<const float> b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

TrainerOptions AdapterOptions(std::vector<std::string> targets = {}) {
  TrainerOptions options = SmallOptions(kLength);
  options.lora = {4, 8, std::move(targets)};
  return options;
}

std::unique_ptr<TrainerEngine> Open(Device& device, const ModelFiles& base,
                                    const TrainerOptions& options,
                                    const TensorSource* adapter = nullptr,
                                    Communicator* group = nullptr) {
  auto engine = TrainerEngine::Create(device, base.config, options, Clock::Real(), group);
  STRETTO_CHECK_MSG(engine.ok(), std::string(engine.status().message()).c_str());
  STRETTO_CHECK((*engine)->LoadModel(*base.tensors, 3, adapter).ok());
  return *std::move(engine);
}

std::vector<float> AdapterState(TrainerEngine& engine) {
  std::vector<float> state;
  for (const auto which : {StateTensor::kMaster, StateTensor::kM, StateTensor::kV}) {
    for (const Parameter& p : engine.trained_layout().parameters()) {
      const size_t begin = state.size();
      state.resize(begin + p.view.size());
      STRETTO_CHECK(engine.DownloadState(which, p, &state[begin]).ok());
    }
  }
  return state;
}

std::vector<uint8_t> Weights(TrainerEngine& engine) {
  std::vector<uint8_t> all;
  const auto weights = engine.GetWeights();
  for (const Parameter& p : weights->parameters()) {
    const auto bytes = weights->bytes(p);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

std::vector<TrainBatch> Batches(const ModelConfig& config, int num_steps, uint64_t stream) {
  PhiloxStream random(stretto::testing::Seed(), stream);
  std::vector<TrainBatch> batches;
  for (int i = 0; i < num_steps; ++i) batches.push_back(RandomBatch(config, kLength, random));
  return batches;
}

void Take(TrainerEngine& engine, const std::vector<TrainBatch>& batches) {
  for (const TrainBatch& batch : batches) {
    const auto result = engine.Step(batch, TestObjective());
    STRETTO_CHECK_MSG(result.ok(), std::string(result.status().message()).c_str());
    STRETTO_CHECK(!result->skipped);
  }
}

// A fused batch of the golden ids, every token but the first a target.
PackedBatch GoldenBatch(const TensorSource& golden) {
  const TensorInfo* info = golden.Find("input_ids");
  REQUIRE(info != nullptr);
  const auto* ids = reinterpret_cast<const int32_t*>(info->bytes.data());
  const int64_t T = info->shape[1];
  PackedBatch batch;
  for (int64_t b = 0; b < info->shape[0]; ++b) {
    const int32_t segment = batch.AddSegment({ids + b * T, static_cast<size_t>(T)}, -1);
    for (int64_t t = 0; t + 1 < T; ++t) {
      batch.target_rows_N.push_back(batch.segments.row_begin[segment] + static_cast<int32_t>(t));
      batch.targets_N.push_back(ids[b * T + t + 1]);
    }
  }
  return batch;
}

void CheckGolden(const std::string& backend) {
  INFO(backend);
  const ModelFiles base = OpenGolden("llama");
  const auto adapter = OpenPeft(absl::StrCat(kGolden, "lora"), base.config);
  REQUIRE_OK(adapter);
  const auto golden = OpenSafetensors(absl::StrCat(kGolden, "lora/golden.safetensors"));
  REQUIRE_OK(golden);
  const PackedBatch batch = GoldenBatch(**golden);
  const auto device = MakeDevice(backend);
  const auto stream = device->CreateStream();
  const auto transformer = Transformer::Create(*device, base.config, {DType::kF32, kLength});
  REQUIRE_OK(transformer);
  const auto layout = std::make_shared<const ParameterLayout>(base.config);
  AdaptedModel::Options of_model;
  of_model.dtype = DType::kF32;
  of_model.lora = adapter->lora;
  of_model.max_rows = batch.num_rows();
  const auto model = AdaptedModel::Create(*device, *stream, base.config, layout, of_model);
  REQUIRE_OK(model);
  REQUIRE_OK((*model)->LoadBase(base.config, *base.tensors));
  const ParameterLayout& of_adapter = *(*model)->adapter().layout();
  DeviceMemory memory;
  const auto values = memory.Make(*device, DType::kF32, 1, of_adapter.size());
  const auto gradients = memory.Make(*device, DType::kF32, 1, of_adapter.size());
  REQUIRE((values.ok() && gradients.ok()));
  device->Fill(*stream, *values, 0.0f);
  device->Fill(*stream, *gradients, 0.0f);
  for (const Parameter& p : of_adapter.parameters()) {
    device->Upload(*stream, p.view.In(*values), ReadF32(*adapter->tensors, p.spec.name).data());
  }
  REQUIRE_OK((*model)->Merge(*values));

  PackedPassOptions options;
  options.max_rows = batch.num_rows();
  options.max_targets = batch.num_targets();
  options.lora = &(*model)->adapter();
  const auto pass = PackedPass::Create(**transformer, options);
  REQUIRE_OK(pass);
  std::vector<float> logprobs(batch.num_targets());
  (*pass)->Forward(*stream, (*model)->weights(), batch, absl::MakeSpan(logprobs), {});
  CHECK(RelativeError(logprobs, ReadF32(**golden, "logprobs")) < 1e-5);
  const std::vector<float> d_logprobs(logprobs.size(), -1.0f / static_cast<float>(logprobs.size()));
  (*pass)->Backward(*stream, (*model)->weights(), *layout, (*model)->flat_weights(), *gradients,
                    d_logprobs, {});
  for (const Parameter& p : of_adapter.parameters()) {
    std::vector<float> gradient(p.view.size());
    device->Download(*stream, p.view.In(*gradients), gradient.data());
    INFO(p.spec.name);
    CHECK(RelativeError(gradient, ReadF32(**golden, "grad." + p.spec.name)) < 1e-4);
  }
}
}  // namespace

TEST_CASE("log-probs and gradients of an adapter are those of PyTorch and PEFT") {
  for (const char* backend : {"cpu", "reference"}) CheckGolden(backend);
}

TEST_CASE("an adapter learns, its bits depend on no thread, and the rest is the base's") {
  const ModelFiles base = OpenGolden("qwen2");  // with biases
  const auto batches = Batches(base.config, 3, 200);
  TrainerOptions options = AdapterOptions({"down_proj", "q_proj", "v_proj"});
  std::vector<float> first;
  for (const int threads : {1, 2, 4}) {
    const auto device = MakeDevice("cpu", threads);
    const auto engine = Open(*device, base, options);
    const auto begin = engine->GetWeights();
    for (const Parameter& p : begin->parameters()) {  // B is zero: the base, rounded
      std::vector<uint16_t> rounded(p.view.size());
      REQUIRE_OK(base.tensors->ReadAll(p.spec.name, DType::kBF16, rounded.data()));
      CHECK(std::memcmp(begin->bytes(p).data(), rounded.data(), begin->bytes(p).size()) == 0);
    }
    Take(*engine, batches);
    const auto end = engine->GetWeights();
    for (const Parameter& p : end->parameters()) {
      const bool same = begin->bytes(p) == end->bytes(p);
      const bool adapted = absl::StrContains(p.spec.name, "down_proj") ||
                           absl::StrContains(p.spec.name, "q_proj.weight") ||
                           absl::StrContains(p.spec.name, "v_proj.weight");
      INFO(p.spec.name);
      CHECK(same == !adapted);
    }
    const std::vector<float> state = AdapterState(*engine);
    if (first.empty()) first = state;
    CHECK(SameBits(state, first));
  }
}

TEST_CASE("supervised steps with an adapter bring the loss down") {
  const ModelFiles base = OpenGolden("qwen3");  // with norms of queries and keys
  TrainerOptions options = AdapterOptions();
  const auto device = MakeDevice("cpu");
  const auto engine = Open(*device, base, options);
  std::vector<SupervisedSequence> sequences(2);
  for (int i = 0; i < 20; ++i) {
    sequences[0].ids.push_back(5 + i % 4);
    sequences[1].ids.push_back(60 + i % 3);
  }
  double before = 0, after = 0;
  for (int step = 0; step < 15; ++step) {
    const auto result = engine->SupervisedStep(sequences);
    REQUIRE_OK(result);
    if (step == 0) before = result->loss;
    after = result->loss;
  }
  INFO(before << " to " << after);
  CHECK(after < 0.5 * before);
}

TEST_CASE("optimizer state and gradients are the adapter's, and weights are there once") {
  const ModelFiles base = OpenGolden("llama");
  const auto device = MakeDevice("cpu");
  TrainerOptions options = AdapterOptions();
  const auto engine = Open(*device, base, options);
  options.lora = {};
  const auto whole = TrainerEngine::Create(*device, base.config, options);
  REQUIRE_OK(whole);
  REQUIRE_OK((*whole)->LoadModel(*base.tensors));
  const MemoryLedger with = engine->memory(), without = (*whole)->memory();
  const auto P = static_cast<size_t>(engine->trained_layout().size());
  CHECK(with.optimizer == 12 * P);
  CHECK(with.gradients == 4 * P);
  CHECK(with.weights == without.weights + 4 * P);
  CHECK(without.optimizer == 12 * static_cast<size_t>((*whole)->layout().size()));
  CHECK(engine->num_trained_parameters() < (*whole)->num_trained_parameters() / 2);
}

TEST_CASE("a checkpoint has the adapter alone, and training goes on from it with the same bits") {
  const ModelFiles base = OpenGolden("smollm2_bf16");
  const auto batches = Batches(base.config, 4, 201);
  const TrainerOptions options = AdapterOptions();
  const auto device = MakeDevice("cpu");
  const auto straight = Open(*device, base, options);
  stretto::testing::TempDir dir;
  const std::string root = JoinPath(dir.path(), "checkpoints");
  Take(*straight, {batches.begin(), batches.begin() + 2});
  const auto saved = SaveCheckpoint(Files::Real(), {root}, *straight, "mine");
  REQUIRE_OK(saved);
  const std::vector<uint8_t> weights = Weights(*straight);

  const auto masters = OpenMasters(Files::Real(), saved->path);
  REQUIRE_OK(masters);
  CHECK((*masters)->tensors().size() == straight->trained_layout().parameters().size());
  auto restored = TrainerEngine::Create(*device, base.config, options);
  REQUIRE_OK(restored);
  const auto too_soon = LoadCheckpoint(Files::Real(), saved->path, **restored);
  CHECK(absl::IsFailedPrecondition(too_soon.status()));
  REQUIRE_OK((*restored)->LoadBase(*base.tensors));
  const auto info = LoadCheckpoint(Files::Real(), saved->path, **restored);
  REQUIRE_OK(info);
  CHECK(info->extra_json == "mine");
  CHECK(info->adapter == AdapterOf(*straight));
  CHECK(Weights(**restored) == weights);
  Take(*straight, {batches.begin() + 2, batches.end()});
  Take(**restored, {batches.begin() + 2, batches.end()});
  CHECK(SameBits(AdapterState(**restored), AdapterState(*straight)));

  // Whoever reads the policy from the checkpoint has the trainer's weights, to the bit.
  const auto policy = OpenPolicy(Files::Real(), saved->path, *device, base.config, base.tensors);
  REQUIRE_OK(policy);
  REQUIRE_OK(CheckShapes(base.config, **policy));
  std::vector<uint8_t> read;
  for (const Parameter& p : straight->layout().parameters()) {
    std::vector<uint8_t> rounded(2 * p.view.size());
    REQUIRE_OK((*policy)->ReadAll(p.spec.name, DType::kBF16, rounded.data()));
    read.insert(read.end(), rounded.begin(), rounded.end());
  }
  CHECK(read == weights);

  // Others are refused.
  const auto refused = [&](const ModelFiles& other, const TrainerOptions& with) {
    const auto engine = Open(*device, other, with);
    return LoadCheckpoint(Files::Real(), saved->path, *engine).status();
  };
  TrainerOptions other = options;
  other.lora.rank = 3;
  CHECK(absl::IsInvalidArgument(refused(base, other)));
  other.lora = {};
  CHECK(absl::IsInvalidArgument(refused(base, other)));
  const absl::Status other_base = refused(OpenGolden("smollm2"), options);
  CHECK(absl::IsInvalidArgument(other_base));
  CHECK(absl::StrContains(other_base.message(), "another base"));
}

TEST_CASE("an adapter that was exported is one to start from") {
  const ModelFiles base = OpenGolden("llama");
  const auto device = MakeDevice("cpu");
  TrainerOptions options = AdapterOptions({"v_proj", "gate_proj"});
  const auto engine = Open(*device, base, options);
  Take(*engine, Batches(base.config, 2, 202));
  stretto::testing::TempDir dir;
  const std::string folder = JoinPath(dir.path(), "adapter");
  REQUIRE_OK(ExportEngineAdapter(Files::Real(), *engine, {folder, "llama", false}));
  CHECK(
      absl::IsAlreadyExists(ExportEngineAdapter(Files::Real(), *engine, {folder, "llama", false})));
  REQUIRE_OK(ExportEngineAdapter(Files::Real(), *engine, {folder, "llama", true}));
  const auto adapter = OpenPeft(folder, base.config);
  REQUIRE_OK(adapter);
  CHECK(adapter->lora == engine->options().lora);
  CHECK(Weights(*Open(*device, base, options, adapter->tensors.get())) == Weights(*engine));

  const auto other = OpenPeft(folder, OpenGolden("qwen3").config);
  CHECK(absl::IsInvalidArgument(other.status()));
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"use_dora\": false", "\"use_dora\": true"},
           {"\"r\": 4", "\"r\": 5"},
           {"\"LORA\"", "\"IA3\""},
           {"v_proj", "w_proj"}}) {
    auto text = Files::Real().ReadAll(JoinPath(folder, "adapter_config.json"));
    REQUIRE_OK(text);
    const std::string kept = *text;
    text->replace(text->find(from), from.size(), to);
    REQUIRE_OK(Files::Real().WriteAtomically(JoinPath(folder, "adapter_config.json"), *text));
    INFO(to);
    const absl::Status status = OpenPeft(folder, base.config).status();
    CHECK((absl::IsInvalidArgument(status) || absl::IsUnimplemented(status)));
    REQUIRE_OK(Files::Real().WriteAtomically(JoinPath(folder, "adapter_config.json"), kept));
  }
}

TEST_CASE("ranks that share an adapter's training have the bits of one alone") {
  const ModelFiles base = OpenGolden("llama");
  const auto batches = Batches(base.config, 2, 203);
  TrainerOptions options = AdapterOptions();
  options.parallel.reduction_leaves = 64;
  struct Outcome {
    std::vector<float> state;
    std::vector<uint8_t> weights;
    MemoryLedger memory;
    int64_t reduced = 0, scattered = 0, gathered = 0;  // bytes sent
  };
  const auto run = [&](Communicator* group) -> Outcome {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = Open(*device, base, options, nullptr, group);
    Take(*engine, batches);
    Outcome out{AdapterState(*engine), {}, engine->memory()};
    if (group != nullptr) {
      out.reduced = group->traffic(CollectiveKind::kAllReduce).bytes_sent;
      out.scattered = group->traffic(CollectiveKind::kReduceScatter).bytes_sent;
      out.gathered = group->traffic(CollectiveKind::kAllGather).bytes_sent;
    }
    const auto weights = engine->GatherWeights();
    STRETTO_CHECK(weights.ok());
    for (const Parameter& p : (*weights)->parameters()) {
      const auto bytes = (*weights)->bytes(p);
      out.weights.insert(out.weights.end(), bytes.begin(), bytes.end());
    }
    // The policy in f32 is there for everybody, from the base and the adapter.
    const Parameter& first = engine->layout().parameters()[1];
    std::vector<float> rows(first.view.size());
    STRETTO_CHECK(engine->ReadRows(first, 0, first.view.rows, DType::kF32, rows.data()).ok());
    out.state.insert(out.state.end(), rows.begin(), rows.end());
    return out;
  };
  const Outcome alone = run(nullptr);
  int64_t gathered = 0;  // by zero2: of adapters
  for (const DataParallel kind :
       {DataParallel::kDdp, DataParallel::kZero1, DataParallel::kZero2, DataParallel::kFsdp}) {
    for (const int num_ranks : {2, 3}) {
      options.parallel.kind = kind;
      const auto outcomes =
          RunRanks<Outcome>(num_ranks, [&](Communicator& group) { return run(&group); });
      for (const Outcome& outcome : outcomes) {
        INFO(Name(kind) << " on " << num_ranks);
        CHECK(SameBits(outcome.state, alone.state));
        CHECK(outcome.weights == alone.weights);
        // Under ddp sums are gathered at once (AllReduce) or later.
        CHECK(outcome.scattered + outcome.reduced > 0);
        if (kind != DataParallel::kDdp) CHECK(outcome.reduced == 0);
        CHECK((outcome.memory.optimizer < alone.memory.optimizer) == (kind != DataParallel::kDdp));
        CHECK((outcome.memory.gradients < alone.memory.gradients) ==
              options.parallel.streams_gradients());
        // The model itself is divided and gathered under fsdp alone.
        CHECK((outcome.memory.weights < alone.memory.weights) == (kind == DataParallel::kFsdp));
      }
      if (num_ranks != 2) continue;
      if (kind == DataParallel::kZero2) gathered = outcomes[0].gathered;
      if (kind == DataParallel::kFsdp) CHECK(outcomes[0].gathered > 2 * gathered);
    }
  }
}

TEST_CASE("adapters that can't be are refused with the reason") {
  const ModelFiles base = OpenGolden("llama");
  const auto device = MakeDevice("cpu", 1);
  const auto refused = [&](const TrainerOptions& options) {
    const auto engine = TrainerEngine::Create(*device, base.config, options);
    CHECK(absl::IsInvalidArgument(engine.status()));
    return std::string(engine.status().message());
  };
  TrainerOptions options = AdapterOptions();
  options.parallel.k_leaves = 2;
  CHECK(absl::StrContains(refused(options), "k_leaves"));
  CHECK(absl::StrContains(refused(AdapterOptions({"lm_head"})), "q_proj"));
  CHECK(absl::StrContains(refused(AdapterOptions({"q_proj", "q_proj"})), "twice"));
  options = AdapterOptions();
  options.lora.rank = 1000;
  CHECK(absl::StrContains(refused(options), "rank 1000"));
  options = AdapterOptions();
  options.lora.alpha = 0;
  CHECK(absl::StrContains(refused(options), "alpha"));
  const auto engine = TrainerEngine::Create(*device, base.config, AdapterOptions());
  REQUIRE_OK(engine);
  CHECK(absl::IsInvalidArgument((*engine)->InitRandom(1)));
}
}  // namespace stretto::engine
