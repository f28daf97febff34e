#include <signal.h>

#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/testing.h"
#include "cli/html_report.h"
#include "cli/progress.h"
#include "cli/supervisor.h"

namespace stretto::cli {
namespace {
TEST_CASE("a report holds a plot for each series and escapes what it shows") {
  testing::TempDir dir;
  Files& files = Files::Real();
  CHECK_FALSE(RenderHtmlReport(files, dir.path()).ok());
  REQUIRE_OK(files.WriteAtomically(dir.File("metrics.jsonl"),
                                   "{\"step\":1,\"reward_mean\":0.25,\"x<y\":1}\n"
                                   "{\"step\":2,\"reward_mean\":0.5,\"x<y\":null}\n{\"step\":3,"));
  REQUIRE_OK(files.WriteAtomically(dir.File("summary.json"), "{\"checkpoint_hash\":\"a&b\"}"));
  const auto page = RenderHtmlReport(files, dir.path());
  REQUIRE_OK(page);
  CHECK(page->find("step 2: 0.5") != std::string::npos);
  CHECK(page->find("x&lt;y") != std::string::npos);
  CHECK(page->find("a&amp;b") != std::string::npos);
  CHECK(page->find("x<y") == std::string::npos);
}

TEST_CASE("a broken line of metrics is named") {
  testing::TempDir dir;
  REQUIRE_OK(Files::Real().WriteAtomically(dir.File("metrics.jsonl"), "{\"step\":1}\nnonsense\n"));
  const auto page = RenderHtmlReport(Files::Real(), dir.path());
  CHECK(std::string(page.status().message()).find("metrics.jsonl:2") != std::string::npos);
}

TEST_CASE("a step's line shows the metrics that are there") {
  v1::RunStatus status;
  status.set_step(3);
  status.set_num_steps(60);
  (*status.mutable_metrics())["reward_mean"] = 0.5;
  (*status.mutable_metrics())["logprob_mismatch_max"] = 0;
  const std::string line = StepLine(status);
  CHECK(line.find("step 3/60  reward 0.500") != std::string::npos);
  CHECK(line.find("mismatch 0 ") != std::string::npos);
  CHECK(line.find("entropy") == std::string::npos);
}

class HandClock final : public Clock {
 public:
  int64_t NowNs() const override { return now_ns; }
  int64_t WallUs() const override { return 0; }
  void SleepNs(int64_t duration_ns) override { now_ns += duration_ns; }
  int64_t now_ns = 1;
};

TEST_CASE("a pipe hears of evaluations, of all news, and of something in a long silence") {
  HandClock clock;
  std::FILE* out = std::tmpfile();
  Progress progress(/*is_terminal=*/false, clock, out);
  const auto told = [&] {
    const long size = std::ftell(out);
    std::string text(static_cast<size_t>(size), '\0');
    std::rewind(out);
    CHECK(std::fread(text.data(), 1, text.size(), out) == text.size());
    return text;
  };
  progress.Wait("waiting for the coordinator");
  clock.now_ns += kMaxSilenceNs;
  progress.Wait("waiting for the coordinator");
  CHECK(told() == "waiting for the coordinator\n");

  v1::RunStatus status;
  status.set_state(v1::RUN_STATE_RUNNING);
  status.set_phase("generating");
  status.set_num_steps(60);
  status.set_eval_before(-1);
  status.set_eval_last(-1);
  progress.Show(status);
  CHECK(told() == "waiting for the coordinator\n");
  status.set_eval_before(0.125);
  status.set_eval_last(0.125);
  for (const char* event : {"one", "two", "three\x1b[2J"}) status.add_events(event);
  status.set_num_events(2 + 3);  // the first two of five are lost
  progress.Show(status);
  progress.Show(status);
  CHECK(absl::EndsWith(told(),
                       "\none\ntwo\nthree\\x1b[2J\nheld-out accuracy 12.5 % before "
                       "training\n"));
  const std::string before = told();
  status.set_round_rollouts(128);
  status.set_round_generated(24);
  status.set_round_scored(16);
  clock.now_ns += kMaxSilenceNs / 2;
  progress.Show(status);
  CHECK(told() == before);
  clock.now_ns += kMaxSilenceNs / 2;
  progress.Show(status);
  CHECK(absl::StartsWith(told().substr(before.size()),
                         "running, generating, step 1/60, 24 of 128 rollouts, 16 judged"));
  // A coordinator that was started again counts anew; what was told isn't told again.
  status.clear_events();
  status.add_events("four");
  status.set_num_events(5);  // no fewer than the one before had told
  status.set_session(2);
  const std::string then = told();
  progress.Show(status);
  CHECK(told().substr(then.size()) == "four\n");
  std::fclose(out);
}

absl::Status PollUntil(Supervisor& supervisor, std::vector<std::string>* notes, size_t num_notes) {
  for (int i = 0; i < 500 && notes->size() < num_notes; ++i) {
    RETURN_IF_ERROR(supervisor.Poll(notes));
    Clock::Real().SleepNs(10'000'000);
  }
  return absl::OkStatus();
}

TEST_CASE("every step is told of, however short, from the file of metrics") {
  testing::TempDir dir;
  const std::string path = dir.File("metrics.jsonl");
  HandClock clock;
  std::FILE* out = std::tmpfile();
  Progress progress(/*is_terminal=*/false, clock, out);
  progress.Follow(path);
  const auto told = [&] {
    std::string text(static_cast<size_t>(std::ftell(out)), '\0');
    std::rewind(out);
    CHECK(std::fread(text.data(), 1, text.size(), out) == text.size());
    return text;
  };
  const auto write = [&](const std::string& text) {
    REQUIRE_OK(Files::Real().WriteAtomically(path, text));
  };
  v1::RunStatus status;
  status.set_state(v1::RUN_STATE_RUNNING);
  status.set_num_steps(9);
  status.set_first_step(2);
  status.set_eval_last(-1);
  status.set_step(5);
  const std::string first = "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"reward_mean\":0.25}\n";
  write(first + "{\"eval\":0.5,\"step\":3}\n{\"step\":4,\"skip_reason\":\"x\"}\n{\"step\":5,\"rew");
  progress.Show(status);
  const std::string lines =
      "Resuming after step 2\nstep 3/9  reward 0.250  version 3\nheld-out accuracy 50.0 % after "
      "step 3\nstep 4/9  SKIPPED  version 4\n";
  CHECK(told() == lines);
  progress.Show(status);  // the fifth isn't there yet
  CHECK(told() == lines);
  // Written anew, by a coordinator that was started again, and gone on with until the end.
  write(first + "{\"step\":4}\n{\"step\":5}\n{\"step\":6}\n");
  progress.End();
  CHECK(told() == lines + "step 5/9  version 5\nstep 6/9  version 6\n");
  std::fclose(out);
}

TEST_CASE("a killed process is started again, an ended one if it was to stay") {
  testing::TempDir dir;
  Supervisor supervisor(Clock::Real());
  REQUIRE_OK(supervisor.Start({"sleeper", {"/bin/sleep", "60"}, dir.File("sleeper.log")}));
  REQUIRE_OK(supervisor.Start({"quick", {"/bin/true"}, dir.File("quick.log"), {}, true}));
  REQUIRE_OK(supervisor.Start(
      {"leaver", {"/bin/sh", "-c", "echo here >> " + dir.File("here")}, dir.File("leaver.log")}));
  std::vector<std::string> notes;
  supervisor.Signal("sleeper", SIGKILL);
  REQUIRE_OK(PollUntil(supervisor, &notes, 1));
  REQUIRE(notes.size() == 1);
  CHECK(notes[0].find("sleeper was killed by signal 9") != std::string::npos);
  for (int i = 0; i < 300 && !supervisor.IsRunning("sleeper"); ++i) {
    REQUIRE_OK(supervisor.Poll(&notes));
    Clock::Real().SleepNs(10'000'000);
  }
  CHECK(supervisor.IsRunning("sleeper"));
  CHECK_FALSE(supervisor.IsRunning("quick"));
  CHECK(supervisor.HasEnded("quick"));
  CHECK_FALSE(supervisor.HasEnded("sleeper"));
  // But one that was to stay is missed: somebody has ended it.
  REQUIRE_OK(PollUntil(supervisor, &notes, 2));
  REQUIRE(notes.size() == 2);
  CHECK(notes[1].find("leaver has ended in order while the run goes on") == 0);
  CHECK(supervisor.IsRunning("leaver"));
  supervisor.SignalAll(SIGTERM);
  supervisor.WaitForAll(5000);
  CHECK(supervisor.num_running() == 0);
}

TEST_CASE("a process that refuses its arguments ends the run with its last words") {
  testing::TempDir dir;
  Supervisor supervisor(Clock::Real());
  REQUIRE_OK(supervisor.Start(
      {"bad", {"/bin/sh", "-c", "echo port 99999 is no port; exit 2"}, dir.File("bad.log")}));
  std::vector<std::string> notes;
  const absl::Status status = PollUntil(supervisor, &notes, 1);
  CHECK(status.code() == absl::StatusCode::kAborted);
  CHECK(std::string(status.message()).find("port 99999 is no port") != std::string::npos);
}

TEST_CASE("a coordinator whose run has failed is not started again") {
  testing::TempDir dir;
  Supervisor supervisor(Clock::Real());
  REQUIRE_OK(supervisor.Start({"coordinator", {"/bin/sh", "-c", "exit 3"}, dir.File("log")}));
  std::vector<std::string> notes;
  for (int i = 0; i < 500 && supervisor.IsRunning("coordinator"); ++i) {
    REQUIRE_OK(supervisor.Poll(&notes));
    Clock::Real().SleepNs(10'000'000);
  }
  CHECK(supervisor.HasEnded("coordinator"));
  CHECK(supervisor.ExitCode("coordinator") == 3);
  CHECK(notes.empty());
}

TEST_CASE("generators get processors of their own where there are several memory nodes") {
  using Lists = std::vector<std::vector<int>>;
  const std::vector<MemoryNode> two = {{0, {0, 1, 2, 3}}, {1, {4, 5, 6, 7}}};
  CHECK(ProcessorsOfGenerators(two, 2, 0) == Lists{{0, 1, 2, 3}, {4, 5, 6, 7}});
  CHECK(ProcessorsOfGenerators(two, 3, 2) == Lists{{0, 1}, {2, 3}, {4, 5}});
  CHECK(ProcessorsOfGenerators(two, 1, 3) == Lists{{0, 1, 2}});
  CHECK(ProcessorsOfGenerators(two, 1, 0).empty());  // all of them
  CHECK(ProcessorsOfGenerators(two, 3, 3).empty());  // not enough
  CHECK(ProcessorsOfGenerators(two, 9, 0).empty());
  CHECK(ProcessorsOfGenerators(two, 0, 2).empty());
  CHECK(ProcessorsOfGenerators({two[0]}, 2, 2).empty());  // one node: as ever
}

TEST_CASE("trainers leave generators their threads where both compute at the same time") {
  RunConfig run;
  run.schedule.max_staleness = 0;
  run.cluster.generator_threads = 2;
  CHECK(ThreadsOfTrainer(run, 8) == 0);
  CHECK(ThreadsBesideGenerators(run, 8) == 0);  // they wait meanwhile
  run.schedule.max_staleness = 1;
  CHECK(ThreadsOfTrainer(run, 8) == 0);
  CHECK(ThreadsBesideGenerators(run, 8) == 6);
  run.cluster.generators = 2;
  run.cluster.trainers = 2;
  CHECK(ThreadsOfTrainer(run, 8) == 4);
  CHECK(ThreadsBesideGenerators(run, 8) == 2);
  CHECK(ThreadsBesideGenerators(run, 2) == 1);  // fewer than generators take
  run.cluster.generator_threads = 0;            // nothing is said about who gets what
  CHECK(ThreadsBesideGenerators(run, 8) == 0);
  run.cluster.generator_threads = 2;
  run.cluster.trainer_threads = 3;
  CHECK(ThreadsOfTrainer(run, 8) == 3);
  CHECK(ThreadsBesideGenerators(run, 8) == 0);
}

TEST_CASE("a process that is given processors runs on them alone") {
  testing::TempDir dir;
  Supervisor supervisor(Clock::Real());
  const int processor = AllowedProcessors().back();
  ProcessSpec spec;
  spec.name = "coordinator";
  spec.log_file = dir.path() + "/log";
  spec.command = {"/bin/grep", "Cpus_allowed_list", "/proc/self/status"};
  spec.processors = {processor};
  REQUIRE_OK(supervisor.Start(spec));
  supervisor.StopRestarting();
  std::vector<std::string> notes;
  for (int i = 0; i < 500 && !supervisor.HasEnded("coordinator"); ++i) {
    REQUIRE_OK(supervisor.Poll(&notes));
    Clock::Real().SleepNs(10'000'000);
  }
  CHECK(absl::StrContains(TailOf(spec.log_file, 2), absl::StrCat("list:\t", processor, "\n")));
}
}  // namespace
}  // namespace stretto::cli
