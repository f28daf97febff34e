#include "engine/model/weights.h"

#include <algorithm>

#include "base/status.h"
#include "engine/device/host_tensors.h"
#include "engine/formats/model_files.h"
#include "engine/model/leaf_layout.h"

namespace stretto::engine {
namespace {
// What reading parameters into a device needs: one host and one device area, reused.
class Loader {
 public:
  Loader(Device& device, Stream& stream, const ParameterLayout& layout, DType dtype,
         const ParameterReader& reader, const WeightsOptions& options)
      : device_(device),
        stream_(stream),
        layout_(layout),
        dtype_(dtype),
        reader_(reader),
        options_(options) {}

  // The parameters that lie in `group`, which they fill one below the other, where they are in host
  // memory; nothing where they can't be read there.
  std::vector<Tensor> InMemory(const ParameterView& group) {
    std::vector<Tensor> parts;
    if (options_.in_memory == nullptr) return parts;
    int64_t end = group.offset;
    for (const Parameter& p : layout_.parameters()) {
      if (p.view.offset < group.offset || p.view.offset >= group.offset + group.size()) continue;
      const std::shared_ptr<const void> bytes = options_.in_memory(p);
      if (bytes == nullptr || p.view.offset != end || p.view.size() % group.cols != 0) return {};
      parts.push_back(
          HostTensor(device_, bytes.get(), dtype_, p.view.size() / group.cols, group.cols));
      if (!parts.back()) return {};
      end += p.view.size();
    }
    return end == group.offset + group.size() ? parts : std::vector<Tensor>();
  }
  // The embedding where it is, and stays as long as `owner` lives; or no tensor.
  Tensor SharedEmbedding(std::shared_ptr<const void>* owner) {
    if (!options_.shares_embedding || options_.in_memory == nullptr) return {};
    const ParameterView& group = layout_.embedding;
    for (const Parameter& p : layout_.parameters()) {
      if (p.view.offset != group.offset || p.view.size() != group.size()) continue;
      *owner = options_.in_memory(p);
      return HostTensor(device_, owner->get(), dtype_, group.rows, group.cols);
    }
    return {};
  }
  // Uploads the parameters that lie in `group`, which fill it, to `dst` of as many elements.
  absl::Status Upload(const ParameterView& group, const Tensor& dst) {
    // Straight into the device's memory where the host reaches it.
    auto* direct = static_cast<uint8_t*>(device_.HostMemory(dst));
    const auto num_bytes = static_cast<size_t>(group.size()) * SizeOf(dtype_);
    if (direct == nullptr) host_.resize(std::max(host_.size(), num_bytes));
    uint8_t* host = direct != nullptr ? direct : host_.data();
    int64_t read = 0;
    for (const Parameter& p : layout_.parameters()) {
      const int64_t begin = p.view.offset - group.offset;
      if (begin < 0 || begin >= group.size()) continue;
      RETURN_IF_ERROR(reader_(p, dtype_, host + begin * SizeOf(dtype_)));
      read += p.view.size();
    }
    STRETTO_CHECK(read == group.size());
    if (direct == nullptr) device_.Upload(stream_, dst, host_.data());
    return absl::OkStatus();
  }
  // `base`: the group of the base version, or null. `resident`: the group where it has been
  // uploaded already.
  absl::StatusOr<std::shared_ptr<PackedWeight>> Pack(const ParameterView& group,
                                                     WeightFormat format,
                                                     const std::shared_ptr<PackedWeight>& base,
                                                     const Tensor& resident = {}) {
    if (base != nullptr && base->format() == format && !Changed(group)) return base;
    std::vector<Tensor> parts_NK = resident ? std::vector<Tensor>{resident} : InMemory(group);
    if (parts_NK.empty()) {
      ASSIGN_OR_RETURN(const Tensor staged, Stage(group));
      parts_NK = {staged};
    }
    ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> packed, device_.Pack(stream_, parts_NK, format));
    return std::shared_ptr<PackedWeight>(std::move(packed));
  }
  // The matrix by its inputs, one part a leaf. `base`: empty or the parts of the base version.
  using Leaves = std::vector<std::shared_ptr<PackedWeight>>;
  absl::StatusOr<Leaves> PackLeaves(const ParameterView& group, const Leaves& base) {
    if (!base.empty() && base[0]->format() == options_.format && !Changed(group)) return base;
    ASSIGN_OR_RETURN(const Tensor w_NK, Stage(group));
    Leaves leaves;
    for (int64_t leaf = 0; leaf < options_.k_leaves; ++leaf) {
      const int64_t begin = LeafBegin(group.cols, options_.k_leaves, leaf);
      const int64_t end = LeafBegin(group.cols, options_.k_leaves, leaf + 1);
      ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> packed,
                       device_.Pack(stream_, {w_NK.Cols(begin, end - begin)}, options_.format));
      leaves.push_back(std::move(packed));
    }
    return leaves;
  }

 private:
  // In an area that the next call takes again.
  absl::StatusOr<Tensor> Stage(const ParameterView& group) {
    if (staging_.bytes() == 0) {
      int64_t largest = std::max(layout_.embedding.size(), layout_.lm_head.size());
      for (const LayerParameters& l : layout_.layers) {
        largest = std::max({largest, l.qkv.size(), l.o.size(), l.gate_up.size(), l.down.size()});
      }
      ASSIGN_OR_RETURN(staging_, device_.Allocate(static_cast<size_t>(largest) * SizeOf(dtype_)));
    }
    const Tensor w_NK = staging_.View(dtype_, group.rows, group.cols);
    RETURN_IF_ERROR(Upload(group, w_NK));
    return w_NK;
  }
  bool Changed(const ParameterView& group) const {
    for (const Parameter& p : layout_.parameters()) {
      const int64_t begin = p.view.offset - group.offset;
      if (begin >= 0 && begin < group.size() && options_.changed(p)) return true;
    }
    return false;
  }

  Device& device_;
  Stream& stream_;
  const ParameterLayout& layout_;
  DType dtype_;
  const ParameterReader& reader_;
  const WeightsOptions& options_;
  std::vector<uint8_t> host_;
  Buffer staging_;
};

// The unpacked tensors of a layer, paired with their places; those that the model has.
std::vector<std::pair<Tensor*, const ParameterView*>> Vectors(LayerWeights& w,
                                                              const LayerParameters& p) {
  std::vector<std::pair<Tensor*, const ParameterView*>> all = {
      {&w.input_norm, &p.input_norm},
      {&w.qkv_bias, &p.qkv_bias},
      {&w.q_norm, &p.q_norm},
      {&w.k_norm, &p.k_norm},
      {&w.o_bias, &p.o_bias},
      {&w.post_attention_norm, &p.post_attention_norm},
      {&w.gate_up_bias, &p.gate_up_bias},
      {&w.down_bias, &p.down_bias}};
  w.leaves.resize(p.leaves.size());
  for (size_t i = 0; i < p.leaves.size(); ++i) {
    LeafWeights& leaf = w.leaves[i];
    const LeafParameters& q = p.leaves[i];
    all.insert(all.end(), {{&leaf.qkv_bias, &q.qkv_bias},
                           {&leaf.k_bias, &q.k_bias},
                           {&leaf.v_bias, &q.v_bias},
                           {&leaf.o_bias, &q.o_bias},
                           {&leaf.gate_up_bias, &q.gate_up_bias},
                           {&leaf.down_bias, &q.down_bias}});
  }
  std::erase_if(all, [](const auto& v) { return !*v.second; });
  return all;
}

// The same of its matrices; always the same number of them in the same order.
using Matrix = std::pair<std::shared_ptr<PackedWeight>*, const ParameterView*>;
std::vector<Matrix> Matrices(LayerWeights& w, const LayerParameters& p) {
  std::vector<Matrix> all = {
      {&w.qkv, &p.qkv}, {&w.o, &p.o}, {&w.gate_up, &p.gate_up}, {&w.down, &p.down}};
  w.leaves.resize(p.leaves.size());
  for (size_t i = 0; i < p.leaves.size(); ++i) {
    LeafWeights& leaf = w.leaves[i];
    const LeafParameters& q = p.leaves[i];
    all.insert(all.end(), {{&leaf.qkv, &q.qkv},
                           {&leaf.k, &q.k},
                           {&leaf.v, &q.v},
                           {&leaf.o, &q.o},
                           {&leaf.gate_up, &q.gate_up},
                           {&leaf.down, &q.down}});
  }
  std::erase_if(all, [](const Matrix& m) { return !*m.second; });
  return all;
}

absl::Status PackOrRepack(Device& device, Stream& stream, std::shared_ptr<PackedWeight>& weight,
                          const Tensor& w_NK) {
  if (weight == nullptr) {
    ASSIGN_OR_RETURN(weight, device.Pack(stream, {w_NK}));
  } else {
    device.Repack(stream, *weight, {w_NK});
  }
  return absl::OkStatus();
}

int64_t Aligned(int64_t elements) {
  return (elements + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
}
}  // namespace

ParameterReader ReadFrom(const TensorSource& source) {
  return [&source](const Parameter& parameter, DType dtype, void* dst) {
    return source.ReadAll(parameter.spec.name, dtype, dst);
  };
}

absl::StatusOr<std::unique_ptr<ModelWeights>> ModelWeights::Load(Device& device, Stream& stream,
                                                                 const ModelConfig& config,
                                                                 DType dtype,
                                                                 const ParameterReader& reader,
                                                                 const WeightsOptions& options) {
  const ParameterLayout layout(config);
  auto weights = std::make_unique<ModelWeights>();
  weights->format_ = options.format;
  weights->layers.resize(layout.layers.size());
  Loader loader(device, stream, layout, dtype, reader, options);
  std::vector<std::pair<Tensor*, const ParameterView*>> vectors = {
      {&weights->final_norm, &layout.final_norm}};
  weights->embedding = loader.SharedEmbedding(&weights->embedding_);
  if (!weights->embedding) vectors.push_back({&weights->embedding, &layout.embedding});
  for (size_t l = 0; l < layout.layers.size(); ++l) {
    for (const auto& v : Vectors(weights->layers[l], layout.layers[l])) vectors.push_back(v);
  }
  int64_t total = 0;
  for (const auto& [tensor, view] : vectors) total += Aligned(view->size());
  ASSIGN_OR_RETURN(weights->storage_, device.Allocate(static_cast<size_t>(total) * SizeOf(dtype)));

  int64_t offset = 0;
  for (const auto& [tensor, view] : vectors) {
    *tensor = weights->storage_.View(dtype, view->rows, view->cols,
                                     static_cast<size_t>(offset) * SizeOf(dtype));
    RETURN_IF_ERROR(loader.Upload(*view, *tensor));
    offset += Aligned(view->size());
  }
  const ModelWeights* base = options.base;
  for (size_t l = 0; l < layout.layers.size(); ++l) {
    LayerWeights of_base = base != nullptr ? base->layers[l] : LayerWeights{};
    LayerWeights& layer = weights->layers[l];
    LayerParameters whole = layout.layers[l];
    if (options.k_leaves > 1) {
      ASSIGN_OR_RETURN(layer.o_leaves, loader.PackLeaves(whole.o, of_base.o_leaves));
      ASSIGN_OR_RETURN(layer.down_leaves, loader.PackLeaves(whole.down, of_base.down_leaves));
      whole.o = whole.down = {};
    }
    const std::vector<Matrix> from = Matrices(of_base, whole);
    const std::vector<Matrix> to = Matrices(layer, whole);
    for (size_t i = 0; i < to.size(); ++i) {
      ASSIGN_OR_RETURN(*to[i].first, loader.Pack(*to[i].second, options.format, *from[i].first));
    }
  }
  const WeightFormat head =
      options.format == WeightFormat::kInt4 ? WeightFormat::kInt8 : options.format;
  const bool tied = layout.lm_head.offset == layout.embedding.offset;
  ASSIGN_OR_RETURN(weights->lm_head,
                   loader.Pack(layout.lm_head, head, base != nullptr ? base->lm_head : nullptr,
                               tied ? weights->embedding : Tensor{}));
  device.Synchronize(stream);
  return weights;
}

absl::StatusOr<std::unique_ptr<ModelWeights>> ModelWeights::Load(Device& device, Stream& stream,
                                                                 const ModelConfig& config,
                                                                 DType dtype,
                                                                 const TensorSource& source,
                                                                 const WeightsOptions& options) {
  RETURN_IF_ERROR(CheckShapes(config, source));
  return Load(device, stream, config, dtype, ReadFrom(source), options);
}

absl::StatusOr<std::unique_ptr<ModelWeights>> ModelWeights::View(Device& device, Stream& stream,
                                                                 const ParameterLayout& layout,
                                                                 const Tensor& flat) {
  std::unique_ptr<ModelWeights> weights = Empty(layout);
  RETURN_IF_ERROR(weights->BindAll(device, stream, layout, flat));
  return weights;
}

void ModelWeights::Refresh(Device& device, Stream& stream, const ParameterLayout& layout,
                           const Tensor& flat) {
  // Nothing is allocated: all matrices have been laid out before.
  STRETTO_CHECK(BindAll(device, stream, layout, flat).ok());
}

absl::Status ModelWeights::BindAll(Device& device, Stream& stream, const ParameterLayout& layout,
                                   const Tensor& flat) {
  BindEmbedding(layout, flat);
  BindFinalNorm(layout, flat);
  for (size_t l = 0; l < layers.size(); ++l) {
    RETURN_IF_ERROR(BindLayer(device, stream, layout, static_cast<int64_t>(l), flat, layers[l]));
  }
  return BindHead(device, stream, layout, flat);
}

std::unique_ptr<ModelWeights> ModelWeights::Empty(const ParameterLayout& layout) {
  auto weights = std::make_unique<ModelWeights>();
  weights->layers.resize(layout.layers.size());
  return weights;
}

absl::Status ModelWeights::BindLayer(Device& device, Stream& stream, const ParameterLayout& layout,
                                     int64_t layer, const Tensor& flat, LayerWeights& packed) {
  for (const auto& [tensor, view] : Vectors(layers[layer], layout.layers[layer])) {
    *tensor = view->In(flat);
  }
  const std::vector<Matrix> from = Matrices(packed, layout.layers[layer]);
  const std::vector<Matrix> to = Matrices(layers[layer], layout.layers[layer]);
  for (size_t i = 0; i < from.size(); ++i) {
    RETURN_IF_ERROR(PackOrRepack(device, stream, *from[i].first, from[i].second->In(flat)));
    *to[i].first = *from[i].first;
  }
  return absl::OkStatus();
}

void ModelWeights::BindEmbedding(const ParameterLayout& layout, const Tensor& flat) {
  embedding = layout.embedding.In(flat);
  embedding_leaves.clear();
  for (const ParameterView& leaf : layout.embedding_leaves) {
    embedding_leaves.push_back(leaf.In(flat));
  }
}

void ModelWeights::BindFinalNorm(const ParameterLayout& layout, const Tensor& flat) {
  final_norm = layout.final_norm.In(flat);
}

absl::Status ModelWeights::BindHead(Device& device, Stream& stream, const ParameterLayout& layout,
                                    const Tensor& flat) {
  if (layout.lm_head_leaves.empty()) {
    return PackOrRepack(device, stream, lm_head, layout.lm_head.In(flat));
  }
  lm_head_leaves.resize(layout.lm_head_leaves.size());
  for (size_t i = 0; i < lm_head_leaves.size(); ++i) {
    RETURN_IF_ERROR(
        PackOrRepack(device, stream, lm_head_leaves[i], layout.lm_head_leaves[i].In(flat)));
  }
  return absl::OkStatus();
}

size_t LayerWeights::packed_bytes() const {
  size_t total = 0;
  const auto add = [&](const std::shared_ptr<PackedWeight>& w) {
    if (w != nullptr) total += w->bytes();
  };
  for (const auto& w : {qkv, o, gate_up, down}) add(w);
  for (const LeafWeights& l : leaves) {
    for (const auto& w : {l.qkv, l.k, l.v, l.o, l.gate_up, l.down}) add(w);
  }
  for (const auto& w : o_leaves) add(w);
  for (const auto& w : down_leaves) add(w);
  return total;
}

size_t ModelWeights::head_bytes() const {
  size_t total = lm_head != nullptr ? lm_head->bytes() : 0;
  for (const auto& leaf : lm_head_leaves) total += leaf != nullptr ? leaf->bytes() : 0;
  return total;
}

size_t ModelWeights::bytes() const {
  size_t total = storage_.bytes() + head_bytes();
  if (embedding_ != nullptr) total += static_cast<size_t>(embedding.size()) * SizeOf(dtype());
  for (const LayerWeights& l : layers) total += l.packed_bytes();
  return total;
}
}  // namespace stretto::engine
