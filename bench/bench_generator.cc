// Measures the inference engine on a model of SmolLM2-135M's shape with random weights, bf16,
// against the machine's two ceilings: decoding with 1, 8, 32 and 64 sequences, prefill of 512
// tokens, a group of 8 samples with and without sharing its prompt, decoding with quantised weights
// beside bf16 ones, and a single sequence with and without n-gram speculation, on text that repeats
// itself and on texts that don't. A step's ceiling is the larger of its operations at peak
// arithmetic and its bytes (weights once, keys and values) at the bandwidth of memory. Writes
// build/bench/generator.json.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/bfloat16.h"
#include "base/check.h"
#include "bench/ceilings.h"
#include "bench/report.h"
#include "engine/inference/engine.h"
#include "engine/model/transformer.h"

namespace stretto::bench {
namespace {
using engine::EngineOptions;
using engine::EngineStats;
using engine::Event;
using engine::InferenceEngine;
using engine::ModelConfig;
using engine::ModelWeights;
using engine::Parameter;
using engine::Request;
using engine::Transformer;

ModelConfig SmolLm2Config() {
  ModelConfig c;
  c.vocab_size = 49152;
  c.hidden_size = 576;
  c.intermediate_size = 1536;
  c.num_layers = 30;
  c.num_heads = 9;
  c.num_kv_heads = 3;
  c.head_dim = 64;
  c.max_position_embeddings = 8192;
  c.rms_norm_eps = 1e-5;
  c.rope_theta = 100000;
  c.tie_word_embeddings = true;
  return c;
}

// Elements of the layers' matrices and of the LM head: what products read.
struct MatrixSizes {
  double layers = 0, lm_head = 0;
};
MatrixSizes CountMatrices(const ModelConfig& c) {
  const int64_t qkv = c.hidden_size * c.head_dim * (c.num_heads + 2 * c.num_kv_heads);
  const int64_t o = c.hidden_size * c.head_dim * c.num_heads;
  const int64_t mlp = 3 * c.hidden_size * c.intermediate_size;
  return {static_cast<double>(c.num_layers * (qkv + o + mlp)),
          static_cast<double>(c.vocab_size * c.hidden_size)};
}

// Small values without structure; norms are 1.
absl::Status RandomParameter(const Parameter& p, DType dtype, void* dst) {
  STRETTO_CHECK(dtype == DType::kBF16);
  const bool norm = p.spec.name.find("norm") != std::string::npos;
  uint32_t state = static_cast<uint32_t>(p.view.offset) + 1;
  auto* out = static_cast<uint16_t*>(dst);
  for (int64_t i = 0; i < p.view.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    out[i] = F32ToBf16(norm ? 1.0f : static_cast<float>(static_cast<int32_t>(state)) * 0x1p-35f);
  }
  return absl::OkStatus();
}

struct Ceilings {
  double flops = 0, bytes_per_second = 0;
  double Seconds(double operations, double bytes) const {
    return std::max(operations / flops, bytes / bytes_per_second);
  }
};

class GeneratorBench {
 public:
  explicit GeneratorBench(int num_threads) : report_("generator"), num_threads_(num_threads) {
    engine::DeviceOptions options;
    options.num_threads = num_threads;
    auto device = engine::CreateDevice(options);
    STRETTO_CHECK(device.ok());
    device_ = *std::move(device);
    auto model = Transformer::Create(*device_, SmolLm2Config(), {DType::kBF16, 8192});
    STRETTO_CHECK(model.ok());
    model_ = *std::move(model);
    weights_ = LoadWeights(engine::WeightFormat::kPlain);
    sizes_ = CountMatrices(model_->config());
  }

  // `only`: the one part to run ("1", "8", "32", "64", "prefill", "group", "quantized", "ngram"),
  // or empty.
  void Run(const std::string& only) {
    const auto wanted = [&only](const std::string& part) { return only.empty() || only == part; };
    ceilings_ = {PeakFlops(num_threads_), ReadBandwidth(num_threads_)};
    report_.Add("threads", num_threads_, "");
    report_.Add("ceiling: arithmetic", ceilings_.flops * 1e-9, "GFLOP/s");
    report_.Add("ceiling: memory", ceilings_.bytes_per_second * 1e-9, "GB/s");
    if (wanted("1")) Decode(1, 0.70);
    if (wanted("8")) Decode(8, std::nullopt);
    if (wanted("32")) Decode(32, 0.60);
    if (wanted("64")) Decode(64, std::nullopt);
    if (wanted("prefill")) Prefill();
    if (wanted("group")) Group();
    if (wanted("quantized")) Quantized();
    if (wanted("ngram")) Ngram();
    report_.Write();
  }

 private:
  std::shared_ptr<const ModelWeights> LoadWeights(engine::WeightFormat format) {
    const auto stream = device_->CreateStream();
    auto weights = ModelWeights::Load(*device_, *stream, model_->config(), DType::kBF16,
                                      RandomParameter, {.format = format});
    STRETTO_CHECK(weights.ok());
    return *std::move(weights);
  }
  std::unique_ptr<InferenceEngine> Engine(bool prefix_cache) {
    return Engine(prefix_cache, weights_);
  }
  std::unique_ptr<InferenceEngine> Engine(bool prefix_cache,
                                          std::shared_ptr<const ModelWeights> weights,
                                          engine::SpeculationOptions speculation = {}) {
    EngineOptions options;
    options.speculation = speculation;
    options.kv_cache_bytes = int64_t{512} << 20;
    options.prefix_cache = prefix_cache;
    auto engine = InferenceEngine::Create(*model_, {std::move(weights), 1, "random"}, options);
    STRETTO_CHECK(engine.ok());
    return *std::move(engine);
  }
  static Request Make(uint64_t id, int num_prompt, int max_tokens) {
    Request r;
    r.id = id;
    r.draw = {1, id, 0};
    for (int i = 0; i < num_prompt; ++i) {
      r.prompt_ids.push_back(
          static_cast<int32_t>((static_cast<int64_t>(id) * 7919 + i * 31) % 49152));
    }
    r.sampling.max_tokens = max_tokens;
    r.sampling.ignore_eos = true;
    return r;
  }

  // Prompts of 64 tokens, 64 new ones; measured from the moment that all decode.
  void Decode(int num_sequences, std::optional<double> target) {
    constexpr int kPrompt = 64, kNew = 64;
    const auto engine = Engine(true);
    for (int i = 0; i < num_sequences; ++i) {
      STRETTO_CHECK(engine->Submit(Make(static_cast<uint64_t>(i), kPrompt, kNew)).ok());
    }
    while (engine->stats().num_queued > 0 ||
           engine->stats().prompt_tokens_computed < int64_t{kPrompt} * num_sequences) {
      engine->Step();
    }
    const EngineStats before = engine->stats();
    const double start = SecondsNow();
    // Whole steps alone: up to the one in which the first sequence ends.
    while (engine->stats().num_finished == 0) engine->Step();
    const double seconds = SecondsNow() - start;
    const EngineStats after = engine->stats();
    const double tokens = static_cast<double>(after.tokens_generated - before.tokens_generated);
    const double steps = static_cast<double>(after.num_steps - before.num_steps);
    const std::string name = "decode, " + std::to_string(num_sequences) + " sequences";
    report_.Add(name, tokens / seconds, "tokens/s");
    report_.Add(name + ": share of ceiling",
                DecodeCeiling(num_sequences, kPrompt + kNew / 2) * steps / seconds, "", target);
    report_.Add(name + ": share of sampling",
                (after.sample_seconds - before.sample_seconds) / seconds, "");
    report_.Add(name + ": share of scheduling and the rest",
                1 - (after.forward_seconds + after.sample_seconds - before.forward_seconds -
                     before.sample_seconds) /
                        seconds,
                "");
  }

  // Seconds of one step at the ceiling.
  double DecodeCeiling(int rows, int context) const {
    const ModelConfig& c = model_->config();
    const double kv = static_cast<double>(c.num_layers * 2 * c.head_dim * context) * rows;
    const double operations =
        2 * (sizes_.layers + sizes_.lm_head) * rows + 2 * kv * static_cast<double>(c.num_heads);
    const double bytes =
        2 * (sizes_.layers + sizes_.lm_head) + 2 * kv * static_cast<double>(c.num_kv_heads);
    return ceilings_.Seconds(operations, bytes);
  }

  void Prefill() {
    constexpr int kPrompt = 512;
    const ModelConfig& c = model_->config();
    const auto engine = Engine(false);
    const double seconds = MedianSeconds([&] {
      STRETTO_CHECK(engine->Submit(Make(1, kPrompt, 1)).ok());
      while (engine->HasWork()) engine->Step();
    });
    const double attention = 2.0 * kPrompt * (kPrompt + 1) *
                             static_cast<double>(c.num_layers * c.num_heads * c.head_dim);
    const double operations = 2 * sizes_.layers * kPrompt + 2 * sizes_.lm_head + attention;
    report_.Add("prefill, 512 tokens", kPrompt / seconds, "tokens/s");
    report_.Add("prefill, 512 tokens: share of ceiling",
                ceilings_.Seconds(operations, 2 * (sizes_.layers + sizes_.lm_head)) / seconds, "",
                0.65);
  }

  // 8 samples of a prompt of 512 tokens, 16 new tokens each: as a group, and as strangers.
  void Group() {
    double seconds[2];
    for (const bool shared : {true, false}) {
      const auto engine = Engine(shared);
      std::vector<Request> group;
      for (uint32_t i = 0; i < 8; ++i) {
        group.push_back(Make(7, 512, 16));
        group.back().id = i;
        group.back().draw.sample_index = i;
      }
      const double start = SecondsNow();
      if (shared) {
        STRETTO_CHECK(engine->SubmitGroup(group).ok());
      } else {
        for (const Request& r : group) STRETTO_CHECK(engine->Submit(r).ok());
      }
      while (engine->HasWork()) engine->Step();
      seconds[shared ? 0 : 1] = SecondsNow() - start;
    }
    report_.Add("group of 8, prompt 512: sharing is faster by", seconds[1] / seconds[0], "x", 3.0);
  }

  // Seconds of `num_steps` steps that decode.
  double DecodeSeconds(const std::shared_ptr<const ModelWeights>& weights, int num_sequences,
                       int num_steps) {
    const auto engine = Engine(true, weights);
    for (int i = 0; i < num_sequences; ++i) {
      STRETTO_CHECK(engine->Submit(Make(static_cast<uint64_t>(i), 16, num_steps + 2)).ok());
    }
    while (engine->stats().tokens_generated < num_sequences) engine->Step();
    const double start = SecondsNow();
    for (int i = 0; i < num_steps; ++i) engine->Step();
    return SecondsNow() - start;
  }

  // Against bf16 in turns, so that what else the machine does meets both.
  void Quantized() {
    for (const engine::WeightFormat format :
         {engine::WeightFormat::kInt8, engine::WeightFormat::kInt4, engine::WeightFormat::kFp8}) {
      const auto weights = LoadWeights(format);
      const std::string name = std::string(engine::Name(format)) + " weights";
      report_.Add(
          name + ": bytes, of bf16's",
          static_cast<double>(MatrixBytes(*weights)) / static_cast<double>(MatrixBytes(*weights_)),
          "");
      for (const int sequences : {1, 8, 32}) {
        std::vector<double> ratios;
        for (int turn = 0; turn < 5; ++turn) {
          const double plain = DecodeSeconds(weights_, sequences, 16);
          ratios.push_back(plain / DecodeSeconds(weights, sequences, 16));
        }
        std::sort(ratios.begin(), ratios.end());
        std::optional<double> target;
        if (format == engine::WeightFormat::kInt8 && sequences == 1) target = 1.5;
        report_.Add(name + ": decoding " + std::to_string(sequences) + " is faster by", ratios[2],
                    "x", target);
      }
    }
  }
  static size_t MatrixBytes(const ModelWeights& w) {
    size_t bytes = w.lm_head->bytes();
    for (const auto& l : w.layers) {
      bytes += l.qkv->bytes() + l.o->bytes() + l.gate_up->bytes() + l.down->bytes();
    }
    return bytes;
  }

  // Seconds per token, with and without speculation in turn, on equal texts: the medians' ratio.
  // Greedy decoding repeats itself, as random weights lead to; a draw from the whole vocabulary
  // never does. A draw from few tokens makes pairs of tokens come again without what followed
  // them.
  void Ngram() {
    engine::SpeculationOptions speculation;
    speculation.kind = engine::SpeculationKind::kNgram;
    const auto plain = Engine(false), speculated = Engine(false, weights_, speculation);
    const auto compare = [&](const std::string& text, std::optional<double> target,
                             const engine::SamplingParams& sampling) {
      std::vector<double> seconds[2];
      for (int round = 0; round < 3; ++round) {
        for (InferenceEngine* engine : {plain.get(), speculated.get()}) {
          Request r = Make(static_cast<uint64_t>(round), 64, 96);
          r.sampling = sampling;
          r.sampling.max_tokens = 96;
          const double start = SecondsNow();
          STRETTO_CHECK(engine->Submit(r).ok());
          while (engine->HasWork()) engine->Step();
          seconds[engine == plain.get() ? 0 : 1].push_back(SecondsNow() - start);
        }
      }
      for (auto& s : seconds) std::sort(s.begin(), s.end());
      report_.Add("n-gram speculation, 1 sequence, " + text + ": faster by",
                  seconds[0][1] / seconds[1][1], "x", target);
    };
    engine::SamplingParams sampling;
    compare("text that never repeats", 0.97, sampling);
    sampling.temperature = 50;
    sampling.top_k = 12;
    compare("text whose pairs of tokens repeat", 0.97, sampling);
    sampling = {};
    sampling.logit_bias = {{17, 1e5f}};
    compare("text of one token", 1.8, sampling);
    const engine::SpeculationStats stats = speculated->stats().speculation;
    report_.Add("n-gram speculation: share of drafted tokens accepted",
                static_cast<double>(stats.num_accepted) / static_cast<double>(stats.num_drafted),
                "");
  }

  Report report_;
  int num_threads_;
  std::unique_ptr<engine::Device> device_;
  std::unique_ptr<Transformer> model_;
  std::shared_ptr<const ModelWeights> weights_;
  MatrixSizes sizes_;
  Ceilings ceilings_;
};
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  stretto::bench::GeneratorBench(num_threads).Run(argc > 2 ? argv[2] : "");
  return 0;
}
