// Settings of runs with several trainers, as their tests share them.
#pragma once

#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <string>
#include <vector>

namespace stretto::testing {
inline constexpr char kLeaves[] = "train.reduction_leaves=16";
inline constexpr char kSharedLeaves[] = "train.k_leaves=4";
inline constexpr char kSmallBatches[] = "train.micro_batch_tokens=48";

inline std::vector<std::string> SetArguments(const std::vector<std::string>& sets) {
  std::vector<std::string> arguments;
  for (const std::string& set : sets) {
    arguments.push_back("--set");
    arguments.push_back(set);
  }
  return arguments;
}

// From now on files of the process may grow, and be written, no further than this; as a disk that
// fails. RLIM_INFINITY: that is over.
inline void LimitFiles(pid_t process, rlim_t bytes) {
  const rlimit limit{bytes, RLIM_INFINITY};
  REQUIRE(prlimit(process, RLIMIT_FSIZE, &limit, nullptr) == 0);
}
}  // namespace stretto::testing
