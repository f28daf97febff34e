// The flat layout: groups that fused products need are adjacent, nothing overlaps, order and names
// are those of ExpectedTensors.
#include "engine/model/parameters.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "base/testing.h"
#include "engine/model/leaf_layout.h"
#include "engine/model/testing.h"

namespace stretto::engine {
namespace {
TEST_CASE("parameters fill the flat run without overlap, groups aligned and adjacent") {
  PhiloxStream random(stretto::testing::Seed(), 10);
  for (int round = 0; round < 50; ++round) {
    const ModelConfig config = testing::RandomConfig(random);
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const ParameterLayout layout(config);
    const auto expected = ExpectedTensors(config);
    REQUIRE(layout.parameters().size() == expected.size());
    std::vector<std::pair<int64_t, int64_t>> spans;
    for (size_t i = 0; i < expected.size(); ++i) {
      const Parameter& p = layout.parameters()[i];
      CHECK(p.spec.name == expected[i].name);
      CHECK(layout.Find(p.spec.name) == &p);
      spans.emplace_back(p.view.offset, p.view.offset + p.view.size());
    }
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i) {
      CHECK(spans[i - 1].second <= spans[i].first);
      CHECK(spans[i].first - spans[i - 1].second < kParameterAlignment);
    }
    CHECK(spans.back().second <= layout.size());
    CHECK(layout.size() % kParameterAlignment == 0);
    for (int64_t l = 0; l < config.num_layers; ++l) {
      const std::string prefix = "model.layers." + std::to_string(l) + ".";
      const auto at = [&](const char* name) { return layout.Find(prefix + name)->view; };
      const ParameterView q = at("self_attn.q_proj.weight"), k = at("self_attn.k_proj.weight");
      const ParameterView v = at("self_attn.v_proj.weight"), gate = at("mlp.gate_proj.weight");
      CHECK(layout.layers[l].qkv.offset == q.offset);
      CHECK(layout.layers[l].qkv.rows == q.rows + k.rows + v.rows);
      CHECK(k.offset == q.offset + q.size());
      CHECK(v.offset == k.offset + k.size());
      CHECK(at("mlp.up_proj.weight").offset == gate.offset + gate.size());
      CHECK(q.offset % kParameterAlignment == 0);
    }
    CHECK((layout.lm_head.offset == layout.embedding.offset) == config.tie_word_embeddings);
  }
}

// Every element of every parameter is in one leaf, or in what all leaves share.
TEST_CASE("pieces of all leaves make up the model, whoever holds which leaves") {
  PhiloxStream random(stretto::testing::Seed(), 11);
  for (int round = 0; round < 30; ++round) {
    ModelConfig config = testing::RandomConfig(random);
    config.num_heads = 6;
    config.num_kv_heads = 1 + static_cast<int64_t>(random.Below(3));
    INFO("seed " << stretto::testing::Seed() << " round " << round);
    const ParameterLayout whole(config);
    for (const auto& [num_leaves, num_ranks] : {std::pair{6, 1}, {6, 2}, {6, 3}, {3, 3}, {2, 2}}) {
      REQUIRE(CheckLeaves("test", config, num_leaves).ok());
      std::vector<std::vector<int>> times(whole.parameters().size());
      for (size_t i = 0; i < times.size(); ++i) times[i].resize(whole.parameters()[i].view.size());
      for (int64_t rank = 0; rank < num_ranks; ++rank) {
        const int64_t each = num_leaves / num_ranks;
        const ParameterLayout layout(config, {num_leaves, rank * each, (rank + 1) * each});
        std::vector<std::pair<int64_t, int64_t>> spans;
        for (size_t i = 0; i < layout.parameters().size(); ++i) {
          const ParameterView& view = layout.parameters()[i].view;
          const PieceOrigin& origin = layout.origins()[i];
          const int64_t stride = whole.parameters()[origin.parameter].view.cols;
          CHECK(layout.parameters()[i].spec.name == whole.parameters()[origin.parameter].spec.name);
          spans.emplace_back(view.offset, view.offset + view.size());
          if (origin.leaf < 0 && rank > 0) continue;
          for (int64_t r = 0; r < view.rows; ++r) {
            for (int64_t c = 0; c < view.cols; ++c) {
              ++times[origin.parameter][(origin.row + r) * stride + origin.col + c];
            }
          }
        }
        std::sort(spans.begin(), spans.end());
        for (size_t i = 1; i < spans.size(); ++i) CHECK(spans[i - 1].second <= spans[i].first);
        CHECK(spans.back().second <= layout.size());
        for (const LayerParameters& l : layout.layers) {
          CHECK(l.input_norm.offset % kLeafAlignment == 0);
          CHECK(l.leaves.size() == static_cast<size_t>(each));
        }
      }
      for (const auto& t : times) {
        CHECK(std::all_of(t.begin(), t.end(), [](int n) { return n == 1; }));
      }
    }
  }
}
}  // namespace
}  // namespace stretto::engine
