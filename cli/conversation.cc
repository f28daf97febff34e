#include "cli/conversation.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/printable.h"
#include "base/status.h"
#include "services/common/json_unique.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;

// Takes the assistant's text from the end of a list of messages.
absl::StatusOr<std::string> TakeAnswer(const std::string& key, Json& messages) {
  if (messages.empty() || !messages.back().is_object() ||
      messages.back().value("role", Json()) != "assistant" ||
      !messages.back().value("content", Json()).is_string()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`", key, "`: expected a text, or messages of which the last is the assistant's, a text"));
  }
  for (const auto& [field, value] : messages.back().items()) {
    if (field == "role" || field == "content" || field == "name" || value.is_null()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("`", key, "`: the answer has the field `", Printable(field, 64),
                     "`, which isn't trained on: expected `role` and `content`"));
  }
  auto text = messages.back()["content"].get<std::string>();
  messages.erase(messages.size() - 1);
  return text;
}

// The message lists before the answers, if answers are such lists.
absl::Status ReadAnswers(const std::vector<std::string>& answers, Json& line) {
  const bool has_prompt = line.contains("prompt") || line.contains("messages");
  for (const std::string& key : answers) {
    if (!line.contains(key) || !line[key].is_array()) continue;
    Json messages = std::move(line[key]);
    ASSIGN_OR_RETURN(line[key], TakeAnswer(key, messages));
    if (has_prompt) {
      if (!messages.empty()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`", key, "`: expected one message, since the line has a prompt of its own"));
      }
    } else if (!line.contains("messages")) {
      line["messages"] = std::move(messages);
    } else if (line["messages"] != messages) {
      return absl::InvalidArgumentError("answers to different prompts: the messages before differ");
    }
  }
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<std::string> PlainLine(const std::string& line,
                                      const std::vector<std::string>& answers) {
  ASSIGN_OR_RETURN(Json json, services::ParseUniqueJson(line));
  if (!json.is_object()) return absl::InvalidArgumentError("expected a JSON object");
  for (const char* field : {"prompt", "messages"}) {  // a null is as if it weren't there
    if (json.contains(field) && json[field].is_null()) json.erase(field);
  }
  if (json.contains("prompt") && json["prompt"].is_array() && !json.contains("messages")) {
    json["messages"] = std::move(json["prompt"]);
    json.erase("prompt");
  }
  RETURN_IF_ERROR(ReadAnswers(answers, json));
  if (answers.size() == 1 && !json.contains(answers[0]) && json.contains("messages") &&
      json["messages"].is_array()) {
    ASSIGN_OR_RETURN(json[answers[0]], TakeAnswer("messages", json["messages"]));
  }
  for (const std::string& key : answers) {
    if (!json.contains(key) || !json[key].is_string()) {
      return absl::InvalidArgumentError(absl::StrCat("expected `", key, "`, a text"));
    }
  }
  return json.dump();
}
}  // namespace stretto::cli
