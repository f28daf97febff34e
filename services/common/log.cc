#include "services/common/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_replace.h"
#include "base/printable.h"
#include "spdlog/sinks/basic_file_sink.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace stretto::services {
namespace {
spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

absl::StatusOr<spdlog::level::level_enum> ParseLevel(const std::string& text) {
  if (text == "debug") return spdlog::level::debug;
  if (text == "info") return spdlog::level::info;
  if (text == "warning") return spdlog::level::warn;
  if (text == "error") return spdlog::level::err;
  return absl::InvalidArgumentError(
      absl::StrCat("log level '", text, "': expected debug, info, warning or error"));
}

std::shared_ptr<spdlog::logger> MakeLogger(const std::string& name,
                                           std::vector<spdlog::sink_ptr> sinks) {
  auto logger = std::make_shared<spdlog::logger>(name, sinks.begin(), sinks.end());
  // Times are UTC, so that the lines of different machines can be put side by side.
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %L %n] %v", spdlog::pattern_time_type::utc);
  logger->flush_on(spdlog::level::info);
  return logger;
}

absl::StatusOr<spdlog::sink_ptr> OpenFile(const std::string& path) {
  const auto refuse = [&path](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("--log-file ", path, ": ", why));
  };
  std::error_code error, ignored;
  const auto kind = std::filesystem::status(path, ignored).type();
  if (kind == std::filesystem::file_type::directory) return refuse("is a folder, expected a file");
  if (kind == std::filesystem::file_type::fifo) {
    return refuse("is a pipe, whose reader would have to be waited for; expected a file");
  }
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (!folder.empty() && !std::filesystem::is_directory(folder, ignored)) {
    return refuse(absl::StrCat("its folder can't be made: ", error.message()));
  }
  try {
    return std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
  } catch (const std::exception&) {
    return refuse(absl::StrCat("can't be written: ", std::strerror(errno)));
  }
}

// Replaced once by InitLogging, before other threads are started.
std::shared_ptr<spdlog::logger>& Logger() {
  static auto* logger = new std::shared_ptr<spdlog::logger>(
      MakeLogger("stretto", {std::make_shared<spdlog::sinks::stderr_sink_mt>()}));
  return *logger;
}
}  // namespace

absl::Status InitLogging(const LogOptions& options) {
  std::string text = options.level;
  const char* environment = std::getenv("STRETTO_LOG");
  if (text.empty()) text = environment != nullptr && *environment != '\0' ? environment : "info";
  auto level = ParseLevel(text);
  if (!level.ok()) return level.status();

  std::vector<spdlog::sink_ptr> sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>()};
  if (!options.file.empty()) {
    auto sink = OpenFile(options.file);
    if (!sink.ok()) return sink.status();
    sinks.push_back(*std::move(sink));
  }
  Logger() = MakeLogger(options.name, std::move(sinks));
  Logger()->set_level(*level);
  // A full disk ends neither the process nor what stderr is told. Once: the disk stays full.
  Logger()->set_error_handler([file = options.file](const std::string& what) {
    static std::atomic<bool> told = false;
    if (told.exchange(true)) return;
    const std::string line = absl::StrCat("cannot write the log file ", file, " (", what,
                                          "): lines are lost there, this stderr has them\n");
    (void)!write(STDERR_FILENO, line.data(), line.size());
  });
  return absl::OkStatus();
}

bool LogEnabled(LogLevel level) { return Logger()->should_log(ToSpdlog(level)); }

void Log(LogLevel level, absl::string_view message) {
  const std::string line =
      PrintableLines(absl::StrReplaceAll(message, {{"\r\n", " "}, {"\n", " "}}));
  Logger()->log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
}
}  // namespace stretto::services
