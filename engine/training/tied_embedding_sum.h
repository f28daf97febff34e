// The sum over ranks of a tied embedding's gradient, whose two halves come at the two ends of a
// backward pass: the head's, of every row, at its beginning; at its end those of the rows that were
// looked up. So what is large is sent while the layers compute, in pieces that begin before all of
// it is computed, and what is sent last is small. The bits are those of a sum of whole gradients:
// the owner of a part of the embedding holds each rank's part of the head's gradient, adds the rows
// to it one after the other as the rank would have done, and then adds up the ranks in the tree.
//
// Which rows a rank has looked up all ranks know: they were all given the whole batch.
#pragma once

#include <vector>

#include "absl/types/span.h"
#include "engine/collectives/communicator.h"
#include "engine/model/packed_pass.h"
#include "engine/training/parallel.h"

namespace stretto::engine {
class TiedEmbeddingSum {
 public:
  // By rank: the token ids of the pass of which the gradient comes in two halves; empty for a rank
  // that has no part in the sum.
  using IdsOfRanks = std::vector<std::vector<int32_t>>;

  // `part` is the embedding's.
  TiedEmbeddingSum(const ShardMap::Part& part, const ParameterView& embedding, int rank)
      : part_(part), embedding_(embedding), rank_(rank) {}

  // Whether rows are few against the vocabulary, for every rank.
  static bool Pays(const IdsOfRanks& ids_of_ranks, int64_t vocab_size);

  // A sum begins. Nothing of an earlier one is under way.
  void Begin(IdsOfRanks ids_of_ranks);
  // The head's gradient is sent in pieces, of which each has something for every rank; these rows
  // have to be there for each, and those of the pieces before.
  static constexpr int64_t kNumPieces = 4;
  std::vector<std::vector<ParameterUnits::Rows>> RowsOfPieces() const;
  // To every rank its part of a piece: `gradient` is the whole part's, unchanged until the call is
  // done. An AllToAll. Pieces are called for in order.
  CollectiveCall HeadCall(const float* gradient, int64_t piece);
  // Of the pass's rows, to every rank what falls into its part. Null: this rank didn't go back, the
  // whole of its gradient was there before. An AllToAll.
  CollectiveCall RowsCall(const float* d_x_TD, int64_t row_stride);
  // After both calls: this rank's part of another one's gradient.
  std::vector<float> TakeShare(int from);

 private:
  // Calls with what lies in `owner`'s part of each row that was looked up in `ids`, in order: the
  // row, its elements [begin, begin + count), and where they are in the owner's part.
  template <class Call>
  void ForEachPiece(const std::vector<int32_t>& ids, int owner, const Call& call) const;
  int64_t NumElements(int from, int owner) const;
  // Of a piece of what `owner` owns: its rows, the first and the last of which others may own in
  // part; and its elements, from the part's beginning.
  struct Piece {
    int64_t first_row = 0, end_row = 0, begin = 0, end = 0;
    int64_t size() const { return end - begin; }
  };
  Piece PieceOf(int owner, int64_t piece) const;

  const ShardMap::Part part_;
  const ParameterView embedding_;
  const int rank_;
  IdsOfRanks ids_;
  std::vector<float> shares_;  // of the head's gradient, piece after piece, in order of rank
  std::vector<float> rows_sent_, rows_here_;  // pieces of rows, in order of rank
};
}  // namespace stretto::engine
