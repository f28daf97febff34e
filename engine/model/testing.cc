#include "engine/model/testing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/model/vocabulary_leaves.h"

namespace stretto::engine::testing {
namespace {
// Aborts with the message unless OK.
template <class T>
T Must(absl::StatusOr<T> value) {
  STRETTO_CHECK_MSG(value.ok(), std::string(value.status().message()).c_str());
  return std::move(value).value();
}
int64_t Between(PhiloxStream& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random.Below(high - low + 1));
}
std::vector<int32_t> RandomIds(const ModelConfig& config, int64_t count, PhiloxStream& random) {
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.Below(config.vocab_size));
  return ids;
}
}  // namespace

std::unique_ptr<Device> MakeDevice(const std::string& backend, int num_threads) {
  DeviceOptions options;
  options.backend = backend;
  options.num_threads = num_threads;
  return Must(CreateDevice(options));
}

ModelConfig RandomConfig(PhiloxStream& random) {
  ModelConfig c;
  constexpr Architecture kAll[] = {Architecture::kLlama, Architecture::kMistral,
                                   Architecture::kQwen2, Architecture::kQwen3};
  c.architecture = kAll[random.Below(4)];
  c.vocab_size = Between(random, 40, 200);
  c.hidden_size = 8 * Between(random, 3, 9);
  c.intermediate_size = 8 * Between(random, 3, 15);
  c.num_layers = Between(random, 1, 3);
  c.num_kv_heads = Between(random, 1, 3);
  c.num_heads = c.num_kv_heads * Between(random, 1, 3);
  c.head_dim = 8 * Between(random, 1, 4);
  c.max_position_embeddings = 64;
  c.rms_norm_eps = 1e-5;
  c.tie_word_embeddings = random.Below(2) == 0;
  c.qk_norm = c.architecture == Architecture::kQwen3;
  c.attention_bias_qkv = c.architecture == Architecture::kQwen2;
  if (c.architecture == Architecture::kLlama && random.Below(3) == 0) {
    c.attention_bias_qkv = c.attention_bias_o = c.mlp_bias = true;
  }
  if (c.architecture == Architecture::kMistral) c.sliding_window = Between(random, 1, 40);
  if (random.Below(3) == 0) {
    c.rope_scaling.type = RopeScaling::Type::kDynamic;
    c.rope_scaling.factor = 2.0;
    c.rope_scaling.original_max_position_embeddings = c.max_position_embeddings = 32;
  }
  return c;
}

HostParameters RandomParameters(const ModelConfig& config, PhiloxStream& random) {
  HostParameters parameters;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    const bool vector = spec.shape.size() == 1;
    const bool norm = spec.name.find("norm") != std::string::npos;
    const int64_t size =
        std::accumulate(spec.shape.begin(), spec.shape.end(), int64_t{1}, std::multiplies<>());
    const double std = vector ? 0.2 : 1.5 / std::sqrt(static_cast<double>(spec.shape.back()));
    std::vector<float>& values = parameters[spec.name];
    values.resize(size);
    for (float& x : values) x = static_cast<float>(random.NextGaussian() * std + (norm ? 1 : 0));
  }
  return parameters;
}

HostParameters ParametersFrom(const ModelConfig& config, const TensorSource& source) {
  HostParameters parameters;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    std::vector<float>& values = parameters[spec.name];
    values.resize(
        std::accumulate(spec.shape.begin(), spec.shape.end(), int64_t{1}, std::multiplies<>()));
    const absl::Status read = source.ReadAll(spec.name, DType::kF32, values.data());
    STRETTO_CHECK_MSG(read.ok(), std::string(read.message()).c_str());
  }
  return parameters;
}

ParameterReader Reader(const HostParameters& parameters) {
  return [&parameters](const Parameter& p, DType dtype, void* dst) -> absl::Status {
    const std::vector<float>& values = parameters.at(p.spec.name);
    if (dtype == DType::kF32) {
      std::copy(values.begin(), values.end(), static_cast<float*>(dst));
    } else {
      std::transform(values.begin(), values.end(), static_cast<uint16_t*>(dst), F32ToBf16);
    }
    return absl::OkStatus();
  };
}

TestModel::TestModel(Device& dev, const ModelConfig& config, DType dtype,
                     int64_t max_sequence_length, const HostParameters& parameters)
    : device(dev), stream(dev.CreateStream()), layout(config) {
  flat = Must(memory.Make(device, dtype, 1, layout.size()));
  gradients = Must(memory.Make(device, DType::kF32, 1, layout.size()));
  device.Fill(*stream, flat, 0.0f);
  const ParameterReader reader = Reader(parameters);
  for (const Parameter& p : layout.parameters()) {
    std::vector<uint8_t> host(p.view.size() * SizeOf(dtype));
    STRETTO_CHECK(reader(p, dtype, host.data()).ok());
    device.Upload(*stream, p.view.In(flat), host.data());
  }
  transformer = Must(Transformer::Create(device, config, {dtype, max_sequence_length}));
  weights = Must(ModelWeights::View(device, *stream, layout, flat));
  ZeroGradients();
}

void TestModel::ZeroGradients() { device.Fill(*stream, gradients, 0.0f); }

HostParameters TestModel::Gradients() {
  HostParameters out;
  for (const Parameter& p : layout.parameters()) {
    std::vector<float>& host = out[p.spec.name];
    host.resize(p.view.size());
    device.Download(*stream, p.view.In(gradients), host.data());
  }
  return out;
}

std::vector<TestGroup> RandomGroups(const ModelConfig& config, int64_t max_sequence_length,
                                    PhiloxStream& random) {
  std::vector<TestGroup> groups(Between(random, 1, 3));
  for (TestGroup& g : groups) {
    g.prompt = RandomIds(config, Between(random, 1, max_sequence_length * 2 / 3), random);
    g.completions.resize(Between(random, 1, 4));
    const int64_t room = max_sequence_length - static_cast<int64_t>(g.prompt.size());
    for (auto& c : g.completions) c = RandomIds(config, Between(random, 1, room), random);
  }
  return groups;
}

PackedBatch Pack(const std::vector<TestGroup>& groups, bool share) {
  PackedBatch batch;
  for (const TestGroup& g : groups) {
    int32_t prompt = -1;
    for (const std::vector<int32_t>& ids : g.completions) {
      if (prompt < 0 || !share) prompt = batch.AddSegment(g.prompt, -1);
      const auto body = absl::MakeSpan(ids).subspan(0, ids.size() - 1);
      const int32_t segment = body.empty() ? -1 : batch.AddSegment(body, prompt);
      const SegmentTable& s = batch.segments;
      for (size_t i = 0; i < ids.size(); ++i) {
        batch.target_rows_N.push_back(i == 0 ? s.row_begin[prompt] + s.num_rows[prompt] - 1
                                             : s.row_begin[segment] + static_cast<int32_t>(i) - 1);
        batch.targets_N.push_back(ids[i]);
      }
    }
  }
  return batch;
}

namespace {
// One sequence on its way through the paged face.
struct PagedSequence {
  std::vector<int32_t> ids;  // prompt and completion
  int64_t prompt_size = 0, done = 0;
  std::vector<int32_t> blocks;
  int64_t first_target = 0;  // index of its first target's log-prob
};

std::vector<PagedSequence> Sequences(const std::vector<TestGroup>& groups, int64_t num_blocks,
                                     PhiloxStream& random) {
  std::vector<int32_t> free(num_blocks);
  std::iota(free.begin(), free.end(), 0);
  std::vector<PagedSequence> sequences;
  int64_t targets = 0;
  for (const TestGroup& g : groups) {
    for (const auto& completion : g.completions) {
      PagedSequence s;
      s.ids = g.prompt;
      s.ids.insert(s.ids.end(), completion.begin(), completion.end());
      s.prompt_size = static_cast<int64_t>(g.prompt.size());
      s.first_target = targets;
      targets += static_cast<int64_t>(completion.size());
      for (size_t at = 0; at < s.ids.size(); at += kBlockTokens) {
        const size_t pick = random.Below(free.size());
        s.blocks.push_back(free[pick]);
        free.erase(free.begin() + static_cast<int64_t>(pick));
      }
      sequences.push_back(std::move(s));
    }
  }
  return sequences;
}

// The host arrays of one call.
struct Call {
  std::vector<int32_t> ids, positions, row_sequence, context, slots, tables, logits_rows, targets;
  std::vector<int64_t> target_index;

  void AddChunk(const PagedSequence& s, int32_t sequence, int64_t count) {
    for (int64_t p = s.done; p < s.done + count; ++p) {
      if (p + 1 >= s.prompt_size && p + 1 < static_cast<int64_t>(s.ids.size())) {
        logits_rows.push_back(static_cast<int32_t>(ids.size()));
        targets.push_back(s.ids[p + 1]);
        target_index.push_back(s.first_target + p + 1 - s.prompt_size);
      }
      ids.push_back(s.ids[p]);
      positions.push_back(static_cast<int32_t>(p));
      row_sequence.push_back(sequence);
      context.push_back(static_cast<int32_t>(p + 1));
      slots.push_back(s.blocks[p / kBlockTokens] * kBlockTokens +
                      static_cast<int32_t>(p % kBlockTokens));
    }
  }
};
}  // namespace

std::vector<float> PagedLogProbs(TestModel& model, const std::vector<TestGroup>& groups,
                                 float temperature, PhiloxStream& random) {
  Device& device = model.device;
  int64_t total = 0, num_sequences = 0, num_targets = 0, max_blocks = 0;
  for (const TestGroup& g : groups) {
    for (const auto& c : g.completions) {
      const auto size = static_cast<int64_t>(g.prompt.size() + c.size());
      total += size;
      num_targets += static_cast<int64_t>(c.size());
      ++num_sequences;
      max_blocks = std::max(max_blocks, (size + kBlockTokens - 1) / kBlockTokens);
    }
  }
  const int64_t num_blocks = num_sequences * max_blocks + 3;
  auto sequences = Sequences(groups, num_blocks, random);
  const auto cache = Must(device.AllocateKvCache(model.transformer->CacheShape(num_blocks)));
  const TransformerOptions& options = model.transformer->options();
  const auto workspace =
      Must(Workspace::Create(device, model.transformer->config(), options.dtype,
                             {total, num_targets, num_sequences, max_blocks, options.k_leaves}));
  const auto vocabulary = Must(VocabularyLeaves::Create(device, options.k_leaves, num_targets));
  DeviceMemory memory;
  const Tensor targets = Must(memory.Make(device, DType::kI32, 1, num_targets));
  const Tensor logprobs = Must(memory.Make(device, DType::kF32, 1, num_targets));
  std::vector<float> out(num_targets, NAN);
  for (bool any = true; any;) {
    any = false;
    Call call;
    int32_t used = 0;
    for (PagedSequence& s : sequences) {
      const auto left = static_cast<int64_t>(s.ids.size()) - s.done;
      any |= left > 0;
      if (left == 0 || random.Below(3) == 0) continue;
      const int64_t count = random.Below(2) == 0 ? 1 : Between(random, 1, left);
      call.AddChunk(s, used++, count);
      call.tables.insert(call.tables.end(), s.blocks.begin(), s.blocks.end());
      call.tables.resize(used * max_blocks, -1);
      s.done += count;
    }
    if (used == 0) continue;
    const Tensor logits =
        model.transformer->ForwardPaged(*model.stream, *model.weights,
                                        {call.ids, call.positions, call.row_sequence, call.context,
                                         call.slots, call.tables, used, call.logits_rows},
                                        *cache, *workspace);
    const auto R = static_cast<int64_t>(call.targets.size());
    if (R == 0) continue;
    device.Upload(*model.stream, targets.Cols(0, R), call.targets.data());
    vocabulary->LogProbs(*model.stream, logprobs.Cols(0, R), {}, logits, targets.Cols(0, R),
                         temperature);
    std::vector<float> host(R);
    device.Download(*model.stream, logprobs.Cols(0, R), host.data());
    for (int64_t i = 0; i < R; ++i) out[call.target_index[i]] = host[i];
  }
  return out;
}
}  // namespace stretto::engine::testing
