#include "services/coordinator/journal.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/testing.h"
#include "services/coordinator/dataset.h"

namespace stretto::services {
namespace {
using testing::TempDir;

std::vector<RolloutRecord> SomeRollouts() {
  std::vector<RolloutRecord> rollouts(2);
  for (uint32_t i = 0; i < 2; ++i) {
    RolloutRecord& r = rollouts[i];
    r.sample_index = i;
    r.ids = {7, -1, static_cast<int32_t>(i)};
    r.logprobs = {-0.5f, -1e-7f, -3.25f};
    r.versions = {2, 1, 2};
    r.finish_reason = i == 0 ? "stop" : "length";
    r.reward = 0.5 + i;
    r.components = {{"integer", 1.0}, {"length", 0.25}};
    r.reference_logprobs = {-0.25f, 0.0f, -9.0f};
  }
  return rollouts;
}

Group SomeGroup(uint64_t id, int64_t step, uint64_t position, GroupState state) {
  Group group;
  group.id = id;
  group.round = step;
  group.position = position;
  group.place = {1, position};
  group.state = state;
  group.min_version = 1;
  return group;
}

// A journal at version 1: step 1 taken with groups 1 and 2, groups 3 (scored) and 4 (ready) of
// step 2.
void Fill(Journal* journal) {
  journal->Write(RecordMember{"generator-0", PoolKind::kGenerator, "a:1", 3, "live"});
  journal->Write(RecordVersion{{0, "h0"}});
  for (uint64_t id = 1; id <= 2; ++id) {
    journal->Write(RecordGroup{SomeGroup(id, 1, id - 1, GroupState::kScored)});
    journal->WritePromptIds(id, std::vector<int32_t>{1, 2, static_cast<int32_t>(id)});
    journal->WriteRollouts(id, SomeRollouts());
    journal->WriteScores(id, SomeRollouts(), "tag");
  }
  journal->Write(RecordBatch{1, 0.125, {2, 1}});
  journal->Write(RecordVersion{{1, "h1"}});
  journal->WriteStep(
      {.step = 1, .metrics = {{"reward_mean", 0.5}, {"logprob_mismatch_max", 0.0}}, .seconds = 2},
      0.25);
  journal->Write(RecordGroup{SomeGroup(3, 2, 2, GroupState::kScored)});
  journal->Write(RecordGroup{SomeGroup(4, 2, 3, GroupState::kNew)});
  journal->Write(RecordGroup{SomeGroup(4, 2, 3, GroupState::kReady)});
  journal->WriteEval(0, 0.125, 8, 0);
  journal->WriteCheckpoint(1, "hash", "path");
  journal->WritePeakRss("generator-0", 100);
  journal->WritePeakRss("generator-0", 90);
  journal->WritePeakRss("coordinator", 11);
  journal->WriteSessionSeconds(1.5);
  REQUIRE(journal->Commit(true).ok());
}

TEST_CASE("a journal gives back what it was told") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  {
    auto journal = Journal::Open(path, "run-1", "essence");
    REQUIRE_OK(journal);
    Fill(journal->get());
  }
  auto opened = Journal::Open(path, "another id", "essence");
  REQUIRE_OK(opened);
  Journal& journal = **opened;
  CHECK(journal.run_id() == "run-1");
  const auto run = journal.Restore();
  REQUIRE_OK(run);
  CHECK(run->versions == std::map<int64_t, std::string>{{0, "h0"}, {1, "h1"}});
  CHECK(run->kl_coefs == std::map<int64_t, double>{{1, 0.125}});
  CHECK(run->next_kl_coef == 0.25);
  CHECK(run->checkpoint_version == 1);
  CHECK(run->next_group == 5);
  CHECK(run->next_position == 4);
  CHECK(run->member_epochs.at("generator-0") == 3);
  CHECK(run->evaluated == std::vector<int64_t>{0});
  REQUIRE(run->groups.size() == 2);
  CHECK(run->groups[0].state == GroupState::kScored);
  CHECK(run->groups[1].state == GroupState::kReady);
  CHECK(run->groups[1].place == DatasetPlace{1, 3});

  CHECK(journal.ReadBatch(1).value() == std::vector<uint64_t>{2, 1});
  CHECK_FALSE(journal.ReadBatch(2).ok());
  const auto group = journal.ReadGroup(2);
  REQUIRE_OK(group);
  CHECK(group->prompt_ids == std::vector<int32_t>{1, 2, 2});
  const auto expected = SomeRollouts();
  REQUIRE(group->rollouts.size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    const RolloutRecord &a = group->rollouts[i], &b = expected[i];
    CHECK(a.ids == b.ids);
    CHECK(a.logprobs == b.logprobs);
    CHECK(a.versions == b.versions);
    CHECK(a.finish_reason == b.finish_reason);
    CHECK(a.reward == b.reward);
    CHECK(a.components == b.components);
    CHECK(a.reference_logprobs == b.reference_logprobs);
  }
  const auto totals = journal.ReadTotals();
  REQUIRE_OK(totals);
  CHECK(totals->num_rollouts == 4);
  CHECK(totals->num_tokens == 12);
  CHECK(totals->peak_rss_bytes == 111);
  CHECK(totals->seconds == 1.5);
  CHECK(totals->num_sessions == 2);
  CHECK(journal.ReadSteps().value().at(0).metrics.at("reward_mean") == 0.5);
  CHECK(journal.ReadCheckpoint().value().first == "hash");
}

TEST_CASE("every view can be read") {
  TempDir dir;
  auto journal = Journal::Open(dir.File("run.sqlite"), "run-1", "essence");
  REQUIRE_OK(journal);
  Fill(journal->get());
  auto db = Sqlite::Open(dir.File("run.sqlite"));  // beside the journal, as sqlite3 would
  REQUIRE_OK(db);
  const std::map<std::string, int> rows = {
      {"progress", 1},         {"rewards", 4},   {"buffer", 1},       {"dropped_groups", 0},
      {"trained_rollouts", 4}, {"staleness", 1}, {"trained_twice", 0}};
  for (const auto& [view, count] : rows) {
    INFO(view);
    auto query = (*db)->Prepare("SELECT COUNT(*) FROM " + view);
    REQUIRE(query.Step().value());
    CHECK(query.IntAt(0) == count);
  }
}

TEST_CASE("a second coordinator and another run are refused") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  auto first = Journal::Open(path, "run-1", "essence");
  REQUIRE_OK(first);
  const auto second = Journal::Open(path, "run-1", "essence");
  REQUIRE_FALSE(second.ok());
  CHECK(absl::StrContains(second.status().message(), "another coordinator"));
  {
    std::thread ending([&first] {
      Clock::Real().SleepNs(100'000'000);
      first->reset();
    });
    auto third = Journal::Open(path, "run-1", "essence", /*wait=*/absl::Seconds(60));
    ending.join();
    REQUIRE_OK(third);
    first = std::move(third);
  }
  Fill(first->get());
  first->reset();
  const auto other = Journal::Open(path, "run-1", "other settings");
  REQUIRE_FALSE(other.ok());
  CHECK(absl::StrContains(other.status().message(), "other settings"));
  CHECK(Journal::Open(path, "run-1", "essence").ok());
}

TEST_CASE("a run without results gives way to one with other settings") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  {
    auto journal = Journal::Open(path, "run-1", "a model that does not load");
    REQUIRE_OK(journal);
    (*journal)->Write(RecordVersion{{0, "h0"}});
    REQUIRE((*journal)->Commit(true).ok());
  }
  auto journal = Journal::Open(path, "run-2", "another model");
  REQUIRE_OK(journal);
  CHECK((*journal)->run_id() == "run-2");
  const auto run = (*journal)->Restore();
  REQUIRE_OK(run);
  CHECK(run->versions.empty());
}

TEST_CASE("what was committed survives the end of the process") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  const pid_t child = fork();
  if (child == 0) {
    auto journal = Journal::Open(path, "run-1", "essence");
    if (!journal.ok()) _exit(1);
    (*journal)->Write(RecordVersion{{0, "h0"}});
    if (!(*journal)->Commit(false).ok()) _exit(1);
    (*journal)->Write(RecordVersion{{1, "h1"}});  // not committed
    raise(SIGKILL);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  auto journal = Journal::Open(path, "run-1", "essence");
  REQUIRE_OK(journal);
  CHECK((*journal)->Restore().value().versions == std::map<int64_t, std::string>{{0, "h0"}});
}

TEST_CASE("a pause outlives the coordinator, until it is taken back or the run is stopped") {
  TempDir dir;
  const auto paused_after = [&](const std::vector<std::string>& events) {
    auto journal = Journal::Open(dir.File("run.sqlite"), "run-1", "essence");
    REQUIRE_OK(journal);
    for (const std::string& event : events) (*journal)->Write(RecordEvent{event});
    REQUIRE_OK((*journal)->Commit(false));
    return (*journal)->Restore().value().paused;
  };
  CHECK_FALSE(paused_after({}));
  CHECK(paused_after({"paused"}));
  CHECK(paused_after({"generator-0 has been silent for longer than its lease"}));
  CHECK_FALSE(paused_after({"resumed"}));
  CHECK_FALSE(paused_after({"paused", "stop requested"}));
  CHECK_FALSE(paused_after({"paused", "run failed: x"}));
}

TEST_CASE("a journal that was removed or replaced under the run is a lasting error") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  auto journal = Journal::Open(path, "run-1", "essence");
  REQUIRE_OK(journal);
  (*journal)->CheckPlace();
  REQUIRE_OK((*journal)->status());
  REQUIRE_OK(Files::Real().Rename(path, dir.File("elsewhere")));
  (*journal)->CheckPlace();
  CHECK(absl::IsDataLoss((*journal)->status()));
  CHECK(absl::StrContains((*journal)->Commit(false).message(), "removed or replaced"));
}

TEST_CASE("a full disk is a clear and lasting error, and loses nothing committed") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  const pid_t child = fork();
  if (child == 0) {
    auto journal = Journal::Open(path, "run-1", "essence");
    if (!journal.ok()) _exit(1);
    (*journal)->Write(RecordVersion{{0, "h0"}});
    if (!(*journal)->Commit(true).ok()) _exit(2);
    // A limit on the size of files stands in for the full disk.
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{300 << 10, 300 << 10};
    setrlimit(RLIMIT_FSIZE, &limit);
    for (uint64_t id = 1; id < 4000 && (*journal)->status().ok(); ++id) {
      (*journal)->Write(RecordGroup{SomeGroup(id, 1, id, GroupState::kReady)});
      (*journal)->WriteRollouts(id, SomeRollouts());
      (void)(*journal)->Commit(false);
    }
    if ((*journal)->status().ok()) _exit(3);
    (*journal)->Write(RecordVersion{{1, "h1"}});
    _exit((*journal)->Commit(false).ok() ? 4 : 0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  auto journal = Journal::Open(path, "run-1", "essence");
  REQUIRE_OK(journal);
  const auto run = (*journal)->Restore();
  REQUIRE_OK(run);
  CHECK(run->versions == std::map<int64_t, std::string>{{0, "h0"}});
  CHECK(run->groups.size() > 10);
}

// The last line of tests/integration/exactly_once.sql, which checks journals from outside.
std::string Violations(const std::string& path) {
  const std::string command = "sqlite3 -readonly " + path +
                              " < " STRETTO_SOURCE_DIR
                              "/tests/integration/exactly_once.sql | tail -n 1";
  FILE* pipe = popen(command.c_str(), "r");
  char line[100] = "";
  const bool is_read = pipe != nullptr && std::fgets(line, sizeof(line), pipe) != nullptr;
  REQUIRE(pclose(pipe) == 0);
  return is_read ? line : "";
}

void Execute(const std::string& path, const std::string& sql) {
  auto db = Sqlite::Open(path);
  REQUIRE_OK(db);
  REQUIRE_OK((*db)->Execute(sql));
}

TEST_CASE("the script that checks journals from outside finds what is wrong") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  const std::string essence = "max_staleness: 0\nprompts_per_step: 2\ngroup_size: 2\n";
  {
    auto journal = Journal::Open(path, "run-1", essence);
    REQUIRE_OK(journal);
    Fill(journal->get());
  }
  // Fill's rollouts are said to be of versions 1 and 2, which came later, and out of order.
  CHECK(Violations(path) != "violations|0\n");
  Execute(path,
          "UPDATE rollouts SET versions = zeroblob(24), min_version = 0; UPDATE groups SET "
          "min_version = 0; DELETE FROM batches; INSERT INTO batches VALUES(1, 0, 1), (1, 1, 2)");
  REQUIRE(Violations(path) == "violations|0\n");
  const std::string damaged = dir.File("damaged.sqlite");
  for (const char* damage :
       {"UPDATE groups SET line = 0 WHERE id = 2", "UPDATE groups SET position = 0 WHERE id = 2",
        "DELETE FROM groups WHERE id = 3", "UPDATE groups SET round = 2 WHERE id = 1",
        "UPDATE groups SET state = 'rejected' WHERE id = 4",
        "DELETE FROM rollouts WHERE group_id = 1 AND sample_index = 1",
        "DELETE FROM scores WHERE group_id = 2 AND sample_index = 0",
        "DELETE FROM batches WHERE group_id = 2", "UPDATE batches SET ordinal = 3 - ordinal",
        "UPDATE rollouts SET versions = zeroblob(16) WHERE group_id = 1",
        "UPDATE rollouts SET versions = CAST(x'01' || zeroblob(23) AS BLOB)",
        "UPDATE rollouts SET min_version = -1 WHERE group_id = 1", "DELETE FROM steps",
        "DELETE FROM versions WHERE number = 0", "UPDATE checkpoints SET version = 7"}) {
    INFO(damage);
    std::filesystem::copy_file(path, damaged, std::filesystem::copy_options::overwrite_existing);
    Execute(damaged, damage);
    CHECK(Violations(damaged) != "violations|0\n");
  }
}

TEST_CASE("content that changed on disk is noticed when it is read") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite"), damaged = dir.File("damaged.sqlite");
  {
    auto journal = Journal::Open(path, "run-1", "essence");
    REQUIRE_OK(journal);
    Fill(journal->get());
  }
  for (const auto& [damage, what] : std::vector<std::pair<std::string, std::string>>{
           {"UPDATE prompts SET ids = x'07000000'", "its prompt"},
           {"UPDATE rollouts SET ids = zeroblob(LENGTH(ids))", "its completion 0"},
           {"UPDATE rollouts SET logprobs = zeroblob(LENGTH(logprobs)) WHERE sample_index = 1",
            "its completion 1"},
           {"UPDATE rollouts SET versions = zeroblob(LENGTH(versions))", "its completion 0"},
           {"UPDATE rollouts SET finish_reason = 'other'", "its completion 0"},
           {"UPDATE scores SET reward = reward + 1", "the score of its completion 0"},
           {"UPDATE scores SET components = '{}'", "the score of its completion 0"},
           {"UPDATE scores SET reference_logprobs = x'00000000'",
            "the score of its completion 0"}}) {
    INFO(damage);
    std::filesystem::copy_file(path, damaged, std::filesystem::copy_options::overwrite_existing);
    Execute(damaged, damage);
    auto journal = Journal::Open(damaged, "run-1", "essence");
    REQUIRE_OK(journal);
    const auto group = (*journal)->ReadGroup(2);
    REQUIRE(absl::IsDataLoss(group.status()));
    CHECK(absl::StrContains(group.status().message(),
                            absl::StrCat("of group 2, ", what, " isn't what was written")));
  }
}

TEST_CASE("garbage instead of a journal is named") {
  TempDir dir;
  const std::string path = dir.File("run.sqlite");
  REQUIRE(Files::Real().WriteAtomically(path, std::string(5000, 'x')).ok());
  const auto journal = Journal::Open(path, "run-1", "essence");
  REQUIRE_FALSE(journal.ok());
  CHECK(absl::IsDataLoss(journal.status()));
  CHECK(absl::StrContains(journal.status().message(), path));
}

TEST_CASE("datasets are read line by line and bad lines are named") {
  const std::string good =
      "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n\n"
      "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\r\n";
  const auto data = ParseDataset(good, "d.jsonl", {});
  REQUIRE_OK(data);
  CHECK(data->lines.size() == 2);
  const auto error = [&](const std::string& line) {
    const auto bad = ParseDataset(good + line, "d.jsonl", {});
    REQUIRE_FALSE(bad.ok());
    const auto skipped = ParseDataset(good + line, "d.jsonl", {.skip_bad_lines = true});
    REQUIRE_OK(skipped);
    CHECK(skipped->lines.size() == 2);
    CHECK(skipped->warnings.size() == 1);
    return std::string(bad.status().message());
  };
  CHECK(absl::StartsWith(error("{\"prompt\": "), "d.jsonl:4: not valid JSON"));
  CHECK(absl::StartsWith(error("{\"prompt\": \"a\", \"prompt\": \"b\"}"),
                         "d.jsonl:4: the key 'prompt' comes twice"));
  CHECK(absl::StartsWith(error("[1]"), "d.jsonl:4: expected a JSON object"));
  CHECK(absl::StartsWith(error("{\"text\": \"x\"}"), "d.jsonl:4: expected either"));
  CHECK(absl::StartsWith(error("{\"prompt\": 5}"),
                         "d.jsonl:4: `prompt` is no text and no list of messages"));
  CHECK(absl::StartsWith(error("{\"messages\": []}"), "d.jsonl:4: 'messages': expected a list"));
  CHECK(absl::StartsWith(error("{\"messages\": [{\"role\": \"user\"}]}"),
                         "d.jsonl:4: 'messages[0].content' is missing"));
  CHECK(absl::StartsWith(error(R"({"messages": [{"role": "user", "content": "", "tool": "x"}]})"),
                         "d.jsonl:4: 'messages[0].tool' isn't known"));
  CHECK(absl::StartsWith(error(R"({"messages": [{"role": "foo", "content": ""}]})"),
                         "d.jsonl:4: 'messages[0].role' is 'foo': expected system, developer"));
  CHECK(ParseDataset(R"({"prompt": null, "messages": [{"role": "developer", "content": "a"}]})",
                     "d.jsonl", {})
            .ok());
  CHECK(absl::StrContains(ParseDataset("\n", "d.jsonl", {}).status().message(), "is empty"));
  const auto marked = ParseDataset("\xef\xbb\xbf{\"prompt\": \"a\"}\r\n", "d.jsonl", {});
  REQUIRE_OK(marked);
  CHECK(marked->lines[0] == "{\"prompt\": \"a\"}");
  CHECK_FALSE(ReadDataset("/nonexistent.jsonl", {}).ok());
  RewardSpec integer;
  integer.type = "integer";
  const std::string first = "{\"prompt\":\"a\",\"answer\":1}\n";
  const auto lacking =
      ParseDataset(first + "{\"prompt\":\"b\"}\n", "d.jsonl", {.rewards = {integer}});
  CHECK(lacking.status().message() ==
        "d.jsonl:2: the dataset line's field 'answer' is missing; the reward integer "
        "compares completions with it (data.on_bad_line: skip leaves such lines out)");
  const auto empty = ParseDataset(first + "\n{\"prompt\":\"b\",\"answer\":null}\n", "d.jsonl",
                                  {.rewards = {integer}});
  CHECK(absl::StartsWith(empty.status().message(),
                         "d.jsonl:3: the dataset line's field 'answer' is null"));
}
}  // namespace
}  // namespace stretto::services
