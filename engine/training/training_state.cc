#include "engine/training/training_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
bool IsVector(const Parameter& p) { return p.spec.shape.size() == 1; }

// The first error, once all are done.
absl::Status WaitAll(const std::vector<CollectiveHandle>& handles) {
  absl::Status status;
  for (const CollectiveHandle& h : handles) {
    if (absl::Status s = h.Wait(); status.ok()) status = s;
  }
  return status;
}

// `all` = the ranks' values in order of rank.
absl::Status GatherDoubles(Communicator& group, const std::vector<int64_t>& counts,
                           const std::vector<double>& mine, std::vector<double>& all) {
  int64_t total = 0;
  for (const int64_t c : counts) total += c;
  all.resize(total);
  CollectiveCall call;
  call.kind = CollectiveKind::kAllGather;
  call.dtype = DType::kI64;  // as bits
  call.counts = counts;
  call.num_elements = counts[group.rank()];
  call.input = mine.data();
  call.output = all.data();
  return group.Start(std::move(call)).Wait();
}
}  // namespace

// Lets a pass send gradients on their way.
class TrainingState::Follower final : public ParameterUnits {
 public:
  explicit Follower(TrainingState& state) : state_(state) {}
  void BeforeForward(int64_t) override {}
  void AfterForward(int64_t) override {}
  Tensors BeforeBackward(int64_t) override {
    return {state_.model_ ? state_.model_ : state_.weights_flat_, state_.gradients_};
  }
  void AfterBackward(int64_t unit) override {
    if (!expected_) return;
    state_.StartSum(unit, {});
    if (unit == 0) expected_ = false;
  }
  void Expect(bool last) { expected_ = last; }

 private:
  TrainingState& state_;
  bool expected_ = false;
};

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
TrainingState::~TrainingState() {
  FinishReaders();
  WaitAll(sums_).IgnoreError();  // they use its memory
}

absl::StatusOr<std::unique_ptr<TrainingState>> TrainingState::Create(
    Device& device, Stream& stream, std::shared_ptr<const ParameterLayout> layout, DType dtype,
    const ParallelOptions& options, Communicator* communicator, Communicator* leaves,
    const Tensor& model) {
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
  state->model_ = model;
  RETURN_IF_ERROR(state->Allocate(dtype));
  if ((communicator != nullptr || leaves != nullptr) &&
      device.HostMemory(state->gradients_) == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer: groups of ranks need a device whose "
                     "memory the host reaches; this one is ",
                     device.Profile(dtype).backend));
  }
  return state;
}

absl::Status TrainingState::Allocate(DType dtype) {
  const Place all{&whole_, 0}, mine{&map_, rank()};
  optimizer_place_ = options_.kind == DataParallel::kDdp ? all : mine;
  gradient_place_ = options_.streams_gradients() ? mine : all;
  weight_place_ = options_.kind == DataParallel::kFsdp ? mine : all;
  const auto make = [&](DeviceMemory& memory, DType type, const Place& place,
                        Tensor& tensor) -> absl::Status {
    // A rank may own nothing of a very small model.
    ASSIGN_OR_RETURN(tensor, memory.Make(device_, type, 1, std::max<int64_t>(1, place.size())));
    device_.Fill(stream_, tensor, 0.0f);
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(make(weight_memory_, dtype, weight_place_, weights_flat_));
  for (Tensor* t : {&master_, &m_, &v_}) {
    RETURN_IF_ERROR(make(optimizer_memory_, DType::kF32, optimizer_place_, *t));
  }
  RETURN_IF_ERROR(make(gradient_memory_, DType::kF32, gradient_place_, gradients_));
  if (model_) {
    STRETTO_CHECK(!options_.streams_gradients());
  } else if (weight_place_.map == &whole_) {
    ASSIGN_OR_RETURN(weights_, ModelWeights::View(device_, stream_, *layout_, weights_flat_));
  } else {
    weights_ = ModelWeights::Empty(*layout_);
  }
  if (!options_.streams_gradients()) {
    if (!alone()) follower_ = std::make_unique<Follower>(*this);
    return absl::OkStatus();
  }
  const bool gathers = options_.kind == DataParallel::kFsdp;
  const UnitStreamContext context{device_,
                                  stream_,
                                  *layout_,
                                  map_,
                                  *communicator_,
                                  *weights_,
                                  gathers,
                                  gathers ? weights_flat_ : Tensor{},
                                  gathers ? Tensor{} : weights_flat_,
                                  gradients_};
  ASSIGN_OR_RETURN(unit_stream_, UnitStream::Create(context, options_));
  return absl::OkStatus();
}

ParameterUnits* TrainingState::units() {
  if (unit_stream_ != nullptr) return unit_stream_.get();
  return follower_.get();
}

TrainingState::Piece TrainingState::PieceOf(const Place& place, int64_t unit) {
  const ShardMap::Unit& u = place.map->units()[unit];
  return {u.begin + u.offsets[place.rank], u.counts[place.rank]};
}

Tensor TrainingState::In(const Tensor& tensor, const Place& place, int64_t begin,
                         int64_t count) const {
  const ShardMap::Unit& u = place.map->units()[place.map->UnitOf(begin)];
  const int64_t from = begin - u.begin - u.offsets[place.rank];
  STRETTO_CHECK(from >= 0 && from + count <= u.counts[place.rank]);
  return tensor.Cols(u.local[place.rank] + from, count);
}

const Tensor& TrainingState::Flat(StateTensor which) const {
  switch (which) {
    case StateTensor::kMaster:
      return master_;
    case StateTensor::kM:
      return m_;
    case StateTensor::kV:
      break;
  }
  return v_;
}

std::vector<StatePart> TrainingState::PartsToWrite() const {
  std::vector<StatePart> parts;
  const Place mine{&map_, rank()};
  for (const StateTensor which : {StateTensor::kMaster, StateTensor::kM, StateTensor::kV}) {
    for (const Parameter& p : layout_->parameters()) {
      const Piece piece = PieceOf(mine, map_.UnitOf(p.view.offset));
      const int64_t begin = std::max(piece.begin, p.view.offset);
      const int64_t end = std::min(piece.begin + piece.count, p.view.offset + p.view.size());
      if (begin >= end) continue;
      Tensor values = In(Flat(which), optimizer_place_, begin, end - begin);
      values.row_stride = values.cols;  // of one row: the host reaches it as one run
      parts.push_back({which, &p, begin - p.view.offset, end - begin, values, 0, 0, 0, 0});
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
  const Piece piece = PieceOf(optimizer_place_, map_.UnitOf(view.offset));
  const int64_t begin = std::max(view.offset, piece.begin);
  const int64_t end = std::min(view.offset + view.size(), piece.begin + piece.count);
  if (begin >= end) return;
  device_.Upload(stream_, In(Flat(which), optimizer_place_, begin, end - begin),
                 src + (begin - view.offset));
}

absl::Status TrainingState::Download(StateTensor which, const Parameter& parameter, float* dst) {
  const ParameterView& view = parameter.view;
  if (has_all_masters()) {
    device_.Download(stream_, In(Flat(which), optimizer_place_, view.offset, view.size()), dst);
    return absl::OkStatus();
  }
  CollectiveCall call;
  call.kind = CollectiveKind::kAllGather;
  call.dtype = DType::kF32;
  call.output = dst;
  const ShardMap::Unit& u = map_.units()[map_.UnitOf(view.offset)];
  for (int r = 0; r < map_.num_ranks(); ++r) {
    const int64_t theirs = u.begin + u.offsets[r];
    const int64_t begin = std::max(view.offset, theirs);
    const int64_t end = std::min(view.offset + view.size(), theirs + u.counts[r]);
    call.counts.push_back(std::max<int64_t>(0, end - begin));
    call.offsets.push_back(std::max<int64_t>(0, begin - view.offset));
    if (r == rank() && end > begin) {
      const int64_t local = u.local[r] + (begin - theirs);
      call.input = Host(Flat(which)) + static_cast<size_t>(local) * sizeof(float);
    }
  }
  call.num_elements = call.counts[rank()];
  return communicator_->Start(std::move(call)).Wait();
}

void TrainingState::ClearMoments() {
  FinishReaders();
  device_.Fill(stream_, m_, 0.0f);
  device_.Fill(stream_, v_, 0.0f);
}

absl::Status TrainingState::RefreshWeights() {
  for (size_t u = 0; u < map_.units().size(); ++u) {
    const Piece piece = PieceOf(optimizer_place_, static_cast<int64_t>(u));
    if (piece.count == 0) continue;
    device_.Copy(stream_, In(weights_flat_, weight_place_, piece.begin, piece.count),
                 In(master_, optimizer_place_, piece.begin, piece.count));
  }
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

absl::Status TrainingState::DownloadWeights(uint8_t* dst) {
  if (weight_place_.map == &whole_) {
    device_.Download(stream_, weights_flat_, dst);
    return absl::OkStatus();
  }
  const size_t element = SizeOf(weights_flat_.dtype);
  for (const ShardMap::Unit& u : map_.units()) {
    CollectiveCall call;
    call.kind = CollectiveKind::kAllGather;
    call.dtype = weights_flat_.dtype;
    call.counts = u.counts;
    call.offsets = u.offsets;
    call.num_elements = u.counts[rank()];
    call.input = Host(weights_flat_) + static_cast<size_t>(u.local[rank()]) * element;
    call.output = dst + static_cast<size_t>(u.begin) * element;
    RETURN_IF_ERROR(communicator_->Start(std::move(call)).Wait());
  }
  return absl::OkStatus();
}

std::vector<CollectiveCall> TrainingState::BucketsOf(int64_t unit, size_t element_bytes) const {
  const int num_ranks = map_.num_ranks();
  const int64_t slice =
      std::max<int64_t>(1, options_.bucket_bytes / static_cast<int64_t>(element_bytes) / num_ranks);
  std::vector<CollectiveCall> buckets;
  const ShardMap::Unit& u = map_.units()[unit];
  const int64_t largest = *std::max_element(u.counts.begin(), u.counts.end());
  for (int64_t begin = 0; begin < largest; begin += slice) {
    CollectiveCall& call = buckets.emplace_back();
    for (int r = 0; r < num_ranks; ++r) {
      call.counts.push_back(std::clamp<int64_t>(u.counts[r] - begin, 0, slice));
      call.offsets.push_back(u.begin + u.offsets[r] + std::min(begin, u.counts[r]));
    }
    call.num_elements = call.counts[rank()];
  }
  return buckets;
}

absl::Status TrainingState::GatherFlat(const Tensor& flat) {
  std::vector<CollectiveHandle> handles;
  for (size_t u = 0; u < map_.units().size(); ++u) {
    for (CollectiveCall& call : BucketsOf(static_cast<int64_t>(u), SizeOf(flat.dtype))) {
      call.kind = CollectiveKind::kAllGather;
      call.dtype = flat.dtype;
      call.input = Host(flat) + static_cast<size_t>(call.offsets[rank()]) * SizeOf(flat.dtype);
      call.output = Host(flat);
      handles.push_back(communicator_->Start(std::move(call)));
    }
  }
  return WaitAll(handles);
}

void TrainingState::BeginStep(const LeafPlan& plan) {
  sum_call_ = {};
  sum_call_.kind =
      optimizer_place_.map == &whole_ ? CollectiveKind::kAllReduce : CollectiveKind::kReduceScatter;
  sum_call_.dtype = DType::kF32;
  sum_call_.plan.used = plan.used();
  for (int r = 0; r < map_.num_ranks(); ++r) {
    sum_call_.plan.nodes_of_rank.push_back(plan.NodesOfRank(r));
  }
  num_sums_started_ = 0;
  sums_.clear();
  if (follower_ != nullptr) follower_->Expect(false);
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
  if (follower_ != nullptr && partial_sums_.empty()) follower_->Expect(true);
}

std::vector<int64_t> TrainingState::UnitsDownwards() const {
  std::vector<int64_t> units;
  for (auto u = static_cast<int64_t>(map_.units().size()) - 1; u >= 0; --u) units.push_back(u);
  return units;
}

void TrainingState::StartSum(int64_t unit, const std::vector<std::vector<float>>& partials) {
  STRETTO_CHECK(UnitsDownwards()[num_sums_started_++] == unit);
  device_.Synchronize(stream_);
  const std::vector<SumNode>& nodes = sum_call_.plan.nodes_of_rank[rank()];
  for (const CollectiveCall& bucket : BucketsOf(unit, sizeof(float))) {
    CollectiveCall call = sum_call_;
    for (size_t i = 0; i < nodes.size(); ++i) {
      call.parts.push_back({nodes[i], partials.empty() ? static_cast<const void*>(Host(gradients_))
                                                       : partials[i].data()});
    }
    call.counts = bucket.counts;
    call.offsets = bucket.offsets;
    call.output = Host(gradients_);
    if (call.kind == CollectiveKind::kReduceScatter) {
      call.output = Host(gradients_) + static_cast<size_t>(call.offsets[rank()]) * sizeof(float);
    }
    sums_.push_back(communicator_->Start(std::move(call)));
  }
}

absl::Status TrainingState::SumGradients() {
  std::vector<std::vector<float>> partials;
  for (const auto& sum : partial_sums_) partials.push_back(sum->Take());
  partial_sums_.clear();
  if (alone()) {
    if (!partials.empty()) device_.Upload(stream_, gradients_, partials[0].data());
    return absl::OkStatus();
  }
  const std::vector<int64_t> units = UnitsDownwards();
  while (num_sums_started_ < units.size()) StartSum(units[num_sums_started_], partials);
  const absl::Status status = WaitAll(sums_);
  sums_.clear();
  return status;
}

absl::StatusOr<double> TrainingState::GradientNorm() {
  if (options_.reduction_leaves == 1 && !layout_->has_leaves()) {
    return std::sqrt(device_.SquaredNorm(stream_, gradients_));
  }
  ASSIGN_OR_RETURN(BlockSums sums, SquaredBlocks());
  if (leaves_ != nullptr) RETURN_IF_ERROR(AddLeaves(sums));
  double total = 0;
  for (const std::vector<double>& unit : sums) {
    for (const double block : unit) total += block;
  }
  return std::sqrt(total);
}

absl::StatusOr<TrainingState::BlockSums> TrainingState::SquaredBlocks() {
  constexpr int64_t kBlock = ShardMap::kBlock;
  const auto blocks = [](int64_t elements) { return (elements + kBlock - 1) / kBlock; };
  std::vector<double> mine;
  std::vector<int64_t> counts(map_.num_ranks(), 0);
  for (size_t u = 0; u < map_.units().size(); ++u) {
    const Piece piece = PieceOf({&map_, rank()}, static_cast<int64_t>(u));
    for (int64_t i = 0; i < piece.count; i += kBlock) {
      mine.push_back(device_.SquaredNorm(stream_, In(gradients_, gradient_place_, piece.begin + i,
                                                     std::min(kBlock, piece.count - i))));
    }
    for (int r = 0; r < map_.num_ranks(); ++r) counts[r] += blocks(map_.units()[u].counts[r]);
  }
  std::vector<double> all = mine;
  std::vector<int64_t> next(map_.num_ranks(), 0);  // where each rank's sums go on
  if (!alone()) {
    for (int r = 1; r < map_.num_ranks(); ++r) next[r] = next[r - 1] + counts[r - 1];
    RETURN_IF_ERROR(GatherDoubles(*communicator_, counts, mine, all));
  }
  BlockSums sums;
  for (const ShardMap::Unit& u : map_.units()) {
    std::vector<double>& unit = sums.emplace_back();
    for (int r = 0; r < map_.num_ranks(); ++r) {
      for (int64_t i = 0; i < blocks(u.counts[r]); ++i) unit.push_back(all[next[r]++]);
    }
  }
  return sums;
}

// What leaves share is the first rank's; its other ranks have the same.
absl::Status TrainingState::AddLeaves(BlockSums& sums) const {
  const int num_ranks = leaves_->size();
  std::vector<double> mine;
  std::vector<int64_t> sizes;  // of this rank's units
  for (size_t u = 0; u < sums.size(); ++u) {
    const int64_t shared = layout_->common_size(static_cast<int64_t>(u)) / ShardMap::kBlock;
    if (leaves_->rank() > 0) sums[u].erase(sums[u].begin(), sums[u].begin() + shared);
    mine.insert(mine.end(), sums[u].begin(), sums[u].end());
    sizes.push_back(static_cast<int64_t>(sums[u].size()));
  }
  std::vector<int64_t> all_sizes(sizes.size() * static_cast<size_t>(num_ranks));
  const auto bytes = [](std::vector<int64_t>& v) {
    return absl::MakeSpan(reinterpret_cast<uint8_t*>(v.data()), v.size() * sizeof(int64_t));
  };
  RETURN_IF_ERROR(leaves_->AllGather(bytes(sizes), bytes(all_sizes)));
  std::vector<int64_t> counts(num_ranks, 0);
  for (size_t i = 0; i < all_sizes.size(); ++i) counts[i / sizes.size()] += all_sizes[i];
  std::vector<double> all;
  RETURN_IF_ERROR(GatherDoubles(*leaves_, counts, mine, all));
  size_t from = 0;
  for (std::vector<double>& unit : sums) unit.clear();
  for (size_t i = 0; i < all_sizes.size(); ++i) {
    std::vector<double>& unit = sums[i % sizes.size()];
    unit.insert(unit.end(), all.begin() + static_cast<int64_t>(from),
                all.begin() + static_cast<int64_t>(from) + all_sizes[i]);
    from += static_cast<size_t>(all_sizes[i]);
  }
  return absl::OkStatus();
}

void TrainingState::UpdatePiece(const Piece& piece, const AdamWStep& step) {
  const auto at = [&](const Tensor& tensor, const Place& place) {
    return In(tensor, place, piece.begin, piece.count);
  };
  device_.AdamW(stream_, at(weights_flat_, weight_place_), at(master_, optimizer_place_),
                at(m_, optimizer_place_), at(v_, optimizer_place_), at(gradients_, gradient_place_),
                step);
}

absl::Status TrainingState::Update(AdamWStep step, double weight_decay) {
  FinishReaders();
  for (size_t u = 0; u < map_.units().size(); ++u) {
    const Piece piece = PieceOf(optimizer_place_, static_cast<int64_t>(u));
    if (piece.count == 0) continue;
    if (weight_decay == 0) {
      UpdatePiece(piece, step);
      continue;
    }
    for (const Parameter& p : layout_->parameters()) {  // matrices decay, norms and biases do not
      const int64_t begin = std::max(piece.begin, p.view.offset);
      const int64_t end = std::min(piece.begin + piece.count, p.view.offset + p.view.size());
      if (begin >= end) continue;
      step.weight_decay = IsVector(p) ? 0.0f : static_cast<float>(weight_decay);
      UpdatePiece({begin, end - begin}, step);
    }
  }
  return PublishWeights();
}

MemoryLedger TrainingState::ledger() const {
  MemoryLedger l;
  l.weights = weight_memory_.bytes();
  l.gradients = gradient_memory_.bytes();
  l.optimizer = optimizer_memory_.bytes();
  l.windows = unit_stream_ != nullptr ? unit_stream_->window_bytes() : partial_bytes_max_;
  if (unit_stream_ != nullptr) l.packed = unit_stream_->packed_bytes();
  if (weight_place_.map == &whole_) l.packed = weights_ != nullptr ? weights_->bytes() : 0;
  return l;
}
}  // namespace stretto::engine
