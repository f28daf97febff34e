// `stretto up` as its users run it: a process that starts and watches the others.
#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "nlohmann/json.hpp"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
constexpr int64_t kTimeoutMs = 120000;

TestRunOptions Options() {
  TestRunOptions options;
  options.rewards = "rewards: [{type: regex, name: letter, pattern: '[a-e]'}]\n";
  return options;
}

Process Up(const TestRun& run, const std::string& log, const std::vector<std::string>& sets) {
  std::vector<std::string> arguments = {"up", run.run_file()};
  for (const std::string& set : sets) {
    arguments.push_back("--set");
    arguments.push_back(set);
  }
  return Process("stretto", std::move(arguments), run.LogOf(log));
}

nlohmann::json Summary(const TestRun& run) {
  const auto text = Files::Real().ReadAll(run.run_dir() + "/summary.json");
  return nlohmann::json::parse(text.value_or(""), nullptr, false);
}

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_CASE("a run goes up, shows its steps, and ends by itself; a killed member comes back") {
  const TestRun run(Options());
  Process up = Up(run, "up", {"train.steps=200", "train.checkpoint_every=40"});
  REQUIRE(Eventually([&] { return Count(up.Log(), "\nstep ") >= 2; }, 60000));
  ::kill(std::stoi(run.MemberField("generator-0", "pid")), SIGKILL);
  CHECK(up.WaitForExit(kTimeoutMs) == 0);
  const std::string log = up.Log();
  INFO(log);
  CHECK(log.find("step 200/200") != std::string::npos);
  CHECK(Count(log, "starting it again") == 1);
  CHECK(log.find("Resuming") == std::string::npos);
  CHECK(log.find("has not been heard of") == std::string::npos);
  CHECK(Summary(run)["state"] == "done");
  CHECK(Summary(run)["steps"] == 200);
}

TEST_CASE("people can talk to the policy in training, which changes nothing in the run") {
  const auto train = [](const TestRun& run, int http_port) {
    Process up = Up(run, "up", {"train.steps=100", absl::StrCat("cluster.http_port=", http_port)});
    if (http_port >= 0) {
      const std::string address = absl::StrCat("http://127.0.0.1:", http_port, "/v1");
      const bool told = Eventually([&] { return Count(up.Log(), address) == 1; }, 60000);
      INFO(up.Log());
      REQUIRE(told);
      CHECK(HttpGet(http_port, "/v1/models").find("\"id\":\"test\"") != std::string::npos);
      const std::string body = R"({"prompt": "1+1=", "max_tokens": 24, "n": 20, "seed": 4})";
      Connection connection(http_port);
      connection.Send(
          absl::StrCat("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
                       "Content-Length: ", body.size(), "\r\n\r\n", body));
      CHECK(connection.ReadAll().find("HTTP/1.1 200 ") == 0);
    }
    CHECK(up.WaitForExit(kTimeoutMs) == 0);
    const nlohmann::json summary = Summary(run);
    REQUIRE(summary["checkpoint_hash"].is_string());
    return summary["checkpoint_hash"].get<std::string>();
  };
  const TestRun quiet(Options()), talkative(Options());
  CHECK(train(quiet, -1) == train(talkative, FreePort()));
}

TEST_CASE("an interrupted run resumes; with other settings it is refused") {
  const TestRun run(Options());
  {
    Process up = Up(run, "first", {"train.steps=400"});
    REQUIRE(Eventually([&] { return Count(up.Log(), "\nstep ") >= 2; }, 60000));
    up.Signal(SIGINT);
    CHECK(up.WaitForExit(kTimeoutMs) == 130);
    CHECK(up.Log().find("stopped before its end") != std::string::npos);
  }
  const int64_t steps = Summary(run)["steps"];
  CHECK(steps >= 2);
  Process other = Up(run, "other", {"train.steps=400", "train.lr=0.5"});
  CHECK(other.WaitForExit(kTimeoutMs) == 1);
  CHECK(other.Log().find("is `lr: 0.5`") != std::string::npos);
  Process again = Up(run, "again", {absl::StrCat("train.steps=", steps + 2)});
  CHECK(again.WaitForExit(kTimeoutMs) == 0);
  INFO(again.Log());
  CHECK(again.Log().find(absl::StrCat("Resuming after step ", steps, "\n")) != std::string::npos);
  CHECK(Summary(run)["steps"] == steps + 2);
}

TEST_CASE("what would fail again is said once") {
  const TestRun run(Options());
  std::ofstream(run.File("train.jsonl"), std::ios::app) << "nonsense\n";
  Process up = Up(run, "up", {"train.steps=2"});
  CHECK(up.WaitForExit(kTimeoutMs) == 2);
  const std::string log = up.Log();
  INFO(log);
  CHECK(Count(log, "train.jsonl:33: not valid JSON") == 1);
  CHECK(log.find("starting it again") == std::string::npos);
  CHECK_FALSE(Files::Real().Exists(run.run_dir()));  // nothing had been started
  Process longer = Up(run, "longer", {"data.on_bad_line=skip", "model.max_sequence_length=1024"});
  CHECK(longer.WaitForExit(kTimeoutMs) == 2);
  CHECK(Count(longer.Log(), "was made for 256") == 1);
  CHECK_FALSE(Files::Real().Exists(run.run_dir()));
  // The model's context where none is named.
  Process skip =
      Up(run, "skip", {"train.steps=2", "data.on_bad_line=skip", "model.max_sequence_length=auto"});
  CHECK(skip.WaitForExit(kTimeoutMs) == 0);
  CHECK(skip.Log().find("1 line of data is left out") != std::string::npos);
}

TEST_CASE("a reward service that nobody runs is named before anything starts") {
  TestRunOptions options;
  const int port = FreePort();
  options.rewards =
      absl::StrCat("rewards: [{type: service, address: '127.0.0.1:", port, "', name: mine}]\n");
  const TestRun run(options);
  Process up = Up(run, "up", {"train.steps=2"});
  CHECK(up.WaitForExit(kTimeoutMs) == 1);
  INFO(up.Log());
  CHECK(up.Log().find(absl::StrCat("reward 'mine': no reward service answers at 127.0.0.1:",
                                   port)) != std::string::npos);
  CHECK_FALSE(Files::Real().Exists(run.run_dir()));
}

TEST_CASE("a pause outlives the coordinator") {
  const TestRun run(Options());
  Process up = Up(run, "up", {"train.steps=2000", "train.checkpoint_every=0"});
  REQUIRE(Eventually([&] { return Count(up.Log(), "\nstep ") >= 2; }, 60000));
  Process pause("stretto", {"status", run.run_dir(), "--pause"}, run.LogOf("pause"));
  REQUIRE(pause.WaitForExit(kTimeoutMs) == 0);
  ::kill(std::stoi(run.MemberField("coordinator", "pid")), SIGKILL);
  REQUIRE(Eventually([&] { return Count(up.Log(), "paused still") == 1; }, 60000));
  // Nobody but the one who asks makes it go on.
  REQUIRE(Eventually(
      [&] {
        Process resume("stretto", {"status", run.run_dir(), "--resume"}, run.LogOf("resume"));
        return resume.WaitForExit(kTimeoutMs) == 0;
      },
      60000));
  const size_t num_steps = Count(up.Log(), "\nstep ");
  CHECK(Eventually([&] { return Count(up.Log(), "\nstep ") > num_steps; }, 60000));
  up.Signal(SIGINT);
  CHECK(up.WaitForExit(kTimeoutMs) == 130);
}

std::string LastHash(const TestRun& run, const std::string& dir) {
  const auto text = Files::Real().ReadAll(run.File(dir) + "/summary.json");
  const auto summary = nlohmann::json::parse(text.value_or(""), nullptr, false);
  return summary.is_object() ? summary["version"].value("hash", "") : "";
}

TEST_CASE("completions grow up to the context, named or the model's own, and end with stop texts") {
  const TestRun run(Options());
  const auto last_hash = [&run](const std::string& name, std::vector<std::string> sets) {
    sets.insert(sets.end(), {"train.steps=3", "rollout.max_tokens=200", "rollout.min_tokens=0",
                             absl::StrCat("run.dir=", run.File(name))});
    Process up = Up(run, name + "-log", sets);
    CHECK(up.WaitForExit(kTimeoutMs) == 0);
    INFO(up.Log());
    CHECK(Count(up.Log(), "step 3/3") == 1);
    CHECK(Count(up.Log(), "length 1.0 ") == 0);
    return LastHash(run, name);
  };
  std::ifstream config(run.model() + "/config.json");
  const auto context = nlohmann::json::parse(config)["max_position_embeddings"].get<int64_t>();
  const std::string automatic = last_hash("auto", {"model.max_sequence_length=auto"});
  CHECK(automatic.size() == 32);
  CHECK(automatic == last_hash("named", {absl::StrCat("model.max_sequence_length=", context)}));
  // A text of which every second completion's first token is one: it counts as a token.
  std::string stops;
  for (char c = 'a'; c <= 'z'; c = static_cast<char>(c + 2)) {
    absl::StrAppend(&stops, stops.empty() ? "" : ",", "\"", std::string(1, c), "\"");
  }
  CHECK(last_hash("stop",
                  {"model.max_sequence_length=auto", absl::StrCat("rollout.stop=[", stops, "]")})
            .size() == 32);
}

TEST_CASE("a run whose folder is removed fails, and says so") {
  const TestRun run(Options());
  Process up = Up(run, "up", {"train.steps=1000"});
  REQUIRE(Eventually([&] { return Count(up.Log(), "\nstep ") >= 2; }, 60000));
  // What is being written there comes and goes meanwhile.
  REQUIRE(Eventually(
      [&] {
        std::error_code error;
        std::filesystem::remove_all(run.run_dir(), error);
        return !error;
      },
      10000));
  CHECK(up.WaitForExit(kTimeoutMs) == 1);
  INFO(up.Log());
  CHECK(up.Log().find("removed or replaced while the run went on") != std::string::npos);
}

TEST_CASE("a damaged checkpoint that was passed over is told of") {
  const TestRun run(Options());
  Process first = Up(run, "first", {"train.steps=4", "train.checkpoint_every=2"});
  REQUIRE(first.WaitForExit(kTimeoutMs) == 0);
  const std::string newest = run.run_dir() + "/checkpoints/step-00000004";
  for (const auto& entry : std::filesystem::directory_iterator(newest)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const int last = file.get();
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
  }
  Process again = Up(run, "again", {"train.steps=6", "train.checkpoint_every=2"});
  CHECK(again.WaitForExit(kTimeoutMs) == 0);
  INFO(again.Log());
  CHECK(again.Log().find("step-00000004 is damaged and was passed over") != std::string::npos);
  CHECK(Summary(run)["steps"] == 6);
}

TEST_CASE(
    "checkpoints that were removed are told of; another model in the old one's place is refused") {
  TestRunOptions options = Options();
  options.algorithm = "algorithm: {kl_coef: 0.1}\n";
  const TestRun run(options);
  Process first = Up(run, "first", {"train.steps=2"});
  REQUIRE(first.WaitForExit(kTimeoutMs) == 0);
  std::filesystem::remove_all(run.run_dir() + "/checkpoints");
  Process again = Up(run, "again", {"train.steps=3"});
  CHECK(again.WaitForExit(kTimeoutMs) == 0);
  INFO(again.Log());
  CHECK(Count(again.Log(), "the checkpoint of version 2 (") == 1);
  CHECK(Summary(run)["steps"] == 3);
  const std::string hash = Summary(run)["checkpoint_hash"];
  std::filesystem::remove_all(run.run_dir() + "/checkpoints");
  Process done = Up(run, "done", {"train.steps=3"});  // no step is left to take, and no result
  CHECK(done.WaitForExit(kTimeoutMs) == 0);
  CHECK(Summary(run)["checkpoint_hash"] == hash);
  CHECK(Files::Real().Exists(run.run_dir() + "/checkpoints/step-00000003"));
  std::filesystem::remove_all(run.model());
  WriteTestModel(run.model(), {.seed = 2});
  Process other = Up(run, "other", {"train.steps=4"});
  CHECK(other.WaitForExit(kTimeoutMs) == 1);
  INFO(other.Log());
  CHECK(other.Log().find("the files at model.path were replaced since") != std::string::npos);
}

TEST_CASE("prompts are looked at before anything starts; long ones are told of, or cut") {
  const TestRun run(Options());
  const std::string place = run.File("train.jsonl");
  std::ofstream(place, std::ios::app)
      << R"({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})"
      << "\n"
      << R"({"prompt": ")" << std::string(100, '7') << R"(", "answer": "2"})"
      << "\n";
  const std::vector<std::string> short_prompts = {"train.steps=2", "data.max_prompt_tokens=60"};
  Process told = Up(run, "told", short_prompts);
  CHECK(told.WaitForExit(kTimeoutMs) == 0);
  INFO(told.Log());
  CHECK(Count(told.Log(), "1 of the 34 prompts of") == 1);
  CHECK(Count(told.Log(), "train.jsonl:34 has") == 1);
  Process none = Up(run, "none", {"train.steps=2", "data.max_prompt_tokens=1"});
  CHECK(none.WaitForExit(kTimeoutMs) == 2);
  CHECK(Count(none.Log(), "34 of the 34 prompts of") == 1);
  Process cut = Up(run, "cut",
                   {"train.steps=2", "data.max_prompt_tokens=1", "run.name=cut",
                    absl::StrCat("run.dir=", run.File("cut")), "data.on_long_prompt=cut"});
  CHECK(cut.WaitForExit(kTimeoutMs) == 0);
  INFO(cut.Log());
  CHECK(Count(cut.Log(), "step 2/2") == 1);
  std::ofstream(place, std::ios::app) << R"({"prompt": "", "answer": "2"})"
                                      << "\n";
  Process empty = Up(run, "empty", short_prompts);
  CHECK(empty.WaitForExit(kTimeoutMs) == 2);
  CHECK(Count(empty.Log(), "train.jsonl:35: `prompt` is empty") == 1);
}

TEST_CASE("data that changed while a run was down is refused") {
  const TestRun run(Options());
  Process first = Up(run, "first", {"train.steps=2"});
  REQUIRE(first.WaitForExit(kTimeoutMs) == 0);
  const std::string path = run.File("train.jsonl"), before = Files::Real().ReadAll(path).value();
  std::ofstream(path) << before.substr(0, before.find('\n') + 1);
  Process shorter = Up(run, "shorter", {"train.steps=4"});
  CHECK(shorter.WaitForExit(kTimeoutMs) != 0);
  INFO(shorter.Log());
  CHECK(Count(shorter.Log(), "was `content of data.train: 32 lines") == 1);
  CHECK(Count(shorter.Log(), "starting it again") == 0);
  std::ofstream(path) << before;
  Process same = Up(run, "same", {"train.steps=4"});
  CHECK(same.WaitForExit(kTimeoutMs) == 0);
}

TEST_CASE("a reward model that preferences have trained judges a run") {
  TestRunOptions options;
  options.rewards = "rewards: [{type: model, path: judge, name: judge}]\n";
  const TestRun run(options);  // the judge's folder names the chat format that it was trained with
  std::ofstream pairs(run.File("pairs.jsonl"));
  for (int i = 0; i < 16; ++i) {
    pairs << R"({"prompt": ")" << i << R"(+1=", "chosen": "abc", "rejected": ")" << i << R"(7"})"
          << "\n";
  }
  pairs.close();
  const auto train = [&run](const std::string& model, const std::string& out,
                            const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"reward-model",
                                          "--model",
                                          run.File(model),
                                          "--data",
                                          run.File("pairs.jsonl"),
                                          "--out",
                                          run.File(out),
                                          "--steps",
                                          "30",
                                          "--batch",
                                          "8",
                                          "--lr",
                                          "3e-3",
                                          "--warmup",
                                          "2",
                                          "--chat-format",
                                          "none",
                                          "--max-sequence-length",
                                          "64"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Process("stretto", std::move(arguments), run.LogOf(out));
  };
  Process adapter = train("model", "adapter", {"--lora-rank", "2"});
  CHECK(adapter.WaitForExit(kTimeoutMs) == 2);
  CHECK(Count(adapter.Log(), "--lora-rank") == 1);  // it is trained whole
  Process trained = train("model", "judge", {});
  CHECK(trained.WaitForExit(kTimeoutMs) == 0);
  INFO(trained.Log());
  CHECK(Count(trained.Log(), "step 1/30  loss 0.6931") == 1);  // log 2: a head of zeros
  CHECK(Count(trained.Log(), "step 30/30") == 1);
  CHECK(Count(trained.Log(), "accuracy 1.000") >= 1);
  // It is one to begin with, too.
  Process further = train("judge", "judge2", {});
  CHECK(further.WaitForExit(kTimeoutMs) == 0);
  CHECK(Count(further.Log(), "step 1/30  loss 0.6931") == 0);
  Process up = Up(run, "up", {"train.steps=2"});
  CHECK(up.WaitForExit(kTimeoutMs) == 0);
  INFO(up.Log());
  CHECK(Count(up.Log(), "step 2/2") == 1);
  CHECK(Count(up.Log(), "reward 0.000") == 0);
  // A judge that reads less than the run may write is told of before the run.
  std::filesystem::copy(run.File("judge"), run.File("short"));
  std::ifstream original(run.File("judge/config.json"));
  nlohmann::json config = nlohmann::json::parse(original);
  config["max_position_embeddings"] = 20;
  std::ofstream(run.File("short/config.json")) << config.dump();
  Process reads_less =
      Up(run, "less",
         {"train.steps=1", "rollout.max_tokens=4", absl::StrCat("run.dir=", run.File("less")),
          absl::StrCat("rewards[0].path=", run.File("short"))});
  CHECK(reads_less.WaitForExit(kTimeoutMs) == 0);
  INFO(reads_less.Log());
  CHECK(Count(reads_less.Log(), "reads 19 tokens of prompt and completion at most") == 1);
  // One whose chat format its tokenizer can't write ends nothing half way: the run doesn't begin.
  Process marks = Up(
      run, "marks", {absl::StrCat("run.dir=", run.File("marks")), "rewards[0].chat_format=chatml"});
  CHECK(marks.WaitForExit(kTimeoutMs) == 2);
  INFO(marks.Log());
  CHECK(Count(marks.Log(), "needs the token <|im_start|>") == 1);
  CHECK_FALSE(Files::Real().Exists(run.File("marks")));
  Process writes =
      Up(run, "writes", {"train.steps=2", absl::StrCat("rewards[0].path=", run.model())});
  CHECK(writes.WaitForExit(kTimeoutMs) == 2);
  CHECK(Count(writes.Log(), "expected a reward model") == 1);
}
}  // namespace
}  // namespace stretto::testing
