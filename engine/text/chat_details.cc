// What a model's template says of itself, read from its text without running it.
#include "engine/text/chat_details.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/types/optional.h"

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

// A date of the clock that a template writes between its literals; nothing for other code.
absl::string_view DateOf(absl::string_view name) {
  if (name == "today") return kChatDate;
  return name == "yesterday" ? kChatDayBefore : "";
}

// The literals and dates that are put together behind `default_system_message = `; nothing where
// there are others. Empty: the template has no such message.
absl::optional<std::string> DefaultSystemOfMistral(absl::string_view jinja) {
  constexpr absl::string_view kBegin = "default_system_message = ";
  const size_t at = jinja.find(kBegin);
  if (at == kNotFound) return std::string();
  absl::string_view rest = jinja.substr(at + kBegin.size());
  std::string message;
  do {
    rest = absl::StripLeadingAsciiWhitespace(rest);
    const char quote = rest.empty() ? '\0' : rest[0];
    size_t end = 1;
    if (quote == '"' || quote == '\'') {
      while (end < rest.size() && rest[end] != quote) end += rest[end] == '\\' ? 2 : 1;
      if (end >= rest.size()) return absl::nullopt;
      message += Unescaped(rest.substr(1, end - 1));
      ++end;
    } else {
      end = rest.find_first_of(" +~%");
      const absl::string_view date = DateOf(rest.substr(0, end));
      if (end == kNotFound || date.empty() || !Has(jinja, "\"%Y-%m-%d\"")) return absl::nullopt;
      absl::StrAppend(&message, date);
    }
    rest = absl::StripLeadingAsciiWhitespace(rest.substr(end));
  } while (absl::ConsumePrefix(&rest, "+") || absl::ConsumePrefix(&rest, "~"));
  if (!absl::StartsWith(rest, "%}") && !absl::StartsWith(rest, "-%}")) return absl::nullopt;
  return message;
}

ChatTemplate MistralV7Template(absl::string_view jinja) {
  ChatTemplate out = MistralTemplate(jinja);
  out.format = ChatFormat::kMistralV7;
  out.default_system = DefaultSystemOfMistral(jinja).value_or("");
  if (jinja.empty()) {
    out.inst_begin = "[INST]";
    out.answer_begin = "";
    out.trims_answers = false;
    return out;
  }
  ReadLiteral(jinja, "[SYSTEM_PROMPT]", &out.system_begin);
  ReadLiteral(jinja, "[/SYSTEM_PROMPT]", &out.system_end);
  return out;
}

ChatTemplate SmolLM3Template(absl::string_view jinja, ChatFormat format) {
  ChatTemplate out;
  out.format = format;
  out.default_system_nothink = out.default_system =
      "You are a helpful AI assistant named SmolLM, trained by Hugging Face.";
  if (jinja.empty()) return out;
  // One literal behind the other: with thinking, and without.
  constexpr absl::string_view kBegin = "{{- \"", kEnd = "\\n\\n\"";
  const size_t at = jinja.find("elif reasoning_mode == \"/think\"");
  const size_t first = at == kNotFound ? at : jinja.find(kBegin, at);
  if (first == kNotFound) return out;
  out.default_system = Unescaped(Between(jinja, kBegin, kEnd, first));
  out.default_system_nothink = Unescaped(Between(jinja, kBegin, kEnd, first + 1));
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

// Zephyr's users end with EOS; other families use its markers without.
bool IsZephyr(absl::string_view jinja) {
  const absl::string_view user = Between(jinja, "<|user|>", "}}");
  return Has(user, "content") && Has(user, "eos_token") && !Has(jinja, "<|end|>");
}

bool IsMistralV7(absl::string_view jinja) {
  // Others of its users write thoughts between markers.
  return Has(jinja, "[SYSTEM_PROMPT]") && !Has(jinja, "[THINK]") &&
         DefaultSystemOfMistral(jinja).has_value();
}

bool IsSmolLM3(absl::string_view jinja) {
  return Has(jinja, kImStart) && Has(jinja, "Reasoning Mode: ") && Has(jinja, "/system_override") &&
         Has(jinja, "strftime_now(\"%d %B %Y\")");
}

}  // namespace

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
    case ChatFormat::kMistralV7:
      return MistralV7Template(jinja);
    case ChatFormat::kSmolLM3:
    case ChatFormat::kSmolLM3NoThink:
      return SmolLM3Template(jinja, format);
    case ChatFormat::kZephyr:
    case ChatFormat::kNone:
      break;
  }
  ChatTemplate out;
  out.format = format;
  return out;
}

std::vector<ChatFormat> FamiliesOf(absl::string_view jinja) {
  std::vector<ChatFormat> found;
  const auto add = [&found](ChatFormat format, bool is) {
    if (is) found.push_back(format);
  };
  if (IsSmolLM3(jinja)) return {ChatFormat::kSmolLM3};
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
  add(ChatFormat::kMistralV7, has_inst && !has_sys && IsMistralV7(jinja));
  return found;
}
}  // namespace stretto::engine
