#include "services/common/weights_rpc.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "services/common/grpc_status.h"
#include "stretto/v1/weights.grpc.pb.h"

namespace stretto::services {
namespace {
using engine::GrowingTensors;
using engine::TensorPiece;
using Source = absl::StatusOr<std::shared_ptr<const GrowingTensors>>;

// So small that a chain of relays has its first bytes everywhere long before the last have come.
constexpr size_t kDeltaChunkBytes = size_t{16} << 10, kSnapshotChunkBytes = size_t{128} << 10;
constexpr absl::Duration kSignOfLife = absl::Milliseconds(200);
// A relay that gets nothing itself for so long lets its receivers go to others: two that wait for
// one another, by plans made at different times, part again.
constexpr int64_t kMaxIdleNs = 10'000'000'000;

class StoreProvider final : public WeightsProvider {
 public:
  StoreProvider(const engine::WeightsStore* store, MakeDelta make_delta)
      : store_(store), make_delta_(std::move(make_delta)) {}

  absl::StatusOr<v1::WeightsManifest> Manifest(const v1::PolicyVersion& proto) override {
    ASSIGN_OR_RETURN(const auto version, Find(proto));
    v1::WeightsManifest manifest = ToProto(*version);
    if (make_delta_) {
      for (const auto& base : store_->Versions()) {
        if (base->number >= version->number) continue;
        *manifest.add_delta_bases() = ToProto(base->number, base->hash);
      }
      return manifest;
    }
    for (const auto& delta : store_->DeltasTo(*version)) {
      *manifest.add_delta_bases() = ToProto(delta->base_number, delta->base_hash);
    }
    return manifest;
  }

  Source Snapshot(const v1::PolicyVersion& proto) override {
    ASSIGN_OR_RETURN(const auto version, Find(proto));
    return std::make_shared<const GrowingTensors>(version->tensors);
  }

  Source Delta(const v1::PolicyVersion& base, const v1::PolicyVersion& version) override {
    const auto delta =
        store_->GetDelta(base.number(), base.hash(), version.number(), version.hash());
    if (delta.ok()) return std::make_shared<const GrowingTensors>((*delta)->tensors);
    return make_delta_ ? make_delta_(base, version) : Source(delta.status());
  }

 private:
  absl::StatusOr<std::shared_ptr<const engine::WeightsVersion>> Find(
      const v1::PolicyVersion& version) {
    if (version.number() < 0) return store_->Newest();
    return store_->Get(version.number(), version.hash());
  }

  const engine::WeightsStore* store_;
  const MakeDelta make_delta_;
};

class WeightsServiceImpl final : public v1::Weights::Service {
 public:
  WeightsServiceImpl(WeightsProvider* provider, Metrics* metrics)
      : provider_(provider),
        deltas_(SentBytes(metrics, "delta")),
        snapshots_(SentBytes(metrics, "snapshot")) {}

  grpc::Status GetManifest(grpc::ServerContext*, const v1::GetManifestRequest* request,
                           v1::WeightsManifest* response) override {
    auto manifest = provider_->Manifest(request->version());
    if (!manifest.ok()) return ToGrpc(manifest.status());
    *response = *std::move(manifest);
    return grpc::Status::OK;
  }

  grpc::Status FetchSnapshot(grpc::ServerContext*, const v1::FetchSnapshotRequest* request,
                             grpc::ServerWriter<v1::WeightsChunk>* writer) override {
    const Source source = provider_->Snapshot(request->version());
    if (!source.ok()) return ToGrpc(source.status());
    return ToGrpc(Send(**source, {request->first_tensor(), request->first_offset(), "", false},
                       kSnapshotChunkBytes, snapshots_, *writer));
  }

  grpc::Status FetchDelta(grpc::ServerContext*, const v1::FetchDeltaRequest* request,
                          grpc::ServerWriter<v1::WeightsChunk>* writer) override {
    const Source source = provider_->Delta(request->base(), request->version());
    if (!source.ok()) return ToGrpc(source.status());
    return ToGrpc(Send(**source, {request->first_tensor(), request->first_offset(), "", false},
                       kDeltaChunkBytes, deltas_, *writer));
  }

 private:
  static Counter SentBytes(Metrics* metrics, const std::string& kind) {
    return metrics->counter("stretto_weights_sent_bytes_total",
                            "Weights sent to others: by trainers, and by generators that relay.",
                            {{"kind", kind}});
  }

  // gRPC's flow control holds the writer back; nothing but the chunk in hand is copied.
  static absl::Status Send(const GrowingTensors& tensors, TensorPiece piece, size_t chunk_bytes,
                           const Counter& sent, grpc::ServerWriter<v1::WeightsChunk>& writer) {
    v1::WeightsChunk chunk;
    int64_t last_ns = Clock::Real().NowNs();
    while (true) {
      ASSIGN_OR_RETURN(const GrowingTensors::Found found,
                       tensors.Next(piece, chunk_bytes, kSignOfLife));
      if (found == GrowingTensors::Found::kEnd) return absl::OkStatus();
      const int64_t now_ns = Clock::Real().NowNs();
      if (found == GrowingTensors::Found::kPiece) {
        last_ns = now_ns;
      } else if (now_ns - last_ns > kMaxIdleNs) {
        return absl::UnavailableError("nothing comes from this relay's own source");
      }
      chunk.set_tensor(static_cast<uint32_t>(piece.tensor));
      chunk.set_offset(piece.offset);
      chunk.set_last_of_tensor(piece.last);
      chunk.mutable_data()->swap(piece.data);
      if (!writer.Write(chunk)) return absl::CancelledError("the receiver has gone");
      chunk.mutable_data()->swap(piece.data);
      sent.Add(static_cast<double>(piece.data.size()));
    }
  }

  WeightsProvider* provider_;
  const Counter deltas_, snapshots_;
};
}  // namespace

v1::PolicyVersion ToProto(int64_t number, const std::string& hash) {
  v1::PolicyVersion proto;
  proto.set_number(number);
  proto.set_hash(hash);
  return proto;
}

v1::WeightsManifest ToProto(const engine::WeightsVersion& version) {
  v1::WeightsManifest proto;
  *proto.mutable_version() = ToProto(version.number, version.hash);
  for (const engine::TensorEntry& entry : version.manifest) {
    v1::TensorManifest* tensor = proto.add_tensors();
    tensor->set_name(entry.name);
    tensor->set_dtype(std::string(Name(entry.dtype)));
    for (const int64_t extent : entry.shape) tensor->add_shape(extent);
    tensor->set_hash(entry.hash);
  }
  return proto;
}

std::unique_ptr<WeightsProvider> ProvideStore(const engine::WeightsStore* store,
                                              MakeDelta make_delta) {
  return std::make_unique<StoreProvider>(store, std::move(make_delta));
}

std::unique_ptr<grpc::Service> MakeWeightsService(WeightsProvider* provider, Metrics* metrics) {
  return std::make_unique<WeightsServiceImpl>(provider, metrics);
}
}  // namespace stretto::services
