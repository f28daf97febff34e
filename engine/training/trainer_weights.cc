// The weights of a TrainerEngine: where they begin, and copies of them for others.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "absl/strings/match.h"
#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/status.h"
#include "engine/formats/model_files.h"
#include "engine/training/trainer_engine.h"

namespace stretto::engine {
namespace {
bool IsVector(const Parameter& p) { return p.spec.shape.size() == 1; }

absl::Status ReadFinite(const TensorSource& source, const Parameter& p, float* dst) {
  RETURN_IF_ERROR(source.ReadAll(p.spec.name, DType::kF32, dst));
  if (std::all_of(dst, dst + p.view.size(), [](float x) { return std::isfinite(x); })) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(source.path(), ": tensor ", p.spec.name, " holds a NaN or infinity"));
}

// All parameters to where they are in the flat run, by several threads: what costs most is that the
// memory is touched for the first time.
absl::Status ReadAllFinite(const TensorSource& source, const std::vector<Parameter>& parameters,
                           int num_threads, float* flat) {
  std::vector<absl::Status> statuses(parameters.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < parameters.size();) {
      statuses[i] = ReadFinite(source, parameters[i], flat + parameters[i].view.offset);
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < num_threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}
}  // namespace

absl::Span<const uint8_t> HostWeights::bytes(const Parameter& parameter) const {
  const size_t size = SizeOf(dtype_);
  return absl::MakeConstSpan(flat_.get(), size_)
      .subspan(parameter.view.offset * size, parameter.view.size() * size);
}

absl::Status TrainerEngine::LoadModel(const TensorSource& source, uint64_t seed,
                                      const TensorSource* adapter) {
  if (adapted_ != nullptr) {
    RETURN_IF_ERROR(LoadBase(source));
    return LoadAdapter(seed, adapter);
  }
  RETURN_IF_ERROR(CheckShapes(config(), source));
  state_->ClearMoments();
  const bool is_flat = tensor_ == nullptr && state_->is_plain() && state_->has_all_masters();
  auto* flat = is_flat ? static_cast<float*>(device_.HostMemory(state_->Flat(StateTensor::kMaster)))
                       : nullptr;
  if (flat != nullptr) {
    RETURN_IF_ERROR(ReadAllFinite(source, layout_->parameters(), device_.num_threads(), flat));
    return FinishRestore({});
  }
  std::vector<float> host;
  for (const Parameter& p : layout_->parameters()) {
    host.resize(p.view.size());
    RETURN_IF_ERROR(ReadFinite(source, p, host.data()));
    UploadState(StateTensor::kMaster, p, host.data());
  }
  return FinishRestore({});
}

absl::Status TrainerEngine::InitRandom(uint64_t seed, double std) {
  if (!(std > 0)) return absl::InvalidArgumentError("InitRandom: std must be positive");
  if (adapted_ != nullptr) {
    return absl::InvalidArgumentError("lora: random weights are no base for an adapter");
  }
  std::vector<float> host;
  uint64_t index = 0;
  for (const Parameter& p : layout_->parameters()) {
    host.assign(p.view.size(), absl::EndsWith(p.spec.name, ".bias") ? 0.0f : 1.0f);
    PhiloxStream random(seed, index++);
    if (!IsVector(p)) {
      for (float& x : host) x = static_cast<float>(random.NextGaussian() * std);
    }
    UploadState(StateTensor::kMaster, p, host.data());
  }
  state_->ClearMoments();
  return FinishRestore({});
}

std::shared_ptr<const HostWeights> TrainerEngine::GetWeights() {
  STRETTO_CHECK_MSG(state_->has_all_weights() && (tensor_ == nullptr || !tensor_->leaves()),
                    "divided weights: GatherWeights, on all ranks");
  auto weights = GatherWeights();
  STRETTO_CHECK(weights.ok());
  return *std::move(weights);
}

absl::StatusOr<std::shared_ptr<const HostWeights>> TrainerEngine::GatherWeights() {
  auto host = std::make_shared<HostWeights>(layout_, options_.dtype, counters_.version);
  RETURN_IF_ERROR(tensor_ == nullptr
                      ? state_->DownloadWeights(host->data())
                      : tensor_->DownloadWeights(*state_, options_.dtype, host->data()));
  return host;
}

bool TrainerEngine::HoldsAll(DType dtype) const {
  if (adapted_ != nullptr && dtype == DType::kF32) return true;  // from the base and the adapter
  return leaves_group() == nullptr &&
         (dtype == DType::kF32 ? state_->has_all_masters() : state_->has_all_weights());
}

absl::Status TrainerEngine::ReadRows(const Parameter& parameter, int64_t row_begin, int64_t row_end,
                                     DType dtype, void* dst) {
  const ParameterView& view = parameter.view;
  if (row_begin < 0 || row_begin > row_end || row_end > view.rows) {
    return absl::OutOfRangeError(absl::StrCat(parameter.spec.name, ": no rows [", row_begin, ", ",
                                              row_end, ") of ", view.rows));
  }
  const bool masters = dtype == DType::kF32;
  if (!HoldsAll(dtype)) {
    return absl::FailedPreconditionError(
        absl::StrCat(parameter.spec.name, ": this rank holds a part of it; ",
                     leaves_group() != nullptr ? "tensor_parallel" : Name(options_.parallel.kind),
                     " divides it among ranks"));
  }
  if (adapted_ != nullptr) return ReadAdaptedRows(parameter, row_begin, row_end, dtype, dst);
  const int64_t begin = view.offset + row_begin * view.cols;
  const int64_t count = (row_end - row_begin) * view.cols;
  if (masters && !state_->is_plain()) {
    return state_->Read(StateTensor::kMaster, begin, count, static_cast<float*>(dst));
  }
  const Tensor& flat = masters ? state_->Flat(StateTensor::kMaster) : state_->flat_weights();
  const auto download = [&](void* to) {
    if (tensor_ == nullptr) {
      device_.Download(*stream_, view.In(flat).Rows(row_begin, row_end - row_begin), to);
    } else {
      tensor_->ReadRows(device_, *stream_, flat, parameter, row_begin, row_end,
                        static_cast<uint8_t*>(to));
    }
  };
  if (flat.dtype == dtype) {
    download(dst);
    return absl::OkStatus();
  }
  if (dtype != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights are read as f32 or bf16, not ", Name(dtype)));
  }
  std::vector<float> values((row_end - row_begin) * view.cols);
  download(values.data());
  std::transform(values.begin(), values.end(), static_cast<uint16_t*>(dst), F32ToBf16);
  return absl::OkStatus();
}
}  // namespace stretto::engine
