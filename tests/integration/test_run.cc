#include "tests/integration/test_run.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "base/files.h"
#include "base/philox.h"
#include "engine/formats/export_hf.h"
#include "engine/weights/version.h"
#include "nlohmann/json.hpp"

namespace stretto::testing {
namespace {
engine::ModelConfig SmallConfig(int64_t num_layers) {
  engine::ModelConfig config;
  config.architecture = engine::Architecture::kLlama;
  config.vocab_size = 257;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_layers = num_layers;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.max_position_embeddings = 256;
  config.tie_word_embeddings = true;
  config.eos_token_ids = {0};
  return config;
}

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  REQUIRE(file.good());
}

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
}
}  // namespace

void WriteTestModel(const std::string& folder, const TestModelOptions& model) {
  engine::ExportOptions options;
  options.path = folder;
  options.type = DType::kF32;
  options.config = SmallConfig(model.num_layers);
  options.tokenizer_folder = std::string(STRETTO_SOURCE_DIR) + "/examples/tiny-model";
  std::vector<std::string> silent;  // what such layers would add to the residual stream
  for (int64_t l = model.num_active_layers; l < model.num_layers; ++l) {
    silent.push_back(absl::StrCat("model.layers.", l, ".self_attn.o_proj.weight"));
    silent.push_back(absl::StrCat("model.layers.", l, ".mlp.down_proj.weight"));
  }
  const engine::RowReader read = [&](const engine::TensorSpec& tensor, int64_t row_begin,
                                     int64_t row_end, DType type, void* dst) {
    const int64_t cols = tensor.shape.back();
    const bool is_norm = tensor.shape.size() == 1;
    const bool is_silent = std::find(silent.begin(), silent.end(), tensor.name) != silent.end();
    const uint64_t stream = std::hash<std::string>()(tensor.name);
    for (int64_t row = row_begin; row < row_end; ++row) {
      PhiloxStream random(model.seed, stream + static_cast<uint64_t>(row));
      for (int64_t col = 0; col < cols; ++col) {
        auto value = static_cast<float>(random.NextGaussian() * 0.25 + (is_norm ? 1 : 0));
        if (is_silent) value = 0;
        const int64_t at = (row - row_begin) * cols + col;
        if (type == DType::kF32) static_cast<float*>(dst)[at] = value;
        if (type == DType::kBF16) static_cast<uint16_t*>(dst)[at] = F32ToBf16(value);
      }
    }
    return absl::OkStatus();
  };
  const absl::Status status = engine::ExportHf(Files::Real(), options, read);
  REQUIRE_OK(status);
}

TestRun::TestRun(const TestRunOptions& options) {
  WriteTestModel(model());
  std::string lines;
  for (int i = 0; i < 32; ++i) {
    absl::StrAppend(&lines, "{\"prompt\": \"", i, "+1=\", \"answer\": \"", i + 1, "\"}\n");
  }
  WriteText(File("train.jsonl"), lines);
  WriteText(
      run_file(),
      absl::StrCat("run: {name: test, dir: ", run_dir(), ", seed: 7}\n", "model: {path: ", model(),
                   ", chat_format: none, max_sequence_length: 128}\n", "data: {train: ",
                   File("train.jsonl"), "}\n", "rollout: {group_size: 4, max_tokens: 24",
                   options.rollout.empty() ? "" : ", ", options.rollout, "}\n",
                   "train: {steps: 100, prompts_per_step: 2, lr: 1.0e-3, warmup_steps: 0}\n",
                   options.algorithm, options.rewards, options.schedule,
                   "cluster: {backend: ", options.backend,
                   ", heartbeat_ms: 50, kv_cache_mb: 16, generator_threads: 1, "
                   "trainer_threads: 1, scorer_threads: 1, burn_in_ms: 10",
                   options.cluster.empty() ? "" : ", ", options.cluster, "}\n"));
}

Process TestRun::Start(const std::string& kind, const std::string& name, int port,
                       std::vector<std::string> more) const {
  std::vector<std::string> arguments = {"--run",  run_file(),         "--name",      name,
                                        "--port", absl::StrCat(port), "--log-level", "debug"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return Process("stretto-" + kind, std::move(arguments), LogOf(name));
}

std::string TestRun::MemberField(const std::string& name, const std::string& field) const {
  const nlohmann::json json = ReadJson(run_dir() + "/members/" + name + ".json");
  if (!json.is_object() || !json.contains(field)) return "";
  return json[field].is_string() ? json[field].get<std::string>() : json[field].dump();
}

std::string TestRun::WaitForAddress(Process& process, const std::string& name) const {
  const std::string pid = absl::StrCat(process.pid());
  const bool up =
      Eventually([&] { return MemberField(name, "pid") == pid || !process.IsRunning(); }, 30000);
  INFO(process.Log());
  REQUIRE(up);
  REQUIRE(process.IsRunning());
  return MemberField(name, "address");
}
}  // namespace stretto::testing
