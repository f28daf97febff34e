#include "engine/training/unit_stream.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace stretto::engine {
UnitStream::UnitStream(const UnitStreamContext& context, const ParallelOptions& options)
    : c_(context),
      options_(options),
      sums_(context.gradient_map.parts().size()),
      tied_embedding_(context.gradient_map.parts()[0], context.gradient_layout.embedding,
                      context.communicator.rank()) {}

UnitStream::~UnitStream() { EndRound().IgnoreError(); }

absl::StatusOr<std::unique_ptr<UnitStream>> UnitStream::Create(const UnitStreamContext& context,
                                                               const ParallelOptions& options) {
  std::unique_ptr<UnitStream> stream(new UnitStream(context, options));
  RETURN_IF_ERROR(stream->Allocate());
  return stream;
}

absl::Status UnitStream::Allocate() {
  const int64_t edge_units[] = {0, last_unit()};
  for (int i = 0; i < 2; ++i) {
    const int64_t layer = c_.gradient_map.largest_layer();
    ASSIGN_OR_RETURN(layer_gradients_[i].window, memory_.Make(c_.device, DType::kF32, 1, layer));
    // An adapter has nothing there.
    const int64_t edge = std::max<int64_t>(1, c_.gradient_map.UnitSize(edge_units[i]));
    ASSIGN_OR_RETURN(edge_gradients_[i].window, memory_.Make(c_.device, DType::kF32, 1, edge));
  }
  if (!c_.gathers_weights) return absl::OkStatus();
  const DType dtype = c_.weight_shard.dtype;
  const auto num_layers = static_cast<int64_t>(c_.layout.layers.size());
  layer_slots_.resize(std::clamp<int64_t>(options_.max_gathered_layers, 1, num_layers));
  for (WeightSlot& slot : layer_slots_) {
    ASSIGN_OR_RETURN(slot.window, memory_.Make(c_.device, dtype, 1, c_.map.largest_layer()));
  }
  for (int i = 0; i < 2; ++i) {
    ASSIGN_OR_RETURN(edge_slots_[i].window,
                     memory_.Make(c_.device, dtype, 1, c_.map.UnitSize(edge_units[i])));
  }
  return absl::OkStatus();
}

Tensor UnitStream::InFlatRun(const Tensor& window, int64_t begin, int64_t size) {
  Tensor t = window;
  t.handle -= static_cast<uint64_t>(begin) * SizeOf(t.dtype);
  t.rows = 1;
  t.cols = t.row_stride = size;
  return t;
}

UnitStream::WeightSlot& UnitStream::SlotOf(int64_t unit) {
  if (!IsLayer(unit)) return edge_slots_[unit == 0 ? 0 : 1];
  return layer_slots_[(unit - 1) % static_cast<int64_t>(layer_slots_.size())];
}

UnitStream::GradientSlot& UnitStream::GradientSlotOf(int64_t unit) {
  if (!IsLayer(unit)) return edge_gradients_[unit == 0 ? 0 : 1];
  return layer_gradients_[unit % 2];
}

void UnitStream::StartGather(int64_t unit) {
  WeightSlot& slot = SlotOf(unit);
  const int rank = c_.communicator.rank();
  slot.unit = unit;
  slot.gathered.clear();
  if (!status_.ok()) return;
  const size_t element = SizeOf(slot.window.dtype);
  const auto [begin, end] = c_.map.PartsOf(unit);
  for (int64_t p = begin; p < end; ++p) {
    const ShardMap::Part& part = c_.map.parts()[p];
    CollectiveCall call;
    call.kind = CollectiveKind::kAllGather;
    call.dtype = slot.window.dtype;
    call.counts = part.counts;
    call.offsets = part.offsets;
    call.num_elements = part.counts[rank];
    call.input = static_cast<const uint8_t*>(c_.device.HostMemory(c_.weight_shard)) +
                 static_cast<size_t>(part.local[rank]) * element;
    call.output = static_cast<uint8_t*>(c_.device.HostMemory(slot.window)) +
                  static_cast<size_t>(part.begin - c_.map.UnitBegin(unit)) * element;
    slot.gathered.push_back(c_.communicator.Start(std::move(call)));
  }
}

void UnitStream::WaitFor(std::vector<CollectiveHandle>& handles) {
  for (const CollectiveHandle& handle : handles) Keep(handle.Wait());
  handles.clear();
}

// The slots of layers that are done with take the next ones.
void UnitStream::GatherAhead(int64_t unit, int direction) {
  for (int64_t i = 1; i < static_cast<int64_t>(layer_slots_.size()); ++i) {
    const int64_t next = unit + direction * i;
    if (IsLayer(next) && SlotOf(next).unit != next) StartGather(next);
  }
}

Tensor UnitStream::Gathered(int64_t unit, int direction) {
  WeightSlot& slot = SlotOf(unit);
  if (slot.unit != unit) StartGather(unit);
  GatherAhead(unit, direction);
  WaitFor(slot.gathered);
  return WeightsInFlatRun(slot.window, unit);
}

void UnitStream::BeforeForward(int64_t unit) {
  if (!c_.gathers_weights) return;
  const Tensor flat = Gathered(unit, +1);
  if (unit == 0) {
    c_.weights.BindEmbedding(c_.layout, flat);
    if (tied()) Keep(c_.weights.BindHead(c_.device, c_.stream, c_.layout, flat));
  } else if (unit == last_unit()) {
    c_.weights.BindFinalNorm(c_.layout, flat);
    if (!tied()) Keep(c_.weights.BindHead(c_.device, c_.stream, c_.layout, flat));
  } else {
    Keep(
        c_.weights.BindLayer(c_.device, c_.stream, c_.layout, unit - 1, flat, SlotOf(unit).packed));
  }
}

void UnitStream::AfterForward(int64_t unit) {
  if (c_.gathers_weights && IsLayer(unit)) SlotOf(unit).unit = -1;
}

ParameterUnits::Tensors UnitStream::BeforeBackward(int64_t unit) {
  Tensors t;
  t.flat_weights = c_.flat_weights;
  if (c_.gathers_weights && IsLayer(unit)) {
    t.flat_weights = Gathered(unit, -1);
    Keep(c_.weights.BindLayer(c_.device, c_.stream, c_.layout, unit - 1, t.flat_weights,
                              SlotOf(unit).packed));
  } else if (c_.gathers_weights) {
    t.flat_weights = WeightsInFlatRun(SlotOf(unit).window, unit);  // still there from the way up
    if (unit == last_unit()) GatherAhead(unit, -1);
  }
  GradientSlot& slot = GradientSlotOf(unit);
  WaitFor(slot.taken);
  c_.device.Fill(c_.stream, slot.window, 0.0f);
  t.gradients = InFlatRun(slot.window, c_.gradient_map.UnitBegin(unit), c_.gradient_layout.size());
  return t;
}

void UnitStream::AfterBackward(int64_t unit) {
  if (c_.gathers_weights && IsLayer(unit)) SlotOf(unit).unit = -1;
  if (unit == 0 && halves_) return;
  StartSum(unit, c_.gradient_map.PartsOf(unit).first);
}

void UnitStream::AfterMlpBackward(int64_t unit, MlpPart part) {
  const auto [begin, end] = c_.gradient_map.PartsOf(unit);
  if (end - begin > 1) StartSum(unit, begin + (part == MlpPart::kDown ? 2 : 1));
}

std::vector<std::vector<ParameterUnits::Rows>> UnitStream::TiedHeadPieces() {
  if (!halves_) return {};
  return tied_embedding_.RowsOfPieces();
}

void UnitStream::AfterTiedHeadBackward(int64_t piece) {
  if (!halves_ || !status_.ok()) return;
  c_.device.Synchronize(c_.stream);
  GradientSlot& slot = GradientSlotOf(0);
  slot.taken.push_back(c_.communicator.Start(tied_embedding_.HeadCall(
      static_cast<const float*>(c_.device.HostMemory(slot.window)), piece)));
  under_way_.push_back(slot.taken.back());
}

bool UnitStream::TakeLookups(const Tensor& d_x_TD) {
  if (!halves_) return false;
  c_.device.Synchronize(c_.stream);
  StartLookups(static_cast<const float*>(c_.device.HostMemory(d_x_TD)), d_x_TD.row_stride);
  return true;
}

void UnitStream::StartLookups(const float* d_x_TD, int64_t row_stride) {
  if (!status_.ok()) return;
  lookups_sent_ = true;
  under_way_.push_back(c_.communicator.Start(tied_embedding_.RowsCall(d_x_TD, row_stride)));
}

void UnitStream::AddTiedEmbedding() {
  TreeSum& sum = *sums_[0];
  for (int r = 0; r < c_.communicator.size(); ++r) {
    const int64_t leaf = leaf_of_rank_[r];
    if (leaf >= 0) sum.Add({leaf, leaf + 1}, tied_embedding_.TakeShare(r));
  }
  TakeIfComplete(0);
}

void UnitStream::TakeIfComplete(int64_t part) {
  const ShardMap::Part& p = c_.gradient_map.parts()[part];
  const int rank = c_.communicator.rank();
  if (!sums_[part]->complete() || p.counts[rank] == 0) return;
  const std::vector<float> sum = sums_[part]->Take();
  c_.device.Upload(c_.stream, c_.gradient_shard.Cols(p.local[rank], p.counts[rank]), sum.data());
}

void UnitStream::StartSum(int64_t unit, int64_t part) {
  const ShardMap::Part& u = c_.gradient_map.parts()[part];
  if (!status_.ok() || u.size() == 0) return;
  c_.device.Synchronize(c_.stream);
  const int rank = c_.communicator.rank();
  GradientSlot& slot = GradientSlotOf(unit);
  CollectiveCall call;
  call.kind = CollectiveKind::kReduceScatter;
  call.dtype = DType::kF32;
  call.counts = u.counts;
  call.offsets = u.offsets;
  call.num_elements = u.size();
  call.plan.used = used_leaves_;
  for (const int64_t leaf : leaf_of_rank_) {
    call.plan.nodes_of_rank.emplace_back();
    if (leaf >= 0) call.plan.nodes_of_rank.back().push_back({leaf, leaf + 1});
  }
  for (const SumNode& node : call.plan.nodes_of_rank[rank]) {
    call.parts.push_back({node, static_cast<const float*>(c_.device.HostMemory(slot.window)) +
                                    (u.begin - c_.gradient_map.UnitBegin(unit))});
  }
  call.sum = sums_[part].get();
  call.output = static_cast<float*>(c_.device.HostMemory(c_.gradient_shard)) + u.local[rank];
  slot.taken.push_back(c_.communicator.Start(std::move(call)));
  under_way_.push_back(slot.taken.back());
}

void UnitStream::BeginStep(const std::vector<bool>& used_leaves) {
  used_leaves_ = used_leaves;
  const int rank = c_.communicator.rank();
  for (size_t p = 0; p < sums_.size(); ++p) {
    sums_[p] = std::make_unique<TreeSum>(used_leaves, c_.gradient_map.parts()[p].counts[rank]);
  }
}

void UnitStream::BeginRound(const std::vector<int64_t>& leaf_of_rank,
                            TiedEmbeddingSum::IdsOfRanks ids_of_ranks) {
  leaf_of_rank_ = leaf_of_rank;
  halves_ = tied() && !adapts() && c_.communicator.size() > 1 && !ids_of_ranks.empty() &&
            TiedEmbeddingSum::Pays(ids_of_ranks, c_.layout.embedding.rows);
  if (halves_) tied_embedding_.Begin(std::move(ids_of_ranks));
  for (WeightSlot& slot : layer_slots_) slot.unit = -1;
  for (WeightSlot& slot : edge_slots_) slot.unit = -1;
}

void UnitStream::ForwardAlone() {
  for (int64_t u = 0; u <= last_unit(); ++u) {
    BeforeForward(u);
    AfterForward(u);
  }
}

void UnitStream::BackwardAlone() {
  // The order of PackedPass::Backward.
  if (tied()) BeforeBackward(0);
  for (int64_t u = last_unit(); u > 0; --u) {
    BeforeBackward(u);
    if (u == last_unit()) {
      for (int64_t i = 0; halves_ && i < TiedEmbeddingSum::kNumPieces; ++i) {
        AfterTiedHeadBackward(i);
      }
    } else {
      AfterMlpBackward(u, MlpPart::kDown);
      AfterMlpBackward(u, MlpPart::kGateUp);
    }
    AfterBackward(u);
  }
  if (!tied()) BeforeBackward(0);
  if (halves_) StartLookups(nullptr, 0);
  AfterBackward(0);
}

void UnitStream::AddZeros() {
  const int rank = c_.communicator.rank();
  for (size_t p = 0; p < sums_.size(); ++p) {
    const int64_t count = c_.gradient_map.parts()[p].counts[rank];
    for (const int64_t leaf : leaf_of_rank_) {
      if (leaf >= 0) sums_[p]->Add({leaf, leaf + 1}, std::vector<float>(count, 0.0f));
    }
    TakeIfComplete(static_cast<int64_t>(p));
  }
}

absl::Status UnitStream::EndRound() {
  for (const CollectiveHandle& handle : under_way_) Keep(handle.Wait());
  under_way_.clear();
  // Gathers that nobody came for: the round has ended early.
  for (WeightSlot& slot : layer_slots_) WaitFor(slot.gathered);
  for (WeightSlot& slot : edge_slots_) WaitFor(slot.gathered);
  if (std::exchange(lookups_sent_, false) && status_.ok()) AddTiedEmbedding();
  return status_;
}

size_t UnitStream::packed_bytes() const {
  size_t total = c_.gathers_weights ? c_.weights.head_bytes() : 0;
  for (const WeightSlot& slot : layer_slots_) total += slot.packed.packed_bytes();
  return total;
}

size_t UnitStream::sum_bytes_max() const {
  size_t total = 0;
  for (const auto& sum : sums_) total += sum != nullptr ? sum->bytes_max() : 0;
  return total;
}
}  // namespace stretto::engine
