#include "base/machine.h"

#include <sched.h>

#include <algorithm>
#include <iterator>
#include <numeric>

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

absl::StatusOr<std::vector<int>> ParseProcessorList(const std::string& text) {
  constexpr int kMax = 1 << 16;
  std::vector<int> processors;
  for (const absl::string_view part :
       absl::StrSplit(text, absl::ByAnyChar(",\n"), absl::SkipWhitespace())) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends[0], &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first || last >= kMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", text, "' is no list of processors, as 0-3,8"));
    }
    for (int p = first; p <= last; ++p) processors.push_back(p);
  }
  std::sort(processors.begin(), processors.end());
  processors.erase(std::unique(processors.begin(), processors.end()), processors.end());
  return processors;
}

std::string FormatProcessorList(const std::vector<int>& processors) {
  std::string text;
  for (size_t i = 0; i < processors.size();) {
    size_t end = i + 1;
    while (end < processors.size() && processors[end] == processors[end - 1] + 1) ++end;
    absl::StrAppend(&text, text.empty() ? "" : ",", processors[i]);
    if (end - i > 1) absl::StrAppend(&text, "-", processors[end - 1]);
    i = end;
  }
  return text;
}

std::vector<int> AllowedProcessors() {
  cpu_set_t set;
  std::vector<int> processors;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return processors;
  for (int p = 0; p < CPU_SETSIZE; ++p) {
    if (CPU_ISSET(p, &set)) processors.push_back(p);
  }
  return processors;
}

void RunOn(const std::vector<int>& processors) {
  if (processors.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int p : processors) {
    if (p < CPU_SETSIZE) CPU_SET(p, &set);
  }
  (void)sched_setaffinity(0, sizeof(set), &set);
}

std::vector<MemoryNode> MemoryNodes(Files& files, const std::vector<int>& allowed,
                                    const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node";
  const auto names = files.List(folder);
  std::vector<MemoryNode> nodes;
  size_t num_found = 0;
  for (const std::string& name : names.ok() ? *names : std::vector<std::string>()) {
    MemoryNode node;
    if (name.rfind("node", 0) != 0 || !absl::SimpleAtoi(name.substr(4), &node.id)) continue;
    const auto text = files.ReadAll(absl::StrCat(folder, "/", name, "/cpulist"));
    if (!text.ok()) continue;
    const auto listed = ParseProcessorList(*text);
    if (!listed.ok()) continue;
    std::set_intersection(listed->begin(), listed->end(), allowed.begin(), allowed.end(),
                          std::back_inserter(node.processors));
    num_found += node.processors.size();
    if (!node.processors.empty()) nodes.push_back(std::move(node));
  }
  // Nodes that don't make up the whole are of no use.
  if (num_found != allowed.size() || nodes.empty()) return {{0, allowed}};
  std::sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return nodes;
}

namespace {
// Takes `count` processors out of `nodes`.
std::vector<MemoryNode> TakeProcessors(std::vector<MemoryNode>& nodes, size_t count) {
  std::vector<MemoryNode> taken;
  while (count > 0) {
    // The smallest node that has room for the rest, else the largest.
    MemoryNode* best = nullptr;
    for (MemoryNode& node : nodes) {
      const size_t size = node.processors.size();
      if (size == 0) continue;
      if (best == nullptr) {
        best = &node;
        continue;
      }
      const size_t best_size = best->processors.size();
      const bool fits = size >= count, best_fits = best_size >= count;
      if (fits != best_fits ? fits : (fits ? size < best_size : size > best_size)) best = &node;
    }
    const size_t here = std::min(count, best->processors.size());
    const auto end = best->processors.begin() + static_cast<int64_t>(here);
    taken.push_back({best->id, {best->processors.begin(), end}});
    best->processors.erase(best->processors.begin(), end);
    count -= here;
  }
  std::sort(taken.begin(), taken.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return taken;
}
}  // namespace

std::vector<std::vector<MemoryNode>> ShareProcessors(std::vector<MemoryNode> nodes,
                                                     const std::vector<int>& counts) {
  size_t num_processors = 0;
  int64_t num_wanted = 0;
  for (const MemoryNode& node : nodes) num_processors += node.processors.size();
  for (const int count : counts) num_wanted += std::max(count, 0);
  std::vector<std::vector<MemoryNode>> shares(counts.size());
  if (num_wanted > static_cast<int64_t>(num_processors)) return {};
  // The largest first, which are the hardest to keep together.
  std::vector<size_t> order(counts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return counts[a] > counts[b]; });
  for (const size_t i : order) {
    shares[i] = TakeProcessors(nodes, static_cast<size_t>(std::max(counts[i], 0)));
  }
  return shares;
}
}  // namespace stretto
