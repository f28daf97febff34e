// `stretto status RUN_DIR`: how a run is doing, asked from its coordinator. `--stop`, `--pause`,
// `--resume` and `--checkpoint` control it.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "base/files.h"
#include "base/printable.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/coordinator_client.h"
#include "cli/progress.h"

namespace stretto::cli {
namespace {
constexpr int kNumTries = 4;

struct StatusFlags {
  std::string run_dir, address;
  bool stop = false, pause = false, resume = false, checkpoint = false;
};

void Print(const v1::RunStatus& status) {
  std::string notices;
  std::printf("%s: %s\n", status.run_id().c_str(), LiveLine(status).c_str());
  std::printf("%s\n", StepLine(status).c_str());
  if (status.eval_before() >= 0) {
    std::printf("held-out accuracy: %.1f %% before, %.1f %% last\n", 100 * status.eval_before(),
                100 * status.eval_last());
  }
  std::printf("%s\n", CheckpointLine(status).c_str());
  std::printf("%-16s %-10s %-22s %6s %8s %10s\n", "member", "state", "address", "epoch", "version",
              "in flight");
  for (const auto& m : status.members()) {
    if (m.notice().empty()) continue;
    notices += absl::StrCat(m.name(), ": ", m.notice(), "\n");
  }
  for (const auto& m : status.members()) {
    std::printf("%-16s %-10s %-22s %6llu %8lld %10u\n", m.name().c_str(), m.state().c_str(),
                m.address().c_str(), static_cast<unsigned long long>(m.member_epoch()),
                static_cast<long long>(m.version().number()), m.num_in_flight());
  }
  std::printf("%s", PrintableLines(notices).c_str());
}

// A run file alone may be anybody's; what stands beside it is the run's own.
bool HoldsRun(const std::string& folder) {
  Files& files = Files::Real();
  const auto has = [&](const char* name) { return files.Exists(JoinPath(folder, name)); };
  return has("run.yaml") && (has("run.sqlite") || has("members") || has("summary.json"));
}

// What a run that is not up has left behind.
absl::Status ShowEnded(const StatusFlags& flags) {
  Files& files = Files::Real();
  if (!HoldsRun(flags.run_dir)) {
    return absl::NotFoundError(
        absl::StrCat(flags.run_dir,
                     ": no run has been started there (no folder that `stretto up` has written)"));
  }
  if (flags.stop || flags.pause || flags.resume || flags.checkpoint) {
    return absl::FailedPreconditionError(
        absl::StrCat(flags.run_dir, ": the run is not up; `stretto up` resumes it"));
  }
  const auto text = files.ReadAll(JoinPath(flags.run_dir, "summary.json"));
  const auto summary =
      nlohmann::json::parse(text.value_or(""), nullptr, /*allow_exceptions=*/false);
  if (!summary.is_object()) {
    std::printf("The run is not up and has not come to an end; `stretto up` resumes it.\n");
    return absl::OkStatus();
  }
  std::printf("The run is not up. When it ended:\n");
  for (const char* key : {"run_id", "state", "detail", "steps", "rollouts", "seconds",
                          "eval_before", "eval_after", "checkpoint_path", "checkpoint_hash"}) {
    if (!summary.contains(key)) continue;
    const nlohmann::json& value = summary[key];
    if (value.is_number() && value.get<double>() < 0) continue;  // not measured
    const std::string shown = value.is_string() ? value.get<std::string>() : value.dump();
    std::printf("  %-16s %s\n", key, Printable(shown, 2000).c_str());
  }
  return absl::OkStatus();
}

std::string Canonical(const std::string& path) {
  std::error_code ec;
  const auto canonical = std::filesystem::weakly_canonical(path, ec);
  return ec ? path : canonical.string();
}

// A folder's member file outlives a coordinator that was killed, and the port may be another's now.
absl::Status CheckRun(const v1::RunStatus& status, const StatusFlags& flags) {
  if (flags.run_dir.empty() || Canonical(status.run_dir()) == Canonical(flags.run_dir)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(flags.run_dir, ": the run is not up (its coordinator's address ", flags.address,
                   " now serves the run in ", status.run_dir(), "); `stretto up` resumes it"));
}

absl::StatusOr<v1::RunStatus> Ask(CoordinatorClient& client, const StatusFlags& flags) {
  ASSIGN_OR_RETURN(v1::RunStatus status, client.Status());
  RETURN_IF_ERROR(CheckRun(status, flags));
  if (flags.stop) return client.Control(v1::ControlRunRequest::ACTION_STOP);
  if (flags.pause) return client.Control(v1::ControlRunRequest::ACTION_PAUSE);
  if (flags.resume) return client.Control(v1::ControlRunRequest::ACTION_RESUME);
  if (flags.checkpoint) return client.Control(v1::ControlRunRequest::ACTION_CHECKPOINT);
  return status;
}

bool MayAnswerLater(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) ||
         (absl::IsUnavailable(status) && !absl::StrContains(status.message(), "refused"));
}

absl::Status Status(StatusFlags flags) {
  if (flags.address.empty()) {
    const std::string path = JoinPath(flags.run_dir, "members/coordinator.json");
    const auto text = Files::Real().ReadAll(path);
    if (!text.ok()) return ShowEnded(flags);
    const auto json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("address") || !json["address"].is_string()) {
      return absl::DataLossError(absl::StrCat(path, ": expected an object with `address`"));
    }
    flags.address = json["address"].get<std::string>();
  }
  const auto client = ConnectToCoordinator(flags.address);
  absl::StatusOr<v1::RunStatus> status = Ask(*client, flags);
  // A machine under full load may take its time to answer.
  for (int i = 1; i < kNumTries && !status.ok() && MayAnswerLater(status.status()); ++i) {
    status = Ask(*client, flags);
  }
  if (absl::IsFailedPrecondition(status.status())) return status.status();
  if (!status.ok()) {
    return Annotate(
        status.status(),
        absl::StrCat("no coordinator answers at ", flags.address,
                     " (the run is not up, or too busy; its results are in its folder)"));
  }
  Print(*status);
  return absl::OkStatus();
}
}  // namespace

void AddStatusCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<StatusFlags>();
  CLI::App* command = app.add_subcommand("status", "Shows or controls a run.");
  auto* where = command->add_option_group("where");
  where->add_option("run_dir", flags->run_dir, "The run's folder");
  where->add_option("--coordinator", flags->address,
                    "host:port of its coordinator; default: found in the folder");
  where->require_option(1);
  auto* action = command->add_option_group("action");
  action->add_flag("--stop", flags->stop, "Checkpoint and end; the same run file resumes");
  action->add_flag("--pause", flags->pause, "Generate and train nothing until --resume");
  action->add_flag("--resume", flags->resume, "Go on after --pause");
  action->add_flag("--checkpoint", flags->checkpoint, "Write a checkpoint now");
  action->require_option(0, 1);
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Status(*flags)); }; });
}
}  // namespace stretto::cli
