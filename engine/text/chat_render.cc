// How each chat format writes a conversation.
#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "engine/text/chat_template.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {
constexpr absl::string_view kThinkEnd = "</think>";

// Removes white space as Python's str.strip and rstrip do (which know four separators more than
// Unicode's White_Space).
std::string Trimmed(absl::string_view text, bool at_begin = true) {
  const auto is_space = [](char32_t c) { return IsWhitespace(c) || (c >= 0x1C && c <= 0x1F); };
  std::string valid;
  AppendValidUtf8(text, /*flush=*/true, &valid);
  size_t begin = 0, end = valid.size();
  for (size_t next = begin; at_begin && begin < end && is_space(NextCodePoint(valid, &next));)
    begin = next;
  while (end > begin) {
    const size_t previous = PreviousCharStart(valid, end);
    size_t position = previous;
    if (!is_space(NextCodePoint(valid, &position))) break;
    end = previous;
  }
  return valid.substr(begin, end - begin);
}

absl::string_view WithoutNewlines(absl::string_view text, bool front, bool back) {
  while (front && absl::ConsumePrefix(&text, "\n")) {
  }
  while (back && absl::ConsumeSuffix(&text, "\n")) {
  }
  return text;
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

class Renderer {
 public:
  Renderer(const ChatTemplate& chat, absl::Span<const ChatMessage> messages, bool generate)
      : chat_(chat), messages_(messages), generate_(generate) {}

  absl::StatusOr<std::vector<ChatPiece>> Run() {
    if (messages_.empty()) return absl::InvalidArgumentError("a chat without messages");
    for (size_t i = 0; i < messages_.size(); ++i) {
      RETURN_IF_ERROR(CheckRole(messages_[i].role, i));
    }
    if (chat_.adds_bos) Add(ChatPiece::Kind::kBos);
    switch (chat_.format) {
      case ChatFormat::kNone:
        RenderPlain();
        break;
      case ChatFormat::kChatML:
      case ChatFormat::kLlama3:
        RenderWithSystem();
        break;
      case ChatFormat::kQwen3:
      case ChatFormat::kQwen3NoThink:
        RenderQwen3();
        break;
      case ChatFormat::kPhi4:
      case ChatFormat::kPhi3:
      case ChatFormat::kZephyr:
        RETURN_IF_ERROR(RenderTurns());
        break;
      case ChatFormat::kDeepSeekR1:
        RETURN_IF_ERROR(RenderDeepSeek());
        break;
      case ChatFormat::kSmolLM3:
      case ChatFormat::kSmolLM3NoThink:
        RETURN_IF_ERROR(RenderSmolLM3());
        break;
      case ChatFormat::kMistralV7:
        RETURN_IF_ERROR(RenderMistralV7());
        break;
      case ChatFormat::kGemma:
      case ChatFormat::kLlama2:
      case ChatFormat::kMistral:
        RETURN_IF_ERROR(RenderAlternating());
        break;
    }
    return std::move(pieces_);
  }

 private:
  using Kind = ChatPiece::Kind;

  void Add(Kind kind, absl::string_view text = "") { pieces_.push_back({std::string(text), kind}); }
  void Marker(absl::string_view name) { Add(Kind::kMarker, name); }
  void Text(absl::string_view text) { Add(Kind::kText, text); }

  std::string Content(const ChatMessage& m) const {
    return chat_.trims_content ? Trimmed(m.content) : m.content;
  }
  absl::Status Refuse(size_t index, absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("chat message ", index, " is of ",
                                                   messages_[index].role, ": the chat format ",
                                                   ChatFormatName(chat_.format), " ", what));
  }
  // The formats that have three roles and no others.
  absl::Status CheckKnownRole(size_t index) const {
    const std::string& role = messages_[index].role;
    if (role == "system" || role == "user" || role == "assistant") return absl::OkStatus();
    return Refuse(index, "knows system, user and assistant");
  }

  void RenderPlain() {
    std::string text;
    for (const ChatMessage& m : messages_) {
      absl::StrAppend(&text, text.empty() ? "" : "\n", m.content);
    }
    Text(text);
  }

  // One message; `open` leaves it without an end, for the model to go on.
  void Turn(absl::string_view role, absl::string_view content, bool open = false) {
    if (chat_.format == ChatFormat::kLlama3) {
      Marker("<|start_header_id|>");
      Text(role);
      Marker("<|end_header_id|>");
      Text(absl::StrCat("\n\n", content));
      if (!open) Marker("<|eot_id|>");
    } else if (chat_.format == ChatFormat::kPhi4) {
      Marker("<|im_start|>");
      Text(role);
      Marker("<|im_sep|>");
      Text(content);
      if (!open) Marker("<|im_end|>");
    } else if (chat_.format == ChatFormat::kPhi3 || chat_.format == ChatFormat::kZephyr) {
      const bool is_phi = chat_.format == ChatFormat::kPhi3;
      Add(is_phi ? Kind::kMarker : Kind::kToken, absl::StrCat("<|", role, "|>"));
      Text(absl::StrCat("\n", content));
      if (open) return;
      is_phi ? Marker("<|end|>") : Add(Kind::kEos);
      Text("\n");
    } else {
      Marker("<|im_start|>");
      Text(absl::StrCat(role, "\n", content));
      if (open) return;
      Marker("<|im_end|>");
      Text("\n");
    }
  }

  void RenderWithSystem() {
    const std::string& prefix = chat_.system_prefix;
    const bool has_system = messages_[0].role == "system";
    if (!has_system && !(prefix.empty() && chat_.default_system.empty())) {
      Turn("system", prefix + chat_.default_system);
    }
    for (size_t i = 0; i < messages_.size(); ++i) {
      const std::string before = i == 0 && has_system ? prefix : "";
      Turn(messages_[i].role, before + Content(messages_[i]));
    }
    if (generate_) Turn("assistant", "", /*open=*/true);
  }

  absl::Status RenderTurns() {
    for (size_t i = 0; i < messages_.size(); ++i) {
      RETURN_IF_ERROR(CheckKnownRole(i));
      Turn(messages_[i].role, Content(messages_[i]));
    }
    if (generate_) Turn("assistant", "", /*open=*/true);
    if (!generate_ && chat_.ends_with_eos) Add(Kind::kEos);
    return absl::OkStatus();
  }

  // What has been thought is told again only behind the last question.
  void RenderQwen3() {
    size_t last_user = 0;
    for (size_t i = 0; i < messages_.size(); ++i) {
      if (messages_[i].role == "user") last_user = i;
    }
    for (size_t i = 0; i < messages_.size(); ++i) {
      const ChatMessage& m = messages_[i];
      if (m.role != "assistant") {
        Turn(m.role, m.content);
        continue;
      }
      absl::string_view answer = m.content, thought;
      const size_t end = answer.rfind(kThinkEnd);
      if (end != absl::string_view::npos) {
        thought = answer.substr(0, answer.find(kThinkEnd));
        thought = WithoutNewlines(thought, false, true);
        const size_t begin = thought.rfind("<think>");
        if (begin != absl::string_view::npos) thought.remove_prefix(begin + 7);
        thought = WithoutNewlines(thought, true, true);
        answer = WithoutNewlines(answer.substr(end + kThinkEnd.size()), true, false);
      }
      const bool is_told = i > last_user && (i + 1 == messages_.size() || !thought.empty());
      if (!is_told) {
        Turn("assistant", answer);
        continue;
      }
      Marker("<|im_start|>");
      Text("assistant\n");
      Add(Kind::kToken, "<think>");
      Text(absl::StrCat("\n", thought, "\n"));
      Add(Kind::kToken, kThinkEnd);
      Text(absl::StrCat("\n\n", WithoutNewlines(answer, true, false)));
      Marker("<|im_end|>");
      Text("\n");
    }
    if (!generate_) return;
    Turn("assistant", "", /*open=*/true);
    if (chat_.format == ChatFormat::kQwen3NoThink || chat_.opens_thinking) {
      Add(Kind::kToken, "<think>");
      Text(chat_.format == ChatFormat::kQwen3NoThink ? "\n\n" : "\n");
    }
    if (chat_.format == ChatFormat::kQwen3NoThink) {
      Add(Kind::kToken, kThinkEnd);
      Text("\n\n");
    }
  }

  // The system message stands by itself behind BOS; thoughts of earlier answers are left out.
  absl::Status RenderDeepSeek() {
    for (size_t i = 0; i < messages_.size(); ++i) {
      RETURN_IF_ERROR(CheckKnownRole(i));
      if (messages_[i].role == "system") Text(messages_[i].content);
    }
    for (const ChatMessage& m : messages_) {
      if (m.role == "user") {
        Marker("<｜User｜>");
        Text(m.content);
      } else if (m.role == "assistant") {
        const size_t end = absl::string_view(m.content).rfind(kThinkEnd);
        Marker("<｜Assistant｜>");
        Text(end == std::string::npos ? m.content : m.content.substr(end + kThinkEnd.size()));
        Add(Kind::kEos);
      }
    }
    if (!generate_) return absl::OkStatus();
    Marker("<｜Assistant｜>");
    if (chat_.opens_thinking) {
      Add(Kind::kToken, "<think>");
      Text("\n");
    }
    return absl::OkStatus();
  }

  // The system message says what the model knows and whether it thinks; words in it turn that on or
  // off, or leave everything else out.
  absl::Status RenderSmolLM3() {
    const bool has_system = messages_[0].role == "system";
    const std::string system = has_system ? messages_[0].content : "";
    std::string head, tail;
    bool thinks = chat_.format == ChatFormat::kSmolLM3;
    if (absl::StrContains(system, "/no_think")) {
      thinks = false;
    } else if (absl::StrContains(system, "/think")) {
      thinks = true;
    }
    std::string custom = absl::StrReplaceAll(system, {{"/no_think", ""}});
    custom = Trimmed(absl::StrReplaceAll(custom, {{"/think", ""}}), /*at_begin=*/false);
    if (absl::StrContains(system, "/system_override")) {
      custom = absl::StrReplaceAll(custom, {{"/system_override", ""}});
      custom = Trimmed(custom, /*at_begin=*/false);
    } else {
      head = absl::StrCat(
          "## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: ", kChatDateInWords,
          "\nReasoning Mode: ", thinks ? "/think" : "/no_think", "\n\n## Custom Instructions\n\n");
      tail = "\n\n";
    }
    Turn("system", head, /*open=*/true);
    if (custom.empty() && !head.empty()) {
      TemplateText(thinks ? chat_.default_system : chat_.default_system_nothink);
    } else {
      Text(custom);
    }
    Text(tail);
    Marker("<|im_end|>");
    Text("\n");
    for (size_t i = 0; i < messages_.size(); ++i) {
      RETURN_IF_ERROR(CheckKnownRole(i));
      if (messages_[i].role == "user") Turn("user", messages_[i].content);
      if (messages_[i].role != "assistant") continue;
      OpenSmolLM3(thinks);
      Text(WithoutNewlines(messages_[i].content, true, false));
      Marker("<|im_end|>");
      Text("\n");
    }
    if (generate_) OpenSmolLM3(thinks);
    return absl::OkStatus();
  }
  // The template's own words, in which a marker is one.
  void TemplateText(absl::string_view text) {
    while (!text.empty()) {
      const size_t begin = std::min(text.find("<think>"), text.find(kThinkEnd));
      Text(text.substr(0, begin));
      if (begin == absl::string_view::npos) return;
      text.remove_prefix(begin);
      const size_t size = text.find('>') + 1;
      Add(Kind::kToken, text.substr(0, size));
      text.remove_prefix(size);
    }
  }
  void OpenSmolLM3(bool thinks) {
    Turn("assistant", "", /*open=*/true);
    if (thinks) return;
    Add(Kind::kToken, "<think>");
    Text("\n\n");
    Add(Kind::kToken, kThinkEnd);
    Text("\n");
  }

  // In the order that they come; only the first place has a system message by default.
  absl::Status RenderMistralV7() {
    const auto system = [this](absl::string_view content) {
      Instruction(chat_.system_begin, "[SYSTEM_PROMPT]");
      Text(content);
      Instruction(chat_.system_end, "[/SYSTEM_PROMPT]");
    };
    if (messages_[0].role != "system" && !chat_.default_system.empty()) {
      system(chat_.default_system);
    }
    for (size_t i = 0; i < messages_.size(); ++i) {
      RETURN_IF_ERROR(CheckKnownRole(i));
      if (messages_[i].role == "system") {
        system(messages_[i].content);
      } else {
        AddAlternating(messages_[i], /*system=*/nullptr);
      }
    }
    return absl::OkStatus();
  }

  // Users and assistants in turn; the system message is a part of a user's.
  absl::Status RenderAlternating() {
    std::string system;
    size_t first = 0;
    if (messages_[0].role == "system") {
      if (!chat_.takes_system) return Refuse(0, "of this model takes no system message");
      system = messages_[0].content;
      first = 1;
      if (messages_.size() == 1) return Refuse(0, "needs a message of the user behind it");
    }
    size_t last_user = 0;
    for (size_t i = first; i < messages_.size(); ++i) {
      const bool is_user = (i - first) % 2 == 0;
      if (messages_[i].role != (is_user ? "user" : "assistant")) {
        return Refuse(i, absl::StrCat("expects the ", is_user ? "user" : "assistant",
                                      " here: both in turn, the user first, a system message "
                                      "before them"));
      }
      if (is_user) last_user = i;
    }
    for (size_t i = first; i < messages_.size(); ++i) {
      // Where it belongs to the last message, that must be the user's.
      const bool is_last = i + 1 == messages_.size();
      const bool has_system =
          first == 1 && (chat_.system_in_last ? i == last_user && is_last : i == first);
      AddAlternating(messages_[i], has_system ? &system : nullptr);
    }
    if (generate_ && chat_.format == ChatFormat::kGemma) {
      Marker("<start_of_turn>");
      Text("model\n");
    }
    return absl::OkStatus();
  }

  void AddAlternating(const ChatMessage& m, const std::string* system) {
    const bool is_user = m.role == "user";
    if (chat_.format == ChatFormat::kGemma) {
      const std::string before = system == nullptr ? "" : *system + "\n\n";
      Marker("<start_of_turn>");
      Text(absl::StrCat(is_user ? "user" : "model", "\n", before, Content(m)));
      Marker("<end_of_turn>");
      Text("\n");
    } else if (chat_.format == ChatFormat::kLlama2) {
      if (!is_user) {
        Text(absl::StrCat(" ", Content(m), " "));
        Add(Kind::kEos);
        return;
      }
      const std::string before =
          system == nullptr ? "" : absl::StrCat("<<SYS>>\n", *system, "\n<</SYS>>\n\n");
      Add(Kind::kBos);
      Instruction("[INST] ", "[INST]");
      Text(Trimmed(before + m.content));
      Instruction(" [/INST]", "[/INST]");
    } else if (is_user) {
      Instruction(chat_.inst_begin, "[INST]");
      Text(absl::StrCat(system == nullptr ? "" : *system + "\n\n", m.content));
      Instruction(chat_.inst_end, "[/INST]");
    } else {
      Text(absl::StrCat(chat_.answer_begin, chat_.trims_answers ? Trimmed(m.content) : m.content));
      Add(Kind::kEos);
      Text(chat_.answer_end);
    }
  }
  // A literal with the marker in it, which some tokenizers have as a token.
  void Instruction(absl::string_view literal, absl::string_view marker) {
    const size_t at = literal.find(marker);
    Text(literal.substr(0, at));
    Add(Kind::kToken, marker);
    Text(literal.substr(at + marker.size()));
  }

  const ChatTemplate& chat_;
  const absl::Span<const ChatMessage> messages_;
  const bool generate_;
  std::vector<ChatPiece> pieces_;
};

// Leaves out what a format writes behind the last message's content: the pieces end with it. As
// transformers, which goes by the text: white space around a content may have been removed.
absl::Status OpenLastMessage(const std::string& content, std::vector<ChatPiece>* pieces) {
  const std::string trimmed = Trimmed(content);
  if (trimmed.empty()) {
    return absl::InvalidArgumentError("the last chat message is empty: there is nothing to go on");
  }
  const auto is_end = [](const ChatPiece& piece) {
    return piece.kind != ChatPiece::Kind::kText || Trimmed(piece.text).empty();
  };
  std::string behind;
  for (; !pieces->empty() && is_end(pieces->back()); pieces->pop_back()) {
    behind.insert(0, pieces->back().text);
  }
  std::string all;
  for (const ChatPiece& piece : *pieces) all += piece.text;
  const size_t at = all.rfind(trimmed);
  if (at == std::string::npos || !Trimmed(all.substr(at + trimmed.size())).empty()) {
    return absl::InvalidArgumentError(
        "the last chat message isn't written as it is (what is thought in it is left out, or "
        "written anew), so that nothing can go on with it");
  }
  const bool is_whole = (all + behind).compare(at, content.size(), content) == 0;
  std::string& last = pieces->back().text;
  last.resize(last.size() - (all.size() - at - trimmed.size()));
  if (is_whole) last += content.substr(trimmed.size());
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<std::vector<ChatPiece>> RenderChat(const ChatTemplate& chat_template,
                                                  absl::Span<const ChatMessage> messages,
                                                  ChatEnd end) {
  ASSIGN_OR_RETURN(auto pieces, Renderer(chat_template, messages, end == ChatEnd::kAnswer).Run());
  if (end == ChatEnd::kOpenMessage) {
    RETURN_IF_ERROR(OpenLastMessage(messages.back().content, &pieces));
  }
  return pieces;
}
}  // namespace stretto::engine
