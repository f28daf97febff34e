#include "engine/training/tensor_parallel.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/collectives/subgroup.h"
#include "engine/model/leaf_layout.h"
#include "engine/training/leaf_group.h"

namespace stretto::engine {
absl::Status CheckTensorParallel(const ModelConfig& config, const ParallelOptions& options,
                                 int num_ranks) {
  const int64_t T = options.tensor_parallel, L = options.k_leaves;
  const auto refuse = [](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("trainer: ", why));
  };
  if (T < 1) return refuse(absl::StrCat("tensor_parallel must be at least 1, not ", T));
  if (num_ranks % T != 0) {
    return refuse(absl::StrCat("tensor_parallel = ", T, " doesn't divide the ", num_ranks,
                               " ranks of the group"));
  }
  if (config.num_heads % T != 0) {
    return refuse(absl::StrCat("the model's ", config.num_heads,
                               " query heads don't divide into tensor_parallel = ", T));
  }
  RETURN_IF_ERROR(CheckLeaves("trainer", config, L));
  if (L % T != 0) {
    return refuse(absl::StrCat("ranks own whole leaves, so k_leaves = ", L,
                               " must be a multiple of tensor_parallel = ", T));
  }
  return absl::OkStatus();
}

TensorParallel::TensorParallel(const ModelConfig& config, const ParallelOptions& options,
                               Communicator* world)
    : whole_(config), world_(world), data_(world) {
  const auto& parameters = whole_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) index_[parameters[i].spec.name] = i;
  const auto num_ranks = static_cast<int>(options.tensor_parallel);
  for (int r = 0; r < num_ranks; ++r) {
    layouts_.push_back(std::make_shared<const ParameterLayout>(
        config, LeavesOfRank(options.k_leaves, num_ranks, r)));
  }
}

absl::StatusOr<std::unique_ptr<TensorParallel>> TensorParallel::Create(
    const ModelConfig& config, const ParallelOptions& options, Communicator* world) {
  const int num_ranks = world == nullptr ? 1 : world->size();
  RETURN_IF_ERROR(CheckTensorParallel(config, options, num_ranks));
  std::unique_ptr<TensorParallel> out(new TensorParallel(config, options, world));
  const auto T = static_cast<int>(options.tensor_parallel);
  if (T == 1) return out;
  const int copy = world->rank() / T, place = world->rank() % T;
  std::vector<int> same_copy, same_place;
  for (int r = 0; r < num_ranks; ++r) {
    if (r / T == copy) same_copy.push_back(r);
    if (r % T == place) same_place.push_back(r);
  }
  ASSIGN_OR_RETURN(out->leaves_group_,
                   JoinSubgroup(*world, absl::StrCat("copy ", copy), same_copy));
  out->data_ = nullptr;
  if (num_ranks > T) {
    ASSIGN_OR_RETURN(out->data_group_,
                     JoinSubgroup(*world, absl::StrCat("leaves ", place), same_place));
    out->data_ = out->data_group_.get();
  }
  return out;
}

size_t TensorParallel::IndexOf(const Parameter& parameter) const {
  const auto it = index_.find(parameter.spec.name);
  STRETTO_CHECK_MSG(it != index_.end(), parameter.spec.name.c_str());
  return it->second;
}

std::vector<size_t> TensorParallel::HeldPiecesOf(int rank, size_t parameter) const {
  std::vector<size_t> pieces;
  const auto& origins = layouts_[rank]->origins();
  for (size_t i = 0; i < origins.size(); ++i) {
    if (origins[i].parameter == parameter) pieces.push_back(i);
  }
  return pieces;
}

std::vector<size_t> TensorParallel::PiecesOf(int rank, size_t parameter) const {
  std::vector<size_t> pieces = HeldPiecesOf(rank, parameter);
  if (rank > 0) {
    std::erase_if(pieces, [&](size_t i) { return layouts_[rank]->origins()[i].leaf < 0; });
  }
  return pieces;
}

void TensorParallel::Move(Direction direction, int rank, size_t piece, size_t element,
                          uint8_t* whole, uint8_t* contiguous) const {
  const PieceOrigin& origin = layouts_[rank]->origins()[piece];
  const ParameterView& view = layouts_[rank]->parameters()[piece].view;
  const int64_t stride = whole_.parameters()[origin.parameter].view.cols;
  const size_t row_bytes = static_cast<size_t>(view.cols) * element;
  for (int64_t r = 0; r < view.rows; ++r) {
    uint8_t* there = whole + static_cast<size_t>((origin.row + r) * stride + origin.col) * element;
    uint8_t* here = contiguous + static_cast<size_t>(r) * row_bytes;
    if (direction == Direction::kTake) {
      std::memcpy(here, there, row_bytes);
    } else {
      std::memcpy(there, here, row_bytes);
    }
  }
}

void TensorParallel::Upload(TrainingState& state, StateTensor which, const Parameter& parameter,
                            const float* src) const {
  std::vector<float> host;
  for (const size_t piece : HeldPiecesOf(rank(), IndexOf(parameter))) {
    const Parameter& p = layout()->parameters()[piece];
    host.resize(p.view.size());
    // Only read from.
    auto* whole = reinterpret_cast<uint8_t*>(const_cast<float*>(src));
    Move(Direction::kTake, rank(), piece, sizeof(float), whole,
         reinterpret_cast<uint8_t*>(host.data()));
    state.Upload(which, p, host.data());
  }
}

absl::Status TensorParallel::Download(TrainingState& state, StateTensor which,
                                      const Parameter& parameter, float* dst) const {
  const size_t index = IndexOf(parameter);
  std::vector<int64_t> counts(layouts_.size(), 0);
  int64_t total = 0, my_offset = 0;
  for (int r = 0; r < static_cast<int>(layouts_.size()); ++r) {
    if (r == rank()) my_offset = total;
    for (const size_t i : PiecesOf(r, index)) counts[r] += layouts_[r]->parameters()[i].view.size();
    total += counts[r];
  }
  std::vector<float> all(total);
  float* next = all.data() + my_offset;
  for (const size_t piece : PiecesOf(rank(), index)) {
    const Parameter& p = layout()->parameters()[piece];
    RETURN_IF_ERROR(state.Download(which, p, next));
    next += p.view.size();
  }
  if (leaves() != nullptr) {
    CollectiveCall call;
    call.kind = CollectiveKind::kAllGather;
    call.dtype = DType::kF32;
    call.counts = counts;
    call.num_elements = counts[rank()];
    call.input = all.data() + my_offset;
    call.output = all.data();
    RETURN_IF_ERROR(leaves()->Start(std::move(call)).Wait());
  }
  next = all.data();
  for (int r = 0; r < static_cast<int>(layouts_.size()); ++r) {
    for (const size_t piece : PiecesOf(r, index)) {
      Move(Direction::kPut, r, piece, sizeof(float), reinterpret_cast<uint8_t*>(dst),
           reinterpret_cast<uint8_t*>(next));
      next += layouts_[r]->parameters()[piece].view.size();
    }
  }
  return absl::OkStatus();
}

// The state's parts are of pieces: rectangles of parameters.
std::vector<StatePart> TensorParallel::PartsToWrite(const TrainingState& state) const {
  std::vector<StatePart> parts;
  for (StatePart part : state.PartsToWrite()) {
    const auto piece = static_cast<size_t>(part.parameter - layout()->parameters().data());
    const PieceOrigin& origin = layout()->origins()[piece];
    if (origin.leaf < 0 && rank() > 0) continue;
    const ParameterView& view = part.parameter->view;
    part.parameter = &whole_.parameters()[origin.parameter];
    if (view.size() < part.parameter->view.size()) {
      part.row_begin = origin.row;
      part.row_end = origin.row + view.rows;
      part.col_begin = origin.col;
      part.col_end = origin.col + view.cols;
    }
    parts.push_back(part);
  }
  return parts;
}

absl::Status TensorParallel::DownloadWeights(TrainingState& state, DType dtype,
                                             uint8_t* dst) const {
  const size_t element = SizeOf(dtype);
  std::vector<int64_t> counts, offsets;
  int64_t total = 0;
  for (const auto& l : layouts_) {
    offsets.push_back(total);
    counts.push_back(l->size());
    total += l->size();
  }
  std::vector<uint8_t> all(static_cast<size_t>(total) * element);
  uint8_t* mine = all.data() + static_cast<size_t>(offsets[rank()]) * element;
  RETURN_IF_ERROR(state.DownloadWeights(mine));
  if (leaves() != nullptr) {
    CollectiveCall call;
    call.kind = CollectiveKind::kAllGather;
    call.dtype = dtype;
    call.counts = counts;
    call.num_elements = counts[rank()];
    call.input = mine;
    call.output = all.data();
    RETURN_IF_ERROR(leaves()->Start(std::move(call)).Wait());
  }
  std::memset(dst, 0, static_cast<size_t>(whole_.size()) * element);  // gaps, too
  for (int r = 0; r < static_cast<int>(layouts_.size()); ++r) {
    const auto& parameters = layouts_[r]->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const size_t index = layouts_[r]->origins()[i].parameter;
      Move(Direction::kPut, r, i, element,
           dst + static_cast<size_t>(whole_.parameters()[index].view.offset) * element,
           all.data() + static_cast<size_t>(offsets[r] + parameters[i].view.offset) * element);
    }
  }
  return absl::OkStatus();
}

void TensorParallel::ReadRows(Device& device, Stream& stream, const Tensor& flat,
                              const Parameter& parameter, int64_t row_begin, int64_t row_end,
                              uint8_t* dst) const {
  const size_t element = SizeOf(flat.dtype);
  const int64_t stride = parameter.view.cols;
  std::vector<uint8_t> host;
  for (const size_t piece : HeldPiecesOf(rank(), IndexOf(parameter))) {
    const PieceOrigin& origin = layout()->origins()[piece];
    const ParameterView& view = layout()->parameters()[piece].view;
    const int64_t begin = std::max(row_begin, origin.row);
    const int64_t end = std::min(row_end, origin.row + view.rows);
    if (begin >= end) continue;
    const size_t row_bytes = static_cast<size_t>(view.cols) * element;
    host.resize(static_cast<size_t>(end - begin) * row_bytes);
    device.Download(stream, view.In(flat).Rows(begin - origin.row, end - begin), host.data());
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(dst + static_cast<size_t>((r - row_begin) * stride + origin.col) * element,
                  host.data() + static_cast<size_t>(r - begin) * row_bytes, row_bytes);
    }
  }
}

void TensorParallel::EndBroken() {
  const std::vector<Communicator*> groups = {leaves_group_.get(), data_, world_};
  for (const Communicator* broken : groups) {
    if (broken == nullptr || broken->status().ok()) continue;
    const std::string reason(broken->status().message());
    for (Communicator* group : groups) {
      if (group != nullptr) group->Abort(reason);
    }
    return;
  }
}
}  // namespace stretto::engine
