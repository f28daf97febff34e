#include "engine/constrain/work.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "base/testing.h"
#include "engine/constrain/constraint.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;

// Small to read, and much work: each pair of alternatives has to be told apart.
Json Heavy() {
  Json list = Json::array();
  for (int i = 0; i < 64; ++i) {
    list.push_back({{"type", "string"}, {"maxLength", 100 + 100 * i}});
  }
  return {{"oneOf", list}};
}

std::shared_ptr<const TokenTrie> EveryByte() {
  std::vector<std::string> bytes(256);
  for (int i = 0; i < 256; ++i) bytes[static_cast<size_t>(i)] += static_cast<char>(i);
  return std::make_shared<const TokenTrie>(bytes);
}
}  // namespace

TEST_CASE("work is limited over all of a schema, the same everywhere, and can be cancelled") {
  const Json schema{{"type", "object"},
                    {"properties", {{"small", {{"type", "string"}}}, {"large", Heavy()}}}};
  const auto compile = [&](const std::function<bool()>& cancelled) {
    return Constraint::Compile({ConstraintSpec::Kind::kJsonSchema, schema.dump()}, EveryByte(), {},
                               cancelled)
        .status();
  };
  int64_t num_asked = 0;
  const absl::Status refused = compile([&] { return ++num_asked, false; });
  INFO(refused);
  CHECK(absl::IsInvalidArgument(refused));
  CHECK(absl::StrContains(refused.message(), "most of it is for #/properties/large/oneOf"));
  CHECK(num_asked > 10);
  CHECK(num_asked <= (Work::kMaxSteps >> 16) + 1);
  const int64_t all = num_asked;
  CHECK(absl::IsCancelled(compile([&] { return --num_asked == 0; })));
  CHECK(compile([&] { return ++num_asked, false; }) == refused);
  CHECK(num_asked == all);
}

TEST_CASE("steps are spent until they are used up or nobody wants the result") {
  Work work(100);
  CHECK(work.Spend(100));
  CHECK(work.Status().ok());
  {
    const Work::Place a(&work, "#/a");
    const Work::Place b(&work, "#/b");
    CHECK(!work.Spend(150));
    CHECK(!work.Spend(0));
  }
  CHECK(absl::StrContains(work.Status().message(), "#/b (60 %)"));
  Work unwanted(100, [] { return true; });
  CHECK(!unwanted.Spend(1));
  CHECK(absl::IsCancelled(unwanted.Status()));
}

// The mutexes of Debian's Abseil are unknown to ThreadSanitizer, which would see races in every
// use.
#ifndef __SANITIZE_THREAD__
TEST_CASE("what nobody waits for any more isn't compiled to the end") {
  const ConstraintSpec heavy{ConstraintSpec::Kind::kJsonSchema, Heavy().dump()};
  ConstraintCache cache(EveryByte);
  int num_asked = 0;
  CHECK(absl::IsCancelled(cache.Get(heavy, [&] { return ++num_asked > 2; }).status()));
  CHECK(num_asked == 3);
  // Who began it leaves, another stays: it goes on for them, and the refusal is remembered.
  std::atomic<int> num_waiting = 0;
  absl::Status stayed;
  std::thread stays;
  const auto leaves = [&] {
    if (stays.joinable()) return true;
    stays = std::thread(
        [&] { stayed = cache.Get(heavy, [&] { return ++num_waiting, false; }).status(); });
    while (num_waiting == 0) std::this_thread::yield();
    return true;
  };
  const absl::Status left = cache.Get(heavy, leaves).status();
  stays.join();
  INFO(left);
  CHECK(absl::IsInvalidArgument(left));
  CHECK(stayed.message().data() == left.message().data());
}
#endif
}  // namespace stretto::engine
