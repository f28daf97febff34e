#include "cli/local_model.h"

#include <algorithm>
#include <utility>

#include "base/files.h"
#include "base/status.h"
#include "engine/formats/safetensors.h"
#include "engine/text/stream_decoder.h"
#include "engine/training/checkpoint.h"
#include "engine/training/checkpoint_adapter.h"

namespace stretto::cli {
namespace {
using engine::Event;

class StreamingText final : public engine::TextDecoder {
 public:
  explicit StreamingText(const engine::Tokenizer& tokenizer) : decoder_(tokenizer) {}
  std::string Push(int32_t token) override { return decoder_.Push(token); }
  std::string Finish() override { return decoder_.Finish(); }

 private:
  engine::StreamDecoder decoder_;
};

// The model's own weights, or those of a checkpoint.
absl::StatusOr<std::shared_ptr<const engine::ModelWeights>> LoadWeights(
    const services::ModelHost& host, const std::string& checkpoint,
    std::shared_ptr<const engine::TensorSource>& source) {
  source = host.files.tensors;
  if (!checkpoint.empty()) {
    ASSIGN_OR_RETURN(source, OpenPolicy(checkpoint, *host.device, host.files));
  }
  const auto stream = host.device->CreateStream();
  auto weights = engine::ModelWeights::Load(
      *host.device, *stream, host.files.config, host.dtype, *source,
      {.format = host.weight_format, .k_leaves = host.transformer->options().k_leaves});
  if (!weights.ok()) return Annotate(weights.status(), source->path());
  return std::shared_ptr<const engine::ModelWeights>(*std::move(weights));
}
}  // namespace

absl::StatusOr<std::shared_ptr<const engine::TensorSource>> OpenPolicy(
    const std::string& checkpoint, engine::Device& device, const engine::ModelFiles& base) {
  auto policy = engine::OpenPolicy(Files::Real(), checkpoint, device, base.config, base.tensors);
  if (absl::IsDataLoss(policy.status())) {
    return Annotate(policy.status(),
                    "this checkpoint is damaged (--checkpoint takes an older one)");
  }
  return policy;
}

absl::StatusOr<std::string> NewestCheckpoint(const std::string& run_dir) {
  return engine::LatestCheckpoint(Files::Real(), JoinPath(run_dir, "checkpoints"));
}

std::string RunFileOf(const std::string& run_dir) { return JoinPath(run_dir, "run.yaml"); }

absl::StatusOr<LocalModelOptions> OptionsOfRunDir(const std::string& run_dir) {
  LocalModelOptions options;
  ASSIGN_OR_RETURN(const RunConfig run, LoadRunConfig(RunFileOf(run_dir)));
  ASSIGN_OR_RETURN(options.checkpoint, NewestCheckpoint(run_dir));
  options.host = services::OptionsOfRun(run, /*threads=*/0);
  return options;
}

absl::StatusOr<std::unique_ptr<LocalModel>> LocalModel::Open(const LocalModelOptions& options) {
  auto model = std::make_unique<LocalModel>();
  const auto load = [&](services::ModelHost& host) -> absl::Status {
    ASSIGN_OR_RETURN(host.loaded, LoadWeights(host, options.checkpoint, model->source_));
    return absl::OkStatus();
  };
  services::ModelHostOptions host = options.host;
  host.prompts.raw_without_template = true;
  ASSIGN_OR_RETURN(model->host_, services::OpenModelHost(host, load));
  // Merged ones take memory.
  if (!host.adapter.empty()) model->host_->files.tensors = model->source_ = nullptr;
  RETURN_IF_ERROR(model->OpenEngine(options));
  return model;
}

absl::Status LocalModel::OpenEngine(const LocalModelOptions& options) {
  engine::EngineOptions engine_options;
  engine_options.kv_cache_bytes = options.kv_cache_mb << 20;
  engine_options.max_running = options.max_running;
  engine_options.eos_ids = host_->prompts->stop_ids();
  engine_options.text_decoder = [tokenizer =
                                     &host_->prompts->tokenizer()](const engine::SamplingParams&) {
    return std::make_unique<StreamingText>(*tokenizer);
  };
  ASSIGN_OR_RETURN(speculation_,
                   services::OpenSpeculation(*host_, options.speculation, options.draft_model,
                                             options.draft_tokens));
  engine_options.speculation = speculation_.options;
  ASSIGN_OR_RETURN(engine_, engine::InferenceEngine::Create(
                                *host_->transformer, {.weights = host_->loaded, .hash = "local"},
                                engine_options));
  return absl::OkStatus();
}

std::string LocalModel::Limit() const {
  if (cache_is_short()) {
    return absl::StrCat("the KV cache has room for ", context(), " tokens (--kv-cache-mb)");
  }
  const bool model_allows_more = context() < max_positions();
  return absl::StrCat("a context of ", context(), " tokens",
                      model_allows_more ? absl::StrCat(" (the model allows ", max_positions(),
                                                       ": --max-sequence-length)")
                                        : "");
}

int64_t NumWithoutRoom(const std::vector<LocalCompletion>& completions,
                       const engine::SamplingParams& sampling) {
  return std::count_if(
      completions.begin(), completions.end(), [&](const LocalCompletion& completion) {
        return completion.status.ok() && completion.reason == engine::FinishReason::kLength &&
               static_cast<int64_t>(completion.ids.size()) < sampling.max_tokens;
      });
}

absl::StatusOr<std::shared_ptr<const engine::Constraint>> LocalModel::Compile(
    const engine::ConstraintSpec& spec) const {
  return engine::Constraint::Compile(
      spec, engine::TokenTrie::Of(host_->prompts->tokenizer(), host_->prompts->stop_ids()));
}

absl::Status LocalModel::SubmitPrompt(size_t prompt, const std::vector<int32_t>& ids,
                                      const CompleteOptions& options) {
  const auto num_samples = static_cast<size_t>(options.num_samples);
  engine::SamplingParams sampling = options.sampling;
  // Here a completion ends where the context does.
  const int64_t left = std::max<int64_t>(context() - static_cast<int64_t>(ids.size()), 0);
  sampling.max_tokens = static_cast<int32_t>(std::min<int64_t>(sampling.max_tokens, left));
  if (sampling.max_tokens > 0)
    sampling.min_tokens = std::min(sampling.min_tokens, sampling.max_tokens);
  std::vector<engine::Request> samples(num_samples);
  for (size_t s = 0; s < num_samples; ++s) {
    samples[s].id = prompt * num_samples + s;
    samples[s].prompt_ids = ids;
    samples[s].sampling = sampling;
    samples[s].draw = {
        .run_seed = options.seed, .prompt_id = prompt, .sample_index = static_cast<uint32_t>(s)};
    samples[s].want_text = true;
  }
  return num_samples == 1 ? engine_->Submit(std::move(samples[0]))
                          : engine_->SubmitGroup(std::move(samples));
}

// What isn't finite comes from the weights, if they have such values.
absl::Status LocalModel::Explain(const absl::Status& status) {
  if (!absl::IsInternal(status) || source_ == nullptr) return status;
  if (!scanned_.has_value()) {
    scanned_ = engine::ScanForNonFinite(host_->files.config, *source_);
  }
  return scanned_->ok() ? status : *scanned_;
}

std::vector<LocalCompletion> LocalModel::Complete(const std::vector<std::vector<int32_t>>& prompts,
                                                  const CompleteOptions& options) {
  const auto num_samples = static_cast<size_t>(options.num_samples);
  std::vector<LocalCompletion> results(prompts.size() * num_samples);
  size_t next = 0;
  const auto finish = [&](size_t index) {
    if (options.on_finished) options.on_finished(index, results[index]);
  };
  const auto submit = [&] {
    for (; next < prompts.size(); ++next) {
      const absl::Status status = SubmitPrompt(next, prompts[next], options);
      if (absl::IsResourceExhausted(status) && engine_->HasWork()) return;
      if (status.ok()) continue;
      for (size_t s = 0; s < num_samples; ++s) {
        results[next * num_samples + s].status = status;
        finish(next * num_samples + s);
      }
    }
  };
  for (submit(); engine_->HasWork(); submit()) {
    if (options.stop && options.stop()) {
      next = prompts.size();
      for (size_t id = 0; id < results.size(); ++id) (void)engine_->Cancel(id);
    }
    for (const Event& event : engine_->Step()) {
      LocalCompletion& result = results[event.request_id];
      result.text += event.text;
      if (options.on_text && !event.text.empty()) options.on_text(event.request_id, event.text);
      if (event.kind == Event::Kind::kToken) {
        result.ids.push_back(event.token);
        result.logprobs.push_back(event.logprob);
        if (options.sampling.top_logprobs > 0) result.top_logprobs.push_back(event.top_logprobs);
      } else if (event.kind == Event::Kind::kFinished) {
        result.reason = event.reason;
        result.status = Explain(event.status);
        finish(event.request_id);
      }
    }
  }
  return results;
}
}  // namespace stretto::cli
