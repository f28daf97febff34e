// Logits, log-probs, loss and the gradient of every parameter against Hugging Face transformers
// (tests/golden/models), on every backend, in fp32.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/testing.h"
#include "engine/formats/model_files.h"
#include "engine/formats/safetensors.h"
#include "engine/model/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)

struct Golden {
  explicit Golden(const std::string& name)
      : folder(std::string(STRETTO_SOURCE_DIR "/tests/golden/models/") + name) {
    auto opened = OpenModel(folder);
    REQUIRE_OK(opened);
    files = *std::move(opened);
    REQUIRE_OK(CheckShapes(files.config, *files.tensors));
    auto golden = OpenSafetensors(folder + "/golden.safetensors");
    REQUIRE_OK(golden);
    values = *std::move(golden);
  }
  std::vector<float> Read(const std::string& name) const {
    const TensorInfo* t = values->Find(name);
    REQUIRE(t != nullptr);
    std::vector<float> out(NumElements(*t));
    REQUIRE_OK(values->ReadAll(name, DType::kF32, out.data()));
    return out;
  }
  std::vector<std::vector<int32_t>> Ids() const {
    const TensorInfo* t = values->Find("input_ids");
    REQUIRE(t != nullptr);
    const auto* ids = reinterpret_cast<const int32_t*>(t->bytes.data());
    std::vector<std::vector<int32_t>> rows;
    for (int64_t b = 0; b < t->shape[0]; ++b) {
      rows.emplace_back(ids + b * t->shape[1], ids + (b + 1) * t->shape[1]);
    }
    return rows;
  }

  std::string folder;
  ModelFiles files;
  std::shared_ptr<const TensorSource> values;
};

// |a − b| / |b| in the Euclidean norm.
double RelativeError(absl::Span<const float> a, absl::Span<const float> b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// Logits of all rows of one sequence through the paged face.
std::vector<float> PagedLogits(TestModel& model, const std::vector<int32_t>& ids) {
  const auto T = static_cast<int64_t>(ids.size()), M = (T + kBlockTokens - 1) / kBlockTokens;
  auto cache = model.device.AllocateKvCache(model.transformer->CacheShape(M));
  REQUIRE_OK(cache);
  auto workspace =
      Workspace::Create(model.device, model.transformer->config(), DType::kF32, {T, T, 1, M});
  REQUIRE_OK(workspace);
  std::vector<int32_t> positions(T), sequence(T, 0), context(T), table(M);
  std::iota(positions.begin(), positions.end(), 0);
  std::iota(context.begin(), context.end(), 1);
  std::iota(table.begin(), table.end(), 0);
  const Tensor logits = model.transformer->ForwardPaged(
      *model.stream, *model.weights,
      {ids, positions, sequence, context, positions, table, 1, positions}, **cache, **workspace);
  std::vector<float> host(logits.size());
  model.device.Download(*model.stream, logits, host.data());
  return host;
}

void CheckModel(const std::string& name, const std::string& backend, bool gradients) {
  INFO("model " << name << " on " << backend);
  const Golden golden(name);
  const auto device = MakeDevice(backend);
  const auto ids = golden.Ids();
  const auto T = static_cast<int64_t>(ids[0].size());
  TestModel model(*device, golden.files.config, DType::kF32, T,
                  ParametersFrom(golden.files.config, *golden.files.tensors));

  std::vector<float> logits;
  PackedBatch batch;
  for (const auto& row : ids) {
    const auto part = PagedLogits(model, row);
    logits.insert(logits.end(), part.begin(), part.end());
    const int32_t segment = batch.AddSegment(row, -1);
    for (int64_t t = 0; t + 1 < T; ++t) {
      batch.target_rows_N.push_back(batch.segments.row_begin[segment] + static_cast<int32_t>(t));
      batch.targets_N.push_back(row[t + 1]);
    }
  }
  CHECK(RelativeError(logits, golden.Read("logits")) < 1e-5);

  PackedPassOptions options;
  options.max_rows = batch.num_rows();
  options.max_targets = batch.num_targets();
  auto pass = PackedPass::Create(*model.transformer, options);
  REQUIRE_OK(pass);
  std::vector<float> logprobs(batch.num_targets());
  (*pass)->Forward(*model.stream, *model.weights, batch, absl::MakeSpan(logprobs), {});
  CHECK(RelativeError(logprobs, golden.Read("logprobs")) < 1e-5);
  const double loss = -std::accumulate(logprobs.begin(), logprobs.end(), 0.0) /
                      static_cast<double>(logprobs.size());
  CHECK(loss == Approx(golden.Read("loss")[0]).epsilon(1e-5));
  if (!gradients) return;

  const std::vector<float> d_logprobs(logprobs.size(), -1.0f / static_cast<float>(logprobs.size()));
  (*pass)->Backward(*model.stream, *model.weights, model.layout, model.flat, model.gradients,
                    d_logprobs, {});
  for (const auto& [parameter, gradient] : model.Gradients()) {
    INFO("parameter " << parameter);
    CHECK(RelativeError(gradient, golden.Read("grad." + parameter)) < 1e-4);
  }
}

TEST_CASE("models agree with transformers in logits, loss and gradients") {
  for (const char* backend : {"reference", "cpu"}) {
    for (const char* name : {"llama", "smollm2", "mistral", "qwen2", "qwen3", "llama_rope_llama3",
                             "llama_rope_linear", "llama_rope_yarn", "llama_rope_dynamic"}) {
      CheckModel(name, backend, /*gradients=*/true);
    }
    CheckModel("llama_sharded", backend, /*gradients=*/false);
    CheckModel("smollm2_bf16", backend, /*gradients=*/false);
  }
}

// The derivative of half the squared error of a value, of which the clipped value's counts where it
// is larger.
float DOfValue(float value, float old_value, float target) {
  const float clipped = std::clamp(value, old_value - 0.2f, old_value + 0.2f);
  const float error = value - target, other = clipped - target;
  return other * other > error * error ? 0.0f : error;
}

void CheckCritic(const std::string& name, const std::string& backend) {
  INFO("critic of " << name << " on " << backend);
  const Golden golden(name);
  auto opened = OpenSafetensors(
      absl::StrCat(STRETTO_SOURCE_DIR "/tests/golden/critic/critic.", name, ".safetensors"));
  REQUIRE_OK(opened);
  const auto read = [&](const std::string& tensor) {
    const TensorInfo* t = (*opened)->Find(tensor);
    REQUIRE(t != nullptr);
    std::vector<float> out(NumElements(*t));
    REQUIRE_OK((*opened)->ReadAll(tensor, DType::kF32, out.data()));
    return out;
  };
  const ModelConfig config = WithValueHead(golden.files.config);
  HostParameters parameters = ParametersFrom(golden.files.config, *golden.files.tensors);
  parameters.erase("lm_head.weight");
  parameters["score.weight"] = read("score.weight");
  const auto device = MakeDevice(backend);
  const auto ids = golden.Ids();
  const auto T = static_cast<int64_t>(ids[0].size());
  TestModel model(*device, config, DType::kF32, T, parameters);
  PackedBatch batch;
  for (const auto& row : ids) {
    const int32_t segment = batch.AddSegment(row, -1);
    for (int64_t t = 0; t + 1 < T; ++t) {
      batch.target_rows_N.push_back(batch.segments.row_begin[segment] + static_cast<int32_t>(t));
      batch.targets_N.push_back(row[t + 1]);
    }
  }
  PackedPassOptions options;
  options.max_rows = batch.num_rows();
  options.max_targets = batch.num_targets();
  options.logits_bytes = 17 * HeadRowBytes(config, DType::kF32, options);  // several chunks
  auto pass = PackedPass::Create(*model.transformer, options);
  REQUIRE_OK(pass);
  std::vector<float> values(batch.num_targets()), entropy(values.size(), 1.0f);
  (*pass)->Forward(*model.stream, *model.weights, batch, absl::MakeSpan(values),
                   absl::MakeSpan(entropy));
  CHECK(RelativeError(values, read("values")) < 1e-5);
  CHECK(std::all_of(entropy.begin(), entropy.end(), [](float h) { return h == 0; }));
  const auto old_values = read("old_values"), returns = read("returns");
  std::vector<float> d_values;
  for (size_t i = 0; i < values.size(); ++i) {
    d_values.push_back(DOfValue(values[i], old_values[i], returns[i]) /
                       static_cast<float>(values.size()));
  }
  (*pass)->Backward(*model.stream, *model.weights, model.layout, model.flat, model.gradients,
                    d_values, {});
  for (const auto& [parameter, gradient] : model.Gradients()) {
    INFO("parameter " << parameter);
    CHECK(RelativeError(gradient, read("grad." + parameter)) < 1e-4);
  }
}

TEST_CASE("a critic agrees with PyTorch in values and gradients") {
  for (const char* backend : {"reference", "cpu"}) {
    for (const char* name : {"smollm2", "qwen2"}) CheckCritic(name, backend);
  }
}

// Hidden: needs the folder that tests/golden/make_smollm2.py writes, in STRETTO_SMOLLM2.
TEST_CASE("SmolLM2 agrees with transformers", "[.smollm2]") {
  const char* folder = std::getenv("STRETTO_SMOLLM2");
  REQUIRE(folder != nullptr);
  const auto files = OpenModel(folder);
  REQUIRE_OK(files);
  const auto golden = OpenSafetensors(STRETTO_SOURCE_DIR "/tests/golden/smollm2.safetensors");
  REQUIRE_OK(golden);
  const auto read = [&](const std::string& name) {
    const TensorInfo* t = (*golden)->Find(name);
    REQUIRE(t != nullptr);
    std::vector<float> out(NumElements(*t));
    REQUIRE_OK((*golden)->ReadAll(name, DType::kF32, out.data()));
    return out;
  };
  const auto device = MakeDevice("cpu");
  const auto stream = device->CreateStream();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto transformer = Transformer::Create(*device, files->config, {dtype, 1024});
    REQUIRE_OK(transformer);
    const auto weights =
        ModelWeights::Load(*device, *stream, files->config, dtype, *files->tensors);
    REQUIRE_OK(weights);
    PackedPassOptions options;
    options.max_rows = options.max_targets = 1024;
    options.train = false;
    const auto pass = PackedPass::Create(**transformer, options);
    REQUIRE_OK(pass);
    for (int i = 0; i < 4; ++i) {
      const TensorInfo* t = (*golden)->Find("input_ids." + std::to_string(i));
      REQUIRE(t != nullptr);
      const auto* data = reinterpret_cast<const int32_t*>(t->bytes.data());
      const std::vector<int32_t> ids(data, data + NumElements(*t));
      PackedBatch batch;
      batch.AddSegment(ids, -1);
      for (size_t j = 0; j + 1 < ids.size(); ++j) {
        batch.target_rows_N.push_back(static_cast<int32_t>(j));
        batch.targets_N.push_back(ids[j + 1]);
      }
      std::vector<float> logprobs(batch.num_targets());
      (*pass)->Forward(*stream, **weights, batch, absl::MakeSpan(logprobs), {});
      const auto expected = read("logprobs." + std::to_string(i));
      const double error = RelativeError(logprobs, expected);
      INFO(Name(dtype) << " prompt " << i << ": " << ids.size() << " tokens, relative error "
                       << error);
      CHECK(error < (dtype == DType::kF32 ? 1e-5 : 0.03));
    }
  }
}

TEST_CASE("dynamic RoPE follows the length that the options fix") {
  const Golden golden("llama_rope_dynamic");
  const auto device = MakeDevice("reference");
  for (const int64_t length : {12, 24}) {
    TestModel model(*device, golden.files.config, DType::kF32, length,
                    ParametersFrom(golden.files.config, *golden.files.tensors));
    std::vector<float> logits;
    for (auto row : golden.Ids()) {
      row.resize(length);
      const auto part = PagedLogits(model, row);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    CHECK(RelativeError(logits, golden.Read("logits.t" + std::to_string(length))) < 1e-5);
  }
}
}  // namespace
}  // namespace stretto::engine
