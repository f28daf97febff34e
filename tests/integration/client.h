// Calls to services as tests make them: blocking, with a deadline, results as plain values.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "stretto/v1/generator.grpc.pb.h"
#include "stretto/v1/scorer.grpc.pb.h"
#include "stretto/v1/trainer.grpc.pb.h"
#include "stretto/v1/weights.grpc.pb.h"

namespace stretto::testing {
inline constexpr int64_t kCallTimeoutMs = 30000;

struct CallContext : grpc::ClientContext {
  explicit CallContext(int64_t timeout_ms = kCallTimeoutMs) {
    set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
    set_wait_for_ready(true);
  }
};

template <class Service>
std::unique_ptr<typename Service::Stub> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  return Service::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

struct Generated {
  grpc::Status status;
  std::map<uint32_t, v1::Completion> completions;  // by sample
  std::map<uint32_t, std::string> texts;
};

inline v1::GenerateRequest MakeGenerateRequest(const std::vector<int32_t>& prompt, int num_samples,
                                               int max_tokens, float temperature = 1.0f) {
  v1::GenerateRequest request;
  request.mutable_prompt_id()->set_index(5);
  request.mutable_prompt_ids()->Add(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_temperature(temperature);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.set_run_seed(7);
  for (int i = 0; i < num_samples; ++i) {
    request.add_samples()->set_sample_index(static_cast<uint32_t>(i));
  }
  request.mutable_expected_version()->set_number(-1);
  return request;
}

inline Generated Generate(v1::Generator::Stub& stub, const v1::GenerateRequest& request) {
  Generated result;
  CallContext context;
  auto reader = stub.Generate(&context, request);
  v1::GenerateEvent event;
  while (reader->Read(&event)) {
    v1::Completion& completion = result.completions[event.sample_index()];
    completion.set_sample_index(event.sample_index());
    completion.mutable_ids()->MergeFrom(event.ids());
    completion.mutable_logprobs()->MergeFrom(event.logprobs());
    completion.mutable_versions()->MergeFrom(event.versions());
    completion.mutable_sampling_logprobs()->MergeFrom(event.sampling_logprobs());
    if (event.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) {
      completion.set_finish_reason(event.finish_reason());
    }
    result.texts[event.sample_index()] += event.text();
  }
  result.status = reader->Finish();
  return result;
}

// Whether two results have the same completions, to the bit.
inline bool Same(const Generated& a, const Generated& b) {
  if (a.completions.size() != b.completions.size()) return false;
  for (const auto& [index, completion] : a.completions) {
    const auto other = b.completions.find(index);
    if (other == b.completions.end() ||
        completion.SerializeAsString() != other->second.SerializeAsString()) {
      return false;
    }
  }
  return true;
}
}  // namespace stretto::testing
