// Groups: made, tokenized, generated, scored, replaced.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "rl/staleness.h"
#include "services/coordinator/core.h"

namespace stretto::services {
const char* Name(GroupState state) {
  switch (state) {
    case GroupState::kNew:
    case GroupState::kTokenizing:
      return "new";
    case GroupState::kReady:
    case GroupState::kGenerating:
      return "ready";
    case GroupState::kGenerated:
    case GroupState::kScoring:
      return "generated";
    case GroupState::kScored:
      return "scored";
    case GroupState::kRejected:
      return "rejected";
  }
  return "?";
}

// In order of position.
std::vector<Group*> Core::GroupsOf(GroupKind kind, int64_t round) {
  std::vector<Group*> found;
  for (auto& [id, group] : groups_) {
    if (group.kind == kind && group.round == round) found.push_back(&group);
  }
  std::sort(found.begin(), found.end(),
            [](const Group* a, const Group* b) { return a->position < b->position; });
  return found;
}

Group& Core::NewGroup(GroupKind kind, int64_t round, uint64_t position, DatasetPlace place) {
  Group group;
  group.id = next_group_++;
  group.kind = kind;
  group.round = round;
  group.position = position;
  group.place = place;
  Group& made = groups_.emplace(group.id, group).first->second;
  Emit(RecordGroup{made});
  return made;
}

// Fills every step of the window up to its number of groups, rejected ones not counted.
void Core::MakeGroups() {
  const int64_t last = std::min(options_.num_steps, version_.number + 1 + options_.max_staleness);
  for (int64_t step = version_.number + 1; step <= last; ++step) RejectWithoutSignal(step);
  std::map<int64_t, int64_t> num_made;
  for (const auto& [id, group] : groups_) {
    if (group.kind == GroupKind::kTrain && group.state != GroupState::kRejected) {
      ++num_made[group.round];
    }
  }
  for (int64_t step = version_.number + 1; step <= last; ++step) {
    // What a restored batch holds is what it held.
    if (kl_coefs_.count(step) > 0) continue;
    while (num_made[step] < options_.prompts_per_step) {
      const uint64_t position = next_position_++;
      NewGroup(GroupKind::kTrain, step, position, order_.At(position));
      ++num_made[step];
    }
  }
}

// Decides in stream order, each group when all before it have been decided: what is replaced does
// not depend on who was scored first. Beyond the bound groups are trained on as they are, which
// changes nothing but the step's denominators.
void Core::RejectWithoutSignal(int64_t step) {
  if (!options_.replace_without_signal || kl_coefs_.count(step) > 0) return;
  int64_t num_without = 0, num_decided = 0;
  for (Group* group : GroupsOf(GroupKind::kTrain, step)) {
    if (group->state == GroupState::kRejected) {
      num_without += group->reason == kNoSignal ? 1 : 0;
      continue;
    }
    if (group->state != GroupState::kScored) return;
    ++num_decided;
    if (group->has_signal) continue;
    if (num_without >= options_.max_group_replacements) {
      Note(absl::StrCat("step ", step, ": ", num_without, " groups without signal were replaced, ",
                        "as many as train.max_group_replacements allows; ",
                        num_decided == 1 ? "all" : "others",
                        " whose completions have the same reward are trained on as they are. "
                        "Easier or harder prompts, larger groups or a higher temperature help"));
      continue;
    }
    ++num_without;
    ++num_without_signal_;
    Reject(group, kNoSignal);
  }
}

bool Core::EvalIsDue(int64_t v) const {
  if (v < 0 || options_.num_eval_prompts == 0 || evaluated_.count(v) > 0) return false;
  return (v == 0 && options_.eval_before) || (v == options_.num_steps && options_.eval_after) ||
         (v > 0 && options_.eval_every > 0 && v % options_.eval_every == 0);
}

void Core::MakeEvalGroups() {
  if (!EvalIsDue() || !GroupsOf(GroupKind::kEval, version_.number).empty()) return;
  for (int64_t i = 0; i < options_.num_eval_prompts; ++i) {
    const auto line = static_cast<uint64_t>(i);
    NewGroup(GroupKind::kEval, version_.number, line, {kEvalEpoch, line});
  }
}

void Core::SetState(Group* group, GroupState state) {
  const bool is_durable = std::string(Name(state)) != Name(group->state);
  group->state = state;
  if (is_durable) Emit(RecordGroup{*group});
}

void Core::Requeue(Group* group, GroupState state, int64_t not_before_ns) {
  group->member.clear();
  group->not_before_ns = not_before_ns;
  ++group->attempt;  // answers to the present attempt no longer count
  SetState(group, state);
}

void Core::Reject(Group* group, const std::string& reason) {
  group->member.clear();
  group->reason = reason;
  ++group->attempt;
  SetState(group, GroupState::kRejected);
  ++num_rejected_;
  if (group->kind == GroupKind::kEval || reason == kNoSignal) return;
  const int64_t num_replaced = ++num_replaced_[group->round];
  if (num_replaced > options_.max_group_replacements) {
    Fail(absl::ResourceExhaustedError(
        absl::StrCat("step ", group->round, ": ", num_replaced,
                     " groups had to be replaced (train.max_group_replacements: ",
                     options_.max_group_replacements, "); the last because of: ", reason)));
  }
}

Group* Core::Awaited(uint64_t id, uint64_t attempt, GroupState state) {
  const auto it = groups_.find(id);
  if (it == groups_.end() || it->second.attempt != attempt || it->second.state != state) {
    return nullptr;
  }
  return &it->second;
}

void Core::Tokenize(int64_t now_ns) {
  std::vector<Group*> wanting;
  for (auto& [id, group] : groups_) {
    if (group.state == GroupState::kNew && group.not_before_ns <= now_ns) wanting.push_back(&group);
  }
  size_t begin = 0;
  while (begin < wanting.size()) {
    Member* scorer = PickScorer(now_ns);
    if (scorer == nullptr) return;
    const size_t end =
        std::min(wanting.size(), begin + static_cast<size_t>(options_.max_tokenize_batch));
    TokenizePrompts command{scorer->name, scorer->epoch, {}, next_call_++};
    scorer->tokenizing.insert(command.call);
    for (size_t i = begin; i < end; ++i) {
      command.groups.push_back(wanting[i]->id);
      wanting[i]->member = scorer->name;
      SetState(wanting[i], GroupState::kTokenizing);
    }
    ++scorer->num_in_flight;
    Emit(std::move(command));
    begin = end;
  }
}

// Why a prompt can't be used; empty: it can.
static std::string FaultOf(const Core::TokenizedPrompt& prompt, int64_t max_tokens) {
  std::string fault = prompt.error;
  if (fault.empty() && prompt.length == 0) fault = "the prompt is empty";
  if (fault.empty() && prompt.length > max_tokens) {
    fault = absl::StrCat("the prompt has ", prompt.length, " tokens, more than the allowed ",
                         max_tokens, " (data.max_prompt_tokens, data.on_long_prompt)");
  }
  if (fault.empty() || prompt.place.empty()) return fault;
  return absl::StrCat(prompt.place, ": ", fault);
}

bool Core::OnTokenized(const TokenizePrompts& asked, const absl::Status& status,
                       const std::vector<TokenizedPrompt>& prompts, int64_t now_ns) {
  Member* scorer = Current(asked.member, asked.epoch);
  if (scorer == nullptr || IsOver() || scorer->tokenizing.erase(asked.call) == 0) return false;
  --scorer->num_in_flight;
  const bool ok = status.ok() && prompts.size() == asked.groups.size();
  if (!ok) {
    scorer->not_before_ns = now_ns + options_.retry_ns;
    // One that is starting, or has gone, is no news.
    if (!absl::IsUnavailable(status)) {
      Note(absl::StrCat(asked.member, " could not tokenize: ", status.message()));
    }
  }
  for (size_t i = 0; i < asked.groups.size(); ++i) {
    const auto it = groups_.find(asked.groups[i]);
    if (it == groups_.end() || it->second.state != GroupState::kTokenizing ||
        it->second.member != asked.member) {
      continue;
    }
    Group* group = &it->second;
    if (!ok) {
      Requeue(group, GroupState::kNew, now_ns + options_.retry_ns);
    } else if (const std::string fault = FaultOf(prompts[i], options_.max_prompt_tokens);
               !fault.empty()) {
      Reject(group, fault);
    } else {
      Requeue(group, GroupState::kReady, 0);
    }
  }
  Advance(now_ns);
  return ok;
}

bool Core::IsPinned(const Group& group) const {
  return group.kind == GroupKind::kEval || options_.max_staleness == 0;
}

// Evaluations first, then the groups of the earliest step, in stream order.
void Core::Dispatch(int64_t now_ns) {
  std::vector<Group*> ready;
  for (auto& [id, group] : groups_) {
    if (group.state == GroupState::kReady && group.not_before_ns <= now_ns) ready.push_back(&group);
  }
  std::sort(ready.begin(), ready.end(), [](const Group* a, const Group* b) {
    const auto key = [](const Group* g) {
      return std::make_tuple(g->kind == GroupKind::kTrain, g->round, g->position);
    };
    return key(a) < key(b);
  });
  for (Group* group : ready) {
    Member* generator = PickGenerator(*group, now_ns);
    if (generator == nullptr) {
      // Evaluation prompts wait for the version, not for room; others may go on meanwhile only if
      // they do not hold the generators up: a later step's groups never overtake an earlier one's.
      if (group->kind == GroupKind::kEval) continue;
      return;
    }
    generator->num_in_flight += group->kind == GroupKind::kEval ? 1 : options_.group_size;
    group->member = generator->name;
    group->held_version = generator->version.number;
    ++group->attempt;
    SetState(group, GroupState::kGenerating);
    Emit(GenerateGroup{generator->name, generator->epoch, group->id, group->attempt,
                       IsPinned(*group) ? generator->version : Version(),
                       generator->version.number});
  }
}

bool Core::OnGenerated(const GenerateGroup& asked, const absl::Status& status, int64_t min_version,
                       int64_t now_ns) {
  Member* generator = Current(asked.member, asked.epoch);
  Group* group = Awaited(asked.group, asked.attempt, GroupState::kGenerating);
  if (IsOver() || generator == nullptr || group == nullptr || group->member != asked.member) {
    if (status.ok()) Emit(CountFault{"late_answer", asked.member});
    return false;
  }
  generator->num_in_flight -= group->kind == GroupKind::kEval ? 1 : options_.group_size;
  const int64_t later_ns = now_ns + options_.retry_ns;
  if (!absl::IsDataLoss(status)) generator->num_faults = 0;
  if (status.ok()) {
    group->min_version = min_version;
    Requeue(group, GroupState::kGenerated, 0);
  } else if (absl::IsInvalidArgument(status)) {
    Reject(group, std::string(status.message()));
  } else if (absl::IsFailedPrecondition(status)) {
    // It does not hold what it said it holds: it is brought to the run's version again.
    generator->version = Version();
    Requeue(group, GroupState::kReady, 0);
  } else if (absl::IsUnavailable(status) || absl::IsResourceExhausted(status)) {
    generator->not_before_ns = later_ns;
    Requeue(group, GroupState::kReady, 0);
  } else if (absl::IsDataLoss(status) && ++group->num_lies < options_.max_lies) {
    // What it says cannot be true: the fault is rather its own than the group's. Another may do
    // better.
    Distrust(generator, now_ns);
    Note(absl::StrCat("group ", group->id, " at ", asked.member, ": ", status.message()));
    Requeue(group, GroupState::kReady, 0);
  } else if (++group->num_failures >= options_.max_generate_failures) {
    Reject(group, absl::StrCat("generation failed ", group->num_failures,
                               " times, at last with: ", status.message()));
  } else {
    Note(absl::StrCat("group ", group->id, " at ", asked.member, ": ", status.message()));
    Requeue(group, GroupState::kReady, later_ns);
  }
  Advance(now_ns);
  return status.ok();
}

void Core::Score(int64_t now_ns) {
  std::vector<Group*> waiting;
  for (auto& [id, group] : groups_) {
    if (group.state == GroupState::kGenerated && group.not_before_ns <= now_ns) {
      waiting.push_back(&group);
    }
  }
  for (Group* group : waiting) {
    Member* scorer = PickScorer(now_ns);
    if (scorer == nullptr) return;
    ++scorer->num_in_flight;
    ++group->attempt;
    group->member = scorer->name;
    SetState(group, GroupState::kScoring);
    Emit(ScoreGroup{scorer->name, scorer->epoch, group->id, group->attempt});
  }
}

bool Core::OnScored(const ScoreGroup& asked, const absl::Status& status, int64_t now_ns,
                    bool has_signal) {
  Member* scorer = Current(asked.member, asked.epoch);
  Group* group = Awaited(asked.group, asked.attempt, GroupState::kScoring);
  if (IsOver() || scorer == nullptr || group == nullptr || group->member != asked.member) {
    if (status.ok()) Emit(CountFault{"late_answer", asked.member});
    return false;
  }
  --scorer->num_in_flight;
  if (!status.ok()) Emit(CountFault{"no_reward", asked.member});
  const int64_t later_ns = now_ns + options_.retry_ns;
  if (status.ok()) {
    no_reward_.clear();
    group->has_signal = has_signal;
    Requeue(group, GroupState::kScored, 0);
  } else if (absl::IsAborted(status) || absl::IsInvalidArgument(status)) {
    if (++group->num_score_failures >= options_.max_score_attempts) {
      Reject(group, absl::StrCat("no reward: ", status.message()));
    } else {
      Requeue(group, GroupState::kGenerated, later_ns);
    }
  } else {
    no_reward_ = absl::StrCat("scoring fails at ", asked.member, ": ", status.message());
    Note(no_reward_);
    scorer->not_before_ns = later_ns;
    Requeue(group, GroupState::kGenerated, later_ns);
  }
  Advance(now_ns);
  return status.ok();
}

Core::Round Core::round() const {
  const GroupKind kind = EvalIsDue() ? GroupKind::kEval : GroupKind::kTrain;
  int64_t number = version_.number;
  // What a batch holds already is being trained on.
  while (kind == GroupKind::kTrain && kl_coefs_.count(++number) > 0) continue;
  const int64_t group_size = kind == GroupKind::kEval ? 1 : options_.group_size;
  Round round;
  for (const auto& [id, group] : groups_) {
    if (group.kind != kind || group.round != number || group.state == GroupState::kRejected) {
      continue;
    }
    round.num_wanted += group_size;
    if (group.state >= GroupState::kGenerated) round.num_generated += group_size;
    if (group.state == GroupState::kScored) round.num_scored += group_size;
  }
  return round;
}

bool Core::IsGenerating() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) {
    return entry.second.state == GroupState::kGenerating;
  });
}

int64_t Core::num_buffered() const {
  return std::count_if(groups_.begin(), groups_.end(), [](const auto& entry) {
    return entry.second.kind == GroupKind::kTrain && entry.second.state == GroupState::kScored;
  });
}
}  // namespace stretto::services
