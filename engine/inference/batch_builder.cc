#include "engine/inference/batch_builder.h"

#include <algorithm>

#include "base/check.h"

namespace stretto::engine {
void BatchBuilder::Clear() {
  for (auto* v : {&ids_, &positions_, &row_sequence_, &context_length_, &slots_, &logits_rows_}) {
    v->clear();
  }
  blocks_.clear();
  finish_all_rows_ = false;
}

int32_t BatchBuilder::AddRows(absl::Span<const int32_t> tokens, int32_t begin, int32_t count,
                              absl::Span<const int32_t> blocks) {
  const int32_t end = begin + count;
  const size_t num_blocks = static_cast<size_t>((end + kBlockTokens - 1) / kBlockTokens);
  STRETTO_CHECK(count > 0 && end <= static_cast<int32_t>(tokens.size()) &&
                num_blocks <= blocks.size());
  const int32_t sequence = static_cast<int32_t>(blocks_.size());
  blocks_.push_back(blocks.first(num_blocks));
  for (int32_t p = begin; p < end; ++p) {
    ids_.push_back(tokens[p]);
    positions_.push_back(p);
    row_sequence_.push_back(sequence);
    context_length_.push_back(p + 1);
    slots_.push_back(blocks[p / kBlockTokens] * kBlockTokens + p % kBlockTokens);
  }
  return num_rows() - 1;
}

int32_t BatchBuilder::AddLogits(int32_t row) {
  STRETTO_CHECK(row >= 0 && row < num_rows());
  logits_rows_.push_back(row);
  return num_logits() - 1;
}

PagedBatch BatchBuilder::Build() {
  size_t width = 1;
  for (const auto& blocks : blocks_) width = std::max(width, blocks.size());
  tables_.assign(blocks_.size() * width, 0);
  for (size_t s = 0; s < blocks_.size(); ++s) {
    std::copy(blocks_[s].begin(), blocks_[s].end(), tables_.begin() + s * width);
  }
  PagedBatch batch;
  batch.ids_T = ids_;
  batch.positions_T = positions_;
  batch.row_sequence_T = row_sequence_;
  batch.context_length_T = context_length_;
  batch.slots_T = slots_;
  batch.block_tables_SM = tables_;
  batch.num_sequences = static_cast<int64_t>(blocks_.size());
  batch.logits_rows_R = logits_rows_;
  batch.finish_all_rows = finish_all_rows_;
  return batch;
}
}  // namespace stretto::engine
