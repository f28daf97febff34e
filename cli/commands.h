// The commands of `stretto`. Each adds its subcommand and flags to the application; its body runs
// after parsing and returns the process's exit code (0 done, 1 failed with a message on stderr, 2
// wrong use, 130 interrupted).
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}  // namespace CLI

namespace stretto::cli {
// The command that was chosen on the command line, set while parsing.
using Command = std::function<int()>;

void AddUpCommand(CLI::App& app, Command* chosen);
void AddStatusCommand(CLI::App& app, Command* chosen);
void AddExportCommand(CLI::App& app, Command* chosen);
void AddEvalCommand(CLI::App& app, Command* chosen);
void AddGenerateCommand(CLI::App& app, Command* chosen);
void AddReportCommand(CLI::App& app, Command* chosen);
void AddSftCommand(CLI::App& app, Command* chosen);
void AddDpoCommand(CLI::App& app, Command* chosen);
void AddRewardModelCommand(CLI::App& app, Command* chosen);

// Prints "stretto: message" to stderr for a failure, which output that could not be written is too;
// the exit code.
int Finish(const absl::Status& status);
}  // namespace stretto::cli
