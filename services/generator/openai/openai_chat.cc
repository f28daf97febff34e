#include "services/generator/openai/openai_chat.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/messages.h"
#include "base/status.h"
#include "services/generator/openai/openai_request.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;

absl::StatusOr<std::vector<engine::ChatMessage>> ReadChat(const Json* list) {
  auto read = ReadMessages(list == nullptr ? Json() : *list);
  if (!read.ok()) return ParamError("messages", std::string(read.status().message()));
  std::vector<engine::ChatMessage> messages;
  for (Message& message : *read) {
    messages.push_back({std::move(message.role), std::move(message.content)});
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
  ASSIGN_OR_RETURN(auto messages, ReadChat(list));
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
