#include "config/run_config.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/files.h"
#include "base/testing.h"
#include "config/keys.h"

namespace stretto {
namespace {
using testing::TempDir;

// A folder with the files that a run file names.
class Fixture {
 public:
  Fixture() {
    std::filesystem::create_directories(dir_.File("model"));
    Write("train.jsonl", "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n");
    Write("eval.jsonl", "{\"prompt\": \"1+2=\", \"answer\": \"3\"}\n");
  }
  void Write(const std::string& name, const std::string& text) const {
    REQUIRE(Files::Real().WriteAtomically(dir_.File(name), text).ok());
  }
  absl::StatusOr<RunConfig> Parse(const std::string& text,
                                  const std::vector<std::string>& overrides = {}) const {
    return ParseRunConfig(text, dir_.File("run.yaml"), overrides);
  }
  // The message with the folder's name taken out.
  std::string Error(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    const auto parsed = Parse(text, overrides);
    INFO(text);
    REQUIRE_FALSE(parsed.ok());
    return absl::StrReplaceAll(parsed.status().message(), {{dir_.path() + "/", ""}});
  }

 private:
  TempDir dir_;
};

constexpr char kMinimal[] =
    "model:\n"
    "  path: model\n"
    "data:\n"
    "  train: train.jsonl\n"
    "rewards:\n"
    "  - type: integer\n";

TEST_CASE("a minimal run file gets every default") {
  Fixture f;
  const auto c = f.Parse(kMinimal);
  REQUIRE_OK(c);
  CHECK(c->run.name == "run");
  CHECK(c->run.dir == (std::filesystem::current_path() / "runs/run").string());
  CHECK(c->train.lr == 1e-6);
  CHECK(c->train.beta2 == 0.95);
  CHECK(c->rewards.size() == 1);
  CHECK(c->rewards[0].name == "integer");
  CHECK(c->eval.reward == "integer");
  CHECK(c->hash.size() == 16);
}

TEST_CASE("values of every type are read") {
  Fixture f;
  const auto c = f.Parse(absl::StrCat(kMinimal,
                                      "    weight: 0.5\n"
                                      "  - {type: json, required_keys: [a, 'b']}\n"
                                      "run: {name: demo-1, seed: 18446744073709551615}\n"
                                      "train: {lr: 3e-5, steps: 7}\n"
                                      "eval: {before: false, reward: json}\n"
                                      "rollout:\n"
                                      "  stop: [\"\\n\", END]\n"));
  REQUIRE_OK(c);
  CHECK(c->run.seed == ~uint64_t{0});
  CHECK(c->rewards[0].weight == 0.5);
  CHECK(c->rewards[1].required_keys == std::vector<std::string>{"a", "b"});
  CHECK(c->train.lr == 3e-5);
  CHECK(c->train.steps == 7);
  CHECK_FALSE(c->eval.before);
  CHECK(c->rollout.stop == std::vector<std::string>{"\n", "END"});
}

TEST_CASE("errors name file, line, key and what is expected") {
  Fixture f;
  struct Case {
    std::string extra;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"train:\n  lr: fast\n",
       "run.yaml:8: train.lr: expected a number above 0 and at most 1000, found 'fast'"},
      {"train:\n  lr: 0\n",
       "run.yaml:8: train.lr: expected a number above 0 and at most 1000, found '0'"},
      {"train:\n  lr: .nan\n",
       "run.yaml:8: train.lr: expected a number above 0 and at most 1000, found '.nan'"},
      {"train:\n  lr: nan\n",
       "run.yaml:8: train.lr: expected a number above 0 and at most 1000, found 'nan'"},
      {"train:\n  lr: \"1e-5\"\n",
       "run.yaml:8: train.lr: expected a number above 0 and at most 1000, found '1e-5'"},
      {"train:\n  steps: 1.5\n",
       "run.yaml:8: train.steps: expected an integer of at least 0, found '1.5'"},
      {"train:\n  steps: 99999999999999999999\n",
       "run.yaml:8: train.steps: expected an integer of at least 0, found '99999999999999999999'"},
      {"train:\n  steps:\n",
       "run.yaml:8: train.steps: expected an integer of at least 0, found nothing"},
      {"train:\n  checkpoint_every: often\n",
       "run.yaml:8: train.checkpoint_every: expected an integer of at least 0, or auto, found "
       "'often'"},
      {"train:\n  checkpoint_every: -1\n",
       "run.yaml:8: train.checkpoint_every: expected an integer of at least 0, or auto, found "
       "'-1'"},
      {"train:\n  stepz: 3\n", "run.yaml:8: train.stepz: unknown key; did you mean 'steps'?"},
      {"trian:\n  steps: 3\n", "run.yaml:7: trian: unknown section; did you mean 'train'?"},
      {"model:\n  path: model\n", "run.yaml:7: model: expected once, found a second time"},
      {"train:\n  lr: 1\n  lr: 2\n", "run.yaml:9: train.lr: expected once, found a second time"},
      {"train: 5\n", "run.yaml:7: train: expected keys with values, found '5'"},
      {"train:\n  beta1: 1\n",
       "run.yaml:8: train.beta1: expected a number of at least 0 and below 1, found '1'"},
      {"eval:\n  before: yes\n", "run.yaml:8: eval.before: expected true or false, found 'yes'"},
      {"run:\n  seed: -1\n", "run.yaml:8: run.seed: expected an integer of at least 0, found '-1'"},
      {"run:\n  name: a/b\n",
       "run.yaml:8: run.name: expected a name of letters, digits, '.', '_' and '-', found 'a/b'"},
      {"rollout:\n  stop: x\n", "run.yaml:8: rollout.stop: expected a list of texts, found 'x'"},
      {"schedule:\n  numerics: exakt\n",
       "run.yaml:8: schedule.numerics: expected one of exact, fast, found 'exakt'"},
      {"rollout:\n  max_tokens: 1024\n",
       "run.yaml:8: rollout.max_tokens: expected less than model.max_sequence_length (1024), found "
       "1024"},
      {"rollout:\n  weight_dtype: int5\n",
       "run.yaml:8: rollout.weight_dtype: expected one of bf16, int8, int4, fp8, found 'int5'"},
      {"rollout:\n  weight_dtype: int8\n",
       "run.yaml:8: rollout.weight_dtype: expected bf16 while schedule.numerics is exact (its "
       "log-probs would not be the trainer's), found 'int8'"},
      {"rollout:\n  weight_dtype: fp8\nschedule:\n  numerics: fast\n",
       "run.yaml:8: rollout.weight_dtype: expected bf16 while algorithm.importance_cap is 0 "
       "(nothing would correct for the quantised weights), found 'fp8'"},
      {"rollout:\n  kv_dtype: int4\n",
       "run.yaml:8: rollout.kv_dtype: expected one of bf16, int8, fp8, found 'int4'"},
      {"rollout:\n  kv_dtype: int8\n",
       "run.yaml:8: rollout.kv_dtype: expected bf16 while schedule.numerics is exact (its "
       "log-probs would not be the trainer's), found 'int8'"},
      {"rollout:\n  kv_dtype: fp8\nschedule:\n  numerics: fast\n",
       "run.yaml:8: rollout.kv_dtype: expected bf16 while algorithm.importance_cap is 0 "
       "(nothing would correct for the quantised keys and values), found 'fp8'"},
      {"cluster:\n  kv_cache_share: 1.0\n",
       "run.yaml:8: cluster.kv_cache_share: expected a number of at least 0 and below 1, found "
       "'1.0'"},
      {"rollout:\n  group_size: 1\n",
       "run.yaml:8: rollout.group_size: expected at least 2 for algorithm grpo, found 1"},
      {"rollout:\n  group_size: 1\nalgorithm:\n  name: rloo\n",
       "run.yaml:8: rollout.group_size: expected at least 2 for algorithm rloo, found 1"},
      {"algorithm:\n  dual_clip: 1.1\n",
       "run.yaml:8: algorithm.dual_clip: expected 0 or at least 1 + algorithm.clip_high (1.2), "
       "found 1.1"},
      {"algorithm:\n  name: reinforce\n  dual_clip: 3\n",
       "run.yaml:9: algorithm.dual_clip: expected 0 for algorithm reinforce, found 3"},
      {"algorithm:\n  name: rloo\n  ratio_level: sequence\n",
       "run.yaml:9: algorithm.ratio_level: expected token for algorithm rloo, found 'sequence'"},
      {"algorithm:\n  name: rloo\n  loss_denominator: constant\n",
       "run.yaml:9: algorithm.loss_denominator: expected nothing for algorithm rloo, which takes "
       "the mean over sequences, found 'constant'"},
      {"rollout:\n  min_tokens: 300\n",
       "run.yaml:8: rollout.min_tokens: expected at most rollout.max_tokens (256), found 300"},
      {"rollout:\n  first_max_tokens: 300\n",
       "run.yaml:8: rollout.first_max_tokens: expected 0, or between rollout.min_tokens (0) and "
       "rollout.max_tokens (256), found 300"},
      {"algorithm:\n  dynamic_sampling: true\nrollout:\n  group_size: 1\n",
       "run.yaml:8: algorithm.dynamic_sampling: expected false where rollout.group_size is 1 (one "
       "reward is always the same), found true"},
      {"eval:\n  every: 5\n",
       "run.yaml:8: eval.every: expected 0 while data.eval names no file, found 5"},
      {"eval:\n  reward: exact\n",
       "run.yaml:8: eval.reward: expected one of integer, found 'exact'"},
      {"algorithm:\n  kl_target: 6\n",
       "run.yaml:8: algorithm.kl_target: expected 0 while algorithm.kl_coef is 0, found 6"},
      {"cluster:\n  lease_ms: 500\n",
       "run.yaml:8: cluster.lease_ms: expected at least twice cluster.heartbeat_ms (300), found "
       "500"},
      {"cluster:\n  speculation: model\n",
       "run.yaml: cluster.draft_model: expected a path with speculation: model, and only then, "
       "found "
       "nothing"},
      {"cluster:\n  speculation: guess\n",
       "run.yaml:8: cluster.speculation: expected one of off, ngram, model, found 'guess'"},
      {"  - {type: integer}\n",
       "run.yaml: rewards[1].name: expected a name that no other reward has, found 'integer' "
       "again"},
      {"    pattern: x\n",
       "run.yaml:7: rewards[0].pattern: only for rewards of type regex; this one is of type "
       "'integer'"},
      {"  - type: regex\n", "run.yaml: rewards[1].pattern: expected a pattern, found nothing"},
      {"  - type: service\n", "run.yaml: rewards[1].address: expected host:port, found nothing"},
      {"  - {type: service, address: 'http://localhost:5000'}\n",
       "run.yaml:7: rewards[1].address: expected host:port, without a scheme such as http://, "
       "found 'http://localhost:5000'"},
      {"  - {type: service, address: 'localhost:99999'}\n",
       "run.yaml:7: rewards[1].address: expected host:port, without a scheme such as http://, "
       "found 'localhost:99999'"},
      {"  - {type: service, address: localhost}\n",
       "run.yaml:7: rewards[1].address: expected host:port, without a scheme such as http://, "
       "found 'localhost'"},
      {"  - regex\n", "run.yaml:7: rewards[1]. expected keys with values (type: …), found 'regex'"},
      {"  - weight: 1\n",
       "run.yaml: rewards[1].type: expected one of exact, contains, integer, numeric, regex, "
       "length, json, service, model, found nothing"},
      {"  - type: model\n",
       "run.yaml: rewards[1].path: expected the path of a reward model, found nothing"},
      {"    path: x\n",
       "run.yaml:7: rewards[0].path: only for rewards of type model; this one is of type "
       "'integer'"},
  };
  for (const Case& c : cases) CHECK(f.Error(kMinimal + c.extra) == c.message);
}

TEST_CASE("missing parts and files are named") {
  Fixture f;
  CHECK(absl::StrContains(f.Error(""), "run.yaml: expected one YAML document, found 0"));
  CHECK(absl::StrContains(f.Error("- a\n"), "run.yaml:1: expected sections"));
  CHECK(absl::StrContains(f.Error("model: {path: model}\nrewards: [{type: exact}]\n"),
                          "data.train: expected the path of an existing file or folder, found "
                          "nothing"));
  CHECK(
      absl::StrContains(f.Error("model:\n  path: nowhere\ndata: {train: train.jsonl}\n"),
                        "run.yaml:2: model.path: expected the path of an existing file or folder, "
                        "found 'nowhere', which does not exist"));
  CHECK(absl::StrContains(f.Error("model: {path: model}\ndata: {train: train.jsonl}\n"),
                          "rewards: expected at least one reward, found none"));
  CHECK(absl::StrContains(f.Error("model: {path: model}\ndata: {train: train.jsonl}\nrewards: x\n"),
                          "run.yaml:3: rewards: expected a list of rewards"));
  const auto missing = LoadRunConfig("/nonexistent/run.yaml");
  REQUIRE_FALSE(missing.ok());
  CHECK(absl::StrContains(missing.status().message(), "/nonexistent/run.yaml"));
}

TEST_CASE("syntax errors are located") {
  Fixture f;
  CHECK(absl::StrContains(f.Error("model:\n  path: [a\ndata: {\n"), "not valid YAML"));
  CHECK(absl::StrContains(f.Error("model:\n  path: \"a\n"), "run.yaml:"));
  CHECK(absl::StrContains(f.Error("model:\n\tpath: a\n"), "run.yaml:2: not valid YAML"));
}

TEST_CASE("overrides win and are named in errors") {
  Fixture f;
  const auto c = f.Parse(kMinimal, {"train.lr=2e-5", "rewards[0].weight=3", "run.name=x",
                                    "rollout.stop=[a, b]", "data.system_prompt="});
  REQUIRE_OK(c);
  CHECK(c->train.lr == 2e-5);
  CHECK(c->rewards[0].weight == 3);
  CHECK(c->run.name == "x");
  CHECK(c->rollout.stop.size() == 2);
  CHECK(f.Error(kMinimal, {"train.lr=fast"}) ==
        "override 'train.lr=fast': train.lr: expected a number above 0 and at most 1000, found "
        "'fast'");
  CHECK(absl::StrContains(f.Error(kMinimal, {"train.l=1"}), "did you mean 'lr'?"));
  CHECK(absl::StrContains(f.Error(kMinimal, {"lr=1"}), "expected section.key=value"));
  CHECK(absl::StrContains(f.Error(kMinimal, {"tran.lr=1"}), "did you mean 'train'?"));
  CHECK(absl::StrContains(f.Error(kMinimal, {"rewards[2].weight=1"}), "index of one of"));
  CHECK(absl::StrContains(f.Error(kMinimal, {"train.lr=[1"}), "not valid YAML"));
  CHECK(f.Error(kMinimal, {"rollout.max_tokens=4000"}) ==
        "override 'rollout.max_tokens=4000': rollout.max_tokens: expected less than "
        "model.max_sequence_length (1024), found 4000");
}

TEST_CASE("a written run file reads back equal") {
  Fixture f;
  const auto c = f.Parse(absl::StrCat(
      kMinimal, "  - {type: regex, pattern: '^\\d+ \"x\"\\n', weight: 0.1}\n",
      "run: {name: b, seed: 7}\ntrain: {lr: 1.2345678901234567e-5}\n", "data_is: 0\n"));
  REQUIRE_FALSE(c.ok());  // the unknown section above
  const auto good =
      f.Parse(absl::StrCat(kMinimal, "  - {type: regex, pattern: '^\\d+ \"x\"\\n', weight: 0.1}\n",
                           "run: {name: b, seed: 7}\n"
                           "train: {lr: 1.2345678901234567e-5, checkpoint_every: auto}\n",
                           "rollout: {stop: [\"\\n\\t\\u00e9\", \": #x\"]}\n"));
  REQUIRE_OK(good);
  const std::string text = ToYaml(*good);
  INFO(text);
  const auto again = ParseRunConfig(text, "elsewhere.yaml");
  REQUIRE_OK(again);
  CHECK(ToYaml(*again) == text);
  CHECK(again->hash == good->hash);
  CHECK(again->train.lr == good->train.lr);
  CHECK(again->train.checkpoint_every == TrainSection::kAutoInterval);
  CHECK(again->model.max_sequence_length == ModelSection::kAutoLength);
  CHECK(again->rollout.stop == good->rollout.stop);
  CHECK(again->rewards[1].pattern == good->rewards[1].pattern);
}

TEST_CASE("the hash sees what is computed and not where") {
  Fixture f;
  const auto hash = [&](const std::vector<std::string>& overrides) {
    const auto c = f.Parse(kMinimal, overrides);
    REQUIRE_OK(c);
    return c->hash;
  };
  const std::string base = hash({});
  CHECK(hash({"run.dir=/tmp/elsewhere", "cluster.generators=3"}) == base);
  CHECK(hash({"train.lr=1e-5"}) != base);
  CHECK(hash({"run.seed=2"}) != base);
  CHECK(hash({"cluster.backend=reference"}) != base);
  Fixture other;
  const auto moved = other.Parse(kMinimal);
  REQUIRE_OK(moved);
  CHECK(moved->hash == base);
}

TEST_CASE("quantised weights are allowed where the trainer corrects for them") {
  Fixture f;
  CHECK(f.Error("model: {path: model, dtype: f32}\nrewards: [{type: integer}]\n"
                "data: {train: train.jsonl}\nrollout: {weight_dtype: int4}\n")
            .find("rollout.weight_dtype: expected bf16 while model.dtype is f32, found 'int4'") !=
        std::string::npos);
  const auto c =
      f.Parse(absl::StrCat(kMinimal,
                           "rollout: {weight_dtype: int4, kv_dtype: int8}\nschedule: {numerics: "
                           "fast}\n"
                           "algorithm: {importance_cap: 2}\n"));
  REQUIRE_OK(c);
  CHECK(c->rollout.weight_dtype == "int4");
  CHECK(c->rollout.kv_dtype == "int8");
}

TEST_CASE("an adapter's keys fit together") {
  Fixture f;
  const auto c = f.Parse(absl::StrCat(kMinimal, "lora: {rank: 8, targets: [q_proj, v_proj]}\n"));
  REQUIRE_OK(c);
  CHECK(c->lora.enabled());
  CHECK(c->lora.targets == std::vector<std::string>{"q_proj", "v_proj"});
  CHECK_FALSE(f.Parse(kMinimal)->lora.enabled());
  CHECK(absl::StrContains(f.Error(absl::StrCat(kMinimal, "lora: {alpha: 8}\n")),
                          "lora.alpha: expected nothing where lora.rank is 0, found 8"));
  CHECK(absl::StrContains(f.Error(absl::StrCat(kMinimal, "lora: {rank: 8, targets: [q]}\n")),
                          "lora.targets: expected some of"));
  CHECK(f.Parse(absl::StrCat(kMinimal, "lora: {rank: 8}\ntrain: {reduction_leaves: 2}\n",
                             "cluster: {trainers: 2, trainer_layout: fsdp}\n"))
            .ok());
}

TEST_CASE("ppo and its section") {
  Fixture f;
  const auto c =
      f.Parse(absl::StrCat(kMinimal, "algorithm: {name: ppo}\n", "ppo: {epochs: 2, lambda: 0.9}\n",
                           "rollout: {group_size: 1}\n"));
  REQUIRE_OK(c);
  CHECK(c->ppo.epochs == 2);
  CHECK(c->ppo.lambda == 0.9);
  CHECK(c->ppo.mini_batch == 16);
  CHECK(absl::StrContains(f.Error(absl::StrCat(kMinimal, "ppo: {lambda: 2}\n")), "ppo.lambda"));
  CHECK(absl::StrContains(
      f.Error(absl::StrCat(kMinimal, "algorithm: {name: ppo, loss_denominator: constant}\n")),
      "algorithm.loss_denominator: expected token_mean for algorithm ppo"));
}

TEST_CASE("ranks that share a model: their numbers fit together") {
  Fixture f;
  const auto with = [](const char* train, const char* more) {
    return absl::StrCat(kMinimal, "train: {reduction_leaves: 4, ", train, "}\n", more);
  };
  REQUIRE_OK(f.Parse(with("k_leaves: 4", "cluster: {trainers: 4, tensor_parallel: 2}\n")));
  const struct {
    const char *train, *more, *expected;
  } kBad[] = {
      {"k_leaves: 2", "cluster: {trainers: 3, tensor_parallel: 2}\n",
       "cluster.tensor_parallel: expected a divisor of cluster.trainers (3), found 2"},
      {"k_leaves: 3", "cluster: {trainers: 2, tensor_parallel: 2}\n",
       "cluster.tensor_parallel: expected a divisor of train.k_leaves (3)"},
      {"k_leaves: 1", "cluster: {trainers: 2, tensor_parallel: 2}\n",
       "raise that before the run's first step"},
      {"k_leaves: 2", "lora: {rank: 4}\n", "train.k_leaves: expected 1 with lora, found 2"},
      {"k_leaves: 2, optimizer_state: 8bit", "", "expected 1 with train.optimizer_state: 8bit"},
      {"k_leaves: 2, gradient_dtype: bf16", "",
       "train.gradient_dtype: expected f32 with train.k_leaves 2"},
      {"k_leaves: 2", "cluster: {offload_optimizer: true}\n",
       "cluster.offload_optimizer: expected false with train.k_leaves 2"},
      {"k_leaves: 2",
       "rollout: {weight_dtype: int8}\nschedule: {numerics: fast}\nalgorithm: {importance_cap: "
       "2}\n",
       "rollout.weight_dtype: expected bf16 with train.k_leaves 2, found 'int8'"},
      {"micro_batch_tokens: 0", "", "train.micro_batch_tokens: expected an integer of at least 1"},
  };
  for (const auto& bad : kBad) {
    INFO(bad.train << " " << bad.more);
    const std::string error = f.Error(with(bad.train, bad.more));
    INFO(error);
    CHECK(absl::StrContains(error, bad.expected));
  }
}

// docs/run-file.md holds the generated tables between two markers; STRETTO_UPDATE_DOCS=1 rewrites
// them.
TEST_CASE("docs/run-file.md lists the keys as they are") {
  const std::string path = absl::StrCat(STRETTO_SOURCE_DIR, "/docs/run-file.md");
  const auto page = Files::Real().ReadAll(path);
  REQUIRE_OK(page);
  const std::string begin = "<!-- keys -->\n", end = "<!-- end of keys -->";
  const size_t from = page->find(begin), to = page->find(end);
  REQUIRE(from != std::string::npos);
  REQUIRE(to != std::string::npos);
  const std::string head = page->substr(0, from + begin.size()), tail = page->substr(to);
  const std::string wanted = head + config_internal::RunFileReference() + tail;
  if (std::getenv("STRETTO_UPDATE_DOCS") != nullptr) {
    REQUIRE(Files::Real().WriteAtomically(path, wanted).ok());
    return;
  }
  INFO("run this test with STRETTO_UPDATE_DOCS=1 to rewrite the tables");
  CHECK(*page == wanted);
}

TEST_CASE("a name of the literature is told how it is spelt here") {
  const Fixture f;
  const auto error = [&](const std::string& name) {
    return f.Error(absl::StrCat(kMinimal, "algorithm: {name: ", name, "}\n"));
  };
  CHECK(absl::EndsWith(error("gspo"),
                       "found 'gspo' (GSPO is `name: grpo` with `ratio_level: sequence`)"));
  CHECK(absl::StrContains(error("GSPO"), "(GSPO is"));
  CHECK(absl::StrContains(error("dpo"), "`stretto dpo`"));
  CHECK(absl::EndsWith(error("gspoo"), "found 'gspoo'"));
}

TEST_CASE("every shipped run file is valid") {
  int num_found = 0;
  for (const char* folder : {"examples", "tests"}) {
    const std::string path = absl::StrCat(STRETTO_SOURCE_DIR, "/", folder);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.path().extension() != ".yaml") continue;
      ++num_found;
      INFO(entry.path().string());
      // The model may be made or fetched later; any existing folder stands in for it.
      const auto c = LoadRunConfig(entry.path().string(), {absl::StrCat("model.path=", path)});
      REQUIRE_OK(c);
    }
  }
  CHECK(num_found > 0);
}
}  // namespace
}  // namespace stretto
