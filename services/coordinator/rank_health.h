// Which rank of several is not like the others: what each has measured in a step, and who has been
// out of line for some steps on end. Plain values; not thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace stretto::services {
class RankHealth {
 public:
  using Metrics = std::map<std::string, double>;

  // What the ranks (by name) have measured in a step; what a person should be told now: a rank that
  // computes slower than the others, or whose gradients are far larger, or not finite.
  std::vector<std::string> Add(int64_t step, const std::map<std::string, Metrics>& ranks);

  struct Rank {
    double compute_seconds = 0;  // of the last step, without what it waited for the others
    // Of the loss, by the log-probs of the rank's own tokens: root of the mean square of those that
    // aren't 0; 0: none is.
    double gradient = 0;
    int num_slow = 0;  // steps on end
    bool is_slow = false, has_large_gradients = false;
  };
  const std::map<std::string, Rank>& ranks() const { return ranks_; }

 private:
  std::map<std::string, Rank> ranks_;
};
}  // namespace stretto::services
