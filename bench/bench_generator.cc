// Measures the inference engine on a model of SmolLM2-135M's shape with random weights, bf16,
// against the machine's two ceilings: decoding with 1, 8, 32 and 64 sequences, prefill of 512
// tokens, a group of 8 samples with and without sharing its prompt, a load of 200 requests of
// uneven lengths, decoding with quantised weights beside bf16 ones, `exact` numerics beside `fast`
// ones, and a single sequence with and without n-gram speculation, on text that repeats itself and
// on texts that don't. A step's ceiling is the larger of its operations at peak arithmetic and its
// bytes (weights once, keys and values) at the bandwidth of memory; both are read anew beside every
// figure. Writes build/bench/generator.json.
//
//   bench_generator [--threads=N] [--only=PART]
//   bench_generator --worker=MODEL [--threads=N]    times what bench/rivals.py asks for
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "bench/ceilings.h"
#include "bench/generator_lab.h"
#include "bench/report.h"

namespace stretto::bench {
namespace {
using engine::EngineStats;
using engine::InferenceEngine;
using engine::ModelConfig;
using engine::ModelWeights;
using engine::Request;

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

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class GeneratorBench {
 public:
  explicit GeneratorBench(int num_threads)
      : report_("generator"),
        num_threads_(num_threads),
        lab_(num_threads, ""),
        meter_(num_threads),
        sizes_(CountMatrices(lab_.config())) {}

  // `only`: the one part to run, or empty.
  void Run(const std::string& only) {
    const auto wanted = [&only](const std::string& part) { return only.empty() || only == part; };
    report_.Add("threads", num_threads_, "");
    if (wanted("1")) Decode(1, 0.70);
    if (wanted("8")) Decode(8, std::nullopt);
    if (wanted("32")) Decode(32, 0.60);
    if (wanted("64")) Decode(64, std::nullopt);
    if (wanted("prefill")) Prefill();
    if (wanted("group")) Group();
    if (wanted("mixed")) Mixed();
    if (wanted("quantized")) Quantized();
    if (wanted("numerics")) Numerics();
    if (wanted("ngram")) Ngram();
    meter_.Read();
    const Ceilings median = meter_.Median();
    report_.Add("ceiling: arithmetic", median.flops * 1e-9, "GFLOP/s");
    report_.Add("ceiling: memory", median.bytes_per_second * 1e-9, "GB/s");
    report_.Write();
  }

 private:
  // Prompts of 64 tokens, 64 new ones; measured from the moment that all decode, eight steps at a
  // time, each time beside the ceilings.
  void Decode(int num_sequences, std::optional<double> target) {
    constexpr int kPrompt = 64, kRounds = 7, kSteps = 8;
    constexpr int kMost = 128;  // the first sequences are ahead of the last
    const auto engine = lab_.Engine({});
    for (int i = 0; i < num_sequences; ++i) {
      STRETTO_CHECK(engine->Submit(MakeRequest(static_cast<uint64_t>(i), kPrompt, kMost)).ok());
    }
    while (engine->stats().num_queued > 0 || engine->stats().tokens_generated < num_sequences) {
      engine->Step();
    }
    std::vector<double> speeds, shares;
    const EngineStats before = engine->stats();
    double total = 0;
    for (int round = 0; round < kRounds; ++round) {
      const double ceiling =
          DecodeCeiling(meter_.Read(), num_sequences, kPrompt + round * kSteps + kSteps / 2);
      const double start = SecondsNow();
      for (int i = 0; i < kSteps; ++i) engine->Step();
      const double seconds = SecondsNow() - start;
      STRETTO_CHECK(engine->stats().num_finished == 0);
      total += seconds;
      speeds.push_back(num_sequences * kSteps / seconds);
      shares.push_back(ceiling * kSteps / seconds);
    }
    const EngineStats after = engine->stats();
    const std::string name = "decode, " + std::to_string(num_sequences) + " sequences";
    report_.Add(name, MedianOf(speeds), "tokens/s");
    report_.Add(name + ": share of ceiling", MedianOf(shares), "", target);
    report_.Add(name + ": share of sampling",
                (after.sample_seconds - before.sample_seconds) / total, "");
    report_.Add(name + ": share of scheduling and the rest",
                1 - (after.forward_seconds + after.sample_seconds - before.forward_seconds -
                     before.sample_seconds) /
                        total,
                "");
  }

  // Seconds of one step at the ceiling.
  double DecodeCeiling(const Ceilings& ceilings, int rows, int context) const {
    const ModelConfig& c = lab_.config();
    const double kv = static_cast<double>(c.num_layers * 2 * c.head_dim * context) * rows;
    const double operations =
        2 * (sizes_.layers + sizes_.lm_head) * rows + 2 * kv * static_cast<double>(c.num_heads);
    const double bytes =
        2 * (sizes_.layers + sizes_.lm_head) + 2 * kv * static_cast<double>(c.num_kv_heads);
    return ceilings.Seconds(operations, bytes);
  }

  void Prefill() {
    constexpr int kPrompt = 512;
    const ModelConfig& c = lab_.config();
    const auto engine = lab_.Engine({.prefix_cache = false});
    const double attention = 2.0 * kPrompt * (kPrompt + 1) *
                             static_cast<double>(c.num_layers * c.num_heads * c.head_dim);
    const double operations = 2 * sizes_.layers * kPrompt + 2 * sizes_.lm_head + attention;
    std::vector<double> speeds, shares;
    for (int round = 0; round < 7; ++round) {
      const Ceilings now = meter_.Read();
      const double seconds = SecondsToFinish(*engine, {MakeRequest(1, kPrompt, 1)});
      speeds.push_back(kPrompt / seconds);
      shares.push_back(now.Seconds(operations, 2 * (sizes_.layers + sizes_.lm_head)) / seconds);
    }
    report_.Add("prefill, 512 tokens", MedianOf(speeds), "tokens/s");
    report_.Add("prefill, 512 tokens: share of ceiling", MedianOf(shares), "", 0.65);
  }

  static double SecondsToFinish(InferenceEngine& engine, const std::vector<Request>& requests) {
    const double start = SecondsNow();
    for (const Request& r : requests) STRETTO_CHECK(engine.Submit(r).ok());
    while (engine.HasWork()) engine.Step();
    return SecondsNow() - start;
  }

  // 8 samples of a prompt of 512 tokens, 16 new tokens each: as a group, and as strangers.
  void Group() {
    std::vector<double> ratios;
    for (uint64_t round = 0; round < 5; ++round) {
      std::vector<Request> group;
      for (uint32_t i = 0; i < 8; ++i) {
        group.push_back(MakeRequest(7, 512, 16));
        group.back().id = i;
        group.back().draw.sample_index = i;
      }
      const auto sharing = lab_.Engine({}), alone = lab_.Engine({.prefix_cache = false});
      const double start = SecondsNow();
      STRETTO_CHECK(sharing->SubmitGroup(group).ok());
      while (sharing->HasWork()) sharing->Step();
      const double shared = SecondsNow() - start;
      ratios.push_back(SecondsToFinish(*alone, group) / shared);
    }
    report_.Add("group of 8, prompt 512: sharing is faster by", MedianOf(ratios), "x", 3.0);
  }

  // 200 requests whose lengths have a heavy tail, all there from the beginning: tokens a second
  // (prompts and completions at what each costs) against a load of the same number of tokens in
  // equal requests.
  void Mixed() {
    std::vector<Request> uneven, even;
    uint32_t state = 1;
    int64_t prompts = 0, completions = 0;
    for (uint64_t i = 0; i < 200; ++i) {
      const auto draw = [&state] {
        state = state * 1664525u + 1013904223u;
        return static_cast<double>(state >> 8) * 0x1p-24;
      };
      // Pareto with exponent 1.2.
      const auto length = [](double u, double least, double most) {
        return static_cast<int>(std::min(most, least * std::pow(1 - u, -1 / 1.2)));
      };
      uneven.push_back(MakeRequest(i, length(draw(), 6, 256), length(draw(), 6, 192)));
      prompts += static_cast<int64_t>(uneven.back().prompt_ids.size());
      completions += uneven.back().sampling.max_tokens;
    }
    for (uint64_t i = 0; i < 200; ++i) {
      even.push_back(
          MakeRequest(i, static_cast<int>(prompts / 200), static_cast<int>(completions / 200)));
    }
    std::vector<double> ratios;
    for (int round = 0; round < 5; ++round) {
      const auto engine = lab_.Engine({.prefix_cache = false});
      const double steady = SecondsToFinish(*engine, even);
      ratios.push_back(steady / SecondsToFinish(*engine, uneven));
    }
    report_.Add("200 requests of uneven lengths: share of the steady throughput", MedianOf(ratios),
                "", 0.85);
  }

  // Seconds of `num_steps` steps that decode.
  static double SecondsOfDecode(const GeneratorLab& lab,
                                const std::shared_ptr<const ModelWeights>& weights,
                                int num_sequences, int num_steps) {
    const auto engine = lab.Engine({.weights = weights});
    for (int i = 0; i < num_sequences; ++i) {
      STRETTO_CHECK(engine->Submit(MakeRequest(static_cast<uint64_t>(i), 16, num_steps + 2)).ok());
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
      const auto weights = lab_.RandomWeights(format);
      const std::string name = std::string(engine::Name(format)) + " weights";
      report_.Add(name + ": bytes, of bf16's",
                  static_cast<double>(MatrixBytes(*weights)) /
                      static_cast<double>(MatrixBytes(*lab_.weights())),
                  "");
      for (const int sequences : {1, 8, 32}) {
        std::vector<double> ratios;
        for (int turn = 0; turn < 5; ++turn) {
          const double plain = SecondsOfDecode(lab_, lab_.weights(), sequences, 16);
          ratios.push_back(plain / SecondsOfDecode(lab_, weights, sequences, 16));
        }
        std::sort(ratios.begin(), ratios.end());
        std::optional<double> target;
        if (format == engine::WeightFormat::kInt8 && sequences == 1) target = 1.5;
        report_.Add(name + ": decoding " + std::to_string(sequences) + " is faster by", ratios[2],
                    "x", target);
      }
    }
  }

  // What equal bits on every machine cost. Both read the same memory's worth of their own weights.
  void Numerics() {
    const GeneratorLab fast(num_threads_, "", false);
    report_.Add("fast numerics: differ on this machine", fast.profile() == lab_.profile() ? 0 : 1,
                "");
    const auto compare = [&](const std::string& name, const auto& seconds) {
      std::vector<double> ratios;
      for (int turn = 0; turn < 7; ++turn) {
        const double of_fast = seconds(fast);
        ratios.push_back(of_fast / seconds(lab_));
      }
      report_.Add("exact numerics, " + name + ": share of fast's speed", MedianOf(ratios), "",
                  1 / 1.05);
    };
    for (const int sequences : {1, 32}) {
      compare("decoding " + std::to_string(sequences), [&](const GeneratorLab& lab) {
        return SecondsOfDecode(lab, lab.weights(), sequences, 32);
      });
    }
    compare("prefill of 512", [](const GeneratorLab& lab) {
      const auto engine = lab.Engine({.prefix_cache = false});
      return SecondsToFinish(*engine, {MakeRequest(1, 512, 1)});
    });
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
    const auto plain = lab_.Engine({.prefix_cache = false});
    const auto speculated = lab_.Engine({.prefix_cache = false, .speculation = speculation});
    const auto compare = [&](const std::string& text, std::optional<double> target,
                             const engine::SamplingParams& sampling) {
      std::vector<double> seconds[2];
      for (int round = 0; round < 5; ++round) {
        for (InferenceEngine* engine : {plain.get(), speculated.get()}) {
          Request r = MakeRequest(static_cast<uint64_t>(round), 64, 96);
          r.sampling = sampling;
          r.sampling.max_tokens = 96;
          const double start = SecondsNow();
          STRETTO_CHECK(engine->Submit(r).ok());
          while (engine->HasWork()) engine->Step();
          seconds[engine == plain.get() ? 0 : 1].push_back(SecondsNow() - start);
        }
      }
      report_.Add("n-gram speculation, 1 sequence, " + text + ": faster by",
                  MedianOf(seconds[0]) / MedianOf(seconds[1]), "x", target);
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
  GeneratorLab lab_;
  CeilingMeter meter_;
  MatrixSizes sizes_;
};

// Answers lines "decode SEQUENCES PROMPT NEW" with "SECONDS-OF-PROMPTS SECONDS-OF-DECODING TOKENS".
int Work(int num_threads, const std::string& model_path) {
  const GeneratorLab lab(num_threads, model_path);
  const auto engine = lab.Engine({.prefix_cache = false});
  std::printf("ready\n");
  std::fflush(stdout);
  std::string word;
  int sequences = 0, prompt = 0, num_new = 0;
  while (std::cin >> word >> sequences >> prompt >> num_new) {
    const DecodeSeconds s = RunDecode(*engine, sequences, prompt, num_new);
    std::printf("%.6f %.6f %lld\n", s.prompt, s.decode, static_cast<long long>(s.tokens));
    std::fflush(stdout);
  }
  return 0;
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  CLI::App app{"Measures the inference engine", "bench_generator"};
  int num_threads = 2;
  std::string only, worker;
  app.add_option("--threads", num_threads, "threads of the device");
  app.add_option("--only", only,
                 "1, 8, 32, 64, prefill, group, mixed, quantized, numerics or ngram");
  app.add_option("--worker", worker, "a model that bench/rivals.py measures");
  CLI11_PARSE(app, argc, argv);
  if (!worker.empty()) return stretto::bench::Work(num_threads, worker);
  stretto::bench::GeneratorBench(num_threads).Run(only);
  return 0;
}
