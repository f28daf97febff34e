#include "engine/training/tied_embedding_sum.h"

#include <algorithm>

namespace stretto::engine {
bool TiedEmbeddingSum::Pays(const IdsOfRanks& ids_of_ranks, int64_t vocab_size) {
  return std::all_of(ids_of_ranks.begin(), ids_of_ranks.end(), [&](const auto& ids) {
    return 2 * static_cast<int64_t>(ids.size()) <= vocab_size;
  });
}

void TiedEmbeddingSum::Begin(IdsOfRanks ids_of_ranks) { ids_ = std::move(ids_of_ranks); }

template <class Call>
void TiedEmbeddingSum::ForEachPiece(const std::vector<int32_t>& ids, int owner,
                                    const Call& call) const {
  const int64_t owned = part_.begin + part_.offsets[owner], owned_end = owned + part_.counts[owner];
  for (size_t row = 0; row < ids.size(); ++row) {
    const int64_t first = embedding_.offset + ids[row] * embedding_.cols;
    const int64_t begin = std::max(first, owned),
                  end = std::min(first + embedding_.cols, owned_end);
    if (begin < end) call(static_cast<int64_t>(row), begin - first, end - begin, begin - owned);
  }
}

int64_t TiedEmbeddingSum::NumElements(int from, int owner) const {
  int64_t total = 0;
  ForEachPiece(ids_[from], owner,
               [&](int64_t, int64_t, int64_t count, int64_t) { total += count; });
  return total;
}

TiedEmbeddingSum::Piece TiedEmbeddingSum::PieceOf(int owner, int64_t piece) const {
  const int64_t D = embedding_.cols, at = part_.begin - embedding_.offset;
  const int64_t begin = part_.offsets[owner], end = begin + part_.counts[owner];
  if (begin == end) return {0, 0, begin, end};
  const int64_t first = (begin + at) / D, rows = (end + at + D - 1) / D - first;
  const int64_t first_row = first + rows * piece / kNumPieces;
  const int64_t end_row = first + rows * (piece + 1) / kNumPieces;
  const auto within = [&](int64_t row) { return std::clamp(row * D - at, begin, end); };
  return {first_row, end_row, within(first_row), within(end_row)};
}

std::vector<std::vector<ParameterUnits::Rows>> TiedEmbeddingSum::RowsOfPieces() const {
  std::vector<std::vector<ParameterUnits::Rows>> pieces(kNumPieces);
  // A row that two ranks own is in the first piece of the higher one.
  int64_t limit = embedding_.rows;
  for (int r = static_cast<int>(part_.counts.size()) - 1; r >= 0; --r) {
    if (part_.counts[r] == 0) continue;
    for (int64_t i = 0; i < kNumPieces; ++i) {
      const Piece piece = PieceOf(r, i);
      const int64_t end_row = std::min(piece.end_row, limit);
      if (piece.first_row < end_row) pieces[i].push_back({piece.first_row, end_row});
    }
    limit = std::min(limit, PieceOf(r, 0).first_row);
  }
  return pieces;
}

CollectiveCall TiedEmbeddingSum::HeadCall(const float* gradient, int64_t piece) {
  const int num_ranks = static_cast<int>(ids_.size());
  CollectiveCall call;
  call.kind = CollectiveKind::kAllToAll;
  call.dtype = DType::kF32;
  int64_t num_senders = 0;
  const Piece mine = PieceOf(rank_, piece);
  for (int r = 0; r < num_ranks; ++r) {
    const Piece theirs = PieceOf(r, piece);
    call.counts.push_back(ids_[rank_].empty() ? 0 : theirs.size());
    call.offsets.push_back(theirs.begin);
    call.receive_counts.push_back(ids_[r].empty() ? 0 : mine.size());
    call.num_elements += call.counts.back();
    num_senders += ids_[r].empty() ? 0 : 1;
  }
  if (piece == 0) shares_.resize(static_cast<size_t>(num_ranks * part_.counts[rank_]));
  call.input = gradient;
  call.output = shares_.data() + num_senders * (mine.begin - part_.offsets[rank_]);
  return call;
}

CollectiveCall TiedEmbeddingSum::RowsCall(const float* d_x_TD, int64_t row_stride) {
  const int num_ranks = static_cast<int>(ids_.size());
  CollectiveCall call;
  call.kind = CollectiveKind::kAllToAll;
  call.dtype = DType::kF32;
  rows_sent_.clear();
  int64_t received = 0;
  for (int r = 0; r < num_ranks; ++r) {
    const size_t before = rows_sent_.size();
    ForEachPiece(ids_[rank_], r, [&](int64_t row, int64_t begin, int64_t count, int64_t) {
      if (d_x_TD == nullptr) {
        rows_sent_.insert(rows_sent_.end(), count, -0.0f);  // what changes no bit of a sum
        return;
      }
      const float* from = d_x_TD + row * row_stride + begin;
      rows_sent_.insert(rows_sent_.end(), from, from + count);
    });
    call.counts.push_back(static_cast<int64_t>(rows_sent_.size() - before));
    call.receive_counts.push_back(NumElements(r, rank_));
    received += call.receive_counts.back();
  }
  call.num_elements = static_cast<int64_t>(rows_sent_.size());
  rows_here_.resize(static_cast<size_t>(received));
  call.input = rows_sent_.data();
  call.output = rows_here_.data();
  return call;
}

std::vector<float> TiedEmbeddingSum::TakeShare(int from) {
  const int64_t count = part_.counts[rank_];
  const float* rows = rows_here_.data();
  int64_t num_senders = 0, before = 0;
  for (int r = 0; r < static_cast<int>(ids_.size()); ++r) {
    if (r < from) rows += NumElements(r, rank_);
    if (r < from && !ids_[r].empty()) ++before;
    if (!ids_[r].empty()) ++num_senders;
  }
  std::vector<float> share(static_cast<size_t>(count));
  for (int64_t i = 0; i < kNumPieces; ++i) {
    const Piece piece = PieceOf(rank_, i);
    const int64_t begin = piece.begin - part_.offsets[rank_];
    const float* head = shares_.data() + num_senders * begin + before * piece.size();
    std::copy(head, head + piece.size(), share.begin() + begin);
  }
  ForEachPiece(ids_[from], rank_, [&](int64_t, int64_t, int64_t num, int64_t at) {
    for (int64_t i = 0; i < num; ++i) share[at + i] += rows[i];
    rows += num;
  });
  return share;
}
}  // namespace stretto::engine
