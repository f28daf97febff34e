// What new versions cost a generator that is busy: 16 sequences of SmolLM2-135M's shape decode all
// the time while it takes a version after every so many tokens, as deltas over gRPC from a store in
// this process, with the parts that the real process has (GenerationLoop, PolicyHolder). Phases
// with and without versions take turns. A pause is seen from outside: the gap between two tokens of
// a sequence in which the swap falls, less the median gap.
#include <atomic>
#include <thread>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/philox.h"
#include "bench/model_folder.h"
#include "bench/report.h"
#include "bench/smollm2.h"
#include "grpcpp/impl/service_type.h"
#include "services/common/grpc_server.h"
#include "services/common/model_host.h"
#include "services/common/weights_rpc.h"
#include "services/generator/generation_loop.h"
#include "services/generator/policy_holder.h"

namespace stretto::bench {
namespace {
constexpr int kSequences = 16, kPromptTokens = 64, kNewTokens = 128;
// As a step at lr 1e-6 does, in the median of the weights.
constexpr double kShareChanged = 0.007;

struct Options {
  int threads = 2, steps = 12;
  int64_t tokens_per_step = 2048;  // 8 prompts × 8 completions of 32 tokens
  std::string folder = "build/bench/pause-model";
};

double Percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(p * static_cast<double>(values.size() - 1))];
}

// The trainer's side: versions that differ as little as those of real steps.
class Versions {
 public:
  explicit Versions(std::shared_ptr<const engine::WeightsVersion> first)
      : newest_(std::move(first)),
        provider_(services::ProvideStore(&store_)),
        service_(services::MakeWeightsService(provider_.get(), &metrics_)) {
    store_.Put(newest_);
    server_ =
        Must(services::GrpcServer::Start({.services = {service_.get()}, .metrics = &metrics_}));
  }
  // Costs as much as the weights have bytes; made while nothing is measured.
  std::shared_ptr<const engine::WeightsVersion> Next() {
    std::vector<engine::SharedBytes> tensors;
    PhiloxStream random(3, static_cast<uint64_t>(newest_->number));
    for (const engine::SharedBytes& tensor : newest_->tensors) {
      engine::Bytes bytes(tensor.span().begin(), tensor.span().end());
      const auto changes =
          static_cast<size_t>(kShareChanged * static_cast<double>(bytes.size()) / 2);
      for (size_t i = 0; i < changes; ++i) bytes[2 * random.Below(bytes.size() / 2)] ^= 1;
      tensors.emplace_back(std::move(bytes));
    }
    auto next = engine::MakeVersion(newest_->number + 1, newest_->manifest, std::move(tensors));
    store_.Put(next);
    store_.PutDelta(engine::EncodeVersionDelta(*newest_, *next));
    return newest_ = next;
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", server_->port()); }

 private:
  engine::WeightsStore store_{2};
  std::shared_ptr<const engine::WeightsVersion> newest_;
  services::Metrics metrics_;
  std::unique_ptr<services::WeightsProvider> provider_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<services::GrpcServer> server_;
};

// Sixteen callers that always have one sequence each under way, and note when tokens come.
class Callers {
 public:
  explicit Callers(services::GenerationLoop* loop) : loop_(loop) {
    for (int i = 0; i < kSequences; ++i) threads_.emplace_back([this, i] { Run(i); });
  }
  ~Callers() {
    stopping_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t tokens() const { return tokens_; }
  // Gaps between tokens of all sequences since the last call: when each began, and its length.
  std::vector<std::pair<double, double>> TakeGaps() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(gaps_, {});
  }

 private:
  void Run(int index) {
    for (uint64_t round = 0; !stopping_; ++round) {
      services::GenerationRequest request;
      // The first ones end at different times, and so do all that follow.
      request.sampling.max_tokens = round == 0 ? (index + 1) * kNewTokens / kSequences : kNewTokens;
      request.sampling.ignore_eos = true;
      // A prompt of its own each time, as in a run's steps: one that came again would be found in
      // the cache of prefixes, until a new version empties it.
      request.prompt_id = round * kSequences + static_cast<uint64_t>(index);
      for (uint64_t i = 0; i < kPromptTokens; ++i) {
        request.prompt_ids.push_back(
            static_cast<int32_t>((request.prompt_id * 7919 + i * 31) % 49152));
      }
      request.samples = {{.sample_index = 0, .forced_prefix = {}}};
      const auto generation = Must(loop_->Submit(std::move(request)));
      double last = 0;
      while (!generation->Done()) {
        for (const services::SampleUpdate& update : generation->Next(0, 100)) {
          const double now = SecondsNow();
          const auto count = static_cast<int64_t>(update.ids.size());
          tokens_ += count;
          if (count == 0) continue;
          if (last > 0) {
            absl::MutexLock lock(&mutex_);
            gaps_.emplace_back(last, now - last);
          }
          last = now;
        }
      }
    }
  }

  services::GenerationLoop* loop_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> tokens_{0};
  absl::Mutex mutex_;
  std::vector<std::pair<double, double>> gaps_;
  std::vector<std::thread> threads_;
};

struct Measured {
  double seconds_without = 0, seconds_with = 0;
  std::vector<double> swaps, pauses, prepares;
};

void WaitForTokens(const Callers& callers, int64_t count) {
  while (callers.tokens() < count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// One step without a new version, then one at whose beginning a version is announced, in turns.
Measured Measure(const Options& options, services::PolicyHolder& policy,
                 services::GenerationLoop& loop, Versions& versions, engine::SwapPolicy swap) {
  Measured m;
  Callers callers(&loop);
  WaitForTokens(callers, options.tokens_per_step);
  for (int step = 0; step < options.steps; ++step) {
    const auto next = versions.Next();
    callers.TakeGaps();
    double start = SecondsNow();
    int64_t begin = callers.tokens();
    WaitForTokens(callers, begin + options.tokens_per_step);
    m.seconds_without += SecondsNow() - start;
    std::vector<double> quiet;
    for (const auto& [at, gap] : callers.TakeGaps()) quiet.push_back(gap);
    start = SecondsNow();
    begin = callers.tokens();
    double swapped = 0;
    std::thread sync([&] {
      const auto info =
          Must(policy.Prepare(next->number, next->hash, "", {versions.address()}, {}));
      m.prepares.push_back(info.seconds);
      engine::ServedWeights weights = Must(policy.Get(next->number, next->hash));
      m.swaps.push_back(Must(loop.Swap(std::move(weights), swap, [] { return false; })));
      swapped = SecondsNow();
      policy.Committed(next->number, next->hash);
    });
    WaitForTokens(callers, begin + options.tokens_per_step);
    m.seconds_with += SecondsNow() - start;
    sync.join();
    double pause = 0;
    for (const auto& [at, gap] : callers.TakeGaps()) {
      if (at <= swapped && at + gap >= swapped) pause = std::max(pause, gap);
    }
    m.pauses.push_back(std::max(0.0, pause - Percentile(quiet, 0.5)));
  }
  return m;
}

void Run(const Options& options) {
  STRETTO_CHECK(WriteModelFolder(options.folder, SmolLm2Config()).ok());
  services::ModelHostOptions host_options;
  host_options.path = options.folder;
  host_options.threads = options.threads;
  host_options.prompts.chat_optional = true;
  const auto host = Must(services::OpenModelHost(host_options));
  const auto policy = Must(services::PolicyHolder::Create(host.get(), services::FetchWeights));
  policy->ReserveMemory();  // as a member of a run does
  Versions versions(Must(services::ReadInitialVersion(*host)));
  Report report("pause");
  for (const auto& [name, swap] : {std::pair("keep", engine::SwapPolicy::kKeep),
                                   {"finish", engine::SwapPolicy::kFinish},
                                   {"recompute", engine::SwapPolicy::kRecompute}}) {
    engine::EngineOptions engine_options;
    engine_options.kv_cache_bytes = int64_t{512} << 20;
    services::Metrics metrics;
    services::GenerationLoop loop(
        Must(engine::InferenceEngine::Create(*host->transformer, policy->CurrentWeights(),
                                             engine_options)),
        &metrics);
    const Measured m = Measure(options, *policy, loop, versions, swap);
    const std::string prefix = absl::StrCat(name, ": ");
    // What running rollouts do at the swap costs of itself: `finish` decodes two versions for a
    // while, `recompute` computes what has been written again. The promise is of the swap.
    const bool is_free = swap == engine::SwapPolicy::kKeep;
    const auto target = [&](double value) {
      return is_free ? std::optional<double>(value) : std::nullopt;
    };
    report.Add(prefix + "tokens/s without new versions",
               static_cast<double>(options.tokens_per_step * options.steps) / m.seconds_without,
               "tokens/s");
    report.Add(prefix + "with one every step, share of that", m.seconds_without / m.seconds_with,
               "", target(0.97));
    report.Add(prefix + "announced to ready, median", 1e3 * Percentile(m.prepares, 0.5), "ms");
    report.Add(prefix + "the loop stands still, p99", 1e3 * Percentile(m.swaps, 0.99), "ms", 20,
               true);
    report.Add(prefix + "gap of tokens at the swap over the median, p99",
               1e3 * Percentile(m.pauses, 0.99), "ms", target(20), true);
  }
  report.Write();
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  stretto::bench::Options options;
  CLI::App app("What new versions cost a generator that is busy");
  app.add_option("--threads", options.threads, "compute threads");
  app.add_option("--steps", options.steps, "versions for each way of swapping");
  app.add_option("--tokens-per-step", options.tokens_per_step, "between versions");
  CLI11_PARSE(app, argc, argv);
  stretto::bench::Run(options);
  return 0;
}
