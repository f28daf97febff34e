#include "engine/training/training_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "engine/training/adapted_model.h"

namespace stretto::engine {
TrainingState::TrainingState(Device& device, Stream& stream,
                             std::shared_ptr<const ParameterLayout> layout,
                             const ParallelOptions& options, Communicator* communicator,
                             Communicator* leaves)
    : device_(device),
      stream_(stream),
      layout_(std::move(layout)),
      options_(options),
      communicator_(communicator),
      leaves_(leaves),
      map_(*layout_, communicator == nullptr ? 1 : communicator->size()),
      whole_(*layout_, 1) {}
TrainingState::~TrainingState() { FinishReaders(); }

absl::StatusOr<std::unique_ptr<TrainingState>> TrainingState::Create(
    Device& device, Stream& stream, std::shared_ptr<const ParameterLayout> layout,
    const TrainingStateOptions& state_options, const ParallelOptions& options,
    Communicator* communicator, Communicator* leaves) {
  const int num_ranks = communicator == nullptr ? 1 : communicator->size();
  if (options.reduction_leaves < num_ranks) {
    return absl::InvalidArgumentError(absl::StrCat("trainer: reduction_leaves is ",
                                                   options.reduction_leaves, ", fewer than the ",
                                                   num_ranks, " ranks of the group"));
  }
  if (options.bucket_bytes < 1 || options.max_gathered_layers < 1) {
    return absl::InvalidArgumentError(
        "trainer: bucket_bytes and max_gathered_layers must be at least 1");
  }
  if (options.kind != DataParallel::kDdp && communicator == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer: ", Name(options.kind), " needs a group of ranks"));
  }
  std::unique_ptr<TrainingState> state(
      new TrainingState(device, stream, std::move(layout), options, communicator, leaves));
  RETURN_IF_ERROR(state->Allocate(state_options));
  if ((communicator != nullptr || leaves != nullptr) &&
      device.HostMemory(state->gradients_) == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer: groups of ranks need a device whose "
                     "memory the host reaches; this one is ",
                     device.Profile(state_options.dtype).backend));
  }
  return state;
}

absl::Status TrainingState::AllocateOptimizer(const OptimizerStorage& storage) {
  std::vector<OptimizerState::Run> runs;
  for (const ShardMap::Part& p : optimizer_place_.map->parts()) {
    const int r = optimizer_place_.rank;
    if (p.counts[r] > 0) runs.push_back({p.local[r], p.counts[r]});
  }
  ASSIGN_OR_RETURN(optimizer_, OptimizerState::Create(device_, stream_, std::move(runs), storage));
  return absl::OkStatus();
}

absl::Status TrainingState::Allocate(const TrainingStateOptions& state) {
  model_ = state.model;
  const Place all{&whole_, 0}, mine{&map_, rank()};
  optimizer_place_ = options_.kind == DataParallel::kDdp ? all : mine;
  gradient_place_ = options_.streams_gradients() ? mine : all;
  weight_place_ = options_.kind == DataParallel::kFsdp && model_ == nullptr ? mine : all;
  const auto make = [&](DeviceMemory& memory, DType type, const Place& place,
                        Tensor& tensor) -> absl::Status {
    // A rank may own nothing of a very small model.
    ASSIGN_OR_RETURN(tensor,
                     memory.MakeZeros(device_, type, 1, std::max<int64_t>(1, place.size())));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(make(weight_memory_, state.dtype, weight_place_, weights_flat_));
  RETURN_IF_ERROR(AllocateOptimizer(state.storage));
  RETURN_IF_ERROR(make(gradient_memory_, DType::kF32, gradient_place_, gradients_));
  if (model_ == nullptr && weight_place_.map == &whole_) {
    ASSIGN_OR_RETURN(weights_, ModelWeights::View(device_, stream_, *layout_, weights_flat_));
  } else if (model_ == nullptr) {
    weights_ = ModelWeights::Empty(*layout_);
  }
  if (options_.streams_gradients()) return AllocateStream();
  if (!alone()) {
    const Tensor& flat = model_ != nullptr ? model_->flat_weights() : weights_flat_;
    const bool gathers = options_.kind == DataParallel::kDdp;
    sums_ = std::make_unique<GradientSums>(GradientSumsContext{device_, stream_, *layout_, map_,
                                                               *communicator_, flat, gradients_,
                                                               gathers, options_.bucket_bytes});
  }
  return absl::OkStatus();
}

absl::Status TrainingState::AllocateStream() {
  const bool gathers = options_.kind == DataParallel::kFsdp;
  const Tensor& weights = model_ != nullptr ? model_->flat_weights() : weights_flat_;
  const UnitStreamContext context{device_,
                                  stream_,
                                  model_ != nullptr ? model_->layout() : *layout_,
                                  model_ != nullptr ? model_->map() : map_,
                                  *layout_,
                                  map_,
                                  *communicator_,
                                  model_ != nullptr ? model_->weights() : *weights_,
                                  gathers,
                                  gathers ? weights : Tensor{},
                                  gathers ? Tensor{} : weights,
                                  gradients_};
  ASSIGN_OR_RETURN(unit_stream_, UnitStream::Create(context, options_));
  return absl::OkStatus();
}

ParameterUnits* TrainingState::units() {
  if (unit_stream_ != nullptr) return unit_stream_.get();
  return sums_.get();
}

TrainingState::Piece TrainingState::PieceOf(const Place& place, int64_t part) {
  const ShardMap::Part& p = place.map->parts()[part];
  return {p.begin + p.offsets[place.rank], p.counts[place.rank]};
}

int64_t TrainingState::LocalOf(const Place& place, int64_t begin, int64_t count) {
  const ShardMap::Part& p = place.map->parts()[place.map->PartOf(begin)];
  const int64_t from = begin - p.begin - p.offsets[place.rank];
  STRETTO_CHECK(from >= 0 && from + count <= p.counts[place.rank]);
  return p.local[place.rank] + from;
}

Tensor TrainingState::In(const Tensor& tensor, const Place& place, int64_t begin,
                         int64_t count) const {
  return tensor.Cols(LocalOf(place, begin, count), count);
}

std::vector<StatePart> TrainingState::PartsToWrite() const {
  std::vector<StatePart> parts;
  for (const StateTensor which : {StateTensor::kMaster, StateTensor::kM, StateTensor::kV}) {
    for (const Parameter& p : layout_->parameters()) {
      for (const auto& [begin, count, unused] :
           map_.RunsOf(rank(), p.view.offset, p.view.offset + p.view.size())) {
        StatePart& part = parts.emplace_back();
        part = {which, &p, begin - p.view.offset, count, {}, 0, 0, 0, 0, nullptr};
        if (is_plain()) {
          part.values = In(Flat(which), optimizer_place_, begin, count);
          part.values.row_stride = part.values.cols;  // of one row: the host reaches it as one run
          continue;
        }
        const int64_t local = LocalOf(optimizer_place_, begin, count);
        part.read = [this, which, local](int64_t first, int64_t num, float* dst) {
          return optimizer_->Read(which, local + first, num, dst);
        };
      }
    }
  }
  return parts;
}

void TrainingState::FinishReaders() {
  for (const auto& reader : readers_) reader->FinishReading();
  readers_.clear();
}

void TrainingState::Upload(StateTensor which, const Parameter& parameter, const float* src) {
  FinishReaders();
  const ParameterView& view = parameter.view;
  for (const auto& [begin, count, local] : optimizer_place_.map->RunsOf(
           optimizer_place_.rank, view.offset, view.offset + view.size())) {
    upload_status_.Update(optimizer_->Write(which, local, count, src + (begin - view.offset)));
  }
}

absl::Status TrainingState::Read(StateTensor which, int64_t begin, int64_t count,
                                 float* dst) const {
  return optimizer_->Read(which, LocalOf(optimizer_place_, begin, count), count, dst);
}

absl::Status TrainingState::Download(StateTensor which, const Parameter& parameter, float* dst) {
  const ParameterView& view = parameter.view;
  if (has_all_masters()) {
    return Read(which, view.offset, view.size(), dst);
  }
  absl::Status read;
  const int64_t view_end = view.offset + view.size();
  for (int64_t p = map_.PartOf(view.offset); p <= map_.PartOf(view_end - 1); ++p) {
    std::vector<float> mine;
    CollectiveCall call;
    call.kind = CollectiveKind::kAllGather;
    call.dtype = DType::kF32;
    call.output = dst;
    const ShardMap::Part& part = map_.parts()[p];
    for (int r = 0; r < map_.num_ranks(); ++r) {
      const int64_t theirs = part.begin + part.offsets[r];
      const int64_t begin = std::max(view.offset, theirs);
      const int64_t end = std::min(view_end, theirs + part.counts[r]);
      call.counts.push_back(std::max<int64_t>(0, end - begin));
      call.offsets.push_back(std::max<int64_t>(0, begin - view.offset));
      if (r == rank() && end > begin) {
        const int64_t local = part.local[r] + (begin - theirs);
        mine.resize(static_cast<size_t>(end - begin));
        read.Update(optimizer_->Read(which, local, end - begin, mine.data()));
        call.input = mine.data();
      }
    }
    call.num_elements = call.counts[rank()];
    RETURN_IF_ERROR(communicator_->Start(std::move(call)).Wait());
  }
  return read;
}

void TrainingState::ClearMoments() {
  FinishReaders();
  for (const StateTensor which : {StateTensor::kM, StateTensor::kV}) {
    upload_status_.Update(optimizer_->Clear(which));
  }
}

absl::Status TrainingState::ForEachWindow(
    const std::function<absl::Status(const Piece&)>& call) const {
  for (size_t p = 0; p < optimizer_place_.map->parts().size(); ++p) {
    RETURN_IF_ERROR(ForEachWindow(PieceOf(optimizer_place_, static_cast<int64_t>(p)), call));
  }
  return absl::OkStatus();
}

absl::Status TrainingState::ForEachWindow(
    const Piece& run, const std::function<absl::Status(const Piece&)>& call) const {
  const int64_t window = is_plain() ? run.count : optimizer_->window();
  for (int64_t done = 0; done < run.count; done += window) {
    RETURN_IF_ERROR(call({run.begin + done, std::min(window, run.count - done)}));
  }
  return absl::OkStatus();
}

absl::Status TrainingState::RefreshWeights() {
  upload_status_.Update(optimizer_->FinishWrites());
  RETURN_IF_ERROR(std::exchange(upload_status_, absl::OkStatus()));
  RETURN_IF_ERROR(ForEachWindow([this](const Piece& piece) -> absl::Status {
    const int64_t local = LocalOf(optimizer_place_, piece.begin, piece.count);
    ASSIGN_OR_RETURN(const Tensor master, optimizer_->LoadMaster(local, piece.count));
    device_.Copy(stream_, In(weights_flat_, weight_place_, piece.begin, piece.count), master);
    return absl::OkStatus();
  }));
  return PublishWeights();
}

absl::Status TrainingState::PublishWeights() {
  device_.Synchronize(stream_);
  if (weight_place_.map != &whole_) return absl::OkStatus();
  if (optimizer_place_.map != &whole_) RETURN_IF_ERROR(GatherFlat(weights_flat_));
  if (weights_ != nullptr) weights_->Refresh(device_, stream_, *layout_, weights_flat_);
  device_.Synchronize(stream_);
  return absl::OkStatus();
}

bool TrainingState::has_all_weights() const {
  return model_ != nullptr ? model_->is_whole() : weight_place_.whole();
}

absl::Status TrainingState::DownloadWeights(uint8_t* dst) {
  const Tensor& flat = model_ != nullptr ? model_->flat_weights() : weights_flat_;
  if (has_all_weights()) {
    device_.Download(stream_, flat, dst);
    return absl::OkStatus();
  }
  const size_t element = SizeOf(flat.dtype);
  for (const ShardMap::Part& p : (model_ != nullptr ? model_->map() : map_).parts()) {
    CollectiveCall call;
    call.kind = CollectiveKind::kAllGather;
    call.dtype = flat.dtype;
    call.counts = p.counts;
    call.offsets = p.offsets;
    call.num_elements = p.counts[rank()];
    call.input = Host(flat) + static_cast<size_t>(p.local[rank()]) * element;
    call.output = dst + static_cast<size_t>(p.begin) * element;
    RETURN_IF_ERROR(communicator_->Start(std::move(call)).Wait());
  }
  return absl::OkStatus();
}

absl::Status TrainingState::GatherFlat(const Tensor& flat) {
  std::vector<CollectiveHandle> handles;
  for (const ShardMap::Part& part : map_.parts()) {
    for (CollectiveCall& call :
         BucketsOf(part, rank(), SizeOf(flat.dtype), options_.bucket_bytes)) {
      call.kind = CollectiveKind::kAllGather;
      call.dtype = flat.dtype;
      call.input = Host(flat) + static_cast<size_t>(call.offsets[rank()]) * SizeOf(flat.dtype);
      call.output = Host(flat);
      handles.push_back(communicator_->Start(std::move(call)));
    }
  }
  absl::Status status;
  for (const CollectiveHandle& h : handles) status.Update(h.Wait());
  return status;
}

void TrainingState::BeginStep(const LeafPlan& plan, TiedEmbeddingSum::IdsOfRanks ids_of_ranks) {
  if (sums_ == nullptr) return;
  const bool tied = layout_->lm_head.offset == layout_->embedding.offset;
  if (model_ != nullptr || layout_->has_leaves() || !tied) ids_of_ranks.clear();
  sums_->Begin(plan, std::move(ids_of_ranks));
}

void TrainingState::BeginLeaf() { device_.Fill(stream_, gradients_, 0.0f); }

void TrainingState::EndLeaf(const LeafPlan& plan, int64_t leaf) {
  if (plan.LeavesOf(rank()).size() == 1) return;  // the gradients are the partial
  const std::vector<SumNode> nodes = plan.NodesOfRank(rank());
  partial_sums_.resize(nodes.size());
  size_t bytes = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (leaf >= nodes[i].begin && leaf < nodes[i].end) {
      if (partial_sums_[i] == nullptr) {
        std::vector<bool> used = plan.used();
        std::fill(used.begin(), used.begin() + nodes[i].begin, false);
        std::fill(used.begin() + nodes[i].end, used.end(), false);
        partial_sums_[i] = std::make_unique<TreeSum>(std::move(used), layout_->size());
      }
      std::vector<float> values(layout_->size());
      device_.Download(stream_, gradients_, values.data());
      partial_sums_[i]->Add({leaf, leaf + 1}, std::move(values));
    }
    if (partial_sums_[i] != nullptr) bytes += partial_sums_[i]->bytes_max();
  }
  partial_bytes_max_ = std::max(partial_bytes_max_, bytes);
}

void TrainingState::ExpectLastPass() {
  if (sums_ != nullptr && partial_sums_.empty()) sums_->ExpectLastPass();
}

absl::Status TrainingState::SumGradients() {
  std::vector<std::vector<float>> partials;
  for (const auto& sum : partial_sums_) partials.push_back(sum->Take());
  partial_sums_.clear();
  if (alone()) {
    if (!partials.empty()) device_.Upload(stream_, gradients_, partials[0].data());
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(sums_->Finish(partials));
  own_squares_ = OwnSquaredBlocks();
  return absl::OkStatus();
}

absl::Status TrainingState::FinishSums() {
  return sums_ == nullptr ? absl::OkStatus() : sums_->AwaitAll();
}

MemoryLedger TrainingState::ledger() const {
  MemoryLedger l;
  l.weights = weight_memory_.bytes();
  l.gradients = gradient_memory_.bytes();
  l.optimizer = optimizer_->bytes();
  l.offloaded = optimizer_->file_bytes();
  l.windows = unit_stream_ != nullptr ? unit_stream_->window_bytes() : partial_bytes_max_;
  l.windows += optimizer_->window_bytes();
  if (unit_stream_ != nullptr) l.packed = unit_stream_->packed_bytes();
  if (weights_ != nullptr && weight_place_.map == &whole_) l.packed = weights_->bytes();
  return l;
}
}  // namespace stretto::engine
