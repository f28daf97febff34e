// `stretto up run.yaml`: the four services of a run as processes of this machine. Prepares the
// run's folder, starts the processes, shows progress, and ends with the run; the same command
// resumes.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "base/flag_checks.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/coordinator_client.h"
#include "cli/local_model.h"
#include "cli/preflight.h"
#include "cli/progress.h"
#include "cli/supervisor.h"
#include "config/run_config.h"
#include "services/common/exit_codes.h"

namespace stretto::cli {
namespace {
constexpr char kCoordinator[] = "coordinator";
constexpr int64_t kPollNs = 100'000'000;
constexpr int64_t kStartTimeoutNs = 30'000'000'000;
// A process that runs but has not been heard of for so long (and six leases) hangs.
constexpr int64_t kHangNs = 30'000'000'000;
constexpr int64_t kLookNs = 5'000'000'000;  // who hangs is looked for more often than that
constexpr int64_t kHeardNs = 2'000'000'000;

std::atomic<int> g_interrupts{0};
void OnInterrupt(int) { g_interrupts.fetch_add(1); }

struct UpFlags {
  std::string run_file, log_level = "info";
  std::vector<std::string> overrides;
  bool plain = false;
};

// What must stay as it is when a run goes on: all but how long it lasts and where it runs.
RunConfig Essence(RunConfig config) {
  config.train.steps = 0;
  const TrainSection defaults;
  config.train.checkpoint_every = 0;
  config.train.checkpoint_mtbf_hours = defaults.checkpoint_mtbf_hours;
  config.train.checkpoint_kind = defaults.checkpoint_kind;
  config.train.checkpoint_chain = defaults.checkpoint_chain;
  config.train.checkpoint_failure = defaults.checkpoint_failure;
  config.train.keep_checkpoints = 0;
  config.train.max_group_replacements = 0;
  config.eval = {};
  const std::string backend = config.cluster.backend;
  config.cluster = {};
  config.cluster.backend = backend;
  config.run.dir.clear();
  return config;
}

// The folder's lock, held while this object lives.
class RunLock {
 public:
  ~RunLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  absl::Status Take(const std::string& run_dir) {
    const std::string path = JoinPath(run_dir, "lock");
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd_ < 0) return absl::UnavailableError(absl::StrCat("cannot open ", path));
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(run_dir, ": this run is up already; see `stretto status ", run_dir, "`"));
    }
    return absl::OkStatus();
  }

 private:
  int fd_ = -1;
};

// Whether the folder's run has come to results, so that other settings would make another run. The
// coordinator asks its journal the same and has the last word.
bool HasResults(const std::string& run_dir) {
  const auto metrics = Files::Real().ReadAll(JoinPath(run_dir, "metrics.jsonl"));
  const auto checkpoints = Files::Real().List(JoinPath(run_dir, "checkpoints"));
  return (metrics.ok() && !metrics->empty()) || (checkpoints.ok() && !checkpoints->empty());
}

// Writes the folder's run file, or checks that the folder's run is this one.
absl::Status PrepareFolder(const RunConfig& config) {
  Files& files = Files::Real();
  RETURN_IF_ERROR(files.MakeDirs(JoinPath(config.run.dir, "logs")));
  RETURN_IF_ERROR(files.MakeDirs(JoinPath(config.run.dir, "members")));
  const std::string path = RunFileOf(config.run.dir);
  if (files.Exists(path) && HasResults(config.run.dir)) {
    ASSIGN_OR_RETURN(const RunConfig old, LoadRunConfig(path));
    const std::string difference = FirstDifference(ToYaml(Essence(old)), ToYaml(Essence(config)));
    if (!difference.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          config.run.dir, " holds a run with other settings (", path, ": ", difference,
          "): give this one another folder (run.name or run.dir), or remove that one"));
    }
  }
  return files.WriteAtomically(path, ToYaml(config));
}

class UpCommand {
 public:
  UpCommand(RunConfig config, const UpFlags& flags)
      : config_(std::move(config)),
        flags_(flags),
        progress_(!flags.plain && ::isatty(STDOUT_FILENO) != 0),
        supervisor_(Clock::Real()) {}

  absl::Status Run(const std::vector<std::string>& notes) {
    RETURN_IF_ERROR(Files::Real().MakeDirs(config_.run.dir));
    RETURN_IF_ERROR(lock_.Take(config_.run.dir));
    RETURN_IF_ERROR(PrepareFolder(config_));
    struct sigaction action {};
    action.sa_handler = OnInterrupt;
    ::sigaction(SIGINT, &action, nullptr);
    ::sigaction(SIGTERM, &action, nullptr);
    // A closed terminal stops the run too, unless nohup has asked for the opposite.
    struct sigaction inherited {};
    ::sigaction(SIGHUP, nullptr, &inherited);
    if (inherited.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);
    ::signal(SIGPIPE, SIG_IGN);  // whoever read the progress may have gone
    progress_.Note(absl::StrCat("Run ", config_.run.name, " in ", config_.run.dir));
    for (const std::string& note : notes) progress_.Note(note);
    progress_.Follow(JoinPath(config_.run.dir, "metrics.jsonl"));
    RETURN_IF_ERROR(StartAll());
    absl::Status status = Watch();
    progress_.End();
    supervisor_.StopRestarting();
    if (!status.ok()) supervisor_.SignalAll(SIGTERM);
    supervisor_.WaitForAll(/*timeout_ms=*/10'000);
    if (status.ok()) PrintSummary();
    if (status.ok() && g_interrupts > 0 && !IsDone()) {
      return absl::CancelledError("stopped before its end; the same command goes on");
    }
    return status;
  }

 private:
  ProcessSpec Spec(const std::string& kind, const std::string& name, int64_t port_index,
                   int64_t num_threads) {
    std::error_code ec;
    const auto folder = std::filesystem::read_symlink("/proc/self/exe", ec).parent_path();
    const int64_t base = config_.cluster.base_port;
    ProcessSpec spec;
    spec.name = name;
    spec.log_file = JoinPath(config_.run.dir, absl::StrCat("logs/", name, ".log"));
    spec.command = {(folder / absl::StrCat("stretto-", kind)).string(),
                    "--run",
                    RunFileOf(config_.run.dir),
                    "--name",
                    name,
                    "--bind",
                    config_.cluster.bind,
                    "--port",
                    absl::StrCat(base > 0 ? base + port_index : 0),
                    "--threads",
                    absl::StrCat(num_threads),
                    "--log-level",
                    flags_.log_level,
                    absl::StrCat("--exit-with-parent=", ::getpid())};
    return spec;
  }

  absl::Status StartAll() {
    Files& files = Files::Real();
    const std::string member_file = JoinPath(config_.run.dir, "members/coordinator.json");
    RETURN_IF_ERROR(files.RemoveAll(member_file));
    ProcessSpec coordinator = Spec(kCoordinator, kCoordinator, 0, 0);
    coordinator.may_end = true;  // with the run
    RETURN_IF_ERROR(supervisor_.Start(std::move(coordinator)));
    int64_t port = 1;
    const auto num_processors = static_cast<int64_t>(AllowedProcessors().size());
    for (int64_t i = 0; i < config_.cluster.trainers; ++i) {
      ProcessSpec spec = Spec("trainer", absl::StrCat("trainer-", i), port++,
                              ThreadsOfTrainer(config_, num_processors));
      if (const int64_t beside = ThreadsBesideGenerators(config_, num_processors); beside > 0) {
        spec.command.insert(spec.command.end(),
                            {"--threads-beside-generators", absl::StrCat(beside)});
      }
      RETURN_IF_ERROR(supervisor_.Start(std::move(spec)));
    }
    for (int64_t i = 0; i < config_.cluster.scorers; ++i) {
      RETURN_IF_ERROR(supervisor_.Start(
          Spec("scorer", absl::StrCat("scorer-", i), port++, config_.cluster.scorer_threads)));
    }
    generator_processors_ =
        ProcessorsOfGenerators(MemoryNodes(files, AllowedProcessors()), config_.cluster.generators,
                               config_.cluster.generator_threads);
    for (int64_t i = 0; i < config_.cluster.generators; ++i) {
      RETURN_IF_ERROR(StartGenerator(i, port++));
    }
    return absl::OkStatus();
  }

  absl::Status StartGenerator(int64_t index, int64_t port_index) {
    ProcessSpec spec = Spec("generator", absl::StrCat("generator-", index), port_index,
                            config_.cluster.generator_threads);
    if (!generator_processors_.empty()) {
      spec.processors = generator_processors_[static_cast<size_t>(index)];
      progress_.Note(
          absl::StrCat(spec.name, " on processors ", FormatProcessorList(spec.processors)));
    }
    if (const int64_t http = config_.cluster.http_port; http >= 0) {
      // What an earlier process has left tells a port that may not be this one's.
      RETURN_IF_ERROR(Files::Real().RemoveAll(MemberFileOfGenerator(index)));
      spec.command.insert(spec.command.end(),
                          {"--http-port", absl::StrCat(http > 0 ? http + index : 0)});
    }
    return supervisor_.Start(std::move(spec));
  }
  std::string MemberFileOfGenerator(int64_t index) const {
    return JoinPath(config_.run.dir, absl::StrCat("members/generator-", index, ".json"));
  }

  // Says where the policy in training can be talked to, as generators come up, and again when one
  // that was started anew has another port.
  void NoteHttpAddresses() {
    if (config_.cluster.http_port < 0) return;
    for (int64_t i = 0; i < config_.cluster.generators; ++i) {
      const auto text = Files::Real().ReadAll(MemberFileOfGenerator(i));
      if (!text.ok()) continue;
      const auto json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
      if (!json.is_object() || !json.contains("http_port")) continue;
      if (!json["http_port"].is_number_integer()) continue;
      const int port = json["http_port"].get<int>();
      if (port < 0 || http_ports_[i] == port) continue;
      http_ports_[i] = port;
      progress_.Note(absl::StrCat("OpenAI-compatible API of generator-", i, " at http://",
                                  config_.cluster.bind, ":", port, "/v1"));
    }
  }

  // The coordinator's address now; it changes when the coordinator is started again.
  void Reconnect() {
    const auto text = Files::Real().ReadAll(JoinPath(config_.run.dir, "members/coordinator.json"));
    if (!text.ok()) return;
    const auto json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("address") || !json["address"].is_string()) return;
    const auto address = json["address"].get<std::string>();
    if (address == address_) return;
    address_ = address;
    client_ = ConnectToCoordinator(address);
  }

  // Until the run ends. OK: done, or stopped on request.
  absl::Status Watch() {
    int interrupts = 0;
    const int64_t start = Clock::Real().NowNs();
    for (;;) {
      std::vector<std::string> notes;
      const absl::Status alive = supervisor_.Poll(&notes);
      for (const std::string& note : notes) progress_.Note(note);
      RETURN_IF_ERROR(alive);
      if (g_interrupts > interrupts) {
        if (++interrupts > 1) return absl::CancelledError("stopped at once");
        supervisor_.StopRestarting();
        progress_.Note("Stopping; the same command resumes. Interrupt again to stop at once.");
        supervisor_.Signal(kCoordinator, SIGTERM);
      }
      Reconnect();
      NoteHttpAddresses();
      RETURN_IF_ERROR(ShowStatus());
      // It ends by itself only with the run, which may be before its last state has been seen here.
      if (supervisor_.HasEnded(kCoordinator)) return HowItEnded();
      KillWhoHangs();
      if (client_ == nullptr && Clock::Real().NowNs() - start > kStartTimeoutNs) {
        return absl::DeadlineExceededError(
            absl::StrCat("the coordinator does not start; the end of its log:\n",
                         TailOf(JoinPath(config_.run.dir, "logs/coordinator.log"), 8)));
      }
      Clock::Real().SleepNs(kPollNs);
    }
  }

  // An error if the run has failed.
  absl::Status ShowStatus() {
    const auto status =
        client_ == nullptr ? absl::UnavailableError("not there yet") : client_->Status();
    if (!status.ok()) {  // starting, or being restarted; the supervisor knows
      progress_.Wait("waiting for the coordinator");
      return absl::OkStatus();
    }
    heard_ns_[kCoordinator] = Clock::Real().NowNs();
    for (const auto& member : status->members()) {
      if (member.state() != "silent") heard_ns_[member.name()] = heard_ns_[kCoordinator];
    }
    progress_.Show(*status);
    if (status->step() > step_) supervisor_.OnProgress();
    step_ = status->step();
    if (status->state() == v1::RUN_STATE_FAILED) {
      supervisor_.StopRestarting();
      return absl::AbortedError(absl::StrCat("the run failed: ", status->detail()));
    }
    // The coordinator tells the members that the run has ended, and ends last.
    if (status->state() == v1::RUN_STATE_DONE) supervisor_.StopRestarting();
    return absl::OkStatus();
  }

  // A process that was stopped, or hangs in a system call, keeps its port and its place; killed, it
  // is started again.
  void KillWhoHangs() {
    const int64_t now = Clock::Real().NowNs();
    // Who was stopped itself, or starved, has heard nobody meanwhile.
    const int64_t absent_ns = looked_ns_ < 0 ? 0 : now - looked_ns_ - kLookNs;
    if (absent_ns > 0) {
      for (auto& [name, heard_ns] : heard_ns_) heard_ns += absent_ns;
    }
    looked_ns_ = now;
    // While the coordinator can't be asked, nothing is known of the others.
    heard_ns_.try_emplace(kCoordinator, now);
    const bool can_ask = now - heard_ns_[kCoordinator] < kHeardNs;
    const int64_t patience_ns = std::max(kHangNs, 6 * config_.cluster.lease_ms * 1'000'000);
    for (auto& [name, heard_ns] : heard_ns_) {
      const bool is_known = can_ask || name == kCoordinator;
      if (!is_known || !supervisor_.IsRunning(name)) heard_ns = now;
      if (now - heard_ns < patience_ns) continue;
      progress_.Note(absl::StrCat(name, " runs but has not been heard of for ",
                                  (now - heard_ns) / 1'000'000'000, " s; killing it"));
      supervisor_.Signal(name, SIGKILL);
      heard_ns = now;
    }
  }

  nlohmann::json Summary() const {
    const auto text = Files::Real().ReadAll(JoinPath(config_.run.dir, "summary.json"));
    return nlohmann::json::parse(text.value_or(""), nullptr, /*allow_exceptions=*/false);
  }

  bool IsDone() const {
    const nlohmann::json summary = Summary();
    return summary.is_object() && summary.value("state", "") == "done";
  }

  absl::Status HowItEnded() const {
    if (supervisor_.ExitCode(kCoordinator) != services::kExitRunFailed) return absl::OkStatus();
    const nlohmann::json summary = Summary();
    const bool has_detail = summary.is_object() && summary.value("state", "") == "failed" &&
                            summary.contains("detail") && summary["detail"].is_string();
    return absl::AbortedError(absl::StrCat(
        "the run failed: ", has_detail
                                ? summary["detail"].get<std::string>()
                                : TailOf(JoinPath(config_.run.dir, "logs/coordinator.log"), 8)));
  }

  void PrintSummary() {
    const nlohmann::json s = Summary();
    if (!s.is_object()) return;
    const auto number = [&s](const char* key) {
      return s.contains(key) && s[key].is_number() ? s[key].get<double>() : -1.0;
    };
    std::printf("%.0f steps in %.0f s, %.0f rollouts, %.0f tokens generated\n", number("steps"),
                number("seconds"), number("rollouts"), number("tokens_generated"));
    if (number("eval_before") >= 0 && number("eval_after") >= 0) {
      std::printf("held-out accuracy: %.1f %% before, %.1f %% after\n", 100 * number("eval_before"),
                  100 * number("eval_after"));
    }
    std::printf("largest log-prob difference between generator and trainer: %g\n",
                number("logprob_mismatch_max"));
    std::printf("peak memory of all processes: %.2f GB\n", number("peak_rss_bytes") / 1e9);
    if (s.contains("checkpoint_hash") && s["checkpoint_hash"].is_string()) {
      const auto hash = s["checkpoint_hash"].get<std::string>();
      const std::filesystem::path path = s.value("checkpoint_path", "");
      std::printf("%s\n",
                  hash.empty()
                      ? "no checkpoint was saved"
                      : absl::StrCat("checkpoint ", hash, ", ", path.filename().string()).c_str());
    }
  }

  RunConfig config_;
  UpFlags flags_;
  RunLock lock_;
  Progress progress_;
  Supervisor supervisor_;
  std::unique_ptr<CoordinatorClient> client_;
  int64_t step_ = 0;  // as told last
  std::string address_;
  std::vector<std::vector<int>> generator_processors_;  // by generator; empty: they share all
  std::map<int64_t, int> http_ports_;                   // by generator, as told
  int64_t looked_ns_ = -1;                              // for who hangs
  std::map<std::string, int64_t> heard_ns_;  // process → when it was last known to be alive
};

absl::Status Up(const UpFlags& flags) {
  ASSIGN_OR_RETURN(RunConfig config, LoadRunConfig(flags.run_file, flags.overrides));
  std::error_code ec;
  config.run.dir = std::filesystem::absolute(config.run.dir, ec).lexically_normal().string();
  std::vector<std::string> notes;
  RETURN_IF_ERROR(CheckRun(config, &notes));
  return UpCommand(std::move(config), flags).Run(notes);
}
}  // namespace

void AddUpCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<UpFlags>();
  CLI::App* command = app.add_subcommand(
      "up", "Runs a run file's services on this machine; the same command resumes.");
  command->add_option("run_file", flags->run_file, "The run file (YAML)")->required();
  command
      ->add_option("--set", flags->overrides,
                   "section.key=value, wins over the file (may be repeated)")
      ->take_all();
  command->add_flag("--plain", flags->plain, "Plain lines, as when the output is no terminal");
  command
      ->add_option("--log-level", flags->log_level,
                   "Of the services' logs: debug, info, warning or error")
      ->capture_default_str()
      ->check(OneOf({"debug", "info", "warning", "error"}));
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Up(*flags)); }; });
}
}  // namespace stretto::cli
