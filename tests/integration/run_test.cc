// Whole runs on real processes: coordinator, trainer, scorer and two generators.
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/philox.h"
#include "nlohmann/json.hpp"
#include "stretto/v1/coordinator.grpc.pb.h"
#include "tests/integration/client.h"
#include "tests/integration/reward_server.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
using nlohmann::json;
constexpr int64_t kRunTimeoutMs = 120000;

TestRunOptions Options() {
  TestRunOptions options;
  options.rewards = "rewards: [{type: regex, name: letter, pattern: '[a-e]'}]\n";
  return options;
}

// The processes of one run; each can be killed and started again.
class Cluster {
 public:
  explicit Cluster(std::vector<std::string> sets = {}, TestRunOptions options = Options())
      : run_(options) {
    sets.insert(sets.begin(), {"train.steps=5", "train.checkpoint_every=2", "eval.every=2",
                               absl::StrCat("data.eval=", run_.File("train.jsonl")),
                               "eval.max_prompts=5", "cluster.lease_ms=1000"});
    for (const std::string& set : sets) {
      arguments_.push_back("--set");
      arguments_.push_back(set);
    }
  }

  const std::vector<std::pair<std::string, std::string>>& Members() const {
    static const std::vector<std::pair<std::string, std::string>> members = {
        {"coordinator", "coordinator"},
        {"trainer", "trainer-0"},
        {"scorer", "scorer-0"},
        {"generator", "generator-0"},
        {"generator", "generator-1"}};
    return members;
  }
  void Start(const std::string& kind, const std::string& name,
             const std::vector<std::string>& more = {}) {
    processes_.erase(name);
    std::vector<std::string> arguments = arguments_;
    arguments.insert(arguments.end(), more.begin(), more.end());
    processes_.emplace(name, run_.Start(kind, name, 0, std::move(arguments)));
  }
  void StartAll() {
    for (const auto& [kind, name] : Members()) Start(kind, name);
  }
  void KillAll() {
    for (auto& [name, process] : processes_) process.Kill();
  }
  Process& Of(const std::string& name) { return processes_.at(name); }
  // Starts again whoever has ended.
  void Revive() {
    for (const auto& [kind, name] : Members()) {
      if (!processes_.at(name).IsRunning()) Start(kind, name);
    }
  }

  // Waits for the end of the run; its summary. The journal is checked from outside.
  json Finish() {
    INFO(Of("coordinator").Log());
    REQUIRE(Of("coordinator").WaitForExit(kRunTimeoutMs) == 0);
    CheckJournal();
    return Summary();
  }
  void CheckJournal() const {
    const std::string found = run_.File("violations");
    const std::string command =
        absl::StrCat("sqlite3 -readonly ", run_.run_dir(), "/run.sqlite < ", STRETTO_SOURCE_DIR,
                     "/tests/integration/exactly_once.sql > ", found);
    REQUIRE(std::system(command.c_str()) == 0);
    const std::string text = Files::Real().ReadAll(found).value_or("");
    INFO(text);
    CHECK(text.find("\nviolations|0\n") != std::string::npos);
  }
  json Summary() const {
    const auto text = Files::Real().ReadAll(run_.run_dir() + "/summary.json");
    return text.ok() ? json::parse(*text, nullptr, false) : json();
  }
  v1::RunStatus Status() {
    v1::RunStatus status;
    const std::string address = run_.MemberField("coordinator", "address");
    if (address.empty()) return status;
    CallContext context(2000);
    (void)Connect<v1::Coordinator>(address)->GetRunStatus(&context, {}, &status);
    return status;
  }
  const TestRun& run() const { return run_; }

 private:
  const TestRun run_;
  std::vector<std::string> arguments_;
  std::map<std::string, Process> processes_;
};

std::string UndisturbedHash() {
  static const std::string hash = [] {
    Cluster cluster;
    cluster.StartAll();
    return cluster.Finish()["checkpoint_hash"].get<std::string>();
  }();
  return hash;
}

TEST_CASE("a run trains, evaluates, checkpoints and ends") {
  Cluster cluster;
  cluster.StartAll();
  const json summary = cluster.Finish();
  INFO(summary.dump(2));
  CHECK(summary["state"] == "done");
  CHECK(summary["steps"] == 5);
  CHECK(summary["rollouts"] == 5 * 2 * 4);
  CHECK(summary["tokens_generated"] > 100);
  CHECK(summary["logprob_mismatch_max"] == 0.0);
  CHECK(summary["peak_rss_bytes"] > 10'000'000);
  CHECK(summary["evals"].size() == 4);  // 0, 2, 4 and 5
  CHECK(summary["eval_before"] >= 0);
  CHECK(summary["eval_after"] >= 0);
  CHECK(summary["last_step"]["ratio_max"] == 1.0);
  const std::string hash = summary["checkpoint_hash"];
  CHECK(hash.size() >= 16);
  // Members hear that the run has ended.
  for (const char* name : {"trainer-0", "scorer-0", "generator-0", "generator-1"}) {
    INFO(name << ": " << cluster.Of(name).Log());
    CHECK(cluster.Of(name).WaitForExit(10000) == 0);
  }
  // Bits do not depend on who computed when.
  CHECK(hash == UndisturbedHash());
  // The run is over: started again, it ends at once and says the same.
  cluster.Start("coordinator", "coordinator");
  CHECK(cluster.Finish()["checkpoint_hash"] == hash);
}

TEST_CASE("a run killed at any moment and started again ends with the same bits") {
  const uint64_t seed = Seed();
  INFO("seed " << seed);
  PhiloxStream random(seed, 11);
  Cluster cluster;
  for (int i = 0; i < 4; ++i) {
    cluster.StartAll();
    SleepMs(700 + static_cast<int64_t>(random.Below(1500)));
    cluster.KillAll();
  }
  cluster.StartAll();
  const json summary = cluster.Finish();
  CHECK(summary["checkpoint_hash"] == UndisturbedHash());
  CHECK(summary["rollouts"] == 5 * 2 * 4);
  CHECK(summary["logprob_mismatch_max"] == 0.0);
}

TEST_CASE("bits do not depend on the members' numbers of threads, nor on where the optimizer is") {
  Cluster cluster({"cluster.offload_optimizer=true"});
  int threads = 1;
  for (const auto& [kind, name] : cluster.Members()) {
    cluster.Start(kind, name, {"--threads", absl::StrCat(threads++)});  // generators: 4 and 5
  }
  const json summary = cluster.Finish();
  CHECK(summary["logprob_mismatch_max"] == 0.0);
  CHECK(summary["checkpoint_hash"] == UndisturbedHash());
}

TEST_CASE("single members die and come back") {
  const uint64_t seed = Seed();
  INFO("seed " << seed);
  PhiloxStream random(seed, 12);
  Cluster cluster({"train.steps=8"});
  cluster.StartAll();
  const auto& members = cluster.Members();
  for (int i = 0; i < 6 && cluster.Of("coordinator").IsRunning(); ++i) {
    SleepMs(300 + static_cast<int64_t>(random.Below(500)));
    const auto& [kind, name] = members[random.Below(members.size())];
    if (!cluster.Of("coordinator").IsRunning()) break;
    cluster.Of(name).Kill();
    cluster.Revive();
  }
  const json summary = cluster.Finish();
  Cluster control({"train.steps=8"});
  control.StartAll();
  CHECK(control.Finish()["checkpoint_hash"] == summary["checkpoint_hash"]);
}

TEST_CASE("a stop checkpoints, and the same command goes on to the same bits") {
  Cluster cluster;
  cluster.StartAll();
  REQUIRE(Eventually([&] { return cluster.Status().step() >= 1; }, 60000));
  cluster.Of("coordinator").Signal(SIGTERM);
  INFO(cluster.Of("coordinator").Log());
  REQUIRE(cluster.Of("coordinator").WaitForExit(60000) == 0);
  CHECK(cluster.Summary()["state"] != "failed");
  for (const auto& [kind, name] : cluster.Members()) {
    if (kind != "coordinator") CHECK(cluster.Of(name).WaitForExit(10000) == 0);
  }
  cluster.StartAll();
  CHECK(cluster.Finish()["checkpoint_hash"] == UndisturbedHash());
}

TEST_CASE("with staleness the next step is generated during training, through a kill") {
  Cluster cluster({"schedule.max_staleness=1", "train.steps=6"});
  cluster.StartAll();
  REQUIRE(Eventually([&] { return cluster.Status().step() >= 2; }, 60000));
  cluster.KillAll();
  cluster.StartAll();
  const json summary = cluster.Finish();
  CHECK(summary["steps"] == 6);
  CHECK(summary["rollouts"] == 6 * 2 * 4);
  CHECK(summary["logprob_mismatch_max"] == 0.0);
  CHECK(summary["last_step"]["staleness_max"] <= 1);
}

TEST_CASE("a KL term, and prompts that are too long") {
  TestRunOptions options = Options();
  options.algorithm = "algorithm: {kl_coef: 0.05}\n";
  Cluster cluster({"data.max_prompt_tokens=4"}, options);  // lines of two digits are too long
  cluster.StartAll();
  const json summary = cluster.Finish();
  CHECK(summary["steps"] == 5);
  CHECK(summary["rejected_groups"] > 0);
  CHECK(summary["last_step"].contains("kl"));
}

TEST_CASE("a run of an adapter has no mismatch, goes on after a kill, and exports the adapter") {
  TestRunOptions options = Options();
  options.algorithm = "algorithm: {kl_coef: 0.05}\n";  // the reference is the base
  const std::vector<std::string> sets = {"lora.rank=4", "train.lr=0.01",
                                         "train.optimizer_state=8bit"};
  Cluster cluster(sets, options), killed(sets, options);
  cluster.StartAll();
  const json summary = cluster.Finish();
  CHECK(summary["logprob_mismatch_max"] == 0.0);
  CHECK(summary["last_step"]["kl"] > 0);
  CHECK(summary["checkpoint_hash"] != UndisturbedHash());
  killed.StartAll();
  SleepMs(1500);
  killed.KillAll();
  killed.StartAll();
  CHECK(killed.Finish()["checkpoint_hash"] == summary["checkpoint_hash"]);

  // As `stretto up` leaves it in the run's folder.
  const auto file = Files::Real().ReadAll(cluster.run().run_file());
  REQUIRE(file.ok());
  REQUIRE(Files::Real().WriteAtomically(cluster.run().run_dir() + "/run.yaml", *file).ok());
  const auto run = [&](const std::vector<std::string>& arguments) {
    Process process("stretto", arguments, cluster.run().File("stretto.log"));
    const int code = process.WaitForExit(kRunTimeoutMs);
    INFO(process.Log());
    CHECK(code == 0);
  };
  const std::string adapter = cluster.run().File("adapter");
  run({"export", "--adapter", cluster.run().run_dir(), adapter});
  CHECK(Files::Real().Exists(adapter + "/adapter_config.json"));
  CHECK(Files::Real().Exists(adapter + "/adapter_model.safetensors"));
  run({"export", cluster.run().run_dir(), cluster.run().File("merged")});
  run({"generate", "--run", cluster.run().run_dir(), "--prompt", "1+1=", "--max-tokens", "4"});
  // An older checkpoint, where the newest is damaged, say.
  const std::string latest = summary["checkpoint_path"].get<std::string>();
  run({"generate", "--run", cluster.run().run_dir(), "--checkpoint", latest, "--prompt", "1+1="});
  Process none(
      "stretto",
      {"generate", "--run", cluster.run().run_dir(), "--checkpoint", "12345", "--prompt", "1"},
      cluster.run().File("none.log"));
  CHECK(none.WaitForExit(kRunTimeoutMs) == 1);
  CHECK(none.Log().find("12345") != std::string::npos);
  // Another run begins where this one ended: with its adapter.
  Cluster next({"lora.adapter=" + adapter, "train.steps=1"}, options);
  next.StartAll();
  const json after = next.Finish();
  CHECK(after["logprob_mismatch_max"] == 0.0);
  CHECK(after["last_step"]["kl"] > 0);
}

// Each setting trains, and differently; the adaptive KL coefficient is part of what a killed run
// goes on with.
TEST_CASE("other objectives, and an adaptive KL coefficient that goes on where it was") {
  TestRunOptions rloo = Options();
  rloo.algorithm =
      "algorithm: {name: rloo, kl_coef: 0.05, kl_estimator: k2, "
      "kl_target: 0.0001, kl_horizon: 8}\n";
  TestRunOptions gspo = Options();
  gspo.algorithm =
      "algorithm: {name: grpo, advantage_scale: batch_std, ratio_level: sequence, dual_clip: 3, "
      "loss_denominator: constant, importance_cap: 2, entropy_coef: 0.01}\n";
  const std::vector<std::string> sets = {"train.steps=4", "train.checkpoint_every=1",
                                         "eval.before=false", "eval.every=0"};
  Cluster undisturbed(sets, rloo);
  undisturbed.StartAll();
  const json expected = undisturbed.Finish();
  CHECK(expected["steps"] == 4);
  const double kl_coef = expected["last_step"]["kl_coef"];
  CHECK(kl_coef > 0);
  CHECK(kl_coef != 0.05);

  Cluster killed(sets, rloo);
  killed.StartAll();
  REQUIRE(Eventually([&] { return killed.Status().step() >= 2; }, 60000));
  killed.KillAll();
  killed.StartAll();
  const json summary = killed.Finish();
  CHECK(summary["checkpoint_hash"] == expected["checkpoint_hash"]);
  CHECK(summary["last_step"]["kl_coef"] == kl_coef);

  Cluster other(sets, gspo);
  other.StartAll();
  const json of_other = other.Finish();
  CHECK(of_other["steps"] == 4);
  CHECK(of_other["last_step"]["ratio_max"] == 1.0);
  CHECK(of_other["last_step"].contains("clip_fraction_dual"));
  CHECK(of_other["last_step"]["importance_weight_mean"] == 1.0);
  CHECK(of_other["logprob_mismatch_max"] == 0.0);
}

TEST_CASE("ppo with a critic goes on after a kill to the same bits") {
  TestRunOptions ppo = Options();
  ppo.algorithm =
      "algorithm: {name: ppo, kl_coef: 0.05, kl_target: 0.0001, kl_horizon: 8}\n"
      "ppo: {epochs: 2, mini_batch: 3, critic_lr: 1.0e-4, critic_warmup_steps: 1}\n";
  const std::vector<std::string> sets = {"train.steps=4", "train.checkpoint_every=1",
                                         "eval.before=false", "eval.every=0"};
  Cluster undisturbed(sets, ppo);
  undisturbed.StartAll();
  const json expected = undisturbed.Finish();
  CHECK(expected["steps"] == 4);
  CHECK(expected["logprob_mismatch_max"] == 0.0);
  const json& last = expected["last_step"];
  CHECK(last["updates"] == 2 * 3);  // 8 completions: 3, 3 and 2
  CHECK(last["skipped_updates"] == 0);
  CHECK(last["value_loss"] > 0);
  CHECK(last["critic_grad_norm"] > 0);
  CHECK(last.contains("explained_variance"));
  CHECK(last["kl_coef"] != 0.05);

  Cluster killed(sets, ppo);
  killed.StartAll();
  REQUIRE(Eventually([&] { return killed.Status().step() >= 2; }, 60000));
  killed.KillAll();
  killed.StartAll();
  const json summary = killed.Finish();
  CHECK(summary["checkpoint_hash"] == expected["checkpoint_hash"]);
  CHECK(summary["last_step"]["kl_coef"] == last["kl_coef"]);
  CHECK(summary["last_step"]["value_loss"] == last["value_loss"]);
}

TEST_CASE("a run waits for its reward service, and says so") {
  const int port = FreePort();
  TestRunOptions options = Options();
  options.rewards = absl::StrCat("rewards: [{type: service, address: '127.0.0.1:", port,
                                 "', timeout_ms: 2000, max_attempts: 1}]\n");
  Cluster cluster({"train.max_group_replacements=1", "train.steps=2"}, options);
  cluster.StartAll();
  REQUIRE(Eventually(
      [&] { return cluster.Status().detail().find("reward service") != std::string::npos; },
      60000));
  CHECK(cluster.Status().state() == v1::RUN_STATE_WAITING);
  {
    RewardServer server(port);
    REQUIRE(server.is_up());
    REQUIRE(Eventually([&] { return cluster.Status().step() >= 1; }, 60000));
  }
  // Down again: no group is given up, none is scored 0.
  Clock::Real().SleepNs(1'000'000'000);
  RewardServer server(port);
  REQUIRE(server.is_up());
  const json summary = cluster.Finish();
  CHECK(summary["steps"] == 2);
  CHECK(summary["rejected_groups"] == 0);
}

TEST_CASE("generators that are drained by hand are told of; taking work again, they end the run") {
  Cluster cluster;
  cluster.StartAll();
  const auto drain = [&](const std::string& name, bool end) {
    const std::string address = cluster.run().WaitForAddress(cluster.Of(name), name);
    v1::DrainRequest request;
    request.set_end(end);
    v1::DrainResponse response;
    CallContext context;
    CHECK(Connect<v1::Generator>(address)->Drain(&context, request, &response).ok());
  };
  for (const char* name : {"generator-0", "generator-1"}) drain(name, /*end=*/false);
  const auto num_drained = [&] {
    int count = 0;
    const v1::RunStatus status = cluster.Status();
    for (const auto& member : status.members()) {
      count += member.notice().find("is draining") != std::string::npos ? 1 : 0;
    }
    return count;
  };
  CHECK(Eventually([&] { return num_drained() == 2; }, 60000));
  drain("generator-1", /*end=*/true);
  CHECK(cluster.Finish()["checkpoint_hash"] == UndisturbedHash());
}

TEST_CASE("a reward that cannot be had is never a score of zero") {
  const int port = FreePort();
  TestRunOptions options = Options();
  options.rewards = absl::StrCat("rewards: [{type: service, address: '127.0.0.1:", port,
                                 "', timeout_ms: 2000, max_attempts: 1}]\n");
  RewardServer server(port);
  REQUIRE(server.is_up());
  server.mode = RewardServer::Mode::kNan;
  Cluster cluster({"train.max_group_replacements=4", "eval.before=false"}, options);
  cluster.StartAll();
  CHECK(cluster.Of("coordinator").WaitForExit(60000) == 3);
  const json summary = cluster.Summary();
  INFO(summary.dump(2));
  CHECK(summary["state"] == "failed");
  CHECK(summary["steps"] == 0);
  CHECK(summary["rejected_groups"] == 5);
  CHECK(summary["detail"].get<std::string>().find("no reward") != std::string::npos);
}

TEST_CASE("a run that must replace too much stops and says why") {
  Cluster cluster({"data.max_prompt_tokens=1", "train.max_group_replacements=3"});
  cluster.StartAll();
  CHECK(cluster.Of("coordinator").WaitForExit(60000) == 3);
  const json summary = cluster.Summary();
  CHECK(summary["state"] == "failed");
  const std::string detail = summary["detail"];
  INFO(detail);
  CHECK(detail.find("groups had to be replaced") != std::string::npos);
  CHECK(detail.find("tokens, more than the allowed 1") != std::string::npos);
}
}  // namespace
}  // namespace stretto::testing
