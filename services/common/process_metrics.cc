#include "services/common/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace stretto::services {
namespace {
std::string ReadFile(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The fields of /proc/self/stat from the third on: the second is a name in brackets, in which
// anything may stand.
std::vector<std::string> StatFields() {
  const std::string stat = ReadFile("/proc/self/stat");
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos) return {};
  return absl::StrSplit(stat.substr(name_end + 2), ' ');
}

// Of the machine's start, in seconds since 1970; 0: unknown.
int64_t BootSeconds() {
  const std::string stat = ReadFile("/proc/stat");
  int64_t seconds = 0;
  for (const absl::string_view line : absl::StrSplit(stat, '\n')) {
    if (line.substr(0, 6) == "btime " && absl::SimpleAtoi(line.substr(6), &seconds)) break;
  }
  return seconds;
}

int64_t NumDescriptors() {
  std::error_code error;
  std::filesystem::directory_iterator entries("/proc/self/fd", error);
  if (error) return 0;
  int64_t count = -1;  // the one that reads the folder
  for (; entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    ++count;
    if (error) break;
  }
  return count;
}

void Add(const char* name, const char* type, const char* help, double value, std::string* text) {
  absl::StrAppendFormat(text, "# HELP %s %s\n# TYPE %s %s\n%s %.15g\n", name, help, name, type,
                        name, value);
}
}  // namespace

std::string ProcessMetricsText() {
  std::string text;
  const std::vector<std::string> fields = StatFields();
  const auto field = [&](size_t number) {  // as proc(5) counts them
    double value = 0;
    const bool has = number >= 3 && number - 3 < fields.size();
    return has && absl::SimpleAtod(fields[number - 3], &value) ? value : 0.0;
  };
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  if (!fields.empty()) {
    Add("process_cpu_seconds_total", "counter", "CPU time of user and system.",
        (field(14) + field(15)) / ticks, &text);
    Add("process_resident_memory_bytes", "gauge", "Resident memory.",
        field(24) * static_cast<double>(sysconf(_SC_PAGESIZE)), &text);
    Add("process_virtual_memory_bytes", "gauge", "Virtual memory.", field(23), &text);
    if (const int64_t boot = BootSeconds(); boot > 0) {
      Add("process_start_time_seconds", "gauge", "Start of the process, since 1970.",
          static_cast<double>(boot) + field(22) / ticks, &text);
    }
  }
  Add("process_open_fds", "gauge", "Open descriptors.", static_cast<double>(NumDescriptors()),
      &text);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    Add("process_max_fds", "gauge", "Descriptors that may be open.",
        static_cast<double>(limit.rlim_cur), &text);
  }
  return text;
}
}  // namespace stretto::services
