// A million random operations on schedulers of random, mostly tiny sizes, against a simple model of
// what must hold: every step makes progress, nobody is admitted past who waits for blocks, every
// context holds the right keys and values (KvOracle), weights are those that the swap policy
// promises, every request ends once, and at the end no block is missing. Some steps carry drafts,
// of which some tokens are accepted.
#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <tuple>
#include <vector>

#include "base/testing.h"
#include "engine/inference/kv_oracle.h"
#include "engine/inference/scheduler.h"

namespace stretto::engine {
namespace {
class Fuzzer {
 public:
  Fuzzer(PhiloxStream& random, const SchedulerOptions& options)
      : random_(random),
        options_(options),
        scheduler_(options, RootKey("weights", 0)),
        oracle_(options.num_blocks) {}

  void Operate() {
    const uint64_t what = random_.Below(100);
    if (what < 22) {
      Submit();
    } else if (what < 27) {
      Cancel();
    } else if (what < 28) {
      Swap();
    } else if (what < 29) {
      scheduler_.FlushPrefixCache();
    } else if (what < (paused_ ? 60 : 30)) {
      paused_ = !paused_;
    } else if (!paused_) {
      Step();
    }
  }

  // Ends everything. Returns whether that took no more steps than a scheduler without starvation
  // needs.
  void Drain() {
    int64_t steps_allowed = 16;
    for (const auto& s : live_) steps_allowed += 2 * s->max_tokens;
    while (scheduler_.has_work()) {
      Step();
      REQUIRE(--steps_allowed > 0);
    }
    REQUIRE(live_.empty());
    REQUIRE(scheduler_.pool().num_used() == 0);
    scheduler_.CheckInvariants();
  }

  int64_t num_finished = 0, num_cancelled = 0, num_refused = 0, num_preempted = 0, num_forked = 0,
          num_cached = 0, num_copied = 0, num_drafted = 0, num_accepted = 0;

 private:
  struct Tracked : Sequence {
    int32_t expected_epoch = 0;
    bool ran = false;  // in the last step
  };

  void Submit() {
    // Few prompts, so that prefixes are shared; lengths around the edges of blocks.
    const int32_t prompt = static_cast<int32_t>(random_.Below(3));
    const int32_t max_prompt = static_cast<int32_t>(random_.Below(8) == 0 ? 200 : 40);
    const int32_t size = 1 + static_cast<int32_t>(random_.Below(max_prompt));
    const int32_t more = 1 + static_cast<int32_t>(random_.Below(random_.Below(4) == 0 ? 200 : 40));
    const bool resumed = random_.Below(8) == 0;
    const size_t num_samples = resumed ? 1 : 1 + random_.Below(4) * random_.Below(2);
    const int32_t priority = random_.Below(10) == 0 ? 1 : 0;
    std::vector<std::unique_ptr<Tracked>> owned;
    std::vector<Sequence*> group;
    for (size_t i = 0; i < num_samples; ++i) {
      auto s = std::make_unique<Tracked>();
      s->expected_epoch = epoch_;
      for (int32_t t = 0; t < size; ++t) s->tokens.push_back((t * 7 + prompt * (t / 20)) % 50);
      s->max_tokens = size + more;
      s->priority = priority;
      s->resumed = resumed;
      group.push_back(s.get());
      owned.push_back(std::move(s));
    }
    const int64_t waiting = scheduler_.num_waiting();
    const absl::Status status = scheduler_.Submit(group);
    if (!status.ok()) {
      ++num_refused;
      const auto num = static_cast<int64_t>(num_samples);
      const bool never_fits = (size + more - 1 + 15) / 16 > options_.num_blocks ||
                              num > options_.max_queued || num * size > options_.max_queued_tokens;
      REQUIRE(absl::IsInvalidArgument(status) == never_fits);
      REQUIRE(scheduler_.num_waiting() == waiting);
      return;
    }
    for (auto& s : owned) live_.push_back(std::move(s));
  }

  void Cancel() {
    if (live_.empty()) return;
    Sequence* s = live_[random_.Below(live_.size())].get();
    scheduler_.Remove(s);
    Forget(s);
    ++num_cancelled;
  }

  void Forget(const Sequence* sequence) {
    const auto it = std::find_if(live_.begin(), live_.end(),
                                 [sequence](const auto& s) { return s.get() == sequence; });
    REQUIRE(it != live_.end());
    std::swap(*it, live_.back());
    live_.pop_back();
  }

  void Swap() {
    const auto policy = static_cast<SwapPolicy>(random_.Below(3));
    epoch_ = scheduler_.SetWeights(RootKey("weights", epoch_ + 1), policy);
    for (const auto& s : live_) {
      if (policy != SwapPolicy::kFinish || !s->wrote_tokens()) s->expected_epoch = epoch_;
      if (policy == SwapPolicy::kRecompute) REQUIRE(s->state != SequenceState::kRunning);
    }
  }

  void Step() {
    if (!scheduler_.has_work()) return;
    const StepPlan& plan = scheduler_.Plan();
    REQUIRE(!plan.empty());
    AddDrafts(plan);
    REQUIRE(plan.num_rows <= options_.max_tokens_per_step);
    CheckOrder(plan);
    REQUIRE(oracle_.Apply(plan));
    num_preempted += plan.num_preempted;
    num_copied += static_cast<int64_t>(plan.copy_from.size());
    scheduler_.Commit();
    std::vector<Sequence*> ended;
    for (const PlannedRows& rows : plan.rows) {
      Sequence* s = rows.sequence;
      REQUIRE(s->epoch == static_cast<Tracked*>(s)->expected_epoch);
      num_forked += rows.fork_of >= 0 ? 1 : 0;
      num_cached += rows.fork_of < 0 && rows.begin > 0 && rows.begin == s->num_cached ? 1 : 0;
      if (!rows.samples) continue;
      if (AppendTokens(s)) ended.push_back(s);
    }
    for (Sequence* s : ended) {
      scheduler_.Remove(s);
      Forget(s);
      ++num_finished;
    }
    if (random_.Below(64) == 0) scheduler_.CheckInvariants();
  }

  void AddDrafts(const StepPlan& plan) {
    const size_t one_in = random_.Below(4);  // 0: no drafts in this step
    for (size_t i = 0; one_in > 0 && i < plan.rows.size(); ++i) {
      if (random_.Below(one_in) != 0) continue;
      std::vector<int32_t> draft(random_.Below(40));
      for (int32_t& token : draft) token = static_cast<int32_t>(random_.Below(50));
      const int32_t num_free = scheduler_.pool().num_free(), room = scheduler_.DraftRoom(i);
      const int32_t added = scheduler_.AddDraft(i, draft);
      REQUIRE(added == std::min(room, static_cast<int32_t>(draft.size())));
      // Blocks are left for the next tokens of all.
      REQUIRE((scheduler_.pool().num_free() == num_free ||
               scheduler_.pool().num_free() >= scheduler_.num_running()));
      num_drafted += added;
    }
  }

  // The tokens that follow the sequence's rows, of which it had at least one. Returns whether it
  // ends.
  bool AppendTokens(Sequence* s) {
    while (true) {
      const size_t index = static_cast<size_t>(s->num_accepted);
      const bool drafted = index < s->draft.size() && random_.Below(4) != 0;
      const int32_t token = drafted ? s->draft[index] : static_cast<int32_t>(random_.Below(50));
      const bool accepted = scheduler_.Append(s, token);
      REQUIRE((accepted || !drafted));
      num_accepted += accepted ? 1 : 0;
      if (s->size() == s->max_tokens || random_.Below(80) == 0) return true;
      if (!accepted) return false;
    }
  }

  // Whoever was admitted in this step stands before all that still wait, but for members of groups
  // whose prompt is being computed.
  void CheckOrder(const StepPlan& plan) {
    const auto before = [](const Sequence* a, const Sequence* b) {
      return std::tuple(-a->priority, !a->resumed, a->arrival) <
             std::tuple(-b->priority, !b->resumed, b->arrival);
    };
    for (const PlannedRows& rows : plan.rows) {
      const auto* admitted = static_cast<const Tracked*>(rows.sequence);
      if (rows.fork_of >= 0 || admitted->ran) continue;
      for (const auto& s : live_) {
        if (s->state == SequenceState::kRunning || !before(s.get(), admitted)) continue;
        REQUIRE(GroupRuns(s->group));
      }
    }
    for (const auto& s : live_) s->ran = s->state == SequenceState::kRunning;
  }

  bool GroupRuns(uint64_t group) const {
    return group != 0 && std::any_of(live_.begin(), live_.end(), [group](const auto& s) {
             return s->group == group && s->state == SequenceState::kRunning;
           });
  }

  PhiloxStream& random_;
  SchedulerOptions options_;
  Scheduler scheduler_;
  KvOracle oracle_;
  std::vector<std::unique_ptr<Tracked>> live_;
  int32_t epoch_ = 0;
  bool paused_ = false;
};

SchedulerOptions RandomOptions(PhiloxStream& random) {
  SchedulerOptions options;
  options.num_blocks = 1 + static_cast<int32_t>(random.Below(random.Below(2) == 0 ? 8 : 60));
  options.max_running = 1 + static_cast<int32_t>(random.Below(10));
  options.max_tokens_per_step = options.max_running + static_cast<int32_t>(random.Below(80));
  options.max_queued = 1 + static_cast<int64_t>(random.Below(60));
  options.max_queued_tokens = 100 + static_cast<int64_t>(random.Below(5000));
  options.prefix_cache = random.Below(4) != 0;
  return options;
}
}  // namespace

TEST_CASE("a million operations keep every invariant of the scheduler") {
  INFO("seed " << testing::Seed());
  PhiloxStream random(testing::Seed());
  int64_t finished = 0, cancelled = 0, refused = 0, preempted = 0, forked = 0, cached = 0,
          copied = 0, drafted = 0, accepted = 0;
  constexpr int kRounds = 200, kOperations = 5000;
  for (int round = 0; round < kRounds; ++round) {
    INFO("round " << round);
    Fuzzer fuzzer(random, RandomOptions(random));
    for (int i = 0; i < kOperations; ++i) fuzzer.Operate();
    fuzzer.Drain();
    finished += fuzzer.num_finished;
    cancelled += fuzzer.num_cancelled;
    refused += fuzzer.num_refused;
    preempted += fuzzer.num_preempted;
    forked += fuzzer.num_forked;
    cached += fuzzer.num_cached;
    copied += fuzzer.num_copied;
    drafted += fuzzer.num_drafted;
    accepted += fuzzer.num_accepted;
  }
  // The fuzzer reaches every corner.
  INFO("finished " << finished << " cancelled " << cancelled << " refused " << refused
                   << " preempted " << preempted << " forked " << forked << " cached " << cached
                   << " copied " << copied << " drafted " << drafted << " accepted " << accepted);
  CHECK(finished > 10000);
  CHECK(cancelled > 1000);
  CHECK(refused > 1000);
  CHECK(preempted > 1000);
  CHECK(forked > 1000);
  CHECK(cached > 1000);
  CHECK(copied > 1000);
  CHECK(drafted > 10000);
  CHECK(accepted > 1000);
}

TEST_CASE("the oracle of keys and values sees a missing copy") {
  SchedulerOptions options;
  options.num_blocks = 8;
  Scheduler scheduler(options, RootKey("weights", 0));
  KvOracle oracle(options.num_blocks);
  Sequence a, b;
  for (Sequence* s : {&a, &b}) {
    s->tokens.assign(20, 3);
    s->max_tokens = 30;
  }
  REQUIRE_OK(scheduler.Submit({&a, &b}));
  REQUIRE(oracle.Apply(scheduler.Plan()));
  scheduler.Commit();
  scheduler.Append(&a, 1);
  scheduler.Append(&b, 2);
  const StepPlan& plan = scheduler.Plan();
  REQUIRE(plan.copy_from.size() == 1);
  CHECK(!oracle.Apply(plan, /*copy=*/false));
}

TEST_CASE("the oracle of keys and values sees a rejected token that is taken for accepted") {
  for (const bool faulty : {false, true}) {
    SchedulerOptions options;
    options.num_blocks = 8;
    Scheduler scheduler(options, RootKey("weights", 0));
    KvOracle oracle(options.num_blocks);
    Sequence s;
    s.tokens.assign(20, 3);
    s.max_tokens = 60;
    REQUIRE_OK(scheduler.Submit({&s}));
    REQUIRE(oracle.Apply(scheduler.Plan()));
    scheduler.Commit();
    REQUIRE(!scheduler.Append(&s, 1));
    scheduler.Plan();
    REQUIRE(scheduler.AddDraft(0, {4, 5, 6}) == 3);
    REQUIRE(oracle.Apply(scheduler.plan()));
    scheduler.Commit();
    REQUIRE(scheduler.Append(&s, 4));
    REQUIRE(!scheduler.Append(&s, 7));
    if (faulty) {
      ++s.num_computed;  // the row of the 5 that was drafted here
      REQUIRE(!scheduler.Append(&s, 8));
    }
    CHECK(oracle.Apply(scheduler.Plan()) == !faulty);
  }
}
}  // namespace stretto::engine
