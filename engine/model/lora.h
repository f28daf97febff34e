// A LoRA adapter in training: where its A and B lie, the weights that follow from them, and their
// gradients. The policy's weights are merged, round(W + scale · (B · A)), in one place and one
// order of sums (B·A is a chain over the rank, scaled, then added to W in f32 and rounded), so that
// all who compute with the policy hold ordinary weights with equal bits.
//
// Gradients don't need that of W: with dY of a map's output and X its input, dB = scale · dYᵀ(XAᵀ)
// and dA = scale · (dY B)ᵀ X. The rounding of the merged weights counts as the identity.
//
// Legend: T rows, N outputs, K inputs of a map, r the rank.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/formats/peft.h"
#include "engine/formats/tensor_file.h"
#include "engine/model/memory.h"
#include "engine/model/parameters.h"

namespace stretto::engine {
// Elements of a matrix that are merged at once, or one row if that is more.
inline constexpr int64_t kLoraMergeElements = int64_t{1} << 20;
// So many, or all of the largest matrix if that is fewer, given A and B of every target by turns.
int64_t LoraMergeElements(const std::vector<Parameter>& parameters);

// The products of a layer, in which several maps may lie beside one another.
enum class LoraGroup : uint8_t { kQkv, kO, kGateUp, kDown };

struct LoraTarget {
  std::string weight_name;   // of the model's parameter
  ParameterView weight;      // in the model's layout
  ParameterView a_rK, b_Nr;  // in the adapter's
  int64_t first_output = 0;  // column of its group's output
};

// Not thread-safe.
class LoraAdapter {
 public:
  // `lora` is normalized (NormalizeLora); `device` outlives the adapter. For gradients of passes of
  // up to `max_rows` rows; 0: to merge alone.
  static absl::StatusOr<std::unique_ptr<LoraAdapter>> Create(Device& device,
                                                             const ModelConfig& config,
                                                             const LoraOptions& lora,
                                                             int64_t max_rows);

  const LoraOptions& options() const { return options_; }
  // A and B of every target under their names in PEFT's files. Its units are those of the model's
  // layout; the first and the last are empty.
  const std::shared_ptr<const ParameterLayout>& layout() const { return layout_; }
  const std::vector<LoraTarget>& targets(int64_t layer, LoraGroup group) const {
    return targets_[layer][static_cast<size_t>(group)];
  }
  // By the name of the model's parameter; null: it isn't adapted.
  const LoraTarget* Find(absl::string_view weight_name) const;

  // The adapter's values from now on: f32, flat, in layout(); the caller keeps them.
  absl::Status SetValues(Stream& stream, const Tensor& flat);

  // Rows [row_begin, row_begin + out_NK.rows) of the merged weight, in out's dtype.
  absl::Status Merge(Stream& stream, const LoraTarget& target, const TensorSource& base,
                     int64_t row_begin, const Tensor& out_NK);

  // Adds the gradients of a group's targets to `gradients` (f32, flat, in layout()).
  void AddGradients(Stream& stream, int64_t layer, LoraGroup group, const Tensor& gradients,
                    const Tensor& d_y_TN, const Tensor& x_TK);
  // Where gradients of norms go, which nobody wants: f32 of so many columns.
  Tensor Unwanted(int64_t cols) const { return unwanted_.Cols(0, cols); }

  size_t bytes() const;  // device memory held

 private:
  LoraAdapter(Device& device, const LoraOptions& options) : device_(device), options_(options) {}
  absl::Status Allocate(const ModelConfig& config, int64_t max_rows);
  void PlaceTargets(const ModelConfig& config);
  absl::StatusOr<Tensor> ReadBase(Stream& stream, const LoraTarget& target,
                                  const TensorSource& base, int64_t row_begin, int64_t rows);

  Device& device_;
  const LoraOptions options_;
  std::shared_ptr<const ParameterLayout> layout_;
  std::vector<std::array<std::vector<LoraTarget>, 4>> targets_;  // by layer and group
  Tensor values_;
  // As products with inputs like them: A of every target, by the place of its a_rK.
  absl::flat_hash_map<int64_t, std::unique_ptr<PackedWeight>> packed_a_;
  DeviceMemory memory_;
  Tensor low_Tr_, unwanted_;
  Tensor base_, delta_;  // of one row: a piece of a matrix that is being merged
  std::vector<uint8_t> host_;
};
}  // namespace stretto::engine
