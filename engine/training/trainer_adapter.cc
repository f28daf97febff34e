// A TrainerEngine whose policy is a frozen model and a LoRA adapter.
#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/status.h"
#include "engine/formats/model_files.h"
#include "engine/training/trainer_engine.h"

namespace stretto::engine {
absl::Status TrainerEngine::AllocateAdapted(const ModelConfig& config) {
  const ParallelOptions& parallel = options_.parallel;
  if (tensor_ != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("lora: expected tensor_parallel = 1 and k_leaves = 1, found ",
                     parallel.tensor_parallel, " and ", parallel.k_leaves));
  }
  RETURN_IF_ERROR(NormalizeLora(config, options_.lora));
  AdaptedModel::Options options;
  options.dtype = options_.dtype;
  options.lora = options_.lora;
  options.max_rows = std::max(options_.micro_batch_tokens, options_.max_sequence_length);
  if (parallel.kind == DataParallel::kFsdp) {
    options.num_ranks = group_->size();
    options.rank = group_->rank();
    options.packs = false;
  }
  ASSIGN_OR_RETURN(adapted_, AdaptedModel::Create(device_, *stream_, config, layout_, options));
  trained_layout_ = adapted_->adapter().layout();
  return absl::OkStatus();
}

absl::Status TrainerEngine::LoadBase(const TensorSource& source) {
  if (adapted_ == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(CheckShapes(config(), source));
  return adapted_->LoadBase(config(), source);
}

absl::Status TrainerEngine::LoadAdapter(uint64_t seed, const TensorSource* adapter) {
  std::vector<float> host;
  uint64_t index = 0;
  for (const Parameter& p : trained_layout_->parameters()) {
    host.assign(p.view.size(), 0.0f);
    PhiloxStream random(seed, index++);
    if (adapter != nullptr) {
      RETURN_IF_ERROR(adapter->ReadAll(p.spec.name, DType::kF32, host.data()));
      if (!std::all_of(host.begin(), host.end(), [](float x) { return std::isfinite(x); })) {
        return absl::InvalidArgumentError(
            absl::StrCat(adapter->path(), ": tensor ", p.spec.name, " holds a NaN or infinity"));
      }
    } else if (absl::StrContains(p.spec.name, ".lora_A.")) {
      const double bound = 1.0 / std::sqrt(static_cast<double>(p.view.cols));
      for (float& x : host) x = static_cast<float>(bound * (2 * random.NextDouble() - 1));
    }
    UploadState(StateTensor::kMaster, p, host.data());
  }
  state_->ClearMoments();
  return FinishRestore({});
}

absl::Status TrainerEngine::ReadAdaptedRows(const Parameter& parameter, int64_t row_begin,
                                            int64_t row_end, DType dtype, void* dst) {
  if (dtype == DType::kF32) {
    return adapted_->ReadRowsF32(parameter, row_begin, row_end, static_cast<float*>(dst));
  }
  if (dtype != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights are read as f32 or bf16, not ", Name(dtype)));
  }
  const Tensor rows = parameter.view.In(flat_weights()).Rows(row_begin, row_end - row_begin);
  if (rows.dtype == DType::kBF16) {
    device_.Download(*stream_, rows, dst);
    return absl::OkStatus();
  }
  std::vector<float> values(static_cast<size_t>(rows.size()));
  device_.Download(*stream_, rows, values.data());
  std::transform(values.begin(), values.end(), static_cast<uint16_t*>(dst), F32ToBf16);
  return absl::OkStatus();
}

int64_t TrainerEngine::num_trained_parameters() const {
  int64_t total = 0;
  for (const Parameter& p : trained_layout_->parameters()) total += p.view.size();
  return total;
}

MemoryLedger TrainerEngine::memory() const {
  MemoryLedger ledger = state_->ledger();
  if (adapted_ == nullptr) return ledger;
  ledger.weights += adapted_->weight_bytes();
  ledger.packed += adapted_->packed_bytes() + adapted_->adapter_bytes();
  return ledger;
}
}  // namespace stretto::engine
