#include "engine/inference/scheduler.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/inference/validation.h"

namespace stretto::engine {
namespace {
int32_t BlocksFor(int32_t num_tokens) { return (num_tokens + kBlockTokens - 1) / kBlockTokens; }
}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, const ChainKey& root)
    : options_(options),
      pool_(options.num_blocks),
      cache_(&pool_, options.prefix_cache),
      roots_{root} {
  STRETTO_CHECK(options.max_running > 0 && options.max_tokens_per_step >= options.max_running);
}

bool Scheduler::Before::operator()(const Sequence* a, const Sequence* b) const {
  return std::tuple(-int64_t{a->priority}, !a->resumed, a->arrival) <
         std::tuple(-int64_t{b->priority}, !b->resumed, b->arrival);
}

absl::Status Scheduler::CheckRoom(int64_t num_requests, int64_t num_tokens) const {
  if (num_waiting() + num_requests <= options_.max_queued &&
      waiting_tokens_ + num_tokens <= options_.max_queued_tokens) {
    return absl::OkStatus();
  }
  if (num_requests > options_.max_queued || num_tokens > options_.max_queued_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a request for ", num_requests, num_requests == 1 ? " completion" : " completions",
        " of prompts with ", num_tokens, " tokens together can never be queued: at most ",
        options_.max_queued, " completions may wait, and at most ", options_.max_queued_tokens,
        " tokens of their prompts; ask for fewer at once"));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "the queue is full: ", num_waiting(), num_waiting() == 1 ? " completion" : " completions",
      " with ", waiting_tokens_, num_waiting() == 1 ? " tokens waits" : " tokens wait",
      "; try again when some have been admitted"));
}

absl::Status Scheduler::Submit(absl::Span<Sequence* const> group) {
  int64_t num_tokens = 0;
  for (const Sequence* s : group) {
    STRETTO_CHECK(s->state == SequenceState::kNew && s->size() > 0 && s->size() < s->max_tokens);
    num_tokens += s->size();
    // The last token's keys and values are never needed.
    if (BlocksFor(s->max_tokens - 1) > pool_.num_blocks()) {
      return RefuseField(
          "max_tokens",
          absl::StrCat("prompt and completion of up to ", s->max_tokens, " tokens need ",
                       BlocksFor(s->max_tokens - 1), " blocks of KV cache, which has ",
                       pool_.num_blocks(), ": lower max_tokens or enlarge the cache"));
    }
  }
  RETURN_IF_ERROR(CheckRoom(static_cast<int64_t>(group.size()), num_tokens));
  const uint64_t group_id = group.size() > 1 ? next_arrival_ : 0;
  for (Sequence* s : group) {
    s->arrival = next_arrival_++;
    s->group = group_id;
    s->num_given = s->size();
    s->epoch = static_cast<int32_t>(roots_.size()) - 1;
    Enqueue(s, SequenceState::kQueued);
  }
  return absl::OkStatus();
}

const StepPlan& Scheduler::Plan() {
  plan_.rows.clear();
  plan_.copy_from.clear();
  plan_.copy_to.clear();
  plan_.num_rows = plan_.num_preempted = 0;
  budget_ = prompt_budget_ = options_.max_tokens_per_step;
  PlanRunning();
  if (plan_.num_preempted == 0) {
    PlanWaiting();
    PlanForks();
  }
  return plan_;
}

int32_t Scheduler::TakeRows(const Sequence& s, int32_t room, bool others) {
  const int32_t left = s.size() - s.num_computed;
  if (left == 1) return std::min(1, room);  // decodes
  room = std::min(room, prompt_budget_);
  if (others) room = std::min(room, std::max(room / 2, kBlockTokens));
  const int32_t count = std::min(left, room);
  prompt_budget_ -= count;
  return count;
}

// First in the order first. A chunk of prefill leaves a row to every decoding sequence behind it.
void Scheduler::PlanRunning() {
  const auto decodes = [](const Sequence* s) { return s->size() - s->num_computed == 1; };
  int32_t decodes_left =
      static_cast<int32_t>(std::count_if(running_.begin(), running_.end(), decodes));
  auto prompts_left = static_cast<int32_t>(running_.size()) - decodes_left;
  if (decodes_left > 0) {
    prompt_budget_ = std::min(prompt_budget_, options_.max_prompt_tokens_beside_decodes);
  }
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* s = running_[i];
    --(decodes(s) ? decodes_left : prompts_left);
    while (!Reserve(s)) {  // ends: alone, a sequence always finds its blocks
      Sequence* victim = running_.back();
      if (victim != s) --(decodes(victim) ? decodes_left : prompts_left);
      Preempt(victim, SequenceState::kPreempted);
      ++victim->num_preemptions;
      ++plan_.num_preempted;
      if (victim == s) return;
    }
    const bool others =
        prompts_left > 0 || (!waiting_.empty() && num_running() < options_.max_running);
    const int32_t count = TakeRows(*s, budget_ - decodes_left, others);
    if (count > 0) AddRows(s, count);
  }
}

void Scheduler::PlanWaiting() {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Sequence* s = *it;
    if (num_running() == options_.max_running || std::min(budget_, prompt_budget_) == 0) return;
    if (!s->wrote_tokens() && IsPrefilling(s->group)) {
      ++it;  // forks as soon as the prompt has been computed
      continue;
    }
    if (!Admit(s)) return;
    it = waiting_.erase(it);
    waiting_tokens_ -= s->size();
    Run(s);
    AddRows(s, TakeRows(*s, budget_, !waiting_.empty()));
  }
}

// The members of a group stand behind one another in the order.
void Scheduler::PlanForks() {
  const size_t num_planned = plan_.rows.size();
  for (size_t i = 0; i < num_planned; ++i) {
    Sequence* leader = plan_.rows[i].sequence;
    if (leader->group == 0 || leader->wrote_tokens() || !plan_.rows[i].samples) continue;
    for (auto it = waiting_.upper_bound(leader);
         it != waiting_.end() && (*it)->group == leader->group;) {
      Sequence* s = *it;
      if (num_running() == options_.max_running || !HasRoom(1)) return;
      if (s->wrote_tokens() || s->skip_prefix_cache) {
        ++it;
        continue;
      }
      it = waiting_.erase(it);
      waiting_tokens_ -= s->size();
      s->blocks = leader->blocks;
      for (const int32_t block : s->blocks) pool_.Ref(block);
      if (s->num_cached < 0) s->num_cached = s->num_given;
      Run(s);
      plan_.rows.push_back({s, s->size(), 0, true, static_cast<int32_t>(i)});
    }
  }
}

// The blocks that the sequence's uncomputed tokens will be written to: there, and its own.
// Admission allocated all but those of tokens generated since, so one block at most is missing or
// shared.
bool Scheduler::Reserve(Sequence* s) {
  const int32_t first = s->num_computed / kBlockTokens;
  if (static_cast<int32_t>(s->blocks.size()) < BlocksFor(s->size())) {
    const int32_t block = cache_.Allocate();
    if (block == BlockPool::kNone) return false;
    s->blocks.push_back(block);
  } else if (pool_.ref_count(s->blocks[first]) > 1) {
    const int32_t block = cache_.Allocate();
    if (block == BlockPool::kNone) return false;
    plan_.copy_from.push_back(s->blocks[first]);
    plan_.copy_to.push_back(block);
    cache_.Release(s->blocks[first]);
    s->blocks[first] = block;
  }
  return true;
}

// Leaves a block for each running sequence, so that an admission isn't undone by the next steps.
bool Scheduler::HasRoom(int32_t num_blocks) const {
  return num_blocks + static_cast<int32_t>(running_.size()) <= pool_.num_free();
}

bool Scheduler::Admit(Sequence* s) {
  // At least the last token is computed: its logits are wanted.
  const int32_t max_cached =
      cache_.enabled() && !s->skip_prefix_cache ? (s->size() - 1) / kBlockTokens : 0;
  ExtendKeys(s, max_cached);
  int32_t revived = 0;
  STRETTO_CHECK(s->blocks.empty());
  for (int32_t b = 0; b < max_cached; ++b) {
    const int32_t block = cache_.Find(
        s->keys[b], absl::MakeConstSpan(s->tokens).subspan(b * kBlockTokens, kBlockTokens));
    if (block == BlockPool::kNone) break;
    revived += pool_.ref_count(block) == 0 ? 1 : 0;
    s->blocks.push_back(block);
  }
  const int32_t num_cached = static_cast<int32_t>(s->blocks.size());
  const int32_t num_new = BlocksFor(s->size()) - num_cached;
  if (!HasRoom(num_new + revived)) {
    s->blocks.clear();
    return false;
  }
  for (const int32_t block : s->blocks) pool_.Ref(block);
  for (int32_t i = 0; i < num_new; ++i) s->blocks.push_back(cache_.Allocate());
  s->num_computed = num_cached * kBlockTokens;
  s->num_registered = num_cached;
  if (s->num_cached < 0) s->num_cached = s->num_computed;
  return true;
}

bool Scheduler::IsPrefilling(uint64_t group) const {
  return group != 0 && std::any_of(running_.begin(), running_.end(), [group](const Sequence* s) {
           return s->group == group && !s->wrote_tokens() && s->num_computed < s->size();
         });
}

void Scheduler::AddRows(Sequence* s, int32_t count) {
  budget_ -= count;
  plan_.num_rows += count;
  plan_.rows.push_back({s, s->num_computed, count, s->num_computed + count == s->size(), -1});
}

int32_t Scheduler::DraftRoom(size_t row) const {
  const PlannedRows& rows = plan_.rows[row];
  const Sequence& s = *rows.sequence;
  if (!rows.samples || rows.count != 1 || rows.drafted > 0 || !s.wrote_tokens()) return 0;
  // The last drafted token is followed by one that is drawn.
  const int32_t room = std::min(budget_, s.max_tokens - s.size() - 1);
  const int32_t spare = std::max(pool_.num_free() - static_cast<int32_t>(running_.size()), 0);
  const int64_t capacity = (static_cast<int64_t>(s.blocks.size()) + spare) * kBlockTokens;
  return static_cast<int32_t>(std::min<int64_t>(room, capacity - s.size()));
}

int32_t Scheduler::AddDraft(size_t row, absl::Span<const int32_t> draft) {
  PlannedRows& rows = plan_.rows[row];
  Sequence* s = rows.sequence;
  const int32_t count = std::min(static_cast<int32_t>(draft.size()), DraftRoom(row));
  if (count <= 0) return 0;
  s->draft.assign(draft.begin(), draft.begin() + count);
  while (static_cast<int32_t>(s->blocks.size()) < BlocksFor(s->size() + count)) {
    s->blocks.push_back(cache_.Allocate());
  }
  budget_ -= count;
  plan_.num_rows += count;
  return rows.drafted = count;
}

void Scheduler::Commit() {
  for (const PlannedRows& rows : plan_.rows) {
    Sequence* s = rows.sequence;
    s->num_computed = rows.begin + rows.count;
    if (rows.fork_of >= 0) {
      const Sequence* leader = plan_.rows[rows.fork_of].sequence;
      s->keys = leader->keys;
      s->num_registered = leader->num_registered;
    }
    Register(s);
  }
}

bool Scheduler::Append(Sequence* s, int32_t token) {
  STRETTO_CHECK(s->state == SequenceState::kRunning && s->num_computed == s->size());
  STRETTO_CHECK(s->size() < s->max_tokens);
  s->tokens.push_back(token);
  if (s->num_accepted == static_cast<int32_t>(s->draft.size()) ||
      s->draft[s->num_accepted] != token) {
    EndDraft(s);
    return false;
  }
  ++s->num_accepted;
  ++s->num_computed;
  Register(s);
  return true;
}

// Forgets what is left of the draft: the slots behind the last token are written again before they
// are read, blocks that hold nothing else are given back.
void Scheduler::EndDraft(Sequence* s) {
  if (s->draft.empty()) return;
  s->draft.clear();
  s->num_accepted = 0;
  while (static_cast<int32_t>(s->blocks.size()) > BlocksFor(s->size())) {
    cache_.Release(s->blocks.back());
    s->blocks.pop_back();
  }
}

void Scheduler::Remove(Sequence* s) {
  if (s->state == SequenceState::kRunning) {
    running_.erase(std::lower_bound(running_.begin(), running_.end(), s, Before{}));
    ReleaseBlocks(s);
  } else {
    STRETTO_CHECK(waiting_.erase(s) == 1);
    waiting_tokens_ -= s->size();
  }
  s->state = SequenceState::kNew;
}

int32_t Scheduler::SetWeights(const ChainKey& root, SwapPolicy policy) {
  roots_.push_back(root);
  const int32_t epoch = static_cast<int32_t>(roots_.size()) - 1;
  cache_.Clear();
  for (Sequence* s : waiting_) {
    s->keys.clear();
    if (!s->wrote_tokens() || policy != SwapPolicy::kFinish) s->epoch = epoch;
  }
  const std::vector<Sequence*> running = running_;
  for (Sequence* s : running) {
    s->keys.clear();
    if (!s->wrote_tokens() || policy == SwapPolicy::kRecompute) {
      Preempt(s, s->wrote_tokens() ? SequenceState::kPreempted : SequenceState::kQueued);
      s->epoch = epoch;
    } else if (policy == SwapPolicy::kKeep) {
      s->mixed = true;
      s->epoch = epoch;
    } else {
      s->num_registered = 0;  // found again by its like, under the old root
    }
  }
  return epoch;
}

void Scheduler::Run(Sequence* s) {
  s->state = SequenceState::kRunning;
  running_.insert(std::lower_bound(running_.begin(), running_.end(), s, Before{}), s);
}

void Scheduler::Preempt(Sequence* s, SequenceState state) {
  running_.erase(std::lower_bound(running_.begin(), running_.end(), s, Before{}));
  ReleaseBlocks(s);
  Enqueue(s, state);
}

void Scheduler::Enqueue(Sequence* s, SequenceState state) {
  s->state = state;
  waiting_.insert(s);
  waiting_tokens_ += s->size();
}

// Last block first: what follows a block is useless without it, so it is reused earlier.
void Scheduler::ReleaseBlocks(Sequence* s) {
  for (size_t i = s->blocks.size(); i-- > 0;) cache_.Release(s->blocks[i]);
  s->blocks.clear();
  s->num_computed = s->num_registered = s->num_accepted = 0;
  s->draft.clear();
  s->mixed = false;
}

void Scheduler::ExtendKeys(Sequence* s, int32_t num_blocks) const {
  for (int32_t b = static_cast<int32_t>(s->keys.size()); b < num_blocks; ++b) {
    const ChainKey& parent = b == 0 ? roots_[s->epoch] : s->keys[b - 1];
    s->keys.push_back(
        BlockKey(parent, absl::MakeConstSpan(s->tokens).subspan(b * kBlockTokens, kBlockTokens)));
  }
}

// Offers the blocks that became full to the prefix cache.
void Scheduler::Register(Sequence* s) {
  const int32_t num_full = s->num_computed / kBlockTokens;
  if (!cache_.enabled() || s->mixed || num_full <= s->num_registered) return;
  ExtendKeys(s, num_full);
  for (int32_t b = s->num_registered; b < num_full; ++b) {
    cache_.Insert(s->keys[b],
                  absl::MakeConstSpan(s->tokens).subspan(b * kBlockTokens, kBlockTokens),
                  s->blocks[b]);
  }
  s->num_registered = num_full;
}

int64_t Scheduler::num_cached_blocks() const { return cache_.num_entries(); }

void Scheduler::CheckInvariants() const {
  int64_t references = 0, tokens = 0;
  for (const Sequence* s : running_) {
    STRETTO_CHECK(s->state == SequenceState::kRunning);
    STRETTO_CHECK(static_cast<int32_t>(s->blocks.size()) >= BlocksFor(s->num_computed));
    STRETTO_CHECK(static_cast<int32_t>(s->blocks.size()) <= BlocksFor(s->size()));
    STRETTO_CHECK(s->num_computed <= s->size() && s->size() <= s->max_tokens);
    STRETTO_CHECK(s->draft.empty() && s->num_accepted == 0);
    references += static_cast<int64_t>(s->blocks.size());
  }
  for (const Sequence* s : waiting_) {
    STRETTO_CHECK(s->state == SequenceState::kQueued || s->state == SequenceState::kPreempted);
    STRETTO_CHECK(s->blocks.empty() && s->num_computed == 0);
    tokens += s->size();
  }
  STRETTO_CHECK(std::is_sorted(running_.begin(), running_.end(), Before{}));
  STRETTO_CHECK(num_running() <= options_.max_running);
  STRETTO_CHECK(tokens == waiting_tokens_);
  pool_.CheckBalance(references);
}
}  // namespace stretto::engine
