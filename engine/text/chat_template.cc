#include "engine/text/chat_template.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/printable.h"
#include "base/status.h"
#include "engine/text/chat_details.h"

namespace stretto::engine {
namespace {

constexpr absl::string_view kImEnd = "<|im_end|>", kBeginOfText = "<|begin_of_text|>";

constexpr ChatFormat kAllFormats[] = {
    ChatFormat::kNone,       ChatFormat::kChatML,       ChatFormat::kLlama3,
    ChatFormat::kQwen3,      ChatFormat::kQwen3NoThink, ChatFormat::kPhi4,
    ChatFormat::kPhi3,       ChatFormat::kGemma,        ChatFormat::kLlama2,
    ChatFormat::kMistral,    ChatFormat::kMistralV7,    ChatFormat::kZephyr,
    ChatFormat::kDeepSeekR1, ChatFormat::kSmolLM3,      ChatFormat::kSmolLM3NoThink};

std::string WhatToSet() {
  return absl::StrCat("set model.chat_format: ", ChatFormatNames("|"),
                      " (none: prompts are plain text)");
}

// The id of a piece that is a token; -1: it is ordinary text. Or an error that says what to do.
absl::StatusOr<int32_t> IdOf(const Tokenizer& tokenizer, ChatFormat format,
                             const ChatPiece& piece) {
  using Kind = ChatPiece::Kind;
  if (piece.kind == Kind::kText) return -1;
  if (piece.kind == Kind::kBos) {
    if (tokenizer.bos_id() >= 0) return tokenizer.bos_id();
    const auto begin = tokenizer.Find(kBeginOfText);
    if (format == ChatFormat::kLlama3 && begin.has_value()) return *begin;
    return absl::FailedPreconditionError(
        "the chat template begins with BOS, but the tokenizer names no BOS (bos_token in "
        "tokenizer_config.json)");
  }
  if (piece.kind == Kind::kEos) {
    if (tokenizer.eos_id() >= 0) return tokenizer.eos_id();
    return absl::FailedPreconditionError(
        absl::StrCat("the chat format ", ChatFormatName(format),
                     " ends messages with EOS, but the tokenizer names no EOS (eos_token in "
                     "tokenizer_config.json)"));
  }
  const auto id = tokenizer.Find(piece.text);
  if (id.has_value()) return *id;
  if (piece.kind == Kind::kToken) return -1;
  return absl::FailedPreconditionError(
      absl::StrCat("the chat format ", ChatFormatName(format), " needs the token ", piece.text,
                   ", which the tokenizer does not have; ", WhatToSet()));
}

}  // namespace

absl::string_view ChatFormatName(ChatFormat format) {
  switch (format) {
    case ChatFormat::kNone:
      return "none";
    case ChatFormat::kChatML:
      return "chatml";
    case ChatFormat::kLlama3:
      return "llama3";
    case ChatFormat::kQwen3:
      return "qwen3";
    case ChatFormat::kQwen3NoThink:
      return "qwen3-nothink";
    case ChatFormat::kPhi4:
      return "phi4";
    case ChatFormat::kPhi3:
      return "phi3";
    case ChatFormat::kGemma:
      return "gemma";
    case ChatFormat::kLlama2:
      return "llama2";
    case ChatFormat::kMistral:
      return "mistral";
    case ChatFormat::kZephyr:
      return "zephyr";
    case ChatFormat::kDeepSeekR1:
      return "deepseek-r1";
    case ChatFormat::kMistralV7:
      return "mistral-v7";
    case ChatFormat::kSmolLM3:
      return "smollm3";
    case ChatFormat::kSmolLM3NoThink:
      return "smollm3-nothink";
  }
  return "";
}

std::string ChatFormatNames(absl::string_view separator) {
  std::vector<absl::string_view> names;
  for (const ChatFormat format : kAllFormats) names.push_back(ChatFormatName(format));
  return absl::StrJoin(names, separator);
}

absl::StatusOr<ChatFormat> ParseChatFormat(absl::string_view name) {
  for (const ChatFormat format : kAllFormats) {
    if (name == ChatFormatName(format)) return format;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown chat format \"", name, "\"; ", WhatToSet()));
}

absl::StatusOr<ChatTemplate> MakeChatTemplate(absl::string_view jinja,
                                              absl::string_view override_format) {
  const std::vector<ChatFormat> families = FamiliesOf(jinja);
  if (!override_format.empty() && override_format != "auto") {
    ASSIGN_OR_RETURN(const ChatFormat format, ParseChatFormat(override_format));
    const ChatFormat family = format == ChatFormat::kQwen3NoThink     ? ChatFormat::kQwen3
                              : format == ChatFormat::kSmolLM3NoThink ? ChatFormat::kSmolLM3
                                                                      : format;
    const bool is_of_it = families.size() == 1 && families[0] == family;
    return DetailsOf(format, is_of_it ? jinja : "");
  }
  if (jinja.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the model has no chat template; ", WhatToSet()));
  }
  if (families.size() == 1) return DetailsOf(families[0], jinja);
  std::string named;
  for (const ChatFormat format : families) {
    absl::StrAppend(&named, named.empty() ? "" : " and ", ChatFormatName(format));
  }
  constexpr size_t kMaxQuoted = 80;
  return absl::FailedPreconditionError(absl::StrCat(
      "the model's chat template is ",
      families.empty() ? "of an unknown kind" : absl::StrCat("ambiguous (", named, ")"), ": ",
      Printable(jinja, kMaxQuoted), "; ", WhatToSet()));
}

absl::StatusOr<ChatTemplate> WithThinking(const ChatTemplate& chat_template, bool enable) {
  ChatTemplate out = chat_template;
  switch (out.format) {
    case ChatFormat::kQwen3:
    case ChatFormat::kQwen3NoThink:
      if (enable || !out.opens_thinking) {
        out.format = enable ? ChatFormat::kQwen3 : ChatFormat::kQwen3NoThink;
        return out;
      }
      break;
    case ChatFormat::kSmolLM3:
    case ChatFormat::kSmolLM3NoThink:
      out.format = enable ? ChatFormat::kSmolLM3 : ChatFormat::kSmolLM3NoThink;
      return out;
    case ChatFormat::kDeepSeekR1:
      if (enable) return out;
      break;
    default:
      if (!enable) return out;
      return absl::InvalidArgumentError(
          absl::StrCat("the chat format ", ChatFormatName(out.format), " has no thinking"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the chat format ", ChatFormatName(out.format), " of this model always thinks"));
}

absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                const ChatTemplate& chat_template,
                                                absl::Span<const ChatMessage> messages,
                                                ChatEnd end) {
  ASSIGN_OR_RETURN(const auto pieces, RenderChat(chat_template, messages, end));
  if (chat_template.format == ChatFormat::kNone) {
    EncodeOptions options;
    options.parse_special = false;
    return tokenizer.Encode(pieces[0].text, options);
  }
  std::vector<EncodePiece> encode_pieces;
  bool all_special = true;  // otherwise a marker in a content would be found as an added token
  for (const ChatPiece& piece : pieces) {
    ASSIGN_OR_RETURN(const int32_t id, IdOf(tokenizer, chat_template.format, piece));
    encode_pieces.push_back({id < 0 ? piece.text : "", id});
    all_special = all_special && (id < 0 || tokenizer.IsSpecial(id));
  }
  return tokenizer.EncodePieces(encode_pieces, /*parse_added=*/all_special);
}

std::vector<int32_t> ChatStopIds(const Tokenizer& tokenizer, ChatFormat format) {
  std::vector<int32_t> ids;
  const auto add = [&](int32_t id) {
    if (id >= 0 && std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  };
  const auto add_token = [&](absl::string_view token) { add(tokenizer.Find(token).value_or(-1)); };
  switch (format) {
    case ChatFormat::kChatML:
    case ChatFormat::kQwen3:
    case ChatFormat::kQwen3NoThink:
    case ChatFormat::kPhi4:
    case ChatFormat::kSmolLM3:
    case ChatFormat::kSmolLM3NoThink:
      add_token(kImEnd);
      break;
    case ChatFormat::kLlama3:
      add_token("<|eot_id|>");
      break;
    case ChatFormat::kPhi3:
      add_token("<|end|>");
      break;
    case ChatFormat::kGemma:
      add_token("<end_of_turn>");
      break;
    default:
      break;  // EOS
  }
  add(tokenizer.eos_id());
  return ids;
}

}  // namespace stretto::engine
