// `stretto eval`: greedy accuracy of a model, or of a run's newest checkpoint, on held-out
// questions, in this process, judged by the run file's rewards or by the answers in the file.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/flag_checks.h"
#include "base/status.h"
#include "cli/checkpoint_lookup.h"
#include "cli/commands.h"
#include "cli/local_model.h"
#include "config/run_config.h"
#include "services/common/dataset_answer.h"
#include "services/common/json_unique.h"
#include "services/common/metrics.h"
#include "services/scorer/judge.h"
#include "services/scorer/reward_model.h"

namespace stretto::cli {
namespace {
constexpr int64_t kProbeMs = 5000;  // a reward service has so long to answer

struct EvalFlags {
  std::string run_file, run_dir, checkpoint, model, adapter, data;
  std::string reward, take, answer_field, chat_format;  // empty: the run's, or the default
  std::optional<std::string> system, pattern;           // the same where there is none
  std::vector<std::string> overrides;
  int64_t max_prompts = 0, max_tokens = 0, max_sequence_length = 0;
  int threads = 0;
  std::vector<std::string> stop;
  bool json = false, raw = false;
};

struct Question {
  int64_t number = 0;  // of the file's line
  std::string line;
};

std::string PlaceOf(const std::string& path, const Question& question) {
  return absl::StrCat(path, ":", question.number);
}

absl::StatusOr<std::vector<Question>> ReadQuestions(const std::string& path, int64_t max_lines) {
  ASSIGN_OR_RETURN(const std::string content, Files::Real().ReadAll(path));
  std::vector<Question> questions;
  int64_t number = 0;
  for (absl::string_view line : absl::StrSplit(content, '\n')) {
    if (++number == 1) absl::ConsumePrefix(&line, "\xef\xbb\xbf");  // a byte order mark
    line = absl::StripAsciiWhitespace(line);
    if (!line.empty()) questions.push_back({number, std::string(line)});
    if (max_lines > 0 && static_cast<int64_t>(questions.size()) == max_lines) break;
  }
  if (questions.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": holds no questions"));
  }
  return questions;
}

// The run whose settings count; without one, what the flags say.
absl::StatusOr<RunConfig> SettingsOf(const EvalFlags& flags) {
  RunConfig run;
  if (!flags.run_file.empty() || !flags.run_dir.empty()) {
    const std::string file = flags.run_file.empty() ? RunFileOf(flags.run_dir) : flags.run_file;
    // The file's own model needn't be there.
    std::vector<std::string> overrides = flags.overrides;
    if (!flags.model.empty()) {
      overrides.push_back(absl::StrCat("model.path=", nlohmann::json(flags.model).dump()));
    }
    ASSIGN_OR_RETURN(run, LoadRunConfig(file, overrides));
  } else if (!flags.overrides.empty()) {
    return absl::InvalidArgumentError("--set changes a run file's keys: give a run file, or --run");
  } else {
    run.model.max_sequence_length = ModelSection::kAutoLength;
  }
  if (!flags.model.empty()) run.model.path = flags.model;
  if (!flags.data.empty()) run.data.eval = flags.data;
  if (!flags.chat_format.empty()) run.model.chat_format = flags.chat_format;
  if (flags.raw) run.model.chat_format = "none";
  if (flags.max_tokens > 0) run.eval.max_tokens = flags.max_tokens;
  if (flags.max_sequence_length > 0) run.model.max_sequence_length = flags.max_sequence_length;
  if (run.data.eval.empty()) {
    return absl::InvalidArgumentError("no questions: give --data FILE, or set data.eval");
  }
  return run;
}

// The reward that suits the answers, if nobody has named one: of texts `exact`, of numbers
// `integer` or `numeric`. A file with both is one of texts, or has a mistake: who knows says so.
absl::StatusOr<std::string> GuessReward(const std::vector<Question>& questions,
                                        const std::string& path, const std::string& field) {
  bool integers = true;
  const Question *number = nullptr, *text = nullptr;  // the first of each
  size_t num_numbers = 0;
  for (const Question& question : questions) {
    const auto line = services::ParseUniqueJson(question.line);
    RETURN_IF_ERROR(Annotate(line.status(), PlaceOf(path, question)));
    RETURN_IF_ERROR(Annotate(services::AnswerText(*line, field).status(), PlaceOf(path, question)));
    integers = integers && services::AnswerInteger(*line, field).ok();
    const bool is_number = services::AnswerNumber(*line, field).ok();
    num_numbers += is_number ? 1 : 0;
    const Question*& first = is_number ? number : text;
    if (first == nullptr) first = &question;
  }
  if (text == nullptr) return std::string(integers ? "integer" : "numeric");
  if (number == nullptr) return std::string("exact");
  return absl::InvalidArgumentError(absl::StrCat(
      PlaceOf(path, *text), ": the answer is a text, but ", num_numbers, " of ", questions.size(),
      " answers are numbers (the first in line ", number->number,
      "): correct it, or say how all are judged: --reward exact or contains (as texts)"));
}

// What --take and --pattern say, for the types that they are for.
absl::Status AddDetails(const EvalFlags& flags, RewardSpec* spec) {
  const bool is_number = spec->type == "integer" || spec->type == "numeric";
  if (!flags.take.empty() && !is_number) {
    return absl::InvalidArgumentError(
        absl::StrCat("--take is for --reward integer and numeric, not for ", spec->type));
  }
  if ((spec->type == "regex") != flags.pattern.has_value()) {
    return absl::InvalidArgumentError(
        spec->type == "regex"
            ? std::string("--reward regex needs --pattern")
            : absl::StrCat("--pattern is for --reward regex, not for ", spec->type));
  }
  if (!flags.take.empty()) spec->take = flags.take;
  spec->pattern = flags.pattern.value_or("");
  return absl::OkStatus();
}

// Who judges, and which reward counts an answer as correct.
absl::Status ChooseRewards(const EvalFlags& flags, const std::vector<Question>& questions,
                           RunConfig* run) {
  const bool is_guess = flags.reward.empty() && run->rewards.empty();
  if (is_guess || !flags.reward.empty()) {
    RewardSpec spec;
    if (!flags.answer_field.empty()) spec.answer_field = flags.answer_field;
    spec.type = flags.reward;
    if (is_guess) {
      ASSIGN_OR_RETURN(spec.type, GuessReward(questions, run->data.eval, spec.answer_field));
      std::fprintf(stderr, "stretto: answers are judged as `%s` (--reward names another)\n",
                   spec.type.c_str());
    }
    RETURN_IF_ERROR(AddDetails(flags, &spec));
    run->rewards = {spec};
    run->eval.reward = spec.type;
  } else if (!flags.take.empty() || flags.pattern.has_value()) {
    return absl::InvalidArgumentError(
        "--take and --pattern go with --reward; the run's own rewards judge here");
  }
  for (RewardSpec& reward : run->rewards) {
    if (!flags.answer_field.empty()) reward.answer_field = flags.answer_field;
    if (reward.name.empty()) reward.name = reward.type;
  }
  if (run->eval.reward.empty()) run->eval.reward = run->rewards[0].name;
  return absl::OkStatus();
}

// Every question has what the rewards need: said before the model is opened.
absl::Status CheckQuestions(const std::vector<Question>& questions, const RunConfig& run) {
  for (const Question& question : questions) {
    const auto line = services::ParseUniqueJson(question.line);
    absl::Status status = line.status();
    if (status.ok() && !line->is_object()) {
      status = absl::InvalidArgumentError("expected a JSON object");
    }
    if (status.ok()) status = services::CheckAnswers(run.rewards, *line);
    RETURN_IF_ERROR(Annotate(status, PlaceOf(run.data.eval, question)));
  }
  return absl::OkStatus();
}

// The pattern of the flag is no part of a run file, which errors would name.
absl::StatusOr<std::unique_ptr<services::Judge>> MakeJudge(const EvalFlags& flags,
                                                           const RunConfig& run,
                                                           services::Metrics* metrics) {
  auto judge = services::Judge::Create(
      run.rewards, {run.rollout.max_tokens, metrics, services::RewardModelsOf(run, flags.threads)});
  if (judge.ok() || !flags.pattern.has_value()) return judge;
  absl::string_view fault = judge.status().message();
  absl::ConsumePrefix(&fault, "rewards[0] (regex): ");
  return absl::Status(judge.status().code(), absl::StrCat("--pattern: ", fault));
}

struct Outcome {
  bool correct = false;
  std::string text;
};

absl::StatusOr<Outcome> JudgeAnswer(services::Judge& judge, const std::string& decisive,
                                    const std::string& line, const LocalModel& model,
                                    const LocalCompletion& completion) {
  Outcome outcome;
  outcome.text = model.prompts().tokenizer().Decode(completion.ids);
  services::JudgeQuery query;
  query.run_id = "eval";
  query.line_json = line;
  query.completions = {{outcome.text, static_cast<int64_t>(completion.ids.size())}};
  ASSIGN_OR_RETURN(const auto judged, judge.Score(query, [] { return false; }));
  RETURN_IF_ERROR(judged[0].status);
  for (const auto& part : judged[0].parts) {
    if (part.name == decisive) outcome.correct = part.value >= 1.0;
  }
  return outcome;
}

absl::StatusOr<std::vector<std::vector<int32_t>>> Encode(const LocalModel& model,
                                                         const std::vector<Question>& questions,
                                                         const std::string& path) {
  std::vector<std::vector<int32_t>> ids;
  for (const Question& question : questions) {
    auto encoded = model.prompts().EncodeLine(question.line);
    if (!encoded.ok()) return Annotate(encoded.status(), PlaceOf(path, question));
    ids.push_back(*std::move(encoded));
  }
  return ids;
}

// What the reward that judges compares with; nothing where it compares with nothing.
std::optional<std::string> ExpectedAnswer(const RunConfig& run, const std::string& line) {
  for (const RewardSpec& reward : run.rewards) {
    if (reward.name != run.eval.reward) continue;
    const auto json = services::ParseUniqueJson(line);
    if (!json.ok()) return std::nullopt;
    const auto text = services::AnswerText(*json, reward.answer_field);
    return text.ok() ? std::optional(*text) : std::nullopt;
  }
  return std::nullopt;
}

absl::Status Eval(const EvalFlags& flags) {
  ASSIGN_OR_RETURN(RunConfig run, SettingsOf(flags));
  const std::string& data = run.data.eval;
  ASSIGN_OR_RETURN(const auto questions, ReadQuestions(data, flags.max_prompts));
  RETURN_IF_ERROR(ChooseRewards(flags, questions, &run));
  RETURN_IF_ERROR(CheckQuestions(questions, run));
  LocalModelOptions options;
  options.host = services::OptionsOfRun(run, flags.threads);
  options.host.adapter = flags.adapter;
  if (flags.run_file.empty() && flags.run_dir.empty()) {
    options.host.most_by_default = services::ModelHostOptions().most_by_default;
  }
  if (flags.system.has_value()) options.host.prompts.system_prompt = flags.system;
  if (flags.model.empty() && !flags.run_dir.empty()) {
    ASSIGN_OR_RETURN(options.checkpoint, FindCheckpoint(flags.run_dir, flags.checkpoint));
  }
  engine::SamplingParams sampling;
  sampling.temperature = 0;
  sampling.stop_strings = flags.stop;
  sampling.max_tokens =
      static_cast<int32_t>(run.eval.max_tokens > 0 ? run.eval.max_tokens : run.rollout.max_tokens);
  services::Metrics metrics;
  ASSIGN_OR_RETURN(auto judge, MakeJudge(flags, run, &metrics));
  RETURN_IF_ERROR(judge->Probe(kProbeMs));
  const double start = Clock::Real().NowSeconds();
  ASSIGN_OR_RETURN(const auto model, LocalModel::Open(options));
  if (model->prompts().lacks_template()) std::fprintf(stderr, "stretto: %s\n", kRawRemark);
  ASSIGN_OR_RETURN(const auto ids, Encode(*model, questions, data));
  const auto completions = model->Complete(ids, sampling, /*seed=*/0);
  if (const int64_t num_cut = NumWithoutRoom(completions, sampling); num_cut > 0) {
    std::fprintf(stderr, "stretto: %s: %lld of %zu answers end there, before %d tokens\n",
                 model->Limit().c_str(), static_cast<long long>(num_cut), completions.size(),
                 sampling.max_tokens);
  }
  int64_t num_correct = 0;
  for (size_t i = 0; i < questions.size(); ++i) {
    const std::string where = PlaceOf(data, questions[i]);
    RETURN_IF_ERROR(Annotate(completions[i].status, where));
    auto outcome = JudgeAnswer(*judge, run.eval.reward, questions[i].line, *model, completions[i]);
    if (!outcome.ok()) return Annotate(outcome.status(), where);
    num_correct += outcome->correct ? 1 : 0;
    if (flags.json) {
      nlohmann::json row{{"index", i}, {"text", outcome->text}, {"correct", outcome->correct}};
      if (auto expected = ExpectedAnswer(run, questions[i].line)) row["expected"] = *expected;
      std::printf("%s\n",
                  row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    }
  }
  std::fprintf(flags.json ? stderr : stdout,
               "%lld of %zu correct (%.1f %%) in %.1f s, judged as `%s`\n",
               static_cast<long long>(num_correct), questions.size(),
               100.0 * static_cast<double>(num_correct) / static_cast<double>(questions.size()),
               Clock::Real().NowSeconds() - start, run.eval.reward.c_str());
  return absl::OkStatus();
}
}  // namespace

void AddEvalCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = app.add_subcommand(
      "eval",
      "Greedy accuracy of a model or a run on held-out questions. A model and a file of "
      "questions are enough: `stretto eval --model FOLDER --data FILE`.");
  auto* run_file =
      command->add_option("run_file", flags->run_file,
                          "A run file: its settings, and its model as it was before training");
  command
      ->add_option("--run", flags->run_dir, "A run's folder: its settings, its newest checkpoint")
      ->excludes(run_file);
  command
      ->add_option("--checkpoint", flags->checkpoint,
                   "With --run: another than the newest: a step, a name in the run's checkpoints, "
                   "or a path")
      ->needs("--run");
  command->add_option("--model", flags->model,
                      "A (or another) model: Hugging Face folder or GGUF "
                      "file");
  command
      ->add_option("--adapter", flags->adapter,
                   "With --model: a LoRA adapter (PEFT folder), merged into it. Default: none")
      ->needs(command->get_option("--model"));
  command->add_option("--data", flags->data, "Questions (JSONL). Default: the run's data.eval");
  command
      ->add_option("--reward", flags->reward,
                   "Judges the answers, instead of the run's rewards, as a run file's reward of "
                   "this type does: exact, contains, integer, numeric or regex. Default without a "
                   "run: integer or numeric where all answers are numbers, exact where none is; "
                   "where some are it has to be given")
      ->check(CLI::IsMember({"exact", "contains", "integer", "numeric", "regex"}));
  command
      ->add_option("--take", flags->take,
                   "Of integer and numeric: which number of the answer counts: last (default), "
                   "first or only")
      ->check(CLI::IsMember({"last", "first", "only"}));
  command
      ->add_option_function<std::string>(
          "--pattern", [flags](const std::string& text) { flags->pattern = text; },
          "Of regex: the pattern (PCRE2) that a correct answer has")
      ->type_name("TEXT");
  command->add_option("--answer-field", flags->answer_field,
                      "The questions' field with the answer. Default: answer");
  command
      ->add_option("--max-tokens", flags->max_tokens,
                   "An answer's most tokens. Default: the run's, or 256")
      ->check(IntegerIn(1, INT32_MAX));
  command
      ->add_option(
          "--max-sequence-length", flags->max_sequence_length,
          "The context: tokens of question and answer together. Default: the run's, or the "
          "model's own, but at most 4096")
      ->check(IntegerIn(1, 1 << 24));
  command->add_option("--chat-format", flags->chat_format,
                      "How messages become a prompt: auto (the model's own way) or a format's name "
                      "(docs/chat-formats.md). Default: the run's, or auto");
  auto* raw = command->add_flag("--raw", flags->raw,
                                "Prompts as they are, for models that don't chat; the same as "
                                "--chat-format none");
  raw->excludes(command->get_option("--chat-format"));
  command->add_option("--stop", flags->stop,
                      "Text that ends an answer and is left out (may be repeated)");
  command
      ->add_option_function<std::string>(
          "--system", [flags](const std::string& text) { flags->system = text; },
          "System message, in place of the run's or the template's; \"\": one without text")
      ->type_name("TEXT")
      ->excludes(raw);
  command
      ->add_option("--max-prompts", flags->max_prompts,
                   "Only the first so many questions. 0 (default): all")
      ->check(IntegerIn(0, INT64_MAX));
  command
      ->add_option("--set", flags->overrides,
                   "section.key=value, wins over the run file (may be repeated)")
      ->take_all();
  command
      ->add_option("--threads", flags->threads,
                   "Compute threads. 0 (default): what the machine grants")
      ->check(IntegerIn(0, 1024));
  command->add_flag(
      "--json", flags->json,
      "One JSON object an answer: index, text, correct and, where there is one, expected");
  command->callback([flags, chosen] {
    if (flags->run_file.empty() && flags->run_dir.empty() && flags->model.empty()) {
      throw CLI::RequiredError("a run file, --run or --model");
    }
    *chosen = [flags] { return Finish(Eval(*flags)); };
  });
}
}  // namespace stretto::cli
