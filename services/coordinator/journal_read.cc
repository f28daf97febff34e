// What the journal tells: a run's state at start, batches to repeat, totals.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "services/coordinator/journal.h"
#include "services/coordinator/journal_checksum.h"

namespace stretto::services {
namespace {
using nlohmann::json;

GroupState StateByName(const std::string& name) {
  if (name == "ready") return GroupState::kReady;
  if (name == "generated") return GroupState::kGenerated;
  if (name == "scored") return GroupState::kScored;
  if (name == "rejected") return GroupState::kRejected;
  return GroupState::kNew;
}

std::map<std::string, double> FromJson(const std::string& text) {
  std::map<std::string, double> values;
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return values;
  for (const auto& [key, value] : object.items()) {
    if (value.is_number()) values[key] = value.get<double>();
  }
  return values;
}

absl::Status Damaged(uint64_t group, const std::string& what) {
  return absl::DataLossError(absl::StrCat(
      "run.sqlite is damaged: of group ", group, ", ", what,
      " isn't what was written (its checksum differs): put a copy of the file back, or begin the "
      "run anew in another folder"));
}
}  // namespace

absl::Status Journal::RestoreVersions(RestoredRun* run) {
  {
    auto query = db_->Prepare("SELECT number, hash FROM versions");
    for (;;) {
      ASSIGN_OR_RETURN(const bool row, query.Step());
      if (!row) break;
      run->versions[query.IntAt(0)] = query.TextAt(1);
    }
  }
  {
    auto query = db_->Prepare("SELECT step, kl_coef FROM batch_options");
    for (;;) {
      ASSIGN_OR_RETURN(const bool row, query.Step());
      if (!row) break;
      run->kl_coefs[query.IntAt(0)] = query.RealAt(1);
    }
  }
  {
    auto query = db_->Prepare("SELECT next_kl_coef FROM steps ORDER BY step DESC LIMIT 1");
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (row) run->next_kl_coef = query.RealAt(0);
  }
  {
    auto query = db_->Prepare("SELECT version FROM evals");
    for (;;) {
      ASSIGN_OR_RETURN(const bool row, query.Step());
      if (!row) break;
      run->evaluated.push_back(query.IntAt(0));
    }
  }
  {
    auto query = db_->Prepare("SELECT name, epoch FROM members");
    for (;;) {
      ASSIGN_OR_RETURN(const bool row, query.Step());
      if (!row) break;
      run->member_epochs[query.TextAt(0)] = static_cast<uint64_t>(query.IntAt(1));
    }
  }
  {
    auto query = db_->Prepare("SELECT CAST(value AS INTEGER) FROM meta WHERE key = ?");
    ASSIGN_OR_RETURN(const bool row, query.Text(kTrainerEpoch).Step());
    if (row) run->trainer_epoch = static_cast<uint64_t>(query.IntAt(0));
  }
  auto query = db_->Prepare("SELECT COALESCE(MAX(version), -1) FROM checkpoints");
  ASSIGN_OR_RETURN(const bool row, query.Step());
  if (row) run->checkpoint_version = query.IntAt(0);
  return absl::OkStatus();
}

// Groups of steps not yet taken and of an evaluation not yet complete.
absl::Status Journal::RestoreGroups(RestoredRun* run) {
  {
    auto query = db_->Prepare(
        "SELECT COALESCE(MAX(id), 0) + 1, COALESCE(MAX(CASE kind WHEN 'train' THEN position END), "
        "-1) + 1 FROM groups");
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (row) {
      run->next_group = static_cast<uint64_t>(query.IntAt(0));
      run->next_position = static_cast<uint64_t>(query.IntAt(1));
    }
  }
  const int64_t newest = run->versions.empty() ? -1 : run->versions.rbegin()->first;
  auto query = db_->Prepare(
      "SELECT id, kind, round, position, epoch, line, state, reason, min_version, (SELECT "
      "MIN(reward) < MAX(reward) FROM scores WHERE group_id = "
      "groups.id) FROM groups WHERE "
      "(kind = 'train' AND round > ?) OR (kind = 'eval' AND round = ? AND NOT EXISTS (SELECT 1 "
      "FROM "
      "evals WHERE version = round))");
  query.Int(newest).Int(newest);
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (!row) return absl::OkStatus();
    Group group;
    group.id = static_cast<uint64_t>(query.IntAt(0));
    group.kind = query.TextAt(1) == "eval" ? GroupKind::kEval : GroupKind::kTrain;
    group.round = query.IntAt(2);
    group.position = static_cast<uint64_t>(query.IntAt(3));
    group.place = {static_cast<uint32_t>(query.IntAt(4)), static_cast<uint64_t>(query.IntAt(5))};
    group.state = StateByName(query.TextAt(6));
    group.reason = query.TextAt(7);
    group.min_version = query.IntAt(8);
    group.has_signal = query.IntAt(9) != 0;
    run->groups.push_back(std::move(group));
  }
}

absl::StatusOr<RestoredRun> Journal::Restore() {
  RestoredRun run;
  RETURN_IF_ERROR(RestoreVersions(&run));
  RETURN_IF_ERROR(RestoreGroups(&run));
  RETURN_IF_ERROR(RestorePause(&run));
  return run;
}

// A pause lasts until it is taken back, or the run is stopped or has ended.
absl::Status Journal::RestorePause(RestoredRun* run) {
  auto query = db_->Prepare(
      "SELECT text = 'paused' FROM events WHERE text IN ('paused', 'resumed', 'stop requested') OR "
      "text LIKE 'run ended: %' OR text LIKE 'run failed: %' ORDER BY seq DESC LIMIT 1");
  ASSIGN_OR_RETURN(const bool row, query.Step());
  run->paused = row && query.IntAt(0) != 0;
  return absl::OkStatus();
}

absl::StatusOr<GroupRecord> Journal::ReadGroup(uint64_t id) {
  GroupRecord group;
  group.id = id;
  {
    auto query = db_->Prepare(
        "SELECT g.epoch, g.line, p.ids, p.checksum FROM groups g LEFT JOIN prompts p ON p.epoch = "
        "g.epoch AND "
        "p.line = g.line WHERE g.id = ?");
    ASSIGN_OR_RETURN(const bool row, query.Int(static_cast<int64_t>(id)).Step());
    if (!row) return absl::DataLossError(absl::StrCat("the journal has no group ", id));
    group.place = {static_cast<uint32_t>(query.IntAt(0)), static_cast<uint64_t>(query.IntAt(1))};
    group.prompt_ids = query.NumbersAt<int32_t>(2);
    if (!query.IsNull(3) && query.IntAt(3) != PromptChecksum(group.prompt_ids)) {
      return Damaged(id, "its prompt");
    }
  }
  auto query = db_->Prepare(
      "SELECT r.sample_index, r.ids, r.logprobs, r.versions, r.sampling_logprobs, r.finish_reason, "
      "s.reward, s.components, s.reference_logprobs, r.checksum, s.checksum FROM rollouts r LEFT "
      "JOIN scores s ON "
      "s.group_id "
      "= r.group_id AND s.sample_index = r.sample_index WHERE r.group_id = ? ORDER BY "
      "r.sample_index");
  query.Int(static_cast<int64_t>(id));
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (!row) return group;
    RolloutRecord r;
    r.sample_index = static_cast<uint32_t>(query.IntAt(0));
    r.ids = query.NumbersAt<int32_t>(1);
    r.logprobs = query.NumbersAt<float>(2);
    r.versions = query.NumbersAt<int64_t>(3);
    r.sampling_logprobs = query.NumbersAt<float>(4);
    r.finish_reason = query.TextAt(5);
    r.reward = query.RealAt(6);
    const std::string components = query.TextAt(7);
    r.components = FromJson(components);
    r.reference_logprobs = query.NumbersAt<float>(8);
    if (query.IntAt(9) != RolloutChecksum(id, r)) {
      return Damaged(id, absl::StrCat("its completion ", r.sample_index));
    }
    if (!query.IsNull(10) && query.IntAt(10) != ScoreChecksum(id, r, components)) {
      return Damaged(id, absl::StrCat("the score of its completion ", r.sample_index));
    }
    group.rollouts.push_back(std::move(r));
  }
}

absl::StatusOr<std::vector<uint64_t>> Journal::ReadBatch(int64_t step) {
  auto query = db_->Prepare("SELECT group_id FROM batches WHERE step = ? ORDER BY ordinal");
  query.Int(step);
  std::vector<uint64_t> groups;
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (!row) break;
    groups.push_back(static_cast<uint64_t>(query.IntAt(0)));
  }
  if (groups.empty()) return absl::DataLossError(absl::StrCat("no batch of step ", step));
  return groups;
}

absl::StatusOr<std::vector<StepRecord>> Journal::ReadSteps() {
  auto query = db_->Prepare("SELECT step, metrics, seconds, skip_reason FROM steps ORDER BY step");
  std::vector<StepRecord> steps;
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (!row) return steps;
    steps.push_back({.step = query.IntAt(0),
                     .metrics = FromJson(query.TextAt(1)),
                     .seconds = query.RealAt(2),
                     .skip_reason = query.TextAt(3)});
  }
}

absl::StatusOr<std::map<int64_t, double>> Journal::ReadEvals() {
  auto query = db_->Prepare("SELECT version, score FROM evals");
  std::map<int64_t, double> evals;
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (!row) return evals;
    evals[query.IntAt(0)] = query.RealAt(1);
  }
}

absl::StatusOr<std::map<int64_t, double>> Journal::ReadEvalRewards() {
  auto query = db_->Prepare(
      "SELECT g.round, AVG(s.reward) FROM groups g JOIN scores s ON s.group_id = g.id WHERE g.kind "
      "= "
      "'eval' AND g.state = 'scored' AND s.sample_index = 0 GROUP BY g.round");
  std::map<int64_t, double> rewards;
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, query.Step());
    if (!row) return rewards;
    rewards[query.IntAt(0)] = query.RealAt(1);
  }
}

absl::StatusOr<RunTotals> Journal::ReadTotals() {
  auto query = db_->Prepare(
      "SELECT (SELECT COUNT(*) FROM rollouts r JOIN groups g ON g.id = r.group_id WHERE g.kind = "
      "'train'), (SELECT COALESCE(SUM(num_tokens), 0) FROM rollouts), (SELECT COUNT(*) FROM groups "
      "WHERE state = 'rejected'), (SELECT COALESCE(SUM(seconds), 0) FROM sessions), (SELECT "
      "COALESCE(MAX(json_extract(metrics, '$.logprob_mismatch_max')), 0) FROM steps), (SELECT "
      "COALESCE(SUM(peak_rss_bytes), 0) FROM members), (SELECT COUNT(*) FROM sessions)");
  ASSIGN_OR_RETURN(const bool row, query.Step());
  RunTotals totals;
  if (!row) return totals;
  totals.num_rollouts = static_cast<uint64_t>(query.IntAt(0));
  totals.num_tokens = static_cast<uint64_t>(query.IntAt(1));
  totals.num_rejected_groups = static_cast<uint64_t>(query.IntAt(2));
  totals.seconds = query.RealAt(3);
  totals.logprob_mismatch_max = query.RealAt(4);
  totals.peak_rss_bytes = static_cast<uint64_t>(query.IntAt(5));
  totals.num_sessions = query.IntAt(6);
  return totals;
}

absl::StatusOr<std::pair<std::string, std::string>> Journal::ReadCheckpoint() {
  auto query = db_->Prepare("SELECT hash, path FROM checkpoints ORDER BY version DESC LIMIT 1");
  ASSIGN_OR_RETURN(const bool row, query.Step());
  if (!row) return std::pair<std::string, std::string>();
  return std::pair(query.TextAt(0), query.TextAt(1));
}
}  // namespace stretto::services
