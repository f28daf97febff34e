// `stretto dpo` and `stretto sft` as their users run them, on the tiny model.
#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
constexpr int64_t kTimeoutMs = 120000;

class Dpo {
 public:
  // Trains to prefer wrong answers.
  Dpo() {
    std::ofstream data(File("pairs.jsonl"));
    for (int a = 1; a <= 8; ++a) {
      data << "{\"prompt\": \"" << a << "+1=\", \"chosen\": \"" << a + 2 << "\", \"rejected\": \""
           << a + 1 << "\"}\n";
    }
  }
  std::string File(const std::string& name) const { return folder_.File(name); }
  // The log of a run that writes `out`.
  std::string Run(const std::string& out, int exit_code, const std::vector<std::string>& more,
                  const std::string& data = "pairs.jsonl") const {
    std::vector<std::string> arguments = {"dpo",
                                          "--model",
                                          absl::StrCat(STRETTO_SOURCE_DIR, "/examples/tiny-model"),
                                          "--data",
                                          File(data),
                                          "--out",
                                          File(out),
                                          "--steps",
                                          "40",
                                          "--batch",
                                          "4",
                                          "--lr",
                                          "3e-4",
                                          "--warmup",
                                          "5",
                                          "--max-sequence-length",
                                          "32",
                                          "--chat-format",
                                          "none"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Process process("stretto", std::move(arguments), File(out + ".log"));
    INFO(process.Log());
    CHECK(process.WaitForExit(kTimeoutMs) == exit_code);
    return process.Log();
  }
  std::string Weights(const std::string& out) const {
    return Files::Real().ReadAll(File(out) + "/model.safetensors").value_or("");
  }

 private:
  TempDir folder_;
};

TEST_CASE("preferences are learned from log 2 on, with bits that know no threads") {
  const Dpo dpo;
  const std::string log = dpo.Run("a", 0, {"--threads", "1"});
  INFO(log);
  CHECK(log.find("step 1/40  loss 0.6931") != std::string::npos);  // policy and reference are one
  const size_t last = log.find("step 40/40");
  REQUIRE(last != std::string::npos);
  CHECK(log.find("accuracy 1.000", last) != std::string::npos);
  dpo.Run("b", 0, {"--threads", "3", "--offload-optimizer"});
  CHECK(dpo.Weights("a").size() > 1000);
  CHECK(dpo.Weights("a") == dpo.Weights("b"));
  CHECK(dpo.Weights("a") !=
        Files::Real()
            .ReadAll(absl::StrCat(STRETTO_SOURCE_DIR, "/examples/tiny-model/model.safetensors"))
            .value_or(""));
  // Without a reference only the pair's own log-probs count.
  const std::string free_log = dpo.Run("c", 0, {"--reference-free", "--loss", "ipo"});
  CHECK(free_log.find("step 40/40") != std::string::npos);
  CHECK(free_log.find("step 1/40  loss 0.6931") == std::string::npos);
}

TEST_CASE("preferences are learned by an adapter, which is written beside the merged model") {
  const Dpo dpo;
  const std::string adapter = dpo.File("adapter");
  const std::string log = dpo.Run("a", 0,
                                  {"--lora-rank", "8", "--lora-targets", "q_proj,down_proj",
                                   "--lora-alpha", "512", "--adapter-out", adapter});
  CHECK(log.find("step 1/40  loss 0.6931") != std::string::npos);  // B is zero
  CHECK(log.find("accuracy 1.000", log.find("step 40/40")) != std::string::npos);
  CHECK(Files::Real().Exists(adapter + "/adapter_model.safetensors"));
  // It is something to start from, under its own rank alone.
  dpo.Run("b", 0, {"--lora-adapter", adapter});
  CHECK(
      dpo.Run("c", 2, {"--lora-adapter", adapter, "--lora-rank", "4"}).find("has rank 8, not 4") !=
      std::string::npos);
  CHECK(dpo.Run("d", 2, {"--adapter-out", dpo.File("none")}).find("--lora-rank") !=
        std::string::npos);
}

TEST_CASE("an adapter that is merged at the start gives the bits of the merged model") {
  const Dpo dpo;
  const std::string adapter = dpo.File("tuned.v2");
  dpo.Run("merged", 0, {"--lora-rank", "4", "--adapter-out", adapter});
  const std::string base = absl::StrCat(STRETTO_SOURCE_DIR, "/examples/tiny-model");
  int num_logs = 0;
  const auto generated = [&](const std::vector<std::string>& model, int exit_code = 0) {
    std::vector<std::string> arguments = {"generate", "--raw", "--prompt",     "3+1=", "--json",
                                          "--n",      "4",     "--max-tokens", "16"};
    arguments.insert(arguments.end(), model.begin(), model.end());
    Process process("stretto", std::move(arguments),
                    dpo.File(absl::StrCat("generated", num_logs++)));
    CHECK(process.WaitForExit(kTimeoutMs) == exit_code);
    return process.Log();
  };
  const std::string merged = generated({"--model", dpo.File("merged")});
  CHECK(merged.find("\"logprobs\"") != std::string::npos);
  CHECK(generated({"--model", base, "--adapter", adapter}) == merged);
  CHECK(generated({"--model", base}) != merged);
  CHECK(generated({"--model", base, "--adapter", base}, 1).find("adapter_config.json") !=
        std::string::npos);
  CHECK(generated({"--run", base, "--adapter", adapter}, 2).find("--adapter") != std::string::npos);
}

TEST_CASE("a bad line of preferences is named with its file") {
  const Dpo dpo;
  std::ofstream(dpo.File("bad.jsonl")) << "{\"prompt\": \"1+1=\", \"chosen\": \"2\", "
                                          "\"rejected\": \"3\"}\n{\"prompt\": \"1\"}\n";
  CHECK(dpo.Run("bad", 2, {}, "bad.jsonl").find("bad.jsonl:2: expected `chosen`, a text") !=
        std::string::npos);
  std::ofstream(dpo.File("long.jsonl")) << "{\"prompt\": \"1+1=\", \"chosen\": \"2\", "
                                           "\"rejected\": \""
                                        << std::string(90, '3') << "\"}\n";
  CHECK(dpo.Run("long", 2, {}, "long.jsonl").find("expected at most 32 tokens") !=
        std::string::npos);
  std::ofstream(dpo.File("same.jsonl")) << "{\"prompt\": \"1+1=\", \"chosen\": \"2\", "
                                           "\"rejected\": \"2\"}\n";
  CHECK(dpo.Run("same", 2, {}, "same.jsonl").find("the same text") != std::string::npos);
  CHECK(dpo.Run("none", 2, {"--label-smoothing", "0.7"}).find("below 0.5") != std::string::npos);
}

// Starts fine-tuning of the tiny model that takes long enough to be disturbed.
class Finetuning {
 public:
  explicit Finetuning(std::string command) : command_(std::move(command)) {
    std::filesystem::copy(STRETTO_SOURCE_DIR "/examples/tiny-model", File("model"),
                          std::filesystem::copy_options::recursive);
    std::ofstream data(File("data.jsonl"));
    for (int a = 1; a <= 9; ++a) {
      data << "{\"prompt\": \"" << a << "+1=\", \"chosen\": \"" << a + 2 << "\", \"rejected\": \""
           << a + 1 << "\", \"completion\": \"" << a + 2 << "\"}\n";
    }
  }
  std::string File(const std::string& name) const { return folder_.File(name); }
  Process Start(const std::string& out, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {command_,
                                          "--model",
                                          File("model"),
                                          "--data",
                                          File("data.jsonl"),
                                          "--out",
                                          File(out),
                                          "--steps",
                                          "120",
                                          "--batch",
                                          "4",
                                          "--lr",
                                          "1e-4",
                                          "--chat-format",
                                          "none",
                                          "--max-sequence-length",
                                          "32",
                                          "--checkpoint-every",
                                          "20"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Process("stretto", std::move(arguments), File(out + ".log"));
  }
  std::string Weights(const std::string& out) const {
    return Files::Real().ReadAll(File(out) + "/model.safetensors").value_or("");
  }

 private:
  std::string command_;
  TempDir folder_;
};

TEST_CASE("a line that is too long for its model is named before the first step") {
  const Finetuning tuning("sft");
  std::ofstream(tuning.File("data.jsonl"), std::ios::app)
      << "{\"prompt\": \"1+1=\", \"completion\": \"" << std::string(100, '7') << "\"}\n";
  Process sft = tuning.Start("long");
  CHECK(sft.WaitForExit(kTimeoutMs) == 2);
  INFO(sft.Log());
  CHECK(sft.Log().find("data.jsonl:10: ") != std::string::npos);
  CHECK(sft.Log().find("expected at most 32 tokens") != std::string::npos);
  CHECK(sft.Log().find("step 1/") == std::string::npos);
}

TEST_CASE("fine-tuning that is killed or interrupted goes on to the same bits") {
  for (const char* command : {"sft", "dpo"}) {
    INFO(command);
    const Finetuning tuning(command);
    REQUIRE(tuning.Start("whole").WaitForExit(kTimeoutMs) == 0);
    REQUIRE(tuning.Weights("whole").size() > 1000);
    const auto has = [](const Process& process, const char* text) {
      return process.Log().find(text) != std::string::npos;
    };
    {
      Process first = tuning.Start("torn");
      REQUIRE(Eventually([&] { return has(first, "step 40/120"); }, kTimeoutMs));
      first.Kill();
    }
    {
      Process second = tuning.Start("torn");
      REQUIRE(Eventually([&] { return has(second, "step 80/120"); }, kTimeoutMs));
      second.Signal(SIGINT);
      CHECK(second.WaitForExit(kTimeoutMs) == 130);
      INFO(second.Log());
      CHECK(has(second, "Resuming after step "));
      CHECK(has(second, "interrupted; saved after step "));
      CHECK_FALSE(Files::Real().Exists(tuning.File("torn")));
    }
    Process other = tuning.Start("torn", {"--seed", "7"});
    CHECK(other.WaitForExit(kTimeoutMs) == 1);
    CHECK(has(other, "--seed was 1, is 7"));
    std::filesystem::rename(tuning.File("model"), tuning.File("model.old"));
    WriteTestModel(tuning.File("model"));
    Process replaced = tuning.Start("torn");
    CHECK(replaced.WaitForExit(kTimeoutMs) == 1);
    CHECK(has(replaced, "--model has other content"));
    std::filesystem::remove_all(tuning.File("model"));
    std::filesystem::rename(tuning.File("model.old"), tuning.File("model"));
    CHECK(tuning.Start("torn").WaitForExit(kTimeoutMs) == 0);
    CHECK(tuning.Weights("torn") == tuning.Weights("whole"));
    CHECK_FALSE(Files::Real().Exists(tuning.File("torn.checkpoints")));
  }
}

TEST_CASE("training that leaves the numbers writes no model") {
  const Dpo dpo;
  const std::string log = dpo.Run("out", 1, {"--beta", "1e300"});
  CHECK(log.find("step 1: ") != std::string::npos);
  CHECK(log.find("nothing was written") != std::string::npos);
  CHECK_FALSE(Files::Real().Exists(dpo.File("out")));
}

TEST_CASE("a model and questions are enough for `stretto eval`, and bad questions are named") {
  const TempDir folder;
  const std::string model = absl::StrCat(STRETTO_SOURCE_DIR, "/examples/tiny-model");
  int num_logs = 0;
  const auto eval = [&](const std::string& data, int exit_code,
                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {
        "eval", "--model", model, "--data", data, "--chat-format", "none", "--max-tokens", "8"};
    arguments.insert(arguments.end(), {"--max-prompts", "8"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    Process process("stretto", std::move(arguments), folder.File(absl::StrCat("log", num_logs++)));
    CHECK(process.WaitForExit(kTimeoutMs) == exit_code);
    return process.Log();
  };
  const std::string log =
      eval(absl::StrCat(STRETTO_SOURCE_DIR, "/examples/arithmetic/tiny-eval.jsonl"), 0);
  INFO(log);
  CHECK(log.find("judged as `integer`") != std::string::npos);
  CHECK(log.find(" of 8 correct") != std::string::npos);
  // The model of the flag takes the place of the run file's, which needn't be there.
  const std::string questions =
      absl::StrCat(STRETTO_SOURCE_DIR, "/examples/arithmetic/tiny-eval.jsonl");
  std::ofstream(folder.File("run.yaml"))
      << "model: {path: nowhere}\ndata: {train: " << questions << "}\nrewards: [{type: integer}]\n";
  CHECK(eval(questions, 0, {folder.File("run.yaml")}).find(" of 8 correct") != std::string::npos);
  std::ofstream(folder.File("bad.jsonl")) << "{\"prompt\": \"1+1=\", \"answer\": 2}\n\n"
                                             "{\"prompt\": \"1+2=\", \"answer\": null}\n";
  CHECK(eval(folder.File("bad.jsonl"), 2)
            .find("bad.jsonl:3: the dataset line's field 'answer' is "
                  "null") != std::string::npos);
  // One slip among numbers doesn't change how all are judged: who knows says what is meant.
  std::ofstream(folder.File("mixed.jsonl")) << "{\"prompt\": \"1+1=\", \"answer\": 2}\n"
                                               "{\"prompt\": \"1+2=\", \"answer\": \"3 \"}\n"
                                               "{\"prompt\": \"1+3=\", \"answer\": \"4\"}\n"
                                               "{\"prompt\": \"1+4=\", \"answer\": \"five\"}\n";
  const auto mixed = [&](int exit_code, const std::vector<std::string>& more) {
    return eval(folder.File("mixed.jsonl"), exit_code, more);
  };
  const auto has = [](const std::string& text, const std::string& part) {
    INFO(text);
    return text.find(part) != std::string::npos;
  };
  CHECK(has(mixed(2, {}), "mixed.jsonl:4: the answer is a text, but 3 of 4 answers are numbers"));
  CHECK(has(mixed(0, {"--reward", "contains"}), " of 4 correct"));
  CHECK(has(mixed(0, {"--reward", "exact"}), ", judged as `exact`"));
  CHECK(has(mixed(0, {"--reward", "exact", "--json"}), R"(,"expected":"five",)"));
  CHECK(has(mixed(0, {"--reward", "regex", "--pattern", ""}), "4 of 4 correct (100.0 %)"));
  CHECK(has(mixed(2, {"--reward", "regex"}), "needs --pattern"));
  CHECK(has(mixed(2, {"--reward", "exact", "--take", "first"}), "--take is for"));
  CHECK(has(mixed(2, {"--reward", "integer"}), "mixed.jsonl:4: "));
}

// The exit code and what was said of a command; with /dev/full as its log nothing can be said.
struct Said {
  int exit_code;
  std::string log;
};
Said Say(const std::vector<std::string>& arguments, const std::string& log_file) {
  Process process("stretto", arguments, log_file);
  const int exit_code = process.WaitForExit(kTimeoutMs);
  return {exit_code, log_file == "/dev/full" ? "" : process.Log()};
}

TEST_CASE("results that can't be written are an error of every command") {
  const TempDir dir;
  const std::string examples = absl::StrCat(STRETTO_SOURCE_DIR, "/examples/");
  std::ofstream(dir.File("run.yaml")) << "model: {path: m}\n";
  CHECK(Say({"status", dir.path()}, dir.File("0")).exit_code == 1);  // nobody's run
  std::ofstream(dir.File("summary.json")) << "{\"run_id\": \"r\"}";
  std::ofstream(dir.File("metrics.jsonl")) << "{\"step\":1,\"reward_mean\":0.5}\n";
  int number = 1;
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {"--help"},
           {"--version"},
           {"generate", "--help"},
           {"status", dir.path()},
           {"report", dir.path()},
           {"eval", "--model", examples + "tiny-model", "--raw", "--max-prompts", "2",
            "--max-tokens", "2", "--data", examples + "arithmetic/tiny-eval.jsonl"}}) {
    INFO(command[0]);
    CHECK(Say(command, dir.File(absl::StrCat(number++))).exit_code == 0);
    CHECK(Say(command, "/dev/full").exit_code == 1);
  }
}

TEST_CASE("words that no command knows are named as they were typed, with the nearest one") {
  const TempDir dir;
  int number = 0;
  const auto fault = [&](const std::vector<std::string>& arguments) {
    const Said said = Say(arguments, dir.File(absl::StrCat(number++)));
    CHECK(said.exit_code == 2);
    return said.log;
  };
  CHECK(fault({"generat"}).find("no command 'generat' (did you mean generate?)") !=
        std::string::npos);
  CHECK(
      fault({"generate", "--modle", "X"}).find("not expected: --modle X (did you mean --model?)") !=
      std::string::npos);
  CHECK(fault({"--modle", "X"}).find("not expected: --modle X") != std::string::npos);
  CHECK(fault({"eval", "--zzzzzz"}).find("not expected: --zzzzzz\n") != std::string::npos);
  CHECK(fault({}).find("A subcommand is required") != std::string::npos);
}

TEST_CASE("answers that the context cuts off are told of") {
  const TempDir dir;
  const std::string examples = absl::StrCat(STRETTO_SOURCE_DIR, "/examples/");
  std::ofstream(dir.File("one.jsonl")) << "{\"prompt\": \"25+58=\", \"answer\": 83}\n";
  const Said said = Say({"eval", "--model", examples + "tiny-model", "--raw", "--data",
                         dir.File("one.jsonl"), "--max-sequence-length", "7"},
                        dir.File("log"));
  INFO(said.log);
  CHECK(said.exit_code == 0);
  CHECK(said.log.find("a context of 7 tokens (the model allows 256: --max-sequence-length): 1 of "
                      "1 answers end there, before 256 tokens") != std::string::npos);
}

TEST_CASE("flags that would be passed over, or are wrong, are named") {
  const TempDir dir;
  const std::string examples = absl::StrCat(STRETTO_SOURCE_DIR, "/examples/");
  const std::vector<std::string> generate = {"generate", "--model", examples + "tiny-model",
                                             "--prompt", "1+1="};
  const std::vector<std::string> eval = {"eval", "--model", examples + "tiny-model", "--data",
                                         examples + "arithmetic/tiny-eval.jsonl"};
  struct Case {
    std::vector<std::string> command, flags;
    std::string expected;
  };
  const std::vector<Case> cases = {
      {generate, {"--raw", "--system", "x"}, "--raw excludes --system"},
      {generate, {"--raw", "--chat-format", "zz"}, "--raw excludes --chat-format"},
      {eval, {"--raw", "--system", "x"}, "--raw excludes --system"},
      {eval, {"--reward", "regex", "--pattern", "("}, "--pattern: "},
      {generate, {"--draft-model", "x"}, "--draft-model: a draft model is for --speculation model"},
      {generate, {"--speculation", "model"}, "--speculation model: needs --draft-model"},
      {generate, {"--draft-tokens", "4"}, "--draft-tokens: is for --speculation"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    std::vector<std::string> arguments = cases[i].command;
    arguments.insert(arguments.end(), cases[i].flags.begin(), cases[i].flags.end());
    const Said said = Say(arguments, dir.File(absl::StrCat(i)));
    INFO(said.log);
    CHECK(said.exit_code == 2);
    CHECK(said.log.find(cases[i].expected) != std::string::npos);
  }
}
}  // namespace
}  // namespace stretto::testing
