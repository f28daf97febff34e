// Assembles the host arrays of one paged forward pass. Reused from step to step: after the first
// few steps nothing allocates.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/model/transformer.h"

namespace stretto::engine {
class BatchBuilder {
 public:
  void Clear();
  // Rows for tokens [begin, begin + count) of a sequence whose blocks cover them. `tokens` and
  // `blocks` must live until Build. Returns the index of the last of these rows.
  int32_t AddRows(absl::Span<const int32_t> tokens, int32_t begin, int32_t count,
                  absl::Span<const int32_t> blocks);
  // Asks for the logits of a row; returns their row among the logits. The same row may be asked for
  // several times.
  int32_t AddLogits(int32_t row);
  // Transformer::LogitsOfRows will be asked for other rows of this pass.
  void FinishAllRows() { finish_all_rows_ = true; }

  int32_t num_rows() const { return static_cast<int32_t>(ids_.size()); }
  int32_t num_logits() const { return static_cast<int32_t>(logits_rows_.size()); }
  // Valid until the next call of any method.
  PagedBatch Build();

 private:
  std::vector<int32_t> ids_, positions_, row_sequence_, context_length_, slots_, logits_rows_;
  std::vector<absl::Span<const int32_t>> blocks_;  // by sequence, as many as its context needs
  std::vector<int32_t> tables_;
  bool finish_all_rows_ = false;
};
}  // namespace stretto::engine
