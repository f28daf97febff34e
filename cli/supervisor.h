// Starts a run's services as local processes and keeps them alive: a process that ends without
// being asked is started again after a pause that grows; one that keeps failing, while the run
// makes no progress, ends the run. A coordinator whose run has failed (exit code 3) isn't started
// again. Output goes to <run dir>/logs/NAME.log. Children end with this process. Single-threaded;
// call Poll() often.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/machine.h"
#include "config/run_config.h"

namespace stretto::cli {
struct ProcessSpec {
  std::string name;                  // of the member
  std::vector<std::string> command;  // program and arguments
  std::string log_file;
  std::vector<int> processors = {};  // it may run on; empty: on all of this process's
  bool may_end = false;              // in order; others are started again after that too
};

// On a machine with several memory nodes each generator gets processors of its own, in as few nodes
// as possible; with `threads` 0 all get equally many. Empty: nothing is to be shared out (one node,
// one generator that takes all, or fewer processors than threads).
std::vector<std::vector<int>> ProcessorsOfGenerators(const std::vector<MemoryNode>& nodes,
                                                     int64_t num_generators, int64_t threads);

// Compute threads of each trainer where the run file gives it none: trainers compute at the same
// time, each on its share of the processors. 0: all that the machine grants.
int64_t ThreadsOfTrainer(const RunConfig& run, int64_t num_processors);
// While generators that have threads of their own compute meanwhile (max_staleness): its share of
// what those leave. 0: all of its threads.
int64_t ThreadsBesideGenerators(const RunConfig& run, int64_t num_processors);

class Supervisor {
 public:
  explicit Supervisor(Clock& clock) : clock_(clock) {}
  ~Supervisor();  // kills what is left
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  absl::Status Start(ProcessSpec spec);
  // Reaps and restarts. An error is final: a process keeps failing, or refused its arguments; the
  // message has the last lines of its log. `notes` receives what a person should know.
  absl::Status Poll(std::vector<std::string>* notes);
  // The run has come further: whoever failed before may be killed by others, and fails anew.
  void OnProgress();
  // No process is started again from now on.
  void StopRestarting() { restarting_ = false; }
  void Signal(const std::string& name, int signal);
  void SignalAll(int signal);
  int num_running() const;
  bool IsRunning(const std::string& name) const;
  // Whether it was started, has ended and is not to be started again.
  bool HasEnded(const std::string& name) const;
  // Of its last end; -1: it was killed, or has never ended.
  int ExitCode(const std::string& name) const;
  // Waits until all have ended; what is left after `timeout_ms` is killed.
  void WaitForAll(int64_t timeout_ms);

 private:
  struct Process {
    ProcessSpec spec;
    pid_t pid = -1;
    int64_t started_ns = 0, restart_at_ns = 0;
    int num_quick_failures = 0;
    int exit_code = -1;
    bool has_left = false;  // ended in order, before its time
  };
  absl::Status Spawn(Process& process);
  absl::Status OnEnd(Process& process, int wait_status, std::vector<std::string>* notes);

  Clock& clock_;
  bool restarting_ = true;
  std::map<std::string, Process> processes_;
};

// The last `num_lines` lines of a file, for messages; empty if it can't be read.
std::string TailOf(const std::string& path, int num_lines);
}  // namespace stretto::cli
