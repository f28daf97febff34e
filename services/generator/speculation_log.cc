#include "services/generator/speculation_log.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stretto::services {
namespace {
using engine::SpeculationKind;
using engine::SpeculationStats;

// The number above which the engine drafts nothing at all (engine/inference/speculation.cc).
constexpr double kNeverWorth = 0.97;

std::string Costs(const SpeculationStats& stats) {
  if (stats.kind == SpeculationKind::kNgram) return "";
  return absl::StrFormat("; a drafted token costs %.2f of one of the policy", stats.draft_cost);
}
}  // namespace

std::vector<SpeculationLog::Line> SpeculationLog::Observe(const SpeculationStats& stats,
                                                          int64_t now_ns) {
  std::vector<Line> lines;
  if (stats.kind == SpeculationKind::kOff) return lines;
  if (!introduced_) Introduce(stats, &lines);
  introduced_ = true;
  if (stats.num_steps - window_begin_.num_steps >= kWindowSteps) Decide(stats, now_ns, &lines);
  Alarm(stats, now_ns, &lines);
  return lines;
}

void SpeculationLog::Introduce(const SpeculationStats& stats, std::vector<Line>* lines) {
  const bool by_model = stats.kind == SpeculationKind::kModel;
  std::string text = absl::StrCat(
      "speculation by ", by_model ? "a draft model" : "n-grams", Costs(stats),
      absl::StrFormat("; for one sequence alone a token is drafted when its chance to be accepted "
                      "is at least %.2f, for more at once when it is higher",
                      stats.needed_alone));
  const bool hopeless = stats.needed_alone > kNeverWorth;
  if (hopeless) text += ": nothing will ever be drafted, the draft model must be smaller";
  lines->push_back({hopeless, std::move(text)});
}

void SpeculationLog::Decide(const SpeculationStats& stats, int64_t now_ns,
                            std::vector<Line>* lines) {
  const SpeculationStats& begin = window_begin_;
  const int64_t num_steps = stats.num_steps - begin.num_steps;
  const int64_t num_drafted_steps = stats.num_drafted_steps - begin.num_drafted_steps;
  drafting_ = 4 * num_drafted_steps >= num_steps;
  const bool is_news = !told_ || drafting_ != told_drafting_;
  if (is_news && (!told_ || now_ns - told_ns_ >= kMinIntervalNs)) {
    const int64_t num_verified = stats.num_verified - begin.num_verified;
    const int64_t num_drafted = stats.num_drafted - begin.num_drafted;
    std::string text = absl::StrCat(
        "speculation: ", drafting_ ? "drafting" : "not drafting", ", in ", num_drafted_steps,
        " of the latest ", num_steps, " steps; ", stats.num_accepted - begin.num_accepted, " of ",
        num_verified, " verified tokens were accepted",
        absl::StrFormat(", a share of %.2f is needed",
                        (stats.needed_sum - begin.needed_sum) / static_cast<double>(num_steps)),
        Costs(stats));
    if (num_drafted > 0) {
      absl::StrAppendFormat(
          &text, " (%.2f ms)",
          1e3 * (stats.draft_seconds - begin.draft_seconds) / static_cast<double>(num_drafted));
    }
    lines->push_back({false, std::move(text)});
    told_ = true;
    told_drafting_ = drafting_;
    told_ns_ = now_ns;
  }
  window_begin_ = stats;
}

void SpeculationLog::Alarm(const SpeculationStats& stats, int64_t now_ns,
                           std::vector<Line>* lines) {
  const bool was_fruitless = fruitless_;
  fruitless_ = stats.num_fruitless >= kFruitlessAlarm;
  if (!fruitless_ || was_fruitless) return;
  if (alarmed_ && now_ns - alarm_ns_ < kMinIntervalNs) return;
  alarmed_ = true;
  alarm_ns_ = now_ns;
  lines->push_back({true, absl::StrCat("speculation: of the latest ", stats.num_fruitless,
                                       " drafts not a single token was accepted: the drafts have "
                                       "nothing to do with what the policy writes")});
}
}  // namespace stretto::services
