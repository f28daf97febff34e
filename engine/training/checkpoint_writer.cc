#include "engine/training/checkpoint_writer.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status.h"
#include "engine/training/checkpoint_folder.h"
#include "engine/training/checkpoint_reader.h"

namespace stretto::engine {
namespace {
constexpr int64_t kPollNs = 20'000'000;

void SetNice(int nice) {
  if (nice == 0) return;
  // A thread has its own on Linux. That it can't be set harms nobody.
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), nice);
}

// Adds another rank's share.
void Merge(const CheckpointManifest& shard, CheckpointManifest& all) {
  const auto first = static_cast<int64_t>(all.files.size());
  all.files.insert(all.files.end(), shard.files.begin(), shard.files.end());
  for (const auto& [key, tensor] : shard.tensors) {
    CheckpointTensor& to = all.tensors[key];
    to.shape = tensor.shape;
    if (!tensor.hash.empty()) to.hash = tensor.hash;
    for (CheckpointPart part : tensor.parts) {
      part.file += first;
      to.parts.push_back(std::move(part));
    }
  }
}

// Every file of the manifest once.
void JoinFiles(CheckpointManifest& manifest) {
  std::map<std::string, int64_t> index;
  std::vector<std::string> files;
  std::vector<int64_t> moved;
  for (const std::string& file : manifest.files) {
    const auto [it, is_new] = index.emplace(file, files.size());
    if (is_new) files.push_back(file);
    moved.push_back(it->second);
  }
  manifest.files = std::move(files);
  for (auto& [key, tensor] : manifest.tensors) {
    for (CheckpointPart& part : tensor.parts) part.file = moved[part.file];
  }
}
}  // namespace

CheckpointWriter::CheckpointWriter(Files& files, CheckpointWriterOptions options, Clock& clock)
    : files_(files),
      options_(std::move(options)),
      clock_(clock),
      snapshot_(std::make_shared<StateSnapshot>(clock)),
      thread_([this] { Loop(); }) {}

CheckpointWriter::~CheckpointWriter() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

absl::Status CheckpointWriter::Start(TrainerEngine& engine, const std::string& extra_json,
                                     TrainerEngine* critic) {
  absl::Status state = engine.state_status();
  if (critic != nullptr) state.Update(critic->state_status());
  if (!state.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint: the last update ended half done: ", state.message()));
  }
  Job job;
  job.start_seconds = clock_.NowSeconds();
  job.counters = engine.counters();
  job.extra_json = extra_json;
  job.adapter = AdapterOf(engine);
  if (critic != nullptr) {
    job.critic = critic->counters();
    STRETTO_CHECK(job.critic->version == job.counters.version);
  }
  if (Communicator* group = engine.group(); group != nullptr && group->size() > 1) {
    job.rank = group->rank();
    job.num_ranks = group->size();
    job.epoch = group->group().epoch;
    // Files that an earlier attempt left must not be taken for this one's.
    uint64_t token[2] = {static_cast<uint64_t>(clock_.WallUs()), static_cast<uint64_t>(getpid())};
    RETURN_IF_ERROR(
        group->Broadcast({reinterpret_cast<uint8_t*>(token), sizeof(token)}, /*root=*/0));
    job.attempt = absl::StrFormat("%x-%x", token[0], token[1]);
  }
  {
    absl::MutexLock lock(&mutex_);
    if (job_.has_value() && job_->epoch != job.epoch) alone_ = true;
  }
  Wait();
  StateSnapshot::Take(snapshot_, engine, critic);
  job.blocked_seconds = clock_.NowSeconds() - job.start_seconds;
  absl::MutexLock lock(&mutex_);
  alone_ = false;
  job_ = std::move(job);
  return absl::OkStatus();
}

bool CheckpointWriter::busy() const {
  absl::MutexLock lock(&mutex_);
  return job_.has_value();
}

absl::optional<SaveReport> CheckpointWriter::Wait() {
  absl::MutexLock lock(&mutex_);
  const auto is_idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !job_.has_value(); };
  mutex_.Await(absl::Condition(&is_idle));
  return last_;
}

absl::optional<SaveReport> CheckpointWriter::last() const {
  absl::MutexLock lock(&mutex_);
  return last_;
}

void CheckpointWriter::Loop() {
  SetNice(options_.nice);
  for (;;) {
    Job job;
    {
      absl::MutexLock lock(&mutex_);
      const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || job_.has_value();
      };
      mutex_.Await(absl::Condition(&has_work));
      if (!job_.has_value()) return;
      job = *job_;
    }
    SaveReport report = Run(job);
    if (options_.on_done != nullptr) options_.on_done(report);
    absl::MutexLock lock(&mutex_);
    last_ = std::move(report);
    job_.reset();
  }
}

SaveReport CheckpointWriter::Run(const Job& job) {
  SaveReport report;
  if (snapshot_->wants_copy()) snapshot_->Copy();
  report.copy_seconds = clock_.NowSeconds() - job.start_seconds;
  report.info.counters = job.counters;
  report.info.extra_json = job.extra_json;
  report.info.adapter = job.adapter;
  report.info.critic = job.critic;
  report.info.path = JoinPath(options_.root, CheckpointFolderName(job.counters.version));
  if (shard_ == nullptr || shard_ranks_ != job.num_ranks || shard_rank_ != job.rank) {
    shard_ = std::make_unique<ShardWriter>(
        files_, ShardOptions{job.rank, job.num_ranks, options_.max_chain, options_.chunk_elements});
    shard_ranks_ = job.num_ranks;
    shard_rank_ = job.rank;
  }
  report.status =
      Annotate(Save(job, report), absl::StrCat("checkpoint of version ", job.counters.version));
  if (report.status.ok()) {
    shard_->Commit();
  } else {
    shard_->Forget();
    // Of several ranks the next save removes what all have written, once none of them writes.
    if (job.num_ranks == 1) files_.RemoveAll(PartialOf(job)).IgnoreError();
    if (job.num_ranks > 1) GiveUp(job, report.status);
  }
  for (const StateFile& file : kStateFiles) snapshot_->Release(file.which);  // if it failed
  report.blocked_seconds = job.blocked_seconds + snapshot_->blocked_seconds();
  report.seconds = clock_.NowSeconds() - job.start_seconds;
  return report;
}

std::string CheckpointWriter::PartialOf(const Job& job) const {
  return PartialFolder(options_.root, CheckpointFolderName(job.counters.version), job.attempt);
}

std::string CheckpointWriter::ShardFile(const Job& job, int shard) const {
  return JoinPath(PartialOf(job),
                  absl::StrFormat("shard-%05d-of-%05d.json", shard + 1, job.num_ranks));
}

std::string CheckpointWriter::FailureFile(const Job& job, int shard) const {
  return absl::StrCat(ShardFile(job, shard), ".failed");
}

void CheckpointWriter::GiveUp(const Job& job, const absl::Status& why) {
  if (!files_.Exists(PartialOf(job))) return;
  files_.WriteAtomically(FailureFile(job, job.rank), why.message()).IgnoreError();
}

absl::Status CheckpointWriter::Save(const Job& job, SaveReport& report) {
  const std::string partial = PartialOf(job);
  if (job.num_ranks == 1) RETURN_IF_ERROR(files_.RemoveAll(partial));
  RETURN_IF_ERROR(files_.MakeDirs(partial));
  const ShardWriter::Source source{snapshot_->parts(),
                                   [this](const SnapshotPart& part, int64_t begin, int64_t count,
                                          absl::FunctionRef<void(absl::Span<const float>)> run) {
                                     snapshot_->ForRuns(part, begin, count, run);
                                   },
                                   [this](StateTensor which) { snapshot_->Release(which); }};
  ASSIGN_OR_RETURN(ShardResult shard,
                   shard_->Write(partial, CheckpointFolderName(job.counters.version), source));
  RETURN_IF_ERROR(snapshot_->status());
  report.is_incremental = shard.is_incremental;
  report.bytes_written = shard.bytes_written;
  shard.fragment.info = report.info;
  if (job.num_ranks == 1) return SaveAlone(job, std::move(shard), report);
  if (job.rank == 0) return Complete(job, std::move(shard), report);
  shard.fragment.info.checkpoint_hash = ContentHash(shard.fragment);
  RETURN_IF_ERROR(files_.WriteAtomically(ShardFile(job, job.rank), ManifestText(shard.fragment)));
  return AwaitCommit(job, shard, report);
}

namespace {
// A tensor that no part has whole (ranks, or leaves of a rank, have pieces of it) is read back for
// its hash.
absl::Status HashWholes(const std::string& folder, CheckpointManifest& manifest) {
  CheckpointReader reader(folder, manifest);
  for (const StateFile& file : kStateFiles) {
    for (const std::string& name : reader.Names(file.which)) {
      CheckpointTensor& tensor = manifest.tensors.at(TensorKey(file.which, name));
      if (!tensor.hash.empty()) continue;
      ASSIGN_OR_RETURN(tensor.hash, reader.HashOf(file.which, name));
    }
  }
  return absl::OkStatus();
}
}  // namespace

absl::Status CheckpointWriter::SaveAlone(const Job& job, ShardResult shard, SaveReport& report) {
  CheckpointManifest& manifest = shard.fragment;
  RETURN_IF_ERROR(HashWholes(PartialOf(job), manifest));
  manifest.info.checkpoint_hash = report.info.checkpoint_hash = ContentHash(manifest);
  return CommitCheckpoint(files_, options_.root, PartialOf(job), manifest, options_.keep);
}

absl::StatusOr<CheckpointManifest> CheckpointWriter::ReadShard(const Job& job, int shard) {
  const std::string path = ShardFile(job, shard);
  const std::string failed = FailureFile(job, shard);
  RETURN_IF_ERROR(
      WaitUntil([&] { return files_.Exists(path) || files_.Exists(failed); },
                absl::StrCat(path, " of rank ", shard, " (do all ranks share this file system?)")));
  if (files_.Exists(failed)) {
    const auto why = files_.ReadAll(failed);
    return absl::UnavailableError(
        absl::StrCat("rank ", shard, " couldn't write its share: ", why.ok() ? *why : ""));
  }
  ASSIGN_OR_RETURN(const std::string text, files_.ReadAll(path));
  ASSIGN_OR_RETURN(CheckpointManifest manifest, ParseManifest(path, text));
  if (manifest.info.counters.version != job.counters.version ||
      manifest.info.counters.optimizer_steps != job.counters.optimizer_steps) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": rank ", shard, " saved another version"));
  }
  return manifest;
}

// Rank 0: joins all shares.
absl::Status CheckpointWriter::Complete(const Job& job, ShardResult shard, SaveReport& report) {
  CheckpointManifest manifest = std::move(shard.fragment);
  for (int r = 1; r < job.num_ranks; ++r) {
    ASSIGN_OR_RETURN(const CheckpointManifest other, ReadShard(job, r));
    Merge(other, manifest);
  }
  JoinFiles(manifest);
  const std::string partial = PartialOf(job);
  RETURN_IF_ERROR(HashWholes(partial, manifest));
  manifest.info.checkpoint_hash = report.info.checkpoint_hash = ContentHash(manifest);
  for (int r = 1; r < job.num_ranks; ++r) RETURN_IF_ERROR(files_.RemoveAll(ShardFile(job, r)));
  return CommitCheckpoint(files_, options_.root, partial, manifest, options_.keep);
}

// Other ranks: the partial folder has become a checkpoint with their share in it.
absl::Status CheckpointWriter::AwaitCommit(const Job& job, const ShardResult& shard,
                                           SaveReport& report) {
  const std::string failed = FailureFile(job, 0);
  RETURN_IF_ERROR(WaitUntil([&] { return !files_.Exists(PartialOf(job)) || files_.Exists(failed); },
                            "rank 0 to complete the checkpoint"));
  if (files_.Exists(failed)) {
    const auto why = files_.ReadAll(failed);
    return absl::UnavailableError(
        absl::StrCat("rank 0 couldn't complete it: ", why.ok() ? *why : ""));
  }
  ASSIGN_OR_RETURN(const CheckpointManifest manifest, ReadManifest(files_, report.info.path));
  for (const auto& [key, mine] : shard.fragment.tensors) {
    const auto theirs = manifest.tensors.find(key);
    const bool has_mine =
        theirs != manifest.tensors.end() &&
        std::all_of(mine.parts.begin(), mine.parts.end(), [&](const CheckpointPart& p) {
          return std::any_of(theirs->second.parts.begin(), theirs->second.parts.end(),
                             [&](const CheckpointPart& q) {
                               return q.begin == p.begin && q.hash == p.hash && q.box == p.box;
                             });
        });
    if (!has_mine) {
      return absl::UnavailableError(
          absl::StrCat(report.info.path, ": rank 0 gave this attempt up"));
    }
  }
  report.info.checkpoint_hash = manifest.info.checkpoint_hash;
  return absl::OkStatus();
}

absl::Status CheckpointWriter::WaitUntil(const std::function<bool()>& done,
                                         const std::string& what) {
  const double begin = clock_.NowSeconds();
  while (!done()) {
    if (clock_.NowSeconds() - begin > options_.peer_timeout_seconds) {
      return absl::DeadlineExceededError(
          absl::StrCat("waited ", options_.peer_timeout_seconds, " s in vain for ", what));
    }
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_ || alone_)
        return absl::CancelledError(absl::StrCat("stopped waiting for ", what));
    }
    clock_.SleepNs(kPollNs);
  }
  return absl::OkStatus();
}
}  // namespace stretto::engine
