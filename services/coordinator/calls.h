// Calls of the coordinator to members: asynchronous, each with a deadline, each answered exactly
// once through `post` (which brings the answer to the coordinator's loop). No thread of its own;
// gRPC's threads only gather.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/coordinator/messages.h"

namespace grpc {
class Channel;
class ClientContext;
}  // namespace grpc

namespace stretto::services {
// Thread-safe.
class Calls {
 public:
  using Post = std::function<void(std::function<void()>)>;
  template <class T>
  using Done = std::function<void(absl::StatusOr<T>)>;
  struct Target {
    std::string name, address;
    uint64_t epoch = 0;
  };

  // `post` outlives this object; it may be called until the destructor returns.
  explicit Calls(Post post);
  // Cancels what runs and waits for it.
  ~Calls();

  void Tokenize(const Target& target, v1::TokenizeRequest request, Done<v1::TokenizeResponse> done);
  void Score(const Target& target, v1::ScoreRequest request, Done<v1::ScoreResponse> done);
  void Prepare(const Target& target, v1::PrepareWeightsRequest request,
               Done<v1::PrepareWeightsResponse> done);
  void Commit(const Target& target, v1::CommitWeightsRequest request,
              Done<v1::CommitWeightsResponse> done);
  void TrainerStatus(const Target& target, Done<v1::TrainerStatus> done);
  void SaveCheckpoint(const Target& target, v1::SaveCheckpointRequest request,
                      Done<v1::SaveCheckpointResponse> done);
  void PrepareGroup(const Target& target, v1::PrepareGroupRequest request,
                    Done<v1::PrepareGroupResponse> done);
  void JoinGroup(const Target& target, v1::JoinGroupRequest request,
                 Done<v1::JoinGroupResponse> done);
  // The groups may be shared by the calls to all ranks.
  using Batch = std::shared_ptr<const std::vector<v1::ExperienceGroup>>;
  void TrainStep(const Target& target, v1::TrainStepHeader header, Batch groups,
                 Done<v1::TrainStepResponse> done);
  // `group` and `attempt` name the call for CancelGenerate. `on_token`, if any, is posted when the
  // first token has come.
  void Generate(const Target& target, uint64_t group, uint64_t attempt, v1::GenerateRequest request,
                std::function<void()> on_token, Done<std::vector<RolloutRecord>> done);
  void CancelGenerate(uint64_t group, uint64_t attempt);
  void CancelAll();

 private:
  class Running;
  class TrainStepCall;
  class GenerateCall;
  template <class Response>
  class UnaryCall;

  std::shared_ptr<grpc::Channel> ChannelTo(const Target& target);
  std::shared_ptr<grpc::ClientContext> Begin(int64_t timeout_ms);
  void End(const std::shared_ptr<grpc::ClientContext>& context);

  const Post post_;
  absl::Mutex mutex_;
  std::map<std::string, std::pair<std::string, std::shared_ptr<grpc::Channel>>> channels_
      ABSL_GUARDED_BY(mutex_);  // member → (address and epoch, channel)
  std::set<std::shared_ptr<grpc::ClientContext>> running_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<grpc::ClientContext>> generating_
      ABSL_GUARDED_BY(mutex_);
};
}  // namespace stretto::services
