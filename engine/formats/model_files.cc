#include "engine/formats/model_files.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file_status.h"
#include "base/files.h"
#include "base/status.h"
#include "engine/formats/gguf.h"
#include "engine/formats/safetensors.h"

namespace stretto::engine {
namespace {
constexpr size_t kMaxConfigBytes = 100'000'000;

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  if (file->bytes().size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has ", file->bytes().size(),
                                                   " bytes, expected at most ", kMaxConfigBytes));
  }
  return std::string(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
}

// What a folder without config.json may be instead; empty: nobody knows.
std::string HintFor(const std::string& path) {
  const auto names = Files::Real().List(path);
  if (!names.ok()) return "";
  std::vector<std::string> gguf;
  for (const std::string& name : *names) {
    if (absl::EndsWithIgnoreCase(name, ".gguf")) gguf.push_back(JoinPath(path, name));
    if (name == "run.yaml") {
      return "it is a run's folder: where a run may be given (--run) give it there, or make a "
             "model "
             "of it with `stretto export`";
    }
    if (name == "adapter_config.json") {
      return "it is an adapter: give it as --adapter, beside the --model that it was trained on";
    }
    if (absl::StartsWith(name, "masters")) {
      return "it is a checkpoint of a run: `stretto export` makes a model of it";
    }
  }
  if (gguf.size() == 1) return absl::StrCat("did you mean ", gguf[0], "?");
  if (gguf.size() > 1) {
    return absl::StrCat("it holds ", gguf.size(), " GGUF files: name one, as ",
                        *std::min_element(gguf.begin(), gguf.end()));
  }
  return "";
}

absl::StatusOr<ModelFiles> OpenFolder(const std::string& path) {
  ModelFiles model;
  model.kind = ModelFiles::Kind::kFolder;
  model.path = path;
  const std::string config_path = JoinPath(path, "config.json");
  if (!Files::Real().Exists(config_path)) {
    const std::string hint = HintFor(path);
    return absl::NotFoundError(absl::StrCat(
        path,
        ": no model: a folder with config.json and safetensors files is expected, or a GGUF "
        "file",
        hint.empty() ? "" : "; ", hint));
  }
  ASSIGN_OR_RETURN(const std::string config, ReadSmallFile(config_path));
  ASSIGN_OR_RETURN(model.config, ParseHfConfig(config_path, config));
  const std::string generation_path = JoinPath(path, "generation_config.json");
  if (Files::Real().Exists(generation_path)) {
    ASSIGN_OR_RETURN(const std::string generation, ReadSmallFile(generation_path));
    ASSIGN_OR_RETURN(model.generation,
                     ParseGenerationConfig(generation_path, generation, model.config));
  }
  ASSIGN_OR_RETURN(model.tensors, OpenSafetensorsFolder(path));
  return model;
}

absl::StatusOr<ModelFiles> OpenGguf(const std::string& path) {
  ModelFiles model;
  model.kind = ModelFiles::Kind::kGguf;
  model.path = path;
  ASSIGN_OR_RETURN(auto mapping, MappedFile::Open(path));
  ASSIGN_OR_RETURN(GgufFile file, ParseGguf(path, mapping->bytes()));
  ASSIGN_OR_RETURN(model.config, ConfigFromGguf(file));
  if (file.metadata.contains("tokenizer.ggml.model")) {
    ASSIGN_OR_RETURN(GgufTokenizer tokenizer, TokenizerFromGguf(file));
    if (static_cast<int64_t>(tokenizer.tokens.size()) > model.config.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", tokenizer.tokens.size(),
                                                     " tokens, but the embedding has only ",
                                                     model.config.vocab_size, " rows"));
    }
    model.gguf_tokenizer = std::make_shared<GgufTokenizer>(std::move(tokenizer));
  }
  ASSIGN_OR_RETURN(model.tensors, GgufTensors(std::move(file), model.config, std::move(mapping)));
  return model;
}

// What files hold beside parameters, and models rightly ignore.
bool IsHarmless(const ModelConfig& config, absl::string_view name) {
  return absl::EndsWith(name, "rotary_emb.inv_freq") || name == "rope_freqs.weight" ||
         (config.tie_word_embeddings && name == "lm_head.weight");
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// Up to ten problems, one a line.
class Problems {
 public:
  void Add(std::string problem) {
    if (++count_ <= 10) text_.push_back(std::move(problem));
  }
  absl::Status ToStatus(const std::string& path) const {
    if (count_ == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": its tensors do not fit its configuration:\n  ", absl::StrJoin(text_, "\n  "),
        count_ > 10 ? absl::StrCat("\n  and ", count_ - 10, " more") : ""));
  }

 private:
  size_t count_ = 0;
  std::vector<std::string> text_;
};

bool IsFinite(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits & 0x7f800000u) != 0x7f800000u;
}
}  // namespace

absl::StatusOr<ModelFiles> OpenModelOfAnyHead(const std::string& path) {
  std::error_code ec;
  const bool is_folder = std::filesystem::is_directory(path, ec);
  if (!is_folder && !std::filesystem::exists(path, ec)) {
    return absl::NotFoundError(
        absl::StrCat(path, ": does not exist, expected a Hugging Face folder or a GGUF file"));
  }
  auto model = is_folder ? OpenFolder(path) : OpenGguf(path);
  if (!model.ok()) return BlameFile(model.status());
  return model;
}

absl::StatusOr<ModelFiles> OpenModel(const std::string& path) {
  absl::StatusOr<ModelFiles> model = OpenModelOfAnyHead(path);
  if (!model.ok() || !model->config.value_head) return model;
  return absl::InvalidArgumentError(absl::StrCat(
      path,
      ": a reward model (architectures: …ForSequenceClassification), which gives a score "
      "instead of tokens: expected a model that writes (…ForCausalLM). Rewards may come "
      "from it (type: model), and a critic may begin with it (ppo.critic_model)"));
}

absl::Status CheckShapes(const ModelConfig& config, const TensorSource& source) {
  Problems problems;
  std::set<std::string> expected;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    expected.insert(spec.name);
    const TensorInfo* found = source.Find(spec.name);
    if (found == nullptr) {
      problems.Add(absl::StrCat(spec.name, " is missing, expected ", ShapeText(spec.shape)));
    } else if (found->shape != spec.shape) {
      problems.Add(absl::StrCat(spec.name, " has shape ", ShapeText(found->shape), ", expected ",
                                ShapeText(spec.shape)));
    } else if (!IsReadable(found->type)) {
      problems.Add(absl::StrCat(spec.name, " is of type ", Name(found->type),
                                ", expected floating-point weights"));
    }
  }
  for (const TensorInfo& info : source.tensors()) {
    if (!expected.contains(info.name) && !IsHarmless(config, info.name)) {
      problems.Add(absl::StrCat(info.name, " is not a tensor of this architecture (",
                                Name(config.architecture), ")"));
    }
  }
  return problems.ToStatus(source.path());
}

absl::Status ScanForNonFinite(const ModelConfig& config, const TensorSource& source) {
  std::vector<float> row;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    const TensorInfo* info = source.Find(spec.name);
    if (info == nullptr) {
      return absl::NotFoundError(absl::StrCat(source.path(), ": there is no tensor ", spec.name));
    }
    row.resize(static_cast<size_t>(RowLength(*info)));
    int64_t num_bad = 0;
    for (int64_t i = 0; i < NumRows(*info); ++i) {
      RETURN_IF_ERROR(source.ReadRows(spec.name, i, i + 1, DType::kF32, row.data()));
      num_bad += std::count_if(row.begin(), row.end(), [](float x) { return !IsFinite(x); });
    }
    if (num_bad > 0) {
      return absl::InvalidArgumentError(absl::StrCat(source.path(), ": tensor ", spec.name, " has ",
                                                     num_bad, " values that are NaN or infinite"));
    }
  }
  return absl::OkStatus();
}
}  // namespace stretto::engine
