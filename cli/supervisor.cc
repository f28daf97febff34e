#include "cli/supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status.h"
#include "services/common/exit_codes.h"

namespace stretto::cli {
namespace {
constexpr int64_t kQuickFailureNs = 10'000'000'000;  // ended within this: counts against it
constexpr int kMaxQuickFailures = 5;
constexpr int64_t kFirstPauseNs = 250'000'000;
constexpr int64_t kPauseAfterLeavingNs = 2'000'000'000;

std::string HowItEnded(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(wait_status), " (",
                        strsignal(WTERMSIG(wait_status)), ")");
  }
  return absl::StrCat("ended with exit code ", WEXITSTATUS(wait_status));
}

// In the child: output to the log, a process group of its own (a Ctrl-C is for the supervisor
// alone), death with the parent.
[[noreturn]] void RunChild(const std::vector<char*>& arguments, const char* log_file,
                           pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  const int log = ::open(log_file, O_WRONLY | O_CREAT | O_APPEND, 0644);
  const int nothing = ::open("/dev/null", O_RDONLY);
  if (log < 0 || nothing < 0) ::_exit(127);
  ::dup2(nothing, 0);
  ::dup2(log, 1);
  ::dup2(log, 2);
  ::execv(arguments[0], arguments.data());
  const char* reason = std::strerror(errno);
  (void)!::write(2, reason, std::strlen(reason));
  ::_exit(127);
}
}  // namespace

std::vector<std::vector<int>> ProcessorsOfGenerators(const std::vector<MemoryNode>& nodes,
                                                     int64_t num_generators, int64_t threads) {
  int64_t num_processors = 0;
  for (const MemoryNode& node : nodes) {
    num_processors += static_cast<int64_t>(node.processors.size());
  }
  if (nodes.size() < 2 || num_generators < 1 || (num_generators == 1 && threads == 0)) return {};
  const int64_t each = threads > 0 ? threads : num_processors / num_generators;
  if (each < 1 || each > num_processors / num_generators) return {};
  std::vector<std::vector<int>> result;
  const std::vector<int> counts(static_cast<size_t>(num_generators), static_cast<int>(each));
  for (const auto& share : ShareProcessors(nodes, counts)) {
    std::vector<int>& processors = result.emplace_back();
    for (const MemoryNode& node : share) {
      processors.insert(processors.end(), node.processors.begin(), node.processors.end());
    }
  }
  return result;
}

int64_t ThreadsOfTrainer(const RunConfig& run, int64_t num_processors) {
  const ClusterSection& cluster = run.cluster;
  if (cluster.trainer_threads > 0 || cluster.trainers == 1) return cluster.trainer_threads;
  return std::max<int64_t>(1, num_processors / cluster.trainers);
}

int64_t ThreadsBesideGenerators(const RunConfig& run, int64_t num_processors) {
  const ClusterSection& cluster = run.cluster;
  const int64_t of_generators = cluster.generators * cluster.generator_threads;
  if (run.schedule.max_staleness == 0 || of_generators == 0 || cluster.trainer_threads > 0) {
    return 0;
  }
  return std::max<int64_t>(1, (num_processors - of_generators) / cluster.trainers);
}

std::string TailOf(const std::string& path, int num_lines) {
  const auto content = Files::Real().ReadAll(path);
  if (!content.ok()) return "";
  size_t begin = content->size();
  while (begin > 0 && num_lines >= 0) {
    --begin;
    if ((*content)[begin] == '\n' && begin + 1 < content->size()) --num_lines;
  }
  if (num_lines < 0) begin += 1;
  return content->substr(std::min(begin, content->size()));
}

Supervisor::~Supervisor() {
  SignalAll(SIGKILL);
  WaitForAll(/*timeout_ms=*/2000);
}

absl::Status Supervisor::Start(ProcessSpec spec) {
  Process& process = processes_[spec.name];
  process.spec = std::move(spec);
  return Spawn(process);
}

absl::Status Supervisor::Spawn(Process& process) {
  std::vector<char*> arguments;
  for (std::string& argument : process.spec.command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start ", process.spec.name, ": ", std::strerror(errno)));
  }
  if (pid == 0) {
    RunOn(process.spec.processors);
    RunChild(arguments, process.spec.log_file.c_str(), parent);
  }
  process.pid = pid;
  process.started_ns = clock_.NowNs();
  process.restart_at_ns = 0;
  return absl::OkStatus();
}

absl::Status Supervisor::OnEnd(Process& process, int wait_status, std::vector<std::string>* notes) {
  process.pid = -1;
  process.exit_code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
  process.has_left = process.exit_code == 0 && !process.spec.may_end;
  if (!restarting_ || process.exit_code == services::kExitRunFailed ||
      (process.exit_code == 0 && process.spec.may_end)) {
    return absl::OkStatus();
  }
  if (process.has_left) {
    // Most likely the run ends, of which this process will hear in a moment.
    process.restart_at_ns = clock_.NowNs() + kPauseAfterLeavingNs;
    return absl::OkStatus();
  }
  const std::string what = absl::StrCat(process.spec.name, " ", HowItEnded(wait_status));
  const int64_t now = clock_.NowNs();
  const bool quick = now - process.started_ns < kQuickFailureNs;
  process.num_quick_failures = quick ? process.num_quick_failures + 1 : 0;
  const bool refused = process.exit_code == services::kExitWrongUse;
  if (refused || process.num_quick_failures >= kMaxQuickFailures) {
    return absl::AbortedError(absl::StrCat(what, refused ? "" : " again and again",
                                           "; the end of its log ", process.spec.log_file, ":\n",
                                           TailOf(process.spec.log_file, 8)));
  }
  process.restart_at_ns = now + (kFirstPauseNs << process.num_quick_failures);
  notes->push_back(absl::StrCat(what, "; starting it again"));
  return absl::OkStatus();
}

absl::Status Supervisor::Poll(std::vector<std::string>* notes) {
  for (auto& [name, process] : processes_) {
    int wait_status = 0;
    if (process.pid > 0 && ::waitpid(process.pid, &wait_status, WNOHANG) == process.pid) {
      RETURN_IF_ERROR(OnEnd(process, wait_status, notes));
    }
    if (restarting_ && process.restart_at_ns > 0 && clock_.NowNs() >= process.restart_at_ns) {
      if (process.has_left) {
        notes->push_back(absl::StrCat(process.spec.name,
                                      " has ended in order while the run goes on; starting it "
                                      "again"));
      }
      RETURN_IF_ERROR(Spawn(process));
    }
  }
  return absl::OkStatus();
}

void Supervisor::OnProgress() {
  for (auto& [name, process] : processes_) process.num_quick_failures = 0;
}

void Supervisor::Signal(const std::string& name, int signal) {
  const auto it = processes_.find(name);
  if (it != processes_.end() && it->second.pid > 0) ::kill(it->second.pid, signal);
}

void Supervisor::SignalAll(int signal) {
  for (const auto& [name, process] : processes_) {
    if (process.pid > 0) ::kill(process.pid, signal);
  }
}

int Supervisor::num_running() const {
  return static_cast<int>(std::count_if(processes_.begin(), processes_.end(),
                                        [](const auto& p) { return p.second.pid > 0; }));
}

bool Supervisor::IsRunning(const std::string& name) const {
  const auto it = processes_.find(name);
  return it != processes_.end() && it->second.pid > 0;
}

bool Supervisor::HasEnded(const std::string& name) const {
  const auto it = processes_.find(name);
  return it != processes_.end() && it->second.pid <= 0 &&
         (it->second.restart_at_ns == 0 || !restarting_);
}

int Supervisor::ExitCode(const std::string& name) const {
  const auto it = processes_.find(name);
  return it == processes_.end() ? -1 : it->second.exit_code;
}

void Supervisor::WaitForAll(int64_t timeout_ms) {
  restarting_ = false;
  const int64_t deadline = clock_.NowNs() + timeout_ms * 1'000'000;
  std::vector<std::string> notes;
  while (num_running() > 0) {
    if (clock_.NowNs() > deadline) SignalAll(SIGKILL);
    (void)Poll(&notes);
    clock_.SleepNs(20'000'000);
  }
}
}  // namespace stretto::cli
