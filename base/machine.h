// What the machine grants this process.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "base/files.h"

namespace stretto {
// Bytes of memory that this process may use: the machine's, cut by the limits of its control group
// and of all groups above it (cgroup v2 and v1, inside a container or not). Whether others use some
// of it is not asked. The kernel's files are read through `files`, each path behind `root`.
absl::StatusOr<int64_t> UsableMemoryBytes(Files& files, const std::string& root = "");
}  // namespace stretto
