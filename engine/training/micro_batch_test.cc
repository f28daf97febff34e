#include "engine/training/micro_batch.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "base/testing.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
MicroBatchLimits Limits(int64_t max_tokens) { return {max_tokens, 1000, 100}; }

int64_t Cost(const TrainGroup& g) {
  int64_t cost = static_cast<int64_t>(g.prompt_ids.size());
  for (const TrainCompletion& c : g.completions) cost += static_cast<int64_t>(c.ids.size());
  return cost;
}

TrainBatch RandomTrainBatch(PhiloxStream& random) {
  TrainBatch batch;
  batch.groups.resize(1 + random.Below(8));
  const auto ids = [&](size_t count) {
    std::vector<int32_t> out(count);
    for (int32_t& id : out) id = static_cast<int32_t>(random.Below(100));
    return out;
  };
  for (TrainGroup& g : batch.groups) {
    g.prompt_ids = ids(1 + random.Below(30));
    g.completions.resize(random.Below(6));
    for (TrainCompletion& c : g.completions) c.ids = ids(random.Below(40));
  }
  return batch;
}

// Walks back from a target through its segment and ancestors: the tokens that it is predicted from.
std::vector<int32_t> Prefix(const PackedBatch& b, int32_t row) {
  int32_t s = 0;
  while (row >= b.segments.row_begin[s] + b.segments.num_rows[s]) ++s;
  std::vector<int32_t> ids;
  for (; s >= 0; s = b.segments.parent[s]) {
    for (; row >= b.segments.row_begin[s]; --row) ids.insert(ids.begin(), b.ids_T[row]);
    if (b.segments.parent[s] >= 0) {
      const int32_t parent = b.segments.parent[s];
      row = b.segments.row_begin[parent] + b.segments.num_rows[parent] - 1;
    }
  }
  return ids;
}

TEST_CASE("every completion token is a target once, in order, behind its own prefix") {
  PhiloxStream random(stretto::testing::Seed(), 20);
  for (int round = 0; round < 200; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const TrainBatch batch = RandomTrainBatch(random);
    const auto budget = static_cast<int64_t>(1 + random.Below(300));
    const auto cut = CutMicroBatches(batch, Limits(budget));
    REQUIRE_OK(cut);
    size_t group = 0, completion = 0;
    for (const MicroBatch& m : *cut) {
      REQUIRE(m.target_begin.size() == m.completions.size() + 1);
      for (size_t i = 0; i < m.completions.size(); ++i) {
        while (completion >= batch.groups[group].completions.size() ||
               batch.groups[group].completions[completion].ids.empty()) {
          if (completion >= batch.groups[group].completions.size()) {
            ++group;
            completion = 0;
          } else {
            ++completion;
          }
          REQUIRE(group < batch.groups.size());
        }
        REQUIRE(m.completions[i].group == static_cast<int64_t>(group));
        REQUIRE(m.completions[i].completion == static_cast<int64_t>(completion));
        const TrainGroup& g = batch.groups[group];
        const auto& ids = g.completions[completion].ids;
        REQUIRE(m.target_begin[i + 1] - m.target_begin[i] == static_cast<int64_t>(ids.size()));
        std::vector<int32_t> prefix = g.prompt_ids;
        for (size_t t = 0; t < ids.size(); ++t) {
          const int64_t n = m.target_begin[i] + static_cast<int64_t>(t);
          REQUIRE(m.packed.targets_N[n] == ids[t]);
          REQUIRE(Prefix(m.packed, m.packed.target_rows_N[n]) == prefix);
          REQUIRE(m.packed.positions_T[m.packed.target_rows_N[n]] ==
                  static_cast<int32_t>(prefix.size()) - 1);
          prefix.push_back(ids[t]);
        }
        ++completion;
      }
    }
    int64_t targets = 0;
    for (const MicroBatch& m : *cut) targets += m.packed.num_targets();
    CHECK(targets == batch.num_tokens());
  }
}

TEST_CASE("micro-batches keep to the budget, and groups that fit stay whole") {
  PhiloxStream random(stretto::testing::Seed(), 21);
  for (int round = 0; round < 200; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const TrainBatch batch = RandomTrainBatch(random);
    const auto budget = static_cast<int64_t>(20 + random.Below(200));
    const auto cut = CutMicroBatches(batch, Limits(budget));
    REQUIRE_OK(cut);
    std::vector<int> pieces(batch.groups.size(), 0);
    for (const MicroBatch& m : *cut) {
      int64_t last = -1;
      for (const CompletionRef& ref : m.completions) {
        if (ref.group != last) ++pieces[last = ref.group];
      }
      const bool single = m.completions.size() == 1;
      const bool fits = m.packed.num_rows() <= budget && m.packed.num_targets() <= budget;
      CHECK((fits || single));
    }
    for (size_t g = 0; g < pieces.size(); ++g) {
      if (Cost(batch.groups[g]) <= budget) CHECK(pieces[g] <= 1);
    }
  }
}

TEST_CASE("groups without an advantage stand apart, behind the others") {
  PhiloxStream random(stretto::testing::Seed(), 22);
  for (int round = 0; round < 100; ++round) {
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    TrainBatch batch = RandomTrainBatch(random);
    for (TrainGroup& g : batch.groups) {
      if (g.completions.empty() || random.Below(2) == 0) continue;
      g.completions[random.Below(g.completions.size())].advantage = 0.5f;
    }
    const auto has_advantage = [&](int64_t g) {
      for (const TrainCompletion& c : batch.groups[g].completions) {
        if (c.advantage != 0) return true;
      }
      return false;
    };
    const auto cut = CutMicroBatches(batch, Limits(200));
    REQUIRE_OK(cut);
    bool seen_without = false;
    int64_t last = -1, targets = 0;
    for (const MicroBatch& m : *cut) {
      const bool first = has_advantage(m.completions[0].group);
      if (!first && !seen_without) last = -1;
      CHECK_FALSE((first && seen_without));
      seen_without |= !first;
      for (const CompletionRef& ref : m.completions) {
        CHECK(has_advantage(ref.group) == first);
        CHECK(ref.group >= last);
        last = ref.group;
      }
      targets += m.packed.num_targets();
    }
    CHECK(targets == batch.num_tokens());
  }
}

TEST_CASE("a batch that contradicts itself is refused by name") {
  const auto valid = [] {
    TrainBatch batch;
    TrainGroup& g = batch.groups.emplace_back();
    g.prompt_ids = {1, 2};
    TrainCompletion& c = g.completions.emplace_back();
    c.ids = {3, 4};
    c.behaviour_logprobs = {-1, -2};
    c.reference_logprobs = {-1, -2};
    return batch;
  };
  const auto error = [](const TrainBatch& batch) {
    const auto cut = CutMicroBatches(batch, Limits(50));
    CHECK(cut.status().code() == absl::StatusCode::kInvalidArgument);
    return std::string(cut.status().message());
  };
  REQUIRE_OK(CutMicroBatches(valid(), Limits(50)));
  TrainBatch b = valid();
  b.groups[0].prompt_ids.clear();
  CHECK_THAT(error(b), Catch::Contains("group 0: the prompt is empty"));
  b = valid();
  b.groups[0].completions[0].ids[1] = 100;
  CHECK_THAT(error(b), Catch::Contains("token 1 has id 100"));
  b = valid();
  b.groups[0].completions[0].ids.resize(2000, 5);
  CHECK_THAT(error(b), Catch::Contains("2002 tokens, more than max_sequence_length 1000"));
  b = valid();
  b.groups[0].completions[0].behaviour_logprobs.pop_back();
  CHECK_THAT(error(b), Catch::Contains("1 behaviour log-probs for 2 tokens"));
  b = valid();
  b.groups[0].completions[0].behaviour_logprobs[0] = NAN;
  CHECK_THAT(error(b), Catch::Contains("not finite"));
  b = valid();
  b.groups[0].completions.push_back(b.groups[0].completions[0]);
  b.groups[0].completions[1].reference_logprobs.clear();
  CHECK_THAT(error(b), Catch::Contains("completion 1: 0 reference log-probs"));
}
}  // namespace
}  // namespace stretto::engine
