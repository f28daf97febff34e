#include "services/coordinator/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "config/run_config.h"
#include "services/coordinator/journal_checksum.h"

namespace stretto::services {
namespace {
using nlohmann::json;
constexpr char kNow[] = "strftime('%Y-%m-%d %H:%M:%f')";

const char* KindName(GroupKind kind) { return kind == GroupKind::kTrain ? "train" : "eval"; }

// JSON has no NaN or infinity: such values are left out.
std::string ToJson(const std::map<std::string, double>& values) {
  json object = json::object();
  for (const auto& [key, value] : values) {
    if (std::isfinite(value)) object[key] = value;
  }
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

// The lock is a file of its own: it falls with the process, and SQL tools may read beside it.
absl::StatusOr<int> TakeLock(const std::string& path, absl::Duration wait) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  Clock& clock = Clock::Real();
  const int64_t end_ns = clock.NowNs() + absl::ToInt64Nanoseconds(wait);
  bool locked = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
  while (!locked && clock.NowNs() < end_ns) {
    clock.SleepNs(50'000'000);
    locked = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
  }
  if (!locked) {
    ::close(fd);
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": another coordinator has this run's journal"));
  }
  return fd;
}

// 0: there is no such file.
uint64_t InodeOf(const std::string& path) {
  struct stat found {};
  return ::stat(path.c_str(), &found) == 0 ? static_cast<uint64_t>(found.st_ino) : 0;
}
}  // namespace

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(const std::string& path,
                                                       const std::string& run_id,
                                                       const std::string& essence,
                                                       absl::Duration wait) {
  ASSIGN_OR_RETURN(const int lock_fd, TakeLock(path + ".lock", wait));
  auto db = Sqlite::Open(path);
  if (!db.ok()) {
    ::close(lock_fd);
    return db.status();
  }
  std::unique_ptr<Journal> journal(new Journal(std::move(*db), lock_fd, path));
  RETURN_IF_ERROR(journal->Prepare(run_id, essence));
  return journal;
}

Journal::~Journal() {
  db_.reset();
  ::close(lock_fd_);
}

// Other settings make another run; one that has no step, evaluation or checkpoint yet gives way.
absl::Status Journal::BeginAgain(const std::string& run_id, const std::string& essence) {
  auto query = db_->Prepare(
      "SELECT EXISTS(SELECT 1 FROM batches) OR EXISTS(SELECT 1 FROM steps) OR "
      "EXISTS(SELECT 1 FROM evals) OR EXISTS(SELECT 1 FROM checkpoints)");
  ASSIGN_OR_RETURN(const bool row, query.Step());
  if (!row || query.IntAt(0) != 0) {
    ASSIGN_OR_RETURN(const std::string recorded, ReadMeta("essence"));
    return absl::FailedPreconditionError(absl::StrCat(
        "the run's journal belongs to a run with other settings or data (",
        FirstDifference(recorded, essence),
        "); bring back what was changed, give this run another run.name or run.dir, or remove the "
        "folder to begin again"));
  }
  RETURN_IF_ERROR(db_->Execute(
      "DELETE FROM sessions; DELETE FROM members; DELETE FROM versions; DELETE FROM prompts; "
      "DELETE FROM groups; DELETE FROM rollouts; DELETE FROM scores; DELETE FROM events; "
      "DELETE FROM meta WHERE key = 'scorer_tag';"));
  const std::string update = "UPDATE meta SET value = ? WHERE key = ?";
  RETURN_IF_ERROR(db_->Prepare(update).Text(run_id).Text("run_id").Run());
  return db_->Prepare(update).Text(essence).Text("essence").Run();
}

absl::Status Journal::Prepare(const std::string& run_id, const std::string& essence) {
  RETURN_IF_ERROR(db_->Execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"));
  RETURN_IF_ERROR(db_->Begin());
  bool is_new = false;
  {
    auto query = db_->Prepare("SELECT COUNT(*) FROM sqlite_master WHERE name = 'meta'");
    ASSIGN_OR_RETURN(const bool row, query.Step());
    is_new = row && query.IntAt(0) == 0;
  }
  if (is_new) {
    RETURN_IF_ERROR(db_->Execute(kJournalSchema));
    const std::string insert = "INSERT INTO meta VALUES(?, ?)";
    RETURN_IF_ERROR(db_->Prepare(insert)
                        .Text("schema_version")
                        .Text(absl::StrCat(kJournalSchemaVersion))
                        .Run());
    RETURN_IF_ERROR(db_->Prepare(insert).Text("run_id").Text(run_id).Run());
    RETURN_IF_ERROR(db_->Prepare(insert).Text("essence").Text(essence).Run());
  }
  ASSIGN_OR_RETURN(const std::string schema, ReadMeta("schema_version"));
  if (schema != absl::StrCat(kJournalSchemaVersion)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the run's journal has schema ", schema, ", this program writes schema ",
                     kJournalSchemaVersion, "; give the run another folder"));
  }
  ASSIGN_OR_RETURN(const std::string recorded, ReadMeta("essence"));
  if (recorded != essence) {
    RETURN_IF_ERROR(BeginAgain(run_id, essence));
  }
  ASSIGN_OR_RETURN(run_id_, ReadMeta("run_id"));
  RETURN_IF_ERROR(
      db_->Prepare(absl::StrCat("INSERT INTO sessions(started, seconds) VALUES(", kNow, ", 0)"))
          .Run());
  {
    auto query = db_->Prepare("SELECT MAX(id) FROM sessions");
    ASSIGN_OR_RETURN(const bool row, query.Step());
    session_ = row ? query.IntAt(0) : 0;
  }
  RETURN_IF_ERROR(db_->Commit());
  inode_ = InodeOf(path_);
  return absl::OkStatus();
}

absl::Status Journal::CheckScorerTag(const std::string& tag) {
  if (tag == scorer_tag_) return absl::OkStatus();
  if (scorer_tag_.empty()) {
    const auto recorded = ReadMeta("scorer_tag");
    if (absl::IsDataLoss(recorded.status())) {
      if (!Writable()) return status_;
      status_ = db_->Prepare("INSERT INTO meta VALUES(?, ?)").Text("scorer_tag").Text(tag).Run();
      if (!status_.ok()) return status_;
      scorer_tag_ = tag;
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(recorded.status());
    scorer_tag_ = *recorded;
  }
  if (tag == scorer_tag_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "these scores come from other rewards or another reference than those that the run began "
      "with: a reward model's or the reference's files were replaced, or the program is another "
      "version; bring back the old ones, or begin a new run");
}

absl::StatusOr<std::string> Journal::ReadMeta(const std::string& key) {
  auto query = db_->Prepare("SELECT value FROM meta WHERE key = ?");
  ASSIGN_OR_RETURN(const bool row, query.Text(key).Step());
  if (!row) return absl::DataLossError(absl::StrCat("the run's journal has no ", key));
  return query.TextAt(0);
}

bool Journal::Writable() {
  if (!status_.ok()) return false;
  if (!in_transaction_) {
    status_ = db_->Begin();
    in_transaction_ = status_.ok();
  }
  return status_.ok();
}

void Journal::Run(Sqlite::Query& query) {
  const absl::Status status = query.Run();
  if (status_.ok()) status_ = status;
}

void Journal::Write(const RecordTrainers& record) {
  if (!Writable()) return;
  auto query = db_->Prepare("INSERT OR REPLACE INTO meta VALUES(?, ?)");
  query.Text(kTrainerEpoch).Text(absl::StrCat(record.epoch));
  Run(query);
  Write(RecordEvent{absl::StrCat("trainers' group ", record.epoch, ": ", record.names)});
}

void Journal::Write(const RecordMember& record) {
  if (!Writable()) return;
  auto query = db_->Prepare(absl::StrCat(
      "INSERT INTO members(name, pool, address, epoch, state, changed) VALUES(?, ?, ?, ?, ?, ",
      kNow,
      ") ON CONFLICT(name) DO UPDATE SET pool = excluded.pool, address = excluded.address, epoch = "
      "excluded.epoch, state = excluded.state, changed = excluded.changed"));
  query.Text(record.name)
      .Text(PoolName(record.pool))
      .Text(record.address)
      .Int(static_cast<int64_t>(record.epoch))
      .Text(record.state);
  Run(query);
}

void Journal::Write(const RecordGroup& record) {
  if (!Writable()) return;
  const Group& g = record.group;
  auto query = db_->Prepare(absl::StrCat(
      "INSERT INTO groups(id, kind, round, position, epoch, line, state, reason, min_version, "
      "changed) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ",
      kNow,
      ") ON CONFLICT(id) DO UPDATE SET round = excluded.round, state = excluded.state, "
      "reason = excluded.reason, min_version = excluded.min_version, changed = excluded.changed"));
  query.Int(static_cast<int64_t>(g.id))
      .Text(KindName(g.kind))
      .Int(g.round)
      .Int(static_cast<int64_t>(g.position))
      .Int(g.place.epoch)
      .Int(static_cast<int64_t>(g.place.index))
      .Text(Name(g.state))
      .Text(g.reason)
      .Int(g.min_version);
  Run(query);
}

void Journal::Write(const RecordBatch& record) {
  if (!Writable()) return;
  for (size_t i = 0; i < record.groups.size(); ++i) {
    auto query = db_->Prepare("INSERT INTO batches VALUES(?, ?, ?)");
    query.Int(record.step).Int(static_cast<int64_t>(i)).Int(static_cast<int64_t>(record.groups[i]));
    Run(query);
  }
  auto query = db_->Prepare("INSERT INTO batch_options VALUES(?, ?)");
  query.Int(record.step).Real(record.kl_coef);
  Run(query);
}

void Journal::Write(const RecordVersion& record) {
  if (!Writable()) return;
  auto query = db_->Prepare(absl::StrCat("INSERT INTO versions VALUES(?, ?, ", kNow, ")"));
  query.Int(record.version.number).Text(record.version.hash);
  Run(query);
}

void Journal::Write(const RecordEvent& record) {
  if (!Writable()) return;
  auto query = db_->Prepare(absl::StrCat("INSERT INTO events(time, text) VALUES(", kNow, ", ?)"));
  query.Text(record.text);
  Run(query);
}

void Journal::WriteCheckpoint(int64_t version, const std::string& hash, const std::string& path) {
  if (!Writable()) return;
  auto query =
      db_->Prepare(absl::StrCat("INSERT OR REPLACE INTO checkpoints VALUES(?, ?, ?, ", kNow, ")"));
  query.Int(version).Text(hash).Text(path);
  Run(query);
}

void Journal::WriteEval(int64_t version, double score, int64_t num_prompts, int64_t num_rejected) {
  if (!Writable()) return;
  auto query =
      db_->Prepare(absl::StrCat("INSERT OR REPLACE INTO evals VALUES(?, ?, ?, ?, ", kNow, ")"));
  query.Int(version).Real(score).Int(num_prompts).Int(num_rejected);
  Run(query);
}

void Journal::WriteStep(const StepRecord& step, double next_kl_coef) {
  if (!Writable()) return;
  auto query =
      db_->Prepare(absl::StrCat("INSERT OR REPLACE INTO steps VALUES(?, ?, ?, ?, ?, ", kNow, ")"));
  query.Int(step.step)
      .Text(ToJson(step.metrics))
      .Real(step.seconds)
      .Text(step.skip_reason)
      .Real(next_kl_coef);
  Run(query);
}

void Journal::WritePromptIds(uint64_t group, absl::Span<const int32_t> ids) {
  if (!Writable()) return;
  auto query = db_->Prepare(
      "INSERT OR REPLACE INTO prompts SELECT epoch, line, ?, ? FROM groups WHERE id = ?");
  query.Numbers(ids).Int(PromptChecksum(ids)).Int(static_cast<int64_t>(group));
  Run(query);
}

void Journal::WriteRollouts(uint64_t group, const std::vector<RolloutRecord>& rollouts) {
  if (!Writable()) return;
  const auto id = static_cast<int64_t>(group);
  for (const char* sql :
       {"DELETE FROM rollouts WHERE group_id = ?", "DELETE FROM scores WHERE group_id = ?"}) {
    auto query = db_->Prepare(sql);
    query.Int(id);
    Run(query);
  }
  for (const RolloutRecord& r : rollouts) {
    const int64_t min_version =
        r.versions.empty() ? -1 : *std::min_element(r.versions.begin(), r.versions.end());
    auto query = db_->Prepare("INSERT INTO rollouts VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
    query.Int(id)
        .Int(r.sample_index)
        .Numbers(absl::MakeConstSpan(r.ids))
        .Numbers(absl::MakeConstSpan(r.logprobs))
        .Numbers(absl::MakeConstSpan(r.versions))
        .Numbers(absl::MakeConstSpan(r.sampling_logprobs))
        .Text(r.finish_reason)
        .Int(static_cast<int64_t>(r.ids.size()))
        .Int(min_version)
        .Int(RolloutChecksum(group, r));
    Run(query);
  }
}

void Journal::WriteScores(uint64_t group, const std::vector<RolloutRecord>& rollouts,
                          const std::string& scorer_tag) {
  if (!Writable()) return;
  for (const RolloutRecord& r : rollouts) {
    auto query = db_->Prepare("INSERT OR REPLACE INTO scores VALUES(?, ?, ?, ?, ?, ?)");
    const std::string components = ToJson(r.components);
    query.Int(static_cast<int64_t>(group))
        .Int(r.sample_index)
        .Real(r.reward)
        .Text(components)
        .Numbers(absl::MakeConstSpan(r.reference_logprobs))
        .Int(ScoreChecksum(group, r, components));
    Run(query);
  }
  auto query = db_->Prepare("UPDATE groups SET scorer_tag = ? WHERE id = ?");
  query.Text(scorer_tag).Int(static_cast<int64_t>(group));
  Run(query);
}

void Journal::WritePeakRss(const std::string& member, uint64_t bytes) {
  if (!Writable()) return;
  auto query = db_->Prepare(
      absl::StrCat("INSERT INTO members VALUES(?, 'coordinator', '', 0, 'live', ?, ", kNow,
                   ") ON CONFLICT(name) DO UPDATE SET peak_rss_bytes = MAX(peak_rss_bytes, "
                   "excluded.peak_rss_bytes)"));
  query.Text(member).Int(static_cast<int64_t>(bytes));
  Run(query);
}

void Journal::WriteSessionSeconds(double seconds) {
  if (!Writable()) return;
  auto query = db_->Prepare("UPDATE sessions SET seconds = ? WHERE id = ?");
  query.Real(seconds).Int(session_);
  Run(query);
}

void Journal::CheckPlace() {
  if (!status_.ok() || InodeOf(path_) == inode_) return;
  status_ = absl::DataLossError(absl::StrCat(
      path_,
      ": the run's journal, or its whole folder, was removed or replaced while the run went "
      "on; nothing of it can be kept any more"));
}

absl::Status Journal::Commit(bool sync) {
  if (!status_.ok()) return status_;
  if (in_transaction_) {
    in_transaction_ = false;
    status_ = db_->Commit();
  }
  return sync ? Sync() : status_;
}

absl::Status Journal::Sync() {
  // A checkpoint of the write-ahead log syncs it first.
  if (status_.ok()) status_ = db_->Execute("PRAGMA wal_checkpoint(PASSIVE)");
  return status_;
}
}  // namespace stretto::services
