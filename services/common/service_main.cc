#include "services/common/service_main.h"

#include <malloc.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <cstdlib>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <memory>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/numbers.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/flag_checks.h"
#include "base/last_words.h"
#include "base/status.h"
#include "base/version.h"
#include "nlohmann/json.hpp"
#include "services/common/grpc_server.h"
#include "services/common/listen.h"
#include "services/common/log.h"
#include "services/common/member_client.h"
#include "services/common/signals.h"

namespace stretto::services {
namespace {
constexpr char kAnyParent[] = "true";     // --exit-with-parent without an id
constexpr int64_t kLastAnswersMs = 1000;  // beyond the grace, for answers to be read

std::string MemberFile(const std::string& run_dir, const std::string& name) {
  return JoinPath(JoinPath(run_dir, "members"), absl::StrCat(name, ".json"));
}

// There is one coordinator; members of a pool are numbered.
std::string DefaultName(const std::string& kind) {
  return kind == "coordinator" ? kind : absl::StrCat(kind, "-0");
}

// An address that other processes can use: a server bound to every interface is reached by name.
std::string ReachableAddress(const std::string& bind, int port) {
  if (bind != "0.0.0.0" && bind != "[::]" && bind != "::") return absl::StrCat(bind, ":", port);
  char host[256] = {0};
  if (gethostname(host, sizeof(host) - 1) != 0) return absl::StrCat("127.0.0.1:", port);
  return absl::StrCat(host, ":", port);
}

absl::Status EndWithParent(const std::string& flag) {
  if (flag.empty()) return absl::OkStatus();
  int64_t parent = -1;
  if (flag != kAnyParent) STRETTO_CHECK(absl::SimpleAtoi(flag, &parent));
  if (prctl(PR_SET_PDEATHSIG, SIGHUP) != 0) {
    return absl::InternalError("--exit-with-parent: prctl(PR_SET_PDEATHSIG) failed");
  }
  // The parent may have ended before the call above; then its child has another parent by now.
  if (parent > 0 && getppid() != parent) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--exit-with-parent: process ", parent, " isn't this one's parent, or has ended already"));
  }
  return absl::OkStatus();
}

// A flag without a value reads as "true".
std::string CheckParent(const std::string& text) {
  return text == kAnyParent ? "" : IntegerIn(1, INT32_MAX)(text);
}

void AddCommonFlags(CLI::App& app, ServiceFlags& flags) {
  app.add_option("--run", flags.run_file, "run file (YAML); default: none");
  app.add_option("--set", flags.overrides,
                 "section.key=value, wins over the run file (may be repeated)");
  app.add_option("--name", flags.name,
                 "member name, stable across restarts; default: the service's with -0")
      ->check(CLI::Validator(
          [](const std::string& name) {
            const bool plain = name.size() <= 64 && !name.empty() &&
                               std::all_of(name.begin(), name.end(), [](unsigned char c) {
                                 return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
                               });
            return plain && name.front() != '.'
                       ? ""
                       : std::string(
                             "expected up to 64 letters, digits, '-', '_' and '.', "
                             "which doesn't come first");
          },
          "NAME"));
  app.add_option("--bind", flags.bind, "address to listen at")->capture_default_str();
  app.add_option("--port", flags.port, "port to listen at; 0: a free one")
      ->capture_default_str()
      ->check(IntegerIn(0, 65535));
  app.add_option("--coordinator", flags.coordinator,
                 "host:port; default: found in the run's folder");
  app.add_option("--metrics-port", flags.metrics_port, "port of /metrics; 0: a free one, -1: none")
      ->capture_default_str()
      ->check(IntegerIn(-1, 65535));
  app.add_option("--threads", flags.threads,
                 "compute threads; 0: by the run file, or what the machine grants")
      ->capture_default_str()
      ->check(IntegerIn(0, 1024));
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")
      ->capture_default_str()
      ->check(OneOf({"debug", "info", "warning", "error"}));
  app.add_option("--log-file", flags.log_file,
                 "a file that the log goes to as well as to stderr; default: none");
  app.add_option("--grace-ms", flags.grace_ms,
                 "milliseconds that running calls and requests have at the end")
      ->capture_default_str()
      ->check(IntegerIn(0, 3'600'000));
  app.add_flag("--exit-with-parent", flags.exit_with_parent,
               "end when the parent process ends; with =ID, when the parent of this id does")
      ->check(CLI::Validator(CheckParent, ""));
}

// glibc raises its threshold for blocks of their own up to 32 MB as such blocks are freed, and
// keeps what is freed in the arena of whichever thread allocated it. Calls run in many threads, and
// each new policy version has hundreds of blocks below 32 MB: without fixed limits the freed
// versions of dozens of arenas stay resident (gigabytes, measured).
void ReturnFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  mallopt(M_ARENA_MAX, 4);
}

// Whether what the service was given (run file, data, model) is wrong, so that it would fail again.
bool IsForGood(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) || absl::IsDataLoss(status) ||
         absl::IsFailedPrecondition(status) || absl::IsUnimplemented(status);
}

// One process, from the flags on.
class Process {
 public:
  explicit Process(Service& service) : service_(service), signals_(&stop_) {}

  // The exit code if there is nothing to run.
  std::optional<int> Parse(int argc, char** argv) {
    CLI::App app(service_.summary(), absl::StrCat("stretto-", service_.kind()));
    AddCommonFlags(app, context_.flags);
    app.set_version_flag("--version", absl::StrCat("stretto-", service_.kind(), " ", kVersion));
    service_.AddFlags(app);
    RefuseEmptyValues(app, {"--set"});
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      return app.exit(e) == 0 ? 0 : kExitWrongUse;
    }
    if (context_.flags.name.empty()) context_.flags.name = DefaultName(service_.kind());
    return std::nullopt;
  }

  int Run() {
    if (absl::Status status = Configure(); !status.ok()) {
      LogError(status.message());
      return kExitWrongUse;
    }
    absl::Status status = Serve();
    if (status.ok()) {
      stop_.Wait();
      status = stop_.reason();
      if (status.ok()) {
        LogInfo("stopping");
      } else {
        LogError("stopping: ", status.ToString());
      }
      End();
      return service_.ExitCode(status);
    }
    LogError(status.message());
    if (server_ != nullptr) server_->Shutdown(/*grace_ms=*/0);
    service_.Stop();  // its threads use what this object owns
    return IsForGood(status) ? kExitWrongUse : kExitFault;
  }

 private:
  absl::Status Configure() {
    const ServiceFlags& flags = context_.flags;
    RETURN_IF_ERROR(
        InitLogging({.name = flags.name, .level = flags.log_level, .file = flags.log_file}));
    RETURN_IF_ERROR(CheckBind(flags.bind));
    RETURN_IF_ERROR(EndWithParent(flags.exit_with_parent));
    if (!flags.exit_with_parent.empty()) signals_.IgnoreInterrupt();
    if (!flags.run_file.empty()) {
      ASSIGN_OR_RETURN(context_.run, LoadRunConfig(flags.run_file, flags.overrides));
      context_.run_dir = context_.run->run.dir;
    } else if (!flags.overrides.empty()) {
      return absl::InvalidArgumentError("--set needs --run");
    }
    context_.metrics = &metrics_;
    context_.stop = &stop_;
    context_.fence = &fence_;
    return absl::OkStatus();
  }

  absl::Status Serve() {
    const ServiceFlags& flags = context_.flags;
    const int64_t start_ns = Clock::Real().NowNs();
    RETURN_IF_ERROR(service_.Start(context_));
    int metrics_port = -1;
    if (flags.metrics_port >= 0) {
      ASSIGN_OR_RETURN(metrics_port, metrics_.Serve(flags.bind, flags.metrics_port));
    }
    signals_.SetGraceful();
    ASSIGN_OR_RETURN(server_, GrpcServer::Start({.bind = flags.bind,
                                                 .port = flags.port,
                                                 .services = service_.grpc_services(),
                                                 .metrics = &metrics_}));
    address_ = ReachableAddress(flags.bind, server_->port());
    service_.OnServing(address_);
    RETURN_IF_ERROR(WriteMemberFile(metrics_port));
    LogInfo("serving gRPC at ", address_,
            metrics_port >= 0 ? absl::StrCat(", metrics at port ", metrics_port) : "",
            ", ready after ", (Clock::Real().NowNs() - start_ns) / 1000000, " ms");
    Join();
    return absl::OkStatus();
  }

  absl::Status WriteMemberFile(int metrics_port) {
    if (context_.run_dir.empty()) return absl::OkStatus();
    Files& files = Files::Real();
    RETURN_IF_ERROR(files.MakeDirs(JoinPath(context_.run_dir, "members")));
    const nlohmann::json json = {{"name", context_.flags.name},
                                 {"kind", service_.kind()},
                                 {"address", address_},
                                 {"pid", getpid()},
                                 {"metrics_port", metrics_port},
                                 {"http_port", service_.http_port()},
                                 {"log_file", context_.flags.log_file},
                                 {"started_us", Clock::Real().WallUs()}};
    return files.WriteAtomically(MemberFile(context_.run_dir, context_.flags.name),
                                 json.dump(2) + "\n");
  }

  void Join() {
    std::optional<Membership> membership = service_.membership();
    if (!membership.has_value()) return;
    const ServiceFlags& flags = context_.flags;
    if (flags.coordinator.empty() && context_.run_dir.empty()) {
      LogInfo("no run file and no --coordinator: serving without a coordinator");
      return;
    }
    MemberOptions options;
    options.pool = membership->pool;
    options.name = flags.name;
    options.address = address_;
    options.config_hash = context_.run.has_value() ? context_.run->hash : "";
    options.profile = membership->profile;
    options.version = membership->version;
    options.notice = membership->notice;
    options.coordinator_address = [coordinator = flags.coordinator,
                                   dir = context_.run_dir]() -> absl::StatusOr<std::string> {
      if (!coordinator.empty()) return coordinator;
      return ReadMemberAddress(dir, "coordinator");
    };
    member_ = MemberClient::Start(std::move(options), &fence_, &stop_);
  }

  void End() {
    server_->SetServing(false);
    if (member_ != nullptr) member_->Leave();
    const int64_t grace_ms = context_.flags.grace_ms;
    const int64_t end_ns = Clock::Real().NowNs() + grace_ms * 1'000'000;
    service_.Drain(grace_ms);
    // What Drain() has ended is still to be told to its callers.
    const int64_t left_ms = (end_ns - Clock::Real().NowNs()) / 1'000'000;
    server_->Shutdown(std::max(left_ms, std::min(grace_ms, kLastAnswersMs)));
    service_.Stop();
    if (!context_.run_dir.empty()) {
      (void)Files::Real().RemoveAll(MemberFile(context_.run_dir, context_.flags.name));
    }
    LogInfo("stopped");
  }

  Service& service_;
  StopSignal stop_;
  Signals signals_;
  Metrics metrics_;
  Fence fence_;
  ServiceContext context_;
  std::unique_ptr<GrpcServer> server_;
  std::string address_;
  std::unique_ptr<MemberClient> member_;
};
}  // namespace

int ServiceMain(int argc, char** argv, Service& service) {
  // What gRPC says of itself in its own format is said by ours, in the words of flags and
  // addresses.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  // Abseil as distributions build it looks for cycles at every lock that is taken, which costs each
  // process a few percent of its time. Tests look.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  ReturnFreedMemory();
  static const auto* program = new std::string(absl::StrCat("stretto-", service.kind()));
  InstallLastWords(program->c_str(), kExitWrongUse);
  Process process(service);
  if (const std::optional<int> code = process.Parse(argc, argv); code.has_value()) return *code;
  return process.Run();
}

absl::StatusOr<std::string> ReadMemberAddress(const std::string& run_dir, const std::string& name) {
  const std::string path = MemberFile(run_dir, name);
  ASSIGN_OR_RETURN(const std::string text, Files::Real().ReadAll(path));
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("address") || !json["address"].is_string()) {
    return absl::DataLossError(absl::StrCat(path, ": not a member file (no address)"));
  }
  return json["address"].get<std::string>();
}
}  // namespace stretto::services
