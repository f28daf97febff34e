// Decides who computes what in a step: continuous batching with chunked prefill over a bounded
// number of KV blocks. Pure logic: no clock, no socket, no thread, no tensor.
//
//             Submit              Plan admits               prompt computed           Remove
//   (caller) ────────► kQueued ─────────────► prefilling ─────────────────► decoding ───────►
//   (caller)
//                         ▲                       │    (both are kRunning)      │
//                         └──── kPreempted ◄──────┴── blocks run out ───────────┘
//
// Rules:
//  - One total order of sequences, fixed at Submit: higher priority, then resumed rollouts, then
//    arrival. Whoever comes first in it is planned first, admitted first and preempted last.
//  - A sequence is admitted with blocks for all tokens that it has; decoding takes one more block
//    every 16 tokens. When none is free the last running sequence in the order is preempted: it
//    loses its blocks and computes its tokens again later (often out of the prefix cache).
//  - No deadlock: a sequence that doesn't fit into the whole cache alone is refused at Submit, so
//  the
//    first in the order can always go on. No starvation: nobody is admitted past a sequence that
//    waits for blocks, and a step that preempts admits nobody.
//  - A prompt takes at most half of the rows that are left for prompts while others want some:
//    short ones get through beside a long one, which is never without rows either.
//  - Drafts (speculation.h) are added to a plan when it is complete: they take rows and blocks that
//    nobody else wants in this step, and give the blocks back with their rejected tokens.
//  - A group's first sequence computes the prompt; when it is done the others fork: they share its
//    blocks, and copy the last, partly filled one when they first write to it.
//
// Not thread-safe. Sequences belong to the caller and stay where they are until Remove.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/inference/block_pool.h"
#include "engine/inference/prefix_cache.h"
#include "engine/inference/request.h"

namespace stretto::engine {
struct SchedulerOptions {
  int32_t num_blocks = 0;
  int32_t max_running = 64;
  int32_t max_tokens_per_step = 512;  // >= max_running, so that every decoding sequence has its row
  // Of prompts in a step in which others decode: a step with more would keep those waiting.
  int32_t max_prompt_tokens_beside_decodes = 256;
  int64_t max_queued = 4096;
  int64_t max_queued_tokens = int64_t{64} << 20;
  bool prefix_cache = true;
};

enum class SequenceState { kNew, kQueued, kRunning, kPreempted };

struct Sequence {
  // Set by the caller before Submit.
  std::vector<int32_t> tokens;  // prompt and forced prefix; later all that was generated
  int32_t max_tokens = 0;       // tokens.size() never grows beyond it
  int32_t priority = 0;
  bool resumed = false;            // has a forced prefix
  bool skip_prefix_cache = false;  // all tokens are computed; may be changed between two steps

  // The scheduler's.
  SequenceState state = SequenceState::kNew;
  uint64_t arrival = 0;
  uint64_t group = 0;        // 0: none
  int32_t num_given = 0;     // tokens at Submit
  int32_t num_computed = 0;  // tokens whose keys and values are in `blocks`
  std::vector<int32_t> blocks;
  std::vector<ChainKey> keys;  // of full blocks of `tokens`, as far as known
  int32_t num_registered = 0;  // leading blocks offered to the prefix cache
  bool mixed = false;          // its keys and values come from several versions of weights
  int32_t epoch = 0;           // which weights it computes with
  std::vector<int32_t> draft;  // guessed tokens behind `tokens` in the step; empty between steps
  int32_t num_accepted = 0;    // leading ones of `draft` that have become tokens
  int32_t num_cached = -1;     // given tokens that it need not compute; -1: never admitted
  int32_t num_preemptions = 0;

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  bool wrote_tokens() const { return size() > num_given; }
};

// Tokens [begin, begin + count) of `sequence` are computed. If `samples`, they include its last
// token and the row's logits decide the next one. A fork has count 0 and samples from the last row
// of rows[fork_of].
struct PlannedRows {
  Sequence* sequence = nullptr;
  int32_t begin = 0, count = 0;
  bool samples = false;
  int32_t fork_of = -1;
  int32_t drafted = 0;
};

struct StepPlan {
  std::vector<PlannedRows> rows;
  std::vector<int32_t> copy_from, copy_to;  // blocks to copy, in this order, before computing
  int32_t num_rows = 0;
  int32_t num_preempted = 0;
  bool empty() const { return rows.empty(); }
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options, const ChainKey& root);

  // Takes one sequence, or a group with equal tokens and priority (all or none).
  // InvalidArgument: it can never fit into the cache. or the queue. ResourceExhausted: the queue is
  // full.
  absl::Status Submit(absl::Span<Sequence* const> group);
  // ResourceExhausted: so many more, of so many tokens together, have no place in the queue now.
  absl::Status CheckRoom(int64_t num_requests, int64_t num_tokens) const;
  // Plans a step. Valid until the next call of Plan; Commit must follow, and no Remove or
  // SetWeights may come between the two.
  const StepPlan& Plan();
  const StepPlan& plan() const { return plan_; }
  // Between Plan and Commit: how many drafted tokens plan().rows[row] has room for, and their
  // addition, of as many as there is room for. Returns how many. None but for a sequence that
  // decodes, and none for which another would have to go.
  int32_t DraftRoom(size_t row) const;
  int32_t AddDraft(size_t row, absl::Span<const int32_t> draft);
  // The planned rows have been computed.
  void Commit();
  // The token that followed a committed row with `samples`. Returns true if it was drafted: then
  // its own row has been computed with it, and the token that followed that one must be appended
  // next (or the sequence removed). Otherwise what is left of the draft is forgotten.
  bool Append(Sequence* sequence, int32_t token);
  // Forgets a sequence in whatever state and frees its blocks: finished or cancelled.
  void Remove(Sequence* sequence);
  // New weights; returns their epoch. Sequences that wrote no token start over with them.
  int32_t SetWeights(const ChainKey& root, SwapPolicy policy);
  void FlushPrefixCache() { cache_.Clear(); }

  bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_cached_blocks() const;
  const BlockPool& pool() const { return pool_; }
  // Checks every invariant: counts, order, blocks. Linear time; for tests.
  void CheckInvariants() const;

 private:
  struct Before {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };
  void PlanRunning();
  void PlanWaiting();
  void PlanForks();
  bool Reserve(Sequence* sequence);
  bool Admit(Sequence* sequence);
  bool HasRoom(int32_t num_blocks) const;
  // Rows for `s` of at most `room`, which it shares with `others` that have tokens to compute, too.
  int32_t TakeRows(const Sequence& s, int32_t room, bool others);
  bool IsPrefilling(uint64_t group) const;
  void AddRows(Sequence* sequence, int32_t count);
  void Run(Sequence* sequence);
  void Preempt(Sequence* sequence, SequenceState state);
  void ReleaseBlocks(Sequence* sequence);
  void EndDraft(Sequence* sequence);
  void ExtendKeys(Sequence* sequence, int32_t num_blocks) const;
  void Register(Sequence* sequence);
  void Enqueue(Sequence* sequence, SequenceState state);

  SchedulerOptions options_;
  BlockPool pool_;
  PrefixCache cache_;
  std::vector<ChainKey> roots_;  // by epoch
  std::set<Sequence*, Before> waiting_;
  int64_t waiting_tokens_ = 0;
  std::vector<Sequence*> running_;  // sorted by Before
  uint64_t next_arrival_ = 1;
  int32_t budget_ = 0;         // rows left in the plan being made
  int32_t prompt_budget_ = 0;  // of them, for chunks of prompts
  StepPlan plan_;
};
}  // namespace stretto::engine
