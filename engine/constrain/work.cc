#include "engine/constrain/work.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace stretto::engine {
namespace {
constexpr int64_t kStepsBetweenQuestions = 1 << 16;  // some milliseconds
}  // namespace

bool Work::Spend(int64_t steps) {
  if (is_cancelled_ || is_used_up()) return false;
  num_steps_ += steps;
  if (steps_here_ != nullptr) {
    *steps_here_ += steps;
    steps_in_places_ += steps;
  }
  if (num_steps_ >= next_question_ && cancelled_) {
    next_question_ = num_steps_ + kStepsBetweenQuestions;
    is_cancelled_ = cancelled_();
  }
  return !is_cancelled_ && !is_used_up();
}

absl::Status Work::Status() const {
  if (is_cancelled_) return absl::CancelledError("nobody waits for the constraint any more");
  if (!is_used_up()) return absl::OkStatus();
  std::string largest;
  if (is_mostly_in_places()) {
    const auto most =
        std::max_element(steps_of_place_.begin(), steps_of_place_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    largest = absl::StrCat("; most of it is for ", most->first, " (",
                           100 * most->second / num_steps_, " %)");
  }
  return absl::InvalidArgumentError(
      absl::StrCat("it is too complex: it takes more work to build than is allowed", largest));
}
}  // namespace stretto::engine
