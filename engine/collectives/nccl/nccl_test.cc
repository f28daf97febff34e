// Collectives through NCCL are held to the same conformance test as those over TCP, on as many
// ranks as there are CUDA devices; that needs two. Without them: what ranks are told.
#include "engine/collectives/nccl/nccl_exchange.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "base/clock.h"
#include "engine/collectives/conformance.h"
#include "engine/collectives/subgroup.h"
#include "engine/collectives/testing.h"

namespace stretto::engine {
namespace {
CommunicatorOptions Through(int device) {
  CommunicatorOptions options;
  options.timeout = absl::Seconds(20);
  options.connect_timeout = absl::Seconds(60);
  options.carrier = OverNccl(device);
  return options;
}

TEST_CASE("every collective does what its definition says through NCCL") {
  const int num_devices = NumNcclDevices();
  if (num_devices < 2) {
    WARN("skipped: NCCL needs a CUDA device for each of two ranks, found " << num_devices);
  }
  for (int n = 2; n <= std::min(num_devices, 4); ++n) {
    INFO(n << " ranks");
    for (const std::string& wrong :
         testing::RunRanks<std::string>(n, testing::CheckCollectives, Through)) {
      CHECK(wrong == "");
    }
  }
}

TEST_CASE(
    "groups among the members of one through NCCL use NCCL, and ranks that disagree are told") {
  if (NumNcclDevices() < 2) return;
  const auto body = [](Communicator& c) -> absl::Status {
    auto both = JoinSubgroup(c, "both", {0, 1});
    if (!both.ok()) return both.status();
    if ((*both)->carrier() == nullptr) return absl::InternalError("over TCP");
    std::vector<float> a = {1.0f};
    const absl::Status sum = (*both)->AllReduce(absl::MakeSpan(a));
    if (!sum.ok() || a[0] != 2.0f) return absl::InternalError("the sum");
    std::vector<uint8_t> mine(c.rank() == 1 ? 31 : 30), all(mine.size() * 2);
    return c.AllGather(mine, absl::MakeSpan(all));
  };
  for (const absl::Status& s : testing::RunRanks<absl::Status>(2, body, Through)) {
    CHECK(absl::IsFailedPrecondition(s));
    CHECK_THAT(std::string(s.message()), Catch::Contains("ranks disagree"));
  }
}

TEST_CASE("a rank without a device is named, by all, and nobody waits for it") {
  const int none = NumNcclDevices();  // the number after the last device's
  const auto status = [](absl::StatusOr<std::unique_ptr<Communicator>> group) {
    return group.status();
  };
  const double begin = Clock::Real().NowSeconds();
  for (const absl::Status& s : testing::JoinRanks<absl::Status>(
           3, status, [none](int rank) { return rank == 1 ? Through(none) : Through(none + 1); })) {
    INFO(s);
    CHECK(absl::IsFailedPrecondition(s));
    CHECK_THAT(std::string(s.message()),
               Catch::Contains("has no CUDA device") && Catch::Contains("CUDA_VISIBLE_DEVICES"));
  }
  CHECK(Clock::Real().NowSeconds() - begin < 30);
  // One rank is its own group, on any machine.
  const auto alone = testing::JoinRanks<absl::Status>(1, status, Through);
  CHECK(alone[0].ok());
}
}  // namespace
}  // namespace stretto::engine
