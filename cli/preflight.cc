#include "cli/preflight.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/model_files.h"
#include "engine/prompt/prompt_encoder.h"
#include "services/common/metrics.h"
#include "services/common/model_host.h"
#include "services/coordinator/dataset.h"
#include "services/scorer/judge.h"

namespace stretto::cli {
namespace {
// A service that is being started may take this long.
constexpr int64_t kProbeMs = 5000;

absl::Status CheckData(const RunConfig& run) {
  const services::DatasetOptions options{.skip_bad_lines = run.data.on_bad_line == "skip",
                                         .rewards = run.rewards};
  RETURN_IF_ERROR(services::ReadDataset(run.data.train, options).status());
  if (run.data.eval.empty()) return absl::OkStatus();
  return services::ReadDataset(run.data.eval, options).status();
}

absl::Status CheckModel(const services::ModelHostOptions& options) {
  ASSIGN_OR_RETURN(const auto files, engine::OpenModel(options.path));
  RETURN_IF_ERROR(engine::CheckShapes(files.config, *files.tensors));
  RETURN_IF_ERROR(services::ContextOf(options, files.config).status());
  return engine::PromptEncoder::Open(files, options.prompts).status();
}
}  // namespace

absl::Status CheckRun(const RunConfig& run) {
  RETURN_IF_ERROR(CheckData(run));
  RETURN_IF_ERROR(CheckModel(services::OptionsOfRun(run, /*threads=*/0)));
  if (!run.cluster.draft_model.empty()) {
    services::ModelHostOptions draft;
    draft.path = run.cluster.draft_model;
    draft.prompts.chat_optional = true;
    RETURN_IF_ERROR(CheckModel(draft));
  }
  services::Metrics metrics;
  ASSIGN_OR_RETURN(const auto judge,
                   services::Judge::Create(run.rewards, run.rollout.max_tokens, &metrics));
  return judge->Probe(kProbeMs);
}
}  // namespace stretto::cli
