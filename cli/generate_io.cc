#include "cli/generate_io.h"

#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/files.h"
#include "base/messages.h"
#include "base/printable.h"
#include "base/status.h"
#include "services/common/json_unique.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;
constexpr absl::string_view kByteOrderMark = "\xef\xbb\xbf";

bool IsUtf8(const std::string& text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::type_error&) {
    return false;
  }
}
// Fields that say what is completed, and those that datasets have beside them: answers.
const std::set<std::string>& PromptFields() {
  static const auto* names = new std::set<std::string>{"prompt", "messages", "prompt_ids"};
  return *names;
}
const std::set<std::string>& AnswerFields() {
  static const auto* names =
      new std::set<std::string>{"answer", "completion", "chosen", "rejected"};
  return *names;
}

// A field that isn't read may be meant to change what is written: it isn't passed over in silence.
absl::Status CheckFields(const Json& object, bool other_fields) {
  int64_t num_prompts = 0;
  for (const auto& [key, value] : object.items()) {
    num_prompts += PromptFields().contains(key) && !value.is_null() ? 1 : 0;
    if (PromptFields().contains(key) || AnswerFields().contains(key) || other_fields) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the field '", Printable(key, 64), "' isn't known here: expected one of ",
        absl::StrJoin(PromptFields(), ", "), ", and beside it ",
        absl::StrJoin(AnswerFields(), ", "),
        ", which are passed over (--ignore-fields passes over all others as well; how completions "
        "are drawn is for flags)"));
  }
  if (num_prompts != 1) {
    return absl::InvalidArgumentError(absl::StrCat("expected one of the fields ",
                                                   absl::StrJoin(PromptFields(), ", "), ", found ",
                                                   num_prompts == 0 ? "none" : "several"));
  }
  if (HasField(object, "prompt") && !object["prompt"].is_string()) {
    const Json& prompt = object["prompt"];
    const bool is_list = prompt.is_array() && !prompt.empty();
    return absl::InvalidArgumentError(absl::StrCat(
        "'prompt' must be a string, found JSON of another kind (", prompt.type_name(), ")",
        is_list && prompt[0].is_object()   ? ": a list of messages is `messages`"
        : is_list && prompt[0].is_number() ? ": token ids are `prompt_ids`"
                                           : ""));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> ReadIds(const Json& list) {
  if (!list.is_array() || list.empty()) {
    return absl::InvalidArgumentError("'prompt_ids' must be a list of at least one token id");
  }
  std::vector<int32_t> ids;
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_number_unsigned() || list[i].get<uint64_t>() > INT32_MAX) {
      return absl::InvalidArgumentError(
          absl::StrCat("prompt_ids[", i, "]: expected a token id, an integer from 0, found ",
                       Printable(list[i].dump(-1, ' ', true), 64)));
    }
    ids.push_back(list[i].get<int32_t>());
  }
  return ids;
}
}  // namespace

absl::StatusOr<std::vector<Prompt>> ReadPrompts(const std::string& path, std::FILE* input) {
  std::string content;
  if (path == "-") {
    char buffer[1 << 16];
    while (const size_t size = std::fread(buffer, 1, sizeof(buffer), input)) {
      content.append(buffer, size);
    }
    if (std::ferror(input) != 0) return absl::UnavailableError("cannot read standard input");
  } else {
    ASSIGN_OR_RETURN(content, Files::Real().ReadAll(path));
  }
  const std::string name = path == "-" ? "standard input" : path;
  if (absl::StartsWith(content, kByteOrderMark)) content.erase(0, kByteOrderMark.size());
  std::vector<Prompt> prompts;
  int64_t number = 0;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    std::string line = content.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    ++number;
    if (!absl::StripAsciiWhitespace(line).empty()) {
      prompts.push_back({std::move(line), absl::StrCat(name, ":", number), /*is_line=*/true});
    }
    begin = end + 1;
  }
  if (prompts.empty()) return absl::InvalidArgumentError(name + ": holds no prompts");
  return prompts;
}

namespace {
std::string Shown(const char* field, const Json& value) {
  return Json{{field, value}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}
}  // namespace

absl::StatusOr<PromptInput> ParsePrompt(const Prompt& prompt, bool raw, bool other_fields) {
  const absl::string_view begin = absl::StripLeadingAsciiWhitespace(prompt.text);
  PromptInput input;
  if (!raw && !begin.empty() && begin[0] == '{') {
    auto object = services::ParseUniqueJson(prompt.text);
    if (!object.ok()) return Annotate(object.status(), "a line that begins with '{' is an object");
    RETURN_IF_ERROR(CheckFields(*object, other_fields));
    if (HasField(*object, "prompt_ids")) {
      ASSIGN_OR_RETURN(input.ids, ReadIds((*object)["prompt_ids"]));
    } else {
      input.line = prompt.text;
      const char* field = HasField(*object, "prompt") ? "prompt" : "messages";
      input.shown = Shown(field, (*object)[field]);
    }
    return input;
  }
  const Json json = Json::parse(prompt.text, nullptr, /*allow_exceptions=*/false);
  if (!raw && prompt.is_line && !json.is_discarded() && !json.is_string()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected text, a JSON string or a JSON object, found JSON of another kind (",
        json.type_name(), "): if it is meant as text, write it in quotes or give --raw",
        json.is_array() ? "; if it is token ids, write {\"prompt_ids\": [...]}" : ""));
  }
  const std::string text = json.is_string() ? json.get<std::string>() : prompt.text;
  input.shown = Shown("prompt", text);
  if (raw) {
    input.raw = text;
    return input;
  }
  if (!IsUtf8(text)) return absl::InvalidArgumentError("not valid UTF-8");
  input.line = Json{{"prompt", text}}.dump();
  return input;
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const LocalModel& model,
                                                  const PromptInput& input) {
  if (input.ids.has_value()) return *input.ids;
  if (input.raw.has_value()) return model.prompts().EncodeRaw(*input.raw, /*parse_special=*/true);
  return model.prompts().EncodeLine(*input.line);
}

std::string ToJson(const CompletionLine& line, const LocalCompletion& completion) {
  Json json{{"index", line.index},
            {"prompt_ids", line.prompt_ids},
            {"completion_ids", completion.ids},
            {"logprobs", completion.logprobs},
            {"finish_reason", std::string(engine::Name(completion.reason))},
            {"text", completion.text}};
  json.update(Json::parse(line.shown));
  if (line.num_samples > 1) json["sample"] = line.sample;
  for (const auto& alternatives : completion.top_logprobs) {
    Json list = Json::array();
    for (const engine::TokenLogprob& a : alternatives) {
      list.push_back({{"token", a.token}, {"logprob", a.logprob}});
    }
    json["top_logprobs"].push_back(std::move(list));
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}
}  // namespace stretto::cli
