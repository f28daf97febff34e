// `stretto generate`: completes prompts with a model or with a run's newest checkpoint, in this
// process. Here are the flags; see generate_run.h for the rest.
#include <cstdio>
#include <memory>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "base/flag_checks.h"
#include "cli/commands.h"
#include "cli/generate_run.h"

namespace stretto::cli {
namespace {
constexpr int64_t kMaxKvCacheMb = int64_t{1} << 24;  // 16 TiB
constexpr int64_t kMaxContext = int64_t{1} << 24;

void AddSources(CLI::App& command, GenerateOptions& o) {
  auto* from = command.add_option_group("from", "What generates");
  from->add_option("--model", o.model.host.path, "Hugging Face folder or GGUF file");
  from->add_option("--run", o.run_dir, "A run's folder: its newest checkpoint");
  from->require_option(1);
  command
      .add_option(
          "--checkpoint", o.checkpoint,
          "With --run: another than the newest: a step, a name in the run's checkpoints, or "
          "a path")
      ->needs(from->get_option("--run"));
  command
      .add_option("--adapter", o.model.host.adapter,
                  "With --model: a LoRA adapter (PEFT folder), merged into it. Default: none")
      ->excludes(from->get_option("--run"));
  auto* what = command.add_option_group("what", "What is completed");
  what->add_option("--prompt", o.prompt, "One prompt");
  what->add_option("--prompts", o.prompts_file,
                   "A file (-: standard input) with one prompt a line: text, a JSON string, or an "
                   "object with `prompt`, `messages` or `prompt_ids`");
  what->require_option(1);
  CLI::Option* raw =
      command.add_flag("--raw", o.raw, "The prompt's text as it is, special tokens in it parsed");
  command.add_flag(
      "--ignore-fields", o.ignore_fields,
      "Passes over fields of objects in --prompts that aren't known, as data sets have "
      "them; without it they are errors");
  command
      .add_option_function<std::string>(
          "--system", [&o](const std::string& text) { o.system = text; },
          "System message, in place of the run's or the template's; \"\": one without text")
      ->type_name("TEXT")
      ->excludes(raw);
  command
      .add_option("--chat-format", o.chat_format,
                  "How messages become a prompt: auto (the model's own way) or a format's name "
                  "(docs/chat-formats.md). Default: the run's, or auto")
      ->excludes(raw);
}

void AddEngine(CLI::App& command, GenerateOptions& o) {
  command
      .add_option("--max-sequence-length", o.model.host.max_sequence_length,
                  "The context: tokens of prompt and completion together. Default: the run's, or "
                  "the model's own, but at most 4096 even where the model allows more")
      ->check(IntegerIn(1, kMaxContext));
  command
      .add_option("--kv-cache-mb", o.model.kv_cache_mb,
                  absl::StrCat("Memory for keys and values, MiB. Default: ", o.model.kv_cache_mb))
      ->check(IntegerIn(1, kMaxKvCacheMb));
  command
      .add_option("--max-running", o.model.max_running,
                  absl::StrCat("Sequences computed at once. Default: ", o.model.max_running))
      ->check(IntegerIn(1, 512));
  command.add_option("--dtype", o.dtype, "Computation in bf16 (default) or f32")
      ->check(OneOf({"bf16", "f32"}));
  command
      .add_option("--weight-dtype", o.model.host.weight_dtype,
                  "Matrices as bf16 (default: as --dtype says), int8, int4 or fp8")
      ->check(OneOf({"bf16", "int8", "int4", "fp8"}));
  command
      .add_option("--kv-dtype", o.model.host.kv_dtype,
                  "Keys and values as bf16 (default: as --dtype says), int8 or fp8")
      ->check(OneOf({"bf16", "int8", "fp8"}));
  command
      .add_option("--speculation", o.model.speculation,
                  "How tokens are guessed ahead: off (default), ngram (from what has been written) "
                  "or model. What is written stays the same")
      ->check(CLI::IsMember({"off", "ngram", "model"}));
  command.add_option("--draft-model", o.model.draft_model,
                     "With --speculation model: a smaller model with the same tokenizer");
  command
      .add_option("--draft-tokens", o.model.draft_tokens,
                  absl::StrCat("With --speculation: most tokens guessed for a sequence and step. "
                               "Default: ",
                               o.model.draft_tokens))
      ->check(IntegerIn(1, engine::kMaxDraft));
  command
      .add_option("--threads", o.model.host.threads,
                  "Compute threads. 0 (default): what the machine grants")
      ->check(IntegerIn(0, 1024));
}

// Flags that would be passed over.
void CheckSpeculation(const CLI::App& command, const std::string& kind) {
  const bool has_draft = command.count("--draft-model") > 0;
  if (kind == "model" && !has_draft) {
    throw CLI::ValidationError("--speculation model", "needs --draft-model FOLDER");
  }
  if (kind != "model" && has_draft) {
    throw CLI::ValidationError("--draft-model",
                               "a draft model is for --speculation model: give it too");
  }
  if (kind == "off" && command.count("--draft-tokens") > 0) {
    throw CLI::ValidationError("--draft-tokens",
                               "is for --speculation ngram and model: give one of them too");
  }
}

void AddDistribution(CLI::App& command, engine::SamplingParams& s, GenerateOptions& o) {
  CLI::Option* temperature =
      command
          .add_option("--temperature", s.temperature,
                      "0: greedy, the likeliest token each time; else 0.0001 to 100. Default: 1")
          ->check(NumberIn({.low = 1e-4, .high = 100, .or_zero = true}));
  command
      .add_flag_callback(
          "--greedy", [&s] { s.temperature = 0; }, "The same as --temperature 0")
      ->excludes(temperature);
  command.add_option("--top-k", s.top_k, "Only the K likeliest tokens. 0 (default): all")
      ->check(IntegerIn(0, INT32_MAX));
  command
      .add_option("--top-p", s.top_p,
                  "Only the likeliest tokens that together have this probability. Default: 1")
      ->check(NumberIn({.low = 0, .high = 1, .without_low = true}));
  command
      .add_option("--min-p", s.min_p,
                  "Only tokens with at least this share of the likeliest one's probability. "
                  "Default: 0")
      ->check(NumberIn({.low = 0, .high = 1}));
  command
      .add_option("--repetition-penalty", s.repetition_penalty,
                  "Divides the positive logits of tokens seen in prompt and completion, multiplies "
                  "the negative ones. Default: 1")
      ->check(NumberIn({.low = 0.01, .high = 100}));
  command
      .add_option("--presence-penalty", s.presence_penalty,
                  "Subtracted from the logits of the completion's tokens. Default: 0")
      ->check(NumberIn({.low = -100, .high = 100}));
  command
      .add_option("--frequency-penalty", s.frequency_penalty,
                  "The same, times how often the token has come. Default: 0")
      ->check(NumberIn({.low = -100, .high = 100}));
  command.add_option("--logit-bias", o.logit_bias,
                     "ID=BIAS, added to the logit of a token id (may be repeated)");
  command
      .add_option("--seed", o.seed,
                  "Decides all draws, together with prompt and sample index. Default: 1")
      ->check(IntegerIn(0, INT64_MAX));
  command.add_option("-n,--n", o.num_samples, "Completions of each prompt. Default: 1")
      ->check(IntegerIn(1, 1024));
}

CLI::Option* AddEnds(CLI::App& command, engine::SamplingParams& s) {
  CLI::Option* max_tokens =
      command
          .add_option("--max-tokens", s.max_tokens,
                      "A completion's most tokens; where the context leaves less it ends there, "
                      "and a remark on stderr says so. Default: 256")
          ->check(IntegerIn(1, INT32_MAX));
  command
      .add_option("--min-tokens", s.min_tokens,
                  "Neither EOS nor a stop ends a completion before so many tokens; a text that "
                  "must match ends where nothing may follow all the same. Default: 0")
      ->check(IntegerIn(0, INT32_MAX));
  command.add_option("--stop", s.stop_strings,
                     "Text that ends a completion and is left out (may be repeated)");
  command
      .add_option("--stop-token-id", s.stop_ids,
                  "Token id that ends a completion (may be repeated)")
      ->check(IntegerIn(0, INT32_MAX));
  command.add_flag("--ignore-eos", s.ignore_eos, "Go on past the model's end-of-text tokens");
  return max_tokens;
}

void AddForms(CLI::App& command, GenerateOptions& o) {
  command.add_option("--regex", o.regex, "Regular expression that the whole completion matches");
  command.add_option("--json-schema", o.json_schema_file,
                     "File with a JSON Schema that the completion obeys (docs/json-schema.md)");
  command.add_flag("--json-object", o.json_object, "The completion is some JSON object");
  command.add_option("--choice", o.choices, "The completion is one of these texts (repeat it)");
  command.add_flag("--json,--jsonl", o.json,
                   "One JSON object a completion and line, with ids and log-probs");
  command.add_option("-o,--output", o.output, "A file to write to instead of standard output");
  command
      .add_option("--logprobs", o.sampling.top_logprobs,
                  absl::StrCat("With --json: the log-probs of the K likeliest tokens at each, up "
                               "to ",
                               engine::kMaxTopLogprobs, ". Default: 0"))
      ->check(IntegerIn(0, engine::kMaxTopLogprobs));
}
}  // namespace

void AddGenerateCommand(CLI::App& app, Command* chosen) {
  auto options = std::make_shared<GenerateOptions>();
  options->sampling.max_tokens = 256;
  CLI::App* command = app.add_subcommand(
      "generate", "Completes prompts with a model; writes each completion as it comes.");
  AddSources(*command, *options);
  CLI::Option* max_tokens = AddEnds(*command, options->sampling);
  AddDistribution(*command, options->sampling, *options);
  AddForms(*command, *options);
  AddEngine(*command, *options);
  command->callback([options, max_tokens, command, chosen] {
    CheckSpeculation(*command, options->model.speculation);
    options->max_tokens_given = max_tokens->count() > 0;
    *chosen = [options] { return Finish(GenerateTo(*options, stderr)); };
  });
}
}  // namespace stretto::cli
