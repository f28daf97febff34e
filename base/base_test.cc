#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <functional>
#include <new>
#include <set>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "base/files.h"
#include "base/last_words.h"
#include "base/philox.h"
#include "base/testing.h"

namespace stretto {
namespace {
// Known answers published with the Random123 library (kat_vectors, philox 4x32 10 rounds).
TEST_CASE("philox matches its published vectors") {
  CHECK(Philox4x32({0, 0, 0, 0}, {0, 0}) ==
        std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) ==
        std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("draws differ in every part of their identity") {
  std::set<double> seen;
  const TokenDraw base{.run_seed = 1, .prompt_id = 2, .sample_index = 3, .position = 4};
  auto changed = base;
  seen.insert(UniformDouble(base));
  changed.run_seed = 9, seen.insert(UniformDouble(changed)), changed = base;
  changed.prompt_id = 9, seen.insert(UniformDouble(changed)), changed = base;
  changed.sample_index = 9, seen.insert(UniformDouble(changed)), changed = base;
  changed.position = 9, seen.insert(UniformDouble(changed)), changed = base;
  changed.stream = 9, seen.insert(UniformDouble(changed));
  CHECK(seen.size() == 6);
  CHECK(UniformDouble(base) == UniformDouble(base));
}

TEST_CASE("uniform draws have the mean and range of a uniform") {
  double sum = 0;
  for (uint32_t i = 0; i < 20000; ++i) {
    const float u = UniformFloat({.run_seed = 7, .position = i});
    REQUIRE(u >= 0.0f);
    REQUIRE(u < 1.0f);
    sum += u;
  }
  CHECK(sum / 20000 == Approx(0.5).margin(0.01));
}

TEST_CASE("files are replaced atomically and read back") {
  testing::TempDir dir;
  Files& files = Files::Real();
  REQUIRE_OK(files.WriteAtomically(dir.File("a"), "one"));
  REQUIRE_OK(files.WriteAtomically(dir.File("a"), "two"));
  CHECK(files.ReadAll(dir.File("a")).value() == "two");
  CHECK(files.List(dir.path()).value() == std::vector<std::string>{"a"});
  auto mapped = MappedFile::Open(dir.File("a"));
  REQUIRE_OK(mapped);
  CHECK((*mapped)->bytes().size() == 3);
}

TEST_CASE("file errors name the path and the reason") {
  const auto missing = Files::Real().ReadAll("/nonexistent/file");
  CHECK(missing.status().code() == absl::StatusCode::kNotFound);
  CHECK(std::string(missing.status().message()).find("/nonexistent/file") != std::string::npos);
  CHECK_FALSE(MappedFile::Open("/").ok());
  // A link that leads nowhere is there, and reading it says what is wrong.
  stretto::testing::TempDir folder;
  REQUIRE(symlink("nowhere", folder.File("link").c_str()) == 0);
  CHECK(Files::Real().Exists(folder.File("link")));
  CHECK_FALSE(Files::Real().ReadAll(folder.File("link")).ok());
  if (Files::Real().Exists("/dev/zero")) CHECK_FALSE(Files::Real().ReadAll("/dev/zero").ok());
  testing::TempDir dir;
  REQUIRE(mkfifo(dir.File("pipe").c_str(), 0600) == 0);
  // Neither waits for a writer; what is there is named.
  const auto has = [](const absl::Status& status, const std::string& words) {
    INFO(status);
    return status.code() == absl::StatusCode::kInvalidArgument &&
           status.message().find(words) != std::string::npos;
  };
  for (const auto& [path, kind] :
       {std::pair(dir.File("pipe"), "a pipe"), std::pair(dir.path(), "a folder"),
        std::pair(std::string("/dev/zero"), "a device")}) {
    const std::string words = path + ": is " + kind + ", expected a file";
    CHECK(has(MappedFile::Open(path).status(), words));
    CHECK(has(Files::Real().ReadAll(path).status(), words));
  }
  // What a shell passes as `<(command)` is open already and can be read.
  int ends[2] = {-1, -1};
  REQUIRE(pipe(ends) == 0);
  REQUIRE(write(ends[1], "piped", 5) == 5);
  close(ends[1]);
  CHECK(Files::Real().ReadAll("/dev/fd/" + std::to_string(ends[0])).value() == "piped");
  close(ends[0]);
  CHECK(Files::Real().ReadAll("/dev/null").value().empty());
  if (Files::Real().Exists("/dev/full")) {
    auto full = Files::Real().Create("/dev/full");
    REQUIRE_OK(full);
    CHECK((*full)->Append(AsBytes("x")).code() == absl::StatusCode::kResourceExhausted);
  }
}

// The exit code of a child that does this, and what it said.
std::pair<int, std::string> EndOf(const std::function<void()>& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    InstallLastWords("program", 7);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char piece[512];
  for (ssize_t got; (got = read(ends[0], piece, sizeof(piece))) > 0;) said.append(piece, got);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, said};
}

TEST_CASE("a process that can't go on says why") {
  const testing::TempDir dir;
  const std::string path = dir.File("model");
  REQUIRE_OK(Files::Real().WriteAtomically(path, std::string(20000, 'x')));
  const auto shrunk = EndOf([&] {
    const auto file = MappedFile::Open(path);
    if (!file.ok() || truncate(path.c_str(), 100) != 0) _exit(1);
    const volatile uint8_t* last = (*file)->bytes().data() + 19999;
    (void)*last;
  });
  CHECK(shrunk.first == 7);
  CHECK(shrunk.second.find("program: " + path + ": became shorter") == 0);
  const auto hungry = EndOf([] { std::thread([] { throw std::bad_alloc(); }).join(); });
  CHECK(hungry.first == 1);
  CHECK(hungry.second.find("program: there is no memory left") == 0);
  const auto crowded = EndOf([] {
    std::thread([] {
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    }).join();
  });
  CHECK(crowded.first == 1);
  CHECK(crowded.second.find("program: no more threads can be started") == 0);
}

TEST_CASE("the monotonic clock moves") {
  const int64_t before = Clock::Real().NowNs();
  Clock::Real().SleepNs(1'000'000);
  CHECK(Clock::Real().NowNs() - before >= 1'000'000);
}
}  // namespace
}  // namespace stretto
