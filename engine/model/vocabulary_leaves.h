// Log-probs from logits over a whole vocabulary, with the softmax's sums made in one go
// (Device::LogProbs) or leaf by leaf (leaf_layout.h), as ranks make them that share the vocabulary.
//
// Not thread-safe; owns scratch memory of the device. Legend: R rows, V vocabulary.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/model/memory.h"

namespace stretto::engine {
class VocabularyLeaves {
 public:
  // `device` outlives the object.
  static absl::StatusOr<std::unique_ptr<VocabularyLeaves>> Create(Device& device, int64_t k_leaves,
                                                                  int64_t max_rows);
  int64_t k_leaves() const { return k_leaves_; }
  // As Device::LogProbs.
  void LogProbs(Stream& stream, const Tensor& logprobs_R, const Tensor& entropy_R,
                const Tensor& logits_RV, const Tensor& targets_R, float temperature);

 private:
  VocabularyLeaves(Device& device, int64_t k_leaves) : device_(device), k_leaves_(k_leaves) {}

  Device& device_;
  const int64_t k_leaves_;
  DeviceMemory memory_;
  Tensor max_R_;                 // f32
  std::vector<Tensor> sums_R3_;  // f32, of each leaf
};
}  // namespace stretto::engine
