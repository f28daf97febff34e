// `stretto`: the command line. One subcommand a file; see commands.h.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/flag_checks.h"
#include "base/last_words.h"
#include "base/printable.h"
#include "base/version.h"
#include "cli/commands.h"

namespace stretto::cli {
namespace {
// What was printed has got to where it goes: a full disk is an error.
absl::Status FlushOutput() {
  std::cout.flush();
  errno = 0;
  const bool is_flushed = std::fflush(stdout) == 0 && std::cout.good();
  if (is_flushed && std::ferror(stdout) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write the output", errno != 0 ? ": " : "",
                                             errno != 0 ? strerror(errno) : ""));
}

// Letters to insert, remove or replace.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// " (did you mean NAME?)", or nothing where none is near.
std::string Nearest(const std::string& typed, const std::vector<std::string>& names) {
  std::string nearest;
  size_t least = std::max<size_t>(typed.size() / 3, 1) + 1;
  for (const std::string& name : names) {
    const size_t distance = EditDistance(typed, name);
    if (distance >= least) continue;
    least = distance;
    nearest = name;
  }
  return nearest.empty() ? "" : absl::StrCat(" (did you mean ", nearest, "?)");
}

void AddFlagNames(const CLI::App& app, std::vector<std::string>* names) {
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    for (const std::string& name : option->get_lnames()) names->push_back("--" + name);
  }
  for (const CLI::App* group : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (group->get_name().empty()) AddFlagNames(*group, names);
  }
}

// What was typed and nobody knows, in its order; empty: all is known.
std::string UnknownWords(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const CLI::App& reader = chosen.empty() ? app : *chosen.front();
  const std::vector<std::string> words =
      chosen.empty() ? app.remaining() : app.remaining(/*recurse=*/true);
  if (words.empty()) return "";
  std::vector<std::string> names;
  if (chosen.empty() && words.front()[0] != '-') {
    for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
    return absl::StrCat("no command '", words.front(), "'", Nearest(words.front(), names),
                        ": expected one of ", absl::StrJoin(names, ", "));
  }
  AddFlagNames(reader, &names);
  const std::string flag = words.front().substr(0, words.front().find('='));
  return absl::StrCat("not expected: ", absl::StrJoin(words, " "), Nearest(flag, names));
}

int ExitOfParsing(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() != 0) {
    const std::string unknown = UnknownWords(app);
    if (unknown.empty()) {
      (void)app.exit(error);
    } else {
      std::fprintf(stderr, "stretto: %s\nRun with --help for more information.\n",
                   PrintableLines(unknown).c_str());
    }
    return 2;
  }
  (void)app.exit(error);  // writes help, or the version
  return Finish(absl::OkStatus());
}
}  // namespace

int Finish(const absl::Status& status) {
  const absl::Status ended = status.ok() ? FlushOutput() : status;
  if (ended.ok()) return 0;
  std::fprintf(stderr, "stretto: %s\n", PrintableLines(ended.message()).c_str());
  if (absl::IsCancelled(ended)) return 130;
  return absl::IsInvalidArgument(ended) ? 2 : 1;
}
}  // namespace stretto::cli

int main(int argc, char** argv) {
  using namespace stretto::cli;
  stretto::InstallLastWords("stretto", /*file_exit_code=*/1);
  (void)signal(SIGXFSZ, SIG_IGN);  // a write says that the file has become too large
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
  AddRewardModelCommand(app, &chosen);
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
    return ExitOfParsing(app, error);
  }
  return chosen();
}
