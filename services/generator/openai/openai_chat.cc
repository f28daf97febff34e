#include "services/generator/openai/openai_chat.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/printable.h"
#include "base/status.h"
#include "services/generator/openai/openai_request.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;

// Fields that are allowed with the value that changes nothing.
void Refuse(Fields& fields, const std::string& key, const Json& harmless,
            const std::string& reason) {
  const Json* value = fields.Take(key);
  if (value != nullptr && *value != harmless) fields.Fail(key, reason);
}

// A message's content: a text, or a list of parts that are texts.
absl::StatusOr<std::string> ReadContent(const Json& message, const std::string& name) {
  const auto it = message.find("content");
  if (it != message.end() && it->is_string()) return it->get<std::string>();
  // As OpenAI's own: an assistant may have said nothing.
  const bool is_empty = it == message.end() || it->is_null();
  if (is_empty && message.value("role", Json()) == "assistant") return std::string();
  if (it == message.end() || !it->is_array()) {
    return ParamError("messages", absl::StrCat("'", name, ".content': expected a text"));
  }
  std::string text;
  for (const Json& part : *it) {
    if (!part.is_object() || part.value("type", Json()) != "text" ||
        !part.value("text", Json()).is_string()) {
      return ParamError("messages",
                        absl::StrCat("'", name, ".content': only parts of type text are known"));
    }
    text += part["text"].get<std::string>();
  }
  return text;
}

absl::StatusOr<engine::ChatMessage> ReadMessage(const Json& json, const std::string& name) {
  if (!json.is_object()) {
    return ParamError("messages", absl::StrCat("'", name, "': expected an object"));
  }
  Fields fields(json, name + ".");
  engine::ChatMessage message;
  fields.String("role", &message.role);
  fields.Ignore({"content", "name"});
  Refuse(fields, "refusal", nullptr, "isn't supported");
  Refuse(fields, "tool_calls", Json::array(), "tools aren't supported");
  if (const absl::Status status = fields.Finish(); !status.ok()) {
    return ParamError("messages", std::string(status.message()));
  }
  if (message.role.empty()) {
    return ParamError("messages", absl::StrCat("'", name, ".role' is missing"));
  }
  if (message.role == "developer") message.role = "system";
  if (message.role != "system" && message.role != "user" && message.role != "assistant") {
    return ParamError("messages",
                      absl::StrCat("'", name, ".role' is '", Printable(message.role, 64),
                                   "': expected system, developer, user or assistant",
                                   message.role == "tool" ? " (no tools here)" : ""));
  }
  ASSIGN_OR_RETURN(message.content, ReadContent(json, name));
  return message;
}

absl::StatusOr<std::vector<engine::ChatMessage>> ReadMessages(const Json* list) {
  if (list == nullptr || !list->is_array() || list->empty()) {
    return ParamError("messages", "'messages': expected a list of at least one message");
  }
  std::vector<engine::ChatMessage> messages;
  for (size_t i = 0; i < list->size(); ++i) {
    ASSIGN_OR_RETURN(auto message, ReadMessage((*list)[i], absl::StrCat("messages[", i, "]")));
    messages.push_back(std::move(message));
  }
  return messages;
}

// Variables of models' chat templates. Those that aren't known would change nothing in other
// servers, and what was meant would not be kept.
void ReadTemplateArguments(Fields& fields, const engine::PromptEncoder& prompts, ChatFields* chat) {
  const char* key = "chat_template_kwargs";
  const Json* arguments = fields.Take(key);
  if (arguments == nullptr) return;
  if (!arguments->is_object()) return fields.Fail(key, "expected an object");
  Fields inner(*arguments, absl::StrCat(key, "."));
  bool thinks = false;
  if (inner.Bool("enable_thinking", &thinks)) {
    chat->enable_thinking = thinks;
    const auto known = engine::WithThinking(prompts.chat(), thinks);
    if (!known.ok()) inner.Fail("enable_thinking", std::string(known.status().message()));
  }
  if (const absl::Status status = inner.Finish(); !status.ok()) {
    fields.Fail(key, absl::StrCat(status.message(), " (enable_thinking is known)"));
  }
}
}  // namespace

ChatFields ReadChatFields(Fields& fields, const engine::PromptEncoder& prompts) {
  ChatFields chat;
  bool answers = true, goes_on = false;
  const bool says_answers = fields.Bool("add_generation_prompt", &answers);
  fields.Bool("continue_final_message", &goes_on);
  if (goes_on && says_answers && answers) {
    fields.Fail("continue_final_message",
                "either the last message goes on or a new one begins: expected "
                "'add_generation_prompt': false beside it");
  }
  chat.end = goes_on   ? engine::ChatEnd::kOpenMessage
             : answers ? engine::ChatEnd::kAnswer
                       : engine::ChatEnd::kMessage;
  ReadTemplateArguments(fields, prompts, &chat);
  return chat;
}

absl::StatusOr<std::vector<int32_t>> EncodeChat(const Json* list, const ChatFields& chat,
                                                const engine::PromptEncoder& prompts) {
  ASSIGN_OR_RETURN(auto messages, ReadMessages(list));
  auto ids = prompts.EncodeMessages(std::move(messages), chat);
  if (!ids.ok()) {
    return ParamError("messages",
                      absl::StrCat("'messages': ", ids.status().message(),
                                   absl::IsFailedPrecondition(ids.status())
                                       ? ", or ask /v1/completions, which needs no template"
                                       : ""));
  }
  return ids;
}
}  // namespace stretto::services
