// The end of a step: the gradient's norm, and the optimizer.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/status.h"
#include "engine/training/training_state.h"

namespace stretto::engine {
namespace {
bool IsVector(const Parameter& p) { return p.spec.shape.size() == 1; }

// `all` = the ranks' values in order of rank.
CollectiveHandle StartGather(Communicator& group, const std::vector<int64_t>& counts,
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
  return group.Start(std::move(call));
}
}  // namespace

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

std::vector<double> TrainingState::OwnSquaredBlocks() {
  constexpr int64_t kBlock = ShardMap::kBlock;
  std::vector<double> mine;
  for (size_t p = 0; p < map_.parts().size(); ++p) {
    const Piece piece = PieceOf({&map_, rank()}, static_cast<int64_t>(p));
    for (int64_t i = 0; i < piece.count; i += kBlock) {
      mine.push_back(device_.SquaredNorm(stream_, In(gradients_, gradient_place_, piece.begin + i,
                                                     std::min(kBlock, piece.count - i))));
    }
  }
  return mine;
}

absl::StatusOr<TrainingState::BlockSums> TrainingState::SquaredBlocks() {
  const auto blocks = [](int64_t elements) {
    return (elements + ShardMap::kBlock - 1) / ShardMap::kBlock;
  };
  std::vector<double> mine = sums_ != nullptr ? std::move(own_squares_) : OwnSquaredBlocks();
  std::vector<int64_t> counts(map_.num_ranks(), 0);
  for (const ShardMap::Part& part : map_.parts()) {
    for (int r = 0; r < map_.num_ranks(); ++r) counts[r] += blocks(part.counts[r]);
  }
  std::vector<double> all = mine;
  std::vector<int64_t> next(map_.num_ranks(), 0);  // where each rank's sums go on
  if (!alone()) {
    for (int r = 1; r < map_.num_ranks(); ++r) next[r] = next[r - 1] + counts[r - 1];
    const CollectiveHandle gathered = StartGather(*communicator_, counts, mine, all);
    if (sums_ != nullptr) sums_->GatherRest();
    RETURN_IF_ERROR(gathered.Wait());
  }
  BlockSums sums;
  for (int64_t u = 0; u < map_.num_units(); ++u) {
    std::vector<double>& unit = sums.emplace_back();
    const auto [begin, end] = map_.PartsOf(u);
    for (int64_t p = begin; p < end; ++p) {
      for (int r = 0; r < map_.num_ranks(); ++r) {
        const int64_t count = blocks(map_.parts()[p].counts[r]);
        for (int64_t i = 0; i < count; ++i) unit.push_back(all[next[r]++]);
      }
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
  RETURN_IF_ERROR(StartGather(*leaves_, counts, mine, all).Wait());
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

absl::Status TrainingState::UpdatePiece(const Piece& piece, AdamWStep step, double weight_decay,
                                        const MomentRounding& rounding) {
  const int64_t local = LocalOf(optimizer_place_, piece.begin, piece.count);
  ASSIGN_OR_RETURN(const OptimizerState::Tensors state, optimizer_->Load(local, piece.count));
  const auto update = [&](int64_t begin, int64_t count) {
    const int64_t from = begin - piece.begin;
    device_.AdamW(stream_, In(weights_flat_, weight_place_, begin, count),
                  state.master.Cols(from, count), state.m.Cols(from, count),
                  state.v.Cols(from, count), In(gradients_, gradient_place_, begin, count), step);
  };
  if (weight_decay == 0) {
    update(piece.begin, piece.count);
    return optimizer_->Store(local, piece.count, rounding);
  }
  for (const Parameter& p : layout_->parameters()) {  // matrices decay, norms and biases do not
    const int64_t begin = std::max(piece.begin, p.view.offset);
    const int64_t end = std::min(piece.begin + piece.count, p.view.offset + p.view.size());
    if (begin >= end) continue;
    step.weight_decay = IsVector(p) ? 0.0f : static_cast<float>(weight_decay);
    update(begin, end - begin);
  }
  return optimizer_->Store(local, piece.count, rounding);
}

absl::Status TrainingState::Update(AdamWStep step, double weight_decay) {
  FinishReaders();
  const MomentRounding rounding(step.step);
  const auto update = [&](const Piece& piece) {
    return UpdatePiece(piece, step, weight_decay, rounding);
  };
  if (sums_ == nullptr || optimizer_place_.map != &whole_) {
    RETURN_IF_ERROR(ForEachWindow(update));
    return PublishWeights();
  }
  // Part by part, as the sums come.
  std::vector<int64_t> parts_left;
  for (int64_t u = 0; u < map_.num_units(); ++u) {
    const auto [begin, end] = map_.PartsOf(u);
    parts_left.push_back(end - begin);
  }
  for (const int64_t p : sums_->Order()) {
    RETURN_IF_ERROR(sums_->Await(p));
    const ShardMap::Part& part = map_.parts()[p];
    RETURN_IF_ERROR(ForEachWindow({part.begin, part.size()}, update));
    const int64_t unit = map_.UnitOf(p);
    if (--parts_left[unit] == 0) RETURN_IF_ERROR(PackUnit(unit));
  }
  device_.Synchronize(stream_);
  return absl::OkStatus();
}

absl::Status TrainingState::PackUnit(int64_t unit) {
  if (weights_ == nullptr) return absl::OkStatus();
  const bool last = unit + 1 == map_.num_units();
  const bool tied = layout_->lm_head.offset == layout_->embedding.offset;
  if (unit == 0) weights_->BindEmbedding(*layout_, weights_flat_);
  if (last) weights_->BindFinalNorm(*layout_, weights_flat_);
  if (tied ? unit == 0 : last) {
    RETURN_IF_ERROR(weights_->BindHead(device_, stream_, *layout_, weights_flat_));
  }
  if (unit == 0 || last) return absl::OkStatus();
  return weights_->BindLayer(device_, stream_, *layout_, unit - 1, weights_flat_,
                             weights_->layers[unit - 1]);
}
}  // namespace stretto::engine
