// The conversation of a chat's request, and the fields that say how it becomes a prompt. Pure
// functions.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/prompt/prompt_encoder.h"
#include "services/generator/openai/openai_fields.h"
#include "services/generator/openai/openai_request.h"

namespace stretto::services {
using ChatFields = engine::ConversationOptions;

// add_generation_prompt, continue_final_message and chat_template_kwargs, as vLLM's.
ChatFields ReadChatFields(Fields& fields, const engine::PromptEncoder& prompts);

// The prompt that a conversation becomes: the value of `messages`. Errors as ParseChat's.
absl::StatusOr<std::vector<int32_t>> EncodeChat(const nlohmann::json* messages,
                                                const ChatFields& chat,
                                                const engine::PromptEncoder& prompts,
                                                const ReadBounds& bounds);
}  // namespace stretto::services
