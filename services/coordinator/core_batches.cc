// What a step is trained on.
//
// A batch is a step's groups in stream order. Where rollouts may be older than the newest version,
// a step does not wait for its slowest group while others are complete: these are brought forward
// from later steps, and those that are still on their way take their places, as far as their age
// allows.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "rl/staleness.h"
#include "services/coordinator/core.h"

namespace stretto::services {
// The groups of a step, in order, once they are all there.
bool Core::GatherBatch(int64_t step, std::vector<uint64_t>* batch) {
  for (Group* group : GroupsOf(GroupKind::kTrain, step)) {
    if (group->state == GroupState::kRejected) continue;
    if (group->state != GroupState::kScored) return false;
    if (!rl::WithinStaleness(step - 1, group->min_version, options_.max_staleness)) {
      ++num_stale_dropped_;
      Note(absl::StrCat("group ", group->id, " has become too old (version ", group->min_version,
                        "); it is generated again"));
      Requeue(group, GroupState::kReady, 0);
      return false;
    }
    batch->push_back(group->id);
  }
  return static_cast<int64_t>(batch->size()) >= options_.prompts_per_step;
}

// Whether a group that is not complete can be trained on in this step: what is under way may have
// tokens of the version that its generator held when it was asked.
bool Core::MayWaitUntil(int64_t step, const Group& group) const {
  if (group.state < GroupState::kGenerating) return true;
  const int64_t oldest =
      group.state == GroupState::kGenerating ? group.held_version : group.min_version;
  return rl::WithinStaleness(step - 1, oldest, options_.max_staleness);
}

// All that the step lacks, or nothing. What has no signal is decided on in stream order before.
void Core::BringForward(int64_t step) {
  if (options_.max_staleness == 0) return;
  const auto is_lost = [this](const Group& group) {
    return options_.replace_without_signal && !group.has_signal;
  };
  std::vector<Group*> late, complete;
  for (Group* group : GroupsOf(GroupKind::kTrain, step)) {
    if (group->state == GroupState::kRejected) continue;
    if (group->state != GroupState::kScored) late.push_back(group);
    if (group->state == GroupState::kScored && is_lost(*group)) return;
  }
  for (int64_t later = step + 1; later <= step + options_.max_staleness; ++later) {
    for (Group* group : GroupsOf(GroupKind::kTrain, later)) {
      if (group->state == GroupState::kScored && !is_lost(*group)) complete.push_back(group);
    }
  }
  std::vector<std::pair<Group*, Group*>> exchanges;
  for (Group* waits : late) {
    const auto found = std::find_if(complete.begin(), complete.end(), [&](const Group* group) {
      return MayWaitUntil(group->round, *waits);
    });
    if (found == complete.end()) return;
    exchanges.emplace_back(waits, *found);
    complete.erase(found);
  }
  for (const auto& [waits, group] : exchanges) {
    std::swap(waits->round, group->round);
    Emit(RecordGroup{*waits});
    Emit(RecordGroup{*group});
    ++num_brought_forward_;
  }
}

// False: the batch is not complete.
bool Core::RecordNextBatch(int64_t step) {
  if (kl_coefs_.count(step) > 0) return true;
  BringForward(step);
  std::vector<uint64_t> batch;
  if (!GatherBatch(step, &batch)) return false;
  kl_coefs_[step] = kl_coef_;
  Emit(RecordBatch{step, kl_coef_, std::move(batch)});
  return true;
}

}  // namespace stretto::services
