// For tests: the machine's files, with a fault at the n-th operation that writes. Thread-safe.
//
// Operations are Create, Append, Sync, Rename, RemoveAll and MakeDirs, counted from 0; reads are
// none.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "base/files.h"
#include "base/philox.h"

namespace stretto::testing {
enum class Fault {
  kNone,
  // That operation fails, all others go well.
  kOnce,
  // From that operation on nothing can be created, appended or synced; a write puts down a part.
  kDiskFull,
  // The process dies in the middle of that operation: it may be done by half, or done but for its
  // answer, and nothing that comes after it has any effect.
  kKilled,
  // The same, and the machine with it: of what was not synced a part is lost (Crash).
  kPowerLoss,
};

class FaultFiles final : public Files {
 public:
  FaultFiles(Fault fault, int64_t at, uint64_t seed = 0)
      : fault_(fault), at_(at), random_(seed, static_cast<uint64_t>(at)) {}

  // Whether the fault has come.
  bool failed() const {
    absl::MutexLock lock(&mutex_);
    return failed_;
  }
  int64_t num_operations() const {
    absl::MutexLock lock(&mutex_);
    return num_operations_;
  }
  // After kPowerLoss: what was never synced is cut anywhere.
  void Crash() {
    absl::MutexLock lock(&mutex_);
    for (const auto& state : written_) {
      std::error_code ec;
      const uint64_t size = std::filesystem::file_size(state->path, ec);
      if (ec || size <= state->synced) continue;
      const uint64_t kept = state->synced + random_.Below(size - state->synced + 1);
      std::filesystem::resize_file(state->path, kept, ec);
    }
  }

  absl::StatusOr<std::string> ReadAll(const std::string& path) override {
    return real_.ReadAll(path);
  }
  bool Exists(const std::string& path) override { return real_.Exists(path); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    return real_.List(path);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    const Turn turn = Next(/*needs_space=*/true);
    if (turn.acts || turn.half) {
      auto file = real_.Create(path);
      if (!turn.acts || !file.ok()) return turn.acts ? file.status() : turn.status;
      absl::MutexLock lock(&mutex_);
      written_.push_back(std::make_shared<State>(State{path, 0, 0}));
      return std::make_unique<File>(*this, written_.back(), *std::move(file));
    }
    return turn.status;
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    const Turn turn = Next(/*needs_space=*/false);
    if (!turn.acts && !turn.half) return turn.status;
    const absl::Status status = real_.Rename(from, to);
    absl::MutexLock lock(&mutex_);
    for (const auto& state : written_) {
      if (state->path == from || absl::StartsWith(state->path, from + "/")) {
        state->path = to + state->path.substr(from.size());
      }
    }
    return turn.acts ? status : turn.status;
  }
  absl::Status RemoveAll(const std::string& path) override {
    const Turn turn = Next(/*needs_space=*/false);
    if (turn.acts) return real_.RemoveAll(path);
    if (turn.half && real_.Exists(path)) {
      if (const auto names = real_.List(path); names.ok()) {
        for (size_t i = 0; i < names->size(); i += 2) {
          real_.RemoveAll(JoinPath(path, (*names)[i])).IgnoreError();
        }
      }
    }
    return turn.status;
  }
  absl::Status MakeDirs(const std::string& path) override {
    const Turn turn = Next(/*needs_space=*/true);
    if (turn.acts || turn.half) {
      const absl::Status status = real_.MakeDirs(path);
      return turn.acts ? status : turn.status;
    }
    return turn.status;
  }

 private:
  struct State {
    std::string path;
    uint64_t synced = 0, size = 0;
  };
  struct Turn {
    bool acts = true;   // the operation is done
    bool half = false;  // or a part of it
    absl::Status status;
  };
  class File final : public WritableFile {
   public:
    File(FaultFiles& owner, std::shared_ptr<State> state, std::unique_ptr<WritableFile> file)
        : owner_(owner), state_(std::move(state)), file_(std::move(file)) {}
    absl::Status Append(absl::Span<const uint8_t> bytes) override {
      const Turn turn = owner_.Next(/*needs_space=*/true);
      if (turn.half) {
        const uint64_t size = owner_.Below(bytes.size() + 1);
        file_->Append(bytes.subspan(0, size)).IgnoreError();
      }
      if (!turn.acts) return turn.status;
      state_->size += bytes.size();
      return file_->Append(bytes);
    }
    absl::Status Sync() override {
      const Turn turn = owner_.Next(/*needs_space=*/true);
      if (!turn.acts) return turn.status;
      const absl::Status status = file_->Sync();
      if (status.ok()) state_->synced = state_->size;
      return status;
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    FaultFiles& owner_;
    std::shared_ptr<State> state_;
    std::unique_ptr<WritableFile> file_;
  };

  uint64_t Below(uint64_t bound) {
    absl::MutexLock lock(&mutex_);
    return random_.Below(bound);
  }
  Turn Next(bool needs_space) {
    absl::MutexLock lock(&mutex_);
    const int64_t i = num_operations_++;
    if (fault_ == Fault::kNone || i < at_) return {};
    switch (fault_) {
      case Fault::kOnce:
        if (i > at_) return {};
        failed_ = true;
        return {false, false, absl::UnavailableError("input/output error")};
      case Fault::kDiskFull:
        if (!needs_space) return {};
        failed_ = true;
        return {false, true, absl::ResourceExhaustedError("no space left on device")};
      default:
        failed_ = true;
        return {false, i == at_ && random_.Below(2) == 0, absl::UnavailableError("killed")};
    }
  }

  const Fault fault_;
  const int64_t at_;
  Files& real_ = Files::Real();
  mutable absl::Mutex mutex_;
  PhiloxStream random_ ABSL_GUARDED_BY(mutex_);
  int64_t num_operations_ ABSL_GUARDED_BY(mutex_) = 0;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<State>> written_ ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::testing
