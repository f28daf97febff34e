// Models as a whole: the folders that transformers saved (tests/golden/models), shapes that
// contradict a config, weights that are not numbers, and the way out through ExportHf.
#include "engine/formats/model_files.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/files.h"
#include "base/testing.h"
#include "engine/formats/export_hf.h"
#include "engine/formats/safetensors.h"
#include "engine/formats/testing/exercise.h"

namespace stretto::engine {
namespace {
const std::string kModels = std::string(STRETTO_SOURCE_DIR) + "/tests/golden/models/";

bool Contains(const absl::Status& status, const std::string& part) {
  return std::string(status.message()).find(part) != std::string::npos;
}

TEST_CASE("every folder that transformers saved opens and fits its configuration") {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kModels)) {
    INFO(entry.path().string());
    auto model = OpenModel(entry.path().string());
    REQUIRE_OK(model);
    REQUIRE_OK(CheckShapes(model->config, *model->tensors));
    REQUIRE_OK(ScanForNonFinite(model->config, *model->tensors));
    REQUIRE(model->kind == ModelFiles::Kind::kFolder);
    formats_testing::ExerciseConfig(model->config);
    ++count;
  }
  REQUIRE(count >= 9);
}

TEST_CASE("what is not a model is an error that says what is expected") {
  testing::TempDir folder;
  REQUIRE(absl::IsNotFound(OpenModel(folder.File("none")).status()));
  REQUIRE(absl::IsNotFound(OpenModel(folder.path()).status()));
  REQUIRE_OK(Files::Real().WriteAtomically(folder.File("x.gguf"), "hello, world"));
  const absl::Status status = OpenModel(folder.File("x.gguf")).status();
  REQUIRE(Contains(status, "not a GGUF file"));
  CHECK(absl::IsDataLoss(status));  // the file's fault, not that of whoever named it
  REQUIRE_OK(Files::Real().WriteAtomically(folder.File("empty.gguf"), ""));
  REQUIRE(!OpenModel(folder.File("empty.gguf")).ok());
}

// A model of one layer whose tensors are all `value`, kept in memory.
struct Sample {
  ModelConfig config;
  std::vector<float> data = std::vector<float>(1000, 0.5f);
  std::vector<TensorInfo> tensors;
  Sample() {
    config.vocab_size = 5;
    config.hidden_size = 4;
    config.intermediate_size = 6;
    config.num_layers = 1;
    config.num_heads = 2;
    config.num_kv_heads = 1;
    config.head_dim = 2;
    config.max_position_embeddings = 8;
    for (const TensorSpec& spec : ExpectedTensors(config)) Add(spec.name, spec.shape);
  }
  void Add(const std::string& name, const std::vector<int64_t>& shape) {
    TensorInfo info{name, StorageType::kF32, shape, {}};
    info.bytes = {reinterpret_cast<const uint8_t*>(data.data()),
                  static_cast<size_t>(NumElements(info)) * 4};
    tensors.push_back(info);
    std::sort(tensors.begin(), tensors.end(),
              [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  }
  TensorInfo& At(const std::string& name) {
    for (TensorInfo& info : tensors) {
      if (info.name == name) return info;
    }
    FAIL("no " << name);
    std::abort();
  }
  absl::Status Check() const {
    return CheckShapes(config, formats_testing::MemoryTensors(tensors));
  }
};

TEST_CASE("tensors that do not fit the configuration are named") {
  REQUIRE_OK(Sample().Check());
  Sample harmless;
  harmless.Add("model.layers.0.self_attn.rotary_emb.inv_freq", {1});
  REQUIRE_OK(harmless.Check());
  Sample extra;
  extra.Add("model.layers.0.self_attn.q_norm.weight", {2});
  REQUIRE(Contains(extra.Check(), "q_norm.weight is not a tensor of this architecture (llama)"));
  Sample wrong;
  wrong.At("model.norm.weight").shape = {2, 2};
  REQUIRE(Contains(wrong.Check(), "model.norm.weight has shape [2, 2], expected [4]"));
  Sample missing;
  missing.tensors.erase(missing.tensors.begin());
  REQUIRE(Contains(missing.Check(), "lm_head.weight is missing, expected [5, 4]"));
  Sample type;
  type.At("lm_head.weight").type = StorageType::kI32;
  REQUIRE(Contains(type.Check(), "lm_head.weight is of type I32"));
  Sample tied;
  tied.config.tie_word_embeddings = true;
  REQUIRE_OK(tied.Check());  // a head that is written beside tied embeddings is the embeddings
  Sample many;
  many.config.num_layers = 3;
  REQUIRE(Contains(many.Check(), "and 8 more"));
}

TEST_CASE("NaN and infinity are found and counted") {
  Sample sample;
  const auto scan = [&] {
    return ScanForNonFinite(sample.config, formats_testing::MemoryTensors(sample.tensors));
  };
  REQUIRE_OK(scan());
  std::vector<float> bad(4, 1.0f);
  sample.At("model.norm.weight").bytes = {reinterpret_cast<const uint8_t*>(bad.data()), 16};
  bad[1] = std::numeric_limits<float>::quiet_NaN();
  bad[3] = -std::numeric_limits<float>::infinity();
  REQUIRE(Contains(scan(), "model.norm.weight has 2 values that are NaN or infinite"));
  bad = {1.0f, -std::numeric_limits<float>::max(), 1e-45f, 0.0f};
  REQUIRE_OK(scan());
}

RowReader ReadFrom(const ModelFiles& model) {
  return [&model](const TensorSpec& tensor, int64_t begin, int64_t end, DType type, void* dst) {
    return model.tensors->ReadRows(tensor.name, begin, end, type, dst);
  };
}

TEST_CASE("an exported folder holds the same model and the tokenizer's files") {
  for (const std::string name : {"qwen3", "llama_sharded", "smollm2_bf16"}) {
    INFO(name);
    auto model = OpenModel(kModels + name);
    REQUIRE_OK(model);
    testing::TempDir folder;
    ExportOptions options;
    options.path = folder.File("out/");
    options.type = DType::kF32;
    options.config = model->config;
    options.generation = model->generation;
    const std::string tokenizer = folder.File("tokenizer");
    REQUIRE_OK(Files::Real().MakeDirs(tokenizer));
    REQUIRE_OK(Files::Real().WriteAtomically(tokenizer + "/tokenizer.json", "{\"a\": 1}"));
    REQUIRE_OK(Files::Real().WriteAtomically(tokenizer + "/merges.txt", "a b"));
    options.tokenizer_folder = tokenizer;
    options.tokenizer_files["merges.txt"] = "mine";
    REQUIRE_OK(ExportHf(Files::Real(), options, ReadFrom(*model)));
    REQUIRE(*Files::Real().List(folder.File("out")) ==
            std::vector<std::string>{"config.json", "generation_config.json", "merges.txt",
                                     "model.safetensors", "tokenizer.json"});
    REQUIRE(*Files::Real().ReadAll(folder.File("out/merges.txt")) == "mine");
    REQUIRE(*Files::Real().ReadAll(folder.File("out/tokenizer.json")) == "{\"a\": 1}");
    auto back = OpenModel(folder.File("out"));
    REQUIRE_OK(back);
    REQUIRE_OK(CheckShapes(model->config, *back->tensors));
    for (const TensorSpec& spec : ExpectedTensors(model->config)) {
      const size_t size = static_cast<size_t>(NumElements(*back->tensors->Find(spec.name)));
      std::vector<float> a(size), b(size);
      REQUIRE_OK(model->tensors->ReadAll(spec.name, DType::kF32, a.data()));
      REQUIRE_OK(back->tensors->ReadAll(spec.name, DType::kF32, b.data()));
      REQUIRE(std::memcmp(a.data(), b.data(), size * 4) == 0);
    }
    REQUIRE(ToHfConfigJson(back->config, DType::kF32) ==
            ToHfConfigJson(model->config, DType::kF32));
  }
}

TEST_CASE("a reward model is opened where one is asked for, and nowhere else") {
  auto model = OpenModel(kModels + "qwen3");
  REQUIRE_OK(model);
  testing::TempDir folder;
  ExportOptions options;
  options.path = folder.File("judge");
  options.type = DType::kF32;
  options.config = WithValueHead(model->config);
  const auto read = ReadFrom(*model);
  REQUIRE_OK(
      ExportHf(Files::Real(), options,
               [&](const TensorSpec& tensor, int64_t begin, int64_t end, DType type, void* dst) {
                 if (tensor.name != "score.weight") return read(tensor, begin, end, type, dst);
                 std::fill_n(static_cast<float*>(dst), options.config.hidden_size, 0.5f);
                 return absl::OkStatus();
               }));
  const absl::Status refused = OpenModel(options.path).status();
  CHECK(absl::IsInvalidArgument(refused));
  CHECK(Contains(refused, "a reward model"));
  CHECK(Contains(refused, "ppo.critic_model"));
  const auto judge = OpenModelOfAnyHead(options.path);
  REQUIRE_OK(judge);
  CHECK(judge->config.value_head);
  REQUIRE_OK(CheckShapes(judge->config, *judge->tensors));
}

TEST_CASE("an export that fails leaves the old folder or none, and no rubbish") {
  auto model = OpenModel(kModels + "qwen3");
  REQUIRE_OK(model);
  testing::TempDir folder;
  ExportOptions options;
  options.path = folder.File("out");
  options.config = model->config;
  const RowReader failing = [&](const TensorSpec& tensor, int64_t begin, int64_t end, DType type,
                                void* dst) -> absl::Status {
    if (tensor.name == "model.norm.weight") return absl::UnavailableError("gone");
    return model->tensors->ReadRows(tensor.name, begin, end, type, dst);
  };
  const absl::Status status = ExportHf(Files::Real(), options, failing);
  REQUIRE(absl::IsUnavailable(status));
  REQUIRE(Contains(status, "model.norm.weight: gone"));
  REQUIRE(Files::Real().List(folder.path())->empty());
  REQUIRE_OK(ExportHf(Files::Real(), options, ReadFrom(*model)));
  const std::string before = *Files::Real().ReadAll(folder.File("out/model.safetensors"));
  REQUIRE(absl::IsAlreadyExists(ExportHf(Files::Real(), options, ReadFrom(*model))));
  options.overwrite = true;
  REQUIRE(!ExportHf(Files::Real(), options, failing).ok());
  REQUIRE(*Files::Real().List(folder.path()) == std::vector<std::string>{"out"});
  REQUIRE(*Files::Real().ReadAll(folder.File("out/model.safetensors")) == before);
  REQUIRE_OK(ExportHf(Files::Real(), options, ReadFrom(*model)));
  REQUIRE(*Files::Real().List(folder.path()) == std::vector<std::string>{"out"});
  REQUIRE(*Files::Real().ReadAll(folder.File("out/model.safetensors")) == before);
  // Whatever else is there is somebody's.
  REQUIRE_OK(Files::Real().WriteAtomically(folder.File("out/notes.txt"), "mine"));
  const absl::Status refused = ExportHf(Files::Real(), options, ReadFrom(*model));
  REQUIRE(absl::IsFailedPrecondition(refused));
  REQUIRE(Contains(refused, "notes.txt"));
  REQUIRE(*Files::Real().ReadAll(folder.File("out/notes.txt")) == "mine");
  options.path = folder.path();
  REQUIRE(absl::IsFailedPrecondition(ExportHf(Files::Real(), options, ReadFrom(*model))));
  options.path = folder.File("out/notes.txt");
  REQUIRE_FALSE(ExportHf(Files::Real(), options, ReadFrom(*model)).ok());
  REQUIRE(*Files::Real().ReadAll(folder.File("out/notes.txt")) == "mine");
}
}  // namespace
}  // namespace stretto::engine
