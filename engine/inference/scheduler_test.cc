#include "engine/inference/scheduler.h"

#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "base/testing.h"
#include "engine/inference/kv_oracle.h"

namespace stretto::engine {
namespace {
Sequence Make(int32_t size, int32_t max_tokens, int32_t token = 1) {
  Sequence s;
  s.tokens.assign(static_cast<size_t>(size), token);
  s.max_tokens = max_tokens;
  return s;
}

SchedulerOptions Options(int32_t num_blocks, int32_t budget = 64) {
  SchedulerOptions options;
  options.num_blocks = num_blocks;
  options.max_running = 8;
  options.max_tokens_per_step = budget;
  return options;
}

// Plans, commits and appends a token wherever one was sampled.
const StepPlan& Step(Scheduler& scheduler, int32_t token = 2) {
  const StepPlan& plan = scheduler.Plan();
  scheduler.Commit();
  for (const PlannedRows& rows : plan.rows) {
    if (rows.samples) scheduler.Append(rows.sequence, token);
  }
  return plan;
}
const ChainKey kRoot = RootKey("weights", 1);
}  // namespace

TEST_CASE("blocks are handed out, shared and freed in balance") {
  BlockPool pool(3);
  const int32_t a = pool.Allocate(), b = pool.Allocate(), c = pool.Allocate();
  CHECK(pool.Allocate() == BlockPool::kNone);
  pool.Ref(a);
  pool.CheckBalance(4);
  pool.Unref(a, true);
  CHECK(pool.num_free() == 0);
  pool.Unref(a, true);
  pool.Unref(b, true);
  pool.Unref(c, false);
  pool.CheckBalance(0);
  CHECK(pool.Allocate() == c);  // worthless first, then least recently freed
  CHECK(pool.Allocate() == a);
  pool.Ref(b);  // back to life
  CHECK(pool.num_free() == 0);
  pool.CheckBalance(3);
}

TEST_CASE("equal ids under other parents or weights are other keys, and ids are compared") {
  BlockPool pool(2);
  PrefixCache cache(&pool, true);
  const std::vector<int32_t> ids(16, 5), other(16, 6);
  const ChainKey key = BlockKey(kRoot, ids);
  CHECK(!(key == BlockKey(RootKey("weights", 2), ids)));
  CHECK(!(key == BlockKey(RootKey("weight", 1), ids)));
  CHECK(!(key == BlockKey(key, ids)));
  const int32_t block = cache.Allocate();
  cache.Insert(key, ids, block);
  CHECK(cache.Find(key, ids) == block);
  CHECK(cache.Find(key, other) == BlockPool::kNone);  // a collision of hashes is no hit
  cache.Release(block);
  CHECK(cache.Find(key, ids) == block);
  cache.Allocate();
  CHECK(cache.Find(key, ids) == block);  // the block without contents went first
  cache.Allocate();
  CHECK(cache.Find(key, ids) == BlockPool::kNone);
}

TEST_CASE("a request that can never fit is refused with the reason, the rest go on") {
  Scheduler scheduler(Options(4), kRoot);
  Sequence fits = Make(10, 65), large = Make(10, 66);
  REQUIRE_OK(scheduler.Submit({&fits}));
  const absl::Status status = scheduler.Submit({&large});
  CHECK(absl::IsInvalidArgument(status));
  CHECK(std::string(status.message()).find("5 blocks") != std::string::npos);
  while (fits.size() < 65) Step(scheduler);
  scheduler.Remove(&fits);
  CHECK(scheduler.pool().num_used() == 0);
}

TEST_CASE("the queue is bounded in requests and in tokens") {
  SchedulerOptions options = Options(100);
  options.max_queued = 2;
  options.max_queued_tokens = 50;
  Scheduler scheduler(options, kRoot);
  Sequence a = Make(20, 30), b = Make(20, 30), c = Make(20, 30), d = Make(5, 30), e = Make(5, 30);
  REQUIRE_OK(scheduler.Submit({&a}));
  CHECK(absl::IsResourceExhausted(scheduler.Submit({&b, &c})));  // all or none
  REQUIRE_OK(scheduler.Submit({&b}));
  CHECK(absl::IsResourceExhausted(scheduler.Submit({&d})));
  // What would not fit into an empty one either shall not be tried again.
  const absl::Status many = scheduler.CheckRoom(3, 3), long_prompts = scheduler.CheckRoom(1, 51);
  CHECK(absl::IsInvalidArgument(many));
  CHECK(absl::StrContains(many.message(), "at most 2 completions may wait"));
  CHECK(absl::IsInvalidArgument(long_prompts));
  CHECK(absl::StrContains(long_prompts.message(), "51 tokens"));
  Step(scheduler);
  REQUIRE_OK(scheduler.Submit({&d, &e}));
}

TEST_CASE("a long prompt keeps neither those that decode nor short prompts waiting") {
  SchedulerOptions options = Options(1000, 512);
  options.max_prompt_tokens_beside_decodes = 64;
  Scheduler scheduler(options, kRoot);
  Sequence decodes = Make(3, 200), long_prompt = Make(4000, 4001, 7), shorter = Make(20, 50, 8);
  REQUIRE_OK(scheduler.Submit({&decodes}));
  Step(scheduler);
  REQUIRE_OK(scheduler.Submit({&long_prompt}));
  Step(scheduler);
  CHECK(long_prompt.num_computed == 64);
  REQUIRE_OK(scheduler.Submit({&shorter}));
  Step(scheduler);
  CHECK(long_prompt.num_computed == 64 + 32);  // half of what prompts may have
  CHECK(shorter.size() == 21);
  Step(scheduler);
  CHECK(long_prompt.num_computed == 64 + 32 + 64);
  CHECK(decodes.size() == 3 + 4);
  scheduler.Remove(&decodes);
  scheduler.Remove(&shorter);
  Step(scheduler);
  CHECK(long_prompt.num_computed == 64 + 32 + 64 + 512);  // alone
  scheduler.Remove(&long_prompt);
}

TEST_CASE("prefill is cut into chunks and leaves a row to whoever decodes") {
  Scheduler scheduler(Options(100, 8), kRoot);
  Sequence a = Make(5, 50), b = Make(20, 50);
  REQUIRE_OK(scheduler.Submit({&a}));
  REQUIRE_OK(scheduler.Submit({&b}));
  const StepPlan& first = Step(scheduler);
  REQUIRE(first.rows.size() == 2);
  CHECK(first.rows[0].count == 5);
  CHECK(first.rows[0].samples);
  CHECK(first.rows[1].count == 3);
  CHECK(!first.rows[1].samples);
  const StepPlan& second = Step(scheduler);
  CHECK(second.rows[0].count == 1);
  CHECK(second.rows[1].count == 7);
  CHECK(second.num_rows == 8);
}

TEST_CASE("the youngest is preempted, returns when there is room, and nobody passes it") {
  Scheduler scheduler(Options(4), kRoot);
  Sequence a = Make(16, 60, 1), b = Make(16, 60, 2), c = Make(1, 3, 3);
  REQUIRE_OK(scheduler.Submit({&a}));
  REQUIRE_OK(scheduler.Submit({&b}));
  int32_t preempted = 0;
  while (b.state != SequenceState::kPreempted) preempted += Step(scheduler).num_preempted;
  CHECK(preempted == 1);
  CHECK(a.size() == 34);
  CHECK(b.blocks.empty());
  REQUIRE_OK(scheduler.Submit({&c}));
  while (a.size() < 60) {
    Step(scheduler);
    CHECK(b.num_preemptions == 1);  // no loop of admission and preemption
    CHECK(c.state == SequenceState::kQueued);
  }
  scheduler.Remove(&a);
  Step(scheduler);
  CHECK(b.state == SequenceState::kRunning);
  scheduler.Remove(&b);
  while (c.size() < 3) Step(scheduler);
  scheduler.Remove(&c);
  CHECK(scheduler.pool().num_used() == 0);
  scheduler.CheckInvariants();
}

TEST_CASE("cancelling frees everything in every state") {
  Scheduler scheduler(Options(4, 8), kRoot);
  Sequence queued = Make(16, 60), prefilling = Make(16, 60, 2), decoding = Make(4, 60, 3);
  REQUIRE_OK(scheduler.Submit({&decoding}));
  Step(scheduler);
  REQUIRE_OK(scheduler.Submit({&prefilling}));
  REQUIRE_OK(scheduler.Submit({&queued}));
  Step(scheduler);
  CHECK(prefilling.num_computed == 7);
  CHECK(queued.state == SequenceState::kQueued);
  scheduler.Remove(&queued);
  scheduler.Remove(&prefilling);
  scheduler.Remove(&decoding);
  CHECK(!scheduler.has_work());
  CHECK(scheduler.pool().num_used() == 0);

  Sequence a = Make(16, 60, 4), b = Make(16, 60, 5);
  REQUIRE_OK(scheduler.Submit({&a}));
  REQUIRE_OK(scheduler.Submit({&b}));
  while (b.state != SequenceState::kPreempted) Step(scheduler);
  scheduler.Remove(&b);
  scheduler.Remove(&a);
  CHECK(!scheduler.has_work());
  CHECK(scheduler.pool().num_used() == 0);
  scheduler.CheckInvariants();
}

TEST_CASE("a group computes its prompt once, shares its blocks and copies on write") {
  Scheduler scheduler(Options(100, 16), kRoot);
  KvOracle oracle(100);
  std::vector<Sequence> group(3, Make(40, 80));
  REQUIRE_OK(scheduler.Submit({&group[0], &group[1], &group[2]}));
  int32_t rows = 0;
  while (!group[2].wrote_tokens()) {
    const StepPlan& plan = scheduler.Plan();
    REQUIRE(oracle.Apply(plan));
    rows += plan.num_rows;
    scheduler.Commit();
    int32_t token = 10;
    for (const PlannedRows& r : plan.rows) {
      if (r.samples) scheduler.Append(r.sequence, token++);
    }
  }
  CHECK(rows == 40);
  CHECK(scheduler.pool().num_used() == 3);  // two full blocks and one partly filled
  const StepPlan& plan = scheduler.Plan();
  CHECK(plan.copy_from.size() == 2);  // the last owner writes in place
  REQUIRE(oracle.Apply(plan));
  CHECK(scheduler.pool().num_used() == 5);
  CHECK(group[1].num_cached == 40);
  scheduler.Commit();
  for (Sequence& s : group) scheduler.Remove(&s);
  CHECK(scheduler.pool().num_used() == 0);
}

TEST_CASE("when the first of a group is cancelled another one computes the prompt") {
  Scheduler scheduler(Options(100, 16), kRoot);
  std::vector<Sequence> group(3, Make(40, 80));
  REQUIRE_OK(scheduler.Submit({&group[0], &group[1], &group[2]}));
  Step(scheduler);
  CHECK(group[1].state == SequenceState::kQueued);
  scheduler.Remove(&group[0]);
  while (!group[2].wrote_tokens()) Step(scheduler);
  CHECK(group[1].wrote_tokens());
  scheduler.CheckInvariants();
}

TEST_CASE("a prompt that was computed before is found again, until the weights change") {
  for (const SwapPolicy policy : {SwapPolicy::kFinish, SwapPolicy::kRecompute, SwapPolicy::kKeep}) {
    Scheduler scheduler(Options(100, 200), kRoot);
    Sequence a = Make(33, 80), b = Make(33, 80), c = Make(33, 80), d = Make(33, 80);
    REQUIRE_OK(scheduler.Submit({&a}));
    Step(scheduler);
    REQUIRE_OK(scheduler.Submit({&b}));
    Step(scheduler);
    CHECK(b.num_cached == 32);
    scheduler.SetWeights(RootKey("weights", 2), policy);
    REQUIRE_OK(scheduler.Submit({&c}));
    Step(scheduler);
    CHECK(c.num_cached == 0);
    CHECK(c.epoch == 1);
    CHECK(a.epoch == (policy == SwapPolicy::kFinish ? 0 : 1));
    REQUIRE_OK(scheduler.Submit({&d}));
    Step(scheduler);
    CHECK(d.num_cached == 32);
  }
}

TEST_CASE("a prompt whose blocks are all known still computes its last token") {
  Scheduler scheduler(Options(100), kRoot);
  Sequence a = Make(32, 80), b = Make(32, 80);
  REQUIRE_OK(scheduler.Submit({&a}));
  Step(scheduler);
  REQUIRE_OK(scheduler.Submit({&b}));
  const StepPlan& plan = Step(scheduler);
  CHECK(b.num_cached == 16);
  CHECK(plan.rows.back().count == 16);
}

TEST_CASE("higher priority first, then resumed rollouts, then arrival") {
  SchedulerOptions options = Options(100);
  options.max_running = 1;
  Scheduler scheduler(options, kRoot);
  Sequence plain = Make(4, 8), resumed = Make(4, 8), urgent = Make(4, 8);
  resumed.resumed = true;
  urgent.priority = 1;
  REQUIRE_OK(scheduler.Submit({&plain}));
  REQUIRE_OK(scheduler.Submit({&resumed}));
  REQUIRE_OK(scheduler.Submit({&urgent}));
  for (Sequence* expected : {&urgent, &resumed, &plain}) {
    CHECK(Step(scheduler).rows[0].sequence == expected);
    scheduler.Remove(expected);
  }
}

TEST_CASE("what each swap policy does to a running sequence") {
  Scheduler scheduler(Options(100), kRoot);
  Sequence a = Make(20, 80);
  REQUIRE_OK(scheduler.Submit({&a}));
  Step(scheduler);
  CHECK(scheduler.SetWeights(RootKey("weights", 2), SwapPolicy::kFinish) == 1);
  CHECK(a.epoch == 0);
  CHECK(a.num_computed == 20);
  scheduler.SetWeights(RootKey("weights", 3), SwapPolicy::kKeep);
  CHECK(a.epoch == 2);
  CHECK(a.num_computed == 20);
  CHECK(a.mixed);
  while (a.size() < 40) Step(scheduler);
  CHECK(scheduler.num_cached_blocks() == 0);  // mixed blocks are nobody else's
  scheduler.SetWeights(RootKey("weights", 4), SwapPolicy::kRecompute);
  CHECK(a.epoch == 3);
  CHECK(a.num_computed == 0);
  CHECK(a.state == SequenceState::kPreempted);
  const StepPlan& plan = Step(scheduler);
  CHECK(plan.rows[0].begin == 0);
  CHECK(plan.rows[0].count == 40);
  CHECK(!a.mixed);
}
}  // namespace stretto::engine
