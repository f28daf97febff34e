#include <catch2/catch.hpp>
#include <cstring>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/weights/delta.h"
#include "engine/weights/store.h"
#include "engine/weights/version.h"

namespace stretto::engine {
namespace {
template <class Word>
Bytes ToBytes(const std::vector<Word>& words) {
  Bytes bytes(words.size() * sizeof(Word));
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

Bytes RandomBytes(PhiloxStream& random, size_t size) {
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.NextU32());
  return bytes;
}

void RequireRoundTrip(DType dtype, const Bytes& base, const Bytes& next) {
  const Bytes delta = EncodeDelta(dtype, base, next);
  absl::StatusOr<Bytes> back = ApplyDelta(dtype, base, delta);
  REQUIRE_OK(back);
  REQUIRE(*back == next);
}

Manifest OneTensor(DType dtype, int64_t elements, const std::string& name = "w") {
  return {{.name = name, .dtype = dtype, .shape = {elements}, .hash = ""}};
}

std::shared_ptr<const WeightsVersion> Version(int64_t number, const Bytes& bytes) {
  return MakeVersion(number, OneTensor(DType::kBF16, static_cast<int64_t>(bytes.size() / 2)),
                     {SharedBytes(bytes)});
}
}  // namespace

TEST_CASE("hashes are those of the XXH3 specification") {
  // XXH3_128bits of nothing, as xxhsum -H2 prints it.
  CHECK(TensorHash({}) == "99aa06d3014798d86001c324468d497f");
  CHECK(TensorHash(Bytes{'a', 'b', 'c'}) == "06b05ab6733a618578af5f94892f3950");
}

TEST_CASE("the tree hash sees names, dtypes, shapes, order and bytes") {
  const Bytes a = {1, 2, 3, 4}, b = {5, 6, 7, 8};
  const auto tree = [](Manifest manifest, const std::vector<Bytes>& data) {
    std::vector<SharedBytes> tensors;
    for (const Bytes& bytes : data) tensors.push_back(SharedBytes(bytes));
    return MakeVersion(0, std::move(manifest), std::move(tensors))->hash;
  };
  const TensorEntry x{"x", DType::kBF16, {2}, ""}, y{"y", DType::kBF16, {2}, ""};
  const std::string hash = tree({x, y}, {a, b});
  CHECK(hash.size() == 32);
  CHECK(hash == tree({x, y}, {a, b}));
  CHECK(hash != tree({x, y}, {b, a}));
  CHECK(hash != tree({y, x}, {a, b}));
  CHECK(hash != tree({{"x2", DType::kBF16, {2}, ""}, y}, {a, b}));
  CHECK(hash != tree({{"x", DType::kF16, {2}, ""}, y}, {a, b}));
  CHECK(hash != tree({{"x", DType::kBF16, {1, 2}, ""}, y}, {a, b}));
}

TEST_CASE("a delta gives back the new bits, whatever they are") {
  PhiloxStream random(testing::Seed());
  INFO("seed " << testing::Seed());
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16, DType::kI64, DType::kU8}) {
    for (int round = 0; round < 40; ++round) {
      const size_t elements = random.Below(6000);
      const Bytes base = RandomBytes(random, elements * SizeOf(dtype));
      Bytes next = base;
      // From one change in a thousand elements to all of them; random bits hold NaNs and
      // infinities.
      const uint64_t one_in = uint64_t{1} << random.Below(11);
      for (size_t i = 0; i < elements; ++i) {
        if (random.Below(one_in) != 0) continue;
        const Bytes element = RandomBytes(random, SizeOf(dtype));
        std::memcpy(next.data() + i * SizeOf(dtype), element.data(), element.size());
      }
      RequireRoundTrip(dtype, base, next);
      RequireRoundTrip(dtype, next, base);
      RequireRoundTrip(dtype, base, base);
    }
  }
}

TEST_CASE("every bf16 value turns into every special value and back") {
  const std::vector<uint16_t> special = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81,
                                         0xffff, 0x7fff, 0x0001, 0x8001, 0x3f80, 0xbf80};
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const uint16_t value : special) {
    const std::vector<uint16_t> target(all.size(), value);
    RequireRoundTrip(DType::kBF16, ToBytes(all), ToBytes(target));
    RequireRoundTrip(DType::kBF16, ToBytes(target), ToBytes(all));
  }
}

TEST_CASE("f32 zeros of both signs and NaN payloads survive") {
  const std::vector<uint32_t> a = {0x00000000, 0x80000000, 0x7fc00001, 0xff800001, 0xffffffff, 0};
  const std::vector<uint32_t> b = {0x80000000, 0x00000000, 0x7fc00002, 0x7f800000, 0, 0xffffffff};
  RequireRoundTrip(DType::kF32, ToBytes(a), ToBytes(b));
  RequireRoundTrip(DType::kF32, ToBytes(b), ToBytes(a));
}

TEST_CASE("the delta of a small optimizer step is small") {
  PhiloxStream random(testing::Seed(), 1);
  INFO("seed " << testing::Seed());
  std::vector<uint16_t> before(100000), after;
  for (uint16_t& w : before) w = F32ToBf16(static_cast<float>(random.NextGaussian() * 0.05));
  after = before;
  size_t changed = 0;
  for (uint16_t& w : after) {
    const uint16_t moved = F32ToBf16(Bf16ToF32(w) + (random.Below(2) != 0 ? 1e-6f : -1e-6f));
    changed += moved != w ? 1 : 0;
    w = moved;
  }
  const Bytes delta = EncodeDelta(DType::kBF16, ToBytes(before), ToBytes(after));
  INFO(changed << " elements changed, delta " << delta.size() << " bytes");
  CHECK(changed > 0);
  CHECK(delta.size() < changed * 3 + 64);
  CHECK(EncodeDelta(DType::kBF16, ToBytes(before), ToBytes(before)).size() == 1);
}

TEST_CASE("the delta of a step that moves most elements is a fraction of them, too") {
  PhiloxStream random(testing::Seed(), 4);
  INFO("seed " << testing::Seed());
  std::vector<uint16_t> before(100003), after;
  for (uint16_t& w : before) w = F32ToBf16(static_cast<float>(random.NextGaussian() * 0.05));
  for (const uint16_t w : before) {
    after.push_back(F32ToBf16(Bf16ToF32(w) + static_cast<float>(random.NextGaussian() * 3e-4)));
  }
  const Bytes delta = EncodeDelta(DType::kBF16, ToBytes(before), ToBytes(after));
  INFO("delta of " << delta.size() << " bytes");
  CHECK(delta.size() * 3 < before.size() * 2);
  RequireRoundTrip(DType::kBF16, ToBytes(before), ToBytes(after));
  // Zeros of both signs next to whatever lies at the ends of the grid.
  const std::vector<uint16_t> ends = {0x0000, 0x8000, 0x7fff, 0xffff, 0x0001, 0x8001};
  const std::vector<uint16_t> others = {0xffff, 0x7fff, 0x8000, 0x0000, 0x8001, 0x0001};
  RequireRoundTrip(DType::kBF16, ToBytes(ends), ToBytes(others));
}

TEST_CASE(
    "where a good part moves by a step, a delta has a bit for each element and two a change") {
  PhiloxStream random(testing::Seed(), 5);
  INFO("seed " << testing::Seed());
  std::vector<uint16_t> before(100003), after;
  for (uint16_t& w : before) w = F32ToBf16(static_cast<float>(random.NextGaussian() * 0.05));
  size_t changed = 0, more = 0;
  for (const uint16_t w : before) {
    uint16_t moved = w;
    if (random.Below(5) == 0) moved = static_cast<uint16_t>(w + (random.Below(2) != 0 ? 1 : -1));
    if (random.Below(100) == 0) moved = w ^ 0x0040;
    changed += moved != w ? 1 : 0;
    more += (moved ^ w) == 0x0040 ? 1 : 0;
    after.push_back(moved);
  }
  const Bytes delta = EncodeDelta(DType::kBF16, ToBytes(before), ToBytes(after));
  CHECK(delta.size() <= 1 + (before.size() + 7) / 8 + (changed + 3) / 4 + 3 * more);
  RequireRoundTrip(DType::kBF16, ToBytes(before), ToBytes(after));
  RequireRoundTrip(DType::kBF16, ToBytes(after), ToBytes(before));
}

TEST_CASE("a damaged delta is an error or, at most, other bytes: never a crash") {
  PhiloxStream random(testing::Seed(), 2);
  INFO("seed " << testing::Seed());
  const Bytes base = RandomBytes(random, 4000);
  Bytes next = base;
  // Some elements, nearly all, or a good part by one step.
  const auto [num_changes, every] = GENERATE(table<int, size_t>({{60, 1}, {20000, 1}, {700, 2}}));
  for (int i = 0; i < num_changes; ++i) next[random.Below(next.size() / every) * every] ^= 1;
  const Bytes delta = EncodeDelta(DType::kBF16, base, next);
  for (size_t size = 0; size < delta.size(); ++size) {
    const absl::Status status =
        ApplyDelta(DType::kBF16, base, absl::MakeConstSpan(delta).first(size)).status();
    REQUIRE(absl::IsDataLoss(status));
  }
  for (int round = 0; round < 4000; ++round) {
    Bytes bad = delta;
    for (uint64_t n = random.Below(4) + 1; n > 0; --n) {
      bad[random.Below(bad.size())] = static_cast<uint8_t>(random.NextU32());
    }
    const absl::StatusOr<Bytes> result = ApplyDelta(DType::kBF16, base, bad);
    if (result.ok()) REQUIRE(result->size() == base.size());
  }
  Bytes longer = delta;
  longer.push_back(0);
  CHECK(absl::IsDataLoss(ApplyDelta(DType::kBF16, base, longer).status()));
  CHECK(absl::IsDataLoss(
      ApplyDelta(DType::kBF16, absl::MakeConstSpan(base).first(base.size() / 4), delta).status()));
}

TEST_CASE("a mode of another release is refused by name") {
  const Bytes base(8);
  for (const uint8_t mode : {3, 7, 255}) {
    const absl::Status status = ApplyDelta(DType::kBF16, base, Bytes{mode, 1, 2, 3}).status();
    CHECK(absl::IsDataLoss(status));
    CHECK(status.message().find("unknown mode " + std::to_string(mode)) != std::string::npos);
  }
}

TEST_CASE("a version's delta is applied whole or not at all") {
  PhiloxStream random(testing::Seed(), 3);
  const Bytes same = RandomBytes(random, 64), old = RandomBytes(random, 2000);
  Bytes changed = old;
  changed[7] ^= 0x10;
  const auto make = [&same](int64_t number, const Bytes& second) {
    return MakeVersion(number, {{"a", DType::kBF16, {4, 8}, ""}, {"b", DType::kBF16, {1000}, ""}},
                       {SharedBytes(same), SharedBytes(second)});
  };
  const auto base = make(3, old), next = make(4, changed);
  const auto delta = EncodeVersionDelta(*base, *next);
  const auto applied = ApplyVersionDelta(*base, 4, next->hash, next->manifest, delta->tensors);
  REQUIRE_OK(applied);
  CHECK((*applied)->hash == next->hash);
  CHECK((*applied)->tensors[1].span() == absl::MakeConstSpan(changed));
  CHECK((*applied)->tensors[0].span().data() ==
        base->tensors[0].span().data());  // shared, not copied

  SECTION("a wrong base") {
    Bytes other = old;
    other[100] ^= 1;
    const auto status =
        ApplyVersionDelta(*make(3, other), 4, next->hash, next->manifest, delta->tensors).status();
    CHECK(absl::IsDataLoss(status));
    CHECK(status.message().find("tensor b") != std::string::npos);
  }
  SECTION("replayed, or in another order") {
    Bytes further = changed;
    further[9] ^= 0x01;
    const auto third = make(5, further);
    const auto later = EncodeVersionDelta(*next, *third);
    const auto apply = [](const WeightsVersion& onto, const WeightsVersion& to, const auto& d) {
      return ApplyVersionDelta(onto, to.number, to.hash, to.manifest, d->tensors).status();
    };
    CHECK(absl::IsDataLoss(apply(*next, *next, delta)));         // once more
    CHECK(absl::IsDataLoss(apply(*base, *third, later)));        // the second before the first
    CHECK(absl::IsDataLoss(apply(*third, *next, delta)));        // the first after the second
    CHECK(base->tensors[1].span() == absl::MakeConstSpan(old));  // and nothing has changed
    CHECK(apply(*next, *third, later).ok());
  }
  SECTION("flipped bits, wherever") {
    const absl::Span<const uint8_t> code = delta->tensors[1].span();
    for (size_t bit = 0; bit < code.size() * 8; ++bit) {
      Bytes flipped(code.begin(), code.end());
      flipped[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
      const auto damaged = ApplyVersionDelta(*base, 4, next->hash, next->manifest,
                                             {delta->tensors[0], SharedBytes(flipped)});
      // A bit that decides nothing may flip; weights that are not those announced may not come out.
      CHECK((!damaged.ok() || (*damaged)->tensors[1].span() == absl::MakeConstSpan(changed)));
    }
  }
  SECTION("another announced hash") {
    CHECK(absl::IsDataLoss(
        ApplyVersionDelta(*base, 4, base->hash, next->manifest, delta->tensors).status()));
  }
  SECTION("another shape") {
    Manifest manifest = next->manifest;
    manifest[1].shape = {10, 100};
    CHECK(absl::IsFailedPrecondition(
        ApplyVersionDelta(*base, 4, next->hash, manifest, delta->tensors).status()));
  }
  SECTION("a missing tensor") {
    CHECK(!ApplyVersionDelta(*base, 4, next->hash, next->manifest, {delta->tensors[0]}).ok());
    CHECK(
        !ApplyVersionDelta(*base, 4, next->hash, next->manifest, {delta->tensors[0], SharedBytes()})
             .ok());
  }
}

TEST_CASE("manifests from outside are checked") {
  Manifest good = OneTensor(DType::kBF16, 4);
  good[0].hash = TensorHash({});
  CHECK(ValidateManifest(good, 8).ok());
  CHECK(!ValidateManifest(good, 7).ok());
  Manifest twice = {good[0], good[0]};
  CHECK(!ValidateManifest(twice, 100).ok());
  Manifest bad = good;
  bad[0].hash = "xyz";
  CHECK(!ValidateManifest(bad, 100).ok());
  bad = good;
  bad[0].shape = {-1};
  CHECK(!ValidateManifest(bad, 100).ok());
  bad[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
  CHECK(!ValidateManifest(bad, INT64_MAX).ok());
  bad = good;
  bad[0].name = "";
  CHECK(!ValidateManifest(bad, 100).ok());
}

TEST_CASE("the store keeps the newest versions and the deltas between them") {
  WeightsStore store(2);
  CHECK(absl::IsNotFound(store.Newest().status()));
  const auto v1 = Version(1, {1, 0}), v2 = Version(2, {2, 0}), v3 = Version(3, {3, 0});
  store.Put(v1);
  store.Put(v2);
  store.PutDelta(EncodeVersionDelta(*v1, *v2));
  CHECK(store.GetDelta(1, v1->hash, 2, v2->hash).ok());
  CHECK(store.DeltasTo(*v2).size() == 1);
  store.Put(v3);
  CHECK(store.Versions().size() == 2);
  CHECK((*store.Newest())->number == 3);
  const absl::Status gone = store.Get(1, v1->hash).status();
  CHECK(absl::IsNotFound(gone));
  CHECK(gone.message().find(v3->hash) != std::string::npos);
  CHECK(absl::IsFailedPrecondition(store.GetDelta(1, v1->hash, 2, v2->hash).status()));
  store.PutDelta(EncodeVersionDelta(*v1, *v3));
  CHECK(store.DeltasTo(*v3).empty());
  CHECK(absl::IsNotFound(store.Get(3, v2->hash).status()));

  // The owner goes back to version 2 and takes another way to 3.
  const auto other = Version(3, {9, 0});
  store.Put(other);
  CHECK((*store.Newest())->hash == other->hash);
  CHECK(absl::IsNotFound(store.Get(3, v3->hash).status()));
  CHECK(store.Get(2, "").ok());
}
}  // namespace stretto::engine
