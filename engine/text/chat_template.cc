#include "engine/text/chat_template.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

constexpr absl::string_view kImStart = "<|im_start|>", kImEnd = "<|im_end|>";
constexpr absl::string_view kHeaderStart = "<|start_header_id|>", kHeaderEnd = "<|end_header_id|>";
constexpr absl::string_view kTurnEnd = "<|eot_id|>", kBeginOfText = "<|begin_of_text|>";
constexpr absl::string_view kWhatToSet =
    "set model.chat_format: chatml|llama3|none (a flag: --chat-format)";
constexpr size_t kNotFound = absl::string_view::npos;

// The text between `begin` and the next `end` in `text`, from `from` on; empty when there is none.
absl::string_view Between(absl::string_view text, absl::string_view begin, absl::string_view end,
                          size_t from = 0) {
  const size_t start = text.find(begin, from);
  if (start == kNotFound) return "";
  text.remove_prefix(start + begin.size());
  const size_t stop = text.find(end);
  return stop == kNotFound ? absl::string_view() : text.substr(0, stop);
}

// Undoes the escapes of a Jinja string literal.
std::string Unescaped(absl::string_view literal) {
  return absl::StrReplaceAll(
      literal, {{"\\n", "\n"}, {"\\t", "\t"}, {"\\'", "'"}, {"\\\"", "\""}, {"\\\\", "\\"}});
}

// True when a quote of the kind that opened the literal around `position` occurs in `inside`: then
// `inside` is code, not one literal.
bool LeavesLiteral(absl::string_view jinja, size_t position, absl::string_view inside) {
  const size_t quote = jinja.substr(0, position).find_last_of("'\"");
  if (quote == kNotFound) return true;
  for (size_t i = 0; i < inside.size(); ++i) {
    if (inside[i] == '\\') {
      ++i;
    } else if (inside[i] == jinja[quote]) {
      return true;
    }
  }
  return false;
}

// The literal system message of a ChatML template: what stands between "<|im_start|>system\n" and
// "<|im_end|>" in one string. Such templates print it where the conversation has none.
std::string DefaultSystemOfChatMl(absl::string_view jinja) {
  const std::string head = absl::StrCat(kImStart, "system");
  for (size_t at = jinja.find(head); at != kNotFound; at = jinja.find(head, at + 1)) {
    absl::string_view rest = jinja.substr(at + head.size());
    if (absl::StartsWith(rest, "\\n")) {
      rest.remove_prefix(2);
    } else if (absl::StartsWith(rest, "\n")) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    const size_t stop = rest.find(kImEnd);
    if (stop == kNotFound || stop == 0) continue;
    const absl::string_view message = rest.substr(0, stop);
    if (!LeavesLiteral(jinja, at, message)) return Unescaped(message);
  }
  return "";
}

// Llama 3.1's lines about dates, with the date that the template falls back to.
std::string SystemPrefixOfLlama3(absl::string_view jinja) {
  constexpr absl::string_view kCutting = "Cutting Knowledge Date: ";
  const absl::string_view cutting = Between(jinja, kCutting, "\\n");
  const absl::string_view today = Between(jinja, "date_string = \"", "\"");
  if (cutting.empty() || today.empty()) return "";
  return absl::StrCat(kCutting, cutting, "\nToday Date: ", today, "\n\n");
}

bool Trims(absl::string_view jinja) {
  const std::string compact = absl::StrReplaceAll(jinja, {{" ", ""}});
  return absl::StrContains(compact, "content']|trim") ||
         absl::StrContains(compact, "content\"]|trim") ||
         absl::StrContains(compact, "content|trim");
}

ChatTemplate ChatMlTemplate(absl::string_view jinja) {
  ChatTemplate out;
  out.format = ChatFormat::kChatML;
  out.default_system = DefaultSystemOfChatMl(jinja);
  out.adds_bos = absl::StrContains(jinja, "bos_token");
  out.trims_content = Trims(jinja);
  return out;
}

ChatTemplate Llama3Template(absl::string_view jinja) {
  ChatTemplate out;
  out.format = ChatFormat::kLlama3;
  out.system_prefix = SystemPrefixOfLlama3(jinja);
  out.adds_bos = jinja.empty() || absl::StrContains(jinja, "bos_token") ||
                 absl::StrContains(jinja, kBeginOfText);
  out.trims_content = jinja.empty() || Trims(jinja);
  return out;
}

// Removes white space as Python's str.strip does (which knows four separators more than Unicode's
// White_Space).
std::string Trimmed(absl::string_view text) {
  const auto is_space = [](char32_t c) { return IsWhitespace(c) || (c >= 0x1C && c <= 0x1F); };
  std::string valid;
  AppendValidUtf8(text, /*flush=*/true, &valid);
  size_t begin = 0, end = valid.size();
  for (size_t next = begin; begin < end && is_space(NextCodePoint(valid, &next));) begin = next;
  while (end > begin) {
    const size_t previous = PreviousCharStart(valid, end);
    size_t position = previous;
    if (!is_space(NextCodePoint(valid, &position))) break;
    end = previous;
  }
  return valid.substr(begin, end - begin);
}

absl::Status CheckRole(absl::string_view role, size_t index) {
  const bool good = std::all_of(role.begin(), role.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
  });
  if (!role.empty() && good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("chat message ", index, ": the role \"", role,
                   "\" must be made of letters, digits, '_', '.' and '-' (system, user, ...)"));
}

// Appends one message in the format's way; `open` leaves it without an end, for the model to go on.
void AppendMessage(ChatFormat format, const std::string& role, const std::string& content,
                   bool open, std::vector<ChatPiece>* pieces) {
  const auto marker = [&](absl::string_view name) { pieces->push_back({std::string(name), true}); };
  const auto text = [&](std::string t) { pieces->push_back({std::move(t), false}); };
  if (format == ChatFormat::kChatML) {
    marker(kImStart);
    text(absl::StrCat(role, "\n", content));
    if (open) return;
    marker(kImEnd);
    text("\n");
  } else {
    marker(kHeaderStart);
    text(role);
    marker(kHeaderEnd);
    text(absl::StrCat("\n\n", content));
    if (!open) marker(kTurnEnd);
  }
}

// The id of a marker piece, or an error that says what to do.
absl::StatusOr<int32_t> MarkerId(const Tokenizer& tokenizer, ChatFormat format,
                                 const std::string& marker) {
  if (marker.empty()) {
    if (tokenizer.bos_id() >= 0) return tokenizer.bos_id();
    const auto begin = tokenizer.Find(kBeginOfText);
    if (format == ChatFormat::kLlama3 && begin.has_value()) return *begin;
    return absl::FailedPreconditionError(
        "the chat template begins with BOS, but the tokenizer names no BOS (bos_token in "
        "tokenizer_config.json)");
  }
  const auto id = tokenizer.Find(marker);
  if (id.has_value()) return *id;
  return absl::FailedPreconditionError(
      absl::StrCat("the chat format ", ChatFormatName(format), " needs the token ", marker,
                   ", which the tokenizer does not have; ", kWhatToSet));
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
  }
  return "";
}

absl::StatusOr<ChatFormat> ParseChatFormat(absl::string_view name) {
  for (const ChatFormat format : {ChatFormat::kNone, ChatFormat::kChatML, ChatFormat::kLlama3}) {
    if (name == ChatFormatName(format)) return format;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown chat format \"", name, "\"; ", kWhatToSet));
}

absl::StatusOr<ChatTemplate> MakeChatTemplate(absl::string_view jinja,
                                              absl::string_view override_format) {
  const bool is_chatml = absl::StrContains(jinja, kImStart);
  const bool is_llama3 = absl::StrContains(jinja, kHeaderStart);
  ChatFormat format = is_chatml ? ChatFormat::kChatML : ChatFormat::kLlama3;
  if (!override_format.empty() && override_format != "auto") {
    ASSIGN_OR_RETURN(format, ParseChatFormat(override_format));
  } else if (jinja.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the model has no chat template; ", kWhatToSet));
  } else if (is_chatml == is_llama3) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the model's chat template is ", is_chatml ? "ambiguous" : "of an unknown kind",
        " (expected one with ", kImStart, " or with ", kHeaderStart, "); ", kWhatToSet));
  }
  switch (format) {
    case ChatFormat::kChatML:
      return ChatMlTemplate(is_chatml ? jinja : "");
    case ChatFormat::kLlama3:
      return Llama3Template(is_llama3 ? jinja : "");
    case ChatFormat::kNone:
      break;
  }
  return ChatTemplate();
}

absl::StatusOr<std::vector<ChatPiece>> RenderChat(const ChatTemplate& chat_template,
                                                  absl::Span<const ChatMessage> messages,
                                                  bool add_generation_prompt) {
  if (messages.empty()) return absl::InvalidArgumentError("a chat without messages");
  for (size_t i = 0; i < messages.size(); ++i) RETURN_IF_ERROR(CheckRole(messages[i].role, i));
  const auto content = [&](const ChatMessage& m) {
    return chat_template.trims_content ? Trimmed(m.content) : m.content;
  };
  std::vector<ChatPiece> pieces;
  if (chat_template.format == ChatFormat::kNone) {
    std::string text;
    for (const ChatMessage& m : messages)
      absl::StrAppend(&text, text.empty() ? "" : "\n", m.content);
    pieces.push_back({std::move(text), false});
    return pieces;
  }
  if (chat_template.adds_bos) pieces.push_back({"", true});
  const std::string& prefix = chat_template.system_prefix;
  const bool has_system = messages[0].role == "system";
  if (!has_system && !(prefix.empty() && chat_template.default_system.empty())) {
    AppendMessage(chat_template.format, "system", prefix + chat_template.default_system, false,
                  &pieces);
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string before = i == 0 && has_system ? prefix : "";
    AppendMessage(chat_template.format, messages[i].role, before + content(messages[i]), false,
                  &pieces);
  }
  if (add_generation_prompt) AppendMessage(chat_template.format, "assistant", "", true, &pieces);
  return pieces;
}

absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                const ChatTemplate& chat_template,
                                                absl::Span<const ChatMessage> messages,
                                                bool add_generation_prompt) {
  ASSIGN_OR_RETURN(const auto pieces, RenderChat(chat_template, messages, add_generation_prompt));
  if (chat_template.format == ChatFormat::kNone) {
    EncodeOptions options;
    options.parse_special = false;
    return tokenizer.Encode(pieces[0].text, options);
  }
  std::vector<EncodePiece> encode_pieces;
  bool all_special = true;  // otherwise a marker in a content would be found as an added token
  for (const ChatPiece& piece : pieces) {
    if (!piece.is_marker) {
      encode_pieces.push_back({piece.text, -1});
      continue;
    }
    ASSIGN_OR_RETURN(const int32_t id, MarkerId(tokenizer, chat_template.format, piece.text));
    all_special = all_special && tokenizer.IsSpecial(id);
    encode_pieces.push_back({"", id});
  }
  return tokenizer.EncodePieces(encode_pieces, /*parse_added=*/all_special);
}

std::vector<int32_t> ChatStopIds(const Tokenizer& tokenizer, ChatFormat format) {
  std::vector<int32_t> ids;
  const auto add = [&](int32_t id) {
    if (id >= 0 && std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  };
  if (format == ChatFormat::kChatML) add(tokenizer.Find(kImEnd).value_or(-1));
  if (format == ChatFormat::kLlama3) add(tokenizer.Find(kTurnEnd).value_or(-1));
  add(tokenizer.eos_id());
  return ids;
}

}  // namespace stretto::engine
