// `stretto`: the command line. One subcommand a file; see commands.h.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/flag_checks.h"
#include "base/printable.h"
#include "base/version.h"
#include "cli/commands.h"

namespace stretto::cli {
int Finish(const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "stretto: %s\n", PrintableLines(status.message()).c_str());
  if (absl::IsCancelled(status)) return 130;
  return absl::IsInvalidArgument(status) ? 2 : 1;
}
}  // namespace stretto::cli

int main(int argc, char** argv) {
  using namespace stretto::cli;
  CLI::App app("Post-trains language models with reinforcement learning.", "stretto");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("stretto ") + stretto::kVersion);
  Command chosen;
  AddUpCommand(app, &chosen);
  AddStatusCommand(app, &chosen);
  AddGenerateCommand(app, &chosen);
  AddEvalCommand(app, &chosen);
  AddExportCommand(app, &chosen);
  AddReportCommand(app, &chosen);
  AddSftCommand(app, &chosen);
  AddDpoCommand(app, &chosen);
  for (CLI::App* command : app.get_subcommands({})) {
    command->set_version_flag("--version", std::string("stretto ") + stretto::kVersion);
  }
  // What may be meant: texts of models' prompts and answers, and the empty override, which
  // has its own message.
  stretto::RefuseEmptyValues(app,
                             {"--prompt", "--system", "--choice", "--pattern", "--regex", "--set"});
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return chosen();
}
