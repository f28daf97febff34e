#include "engine/model/lora.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
// A row-major matrix over the first elements of a tensor of one row.
Tensor Matrix(const Tensor& flat, int64_t rows, int64_t cols) {
  return ParameterView{0, rows, cols}.In(flat);
}
}  // namespace

int64_t LoraMergeElements(const std::vector<Parameter>& parameters) {
  int64_t widest = 0, largest = 0;
  for (size_t i = 0; i < parameters.size(); i += 2) {
    const int64_t inputs = parameters[i].view.cols, outputs = parameters[i + 1].view.rows;
    widest = std::max(widest, inputs);
    largest = std::max(largest, inputs * outputs);
  }
  return std::min(largest, std::max(kLoraMergeElements, widest));
}

// Units begin where layers have their first norm; here views without rows say so.
ParameterLayout::ParameterLayout(const ModelConfig& config, const LoraOptions& lora) {
  const std::vector<TensorSpec> specs = LoraTensors(config, lora);
  const auto each = specs.size() / static_cast<size_t>(config.num_layers);
  layers.resize(config.num_layers);
  for (size_t i = 0; i < specs.size(); ++i) {
    if (i % each == 0) layers[i / each].input_norm.offset = size_;
    const TensorSpec& spec = specs[i];
    parameters_.push_back({spec, Place({spec.name}, {spec.shape[0]}, spec.shape[1])});
  }
  final_norm.offset = lm_head.offset = size_;
}

absl::StatusOr<std::unique_ptr<LoraAdapter>> LoraAdapter::Create(Device& device,
                                                                 const ModelConfig& config,
                                                                 const LoraOptions& lora,
                                                                 int64_t max_rows) {
  std::unique_ptr<LoraAdapter> adapter(new LoraAdapter(device, lora));
  adapter->layout_ = std::make_shared<const ParameterLayout>(config, lora);
  adapter->PlaceTargets(config);
  RETURN_IF_ERROR(adapter->Allocate(config, max_rows));
  return adapter;
}

void LoraAdapter::PlaceTargets(const ModelConfig& config) {
  const ParameterLayout model(config);
  targets_.resize(config.num_layers);
  const auto& parameters = layout_->parameters();
  for (size_t i = 0; i < parameters.size(); i += 2) {
    const size_t each = parameters.size() / static_cast<size_t>(config.num_layers);
    const auto layer = static_cast<int64_t>(i / each);
    const std::string& module = options_.targets[i % each / 2];
    const LayerParameters& p = model.layers[layer];
    const std::string name = absl::StrCat(LoraModulePath(layer, module), ".weight");
    LoraTarget target{name, model.Find(name)->view, parameters[i].view, parameters[i + 1].view, 0};
    LoraGroup group = LoraGroup::kQkv;
    const ParameterView* whole = &p.qkv;
    if (module == "o_proj") group = LoraGroup::kO, whole = &p.o;
    if (module == "down_proj") group = LoraGroup::kDown, whole = &p.down;
    if (module == "gate_proj" || module == "up_proj") {
      group = LoraGroup::kGateUp, whole = &p.gate_up;
    }
    target.first_output = (target.weight.offset - whole->offset) / target.weight.cols;
    targets_[layer][static_cast<size_t>(group)].push_back(std::move(target));
  }
}

absl::Status LoraAdapter::Allocate(const ModelConfig& config, int64_t max_rows) {
  const int64_t piece = LoraMergeElements(layout_->parameters());
  ASSIGN_OR_RETURN(base_, memory_.Make(device_, DType::kF32, 1, piece));
  ASSIGN_OR_RETURN(delta_, memory_.Make(device_, DType::kF32, 1, piece));
  if (max_rows == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(low_Tr_, memory_.Make(device_, DType::kF32, max_rows, options_.rank));
  ASSIGN_OR_RETURN(unwanted_, memory_.Make(device_, DType::kF32, 1,
                                           std::max(config.hidden_size, config.head_dim)));
  return absl::OkStatus();
}

const LoraTarget* LoraAdapter::Find(absl::string_view weight_name) const {
  for (const auto& layer : targets_) {
    for (const auto& group : layer) {
      for (const LoraTarget& t : group) {
        if (t.weight_name == weight_name) return &t;
      }
    }
  }
  return nullptr;
}

absl::Status LoraAdapter::SetValues(Stream& stream, const Tensor& flat) {
  values_ = flat;
  if (!low_Tr_) return absl::OkStatus();
  for (const auto& layer : targets_) {
    for (const auto& group : layer) {
      for (const LoraTarget& t : group) {
        std::unique_ptr<PackedWeight>& packed = packed_a_[t.a_rK.offset];
        if (packed == nullptr) {
          ASSIGN_OR_RETURN(packed, device_.Pack(stream, {t.a_rK.In(flat)}));
        } else {
          device_.Repack(stream, *packed, {t.a_rK.In(flat)});
        }
      }
    }
  }
  return absl::OkStatus();
}

// In the dtype of its file where that is bf16: then nothing is converted.
absl::StatusOr<Tensor> LoraAdapter::ReadBase(Stream& stream, const LoraTarget& target,
                                             const TensorSource& base, int64_t row_begin,
                                             int64_t rows) {
  const TensorInfo* info = base.Find(target.weight_name);
  const bool is_bf16 = info != nullptr && info->type == StorageType::kBF16;
  Tensor flat = base_;
  flat.dtype = is_bf16 ? DType::kBF16 : DType::kF32;
  const Tensor out = Matrix(flat, rows, target.weight.cols);
  void* host = device_.HostMemory(out);
  const bool direct = host != nullptr;
  if (!direct) {
    host_.resize(static_cast<size_t>(out.size()) * SizeOf(out.dtype));
    host = host_.data();
  }
  RETURN_IF_ERROR(base.ReadRows(target.weight_name, row_begin, row_begin + rows, out.dtype, host));
  if (!direct) device_.Upload(stream, out, host_.data());
  return out;
}

absl::Status LoraAdapter::Merge(Stream& stream, const LoraTarget& target, const TensorSource& base,
                                int64_t row_begin, const Tensor& out_NK) {
  const int64_t K = target.weight.cols, rows_at_once = std::max<int64_t>(1, delta_.size() / K);
  const Tensor a_rK = target.a_rK.In(values_), b_Nr = target.b_Nr.In(values_);
  for (int64_t done = 0; done < out_NK.rows; done += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, out_NK.rows - done);
    device_.Synchronize(stream);  // the pieces before have been read
    ASSIGN_OR_RETURN(const Tensor base_NK, ReadBase(stream, target, base, row_begin + done, rows));
    const Tensor delta_NK = Matrix(delta_, rows, K);
    device_.LinearBackwardInput(stream, delta_NK, b_Nr.Rows(row_begin + done, rows), a_rK,
                                /*accumulate=*/false);
    device_.Scale(stream, delta_NK, options_.scale());
    device_.Add(stream, out_NK.Rows(done, rows), base_NK, delta_NK);
  }
  return absl::OkStatus();
}

void LoraAdapter::AddGradients(Stream& stream, int64_t layer, LoraGroup group,
                               const Tensor& gradients, const Tensor& d_y_TN, const Tensor& x_TK) {
  const Tensor low_Tr = low_Tr_.Rows(0, x_TK.rows);
  for (const LoraTarget& t : targets(layer, group)) {
    const Tensor d_y = d_y_TN.Cols(t.first_output, t.weight.rows);
    device_.Linear(stream, low_Tr, x_TK, *packed_a_.at(t.a_rK.offset), Tensor{});
    device_.Scale(stream, low_Tr, options_.scale());
    device_.LinearBackwardWeight(stream, t.b_Nr.In(gradients), d_y, low_Tr);
    device_.LinearBackwardInput(stream, low_Tr, d_y, t.b_Nr.In(values_), /*accumulate=*/false);
    device_.Scale(stream, low_Tr, options_.scale());
    device_.LinearBackwardWeight(stream, t.a_rK.In(gradients), low_Tr, x_TK);
  }
}

size_t LoraAdapter::bytes() const {
  size_t total = memory_.bytes();
  for (const auto& [place, packed] : packed_a_) total += packed->bytes();
  return total;
}
}  // namespace stretto::engine
