// From a dataset line to prompt ids: joins what a model's files say (formats) with what text
// becomes tokens (text). A line is a JSON object with `messages` (a conversation) or `prompt`
// (text: one user message where the model chats, the raw text where chat_format is none). A
// conversation that ends with an assistant's message leaves it open, for the model to go on with.
//
// Immutable and thread-safe after Open.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/model_files.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace stretto::engine {
// The tokenizer of a model, from its folder or from its GGUF metadata.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(const ModelFiles& files);

struct PromptOptions {
  // As the run file's model.chat_format; "auto": what the model's files name
  // (ModelConfig::chat_format), or the template that they hold.
  std::string chat_format = "auto";
  // As errors name it.
  std::string chat_key = "model.chat_format (a flag: --chat-format)";
  // For conversations without a system message; none: what the template does then. An empty one is
  // a system message without text.
  std::optional<std::string> system_prompt;
  // A template that is missing or unknown is an error of what needs one, not of Open.
  bool chat_optional = false;
  // With "auto" and a model that has no template at all: as with "none".
  bool raw_without_template = false;
};

// How a conversation becomes a prompt.
struct ConversationOptions {
  ChatEnd end = ChatEnd::kAnswer;
  std::optional<bool> enable_thinking;  // nothing: as the chat format is
};

class PromptEncoder {
 public:
  // Errors: those of OpenTokenizer; a template that is unknown (the message says what to set).
  static absl::StatusOr<std::unique_ptr<PromptEncoder>> Open(const ModelFiles& files,
                                                             const PromptOptions& options);

  // InvalidArgument says what is wrong with the line: not an object, neither or both of `prompt`
  // and `messages`, a field of another type, an empty prompt, a message with fields that no prompt
  // would have (other fields of the line are the caller's). FailedPrecondition: there is no chat
  // template (`chat_optional`), which all but EncodeRaw need.
  absl::StatusOr<std::vector<int32_t>> EncodeLine(const std::string& json) const;
  absl::StatusOr<std::vector<int32_t>> EncodeMessages(
      std::vector<ChatMessage> messages, const ConversationOptions& options = {}) const;
  // The text as it is, with the BOS that the tokenizer adds. With `parse_special`, text that reads
  // like a special token is that token: for prompts that a person has written out by hand.
  absl::StatusOr<std::vector<int32_t>> EncodeRaw(const std::string& text,
                                                 bool parse_special = false) const;

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const ChatTemplate& chat() const { return chat_; }
  // The format that was named, by the options or by the model's files; empty: the template's own.
  const std::string& named_format() const { return named_format_; }
  // Whether prompts are raw for want of a template (raw_without_template).
  bool lacks_template() const { return lacks_template_; }
  // Tokens that end a completion: the model's EOS ids and the chat format's, without doubles.
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }

 private:
  // With the key that a person can set in it.
  absl::Status NameKey(const absl::Status& status) const;

  std::unique_ptr<Tokenizer> tokenizer_;
  ChatTemplate chat_;
  std::string named_format_, chat_key_;
  absl::Status no_chat_;  // why there is none
  bool lacks_template_ = false;
  std::optional<std::string> system_prompt_;
  std::vector<int32_t> stop_ids_;
};
}  // namespace stretto::engine
