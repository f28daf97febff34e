// What a run's metrics.jsonl tells while it is written: a line for each step and each evaluation.
// A status alone would miss steps that are shorter than the time between two looks at it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace stretto::cli {
struct StepNews {
  int64_t step = 0;
  bool is_evaluation = false;
  double accuracy = 0;                    // of an evaluation; below 0: none could be judged
  std::optional<double> reward;           // of an evaluation: the mean, where it's known
  bool was_skipped = false;               // of a step
  std::map<std::string, double> metrics;  // of a step
};

class MetricsReader {
 public:
  explicit MetricsReader(std::string path) : path_(std::move(path)) {}
  // What has been added since the last call, in order. A file that was written anew is read from
  // its beginning: the same news may come again. Sets whether there is such a file.
  std::vector<StepNews> Read(bool* is_there);

 private:
  const std::string path_;
  ino_t inode_ = 0;
  size_t offset_ = 0;  // of the first line that hasn't been read
};
}  // namespace stretto::cli
