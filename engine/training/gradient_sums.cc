#include "engine/training/gradient_sums.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
// The first error, once all are done.
absl::Status WaitAll(const std::vector<CollectiveHandle>& handles) {
  absl::Status status;
  for (const CollectiveHandle& h : handles) status.Update(h.Wait());
  return status;
}
bool AllDone(const std::vector<CollectiveHandle>& handles) {
  return std::all_of(handles.begin(), handles.end(), [](const auto& h) { return h.done(); });
}
}  // namespace

std::vector<CollectiveCall> BucketsOf(const ShardMap::Part& part, int rank, size_t element_bytes,
                                      int64_t bucket_bytes) {
  const auto num_ranks = static_cast<int>(part.counts.size());
  const int64_t slice =
      std::max<int64_t>(1, bucket_bytes / static_cast<int64_t>(element_bytes) / num_ranks);
  std::vector<CollectiveCall> buckets;
  const int64_t largest = *std::max_element(part.counts.begin(), part.counts.end());
  for (int64_t begin = 0; begin < largest; begin += slice) {
    CollectiveCall& call = buckets.emplace_back();
    for (int r = 0; r < num_ranks; ++r) {
      call.counts.push_back(std::clamp<int64_t>(part.counts[r] - begin, 0, slice));
      call.offsets.push_back(part.begin + part.offsets[r] + std::min(begin, part.counts[r]));
    }
    call.num_elements = call.counts[rank];
  }
  return buckets;
}

GradientSums::GradientSums(const GradientSumsContext& context)
    : c_(context),
      rank_(context.communicator.rank()),
      tied_embedding_(context.map.parts()[0], context.layout.embedding, rank_),
      sums_(context.map.parts().size()),
      gathers_(context.map.parts().size()),
      wanted_(num_parts() / 2) {}

GradientSums::~GradientSums() { AwaitAll().IgnoreError(); }  // they use the gradients' memory

void GradientSums::AfterMlpBackward(int64_t unit, MlpPart part) {
  const auto [begin, end] = c_.map.PartsOf(unit);
  if (expected_ && end - begin > 1) StartSum(begin + (part == MlpPart::kDown ? 2 : 1), {});
}

std::vector<std::vector<ParameterUnits::Rows>> GradientSums::TiedHeadPieces() {
  if (!expected_ || !halves_) return {};
  return tied_embedding_.RowsOfPieces();
}

void GradientSums::AfterTiedHeadBackward(int64_t piece) {
  if (expected_ && halves_) StartTiedHead(piece);
}

bool GradientSums::TakeLookups(const Tensor& d_x_TD) {
  if (!expected_ || !halves_) return false;
  StartLookups(d_x_TD);
  return true;
}

void GradientSums::AfterBackward(int64_t unit) {
  if (!expected_) return;
  if (unit > 0 || !halves_) StartSum(c_.map.PartsOf(unit).first, {});
  if (unit == 0) expected_ = false;
}

void GradientSums::Begin(const LeafPlan& plan, TiedEmbeddingSum::IdsOfRanks ids_of_ranks) {
  AwaitAll().IgnoreError();  // of a step that ended early
  sum_call_ = {};
  sum_call_.kind = CollectiveKind::kReduceScatter;
  sum_call_.dtype = DType::kF32;
  sum_call_.plan.used = plan.used();
  bool all_follow = true;  // their only leaf's pass
  for (int r = 0; r < c_.map.num_ranks(); ++r) {
    sum_call_.plan.nodes_of_rank.push_back(plan.NodesOfRank(r));
    all_follow = all_follow && plan.LeavesOf(r).size() < 2;
  }
  for (int64_t p = 0; p < num_parts(); ++p) {
    sums_[p].clear();
    gathers_[p].clear();
  }
  num_started_ = 0;
  wanted_ = PartsInTime();
  num_early_ = c_.gathers && all_follow ? Agree(wanted_) : 0;
  head_.clear();
  expected_ = false;
  halves_ = all_follow && !ids_of_ranks.empty() &&
            TiedEmbeddingSum::Pays(ids_of_ranks, c_.layout.embedding.rows);
  if (halves_) tied_embedding_.Begin(std::move(ids_of_ranks));
}

void GradientSums::StartSum(int64_t part, const std::vector<std::vector<float>>& partials) {
  NoteStart();
  STRETTO_CHECK(part + ++num_started_ == num_parts());
  c_.device.Synchronize(c_.stream);
  const std::vector<SumNode>& nodes = sum_call_.plan.nodes_of_rank[rank_];
  for (const CollectiveCall& bucket :
       BucketsOf(c_.map.parts()[part], rank_, sizeof(float), c_.bucket_bytes)) {
    CollectiveCall call = sum_call_;
    for (size_t i = 0; i < nodes.size(); ++i) {
      call.parts.push_back({nodes[i], partials.empty() ? host() : partials[i].data()});
    }
    call.counts = bucket.counts;
    call.offsets = bucket.offsets;
    if (IsEarly(part)) {
      call.kind = CollectiveKind::kAllReduce;
      call.output = host();
    } else {
      call.output = host() + call.offsets[rank_];
    }
    sums_[part].push_back(c_.communicator.Start(std::move(call)));
  }
}

void GradientSums::StartGather(int64_t part) {
  for (CollectiveCall& call :
       BucketsOf(c_.map.parts()[part], rank_, sizeof(float), c_.bucket_bytes)) {
    call.kind = CollectiveKind::kAllGather;
    call.dtype = DType::kF32;
    call.input = host() + call.offsets[rank_];
    call.output = host();
    gathers_[part].push_back(c_.communicator.Start(std::move(call)));
  }
}

void GradientSums::StartTiedHead(int64_t piece) {
  NoteStart();
  c_.device.Synchronize(c_.stream);
  head_.push_back(c_.communicator.Start(tied_embedding_.HeadCall(host(), piece)));
}

void GradientSums::StartLookups(const Tensor& d_x_TD) {
  ++num_started_;
  c_.device.Synchronize(c_.stream);
  const auto* rows = d_x_TD ? static_cast<const float*>(c_.device.HostMemory(d_x_TD)) : nullptr;
  sums_[0].push_back(c_.communicator.Start(tied_embedding_.RowsCall(rows, d_x_TD.row_stride)));
}

void GradientSums::AddTiedEmbedding() {
  const ShardMap::Part& part = c_.map.parts()[0];
  TreeSum sum(sum_call_.plan.used, part.counts[rank_]);
  for (int r = 0; r < c_.map.num_ranks(); ++r) {
    const std::vector<SumNode>& nodes = sum_call_.plan.nodes_of_rank[r];
    if (!nodes.empty()) sum.Add(nodes[0], tied_embedding_.TakeShare(r));
  }
  const std::vector<float> values = sum.Take();
  std::copy(values.begin(), values.end(), host() + part.offsets[rank_]);
}

std::vector<int64_t> GradientSums::Order() const {
  std::vector<int64_t> order;
  for (int64_t p = num_parts() - 1; p >= 0; --p) order.push_back(p);
  // The embedding is large, and what comes last should be small.
  const auto late = order.begin() + num_early_;
  if (order.end() - late > 2) std::rotate(late + 1, order.end() - 1, order.end());
  return order;
}

void GradientSums::NoteStart() {
  if (num_started_ == 0 && head_.empty()) seen_.pass_begin = Clock::Real().NowSeconds();
}

void GradientSums::NotePassEnd() {
  seen_.followed = true;
  seen_.pass_end = Clock::Real().NowSeconds();
  seen_.in_time = num_parts() < 4 || AllDone(sums_[2]);  // but what the pass ended with
  if (halves_ && AllDone(head_)) seen_.of_pass += Elements(0);
  for (int64_t p = 0; p < num_parts(); ++p) {
    if (AllDone(sums_[p])) seen_.of_pass += Elements(p) * (IsEarly(p) ? 2 : 1);
  }
}

// One part too many costs less than one too few.
int64_t GradientSums::PartsInTime() {
  const Seen seen = std::exchange(seen_, {});
  if (!seen.followed) return wanted_;
  const double in_pass = seen.pass_end - seen.pass_begin, after = seen.rest_end - seen.rest_begin;
  double all = 0;
  for (int64_t p = 0; p < num_parts(); ++p) all += Elements(p);
  if (seen.of_rest > all / 16 && after > 0) {
    rate_ = seen.of_rest / after;
  } else if (!seen.in_time && in_pass > 0) {
    rate_ = seen.of_pass / in_pass;
  }
  if (rate_ == 0) return wanted_;
  int64_t parts = 0;
  for (double left = rate_ * in_pass - all; left > 0 && parts < num_parts(); ++parts) {
    left -= Elements(num_parts() - 1 - parts);
  }
  return parts;
}

int64_t GradientSums::Agree(int64_t wanted) {
  std::vector<int64_t> all(c_.map.num_ranks(), wanted);
  const absl::Status status = c_.communicator.AllGather(
      {reinterpret_cast<const uint8_t*>(&wanted), sizeof(wanted)},
      {reinterpret_cast<uint8_t*>(all.data()), all.size() * sizeof(wanted)});
  // After an error no sum comes about any more.
  return status.ok() ? *std::max_element(all.begin(), all.end()) : wanted;
}

absl::Status GradientSums::Finish(const std::vector<std::vector<float>>& partials) {
  if (num_started_ == num_parts()) NotePassEnd();
  for (auto i = static_cast<int64_t>(head_.size()); halves_ && i < TiedEmbeddingSum::kNumPieces;) {
    StartTiedHead(i++);
  }
  while (num_started_ < num_parts()) {
    const int64_t part = num_parts() - 1 - num_started_;
    if (part == 0 && halves_) {
      StartLookups({});
    } else {
      StartSum(part, partials);
    }
  }
  // What the link is busy with while the sums' squares are added and compared.
  const std::vector<int64_t> order = Order();
  const auto late = static_cast<size_t>(num_early_);
  if (c_.gathers && late + 1 < order.size()) StartGather(order[late]);
  absl::Status status = WaitAll(head_);
  for (const auto& handles : sums_) status.Update(WaitAll(handles));
  if (halves_ && status.ok()) AddTiedEmbedding();
  return status;
}

void GradientSums::GatherRest() {
  if (!c_.gathers) return;
  seen_.rest_begin = Clock::Real().NowSeconds();
  for (const int64_t part : Order()) {
    const bool early = IsEarly(part) && !(part == 0 && halves_);
    if (early || !gathers_[part].empty()) continue;
    StartGather(part);
    seen_.of_rest += Elements(part);
  }
}

absl::Status GradientSums::Await(int64_t part) {
  absl::Status status = WaitAll(sums_[part]);
  status.Update(WaitAll(gathers_[part]));
  seen_.rest_end = Clock::Real().NowSeconds();
  return status;
}

absl::Status GradientSums::AwaitAll() {
  absl::Status status = WaitAll(head_);
  for (int64_t p = 0; p < num_parts(); ++p) {
    status.Update(WaitAll(sums_[p]));
    status.Update(WaitAll(gathers_[p]));
  }
  return status;
}
}  // namespace stretto::engine
