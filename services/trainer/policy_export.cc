// The policy in training as a Hugging Face folder.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "base/status.h"
#include "engine/formats/export_hf.h"
#include "engine/training/checkpoint_adapter.h"
#include "services/common/log.h"
#include "services/trainer/policy_trainer.h"

namespace stretto::services {
namespace {
// Rows of a version's tensors, which have the dtype of computation.
engine::RowReader ReadVersion(std::shared_ptr<const engine::WeightsVersion> version) {
  return [version = std::move(version)](const engine::TensorSpec& tensor, int64_t row_begin,
                                        int64_t row_end, DType type, void* dst) -> absl::Status {
    const engine::Manifest& manifest = version->manifest;
    const auto entry = std::find_if(manifest.begin(), manifest.end(),
                                    [&](const auto& e) { return e.name == tensor.name; });
    if (entry == manifest.end()) {
      return absl::NotFoundError(absl::StrCat("no parameter ", tensor.name));
    }
    const int64_t cols = entry->shape.size() == 2 ? entry->shape[1] : entry->shape[0];
    const size_t size = SizeOf(entry->dtype);
    const auto bytes =
        version->tensors[static_cast<size_t>(entry - manifest.begin())].span().subspan(
            static_cast<size_t>(row_begin * cols) * size,
            static_cast<size_t>((row_end - row_begin) * cols) * size);
    if (entry->dtype == type) {
      std::memcpy(dst, bytes.data(), bytes.size());
      return absl::OkStatus();
    }
    STRETTO_CHECK(entry->dtype == DType::kF32 && type == DType::kBF16);
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    std::transform(values.begin(), values.end(), static_cast<uint16_t*>(dst), F32ToBf16);
    return absl::OkStatus();
  };
}
}  // namespace

// Where ranks divide what is asked for: of weights every rank of a group has come to the same
// version, which the first one holds for generators; masters are together in a checkpoint.
absl::StatusOr<engine::RowReader> PolicyTrainer::ReadPolicy(DType type) {
  engine::TrainerEngine* engine = engine_.get();
  if (engine->HoldsAll(type)) {
    return [engine](const engine::TensorSpec& tensor, int64_t row_begin, int64_t row_end,
                    DType dtype, void* dst) -> absl::Status {
      const engine::Parameter* parameter = engine->layout().Find(tensor.name);
      if (parameter == nullptr) {
        return absl::NotFoundError(absl::StrCat("no parameter ", tensor.name));
      }
      return engine->ReadRows(*parameter, row_begin, row_end, dtype, dst);
    };
  }
  if (type == DType::kBF16 || host_->dtype == DType::kF32) {
    if (!IsFirstRank()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "this is rank ", group_->rank(), ": rank 0 of the group exports what ranks divide"));
    }
    ASSIGN_OR_RETURN(auto version, store_.Get(engine->version(), ""));
    return ReadVersion(std::move(version));
  }
  std::string path;
  {
    absl::MutexLock state(&state_mutex_);
    if (save_.is_over && save_.report.status.ok() && save_.version == engine->version()) {
      path = save_.report.info.path;
    }
  }
  if (path.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the masters of version ", engine->version(),
                     " are divided among ranks: save a checkpoint of it first, or export bf16"));
  }
  ASSIGN_OR_RETURN(auto masters, engine::OpenPolicy(files_, path, *host_->device,
                                                    host_->files.config, host_->files.tensors));
  return [masters = std::move(masters)](const engine::TensorSpec& tensor, int64_t row_begin,
                                        int64_t row_end, DType dtype, void* dst) {
    return masters->ReadRows(tensor.name, row_begin, row_end, dtype, dst);
  };
}

absl::StatusOr<int64_t> PolicyTrainer::Export(const std::string& path, const std::string& dtype) {
  engine::ExportOptions options;
  options.path = path;
  if (path.empty()) return absl::InvalidArgumentError("path: the folder to write is expected");
  if (dtype.empty() || dtype == "bf16") {
    options.type = DType::kBF16;
  } else if (dtype == "f32") {
    options.type = DType::kF32;
  } else {
    return absl::InvalidArgumentError(absl::StrCat("dtype '", dtype, "': expected bf16 or f32"));
  }
  options.config = host_->files.config;
  options.config.chat_format = host_->prompts->named_format();
  options.generation = host_->files.generation;
  // Writing over an earlier export is a repeat; over anything else a mistake.
  options.overwrite = files_.Exists(JoinPath(path, "config.json")) &&
                      files_.Exists(JoinPath(path, "model.safetensors"));
  if (host_->files.kind == engine::ModelFiles::Kind::kFolder) {
    options.tokenizer_folder = host_->files.path;
  } else {
    const engine::Tokenizer& tokenizer = host_->prompts->tokenizer();
    options.tokenizer_files = {{"tokenizer.json", tokenizer.ToTokenizerJson()},
                               {"tokenizer_config.json", tokenizer.ToTokenizerConfigJson()}};
  }
  absl::MutexLock lock(&engine_mutex_);
  if (engine_ == nullptr) return absl::FailedPreconditionError("this trainer is in no group yet");
  ASSIGN_OR_RETURN(const engine::RowReader read, ReadPolicy(options.type));
  RETURN_IF_ERROR(engine::ExportHf(files_, options, read));
  LogInfo("version ", engine_->version(), " exported to ", path);
  return engine_->version();
}
}  // namespace stretto::services
