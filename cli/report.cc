// `stretto report RUN_DIR`: one self-contained HTML page with the run's plots.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

#include "base/files.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/html_report.h"

namespace stretto::cli {
namespace {
absl::Status Report(const std::string& run_dir, std::string out) {
  std::error_code ec;
  const std::string folder = std::filesystem::absolute(run_dir, ec).lexically_normal().string();
  ASSIGN_OR_RETURN(const std::string page, RenderHtmlReport(Files::Real(), folder));
  if (out.empty()) out = JoinPath(folder, "report.html");
  RETURN_IF_ERROR(Files::Real().WriteAtomically(out, page));
  std::printf("Wrote %s\n", out.c_str());
  return absl::OkStatus();
}
}  // namespace

void AddReportCommand(CLI::App& app, Command* chosen) {
  auto run_dir = std::make_shared<std::string>(), out = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("report", "Writes an HTML page with a run's plots.");
  command->add_option("run_dir", *run_dir, "The run's folder")->required();
  command->add_option("--out", *out, "The file to write; default: report.html in the folder");
  command->callback([=] { *chosen = [=] { return Finish(Report(*run_dir, *out)); }; });
}
}  // namespace stretto::cli
