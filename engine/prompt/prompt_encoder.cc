#include "engine/prompt/prompt_encoder.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_replace.h"
#include "base/file_status.h"
#include "base/messages.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
using Json = nlohmann::json;

int IdOr(const std::optional<int64_t>& id) { return id.has_value() ? static_cast<int>(*id) : -1; }

GgufVocab ToVocab(const GgufTokenizer& t) {
  GgufVocab vocab;
  vocab.model = t.model;
  vocab.pre = t.pre;
  vocab.tokens = t.tokens;
  vocab.scores = t.scores;
  vocab.token_types = t.token_types;
  vocab.merges = t.merges;
  vocab.bos = IdOr(t.bos_id);
  vocab.eos = IdOr(t.eos_id);
  vocab.pad = IdOr(t.pad_id);
  vocab.unk = IdOr(t.unk_id);
  vocab.add_bos = t.add_bos.value_or(DefaultAddBos(t.model, t.pre));
  vocab.add_eos = t.add_eos.value_or(false);
  vocab.add_space_prefix = t.add_space_prefix.value_or(true);
  vocab.chat_template = t.chat_template;
  return vocab;
}

absl::StatusOr<std::string> TextField(const Json& object, const char* field) {
  const auto it = object.find(field);
  if (it == object.end() || !it->is_string()) {
    return absl::InvalidArgumentError(absl::StrCat("'", field, "' must be a string"));
  }
  return it->get<std::string>();
}

absl::StatusOr<std::vector<ChatMessage>> ReadChat(const Json& list) {
  ASSIGN_OR_RETURN(auto read, ReadMessages(list));
  std::vector<ChatMessage> messages;
  messages.reserve(read.size());
  for (Message& message : read) {
    messages.push_back({std::move(message.role), std::move(message.content)});
  }
  return messages;
}
}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(const ModelFiles& files) {
  if (files.kind == ModelFiles::Kind::kFolder) return Tokenizer::FromFolder(files.path);
  if (files.gguf_tokenizer == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(files.path, ": holds no tokenizer"));
  }
  auto tokenizer = Tokenizer::FromGguf(ToVocab(*files.gguf_tokenizer));
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), files.path);
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<PromptEncoder>> PromptEncoder::Open(const ModelFiles& files,
                                                                   const PromptOptions& options) {
  auto encoder = std::make_unique<PromptEncoder>();
  auto tokenizer = OpenTokenizer(files);
  if (!tokenizer.ok()) return BlameFile(tokenizer.status());
  encoder->tokenizer_ = *std::move(tokenizer);
  const std::string& jinja = encoder->tokenizer_->chat_template();
  const bool is_given = !options.chat_format.empty() && options.chat_format != "auto";
  encoder->chat_key_ = options.chat_key;
  encoder->named_format_ = is_given ? options.chat_format : files.config.chat_format;
  encoder->lacks_template_ =
      options.raw_without_template && encoder->named_format_.empty() && jinja.empty();
  auto chat = MakeChatTemplate(jinja, encoder->lacks_template_ ? "none" : encoder->named_format_);
  if (chat.ok()) {
    encoder->chat_ = *std::move(chat);
  } else if (options.chat_optional && absl::IsFailedPrecondition(chat.status())) {
    encoder->no_chat_ = encoder->NameKey(chat.status());
  } else {
    return Annotate(encoder->NameKey(chat.status()), files.path);
  }
  encoder->system_prompt_ = options.system_prompt;
  std::vector<int32_t>& stop = encoder->stop_ids_;
  const auto add = [&stop](int64_t id) {
    if (id >= 0 && std::find(stop.begin(), stop.end(), id) == stop.end()) {
      stop.push_back(static_cast<int32_t>(id));
    }
  };
  for (const auto id : files.config.eos_token_ids) add(id);
  for (const int32_t id : ChatStopIds(*encoder->tokenizer_, encoder->chat_.format)) add(id);
  return encoder;
}

absl::Status PromptEncoder::NameKey(const absl::Status& status) const {
  return {status.code(), absl::StrReplaceAll(status.message(), {{"model.chat_format", chat_key_}})};
}

absl::StatusOr<std::vector<int32_t>> PromptEncoder::EncodeLine(const std::string& json) const {
  RETURN_IF_ERROR(no_chat_);
  const Json line = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return absl::InvalidArgumentError("a prompt must be a JSON object");
  ASSIGN_OR_RETURN(const Json* list, FindMessages(line));
  if (list != nullptr) {
    ASSIGN_OR_RETURN(auto messages, ReadChat(*list));
    const bool is_open = messages.back().role == "assistant";
    return EncodeMessages(
        std::move(messages),
        {.end = is_open ? ChatEnd::kOpenMessage : ChatEnd::kAnswer, .enable_thinking = {}});
  }
  ASSIGN_OR_RETURN(const std::string text, TextField(line, "prompt"));
  if (text.empty()) return absl::InvalidArgumentError("'prompt' is empty");
  if (chat_.format == ChatFormat::kNone && system_prompt_.value_or("").empty()) {
    return EncodeRaw(text);
  }
  return EncodeMessages({{"user", text}});
}

absl::StatusOr<std::vector<int32_t>> PromptEncoder::EncodeMessages(
    std::vector<ChatMessage> messages, const ConversationOptions& options) const {
  RETURN_IF_ERROR(no_chat_);
  if (system_prompt_.has_value() && !messages.empty() && messages.front().role != "system") {
    messages.insert(messages.begin(), {"system", *system_prompt_});
  }
  ChatTemplate chat = chat_;
  if (options.enable_thinking.has_value()) {
    ASSIGN_OR_RETURN(chat, WithThinking(chat_, *options.enable_thinking));
  }
  auto ids = engine::EncodeChat(*tokenizer_, chat, messages, options.end);
  if (!ids.ok()) return NameKey(ids.status());
  if (ids->empty()) return absl::InvalidArgumentError("the prompt has no tokens");
  return ids;
}

absl::StatusOr<std::vector<int32_t>> PromptEncoder::EncodeRaw(const std::string& text,
                                                              bool parse_special) const {
  ASSIGN_OR_RETURN(auto ids, tokenizer_->Encode(text, {.parse_special = parse_special}));
  if (ids.empty()) return absl::InvalidArgumentError("the prompt has no tokens");
  return ids;
}
}  // namespace stretto::engine
