#include "services/common/weights_rpc.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/weights/delta.h"
#include "services/common/channel.h"
#include "services/common/grpc_status.h"
#include "services/common/log.h"
#include "stretto/v1/weights.grpc.pb.h"

namespace stretto::services {
namespace {
using engine::Bytes;
using engine::Manifest;
using engine::SharedBytes;
using engine::WeightsVersion;

constexpr size_t kChunkBytes = size_t{1} << 20;

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("weights transfer: ", what));
}

v1::WeightsManifest ToProto(const WeightsVersion& version) {
  v1::WeightsManifest proto;
  proto.mutable_version()->set_number(version.number);
  proto.mutable_version()->set_hash(version.hash);
  for (const engine::TensorEntry& entry : version.manifest) {
    v1::TensorManifest* tensor = proto.add_tensors();
    tensor->set_name(entry.name);
    tensor->set_dtype(std::string(Name(entry.dtype)));
    for (const int64_t extent : entry.shape) tensor->add_shape(extent);
    tensor->set_hash(entry.hash);
  }
  return proto;
}

class WeightsServiceImpl final : public v1::Weights::Service {
 public:
  WeightsServiceImpl(const engine::WeightsStore* store, std::function<void(int64_t)> await_deltas)
      : store_(store), await_deltas_(std::move(await_deltas)) {}

  grpc::Status GetManifest(grpc::ServerContext*, const v1::GetManifestRequest* request,
                           v1::WeightsManifest* response) override {
    const auto version = Find(request->version());
    if (!version.ok()) return ToGrpc(version.status());
    if (await_deltas_) await_deltas_((*version)->number);
    *response = ToProto(**version);
    for (const auto& delta : store_->DeltasTo(**version)) {
      v1::PolicyVersion* base = response->add_delta_bases();
      base->set_number(delta->base_number);
      base->set_hash(delta->base_hash);
    }
    return grpc::Status::OK;
  }

  grpc::Status FetchSnapshot(grpc::ServerContext*, const v1::FetchSnapshotRequest* request,
                             grpc::ServerWriter<v1::WeightsChunk>* writer) override {
    const auto version = Find(request->version());
    if (!version.ok()) return ToGrpc(version.status());
    return Send((*version)->tensors, writer);
  }

  grpc::Status FetchDelta(grpc::ServerContext*, const v1::FetchDeltaRequest* request,
                          grpc::ServerWriter<v1::WeightsChunk>* writer) override {
    const auto delta = store_->GetDelta(request->base().number(), request->base().hash(),
                                        request->version().number(), request->version().hash());
    if (!delta.ok()) return ToGrpc(delta.status());
    return Send((*delta)->tensors, writer);
  }

 private:
  absl::StatusOr<std::shared_ptr<const WeightsVersion>> Find(const v1::PolicyVersion& version) {
    if (version.number() < 0) return store_->Newest();
    return store_->Get(version.number(), version.hash());
  }

  // gRPC's flow control holds the writer back; nothing but the chunk in hand is copied.
  static grpc::Status Send(const std::vector<SharedBytes>& tensors,
                           grpc::ServerWriter<v1::WeightsChunk>* writer) {
    v1::WeightsChunk chunk;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const absl::Span<const uint8_t> bytes = tensors[i].span();
      size_t offset = 0;
      do {
        const size_t size = std::min(kChunkBytes, bytes.size() - offset);
        chunk.set_tensor(static_cast<uint32_t>(i));
        chunk.set_offset(offset);
        chunk.set_data(bytes.data() + offset, size);
        offset += size;
        chunk.set_last_of_tensor(offset == bytes.size());
        if (!writer->Write(chunk)) return {grpc::StatusCode::CANCELLED, "the receiver has gone"};
      } while (offset < bytes.size());
    }
    return grpc::Status::OK;
  }

  const engine::WeightsStore* store_;
  const std::function<void(int64_t)> await_deltas_;
};

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

// Puts chunks together that must come in order: tensor by tensor, without holes.
class Assembler {
 public:
  // Tensor i has at most limits[i] bytes; exactly so many when `exact`.
  Assembler(std::vector<int64_t> limits, bool exact) : limits_(std::move(limits)), exact_(exact) {}

  absl::Status Add(const v1::WeightsChunk& chunk) {
    if (done_.size() >= limits_.size()) return Corrupt("more tensors than the manifest has");
    const size_t limit = static_cast<size_t>(limits_[done_.size()]);
    if (chunk.tensor() != done_.size() || chunk.offset() != current_.size()) {
      return Corrupt("a chunk is out of order");
    }
    if (chunk.data().size() > limit - current_.size()) return Corrupt("a tensor is too long");
    if (exact_) current_.reserve(limit);
    current_.insert(current_.end(), chunk.data().begin(), chunk.data().end());
    bytes_received_ += chunk.data().size();
    if (!chunk.last_of_tensor()) return absl::OkStatus();
    if (exact_ && current_.size() != limit) return Corrupt("a tensor is too short");
    done_.emplace_back(std::move(current_));
    current_ = Bytes();
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<SharedBytes>> Finish() {
    if (done_.size() != limits_.size()) return Corrupt("it ended early");
    return std::move(done_);
  }
  uint64_t bytes_received() const { return bytes_received_; }

 private:
  std::vector<int64_t> limits_;
  bool exact_;
  std::vector<SharedBytes> done_;
  Bytes current_;
  uint64_t bytes_received_ = 0;
};

// One source's attempt.
class Fetcher {
 public:
  Fetcher(const FetchRequest& request, const std::string& source)
      : request_(request), stub_(v1::Weights::NewStub(MakeChannel(source))) {}

  absl::StatusOr<FetchedWeights> Run() {
    RETURN_IF_ERROR(FetchManifest());
    if (request_.base != nullptr && HasDelta()) {
      absl::StatusOr<FetchedWeights> fetched = ByDelta();
      if (fetched.ok() || absl::IsCancelled(fetched.status())) return fetched;
      LogWarning("delta to version ", request_.number, ": ", fetched.status().ToString(),
                 "; fetching the snapshot");
    }
    return BySnapshot();
  }

 private:
  absl::Status FetchManifest() {
    v1::GetManifestRequest request;
    request.set_run_id(request_.run_id);
    request.mutable_version()->set_number(request_.number);
    request.mutable_version()->set_hash(request_.hash);
    grpc::ClientContext context;
    SetDeadline(context, request_.timeout_ms);
    RETURN_IF_ERROR(FromGrpc(stub_->GetManifest(&context, request, &proto_)));
    if (proto_.version().number() != request_.number || proto_.version().hash() != request_.hash) {
      return Corrupt("the source answers with another version");
    }
    ASSIGN_OR_RETURN(manifest_, FromProto(proto_));
    if (!SameTensors(manifest_, request_.expected)) {
      return absl::FailedPreconditionError("the version's tensors are not those of this model");
    }
    if (ManifestHash(manifest_) != request_.hash) {
      return Corrupt("the manifest does not have the announced hash");
    }
    return absl::OkStatus();
  }

  bool HasDelta() const {
    return std::any_of(proto_.delta_bases().begin(), proto_.delta_bases().end(),
                       [this](const v1::PolicyVersion& base) {
                         return base.number() == request_.base->number &&
                                base.hash() == request_.base->hash;
                       });
  }

  absl::Status Receive(grpc::ClientContext& context, grpc::ClientReader<v1::WeightsChunk>& reader,
                       Assembler& assembler) {
    v1::WeightsChunk chunk;
    absl::Status status;
    while (status.ok() && reader.Read(&chunk)) {
      status = request_.cancelled && request_.cancelled() ? absl::CancelledError("no longer wanted")
                                                          : assembler.Add(chunk);
    }
    if (!status.ok()) context.TryCancel();
    const absl::Status end = FromGrpc(reader.Finish());
    return status.ok() ? end : status;
  }

  absl::StatusOr<FetchedWeights> ByDelta() {
    v1::FetchDeltaRequest request;
    request.set_run_id(request_.run_id);
    request.mutable_base()->set_number(request_.base->number);
    request.mutable_base()->set_hash(request_.base->hash);
    *request.mutable_version() = proto_.version();
    std::vector<int64_t> limits;
    // No encoder makes a delta that is much larger than the tensor.
    for (const auto& entry : manifest_) limits.push_back(entry.NumBytes() * 2 + 1024);
    Assembler assembler(std::move(limits), /*exact=*/false);
    grpc::ClientContext context;
    SetDeadline(context, request_.timeout_ms);
    RETURN_IF_ERROR(Receive(context, *stub_->FetchDelta(&context, request), assembler));
    ASSIGN_OR_RETURN(const std::vector<SharedBytes> deltas, assembler.Finish());
    FetchedWeights fetched{.bytes_received = assembler.bytes_received(), .was_delta = true};
    ASSIGN_OR_RETURN(fetched.version, ApplyVersionDelta(*request_.base, request_.number,
                                                        request_.hash, manifest_, deltas));
    return fetched;
  }

  absl::StatusOr<FetchedWeights> BySnapshot() {
    v1::FetchSnapshotRequest request;
    request.set_run_id(request_.run_id);
    *request.mutable_version() = proto_.version();
    std::vector<int64_t> limits;
    for (const auto& entry : manifest_) limits.push_back(entry.NumBytes());
    Assembler assembler(std::move(limits), /*exact=*/true);
    grpc::ClientContext context;
    SetDeadline(context, request_.timeout_ms);
    RETURN_IF_ERROR(Receive(context, *stub_->FetchSnapshot(&context, request), assembler));
    ASSIGN_OR_RETURN(std::vector<SharedBytes> tensors, assembler.Finish());
    FetchedWeights fetched{.bytes_received = assembler.bytes_received()};
    ASSIGN_OR_RETURN(fetched.version,
                     VerifyVersion(request_.number, request_.hash, manifest_, std::move(tensors)));
    return fetched;
  }

  const FetchRequest& request_;
  std::unique_ptr<v1::Weights::Stub> stub_;
  v1::WeightsManifest proto_;
  Manifest manifest_;
};
}  // namespace

std::unique_ptr<grpc::Service> MakeWeightsService(const engine::WeightsStore* store,
                                                  std::function<void(int64_t)> await_deltas) {
  return std::make_unique<WeightsServiceImpl>(store, std::move(await_deltas));
}

absl::StatusOr<FetchedWeights> FetchWeights(const FetchRequest& request) {
  absl::Status last = absl::InvalidArgumentError("no source to fetch weights from");
  for (const std::string& source : request.sources) {
    absl::StatusOr<FetchedWeights> fetched = Fetcher(request, source).Run();
    if (fetched.ok() || absl::IsCancelled(fetched.status())) return fetched;
    last = Annotate(fetched.status(), absl::StrCat("weights from ", source));
    LogWarning(last.ToString());
  }
  return last;
}
}  // namespace stretto::services
