// `stretto generate`: completes prompts with a model or with a run's newest checkpoint, in this
// process.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/local_model.h"
#include "engine/text/stream_decoder.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;

struct GenerateFlags {
  LocalModelOptions model;
  std::string run_dir, prompt, prompts_file, system;
  bool raw = false, greedy = false, json = false;
  engine::SamplingParams sampling;
  uint64_t seed = 1;
};

bool IsUtf8(const std::string& text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::type_error&) {
    return false;
  }
}

// A file's prompts: each line a JSON object (a dataset line), a JSON string, or plain text.
absl::StatusOr<std::vector<std::string>> ReadPrompts(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string content, Files::Real().ReadAll(path));
  std::vector<std::string> lines;
  size_t begin = 0;
  while (begin < content.size()) {
    size_t end = content.find('\n', begin);
    if (end == std::string::npos) end = content.size();
    if (end > begin) lines.push_back(content.substr(begin, end - begin));
    begin = end + 1;
  }
  if (lines.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no prompts"));
  return lines;
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const LocalModel& model, const std::string& line,
                                                  bool raw) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (json.is_object() && !raw) return model.prompts().EncodeLine(line);
  const std::string text = json.is_string() ? json.get<std::string>() : line;
  if (raw) return model.prompts().EncodeRaw(text, /*parse_special=*/true);
  if (!IsUtf8(text)) return absl::InvalidArgumentError("not valid UTF-8");
  return model.prompts().EncodeLine(Json{{"prompt", text}}.dump());
}

void PrintResult(const LocalModel& model, const GenerateFlags& flags, const std::string& prompt,
                 const std::vector<int32_t>& prompt_ids, const LocalCompletion& completion) {
  const std::string text = model.prompts().tokenizer().Decode(completion.ids);
  if (!flags.json) {
    std::printf("%s\n", text.c_str());
    return;
  }
  const Json line{{"prompt", prompt},
                  {"prompt_ids", prompt_ids},
                  {"completion_ids", completion.ids},
                  {"logprobs", completion.logprobs},
                  {"finish_reason", std::string(engine::Name(completion.reason))},
                  {"text", text}};
  std::printf("%s\n", line.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

absl::Status Generate(GenerateFlags flags) {
  if (!flags.run_dir.empty()) {
    const int threads = flags.model.host.threads;
    ASSIGN_OR_RETURN(flags.model, OptionsOfRunDir(flags.run_dir));
    flags.model.host.threads = threads;
  }
  if (!flags.system.empty()) flags.model.host.prompts.system_prompt = flags.system;
  if (flags.raw) flags.model.host.prompts.chat_format = "none";
  if (flags.greedy) flags.sampling.temperature = 0;
  std::vector<std::string> prompts{flags.prompt};
  if (!flags.prompts_file.empty()) {
    ASSIGN_OR_RETURN(prompts, ReadPrompts(flags.prompts_file));
  }
  ASSIGN_OR_RETURN(const auto model, LocalModel::Open(flags.model));
  std::vector<std::vector<int32_t>> ids;
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto encoded = EncodePrompt(*model, prompts[i], flags.raw);
    if (!encoded.ok()) return Annotate(encoded.status(), absl::StrCat("prompt ", i + 1));
    ids.push_back(*std::move(encoded));
  }
  const bool stream = prompts.size() == 1 && !flags.json;
  const auto results = [&] {
    if (!stream) return model->Complete(ids, flags.sampling, flags.seed);
    engine::StreamDecoder decoder(model->prompts().tokenizer());
    auto completed = model->Complete(ids, flags.sampling, flags.seed, [&](size_t, int32_t token) {
      std::fputs(decoder.Push(token).c_str(), stdout);
      std::fflush(stdout);
    });
    std::printf("%s\n", decoder.Finish().c_str());
    return completed;
  }();
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].status.ok()) {
      return Annotate(results[i].status, absl::StrCat("prompt ", i + 1));
    }
    if (!stream) PrintResult(*model, flags, prompts[i], ids[i], results[i]);
  }
  return absl::OkStatus();
}
}  // namespace

void AddGenerateCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<GenerateFlags>();
  flags->sampling.max_tokens = 256;
  CLI::App* command = app.add_subcommand("generate", "Completes prompts with a model.");
  auto* from = command->add_option_group("from", "What generates");
  from->add_option("--model", flags->model.host.path, "Hugging Face folder or GGUF file");
  from->add_option("--run", flags->run_dir, "A run's folder: its newest checkpoint");
  from->require_option(1);
  auto* what = command->add_option_group("what", "What is completed");
  what->add_option("--prompt", flags->prompt, "One prompt");
  what->add_option("--prompts", flags->prompts_file,
                   "A file with one prompt a line: text, a JSON string, or an object with "
                   "`prompt` or `messages`");
  what->require_option(1);
  command->add_flag("--raw", flags->raw, "The prompt's text as it is, special tokens in it parsed");
  command->add_option("--system", flags->system, "System message");
  command->add_option("--chat-format", flags->model.host.prompts.chat_format,
                      "auto | chatml | llama3 | none");
  command->add_option("--max-tokens", flags->sampling.max_tokens)->check(CLI::PositiveNumber);
  command->add_option("--temperature", flags->sampling.temperature)->check(CLI::Range(0.0, 100.0));
  command->add_option("--top-k", flags->sampling.top_k)->check(CLI::NonNegativeNumber);
  command->add_option("--top-p", flags->sampling.top_p)->check(CLI::Range(0.0, 1.0));
  command->add_option("--min-p", flags->sampling.min_p)->check(CLI::Range(0.0, 1.0));
  command->add_option("--stop", flags->sampling.stop_strings, "Text that ends a completion");
  command->add_flag("--greedy", flags->greedy, "The same as --temperature 0");
  command->add_option("--seed", flags->seed);
  command->add_flag("--json", flags->json, "One JSON object a completion");
  command->add_option("--dtype", flags->model.host.dtype, "bf16 | f32");
  command->add_option("--threads", flags->model.host.threads, "0: what the machine grants");
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Generate(*flags)); }; });
}
}  // namespace stretto::cli
