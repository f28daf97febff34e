#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>
#include <thread>

#include "base/clock.h"
#include "base/testing.h"
#include "services/common/fence.h"
#include "services/common/log.h"
#include "services/common/member_client.h"
#include "services/common/metrics.h"
#include "services/common/retry.h"
#include "services/common/service_main.h"
#include "services/common/stop_signal.h"

namespace stretto::services {
namespace {
std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}
}  // namespace

TEST_CASE("a stop is requested once and wakes who waits") {
  StopSignal stop;
  CHECK(!stop.WaitFor(1));
  std::thread waiter([&] { stop.Wait(); });
  stop.Request(absl::InternalError("first"));
  stop.Request(absl::InternalError("second"));
  waiter.join();
  CHECK(stop.requested());
  CHECK(stop.WaitFor(0));
  CHECK(stop.reason().message() == "first");
}

TEST_CASE("waits double up to the limit, with jitter, and begin anew") {
  Backoff backoff({.initial_wait_ms = 10, .max_wait_ms = 100}, testing::Seed());
  for (const int64_t bound : {10, 20, 40, 80, 100, 100}) {
    const int64_t wait = backoff.NextWaitMs();
    CHECK(wait >= bound / 2);
    CHECK(wait <= bound);
  }
  backoff.Reset();
  CHECK(backoff.NextWaitMs() <= 10);
}

TEST_CASE("only what may pass is repeated") {
  StopSignal stop;
  const RetryOptions options{.initial_wait_ms = 1, .max_wait_ms = 2, .max_attempts = 4};
  int calls = 0;
  SECTION("until it succeeds") {
    const absl::Status status = Retry(options, stop, [&] {
      return ++calls < 3 ? absl::UnavailableError("not yet") : absl::OkStatus();
    });
    CHECK(status.ok());
    CHECK(calls == 3);
  }
  SECTION("until attempts are used up") {
    const absl::Status status = Retry(options, stop, [&] {
      ++calls;
      return absl::ResourceExhaustedError("full");
    });
    CHECK(absl::IsResourceExhausted(status));
    CHECK(calls == 4);
  }
  SECTION("an answer is an answer") {
    const absl::Status status = Retry(options, stop, [&] {
      ++calls;
      return absl::InvalidArgumentError("no");
    });
    CHECK(absl::IsInvalidArgument(status));
    CHECK(calls == 1);
  }
  SECTION("until the end is requested") {
    stop.Request();
    const absl::Status status = Retry({.initial_wait_ms = 1, .max_wait_ms = 1}, stop, [&] {
      ++calls;
      return absl::UnavailableError("gone");
    });
    CHECK(absl::IsCancelled(status));
    CHECK(calls == 1);
  }
}

TEST_CASE("the fence lets tools and the current epoch through") {
  Fence fence;
  CHECK(fence.Check("", 0).ok());
  CHECK(!fence.Check("", 1).ok());
  fence.Set("run-a", 4);
  CHECK(fence.Check("run-a", 4).ok());
  CHECK(fence.Check("", 4).ok());
  CHECK(fence.Check("other", 0).ok());
  const absl::Status old = fence.Check("run-a", 3);
  CHECK(absl::IsFailedPrecondition(old));
  CHECK(old.message().find("its epoch is 4") != std::string::npos);
  CHECK(absl::IsFailedPrecondition(fence.Check("run-b", 4)));
  // The answer to a registration may come after the first call of the new epoch.
  CHECK(absl::IsUnavailable(fence.Check("run-a", 5)));
}

TEST_CASE("log lines: level, name, file, one line each") {
  testing::TempDir folder;
  const std::string path = folder.File("logs/x.log");
  CHECK(absl::IsInvalidArgument(InitLogging({.name = "x", .level = "loud", .file = ""})));
  REQUIRE_OK(InitLogging({.name = "scorer-7", .level = "warning", .file = path}));
  LogInfo("not this");
  LogWarning("two\nlines ", 42);
  LogError("{} is no format");
  const std::string text = ReadText(path);
  CHECK(text.find("not this") == std::string::npos);
  CHECK(text.find("W scorer-7] two lines 42\n") != std::string::npos);
  CHECK(text.find("E scorer-7] {} is no format\n") != std::string::npos);
  const auto refused = [](const std::string& file) {
    const absl::Status status = InitLogging({.name = "x", .level = "info", .file = file});
    INFO(status);
    CHECK(absl::IsInvalidArgument(status));
    return std::string(status.message());
  };
  CHECK(refused("/proc/no/such.log").find("its folder can't be made: ") != std::string::npos);
  CHECK(refused(folder.path()).find("is a folder") != std::string::npos);
  REQUIRE(mkfifo(folder.File("pipe").c_str(), 0600) == 0);
  CHECK(refused(folder.File("pipe")).find("is a pipe") != std::string::npos);  // doesn't wait
  REQUIRE_OK(InitLogging({.name = "test", .level = "info", .file = ""}));
}

TEST_CASE("asking for the same series twice gives the same one; a taken port is named") {
  Metrics metrics;
  metrics.counter("stretto_test_total", "Help.", {{"a", "1"}}).Add();
  metrics.counter("stretto_test_total", "Help.", {{"a", "1"}}).Add(2);
  metrics.gauge("stretto_test_gauge", "Help.").Set(5);
  metrics.histogram("stretto_test_seconds", "Help.").Observe(0.2);
  const absl::StatusOr<int> port = metrics.Serve("127.0.0.1", 0);
  REQUIRE_OK(port);
  CHECK(*port > 0);
  Metrics other;
  const absl::Status taken = other.Serve("127.0.0.1", *port).status();
  CHECK(absl::IsUnavailable(taken));
  CHECK(taken.message().find(std::to_string(*port)) != std::string::npos);
}

TEST_CASE("an address that nobody can listen at is told apart from a taken port") {
  const auto reason = [](const std::string& bind) {
    Metrics metrics;
    const absl::Status status = metrics.Serve(bind, 0).status();
    INFO(status);
    CHECK(absl::IsInvalidArgument(status));
    return std::string(status.message());
  };
  CHECK(reason("192.0.2.1").find("not this machine's") != std::string::npos);
  CHECK(reason("no such host").find("'no such host' is no address") != std::string::npos);
  CHECK(reason("").find("expected one such as 127.0.0.1") != std::string::npos);
}

TEST_CASE("member files are read back; what is none is an error that names it") {
  testing::TempDir folder;
  std::filesystem::create_directories(folder.File("members"));
  std::ofstream(folder.File("members/a.json")) << "{\"address\": \"localhost:1\", \"pid\": 2}";
  std::ofstream(folder.File("members/b.json")) << "{\"addr";
  CHECK(*ReadMemberAddress(folder.path(), "a") == "localhost:1");
  CHECK(ReadMemberAddress(folder.path(), "b").status().message().find("b.json") !=
        std::string::npos);
  CHECK(!ReadMemberAddress(folder.path(), "c").ok());
}

TEST_CASE("peak memory is known") { CHECK(PeakRssBytes() > 1 << 20); }
}  // namespace stretto::services
