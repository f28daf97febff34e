// How many generators and scorers would keep the trainers fed, from what each pool has done in the
// time in which it had something to do. For autoscalers: stretto_desired_replicas.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace stretto::services {
// Not thread-safe. Steps further back count less and less.
class Balance {
 public:
  struct Pool {
    double busy_seconds = 0;  // summed over its members
    double num_rollouts = 0;
    // Of one member that has something to do; 0: nothing is known yet.
    double Rate() const { return busy_seconds > 0 ? num_rollouts / busy_seconds : 0; }
  };

  // So much time has passed in which so many members had work.
  void Pass(double seconds, int64_t busy_generators, int64_t busy_scorers) {
    generators_.busy_seconds += seconds * static_cast<double>(busy_generators);
    scorers_.busy_seconds += seconds * static_cast<double>(busy_scorers);
  }
  void Generated(int64_t num_rollouts) {
    generators_.num_rollouts += static_cast<double>(num_rollouts);
  }
  void Scored(int64_t num_rollouts) { scorers_.num_rollouts += static_cast<double>(num_rollouts); }
  // A step took the trainers so long.
  void Trained(int64_t num_rollouts, double seconds) {
    constexpr double kKept = 0.8;
    for (Pool* pool : {&generators_, &scorers_, &trainers_}) {
      pool->busy_seconds *= kKept;
      pool->num_rollouts *= kKept;
    }
    trainers_.num_rollouts += static_cast<double>(num_rollouts);
    trainers_.busy_seconds += seconds;
  }

  const Pool& generators() const { return generators_; }
  const Pool& scorers() const { return scorers_; }
  const Pool& trainers() const { return trainers_; }
  // Members with which the pool would be as fast as the trainers; 0: not known yet.
  int64_t Desired(const Pool& pool) const {
    if (pool.Rate() <= 0 || trainers_.Rate() <= 0) return 0;
    // A twentieth of a member too few is no reason for one more.
    constexpr double kSlack = 0.05;
    const double wanted = std::ceil(trainers_.Rate() / pool.Rate() - kSlack);
    return static_cast<int64_t>(std::max(1.0, wanted));
  }

 private:
  Pool generators_, scorers_, trainers_;
};
}  // namespace stretto::services
