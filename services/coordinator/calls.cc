#include "services/coordinator/calls.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "services/common/channel.h"
#include "services/common/grpc_status.h"
#include "stretto/v1/generator.grpc.pb.h"
#include "stretto/v1/scorer.grpc.pb.h"
#include "stretto/v1/trainer.grpc.pb.h"

namespace stretto::services {
namespace {
constexpr int64_t kShortMs = 30'000;
constexpr int64_t kScoreMs = 300'000;
constexpr int64_t kGenerateMs = 600'000;
constexpr int64_t kWeightsMs = 300'000;
constexpr int64_t kTrainMs = 3'600'000;
constexpr int64_t kPrepareGroupMs = 10'000;
}  // namespace

// The callbacks below hold what they need by shared_ptr; `context` is among the running calls until
// its answer has been posted.
Calls::Calls(Post post) : post_(std::move(post)) {}

Calls::~Calls() {
  CancelAll();
  absl::MutexLock lock(&mutex_);
  const auto is_idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return running_.empty(); };
  mutex_.Await(absl::Condition(&is_idle));
}

std::shared_ptr<grpc::Channel> Calls::ChannelTo(const Target& target) {
  const std::string life = absl::StrCat(target.address, "#", target.epoch);
  absl::MutexLock lock(&mutex_);
  auto& [known_life, channel] = channels_[target.name];
  if (channel == nullptr || known_life != life) {
    known_life = life;
    channel = MakeChannel(target.address);
  }
  return channel;
}

std::shared_ptr<grpc::ClientContext> Calls::Begin(int64_t timeout_ms) {
  auto context = std::make_shared<grpc::ClientContext>();
  SetDeadline(*context, timeout_ms);
  absl::MutexLock lock(&mutex_);
  running_.insert(context);
  return context;
}

void Calls::End(const std::shared_ptr<grpc::ClientContext>& context) {
  absl::MutexLock lock(&mutex_);
  running_.erase(context);
}

void Calls::CancelAll() {
  absl::MutexLock lock(&mutex_);
  for (const auto& context : running_) context->TryCancel();
}

void Calls::CancelGenerate(uint64_t group, uint64_t attempt) {
  std::shared_ptr<grpc::ClientContext> context;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = generating_.find({group, attempt});
    if (it != generating_.end()) context = it->second.lock();
  }
  if (context != nullptr) context->TryCancel();
}

// One unary call; `start` begins it with the stub.
template <class Response>
class Calls::UnaryCall {
 public:
  template <class Stub, class Request>
  static void Start(Calls* calls, std::unique_ptr<Stub> stub, Request request, int64_t timeout_ms,
                    void (Stub::async_interface::*method)(grpc::ClientContext*, const Request*,
                                                          Response*,
                                                          std::function<void(grpc::Status)>),
                    Done<Response> done) {
    struct State {
      std::unique_ptr<Stub> stub;
      Request request;
      Response response;
      Done<Response> done;
    };
    auto context = calls->Begin(timeout_ms);
    auto state = std::make_shared<State>();
    state->stub = std::move(stub);
    state->request = std::move(request);
    state->done = std::move(done);
    (state->stub->async()->*method)(
        context.get(), &state->request, &state->response,
        [calls, context, state](const grpc::Status& status) {
          calls->post_([state, status = FromGrpc(status)] {
            state->done(status.ok() ? absl::StatusOr<Response>(std::move(state->response))
                                    : status);
          });
          calls->End(context);
        });
  }
};

void Calls::Tokenize(const Target& target, v1::TokenizeRequest request,
                     Done<v1::TokenizeResponse> done) {
  UnaryCall<v1::TokenizeResponse>::Start(
      this, v1::Scorer::NewStub(ChannelTo(target)), std::move(request), kShortMs,
      &v1::Scorer::Stub::async_interface::Tokenize, std::move(done));
}

void Calls::Score(const Target& target, v1::ScoreRequest request, Done<v1::ScoreResponse> done) {
  UnaryCall<v1::ScoreResponse>::Start(this, v1::Scorer::NewStub(ChannelTo(target)),
                                      std::move(request), kScoreMs,
                                      &v1::Scorer::Stub::async_interface::Score, std::move(done));
}

void Calls::Prepare(const Target& target, v1::PrepareWeightsRequest request,
                    Done<v1::PrepareWeightsResponse> done) {
  UnaryCall<v1::PrepareWeightsResponse>::Start(
      this, v1::Generator::NewStub(ChannelTo(target)), std::move(request), kWeightsMs,
      &v1::Generator::Stub::async_interface::PrepareWeights, std::move(done));
}

void Calls::Commit(const Target& target, v1::CommitWeightsRequest request,
                   Done<v1::CommitWeightsResponse> done) {
  UnaryCall<v1::CommitWeightsResponse>::Start(
      this, v1::Generator::NewStub(ChannelTo(target)), std::move(request), kWeightsMs,
      &v1::Generator::Stub::async_interface::CommitWeights, std::move(done));
}

void Calls::TrainerStatus(const Target& target, Done<v1::TrainerStatus> done) {
  UnaryCall<v1::TrainerStatus>::Start(
      this, v1::Trainer::NewStub(ChannelTo(target)), v1::GetTrainerStatusRequest(), kShortMs,
      &v1::Trainer::Stub::async_interface::GetTrainerStatus, std::move(done));
}

void Calls::SaveCheckpoint(const Target& target, v1::SaveCheckpointRequest request,
                           Done<v1::SaveCheckpointResponse> done) {
  UnaryCall<v1::SaveCheckpointResponse>::Start(
      this, v1::Trainer::NewStub(ChannelTo(target)), std::move(request), kTrainMs,
      &v1::Trainer::Stub::async_interface::SaveCheckpoint, std::move(done));
}

void Calls::PrepareGroup(const Target& target, v1::PrepareGroupRequest request,
                         Done<v1::PrepareGroupResponse> done) {
  UnaryCall<v1::PrepareGroupResponse>::Start(
      this, v1::Trainer::NewStub(ChannelTo(target)), std::move(request), kPrepareGroupMs,
      &v1::Trainer::Stub::async_interface::PrepareGroup, std::move(done));
}

void Calls::JoinGroup(const Target& target, v1::JoinGroupRequest request,
                      Done<v1::JoinGroupResponse> done) {
  UnaryCall<v1::JoinGroupResponse>::Start(
      this, v1::Trainer::NewStub(ChannelTo(target)), std::move(request), kTrainMs,
      &v1::Trainer::Stub::async_interface::JoinGroup, std::move(done));
}

// Streams the header and the groups; deletes itself when the call is over.
class Calls::TrainStepCall : public grpc::ClientWriteReactor<v1::TrainStepChunk> {
 public:
  TrainStepCall(Calls* calls, std::unique_ptr<v1::Trainer::Stub> stub, v1::TrainStepHeader header,
                Batch groups, Done<v1::TrainStepResponse> done)
      : calls_(calls),
        stub_(std::move(stub)),
        groups_(std::move(groups)),
        done_(std::move(done)),
        context_(calls->Begin(kTrainMs)) {
    *chunk_.mutable_header() = std::move(header);
    stub_->async()->TrainStep(context_.get(), &response_, this);
    StartWrite(&chunk_);
    StartCall();
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return;  // the call has failed; OnDone says how
    if (next_ == groups_->size()) {
      StartWritesDone();
      return;
    }
    *chunk_.mutable_group() = (*groups_)[next_++];
    StartWrite(&chunk_);
  }

  void OnDone(const grpc::Status& status) override {
    calls_->post_([done = std::move(done_), status = FromGrpc(status),
                   response = std::move(response_)]() mutable {
      done(status.ok() ? absl::StatusOr<v1::TrainStepResponse>(std::move(response)) : status);
    });
    calls_->End(context_);
    delete this;
  }

 private:
  Calls* const calls_;
  const std::unique_ptr<v1::Trainer::Stub> stub_;
  const Batch groups_;
  size_t next_ = 0;
  v1::TrainStepChunk chunk_;
  v1::TrainStepResponse response_;
  Done<v1::TrainStepResponse> done_;
  const std::shared_ptr<grpc::ClientContext> context_;
};

void Calls::TrainStep(const Target& target, v1::TrainStepHeader header, Batch groups,
                      Done<v1::TrainStepResponse> done) {
  new TrainStepCall(this, v1::Trainer::NewStub(ChannelTo(target)), std::move(header),
                    std::move(groups), std::move(done));
}

// Reads the events of one group; deletes itself when the call is over.
class Calls::GenerateCall : public grpc::ClientReadReactor<v1::GenerateEvent> {
 public:
  GenerateCall(Calls* calls, std::unique_ptr<v1::Generator::Stub> stub,
               std::pair<uint64_t, uint64_t> key, v1::GenerateRequest request,
               std::function<void()> on_token, Done<std::vector<RolloutRecord>> done)
      : calls_(calls),
        stub_(std::move(stub)),
        key_(key),
        request_(std::move(request)),
        collector_(static_cast<uint32_t>(request_.samples_size()),
                   request_.sampling().max_tokens()),
        on_token_(std::move(on_token)),
        done_(std::move(done)),
        context_(calls->Begin(kGenerateMs)) {
    {
      absl::MutexLock lock(&calls_->mutex_);
      calls_->generating_[key_] = context_;
    }
    stub_->async()->Generate(context_.get(), &request_, this);
    StartRead(&event_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (status_.ok()) status_ = collector_.Add(event_);
    if (on_token_ && event_.ids_size() > 0) calls_->post_(std::exchange(on_token_, nullptr));
    if (!status_.ok()) {
      context_->TryCancel();
      return;
    }
    StartRead(&event_);
  }

  void OnDone(const grpc::Status& status) override {
    if (status_.ok()) status_ = FromGrpc(status);
    auto result =
        status_.ok() ? collector_.Finish() : absl::StatusOr<std::vector<RolloutRecord>>(status_);
    calls_->post_([done = std::move(done_), result = std::move(result)]() mutable {
      done(std::move(result));
    });
    {
      absl::MutexLock lock(&calls_->mutex_);
      calls_->generating_.erase(key_);
    }
    calls_->End(context_);
    delete this;
  }

 private:
  Calls* const calls_;
  const std::unique_ptr<v1::Generator::Stub> stub_;
  const std::pair<uint64_t, uint64_t> key_;
  const v1::GenerateRequest request_;
  RolloutCollector collector_;
  v1::GenerateEvent event_;
  absl::Status status_;
  std::function<void()> on_token_;
  Done<std::vector<RolloutRecord>> done_;
  const std::shared_ptr<grpc::ClientContext> context_;
};

void Calls::Generate(const Target& target, uint64_t group, uint64_t attempt,
                     v1::GenerateRequest request, std::function<void()> on_token,
                     Done<std::vector<RolloutRecord>> done) {
  new GenerateCall(this, v1::Generator::NewStub(ChannelTo(target)), {group, attempt},
                   std::move(request), std::move(on_token), std::move(done));
}
}  // namespace stretto::services
