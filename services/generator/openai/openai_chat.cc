#include "services/generator/openai/openai_chat.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/messages.h"
#include "base/status.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;

// The least tokens of so many messages: where a format begins and ends every message with a token
// of its own, those; the last one may be left open.
int64_t LeastTokens(engine::ChatFormat format, size_t num_messages) {
  switch (format) {
    case engine::ChatFormat::kChatML:
    case engine::ChatFormat::kLlama3:
    case engine::ChatFormat::kQwen3:
    case engine::ChatFormat::kQwen3NoThink:
    case engine::ChatFormat::kPhi4:
    case engine::ChatFormat::kPhi3:
      return 2 * static_cast<int64_t>(num_messages) - 1;
    default:
      return 0;
  }
}

absl::StatusOr<std::vector<engine::ChatMessage>> ReadChat(const Json* list,
                                                          const ReadBounds& bounds) {
  constexpr size_t kCheckEvery = 1024;
  if (list == nullptr || !list->is_array() || list->empty()) {
    return ParamError("messages", "'messages': expected a list of at least one message");
  }
  std::vector<engine::ChatMessage> messages;
  for (size_t i = 0; i < list->size(); ++i) {
    if (i % kCheckEvery == 0) RETURN_IF_ERROR(bounds.check());
    auto message = ReadMessage((*list)[i], absl::StrCat("messages[", i, "]"));
    if (!message.ok()) return ParamError("messages", std::string(message.status().message()));
    messages.push_back({std::move(message->role), std::move(message->content)});
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
  fields.FailInside(key, inner.Finish(), " (enable_thinking is known)");
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
                                                const engine::PromptEncoder& prompts,
                                                const ReadBounds& bounds) {
  if (list != nullptr && list->is_array()) {
    const int64_t least = LeastTokens(prompts.chat().format, list->size());
    if (least >= bounds.max_model_len) {
      return ParamError("messages",
                        absl::StrCat("'messages': ", list->size(), " messages are at least ", least,
                                     " tokens, which leaves no room in a context of ",
                                     bounds.max_model_len, " tokens"));
    }
  }
  ASSIGN_OR_RETURN(auto messages, ReadChat(list, bounds));
  RETURN_IF_ERROR(bounds.check());
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
