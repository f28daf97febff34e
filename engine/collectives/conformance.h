// What every collective must do, whatever carries it: each on random sizes (none, one, not
// divisible) against its definition, sums to the bit.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/testing.h"
#include "engine/collectives/communicator.h"

namespace stretto::engine::testing {
// What rank `rank` brings to case `index`: the same in every process.
inline std::vector<float> Values(int64_t index, int rank, int64_t count) {
  PhiloxStream random(stretto::testing::Seed(), 1000 + static_cast<uint64_t>(index) * 16 + rank);
  std::vector<float> values(count);
  for (float& v : values) v = static_cast<float>(random.NextGaussian() * 100);
  return values;
}
inline absl::Span<const uint8_t> BytesOf(const std::vector<float>& v) {
  return {reinterpret_cast<const uint8_t*>(v.data()), v.size() * sizeof(float)};
}
inline absl::Span<uint8_t> BytesOf(std::vector<float>& v) {
  return {reinterpret_cast<uint8_t*>(v.data()), v.size() * sizeof(float)};
}
inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The tree of one leaf a rank: ((0 + 1) + (2 + 3)), ((0 + 1) + 2).
inline std::vector<float> TreeOfRanks(int64_t index, int num_ranks, int64_t count) {
  std::vector<std::vector<float>> v;
  for (int r = 0; r < num_ranks; ++r) v.push_back(Values(index, r, count));
  const auto add = [](std::vector<float> a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  };
  if (num_ranks == 1) return v[0];
  if (num_ranks == 2) return add(v[0], v[1]);
  if (num_ranks == 3) return add(add(v[0], v[1]), v[2]);
  return add(add(v[0], v[1]), add(v[2], v[3]));
}

inline constexpr int64_t kCollectiveSizes[] = {0, 1, 3, 4, 5, 1000, 4097, 300'001};

// The name of the first thing that is not as it must be, or "".
inline std::string CheckCollectives(Communicator& c) {
  const int n = c.size(), me = c.rank();
  int64_t index = 0;
  for (const int64_t count : kCollectiveSizes) {
    const std::string at = absl::StrCat(" of ", count, " on rank ", me);
    ++index;
    const std::vector<float> mine = Values(index, me, count);
    const std::vector<float> sum = TreeOfRanks(index, n, count);
    if (!c.Barrier().ok()) return "Barrier";

    for (int root = 0; root < n; ++root) {
      std::vector<float> data = root == me ? mine : std::vector<float>(count, -1.0f);
      if (!c.Broadcast(BytesOf(data), root).ok()) return "Broadcast" + at;
      if (!SameBits(data, Values(index, root, count))) return "what was broadcast" + at;
    }
    std::vector<float> all(count * n), expected;
    for (int r = 0; r < n; ++r) {
      const std::vector<float> theirs = Values(index, r, count);
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    if (!c.AllGather(BytesOf(mine), BytesOf(all)).ok()) return "AllGather" + at;
    if (!SameBits(all, expected)) return "what was gathered" + at;

    std::vector<float> reduced = mine;
    if (!c.AllReduce(absl::MakeSpan(reduced)).ok()) return "AllReduce" + at;
    if (!SameBits(reduced, sum)) return "the sum" + at;

    std::vector<float> share(EvenShare(count, n, me));
    if (!c.ReduceScatter(mine, absl::MakeSpan(share)).ok()) return "ReduceScatter" + at;
    int64_t begin = 0;
    for (int r = 0; r < me; ++r) begin += EvenShare(count, n, r);
    if (!SameBits(share, {sum.begin() + begin, sum.begin() + begin + share.size()})) {
      return "the share" + at;
    }

    // Rank r's j-th part goes to rank j.
    std::vector<float> parts = Values(index, me, count * n), got(count * n), wanted;
    if (!c.AllToAll(BytesOf(parts), BytesOf(got)).ok()) return "AllToAll" + at;
    for (int r = 0; r < n; ++r) {
      const std::vector<float> theirs = Values(index, r, count * n);
      wanted.insert(wanted.end(), theirs.begin() + me * count, theirs.begin() + (me + 1) * count);
    }
    if (!SameBits(got, wanted)) return "what was exchanged" + at;

    // Along a ring, without a cycle of waiting.
    if (n > 1) {
      std::vector<float> from_left(count);
      const int left = (me + n - 1) % n, right = (me + 1) % n;
      if (me != 0 && !c.Recv(BytesOf(from_left), left).ok()) return "Recv" + at;
      if (!c.Send(BytesOf(mine), right).ok()) return "Send" + at;
      if (me == 0 && !c.Recv(BytesOf(from_left), left).ok()) return "Recv" + at;
      if (!SameBits(from_left, Values(index, left, count))) return "what was sent" + at;
    }
  }
  return c.status().ok() ? "" : "status";
}
}  // namespace stretto::engine::testing
