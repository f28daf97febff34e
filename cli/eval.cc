// `stretto eval`: greedy accuracy of a model, or of a run's newest checkpoint, on held-out
// questions, in this process and judged by the run file's rewards.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/local_model.h"
#include "config/run_config.h"
#include "services/common/metrics.h"
#include "services/scorer/judge.h"

namespace stretto::cli {
namespace {
struct EvalFlags {
  std::string run_file, run_dir, model, data;
  std::vector<std::string> overrides;
  int64_t max_prompts = 0;
  int threads = 0;
  bool json = false;
};

absl::StatusOr<std::vector<std::string>> ReadLines(const std::string& path, int64_t max_lines) {
  ASSIGN_OR_RETURN(const std::string content, Files::Real().ReadAll(path));
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const absl::string_view line =
        absl::StripAsciiWhitespace(absl::string_view(content).substr(begin, end - begin));
    if (!line.empty()) lines.emplace_back(line);
    begin = end + 1;
    if (max_lines > 0 && static_cast<int64_t>(lines.size()) == max_lines) break;
  }
  if (lines.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no questions"));
  return lines;
}

// The reward that decides whether an answer counts as correct.
absl::StatusOr<std::string> DecisiveReward(const RunConfig& run) {
  if (run.rewards.empty()) {
    return absl::InvalidArgumentError("the run file has no rewards: nothing can judge answers");
  }
  if (!run.eval.reward.empty()) return run.eval.reward;
  return run.rewards[0].name.empty() ? run.rewards[0].type : run.rewards[0].name;
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

absl::Status Eval(const EvalFlags& flags) {
  const std::string file = flags.run_file.empty() ? RunFileOf(flags.run_dir) : flags.run_file;
  ASSIGN_OR_RETURN(const RunConfig run, LoadRunConfig(file, flags.overrides));
  LocalModelOptions options;
  options.host = services::OptionsOfRun(run, flags.threads);
  if (!flags.model.empty()) {
    options.host.path = flags.model;
  } else if (!flags.run_dir.empty()) {
    ASSIGN_OR_RETURN(options.checkpoint, NewestCheckpoint(flags.run_dir));
  }
  const std::string data = flags.data.empty() ? run.data.eval : flags.data;
  if (data.empty()) return absl::InvalidArgumentError("no questions: give --data or set data.eval");
  ASSIGN_OR_RETURN(const auto lines, ReadLines(data, flags.max_prompts));
  ASSIGN_OR_RETURN(const std::string decisive, DecisiveReward(run));
  engine::SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_tokens =
      static_cast<int32_t>(run.eval.max_tokens > 0 ? run.eval.max_tokens : run.rollout.max_tokens);
  services::Metrics metrics;
  ASSIGN_OR_RETURN(auto judge,
                   services::Judge::Create(run.rewards, run.rollout.max_tokens, &metrics));
  const double start = Clock::Real().NowSeconds();
  ASSIGN_OR_RETURN(const auto model, LocalModel::Open(options));
  std::vector<std::vector<int32_t>> ids;
  for (size_t i = 0; i < lines.size(); ++i) {
    auto encoded = model->prompts().EncodeLine(lines[i]);
    if (!encoded.ok()) return Annotate(encoded.status(), absl::StrCat(data, ":", i + 1));
    ids.push_back(*std::move(encoded));
  }
  const auto completions = model->Complete(ids, sampling, /*seed=*/0);
  int64_t num_correct = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string where = absl::StrCat(data, ":", i + 1);
    RETURN_IF_ERROR(Annotate(completions[i].status, where));
    auto outcome = JudgeAnswer(*judge, decisive, lines[i], *model, completions[i]);
    if (!outcome.ok()) return Annotate(outcome.status(), where);
    num_correct += outcome->correct ? 1 : 0;
    if (flags.json) {
      const nlohmann::json row{
          {"index", i}, {"text", outcome->text}, {"correct", outcome->correct}};
      std::printf("%s\n",
                  row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    }
  }
  std::fprintf(flags.json ? stderr : stdout, "%lld of %zu correct (%.1f %%) in %.1f s\n",
               static_cast<long long>(num_correct), lines.size(),
               100.0 * static_cast<double>(num_correct) / static_cast<double>(lines.size()),
               Clock::Real().NowSeconds() - start);
  return absl::OkStatus();
}
}  // namespace

void AddEvalCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command =
      app.add_subcommand("eval", "Greedy accuracy of a model or a run on held-out questions.");
  auto* from = command->add_option_group("from", "Whose settings and weights");
  from->add_option("run_file", flags->run_file, "A run file: its model as it was before training");
  from->add_option("--run", flags->run_dir, "A run's folder: its newest checkpoint");
  from->require_option(1);
  command->add_option("--model", flags->model, "Another model: Hugging Face folder or GGUF file");
  command->add_option("--data", flags->data, "Questions (JSONL); default: the run's data.eval");
  command->add_option("--max-prompts", flags->max_prompts, "0: all")->check(CLI::NonNegativeNumber);
  command->add_option("--set", flags->overrides, "section.key=value")->take_all();
  command->add_option("--threads", flags->threads, "0: what the machine grants");
  command->add_flag("--json", flags->json, "One JSON object an answer");
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Eval(*flags)); }; });
}
}  // namespace stretto::cli
