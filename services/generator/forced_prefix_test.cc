#include "services/generator/forced_prefix.h"

#include <catch2/catch.hpp>
#include <functional>
#include <limits>

#include "absl/strings/match.h"
#include "base/testing.h"

namespace stretto::services {
namespace {
using Change = std::function<void(v1::SampleRequest&)>;

v1::SampleRequest Good() {
  v1::SampleRequest sample;
  sample.set_sample_index(2);
  v1::Completion& prefix = *sample.mutable_prefix();
  for (int i = 0; i < 3; ++i) {
    prefix.add_ids(10 + i);
    prefix.add_logprobs(-0.5f);
    prefix.add_sampling_logprobs(0);
    prefix.add_versions(i / 2);
  }
  return sample;
}

absl::StatusOr<std::vector<int32_t>> Check(const Change& change) {
  v1::SampleRequest sample = Good();
  change(sample);
  return CheckForcedPrefix(
      sample, "samples[1]",
      {.vocab_size = 100, .max_tokens = 4, .stop_ids = {99, 50}, .version = 1});
}

TEST_CASE("what a completion can be continued from is taken") {
  const auto taken = [](const Change& change) { return Check(change).ok(); };
  CHECK(Check([](auto&) {}).value() == std::vector<int32_t>{10, 11, 12});
  CHECK(taken([](auto& s) { s.clear_prefix(); }));
  CHECK(taken([](auto& s) { s.mutable_prefix()->clear_logprobs(); }));
  CHECK(taken([](auto& s) { s.mutable_prefix()->set_sample_index(2); }));
  CHECK(
      taken([](auto& s) { s.mutable_prefix()->set_ids(2, 99); }));  // it has ended, and will say so
  CHECK(taken([](auto& s) { s.mutable_prefix()->set_logprobs(0, 1e-7f); }));
  CHECK(taken([](auto& s) { s.mutable_prefix()->set_finish_reason(v1::FINISH_REASON_ABORTED); }));
}

TEST_CASE("what it cannot be continued from is refused by the field's name") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto refused = [](const std::string& field, const Change& change) {
    const absl::Status status = Check(change).status();
    INFO(status << " for " << field);
    CHECK(absl::IsInvalidArgument(status));
    CHECK(absl::StartsWith(status.message(), "samples[1].prefix." + field));
  };
  refused("ids[1] is 100", [](auto& s) { s.mutable_prefix()->set_ids(1, 100); });
  refused("ids[0] is -1", [](auto& s) { s.mutable_prefix()->set_ids(0, -1); });
  refused("ids[1] is 50, which ends", [](auto& s) { s.mutable_prefix()->set_ids(1, 50); });
  refused("ids: 5 tokens", [](auto& s) {
    s.mutable_prefix()->add_ids(1);
    s.mutable_prefix()->add_ids(1);
  });
  for (const float value : {nan, infinity, -infinity, 0.5f}) {
    refused("logprobs[2]", [value](auto& s) { s.mutable_prefix()->set_logprobs(2, value); });
    refused("sampling_logprobs[0]",
            [value](auto& s) { s.mutable_prefix()->set_sampling_logprobs(0, value); });
  }
  refused("logprobs: 4 entries", [](auto& s) { s.mutable_prefix()->add_logprobs(-1); });
  refused("versions: 4 entries", [](auto& s) { s.mutable_prefix()->add_versions(1); });
  refused("versions[2] is 2", [](auto& s) { s.mutable_prefix()->set_versions(2, 2); });
  refused("versions[0] is -1", [](auto& s) { s.mutable_prefix()->set_versions(0, -1); });
  refused("versions[1] is 0 behind 1", [](auto& s) { s.mutable_prefix()->set_versions(0, 1); });
  refused("sample_index is 7", [](auto& s) { s.mutable_prefix()->set_sample_index(7); });
  refused("finish_reason is FINISH_REASON_STOP",
          [](auto& s) { s.mutable_prefix()->set_finish_reason(v1::FINISH_REASON_STOP); });
}
}  // namespace
}  // namespace stretto::services
