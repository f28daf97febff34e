// The frame of every service process: flags, run file, logs, metrics, the gRPC server, membership,
// signals and an orderly end. A service implements Service; its main() is
//
//   int main(int argc, char** argv) { GeneratorProgram s; return ServiceMain(argc, argv, s); }
//
// Flags of every service:
//   --run FILE              the run file                 --set SECTION.KEY=VALUE  overrides it
//   --name NAME             member name, stable across restarts (default: the service's, "-0")
//   --bind ADDRESS          default 127.0.0.1            --port N                 0: a free one
//   --coordinator HOST:PORT default: read from <run dir>/members/coordinator.json
//   --metrics-port N        0: a free one, -1: none      --threads N              0: by run file
//   --log-level LEVEL       --log-file FILE              --grace-ms N             for running calls
//   --version               what it is, and ends
//   --exit-with-parent[=PID]  ends in order, within 10 s, when the process that started it ends;
//                           Ctrl-C is the parent's affair then
//
// Life: flags → logs → Start() → server → <run dir>/members/NAME.json → registration → … → SIGTERM,
// SIGINT, the run's end or a fatal fault → not serving, Leave, Drain(), server shutdown, Stop().
// A second signal ends the process at once, as does any signal before the server runs.
// Exit codes: 0 a wanted end, 1 a fault (the last log line says which), 2 wrong flags, run file,
// data or model, 3 the run has failed (of a coordinator: starting it again would change nothing),
// 130 a second signal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "services/common/exit_codes.h"
#include "services/common/fence.h"
#include "services/common/metrics.h"
#include "services/common/stop_signal.h"
#include "stretto/v1/common.pb.h"

namespace CLI {
class App;
}  // namespace CLI
namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
struct ServiceFlags {
  std::string run_file;
  std::vector<std::string> overrides;
  std::string name;
  std::string bind = "127.0.0.1";
  int port = 0;
  std::string coordinator;
  int metrics_port = 0;
  int threads = 0;
  std::string log_level = "info", log_file;
  int64_t grace_ms = 3000;
  std::string exit_with_parent;  // empty: no, "true": whichever parent, else its process id
};

// What a service is given at its start; all of it outlives the service's Stop().
struct ServiceContext {
  ServiceFlags flags;
  std::optional<RunConfig> run;  // absent without --run
  std::string run_dir;           // of the run file; empty without
  Metrics* metrics = nullptr;
  StopSignal* stop = nullptr;
  Fence* fence = nullptr;
};

// How a member presents itself to the coordinator.
struct Membership {
  v1::Pool pool = v1::POOL_UNSPECIFIED;
  v1::NumericProfile profile;
  std::function<v1::PolicyVersion()> version;     // any thread
  std::function<std::string()> notice = nullptr;  // MemberOptions::notice
};

class Service {
 public:
  virtual ~Service() = default;
  // "generator": names the process (with "stretto-") and, with "-0", the member by default.
  virtual std::string kind() const = 0;
  // What it does, for --help: a line.
  virtual std::string summary() const = 0;
  virtual void AddFlags(CLI::App&) {}
  // Loads what is needed to serve. Blocks. `context` lives until after Stop().
  virtual absl::Status Start(const ServiceContext& context) = 0;
  // After Start().
  virtual std::vector<grpc::Service*> grpc_services() = 0;
  // Absent: the process is no member of a pool.
  virtual std::optional<Membership> membership() { return std::nullopt; }
  // The server runs and is reached at `address`.
  virtual void OnServing(const std::string& address) { (void)address; }
  // The port of an HTTP interface of its own (for the member file), or -1.
  virtual int http_port() const { return -1; }
  // Takes no new work and makes running calls end soon; at most `timeout_ms`.
  virtual void Drain(int64_t timeout_ms) { (void)timeout_ms; }
  // Called when no call runs any more, also after a Start() or a server start that failed.
  virtual void Stop() {}
  // Of a process that ends because of `reason`.
  virtual int ExitCode(const absl::Status& reason) const { return reason.ok() ? 0 : kExitFault; }
};

// Runs the service; the process's exit code. Call it from the first thread, before others exist.
int ServiceMain(int argc, char** argv, Service& service);

// The address in <run_dir>/members/<name>.json: where that process of the run is, or was, reached.
absl::StatusOr<std::string> ReadMemberAddress(const std::string& run_dir, const std::string& name);
}  // namespace stretto::services
