// What compiling one request's constraint may cost, over all the automata that are built on the
// way. Counted in steps, not in time: whether something is refused doesn't depend on the machine.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace stretto::engine {
class Work {
 public:
  static constexpr int64_t kMaxSteps = int64_t{20} << 20;
  // `cancelled` is asked now and then, whether nobody wants the result any more.
  explicit Work(int64_t max_steps = kMaxSteps, std::function<bool()> cancelled = nullptr)
      : max_steps_(max_steps), cancelled_(std::move(cancelled)) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // False: stop, here and in all that follows; Status() says why.
  bool Spend(int64_t steps);
  // InvalidArgument: there were more steps than allowed, and which place needed most of them, if
  // most were spent in places. Cancelled.
  absl::Status Status() const;
  bool is_used_up() const { return num_steps_ > max_steps_; }
  // Whether most steps were spent in places.
  bool is_mostly_in_places() const { return 2 * steps_in_places_ > num_steps_; }

  // While it lives, steps are counted for the place, a JSON pointer.
  class Place {
   public:
    Place(Work* work, const std::string& where) : work_(*work), around_(work->steps_here_) {
      work_.steps_here_ = &work_.steps_of_place_[where];
    }
    ~Place() { work_.steps_here_ = around_; }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    Work& work_;
    int64_t* const around_;
  };

 private:
  const int64_t max_steps_;
  const std::function<bool()> cancelled_;
  int64_t num_steps_ = 0, steps_in_places_ = 0, next_question_ = 0;
  bool is_cancelled_ = false;
  std::map<std::string, int64_t> steps_of_place_;
  int64_t* steps_here_ = nullptr;
};
}  // namespace stretto::engine
