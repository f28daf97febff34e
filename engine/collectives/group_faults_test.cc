// Groups of real processes: a rank that is killed, one that is stopped, one of an older epoch, one
// that expects another world. Nobody hangs, and everybody names the culprit.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"

extern char** environ;

namespace stretto::engine {
namespace {
std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return true;
    Clock::Real().SleepNs(20'000'000);
  }
  return false;
}

// A rank in a process of its own: this test program, told to run the hidden case below.
class RankProcess {
 public:
  RankProcess(const std::string& host, const Registration& r, const std::string& out,
              double timeout_s)
      : out_(out) {
    const std::string variables[] = {
        "RANK_HOST=" + host,
        absl::StrCat("RANK_EPOCH=", r.epoch),
        absl::StrCat("RANK=", r.rank),
        absl::StrCat("RANK_WORLD=", r.world_size),
        "RANK_NAME=" + r.name,
        "RANK_OUT=" + out,
        absl::StrFormat("RANK_TIMEOUT=%.3f", timeout_s),
    };
    std::vector<char*> env;
    for (const std::string& v : variables) env.push_back(const_cast<char*>(v.c_str()));
    for (char** e = environ; *e != nullptr; ++e) env.push_back(*e);
    env.push_back(nullptr);
    std::string program = "/proc/self/exe", test = "a rank in a process of its own";
    std::string quiet = "-o", nowhere = "/dev/null";
    char* argv[] = {program.data(), test.data(), quiet.data(), nowhere.data(), nullptr};
    STRETTO_CHECK(posix_spawn(&pid_, program.c_str(), nullptr, nullptr, argv, env.data()) == 0);
  }
  ~RankProcess() { Kill(); }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  void Signal(int signal) const { kill(pid_, signal); }
  void Kill() {
    if (pid_ < 0) return;
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  // Rounds that the rank has finished so far.
  int64_t Rounds() const { return std::atoll(ReadFile(out_ + ".rounds").c_str()); }
  // The last words, once there are some.
  std::string Outcome() const {
    REQUIRE(Eventually([this] { return !ReadFile(out_).empty(); }));
    return ReadFile(out_);
  }

 private:
  std::string out_;
  pid_t pid_ = -1;
};

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text;
  rename((path + ".new").c_str(), path.c_str());
}

TEST_CASE("a rank in a process of its own", "[.]") {
  const std::string out = Environment("RANK_OUT");
  if (out.empty()) return;
  CommunicatorOptions options;
  options.timeout = absl::Seconds(std::atof(Environment("RANK_TIMEOUT").c_str()));
  options.connect_timeout = absl::Seconds(60);
  const auto number = [](const char* name) { return std::atoi(Environment(name).c_str()); };
  auto group = JoinGroup(Environment("RANK_HOST"),
                         {"g", number("RANK_EPOCH"), number("RANK"), number("RANK_WORLD"),
                          Environment("RANK_NAME"), "127.0.0.1"},
                         options);
  absl::Status status = group.status();
  std::vector<float> data(100'000);
  for (int64_t round = 1; status.ok(); ++round) {
    status = (*group)->AllReduce(absl::MakeSpan(data));
    if (status.ok()) WriteFile(out + ".rounds", absl::StrCat(round));
  }
  WriteFile(out, std::string(status.ToString()));
}

struct Group {
  explicit Group(int n, double timeout_s = 60, int64_t epoch = 1)
      : host(*Listener::Open("127.0.0.1")) {
    for (int r = 0; r < n; ++r) Add(r, n, epoch, timeout_s);
  }
  void Add(int rank, int world, int64_t epoch, double timeout_s = 60) {
    const std::string file = dir.File(absl::StrCat("rank", ranks.size()));
    ranks.push_back(std::make_unique<RankProcess>(
        host.address(), Registration{"g", epoch, rank, world, testing::RankName(rank), ""}, file,
        timeout_s));
  }
  bool AllRun() const {
    return Eventually([this] {
      for (const auto& r : ranks) {
        if (r->Rounds() < 3) return false;
      }
      return true;
    });
  }
  stretto::testing::TempDir dir;
  RendezvousHost host;
  std::vector<std::unique_ptr<RankProcess>> ranks;
};

TEST_CASE("the others name a rank that was killed") {
  Group g(4);
  REQUIRE(g.AllRun());
  g.ranks[2]->Kill();
  for (const int r : {0, 1, 3}) {
    const std::string outcome = g.ranks[r]->Outcome();
    INFO(outcome);
    CHECK_THAT(outcome, Catch::Contains("UNAVAILABLE") && Catch::Contains("rank 2 (c) left") &&
                            Catch::Contains("AllReduce #"));
  }
}

TEST_CASE("the others name a rank that is stopped, within the timeout, and so does it itself") {
  Group g(3, /*timeout_s=*/5);
  REQUIRE(g.AllRun());
  const double begin = Clock::Real().NowSeconds();
  g.ranks[1]->Signal(SIGSTOP);
  for (const int r : {0, 2}) {
    const std::string outcome = g.ranks[r]->Outcome();
    INFO(outcome);
    CHECK_THAT(outcome, Catch::Contains("DEADLINE_EXCEEDED") && Catch::Contains("rank 1 (b)") &&
                            Catch::Contains("AllReduce #") && Catch::Contains("within 5 s"));
    CHECK_THAT(outcome, !Catch::Contains("rank 0") || Catch::Contains("as told by rank 0"));
  }
  CHECK(Clock::Real().NowSeconds() - begin >= 4.0);
  g.ranks[1]->Signal(SIGCONT);
  CHECK_THAT(g.ranks[1]->Outcome(), Catch::Contains("rank 1 (b)"));
}

TEST_CASE("a rank of an older epoch is fenced, whether the new group is forming or formed") {
  Group g(2, 60, /*epoch=*/5);
  REQUIRE(g.AllRun());
  g.Add(1, 2, 4);
  CHECK_THAT(g.ranks[2]->Outcome(), Catch::Contains("FAILED_PRECONDITION") &&
                                        Catch::Contains("epoch 4 of group g is over") &&
                                        Catch::Contains("the current one is 5"));
  // The same epoch a second time: its group is formed.
  g.Add(1, 2, 5);
  CHECK_THAT(g.ranks[3]->Outcome(),
             Catch::Contains("FAILED_PRECONDITION") && Catch::Contains("needs a higher one"));
  const int64_t before = g.ranks[0]->Rounds();
  CHECK(Eventually([&] { return g.ranks[0]->Rounds() > before; }));
  // One that waits in epoch 6 learns that 7 has begun.
  g.Add(0, 2, 6);
  Clock::Real().SleepNs(300'000'000);
  g.Add(0, 1, 7);
  CHECK_THAT(g.ranks[4]->Outcome(), Catch::Contains("the current one is 7"));
}

TEST_CASE("a survivor's group forms anew under the next epoch with one rank fewer") {
  Group g(3);
  REQUIRE(g.AllRun());
  g.ranks[0]->Kill();
  for (const int r : {1, 2}) CHECK_THAT(g.ranks[r]->Outcome(), Catch::Contains("rank 0 (a) left"));
  g.Add(0, 2, 2);
  g.Add(1, 2, 2);
  CHECK(Eventually([&] { return g.ranks[3]->Rounds() >= 3 && g.ranks[4]->Rounds() >= 3; }));
}

TEST_CASE("ranks that expect another world are refused, and missing ranks are named") {
  auto listener = Listener::Open("127.0.0.1");
  REQUIRE_OK(listener);
  RendezvousHost host(*std::move(listener));
  std::thread first([&] {
    // Its time ends before the third rank comes.
    const auto table = Register(host.address(), {"g", 1, 0, 3, "a", "x:1"}, absl::Seconds(3));
    STRETTO_CHECK(absl::IsDeadlineExceeded(table.status()));
    STRETTO_CHECK(table.status().message().find("ranks 1, 2 of 3 did not register") !=
                  absl::string_view::npos);
  });
  Clock::Real().SleepNs(1'000'000'000);
  const auto refused = [&](const Registration& r) {
    return Register(host.address(), r, absl::Seconds(1)).status().ToString();
  };
  CHECK_THAT(
      std::string(refused({"g", 1, 1, 2, "b", "x:2"})),
      Catch::Contains("INVALID_ARGUMENT") && Catch::Contains("expects 2 ranks, the others 3"));
  CHECK_THAT(std::string(refused({"g", 1, 3, 3, "b", "x:2"})), Catch::Contains("no place"));
  CHECK_THAT(std::string(refused({"g", 1, 0, 3, "b", "x:2"})), Catch::Contains("rank 0 is 'a'"));
  CHECK_THAT(std::string(refused({"g", 1, 1, 3, "a", "x:2"})), Catch::Contains("rank 0 already"));
  CHECK_THAT(std::string(refused({"h", 1, 1, 3, "b", "x:2"})), Catch::Contains("'h'"));
  first.join();
}

// A table made elsewhere: peers check one another without any host.
TEST_CASE("peers fence each other, and strangers do no harm") {
  auto a = Listener::Open("127.0.0.1"), b = Listener::Open("127.0.0.1");
  REQUIRE_OK(a);
  REQUIRE_OK(b);
  GroupTable table{"g", 8, {{"a", a->address()}, {"b", b->address()}}};
  GroupTable older = table, larger = table;
  older.epoch = 7;
  larger.members.push_back({"c", "127.0.0.1:1"});
  CommunicatorOptions options;
  options.connect_timeout = absl::Seconds(20);
  const std::string address = a->address();
  absl::StatusOr<std::unique_ptr<Communicator>> zero;
  std::thread thread([&] { zero = ConnectGroup(*std::move(a), table, 0, options); });
  {
    auto stranger = ConnectTo(address, AfterNs(5'000'000'000));
    REQUIRE_OK(stranger);
    const uint8_t noise[64] = {'G', 'E', 'T', ' ', '/', 0xff, 0xff, 0xff};
    CHECK(stranger->SendAll(noise, AfterNs(1'000'000'000)).ok());
  }
  const auto stale = ConnectGroup(*Listener::Open("127.0.0.1"), older, 1, options).status();
  CHECK(absl::IsFailedPrecondition(stale));
  CHECK_THAT(std::string(stale.message()),
             Catch::Contains("rank 1 (b) comes from epoch 7") && Catch::Contains("epoch 8"));
  const auto one = ConnectGroup(*std::move(b), table, 1, options);
  thread.join();
  REQUIRE_OK(zero);
  REQUIRE_OK(one);

  // Who is behind learns it from who is ahead; who expects fewer ranks, too.
  for (const GroupTable* other : {&table, &larger}) {
    auto c = Listener::Open("127.0.0.1");
    REQUIRE_OK(c);
    GroupTable mine = other == &table ? older : table, theirs = *other;
    mine.members[0].address = theirs.members[0].address = c->address();
    absl::Status left;
    std::thread behind([&] { left = ConnectGroup(*std::move(c), mine, 0, options).status(); });
    const auto right = ConnectGroup(*Listener::Open("127.0.0.1"), theirs, 1, options).status();
    behind.join();
    CHECK(left.code() == (other == &table ? absl::StatusCode::kFailedPrecondition
                                          : absl::StatusCode::kInvalidArgument));
    CHECK(right.code() == left.code());
    CHECK_THAT(std::string(left.message()), Catch::Contains("rank 1 (b)"));
  }

  // A peer that never comes is named.
  options.connect_timeout = absl::Milliseconds(300);
  auto lonely = Listener::Open("127.0.0.1");
  REQUIRE_OK(lonely);
  const auto alone = ConnectGroup(*std::move(lonely), table, 0, options).status();
  CHECK(absl::IsDeadlineExceeded(alone));
  CHECK_THAT(std::string(alone.message()), Catch::Contains("no connection from rank 1 (b)"));
}
}  // namespace
}  // namespace stretto::engine
