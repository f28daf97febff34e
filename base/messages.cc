#include "base/messages.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/printable.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace stretto {
namespace {
using Json = nlohmann::json;

template <class... Parts>
absl::Status Fault(const std::string& name, const char* field, const Parts&... what) {
  return absl::InvalidArgumentError(absl::StrCat("'", name, ".", field, "' ", what...));
}

absl::StatusOr<std::string> ReadRole(const Json& json, const std::string& name) {
  const auto it = json.find("role");
  if (it == json.end() || it->is_null()) return Fault(name, "role", "is missing");
  if (!it->is_string()) {
    return Fault(name, "role", "is JSON of another kind (", it->type_name(), "): expected a text");
  }
  auto role = it->get<std::string>();
  if (role == "developer") return "system";
  if (role == "system" || role == "user" || role == "assistant") return role;
  return Fault(name, "role", "is '", Printable(role, 64),
               "': expected system, developer, user or assistant",
               role == "tool" ? " (no tools here)" : "");
}

absl::StatusOr<std::string> ReadContent(const Json& json, const std::string& name,
                                        const std::string& role) {
  const auto it = json.find("content");
  const bool is_absent = it == json.end() || it->is_null();
  if (is_absent && role == "assistant") return std::string();
  if (is_absent) return Fault(name, "content", "is missing: expected a text");
  if (it->is_string()) return it->get<std::string>();
  if (!it->is_array()) {
    return Fault(name, "content", "is JSON of another kind (", it->type_name(),
                 "): expected a text, or parts of type text");
  }
  std::string text;
  for (const Json& part : *it) {
    if (!part.is_object() || part.value("type", Json()) != "text" ||
        !part.value("text", Json()).is_string()) {
      return Fault(name, "content",
                   "has another part than text: only parts of type text are known");
    }
    text += part["text"].get<std::string>();
  }
  return text;
}

absl::Status CheckFields(const Json& json, const std::string& name) {
  for (const auto& [key, value] : json.items()) {
    if (key == "role" || key == "content" || key == "name" || value.is_null()) continue;
    // What OpenAI's answers carry comes back in the next request's messages.
    if ((key == "tool_calls" || key == "annotations") && value == Json::array()) continue;
    if (key == "tool_calls") {
      return Fault(name, "tool_calls", "isn't empty: tools aren't supported");
    }
    if (key == "annotations") return Fault(name, "annotations", "isn't empty: not supported");
    if (key == "refusal") return Fault(name, "refusal", "isn't supported");
    return Fault(name, Printable(key, 64).c_str(),
                 "isn't known: expected `role` and `content`, and nothing else but `name`");
  }
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<Message> ReadMessage(const Json& json, const std::string& name) {
  if (!json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' is no object"));
  }
  Message message;
  RETURN_IF_ERROR(CheckFields(json, name));
  ASSIGN_OR_RETURN(message.role, ReadRole(json, name));
  ASSIGN_OR_RETURN(message.content, ReadContent(json, name, message.role));
  return message;
}

absl::StatusOr<std::vector<Message>> ReadMessages(const Json& list) {
  if (!list.is_array() || list.empty()) {
    return absl::InvalidArgumentError("'messages': expected a list of at least one message");
  }
  std::vector<Message> messages;
  for (size_t i = 0; i < list.size(); ++i) {
    ASSIGN_OR_RETURN(auto message, ReadMessage(list[i], absl::StrCat("messages[", i, "]")));
    messages.push_back(std::move(message));
  }
  return messages;
}

absl::StatusOr<const Json*> FindMessages(const Json& line) {
  const bool has_prompt = HasField(line, "prompt"), has_messages = HasField(line, "messages");
  if (has_prompt == has_messages) {
    return absl::InvalidArgumentError("expected either `prompt` or `messages`");
  }
  if (has_messages) return &line["messages"];
  return line["prompt"].is_array() ? &line["prompt"] : nullptr;
}

bool HasField(const Json& object, const char* field) {
  const auto it = object.find(field);
  return it != object.end() && !it->is_null();
}
}  // namespace stretto
