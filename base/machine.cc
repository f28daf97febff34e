#include "base/machine.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace stretto {
namespace {
absl::StatusOr<int64_t> PhysicalBytes(Files& files, const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, files.ReadAll(path));
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    int64_t kib = 0;
    if (words.size() == 3 && words[0] == "MemTotal:" && absl::SimpleAtoi(words[1], &kib) &&
        kib > 0) {
      return kib * 1024;
    }
  }
  return absl::InternalError(absl::StrCat(path, ": no line 'MemTotal: … kB'"));
}

// The least of `bytes` and the limits of the group `path` and those above it, in files `name` below
// `folder`. A group that can't be seen here limits nothing that can be known ("max", which is no
// number, limits nothing either).
int64_t CutByGroups(Files& files, const std::string& folder, absl::string_view path,
                    absl::string_view name, int64_t bytes) {
  for (;;) {
    while (!path.empty() && path.back() == '/') path.remove_suffix(1);
    const auto text = files.ReadAll(absl::StrCat(folder, path, "/", name));
    int64_t limit = 0;
    if (text.ok() && absl::SimpleAtoi(*text, &limit) && limit > 0) bytes = std::min(bytes, limit);
    if (path.empty()) return bytes;
    path = path.substr(0, path.rfind('/'));
  }
}
}  // namespace

absl::StatusOr<int64_t> UsableMemoryBytes(Files& files, const std::string& root) {
  ASSIGN_OR_RETURN(int64_t bytes, PhysicalBytes(files, root + "/proc/meminfo"));
  const auto groups = files.ReadAll(root + "/proc/self/cgroup");
  if (!groups.ok()) return bytes;
  // Lines "hierarchy:controllers:path"; v2 has hierarchy 0 and no controllers.
  for (const absl::string_view line : absl::StrSplit(*groups, '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::string base = root + "/sys/fs/cgroup";
    if (fields[0] == "0" && fields[1].empty()) {
      bytes = CutByGroups(files, base, fields[2], "memory.max", bytes);
    }
    for (const absl::string_view controller : absl::StrSplit(fields[1], ',')) {
      if (controller != "memory") continue;
      bytes = CutByGroups(files, base + "/memory", fields[2], "memory.limit_in_bytes", bytes);
    }
  }
  return bytes;
}
}  // namespace stretto
