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

CollectiveCall TiedEmbeddingSum::HeadCall(const float* gradient) {
  const int num_ranks = static_cast<int>(ids_.size());
  CollectiveCall call;
  call.kind = CollectiveKind::kAllToAll;
  call.dtype = DType::kF32;
  for (int r = 0; r < num_ranks; ++r) {
    call.counts.push_back(ids_[rank_].empty() ? 0 : part_.counts[r]);
    call.receive_counts.push_back(ids_[r].empty() ? 0 : part_.counts[rank_]);
  }
  call.num_elements = ids_[rank_].empty() ? 0 : part_.size();
  shares_.resize(static_cast<size_t>(num_ranks * part_.counts[rank_]));
  call.input = gradient;
  call.output = shares_.data();
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
  const float* head = shares_.data();
  for (int r = 0; r < from; ++r) {
    rows += NumElements(r, rank_);
    if (!ids_[r].empty()) head += count;
  }
  std::vector<float> share(head, head + count);
  ForEachPiece(ids_[from], rank_, [&](int64_t, int64_t, int64_t num, int64_t at) {
    for (int64_t i = 0; i < num; ++i) share[at + i] += rows[i];
    rows += num;
  });
  return share;
}
}  // namespace stretto::engine
