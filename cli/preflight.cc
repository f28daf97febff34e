#include "cli/preflight.h"

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/prompt/prompt_encoder.h"
#include "services/common/metrics.h"
#include "services/common/model_host.h"
#include "services/coordinator/dataset.h"
#include "services/scorer/judge.h"
#include "services/scorer/reward_model.h"

namespace stretto::cli {
namespace {
// A service that is being started may take this long.
constexpr int64_t kProbeMs = 5000;
// A run begins at once however long its data are: of each file the first prompts are looked at, as
// many as this allows. Others are looked at as their turn comes.
constexpr int64_t kPromptsNs = 200'000'000;

// What is known of a run once its data and its model have been looked at.
struct Known {
  int64_t context = 0;     // tokens
  std::string first_line;  // of the data
};

struct Opened {
  int64_t context = 0;  // tokens
  std::unique_ptr<engine::PromptEncoder> prompts;
};

// All of a model's files but the weights are looked at.
absl::StatusOr<Opened> OpenPrompts(const services::ModelHostOptions& options) {
  Opened opened;
  ASSIGN_OR_RETURN(const auto files, services::OpenFiles(options));
  ASSIGN_OR_RETURN(opened.context, services::ContextOf(options, files.config));
  ASSIGN_OR_RETURN(opened.prompts, engine::PromptEncoder::Open(files, options.prompts));
  return opened;
}

// A prompt that is too long is no error while there are others to take its place.
absl::Status CheckPrompts(const RunConfig& run, const services::Dataset& data,
                          const engine::PromptEncoder& prompts, std::vector<std::string>* notes) {
  const int64_t most = run.MaxPromptTokens(), end_ns = Clock::Real().NowNs() + kPromptsNs;
  size_t num_seen = 0, num_long = 0;
  std::string first;
  for (; num_seen < data.lines.size() && Clock::Real().NowNs() < end_ns; ++num_seen) {
    const auto ids = prompts.EncodeLine(data.lines[num_seen]);
    const std::string place = data.PlaceOf(num_seen);
    if (!ids.ok() && run.data.on_bad_line != "skip") {
      return absl::Status(ids.status().code(),
                          absl::StrCat(place, ": ", ids.status().message(),
                                       " (data.on_bad_line: skip leaves such lines out)"));
    }
    const auto length = ids.ok() ? static_cast<int64_t>(ids->size()) : 0;
    if (length <= most || run.data.on_long_prompt == "cut") continue;
    if (num_long++ == 0) first = absl::StrCat(place, " has ", length);
  }
  if (num_long == 0) return absl::OkStatus();
  const std::string text =
      absl::StrCat(num_long, " of the ", num_seen, num_seen < data.lines.size() ? " first" : "",
                   " prompts of ", data.name, " have more than ", most, " tokens (", first, "): ");
  constexpr char kAdvice[] =
      "data.max_prompt_tokens, model.max_sequence_length and data.on_long_prompt say what is "
      "allowed";
  if (num_long == num_seen) return absl::InvalidArgumentError(absl::StrCat(text, kAdvice));
  notes->push_back(absl::StrCat(text,
                                data.name == run.data.train ? "others take their place; "
                                                            : "they are left out of evaluations; ",
                                kAdvice));
  return absl::OkStatus();
}

// All lines are read, and those of rewards looked at, before the model is opened.
absl::StatusOr<Known> CheckDataAndModel(const RunConfig& run, std::vector<std::string>* notes) {
  const services::DatasetOptions how{.skip_bad_lines = run.data.on_bad_line == "skip",
                                     .rewards = run.rewards};
  std::vector<services::Dataset> data;
  for (const std::string& path : {run.data.train, run.data.eval}) {
    if (path.empty() || (!data.empty() && data.front().name == path)) continue;
    ASSIGN_OR_RETURN(data.emplace_back(), services::ReadDataset(path, how));
  }
  ASSIGN_OR_RETURN(const Opened model, OpenPrompts(services::OptionsOfRun(run, /*threads=*/0)));
  for (const services::Dataset& d : data) {
    RETURN_IF_ERROR(CheckPrompts(run, d, *model.prompts, notes));
  }
  return Known{model.context, data.empty() || data[0].lines.empty() ? "" : data[0].lines[0]};
}

// Of a reward model what can be known without its weights. Its tokenizer may need fewer tokens for
// a text than the policy's: that it reads fewer is no error.
absl::Status CheckRewardModel(const RunConfig& run, const RewardSpec& spec, const Known& known,
                              std::vector<std::string>* notes) {
  ASSIGN_OR_RETURN(const Opened model, OpenPrompts(services::OptionsOfRewardModel(run, spec, 0)));
  const absl::StatusOr<std::vector<int32_t>> ids =
      known.first_line.empty() ? std::vector<int32_t>()
                               : model.prompts->EncodeLine(known.first_line);
  if (!ids.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the reward model ", spec.path, ": ", ids.status().message()));
  }
  if (model.context > known.context) return absl::OkStatus();  // it reads one token more
  notes->push_back(
      absl::StrCat("the reward model ", spec.path, " reads ", model.context - 1,
                   " tokens of prompt and completion at most, and sequences of this run may have ",
                   known.context,
                   ": longer ones can't be judged, and end the run; model.max_sequence_length and "
                   "rollout.max_tokens say what is allowed"));
  return absl::OkStatus();
}
}  // namespace

absl::Status CheckRun(const RunConfig& run, std::vector<std::string>* notes) {
  ASSIGN_OR_RETURN(const Known known, CheckDataAndModel(run, notes));
  if (!run.cluster.draft_model.empty()) {
    services::ModelHostOptions draft;
    draft.path = run.cluster.draft_model;
    draft.prompts.chat_optional = true;
    RETURN_IF_ERROR(OpenPrompts(draft).status());
  }
  const auto open =
      [&](const RewardSpec& spec) -> absl::StatusOr<std::unique_ptr<services::CompletionScorer>> {
    RETURN_IF_ERROR(CheckRewardModel(run, spec, known, notes));
    return nullptr;
  };
  services::Metrics metrics;
  const auto judge = services::Judge::Create(run.rewards, {run.rollout.max_tokens, &metrics, open});
  if (!judge.ok()) return Annotate(judge.status(), run.source_path);
  return (*judge)->Probe(kProbeMs);
}
}  // namespace stretto::cli
