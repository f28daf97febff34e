#include "cli/generate_io.h"

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status.h"
#include "services/common/json_unique.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;

bool IsUtf8(const std::string& text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::type_error&) {
    return false;
  }
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
  std::vector<Prompt> prompts;
  int64_t number = 0;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    std::string line = content.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    ++number;
    if (!line.empty()) prompts.push_back({std::move(line), absl::StrCat(name, ":", number)});
    begin = end + 1;
  }
  if (prompts.empty()) return absl::InvalidArgumentError(name + ": holds no prompts");
  return prompts;
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const LocalModel& model, const std::string& line,
                                                  bool raw) {
  const absl::string_view begin = absl::StripLeadingAsciiWhitespace(line);
  if (!raw && !begin.empty() && begin[0] == '{') {
    const auto object = services::ParseUniqueJson(line);
    if (!object.ok()) return Annotate(object.status(), "a line that begins with '{' is an object");
    return model.prompts().EncodeLine(line);
  }
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  const std::string text = json.is_string() ? json.get<std::string>() : line;
  if (raw) return model.prompts().EncodeRaw(text, /*parse_special=*/true);
  if (!IsUtf8(text)) return absl::InvalidArgumentError("not valid UTF-8");
  return model.prompts().EncodeLine(Json{{"prompt", text}}.dump());
}

std::string ToJson(const CompletionLine& line, const LocalCompletion& completion) {
  Json json{{"index", line.index},
            {"prompt", line.prompt},
            {"prompt_ids", line.prompt_ids},
            {"completion_ids", completion.ids},
            {"logprobs", completion.logprobs},
            {"finish_reason", std::string(engine::Name(completion.reason))},
            {"text", completion.text}};
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
