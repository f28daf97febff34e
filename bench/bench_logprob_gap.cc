// What quantising costs in log-probs: a model's texts are scored by the inference engine with bf16
// weights, keys and values, then with each quantised format, and the log-probs of the same tokens
// compared. Beside it, what the format takes: bytes of weights, tokens of KV cache in one budget.
//
//   bench_logprob_gap MODEL_FOLDER [TEXTS.json]      (tests/golden/smollm2_greedy50.json)
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "bench/report.h"
#include "engine/formats/model_files.h"
#include "engine/inference/engine.h"
#include "engine/model/transformer.h"

namespace stretto::bench {
namespace {
using engine::WeightFormat;
constexpr int64_t kKvBytes = int64_t{64} << 20;

struct Formats {
  WeightFormat weights = WeightFormat::kPlain, kv = WeightFormat::kPlain;
  DType dtype = DType::kBF16;

  std::string ToString() const {
    engine::NumericProfile profile;
    profile.dtype = dtype;
    profile.weights = weights;
    profile.kv = kv;
    return profile.DTypeName();
  }
};

struct Scored {
  std::vector<float> logprobs;  // of every token but the first of each text
  size_t weight_bytes = 0;
  int64_t kv_tokens = 0;
};

absl::StatusOr<Scored> Score(engine::Device& device, const engine::ModelFiles& files,
                             const std::vector<std::vector<int32_t>>& texts,
                             const Formats& formats) {
  ASSIGN_OR_RETURN(const auto model, engine::Transformer::Create(device, files.config,
                                                                 {.dtype = formats.dtype,
                                                                  .max_sequence_length = 1024,
                                                                  .kv_format = formats.kv}));
  const auto stream = device.CreateStream();
  engine::WeightsOptions weights_options;
  weights_options.format = formats.weights;
  ASSIGN_OR_RETURN(auto weights,
                   engine::ModelWeights::Load(device, *stream, files.config, formats.dtype,
                                              *files.tensors, weights_options));
  Scored scored;
  scored.weight_bytes = weights->bytes();
  engine::EngineOptions options;
  options.kv_cache_bytes = kKvBytes;
  ASSIGN_OR_RETURN(const auto inference,
                   engine::InferenceEngine::Create(*model, {std::move(weights), 0, "x"}, options));
  scored.kv_tokens = inference->stats().blocks_total * engine::kBlockTokens;
  for (const std::vector<int32_t>& text : texts) {
    engine::Request request;
    request.prompt_ids = text;
    request.sampling.max_tokens = 1;
    request.prompt_logprobs = true;
    RETURN_IF_ERROR(inference->Submit(request));
    while (inference->HasWork()) {
      for (const engine::Event& event : inference->Step()) {
        for (const auto& p : event.prompt_logprobs) scored.logprobs.push_back(p.logprob);
      }
    }
  }
  return scored;
}

void Print(const Formats& formats, const Scored& base, const Scored& scored) {
  double total = 0, signed_total = 0, largest = 0;
  int64_t above = 0;
  const auto n = static_cast<double>(base.logprobs.size());
  for (size_t i = 0; i < base.logprobs.size(); ++i) {
    const double gap = double{scored.logprobs[i]} - base.logprobs[i];
    total += std::abs(gap);
    signed_total += gap;
    largest = std::max(largest, std::abs(gap));
    above += std::abs(gap) > 0.5 ? 1 : 0;
  }
  std::printf("| %-13s | %9.4f | %10.4f | %7.3f | %14.2f %% | %11.1f | %9lld |\n",
              formats.ToString().c_str(), total / n, signed_total / n, largest,
              100 * static_cast<double>(above) / n,
              static_cast<double>(scored.weight_bytes) / (1 << 20),
              static_cast<long long>(scored.kv_tokens));
  std::fflush(stdout);
}

absl::Status Run(const std::string& folder, const std::string& texts_path) {
  ASSIGN_OR_RETURN(const auto files, engine::OpenModel(folder));
  RETURN_IF_ERROR(engine::CheckShapes(files.config, *files.tensors));
  std::ifstream file(texts_path);
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_array()) {
    return absl::InvalidArgumentError(absl::StrCat(
        texts_path, ": expected a JSON array of objects with prompt_ids and completion_ids"));
  }
  std::vector<std::vector<int32_t>> texts;
  size_t num_tokens = 0;
  for (const auto& row : json) {
    auto& text = texts.emplace_back(row.value("prompt_ids", std::vector<int32_t>()));
    const auto completion = row.value("completion_ids", std::vector<int32_t>());
    text.insert(text.end(), completion.begin(), completion.end());
    num_tokens += text.size() - 1;
  }
  ASSIGN_OR_RETURN(const auto device, engine::CreateDevice({}));
  std::printf("%zu tokens of %zu texts, against bf16; KV cache of %lld MiB\n\n", num_tokens,
              texts.size(), static_cast<long long>(kKvBytes >> 20));
  std::printf(
      "| format        | mean gap  | mean shift | largest | gap above 0.5    | weights MiB | "
      "KV tokens |\n|---|---|---|---|---|---|---|\n");
  std::optional<Scored> base;
  const WeightFormat plain = WeightFormat::kPlain, int8 = WeightFormat::kInt8,
                     int4 = WeightFormat::kInt4, fp8 = WeightFormat::kFp8;
  for (const Formats& formats : std::vector<Formats>{{plain, plain},
                                                     {plain, plain, DType::kF32},
                                                     {int8, plain},
                                                     {fp8, plain},
                                                     {int4, plain},
                                                     {plain, int8},
                                                     {plain, fp8},
                                                     {int8, int8}}) {
    ASSIGN_OR_RETURN(Scored scored, Score(*device, files, texts, formats));
    if (!base) base = scored;
    Print(formats, *base, scored);
  }
  return absl::OkStatus();
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: %s MODEL_FOLDER [TEXTS.json]\n", argv[0]);
    return 2;
  }
  const absl::Status status =
      stretto::bench::Run(argv[1], argc == 3 ? argv[2] : "tests/golden/smollm2_greedy50.json");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
