// The sums of a step's gradients over ranks where every rank has room for all of them (ddp, zero1;
// unit_stream.h is the others'). It follows a pass: where a pass's gradients are this rank's only
// partial, each part's are sent on their way as soon as they are done, while the units below
// compute. All ranks make the same collectives in the same order, whatever they compute themselves.
//
// Each part's sum is a ReduceScatter, from the last part down; under ddp an AllGather brings what
// the other ranks have added up. For the first parts it follows at once and uses the link while the
// layers compute. For the rest it waits until everything has been added up: then the gradient's
// norm is known while the last part of the bytes is still under way, and the optimizer takes part
// after part as it comes. How many are the first follows from the step before: as many as the link
// has time for until the pass ends.
#pragma once

#include <vector>

#include "engine/collectives/communicator.h"
#include "engine/device/device.h"
#include "engine/model/packed_pass.h"
#include "engine/training/parallel.h"
#include "engine/training/tied_embedding_sum.h"

namespace stretto::engine {
// What the sums work on; all of it outlives them.
struct GradientSumsContext {
  Device& device;
  Stream& stream;
  const ParameterLayout& layout;
  const ShardMap& map;
  Communicator& communicator;
  Tensor flat_weights;   // for passes
  Tensor gradients;      // f32, all: partial sums, and then what they come to
  bool gathers = false;  // whether every rank wants all sums, or each what it owns
  int64_t bucket_bytes = 0;
};

class GradientSums final : public ParameterUnits {
 public:
  explicit GradientSums(const GradientSumsContext& context);
  ~GradientSums() override;

  // --- of a pass
  void BeforeForward(int64_t) override {}
  void AfterForward(int64_t) override {}
  Tensors BeforeBackward(int64_t) override { return {c_.flat_weights, c_.gradients}; }
  void AfterBackward(int64_t unit) override;
  void AfterMlpBackward(int64_t unit, MlpPart part) override;
  std::vector<std::vector<Rows>> TiedHeadPieces() override;
  void AfterTiedHeadBackward(int64_t piece) override;
  bool TakeLookups(const Tensor& d_x_TD) override;

  // --- of a step
  // `ids_of_ranks`: by rank, the tokens of the last pass of its part of the step, where passes send
  // a tied embedding's gradient in two halves; or empty.
  void Begin(const LeafPlan& plan, TiedEmbeddingSum::IdsOfRanks ids_of_ranks);
  // The next backward pass is the last of this rank's part of the step, and its gradients are the
  // rank's only partial.
  void ExpectLastPass() { expected_ = true; }
  // Starts what hasn't been, and waits for the sums that this rank owns. `partials`: of the rank's
  // nodes; empty: its only one is in the gradients.
  absl::Status Finish(const std::vector<std::vector<float>>& partials);
  // Starts the gathers that are left: whatever ranks are to hear of one another before comes first.
  void GatherRest();
  // Waits for the whole sum of a part; with Order() in the order in which they come.
  absl::Status Await(int64_t part);
  std::vector<int64_t> Order() const;
  // Waits for everything.
  absl::Status AwaitAll();

 private:
  int64_t num_parts() const { return static_cast<int64_t>(c_.map.parts().size()); }
  bool IsEarly(int64_t part) const { return part >= num_parts() - num_early_; }
  float* host() const { return static_cast<float*>(c_.device.HostMemory(c_.gradients)); }
  void StartSum(int64_t part, const std::vector<std::vector<float>>& partials);
  void StartGather(int64_t part);
  // The two halves of a tied embedding's gradient, before all other sums and instead of the last;
  // and what they came to.
  void StartTiedHead(int64_t piece);
  void StartLookups(const Tensor& d_x_TD);
  void AddTiedEmbedding();
  double Elements(int64_t part) const { return static_cast<double>(c_.map.parts()[part].size()); }
  void NoteStart();
  void NotePassEnd();
  // How many parts are to be gathered at once, after what this rank saw in the step before; and the
  // most of what ranks want: the slowest, for which others wait, sees the most time.
  int64_t PartsInTime();
  int64_t Agree(int64_t wanted);

  const GradientSumsContext c_;
  const int rank_;
  CollectiveCall sum_call_;  // what the sums of a step have in common
  int64_t num_started_ = 0;  // parts
  bool expected_ = false;    // a last pass
  TiedEmbeddingSum tied_embedding_;
  bool halves_ = false;                 // of this step: the tied embedding's gradient comes in two
  std::vector<CollectiveHandle> head_;  // by piece
  std::vector<std::vector<CollectiveHandle>> sums_, gathers_;  // by part
  int64_t wanted_;         // parts to be gathered at once, by what this rank has seen
  int64_t num_early_ = 0;  // parts that are, in this step
  // What a step sees, in seconds and elements that every rank sends: of the time in which a pass
  // sends, and of the gathers after it, which are the link's alone.
  struct Seen {
    bool followed = false, in_time = false;  // a pass; all that it sent was through when it ended
    double pass_begin = 0, pass_end = 0, rest_begin = 0, rest_end = 0;
    double of_pass = 0, of_rest = 0;
  };
  Seen seen_;
  double rate_ = 0;  // elements a second, once known
};

// Calls with the counts of each rank and their offsets in the flat run, for a part in buckets.
std::vector<CollectiveCall> BucketsOf(const ShardMap::Part& part, int rank, size_t element_bytes,
                                      int64_t bucket_bytes);
}  // namespace stretto::engine
