// Every collective on groups of one to four ranks, with random sizes (none, one, not divisible),
// against its definition; sums to the bit; bytes on the wire against the formulas.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>

#include "base/bfloat16.h"
#include "base/testing.h"
#include "engine/collectives/conformance.h"
#include "engine/collectives/subgroup.h"
#include "engine/collectives/testing.h"

namespace stretto::engine {
namespace {
using testing::CheckCollectives;
using testing::RunRanks;
using testing::SameBits;
using testing::TreeOfRanks;
using testing::Values;

TEST_CASE("every collective does what its definition says, on one to four ranks") {
  INFO("seed " << stretto::testing::Seed());
  for (int n = 1; n <= 4; ++n) {
    INFO(n << " ranks");
    for (const std::string& wrong : RunRanks<std::string>(n, CheckCollectives)) CHECK(wrong == "");
  }
}

TEST_CASE("shares of any size, in pieces, overlapped, and bf16 sums rounded once") {
  struct Got {
    std::vector<float> gathered, summed;
    std::vector<uint16_t> rounded;
  };
  constexpr int n = 3;
  const std::vector<int64_t> counts = {5, 0, 70'000};
  const int64_t total = 70'005;
  const auto body = [&](Communicator& c) {
    const int me = c.rank();
    Got got{std::vector<float>(total), std::vector<float>(counts[me]),
            std::vector<uint16_t>(total)};
    const std::vector<float> mine = Values(1, me, counts[me]), whole = Values(2, me, total);
    std::vector<uint16_t> half;
    for (const float v : whole) half.push_back(F32ToBf16(v));
    CollectiveCall gather;
    gather.kind = CollectiveKind::kAllGather;
    gather.dtype = DType::kF32;
    gather.counts = counts;
    gather.num_elements = counts[me];
    gather.input = mine.data();
    gather.output = got.gathered.data();
    CollectiveCall scatter;
    scatter.kind = CollectiveKind::kReduceScatter;
    scatter.dtype = DType::kF32;
    scatter.counts = counts;
    scatter.num_elements = total;
    scatter.plan = SumPlan::OnePerRank(n);
    scatter.parts = {{{me, me + 1}, whole.data()}};
    scatter.output = got.summed.data();
    CollectiveCall reduce = scatter;
    reduce.kind = CollectiveKind::kAllReduce;
    reduce.dtype = DType::kBF16;
    reduce.parts[0].data = half.data();
    reduce.output = got.rounded.data();
    // All three under way at once.
    const CollectiveHandle handles[] = {c.Start(gather), c.Start(scatter), c.Start(reduce)};
    for (const CollectiveHandle& h : handles) STRETTO_CHECK(h.Wait().ok() && h.done());
    return got;
  };
  const std::vector<Got> all = RunRanks<Got>(n, body);
  std::vector<float> gathered;
  for (int r = 0; r < n; ++r) {
    const std::vector<float> theirs = Values(1, r, counts[r]);
    gathered.insert(gathered.end(), theirs.begin(), theirs.end());
  }
  const std::vector<float> sum = TreeOfRanks(2, n, total);
  std::vector<uint16_t> rounded(total);
  std::vector<std::vector<float>> v;
  for (int r = 0; r < n; ++r) v.push_back(Values(2, r, total));
  const auto half = [](float x) { return Bf16ToF32(F32ToBf16(x)); };
  for (int64_t i = 0; i < total; ++i) {
    rounded[i] = F32ToBf16((half(v[0][i]) + half(v[1][i])) + half(v[2][i]));
  }
  int64_t begin = 0;
  for (int r = 0; r < n; ++r) {
    CHECK(SameBits(all[r].gathered, gathered));
    CHECK(SameBits(all[r].summed, {sum.begin() + begin, sum.begin() + begin + counts[r]}));
    CHECK(all[r].rounded == rounded);
    begin += counts[r];
  }
}

TEST_CASE("a sum's bits do not depend on how many ranks hold its leaves") {
  constexpr int64_t L = 4, count = 10'001;
  std::vector<float> expected;
  for (int n = 1; n <= 4; ++n) {
    INFO(n << " ranks");
    const auto body = [&](Communicator& c) {
      SumPlan plan;
      plan.used.assign(L, true);
      for (int64_t r = 0; r < n; ++r) {
        plan.nodes_of_rank.push_back(NodesOf(L, r * L / n, (r + 1) * L / n));
      }
      std::vector<std::vector<float>> partials;
      CollectiveCall call;
      for (const SumNode& node : plan.nodes_of_rank[c.rank()]) {
        std::vector<bool> inside(L, false);
        for (int64_t l = node.begin; l < node.end; ++l) inside[l] = true;
        TreeSum own(inside, count);
        for (int64_t l = node.begin; l < node.end; ++l) {
          own.Add({l, l + 1}, Values(9, static_cast<int>(l), count));
        }
        partials.push_back(own.Take());
        call.parts.push_back({node, nullptr});
      }
      for (size_t i = 0; i < partials.size(); ++i) call.parts[i].data = partials[i].data();
      std::vector<float> out(count);
      call.kind = CollectiveKind::kAllReduce;
      call.dtype = DType::kF32;
      call.num_elements = count;
      call.plan = plan;
      call.output = out.data();
      STRETTO_CHECK(c.Start(call).Wait().ok());
      return out;
    };
    for (const auto& out : RunRanks<std::vector<float>>(n, body)) {
      if (expected.empty()) expected = out;
      CHECK(SameBits(out, expected));
    }
  }
  CHECK(SameBits(expected, TreeOfRanks(9, 4, count)));
}

TEST_CASE("a rank sends what the formulas say") {
  constexpr int64_t M = 1'200'000;  // bytes; divisible by every group's size
  for (int n = 1; n <= 4; ++n) {
    INFO(n << " ranks");
    const auto body = [&](Communicator& c) {
      std::vector<float> data(M / 4), share(M / 4 / n);
      std::vector<uint8_t> mine(M / n), all(M);
      STRETTO_CHECK(c.AllReduce(absl::MakeSpan(data)).ok());
      STRETTO_CHECK(c.ReduceScatter(data, absl::MakeSpan(share)).ok());
      STRETTO_CHECK(c.AllGather(mine, absl::MakeSpan(all)).ok());
      STRETTO_CHECK(c.Broadcast(absl::MakeSpan(all), 0).ok());
      std::vector<CollectiveTraffic> t;
      for (int k = 0; k < kNumCollectiveKinds; ++k) {
        t.push_back(c.traffic(static_cast<CollectiveKind>(k)));
      }
      return t;
    };
    const auto all = RunRanks<std::vector<CollectiveTraffic>>(n, body);
    for (int r = 0; r < n; ++r) {
      const auto of = [&](CollectiveKind k) { return all[r][static_cast<size_t>(k)]; };
      CHECK(of(CollectiveKind::kAllReduce).bytes_sent == 2 * (n - 1) * M / n);
      CHECK(of(CollectiveKind::kAllReduce).bytes_received == 2 * (n - 1) * M / n);
      CHECK(of(CollectiveKind::kReduceScatter).bytes_sent == (n - 1) * M / n);
      CHECK(of(CollectiveKind::kAllGather).bytes_sent == (n - 1) * M / n);
      CHECK(of(CollectiveKind::kBroadcast).bytes_received == (r == 0 ? 0 : M));
      CHECK(of(CollectiveKind::kAllReduce).calls == 1);
    }
  }
}

TEST_CASE("ranks that do different things are told so, all of them") {
  const auto messages = [](const std::function<absl::Status(Communicator&)>& body) {
    CommunicatorOptions options;
    options.timeout = absl::Seconds(20);
    return RunRanks<absl::Status>(3, body, options);
  };
  for (const absl::Status& s : messages([](Communicator& c) {
         std::vector<uint8_t> mine(c.rank() == 2 ? 31 : 30), everything(mine.size() * 3);
         return c.AllGather(mine, absl::MakeSpan(everything));
       })) {
    CHECK(absl::IsFailedPrecondition(s));
    CHECK_THAT(std::string(s.message()), Catch::Contains("ranks disagree") &&
                                             Catch::Contains("rank 2 (c)") &&
                                             Catch::Contains("AllGather #1"));
  }
  for (const absl::Status& s : messages([](Communicator& c) {
         std::vector<uint8_t> mine(30);
         return c.rank() == 1 ? c.Barrier() : c.Broadcast(absl::MakeSpan(mine), 0);
       })) {
    CHECK(absl::IsFailedPrecondition(s));
    CHECK_THAT(std::string(s.message()), Catch::Contains("rank 1 (b)"));
  }
  for (const absl::Status& s : messages([](Communicator& c) {
         std::vector<uint8_t> mine(30);
         return c.Broadcast(absl::MakeSpan(mine), c.rank() == 1 ? 1 : 0);
       })) {
    CHECK(absl::IsFailedPrecondition(s));
  }
}

TEST_CASE("a group that ended stays ended, and says why") {
  const auto body = [](Communicator& c) {
    std::vector<absl::Status> seen;
    if (c.rank() == 1) c.Abort("its step was withdrawn");
    seen.push_back(c.Barrier());
    seen.push_back(c.Barrier());
    seen.push_back(c.status());
    return seen;
  };
  for (const auto& seen : RunRanks<std::vector<absl::Status>>(3, body)) {
    for (const absl::Status& s : seen) {
      CHECK(absl::IsCancelled(s));
      CHECK_THAT(std::string(s.message()),
                 Catch::Contains("rank 1 (b) ended the group: its step was withdrawn"));
    }
  }
}

TEST_CASE("ranks of a group form groups among themselves, and use both at once") {
  // Rows {0, 1}, {2, 3} and columns {0, 2}, {1, 3} of a square.
  const auto body = [](Communicator& c) {
    const int row = c.rank() / 2, column = c.rank() % 2;
    auto mates = JoinSubgroup(c, "row", {2 * row, 2 * row + 1});
    auto peers = JoinSubgroup(c, "column", {column, column + 2});
    STRETTO_CHECK(mates.ok() && peers.ok());
    std::vector<float> a = {static_cast<float>(c.rank())}, b = a;
    STRETTO_CHECK((*mates)->AllReduce(absl::MakeSpan(a)).ok());
    STRETTO_CHECK((*peers)->AllReduce(absl::MakeSpan(b)).ok());
    STRETTO_CHECK(c.Barrier().ok());
    return std::make_tuple(a[0], b[0], (*peers)->group().Describe((*peers)->rank()),
                           (*peers)->group().group);
  };
  using Seen = std::tuple<float, float, std::string, std::string>;
  const auto all = RunRanks<Seen>(4, body);
  CHECK(all[0] == Seen(1.0f, 2.0f, "rank 0 (a)", "g/column"));
  CHECK(all[1] == Seen(1.0f, 4.0f, "rank 0 (b)", "g/column"));
  CHECK(all[2] == Seen(5.0f, 2.0f, "rank 1 (c)", "g/column"));
  CHECK(all[3] == Seen(5.0f, 4.0f, "rank 1 (d)", "g/column"));
}
}  // namespace
}  // namespace stretto::engine
