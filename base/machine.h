// What the machine grants this process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/files.h"

namespace stretto {
// Bytes of memory that this process may use: the machine's, cut by the limits of its control group
// and of all groups above it (cgroup v2 and v1, inside a container or not). Whether others use some
// of it is not asked. The kernel's files are read through `files`, each path behind `root`.
absl::StatusOr<int64_t> UsableMemoryBytes(Files& files, const std::string& root = "");

// Processors by the memory (NUMA) node that they are next to.
struct MemoryNode {
  int id = 0;
  std::vector<int> processors;  // ascending
};
// Where the processors `allowed` are; nodes without one are left out, ascending by id. A kernel
// that tells nothing of nodes has one, with all of them. Files as above.
std::vector<MemoryNode> MemoryNodes(Files& files, const std::vector<int>& allowed,
                                    const std::string& root = "");
// The processors that the calling thread may run on (its affinity mask, which is cut by the control
// group's cpuset), ascending. Empty: the kernel doesn't say.
std::vector<int> AllowedProcessors();

// Lets the calling thread, and those that it makes later, run on these processors alone. Nothing
// for an empty list, or where the kernel refuses.
void RunOn(const std::vector<int>& processors);

// Disjoint processors for members that want counts[i] each: a member lies within as few nodes as
// possible, and in the node that it fills best. Empty when there are not enough for all. A function
// of the arguments alone.
std::vector<std::vector<MemoryNode>> ShareProcessors(std::vector<MemoryNode> nodes,
                                                     const std::vector<int>& counts);

// "0-3,8" ↔ {0, 1, 2, 3, 8}: the kernel's lists. InvalidArgument: not one.
absl::StatusOr<std::vector<int>> ParseProcessorList(const std::string& text);
std::string FormatProcessorList(const std::vector<int>& processors);
}  // namespace stretto
