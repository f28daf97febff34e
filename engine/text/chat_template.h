// Chat prompts. Models carry a Jinja template; this project knows the families that most models
// use, recognises them by the markers in the template's text (docs/chat-formats.md), and reads from
// it what varies inside a family (default system message, BOS, trimming, spaces). A template of
// another family is an error that says what to set.
//
// Safe against injection: markers are emitted as the special tokens they are, message contents are
// encoded as ordinary text. A content that contains "<|im_end|>" becomes the tokens of these
// characters, never the special token. For contents without such text the ids are those of
// transformers' apply_chat_template. (Where a family's own markers are ordinary text, as Llama 2's
// [INST], nothing can tell them from a content's.)
//
// All functions are pure and thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/text/tokenizer.h"

namespace stretto::engine {

enum class ChatFormat {
  kNone,            // contents, joined by newlines, and nothing else; BOS as the tokenizer adds it
  kChatML,          // <|im_start|>role\ncontent<|im_end|>\n
  kLlama3,          // <|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>
  kQwen3,           // ChatML, the reasoning of earlier answers left out
  kQwen3NoThink,    // the same, and the answer begins with reasoning that is empty
  kPhi4,            // <|im_start|>role<|im_sep|>content<|im_end|>
  kPhi3,            // <|role|>\ncontent<|end|>\n
  kGemma,           // <start_of_turn>user\ncontent<end_of_turn>\n, the assistant is "model"
  kLlama2,          // [INST] <<SYS>>…<</SYS>> content [/INST] answer, each turn with BOS and EOS
  kMistral,         // [INST] content [/INST] answer, one BOS, each answer with EOS
  kMistralV7,       // the same, system messages in [SYSTEM_PROMPT] … [/SYSTEM_PROMPT]
  kZephyr,          // <|role|>\ncontent and EOS; TinyLlama's too
  kDeepSeekR1,      // <｜User｜>content<｜Assistant｜>
  kSmolLM3,         // ChatML behind a system message that says how to think
  kSmolLM3NoThink,  // the same, without thinking
};

// "none", "chatml", "llama3", "qwen3", "qwen3-nothink", "phi4", …
absl::string_view ChatFormatName(ChatFormat format);
// The inverse; an error lists the names.
absl::StatusOr<ChatFormat> ParseChatFormat(absl::string_view name);
// All names, for flags and messages: "none | chatml | …" with another separator.
std::string ChatFormatNames(absl::string_view separator);

struct ChatMessage {
  std::string role;  // "system", "user", "assistant", or what else the model was trained with
  std::string content;
};

// A model's way of writing a conversation.
struct ChatTemplate {
  ChatFormat format = ChatFormat::kNone;
  // The system message where the conversation doesn't begin with one; empty: none is added.
  std::string default_system;
  std::string default_system_nothink;  // the same, of kSmolLM3 without thinking
  // Put before every system message, and as a system message of its own where there is none:
  // Llama 3.1's dates. A date that a template takes from the clock is fixed here to the one that
  // the template itself falls back to, or else to that of kChatDate, so that a prompt does not
  // depend on the day.
  std::string system_prefix;
  bool adds_bos = false;        // the template itself begins with BOS
  bool trims_content = false;   // white space around contents is removed
  bool takes_system = true;     // false: such a model was trained without system messages
  bool opens_thinking = false;  // the answer's head is followed by <think>
  bool ends_with_eos = false;   // kPhi3: where no answer is asked for
  // kMistral and kMistralV7: what stands around contents, and where the system message goes: before
  // the content of the last user message, or of the first.
  std::string inst_begin = "[INST] ", inst_end = "[/INST]", answer_begin = " ", answer_end;
  bool trims_answers = false, system_in_last = false;
  std::string system_begin = "[SYSTEM_PROMPT]", system_end = "[/SYSTEM_PROMPT]";  // kMistralV7
};

// Today, for templates that ask a clock and know no other date: as Mistral's and SmolLM3's write
// it.
inline constexpr absl::string_view kChatDate = "2025-01-01", kChatDayBefore = "2024-12-31",
                                   kChatDateInWords = "01 January 2025";

// What `jinja` (may be empty) asks for. `override_format` is the run file's model.chat_format:
// empty or "auto" means to recognise the format, otherwise that format is used, with the details of
// `jinja` where `jinja` is of that format. Errors: unknown name; no template or an unknown one
// without an override, with the names to set.
absl::StatusOr<ChatTemplate> MakeChatTemplate(absl::string_view jinja,
                                              absl::string_view override_format = "");

// The template with thinking turned on or off, as `enable_thinking` of models' templates does it.
// InvalidArgument: the format always thinks, or never does.
absl::StatusOr<ChatTemplate> WithThinking(const ChatTemplate& chat_template, bool enable);

// A stretch of a rendered prompt.
struct ChatPiece {
  enum class Kind {
    kText,
    kMarker,  // a special token by its name
    kToken,   // a token by its name where the tokenizer has it as one, else ordinary text
    kBos,
    kEos,
  };
  std::string text;
  Kind kind = Kind::kText;
};

// How a conversation ends: with its last message, with the head of an assistant's message, or with
// the last message left open, for the model to go on with it.
enum class ChatEnd { kMessage, kAnswer, kOpenMessage };

// The conversation as pieces. Errors: no message; an empty role or one that is not of
// [A-Za-z0-9_.-] (a role stands outside the protected content); a role or an order that the format
// doesn't know; an open message that is empty, or that the format doesn't write as it is.
absl::StatusOr<std::vector<ChatPiece>> RenderChat(const ChatTemplate& chat_template,
                                                  absl::Span<const ChatMessage> messages,
                                                  ChatEnd end);
inline absl::StatusOr<std::vector<ChatPiece>> RenderChat(const ChatTemplate& chat_template,
                                                         absl::Span<const ChatMessage> messages,
                                                         bool add_generation_prompt) {
  return RenderChat(chat_template, messages,
                    add_generation_prompt ? ChatEnd::kAnswer : ChatEnd::kMessage);
}

// The ids of RenderChat. There is one BOS or none: never one of the template and one of the
// tokenizer. Errors: those of RenderChat; a marker that the tokenizer doesn't have.
absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                const ChatTemplate& chat_template,
                                                absl::Span<const ChatMessage> messages,
                                                ChatEnd end);
inline absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                       const ChatTemplate& chat_template,
                                                       absl::Span<const ChatMessage> messages,
                                                       bool add_generation_prompt) {
  return EncodeChat(tokenizer, chat_template, messages,
                    add_generation_prompt ? ChatEnd::kAnswer : ChatEnd::kMessage);
}

// The tokens that end an assistant's message (<|im_end|>, <|eot_id|>, …) and the tokenizer's EOS,
// without doubles. A rollout stops at any of them.
std::vector<int32_t> ChatStopIds(const Tokenizer& tokenizer, ChatFormat format);

}  // namespace stretto::engine
