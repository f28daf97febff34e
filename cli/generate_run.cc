#include "cli/generate_run.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/counts.h"
#include "base/files.h"
#include "base/status.h"
#include "cli/checkpoint_lookup.h"
#include "cli/generate_io.h"

namespace stretto::cli {
namespace {
// The model that is meant, with what the flags say about it.
absl::StatusOr<LocalModelOptions> ModelOptions(const GenerateOptions& options) {
  LocalModelOptions model = options.model;
  if (!options.run_dir.empty()) {
    ASSIGN_OR_RETURN(LocalModelOptions run, OptionsOfRunDir(options.run_dir));
    model.checkpoint = run.checkpoint;
    if (!options.checkpoint.empty()) {
      ASSIGN_OR_RETURN(model.checkpoint, FindCheckpoint(options.run_dir, options.checkpoint));
    }
    model.host.path = run.host.path;
    model.host.dtype = run.host.dtype;
    model.host.prompts = run.host.prompts;
    model.host.backend = run.host.backend;
    if (model.host.max_sequence_length == 0) {
      model.host.max_sequence_length = run.host.max_sequence_length;
      model.host.most_by_default = run.host.most_by_default;
    }
  }
  if (!options.dtype.empty()) model.host.dtype = options.dtype;
  if (!options.chat_format.empty()) model.host.prompts.chat_format = options.chat_format;
  if (options.system.has_value()) model.host.prompts.system_prompt = options.system;
  if (options.raw) model.host.prompts.chat_format = "none";
  return model;
}

absl::StatusOr<std::shared_ptr<const engine::Constraint>> MakeConstraint(
    const GenerateOptions& options, const LocalModel& model) {
  using Kind = engine::ConstraintSpec::Kind;
  const bool has_regex = !options.regex.empty(), has_schema = !options.json_schema_file.empty(),
             has_choices = !options.choices.empty();
  if (has_regex + has_schema + has_choices + options.json_object > 1) {
    return absl::InvalidArgumentError(
        "only one of --regex, --json-schema, --json-object and --choice may be given");
  }
  if (has_regex) return model.Compile({Kind::kRegex, options.regex, "--regex"});
  if (has_choices) {
    ASSIGN_OR_RETURN(engine::ConstraintSpec spec, engine::SpecOfTexts(options.choices));
    spec.name = "--choice";
    return model.Compile(spec);
  }
  if (options.json_object) return model.Compile({Kind::kJsonObject, "", "--json-object"});
  if (!has_schema) return nullptr;
  auto schema = Files::Real().ReadAll(options.json_schema_file);
  if (!schema.ok()) return Annotate(schema.status(), "--json-schema");
  auto constraint = model.Compile({Kind::kJsonSchema, *std::move(schema)});
  if (!constraint.ok()) return Annotate(constraint.status(), options.json_schema_file);
  return constraint;
}

absl::StatusOr<std::vector<std::pair<int32_t, float>>> ReadBiases(const GenerateOptions& options) {
  std::map<int32_t, float> biases;
  std::vector<std::pair<int32_t, float>> list;
  for (const std::string& text : options.logit_bias) {
    ASSIGN_OR_RETURN(const auto bias, ParseLogitBias(text));
    if (!biases.insert(bias).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("--logit-bias: ", text, ": token ", bias.first, " has a bias already"));
    }
    list.push_back(bias);
  }
  return list;
}

absl::Status CheckToken(const char* flag, int32_t token, const LocalModel& model) {
  if (token >= 0 && token < model.vocab_size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, ": ", token, ": expected a token id from 0 to ", model.vocab_size() - 1));
}

// What can be told before a model is read.
absl::Status CheckFlags(const GenerateOptions& options) {
  const engine::SamplingParams& sampling = options.sampling;
  if (sampling.top_logprobs > 0 && !options.json) {
    return absl::InvalidArgumentError("--logprobs is written as JSON: give --json as well");
  }
  if (sampling.min_tokens > sampling.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--min-tokens: ", sampling.min_tokens, ": expected at most --max-tokens, which is ",
        sampling.max_tokens, options.max_tokens_given ? "" : " unless it is given"));
  }
  return ReadBiases(options).status();
}

absl::StatusOr<engine::SamplingParams> MakeSampling(const GenerateOptions& options,
                                                    const LocalModel& model) {
  engine::SamplingParams sampling = options.sampling;
  ASSIGN_OR_RETURN(sampling.logit_bias, ReadBiases(options));
  for (const auto& [token, bias] : sampling.logit_bias) {
    RETURN_IF_ERROR(CheckToken("--logit-bias", token, model));
  }
  for (const int32_t token : sampling.stop_ids) {
    RETURN_IF_ERROR(CheckToken("--stop-token-id", token, model));
  }
  ASSIGN_OR_RETURN(sampling.constraint, MakeConstraint(options, model));
  return sampling;
}

// A prompt and completion for which the KV cache is too small will be so however long they wait.
absl::Status CheckCache(const GenerateOptions& options, const LocalModel& model,
                        int64_t num_prompt) {
  const int64_t left = model.context() - num_prompt;
  if (!model.cache_is_short() || !options.max_tokens_given || left <= 0 ||
      options.sampling.max_tokens <= left) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--max-tokens ", options.sampling.max_tokens, " and ",
                   Count(num_prompt, "token"), " of prompt: ", model.Limit(),
                   ": expected --max-tokens of at most ", left, ", or a larger cache"));
}

// What the context does to what was asked for.
void RemarkOnContext(const GenerateOptions& options, const LocalModel& model, int64_t longest,
                     std::FILE* remarks) {
  const int64_t context = model.context(), left = context - longest;
  if (context > model.max_positions()) {
    std::fprintf(remarks,
                 "stretto: --max-sequence-length %lld is more than the %lld that the model was "
                 "made for\n",
                 static_cast<long long>(context), static_cast<long long>(model.max_positions()));
  }
  if (!options.max_tokens_given || left <= 0 || options.sampling.max_tokens <= left) return;
  std::fprintf(remarks,
               "stretto: --max-tokens %d: %s leaves %lld behind the longest prompt; completions "
               "end there\n",
               options.sampling.max_tokens, model.Limit().c_str(), static_cast<long long>(left));
}

// Where nobody has said how long completions may be, it is told when they had no room for what they
// have otherwise.
void RemarkOnRoom(const GenerateOptions& options, const LocalModel& model,
                  const std::vector<LocalCompletion>& completions, std::FILE* remarks) {
  if (options.max_tokens_given) return;
  const int64_t num_cut = NumWithoutRoom(completions, options.sampling);
  if (num_cut == 0) return;
  std::fprintf(remarks, "stretto: %s: %lld of %zu completions end%s there, before %d tokens\n",
               model.Limit().c_str(), static_cast<long long>(num_cut), completions.size(),
               completions.size() == 1 ? "s" : "", options.sampling.max_tokens);
}

// Whether guessing ahead was worth it.
void RemarkOnSpeculation(const engine::SpeculationStats& stats, std::FILE* remarks) {
  if (stats.kind == engine::SpeculationKind::kOff) return;
  const double share = stats.num_drafted == 0 ? 0
                                              : 100.0 * static_cast<double>(stats.num_accepted) /
                                                    static_cast<double>(stats.num_drafted);
  std::fprintf(
      remarks,
      "stretto: speculation: %lld tokens drafted, %lld of them accepted (%.0f %%), in "
      "%lld of %lld steps that could have had drafts%s\n",
      static_cast<long long>(stats.num_drafted), static_cast<long long>(stats.num_accepted), share,
      static_cast<long long>(stats.num_drafted_steps), static_cast<long long>(stats.num_steps),
      stats.num_drafted == 0 ? ": none was likely enough to be worth its cost" : "");
}

// Writes what has ended in its order, or the one completion piece by piece.
class Printer {
 public:
  Printer(const GenerateOptions& options, const std::vector<Prompt>& prompts,
          const std::vector<PromptInput>& inputs, const std::vector<std::vector<int32_t>>& ids,
          std::FILE* out)
      : options_(options), prompts_(prompts), inputs_(inputs), ids_(ids), out_(out) {
    stream_ = prompts.size() == 1 && options.num_samples == 1 && !options.json;
    done_.resize(prompts.size() * static_cast<size_t>(options.num_samples));
  }
  const absl::Status& status() const { return status_; }
  // Completions that ended before their text matched what it must.
  int64_t num_cut() const { return num_cut_; }

  void Text(const std::string& text) {
    if (stream_) Put(text);
  }
  void Finished(size_t index, const LocalCompletion& completion) {
    const bool is_cut = options_.has_form() && completion.status.ok() &&
                        completion.reason == engine::FinishReason::kLength;
    num_cut_ += is_cut ? 1 : 0;
    if (stream_) return End(completion);
    done_[index] = completion;
    for (; next_ < done_.size() && done_[next_].has_value(); ++next_) {
      if (status_.ok()) PutCompletion(next_, *done_[next_]);
      done_[next_]->text.clear();
    }
  }

 private:
  void End(const LocalCompletion& completion) {
    if (!completion.status.ok()) return Fail(0, completion.status);
    Put("\n");
  }
  void PutCompletion(size_t index, const LocalCompletion& completion) {
    const auto num_samples = static_cast<size_t>(options_.num_samples);
    const size_t prompt = index / num_samples;
    if (!completion.status.ok()) return Fail(prompt, completion.status);
    if (!options_.json) {
      return Put(absl::StrCat(index > 0 ? "\n" : "", Heading(index), completion.text, "\n"));
    }
    const CompletionLine line{prompt, inputs_[prompt].shown, ids_[prompt],
                              static_cast<int32_t>(index % num_samples), options_.num_samples};
    Put(absl::StrCat(ToJson(line, completion), "\n"));
  }
  // Which of several completions it is: their texts may have any lines.
  std::string Heading(size_t index) const {
    const auto num_samples = static_cast<size_t>(options_.num_samples);
    if (done_.size() == 1) return "";
    std::string heading = "===";
    if (prompts_.size() > 1) absl::StrAppend(&heading, " ", prompts_[index / num_samples].place);
    if (num_samples > 1) {
      absl::StrAppend(&heading, " completion ", index % num_samples + 1, " of ", num_samples);
    }
    return heading + " ===\n";
  }
  void Fail(size_t prompt, const absl::Status& status) {
    if (status_.ok()) status_ = Annotate(status, prompts_[prompt].place);
  }
  // Each piece is to be seen at once, by a terminal or whoever reads a pipe.
  void Put(const std::string& text) {
    if (!status_.ok()) return;
    if (std::fwrite(text.data(), 1, text.size(), out_) == text.size() && std::fflush(out_) == 0) {
      return;
    }
    status_ = absl::UnavailableError(absl::StrCat("cannot write the output: ", strerror(errno)));
  }

  const GenerateOptions& options_;
  const std::vector<Prompt>& prompts_;
  const std::vector<PromptInput>& inputs_;
  const std::vector<std::vector<int32_t>>& ids_;
  std::FILE* out_;
  bool stream_ = false;
  std::vector<std::optional<LocalCompletion>> done_;
  size_t next_ = 0;
  int64_t num_cut_ = 0;
  absl::Status status_;
};
}  // namespace

absl::StatusOr<std::pair<int32_t, float>> ParseLogitBias(const std::string& text) {
  const size_t at = text.find_first_of("=:");
  int32_t id = 0;
  float bias = 0;
  if (at != std::string::npos && absl::SimpleAtoi(text.substr(0, at), &id) &&
      absl::SimpleAtof(text.substr(at + 1), &bias) && std::abs(bias) <= 1e6f) {
    return std::pair(id, bias);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--logit-bias: ", text, ": expected ID=BIAS, a token id and a number from -1e6 to 1e6"));
}

absl::Status Generate(const GenerateOptions& options, std::FILE* out, std::FILE* remarks) {
  RETURN_IF_ERROR(CheckFlags(options));
  std::vector<Prompt> prompts{{options.prompt, "--prompt"}};
  if (!options.prompts_file.empty()) {
    ASSIGN_OR_RETURN(prompts, ReadPrompts(options.prompts_file));
  }
  std::vector<PromptInput> inputs;
  for (const Prompt& prompt : prompts) {
    auto input = ParsePrompt(prompt, options.raw, options.ignore_fields);
    if (!input.ok()) return Annotate(input.status(), prompt.place);
    inputs.push_back(*std::move(input));
  }
  ASSIGN_OR_RETURN(const LocalModelOptions model_options, ModelOptions(options));
  ASSIGN_OR_RETURN(const auto model, LocalModel::Open(model_options));
  CompleteOptions complete{.seed = options.seed, .num_samples = options.num_samples};
  ASSIGN_OR_RETURN(complete.sampling, MakeSampling(options, *model));
  std::vector<std::vector<int32_t>> ids;
  size_t longest = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto encoded = EncodePrompt(*model, inputs[i]);
    if (!encoded.ok()) return Annotate(encoded.status(), prompts[i].place);
    RETURN_IF_ERROR(Annotate(CheckCache(options, *model, static_cast<int64_t>(encoded->size())),
                             prompts[i].place));
    longest = std::max(longest, encoded->size());
    ids.push_back(*std::move(encoded));
  }
  if (model->prompts().lacks_template()) std::fprintf(remarks, "stretto: %s\n", kRawRemark);
  if (!model->draft_notice().empty()) {
    std::fprintf(remarks, "stretto: %s\n", model->draft_notice().c_str());
  }
  RemarkOnContext(options, *model, static_cast<int64_t>(longest), remarks);
  Printer printer(options, prompts, inputs, ids, out);
  complete.on_text = [&](size_t, const std::string& text) { printer.Text(text); };
  complete.on_finished = [&](size_t index, const LocalCompletion& completion) {
    printer.Finished(index, completion);
  };
  complete.stop = [&] { return !printer.status().ok(); };
  const auto completions = model->Complete(ids, complete);
  RemarkOnRoom(options, *model, completions, remarks);
  RemarkOnSpeculation(model->stats().speculation, remarks);
  if (printer.num_cut() > 0) {
    std::fprintf(remarks,
                 "stretto: --max-tokens %d cut off %lld of %zu completions, whose text need not "
                 "match\n",
                 options.sampling.max_tokens, static_cast<long long>(printer.num_cut()),
                 ids.size() * static_cast<size_t>(options.num_samples));
  }
  return printer.status();
}

absl::Status GenerateTo(const GenerateOptions& options, std::FILE* remarks) {
  if (options.output.empty()) return Generate(options, stdout, remarks);
  std::FILE* file = std::fopen(options.output.c_str(), "we");
  if (file == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("--output ", options.output, ": cannot be written: ", strerror(errno)));
  }
  absl::Status status = Generate(options, file, remarks);
  if (std::fclose(file) != 0 && status.ok()) {
    status = absl::UnavailableError(
        absl::StrCat("--output ", options.output, ": cannot be written: ", strerror(errno)));
  }
  return status;
}
}  // namespace stretto::cli
