#include "engine/training/memory_plan.h"

#include <algorithm>

namespace stretto::engine {
namespace {
constexpr size_t kF32Bytes = 4;
constexpr size_t kPanel = 16;  // outputs of a packed matrix are padded to a multiple

size_t DivideUp(size_t a, size_t b) { return (a + b - 1) / b; }

// Elements of the units that a pass comes to: ends and layers.
struct Units {
  explicit Units(const ModelConfig& config) {
    const ParameterLayout layout(config);
    const ShardMap map(layout, 1);
    all = static_cast<size_t>(layout.size());
    layer = static_cast<size_t>(map.largest_layer());
    ends = static_cast<size_t>(map.UnitSize(0) + map.UnitSize(map.num_units() - 1));
    layers = layout.layers.size();
    head = static_cast<size_t>(config.num_outputs() * config.hidden_size);
  }
  size_t all, layer, ends, layers, head;
};

// Elements a row of one layer's tensors.
struct RowElements {
  RowElements(const ModelConfig& c, Checkpointing checkpointing) {
    const auto D = static_cast<size_t>(c.hidden_size), F = static_cast<size_t>(c.intermediate_size);
    const auto C = static_cast<size_t>(c.head_dim), H = static_cast<size_t>(c.num_heads);
    const auto G = static_cast<size_t>(c.num_kv_heads);
    const size_t normed_qk = c.qk_norm ? (H + G) * C : 0;
    const size_t attention = (H + 2 * G) * C + H * C + D + normed_qk, gate_up = 2 * F;
    kept = D;
    shared = 3 * D + F;
    (checkpointing == Checkpointing::kFull ? shared : kept) += attention;
    (checkpointing == Checkpointing::kNone ? kept : shared) += gate_up;
    gradients = 2 * D + (H + 2 * G) * C + H * C + 3 * F + normed_qk;
    widest = std::max({2 * F, (H + 2 * G) * C, D});
  }
  size_t kept, shared, gradients;
  size_t widest;  // gradient of an output
};
// Of masters and moments of `elements` in memory, and of the window that what isn't f32 there
// passes through (optimizer_state.h); but for blocks that a unit's end cuts off.
struct OptimizerBytes {
  OptimizerBytes(const OptimizerStorage& storage, size_t elements) {
    const bool offloads = !storage.offload_folder.empty();
    const size_t scales = DivideUp(elements, static_cast<size_t>(kMomentBlock)) * kF32Bytes;
    const size_t moments =
        storage.eight_bit_moments ? 2 * (elements + scales) : 2 * kF32Bytes * elements;
    if (!offloads) state = kF32Bytes * elements + moments;
    if (offloads && storage.eight_bit_moments) state = moments;
    const size_t kinds = offloads ? 3 : 2;
    if (!storage.is_plain()) window = kinds * kF32Bytes * OptimizerWindow(elements);
  }
  size_t state = 0, window = 0;
};

// An adapter's state, on top of the frozen model's, and what merging and its gradients need
// (engine/model/lora.h).
void AddAdapter(const ModelConfig& config, const TrainerOptions& options, size_t num_ranks,
                size_t rows, MemoryPlan& plan) {
  const LoraOptions& lora = options.lora;
  const ParameterLayout layout(config, lora);
  const auto all = static_cast<size_t>(layout.size()), rank = static_cast<size_t>(lora.rank);
  const DataParallel kind = options.parallel.kind;
  const size_t part = DivideUp(all, num_ranks);
  const OptimizerBytes optimizer(options.storage, kind == DataParallel::kDdp ? all : part);
  const bool streams = options.parallel.streams_gradients();
  plan.state += kF32Bytes * (all + (streams ? part : all)) + optimizer.state;
  if (streams) {
    plan.gathered += kF32Bytes * 2 * static_cast<size_t>(ShardMap(layout, 1).largest_layer());
  }
  plan.workspace += optimizer.window;
  const std::vector<Parameter>& parameters = layout.parameters();  // A and B by turns
  for (size_t i = 0; i < parameters.size(); i += 2) {
    const int64_t inputs = parameters[i].view.cols;
    plan.gathered += kF32Bytes * DivideUp(rank, kPanel) * kPanel * static_cast<size_t>(inputs);
  }
  const auto piece = static_cast<size_t>(LoraMergeElements(parameters));
  plan.workspace += kF32Bytes * (2 * piece + rows * rank);
  if (kind == DataParallel::kFsdp && num_ranks > 1) plan.workspace += SizeOf(options.dtype) * piece;
}
}  // namespace

MemoryPlan PlanMemory(const ModelConfig& config, const TrainerOptions& options, int num_ranks) {
  const Units units(config);
  const ParallelOptions& parallel = options.parallel;
  const size_t W = SizeOf(options.dtype);
  const bool fsdp = parallel.kind == DataParallel::kFsdp;
  const auto divided = [&](bool divides) {
    return divides ? DivideUp(units.all, static_cast<size_t>(num_ranks)) : units.all;
  };
  const OptimizerBytes optimizer(options.storage, divided(parallel.kind != DataParallel::kDdp));
  MemoryPlan plan;
  plan.state = W * divided(fsdp);
  if (!options.lora) {
    plan.state += kF32Bytes * divided(parallel.streams_gradients()) + optimizer.state;
  }
  const size_t at_once =
      fsdp ? std::clamp<size_t>(static_cast<size_t>(parallel.max_gathered_layers), 1, units.layers)
           : units.layers;
  plan.gathered = W * (at_once * units.layer + units.head);
  if (parallel.streams_gradients() && !options.lora) {
    plan.gathered += kF32Bytes * (2 * units.layer + units.ends);
  }
  if (fsdp) plan.gathered += W * (at_once * units.layer + units.ends);

  const auto rows =
      static_cast<size_t>(std::max(options.micro_batch_tokens, options.max_sequence_length));
  const RowElements row(config, options.checkpointing);
  plan.activations = W * row.kept * units.layers * rows;
  const auto D = static_cast<size_t>(config.hidden_size),
             V = static_cast<size_t>(config.num_outputs());
  PackedPassOptions pass;
  const size_t chunk =
      std::clamp<size_t>(options.logits_bytes / HeadRowBytes(config, options.dtype, pass), 1, rows);
  plan.workspace = rows * (W * row.shared + kF32Bytes * (row.gradients + 4)) +
                   chunk * (W * 2 * D + kF32Bytes * (V + 2 * D + 7));
  if (options.gradient_dtype == DType::kBF16) plan.workspace += 2 * rows * row.widest;
  if (!options.lora) plan.workspace += optimizer.window;
  if (options.lora) {
    AddAdapter(config, options, static_cast<size_t>(num_ranks), rows, plan);
  }
  return plan;
}
}  // namespace stretto::engine
