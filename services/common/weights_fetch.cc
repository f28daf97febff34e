#include "services/common/weights_fetch.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/weights/delta.h"
#include "services/common/channel.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "services/common/weights_relay.h"
#include "stretto/v1/weights.grpc.pb.h"

namespace stretto::services {
namespace {
using engine::GrowingTensors;
using engine::Manifest;
using engine::SharedBytes;

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("weights transfer: ", what));
}

absl::StatusOr<DType> ParseDType(const std::string& name) {
  for (const DType type : {DType::kBF16, DType::kF32}) {
    if (Name(type) == name) return type;
  }
  return Corrupt(absl::StrCat("a tensor of dtype '", name, "'"));
}

absl::StatusOr<Manifest> FromProto(const v1::WeightsManifest& proto) {
  Manifest manifest;
  for (const v1::TensorManifest& tensor : proto.tensors()) {
    ASSIGN_OR_RETURN(const DType dtype, ParseDType(tensor.dtype()));
    manifest.push_back({.name = tensor.name(),
                        .dtype = dtype,
                        .shape = {tensor.shape().begin(), tensor.shape().end()},
                        .hash = tensor.hash()});
  }
  return manifest;
}

// Ends a call that nobody wants any more, or at which nothing happens.
class CallGuard {
 public:
  // Where there is no other source, this one has more time.
  CallGuard(grpc::ClientContext* context, const FetchRequest& request, bool has_other)
      : context_(context), request_(request), has_other_(has_other) {
    EndIn(has_other ? request.first_answer_ms : request.reconnect_ms);
    thread_ = std::thread([this] { Run(); });
  }
  ~CallGuard() {
    {
      absl::MutexLock lock(&mutex_);
      is_over_ = true;
    }
    thread_.join();
  }
  void Progress() {
    absl::MutexLock lock(&mutex_);
    EndIn(has_other_ ? request_.stall_ms : request_.reconnect_ms);
  }
  // What the call's status means.
  absl::Status Explain(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    return reason_.ok() ? status : reason_;
  }
  bool is_silent() {
    absl::MutexLock lock(&mutex_);
    return is_silent_;
  }

 private:
  void EndIn(int64_t ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    end_ns_ = Clock::Real().NowNs() + ms * 1'000'000;
  }
  void Run() {
    absl::MutexLock lock(&mutex_);
    while (!mutex_.AwaitWithTimeout(absl::Condition(&is_over_), absl::Milliseconds(50))) {
      if (request_.cancelled && request_.cancelled()) {
        reason_ = absl::CancelledError("no longer wanted");
      } else if (Clock::Real().NowNs() > end_ns_) {
        reason_ = absl::UnavailableError("nothing comes from it");
        is_silent_ = true;
      }
      if (!reason_.ok()) {
        context_->TryCancel();
        return;
      }
    }
  }

  grpc::ClientContext* context_;
  const FetchRequest& request_;
  const bool has_other_;
  absl::Mutex mutex_;
  int64_t end_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_silent_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status reason_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

struct WeightsSource {
  std::string address;
  std::unique_ptr<v1::Weights::Stub> stub;
  absl::optional<v1::WeightsManifest> manifest;
  bool is_lost = false;
};

// Applies a delta's tensors as they become whole, so that little is left to do when the last has
// come.
class Applier {
 public:
  Applier(const FetchRequest& request, const Manifest& manifest,
          std::shared_ptr<const GrowingTensors> incoming)
      : request_(request),
        incoming_(std::move(incoming)),
        num_tensors_(manifest.size()),
        patch_(*request.base, request.number, request.hash, manifest) {
    thread_ = std::thread([this] { Run(); });
  }
  // `incoming` is whole, or has failed.
  ~Applier() {
    is_unwanted_ = true;
    if (thread_.joinable()) thread_.join();
  }
  absl::StatusOr<std::shared_ptr<const engine::WeightsVersion>> Finish() {
    thread_.join();
    return patch_.Finish();
  }

 private:
  void Run() {
    for (size_t i = 0; i < num_tensors_ && !is_unwanted_; ++i) {
      const absl::StatusOr<SharedBytes> delta = incoming_->AwaitTensor(i);
      if (!delta.ok()) return;
      const std::shared_ptr<void> computing =
          request_.begin_computing ? request_.begin_computing() : nullptr;
      if (!patch_.Add(delta->span()).ok()) return;
    }
  }

  const FetchRequest& request_;
  const std::shared_ptr<const GrowingTensors> incoming_;
  const size_t num_tensors_;
  engine::VersionPatch patch_;  // the thread's until it has ended
  std::atomic<bool> is_unwanted_{false};
  std::thread thread_;
};

class Fetcher {
 public:
  explicit Fetcher(const FetchRequest& request) : request_(request) {
    for (const std::string& address : request.sources) {
      sources_.push_back({address, v1::Weights::NewStub(MakeChannel(address)), {}, false});
    }
    num_usable_ = sources_.size();
  }
  // Whoever receives from here learns that no more comes.
  ~Fetcher() { GiveUp(absl::UnavailableError("the relay gave up")); }

  absl::StatusOr<FetchedWeights> Run() {
    RETURN_IF_ERROR(Find());
    absl::StatusOr<FetchedWeights> fetched = absl::InternalError("no source is left");
    if (request_.found) RETURN_IF_ERROR(request_.found());
    for (const bool by_delta : {true, false}) {
      if (by_delta && request_.base == nullptr) continue;
      for (WeightsSource& source : sources_) {
        if (source.is_lost) continue;
        absl::Status status = Patiently(source, [&] { return Ask(source); });
        if (status.ok() && by_delta && !HasDelta(*source.manifest)) continue;
        if (status.ok()) {
          status = Patiently(source, [&] {
            fetched = by_delta ? Delta(source) : Snapshot(source);
            return fetched.status();
          });
        }
        if (status.ok()) {
          fetched->num_sources_left = num_left_;
          fetched->bytes_received = bytes_received_;
          fetched->transfer_seconds = static_cast<double>(arrived_ns_ - start_ns_) * 1e-9;
          return fetched;
        }
        if (absl::IsCancelled(status)) return status;
        fetched = Leave(source, status, by_delta ? "delta" : "weights");
      }
    }
    return fetched;
  }

 private:
  // Asks the sources until one has the version.
  absl::Status Find() {
    absl::Status last = absl::InvalidArgumentError("no source to fetch weights from");
    for (WeightsSource& source : sources_) {
      absl::Status status = Patiently(source, [&] { return Ask(source); });
      if (status.ok() || absl::IsCancelled(status)) return status;
      last = Leave(source, status, "manifest");
    }
    return last;
  }
  // A source that can't be reached isn't asked again; one that can has the snapshot, perhaps.
  absl::Status Leave(WeightsSource& source, const absl::Status& status, absl::string_view what) {
    ++num_left_;
    source.is_lost = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
                     !source.manifest.has_value();
    if (source.is_lost) --num_usable_;
    absl::Status annotated = Annotate(
        status, absl::StrCat(what, " of version ", request_.number, " from ", source.address));
    LogWarning(annotated.ToString());
    return annotated;
  }
  bool HasOther() const { return num_usable_ > 1; }

  // Asks a source without another anew while nothing comes from it.
  absl::Status Patiently(WeightsSource& source, const std::function<absl::Status()>& ask) {
    progress_ns_ = Clock::Real().NowNs();
    while (true) {
      is_silent_ = false;
      absl::Status status = ask();
      const int64_t silent_ms = (Clock::Real().NowNs() - progress_ns_) / 1'000'000;
      if (!is_silent_ || HasOther() || silent_ms >= request_.last_stall_ms) return status;
      source.stub = v1::Weights::NewStub(MakeChannel(source.address));
    }
  }
  // What a call that `guard` watched has come to.
  absl::Status Ended(CallGuard& guard, const grpc::Status& status) {
    absl::Status end = guard.Explain(FromGrpc(status));
    is_silent_ = guard.is_silent();
    return end;
  }

  absl::Status Ask(WeightsSource& source) {
    if (source.manifest.has_value()) return absl::OkStatus();
    v1::GetManifestRequest request;
    request.set_run_id(request_.run_id);
    *request.mutable_version() = ToProto(request_.number, request_.hash);
    v1::WeightsManifest proto;
    {
      grpc::ClientContext context;
      SetDeadline(context, request_.timeout_ms);
      CallGuard guard(&context, request_, HasOther());
      RETURN_IF_ERROR(Ended(guard, source.stub->GetManifest(&context, request, &proto)));
    }
    if (proto.version().number() != request_.number || proto.version().hash() != request_.hash) {
      return Corrupt("the source answers with another version");
    }
    ASSIGN_OR_RETURN(manifest_, FromProto(proto));
    if (!SameTensors(manifest_, request_.expected)) {
      return absl::FailedPreconditionError("the version's tensors are not those of this model");
    }
    if (ManifestHash(manifest_) != request_.hash) {
      return Corrupt("the manifest does not have the announced hash");
    }
    source.manifest = std::move(proto);
    return absl::OkStatus();
  }

  bool HasDelta(const v1::WeightsManifest& manifest) const {
    return std::any_of(manifest.delta_bases().begin(), manifest.delta_bases().end(),
                       [this](const v1::PolicyVersion& base) {
                         return base.number() == request_.base->number &&
                                base.hash() == request_.base->hash;
                       });
  }

  // What has come from an earlier source stays.
  void Begin(const WeightsSource& source, bool by_delta) {
    if (incoming_ != nullptr && is_delta_ == by_delta) return;
    std::vector<int64_t> limits;
    // No encoder makes a delta that is much larger than the tensor.
    for (const auto& entry : manifest_) {
      limits.push_back(by_delta ? entry.NumBytes() * 2 + 1024 : entry.NumBytes());
    }
    incoming_ = std::make_shared<GrowingTensors>(std::move(limits), /*exact=*/!by_delta);
    is_delta_ = by_delta;
    if (by_delta) applier_ = std::make_unique<Applier>(request_, manifest_, incoming_);
    if (request_.relay == nullptr) return;
    request_.relay->Begin(*source.manifest, by_delta ? request_.base.get() : nullptr, incoming_);
  }

  void GiveUp(const absl::Status& status) {
    if (incoming_ != nullptr) incoming_->Fail(status);
    applier_ = nullptr;
    incoming_ = nullptr;
  }

  absl::StatusOr<FetchedWeights> Delta(WeightsSource& source) {
    Begin(source, /*by_delta=*/true);
    v1::FetchDeltaRequest request;
    request.set_run_id(request_.run_id);
    *request.mutable_base() = ToProto(request_.base->number, request_.base->hash);
    *request.mutable_version() = ToProto(request_.number, request_.hash);
    const engine::TensorPiece end = incoming_->End();
    request.set_first_tensor(static_cast<uint32_t>(end.tensor));
    request.set_first_offset(end.offset);
    grpc::ClientContext context;
    RETURN_IF_ERROR(Receive(context, [&] { return source.stub->FetchDelta(&context, request); }));
    return Finished(applier_->Finish(), {.was_delta = true});
  }

  absl::StatusOr<FetchedWeights> Snapshot(WeightsSource& source) {
    if (is_delta_) GiveUp(absl::AbortedError("the delta could not be had"));
    Begin(source, /*by_delta=*/false);
    v1::FetchSnapshotRequest request;
    request.set_run_id(request_.run_id);
    *request.mutable_version() = ToProto(request_.number, request_.hash);
    const engine::TensorPiece end = incoming_->End();
    request.set_first_tensor(static_cast<uint32_t>(end.tensor));
    request.set_first_offset(end.offset);
    grpc::ClientContext context;
    RETURN_IF_ERROR(
        Receive(context, [&] { return source.stub->FetchSnapshot(&context, request); }));
    ASSIGN_OR_RETURN(std::vector<SharedBytes> tensors, incoming_->Tensors());
    const std::shared_ptr<void> computing =
        request_.begin_computing ? request_.begin_computing() : nullptr;
    return Finished(VerifyVersion(request_.number, request_.hash, manifest_, std::move(tensors)),
                    {});
  }

  absl::StatusOr<FetchedWeights> Finished(
      absl::StatusOr<std::shared_ptr<const engine::WeightsVersion>> version,
      FetchedWeights fetched) {
    if (!version.ok()) {
      GiveUp(absl::AbortedError(version.status().message()));
      return version.status();
    }
    fetched.version = *std::move(version);
    if (request_.relay != nullptr) request_.relay->Hold(fetched.version);
    return fetched;
  }

  // Bytes that are out of order or too many make what has come worthless; a broken call does not.
  template <class Call>
  absl::Status Receive(grpc::ClientContext& context, const Call& call) {
    SetDeadline(context, request_.timeout_ms);
    CallGuard guard(&context, request_, HasOther());
    const std::unique_ptr<grpc::ClientReader<v1::WeightsChunk>> reader = call();
    v1::WeightsChunk chunk;
    absl::Status status;
    while (status.ok() && reader->Read(&chunk)) {
      guard.Progress();
      progress_ns_ = Clock::Real().NowNs();
      bytes_received_ += chunk.data().size();
      status = incoming_->Add(chunk.tensor(), chunk.offset(), chunk.data(), chunk.last_of_tensor());
    }
    if (!status.ok()) context.TryCancel();
    const absl::Status end = Ended(guard, reader->Finish());
    if (!status.ok()) GiveUp(absl::AbortedError(status.message()));
    if (!status.ok() || !end.ok()) return status.ok() ? end : status;
    // A source that says that this was all, and it wasn't, is wrong from the beginning.
    absl::Status all = incoming_->Tensors().status();
    if (!all.ok()) GiveUp(absl::AbortedError(all.message()));
    arrived_ns_ = Clock::Real().NowNs();
    return all;
  }

  const FetchRequest& request_;
  const int64_t start_ns_ = Clock::Real().NowNs();
  int64_t arrived_ns_ = 0, progress_ns_ = 0;
  bool is_silent_ = false;  // the last call ended because nothing came
  std::vector<WeightsSource> sources_;
  size_t num_usable_ = 0;
  int num_left_ = 0;
  uint64_t bytes_received_ = 0;
  Manifest manifest_;
  std::shared_ptr<GrowingTensors> incoming_;
  std::unique_ptr<Applier> applier_;  // of a delta
  bool is_delta_ = false;
};
}  // namespace

absl::StatusOr<FetchedWeights> FetchWeights(const FetchRequest& request) {
  return Fetcher(request).Run();
}
}  // namespace stretto::services
