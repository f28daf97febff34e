#include "engine/text/chat_template.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/printable.h"
#include "base/status.h"

namespace stretto::engine {
namespace {

constexpr absl::string_view kImStart = "<|im_start|>", kImEnd = "<|im_end|>";
constexpr absl::string_view kHeaderStart = "<|start_header_id|>",
                            kBeginOfText = "<|begin_of_text|>";
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

// The template without white space but what an escape means.
std::string Compact(absl::string_view jinja) {
  return absl::StrReplaceAll(jinja, {{" ", ""}, {"\n", "\\n"}});
}

bool Has(absl::string_view jinja, absl::string_view text) { return absl::StrContains(jinja, text); }

ChatTemplate ChatMlTemplate(absl::string_view jinja, ChatFormat format) {
  ChatTemplate out;
  out.format = format;
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

ChatTemplate QwenTemplate(absl::string_view jinja, ChatFormat format) {
  ChatTemplate out;
  out.format = format;
  const std::string compact = Compact(jinja);
  out.opens_thinking = format == ChatFormat::kQwen3 && !Has(jinja, "enable_thinking") &&
                       Has(compact, "<|im_start|>assistant\\n<think>\\n");
  return out;
}

ChatTemplate Phi3Template(absl::string_view jinja) {
  ChatTemplate out;
  out.format = ChatFormat::kPhi3;
  out.adds_bos = Has(jinja, "bos_token");
  const std::string compact = Compact(jinja);
  out.ends_with_eos = Has(compact, "else%}{{eos_token") || Has(compact, "else-%}{{-eos_token") ||
                      Has(compact, "else%}{{-eos_token");
  return out;
}

ChatTemplate GemmaTemplate(absl::string_view jinja) {
  ChatTemplate out;
  out.format = ChatFormat::kGemma;
  out.adds_bos = true;
  out.trims_content = true;
  out.takes_system = jinja.empty() || !Has(jinja, "System role not supported");
  return out;
}

// The white space that stands with `marker` in a string literal of its own, as in ' [/INST]'.
void ReadLiteral(absl::string_view jinja, absl::string_view marker, std::string* literal) {
  for (size_t at = jinja.find(marker); at != kNotFound; at = jinja.find(marker, at + 1)) {
    size_t begin = at, end = at + marker.size();
    while (begin > 0 && jinja[begin - 1] == ' ') --begin;
    while (end < jinja.size() && jinja[end] == ' ') ++end;
    const char before = begin > 0 ? jinja[begin - 1] : '\0';
    const char after = end < jinja.size() ? jinja[end] : '\0';
    if ((before == '\'' || before == '"') && before == after) {
      *literal = std::string(jinja.substr(begin, end - begin));
      return;
    }
  }
}

ChatTemplate MistralTemplate(absl::string_view jinja) {
  ChatTemplate out;
  out.format = ChatFormat::kMistral;
  out.adds_bos = true;
  out.trims_answers = true;
  if (jinja.empty()) return out;
  ReadLiteral(jinja, "[INST]", &out.inst_begin);
  ReadLiteral(jinja, "[/INST]", &out.inst_end);
  const std::string flat = absl::StrReplaceAll(jinja, {{"\"", "'"}, {" + ", "+"}, {" | ", "|"}});
  out.answer_begin = Has(flat, "' '+message") ? " " : "";
  out.answer_end = Has(flat, "eos_token+' '") ? " " : "";
  out.trims_answers =
      Has(flat, "['content']|trim+eos_token") || Has(flat, "content|trim+eos_token");
  out.takes_system = Has(flat, "'system'");
  out.system_in_last = Has(flat, "loop.last and system_message");
  return out;
}

ChatTemplate DeepSeekTemplate(absl::string_view jinja) {
  ChatTemplate out;
  out.format = ChatFormat::kDeepSeekR1;
  out.adds_bos = true;
  out.opens_thinking = jinja.empty() || Has(Compact(jinja), "<｜Assistant｜><think>\\n");
  return out;
}

ChatTemplate Llama2Template() {
  ChatTemplate out;
  out.format = ChatFormat::kLlama2;
  out.trims_content = true;
  return out;
}

ChatTemplate DetailsOf(ChatFormat format, absl::string_view jinja) {
  switch (format) {
    case ChatFormat::kChatML:
    case ChatFormat::kPhi4:
      return ChatMlTemplate(jinja, format);
    case ChatFormat::kQwen3:
    case ChatFormat::kQwen3NoThink:
      return QwenTemplate(jinja, format);
    case ChatFormat::kLlama3:
      return Llama3Template(jinja);
    case ChatFormat::kPhi3:
      return Phi3Template(jinja);
    case ChatFormat::kGemma:
      return GemmaTemplate(jinja);
    case ChatFormat::kMistral:
      return MistralTemplate(jinja);
    case ChatFormat::kLlama2:
      return Llama2Template();
    case ChatFormat::kDeepSeekR1:
      return DeepSeekTemplate(jinja);
    case ChatFormat::kZephyr:
    case ChatFormat::kNone:
      break;
  }
  ChatTemplate out;
  out.format = format;
  return out;
}

// Zephyr's users end with EOS; other families use its markers without.
bool IsZephyr(absl::string_view jinja) {
  const absl::string_view user = Between(jinja, "<|user|>", "}}");
  return Has(user, "content") && Has(user, "eos_token") && !Has(jinja, "<|end|>");
}

// The families whose markers the template has. None, or several: it is of another kind.
std::vector<ChatFormat> FamiliesOf(absl::string_view jinja) {
  std::vector<ChatFormat> found;
  const auto add = [&found](ChatFormat format, bool is) {
    if (is) found.push_back(format);
  };
  if (Has(jinja, kImStart)) {
    // A date in a ChatML prompt is of a family that isn't known.
    if (Has(jinja, "strftime_now")) return {};
    const bool is_phi4 = Has(jinja, "<|im_sep|>"), thinks = Has(jinja, "</think>");
    add(ChatFormat::kPhi4, is_phi4);
    add(ChatFormat::kQwen3, !is_phi4 && thinks);
    add(ChatFormat::kChatML, !is_phi4 && !thinks);
  }
  add(ChatFormat::kLlama3, Has(jinja, kHeaderStart));
  add(ChatFormat::kGemma, Has(jinja, "<start_of_turn>"));
  add(ChatFormat::kPhi3, Has(jinja, "<|end|>") && (Has(jinja, "<|user|>") || Has(jinja, "'<|'")));
  add(ChatFormat::kZephyr, IsZephyr(jinja));
  add(ChatFormat::kDeepSeekR1, Has(jinja, "<｜User｜>") && Has(jinja, "<｜Assistant｜>"));
  const bool has_inst = Has(jinja, "[INST]"), has_sys = Has(jinja, "<<SYS>>");
  add(ChatFormat::kLlama2, has_inst && has_sys);
  add(ChatFormat::kMistral, has_inst && !has_sys && !Has(jinja, "[SYSTEM_PROMPT]"));
  return found;
}

constexpr ChatFormat kAllFormats[] = {
    ChatFormat::kNone,         ChatFormat::kChatML,  ChatFormat::kLlama3, ChatFormat::kQwen3,
    ChatFormat::kQwen3NoThink, ChatFormat::kPhi4,    ChatFormat::kPhi3,   ChatFormat::kGemma,
    ChatFormat::kLlama2,       ChatFormat::kMistral, ChatFormat::kZephyr, ChatFormat::kDeepSeekR1};

std::string WhatToSet() {
  return absl::StrCat("set model.chat_format: ", ChatFormatNames("|"),
                      " (a flag: --chat-format); raw prompts and completions need none");
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
    const ChatFormat family = format == ChatFormat::kQwen3NoThink ? ChatFormat::kQwen3 : format;
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
