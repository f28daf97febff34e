// How policy versions spread from one trainer to 1, 2, 4 and 8 generators over links of one rate.
// Started by bench/spread, which makes the network: as `bench_spread model FOLDER` it writes a
// model, as `bench_spread serve FOLDER ADDRESS PORT` it stands for the trainer (its store of
// versions and its Weights service), as `bench_spread drive MBIT TRAINER GENERATOR…` for the
// coordinator: the core plans, real generators are asked over gRPC. TRAINER and GENERATOR are
// ADDRESS:PORT.
#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/philox.h"
#include "bench/model_folder.h"
#include "bench/report.h"
#include "bench/smollm2.h"
#include "services/common/channel.h"
#include "services/common/grpc_server.h"
#include "services/common/model_host.h"
#include "services/common/weights_rpc.h"
#include "services/coordinator/core.h"
#include "stretto/v1/generator.grpc.pb.h"
#include "stretto/v1/weights.grpc.pb.h"

namespace stretto::bench {
namespace {
using services::Version;
constexpr int kCounts[] = {1, 2, 4, 8};
// For each count of generators: a snapshot, then deltas.
constexpr int64_t kVersionsEach = 6;
constexpr double kShareChanged = 0.3;

// 8 MB of weights and deltas of 0.6 MB: cheap to take, so that
// the links and not two processors for nine processes set the pace.
engine::ModelConfig Config() {
  engine::ModelConfig c = SmolLm2Config();
  c.vocab_size = 257;
  c.hidden_size = 256;
  c.intermediate_size = 1024;
  c.num_layers = 4;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  return c;
}

int WriteModel(const std::string& folder) {
  const absl::Status status = WriteModelFolder(folder, Config());
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

std::shared_ptr<const engine::WeightsVersion> Next(const engine::WeightsVersion& base) {
  std::vector<engine::SharedBytes> tensors;
  PhiloxStream random(11, static_cast<uint64_t>(base.number));
  for (const engine::SharedBytes& tensor : base.tensors) {
    engine::Bytes bytes(tensor.span().begin(), tensor.span().end());
    for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
      if (random.NextDouble() < kShareChanged) bytes[i] ^= 1;  // one step of the grid
    }
    tensors.emplace_back(std::move(bytes));
  }
  return engine::MakeVersion(base.number + 1, base.manifest, std::move(tensors));
}

int Serve(const std::string& folder, const std::string& bind, int port) {
  services::ModelHostOptions options;
  options.path = folder;
  options.threads = 1;
  options.prompts.chat_optional = true;
  const auto host = Must(services::OpenModelHost(options));
  engine::WeightsStore store(64);
  auto version = Must(services::ReadInitialVersion(*host));
  store.Put(version);
  for (const int count : kCounts) {
    (void)count;
    for (int64_t i = 0; i < kVersionsEach; ++i) {
      auto next = Next(*version);
      store.Put(next);
      if (i > 0) store.PutDelta(engine::EncodeVersionDelta(*version, *next));
      version = std::move(next);
    }
  }
  services::Metrics metrics;
  const auto provider = services::ProvideStore(&store);
  const auto service = services::MakeWeightsService(provider.get(), &metrics);
  const auto server = Must(services::GrpcServer::Start(
      {.bind = bind, .port = port, .services = {service.get()}, .metrics = &metrics}));
  std::printf("serving\n");
  std::fflush(stdout);
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

// What the trainer's machine has sent, as the switch counts it.
double TrainerBytes() {
  std::ifstream file("/sys/class/net/trainer/statistics/rx_bytes");
  double bytes = 0;
  file >> bytes;
  return bytes;
}

struct Outcome {
  // Until the bytes are at every generator; until it is ready everywhere, which includes that all
  // generators apply it on this one machine's processors.
  double arrived = 0, ready = 0;
  double trainer_bytes = 0, received = 0;
};

class Driver {
 public:
  Driver(std::string trainer, std::vector<std::string> generators)
      : trainer_(std::move(trainer)), generators_(std::move(generators)) {
    for (const std::string& address : generators_) {
      stubs_[address] = v1::Generator::NewStub(services::MakeChannel(address));
    }
    weights_ = v1::Weights::NewStub(services::MakeChannel(trainer_));
  }

  // Brings the first `count` generators, which hold `from`, to version `number`.
  Outcome Spread(int count, int64_t number) {
    const Version version = VersionOf(number);
    services::CoreOptions options;
    options.num_steps = 1000;
    services::RestoredRun restored;
    restored.versions = {{0, "base"}, {number, version.hash}};
    services::Core core(options, restored);
    for (int i = 0; i < count; ++i) {
      (void)Must(core.OnRegister(absl::StrCat("generator-", i), services::PoolKind::kGenerator,
                                 generators_[i], {0, "base"}, 0));
    }
    (void)Must(core.OnRegister("trainer", services::PoolKind::kTrainer, trainer_, version, 0));
    core.OnTick(0);
    const double bytes = TrainerBytes(), start = SecondsNow();
    Outcome outcome;
    std::vector<std::thread> calls;
    absl::Mutex mutex;
    for (const services::Command& command : core.TakeCommands()) {
      const auto* prepare = std::get_if<services::PrepareVersion>(&command);
      if (prepare == nullptr) continue;
      const int index = std::atoi(prepare->member.substr(prepare->member.size() - 1).c_str());
      calls.emplace_back([&, index, sources = prepare->sources] {
        const v1::PrepareWeightsResponse prepared = Prepare(generators_[index], version, sources);
        absl::MutexLock lock(&mutex);
        const auto received = static_cast<double>(prepared.bytes_received());
        outcome.received = std::max(outcome.received, received);
        outcome.arrived = std::max(outcome.arrived, prepared.transfer_seconds());
      });
    }
    STRETTO_CHECK(static_cast<int>(calls.size()) == count);
    for (std::thread& call : calls) call.join();
    outcome.ready = SecondsNow() - start;
    outcome.trainer_bytes = TrainerBytes() - bytes;
    for (int i = 0; i < count; ++i) Commit(generators_[i], version);
    return outcome;
  }

 private:
  Version VersionOf(int64_t number) {
    v1::GetManifestRequest request;
    request.mutable_version()->set_number(number);
    v1::WeightsManifest manifest;
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    Check(weights_->GetManifest(&context, request, &manifest));
    return {manifest.version().number(), manifest.version().hash()};
  }
  static void Check(const grpc::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "bench_spread: %s\n", status.error_message().c_str());
    std::exit(1);
  }
  v1::PrepareWeightsResponse Prepare(const std::string& generator, const Version& version,
                                     const std::vector<std::string>& sources) {
    v1::PrepareWeightsRequest request;
    request.mutable_version()->set_number(version.number);
    request.mutable_version()->set_hash(version.hash);
    for (const std::string& source : sources) request.add_sources(source);
    v1::PrepareWeightsResponse response;
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    Check(stubs_.at(generator)->PrepareWeights(&context, request, &response));
    return response;
  }
  void Commit(const std::string& generator, const Version& version) {
    v1::CommitWeightsRequest request;
    request.mutable_version()->set_number(version.number);
    request.mutable_version()->set_hash(version.hash);
    v1::CommitWeightsResponse response;
    grpc::ClientContext context;
    Check(stubs_.at(generator)->CommitWeights(&context, request, &response));
  }

  const std::string trainer_;
  const std::vector<std::string> generators_;
  std::map<std::string, std::unique_ptr<v1::Generator::Stub>> stubs_;
  std::unique_ptr<v1::Weights::Stub> weights_;
};

int Drive(double mbit, const std::string& trainer, std::vector<std::string> generators) {
  Driver driver(trainer, std::move(generators));
  Report report("spread");
  report.Add("rate of each link", mbit, "Mbit/s");
  std::map<int, Outcome> snapshots, deltas;
  int64_t number = 0;
  for (const int count : kCounts) {
    snapshots[count] = driver.Spread(count, ++number);
    std::vector<Outcome> outcomes;
    for (int64_t i = 1; i < kVersionsEach; ++i) outcomes.push_back(driver.Spread(count, ++number));
    std::sort(outcomes.begin(), outcomes.end(),
              [](const Outcome& a, const Outcome& b) { return a.arrived < b.arrived; });
    deltas[count] = outcomes[outcomes.size() / 2];
  }
  for (const auto& [what, outcomes] : {std::pair("snapshot", &snapshots), {"delta", &deltas}}) {
    report.Add(absl::StrCat(what, ": size"), outcomes->at(1).received * 1e-6, "MB");
    for (const int count : kCounts) {
      const std::string name = absl::StrCat(what, " to ", count);
      report.Add(name + ": bytes are everywhere after", outcomes->at(count).arrived, "s");
      report.Add(name + ": ready everywhere after", outcomes->at(count).ready, "s");
      report.Add(name + ": sent by the trainer", outcomes->at(count).trainer_bytes * 1e-6, "MB");
    }
    report.Add(absl::StrCat(what, ": time of 8 to time of 1"),
               outcomes->at(8).arrived / outcomes->at(1).arrived, "x", 1.5, true);
    report.Add(absl::StrCat(what, ": trainer's bytes for 8 to those for 1"),
               outcomes->at(8).trainer_bytes / outcomes->at(1).trainer_bytes, "x", 1.1, true);
  }
  return report.Write() ? 0 : 1;
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 2 && args[0] == "model") return stretto::bench::WriteModel(args[1]);
  if (args.size() == 4 && args[0] == "serve") {
    return stretto::bench::Serve(args[1], args[2], std::atoi(args[3].c_str()));
  }
  if (args.size() == 11 && args[0] == "drive") {
    return stretto::bench::Drive(std::atof(args[1].c_str()), args[2],
                                 {args.begin() + 3, args.end()});
  }
  std::fprintf(stderr, "bench_spread is started by bench/spread\n");
  return 2;
}
