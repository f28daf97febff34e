#include "engine/text/normalizer.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "engine/text/unicode_norm.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

void Strip(bool left, bool right, std::string* text, bool* at_start) {
  size_t begin = 0, end = text->size();
  while (left && begin < end) {
    size_t next = begin;
    if (!IsWhitespace(NextCodePoint(*text, &next))) break;
    begin = next;
  }
  while (right && end > begin) {
    const size_t previous = PreviousCharStart(*text, end);
    size_t position = previous;
    if (!IsWhitespace(NextCodePoint(*text, &position))) break;
    end = previous;
  }
  if (begin > 0) *at_start = false;
  *text = text->substr(begin, end - begin);
}

}  // namespace

absl::StatusOr<JsonPattern> ReadPattern(const JsonNode& node) {
  ASSIGN_OR_RETURN(const JsonNode pattern, node.Object("pattern"));
  JsonPattern out;
  out.is_regex = pattern.Has("Regex");
  if (!out.is_regex && !pattern.Has("String")) {
    return pattern.Error("expected {\"String\": ...} or {\"Regex\": ...}");
  }
  ASSIGN_OR_RETURN(out.text, pattern.String(out.is_regex ? "Regex" : "String"));
  if (!out.is_regex && out.text.empty()) return pattern.Error("the string to look for is empty");
  return out;
}

absl::StatusOr<Normalizer> Normalizer::FromJson(const JsonNode& node) {
  Normalizer out;
  RETURN_IF_ERROR(Append(node, 0, &out.steps_));
  return out;
}

absl::Status Normalizer::Append(const JsonNode& node, int depth, std::vector<Step>* steps) {
  if (depth > kMaxSequenceDepth) return node.Error("Sequence is nested too deeply");
  ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const auto children, node.Array("normalizers"));
    for (const JsonNode& child : children) RETURN_IF_ERROR(Append(child, depth + 1, steps));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(Step step, MakeStep(node, type));
  steps->push_back(std::move(step));
  return absl::OkStatus();
}

absl::StatusOr<Normalizer::Step> Normalizer::MakeStep(const JsonNode& node,
                                                      const std::string& type) {
  Step step{};
  if (type == "NFC") {
    step.kind = Kind::kNfc;
  } else if (type == "NFD") {
    step.kind = Kind::kNfd;
  } else if (type == "NFKC") {
    step.kind = Kind::kNfkc;
  } else if (type == "NFKD") {
    step.kind = Kind::kNfkd;
  } else if (type == "Lowercase") {
    step.kind = Kind::kLowercase;
  } else if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else if (type == "Prepend") {
    step.kind = Kind::kPrepend;
    ASSIGN_OR_RETURN(step.content, node.String("prepend"));
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    ASSIGN_OR_RETURN(step.left, node.BoolOr("strip_left", true));
    ASSIGN_OR_RETURN(step.right, node.BoolOr("strip_right", true));
  } else if (type == "Replace") {
    ASSIGN_OR_RETURN(JsonPattern pattern, ReadPattern(node));
    ASSIGN_OR_RETURN(step.content, node.String("content"));
    step.kind = pattern.is_regex ? Kind::kReplaceRegex : Kind::kReplaceLiteral;
    if (pattern.is_regex) {
      auto regex = Regex::Compile(pattern.text);
      if (!regex.ok()) return Annotate(regex.status(), node.where());
      step.regex = *std::move(regex);
    }
    step.pattern = std::move(pattern.text);
  } else {
    return absl::UnimplementedError(absl::StrCat(
        node.where(), ": the normalizer \"", type,
        "\" is not supported; supported are NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, "
        "Strip, ByteLevel and Sequence"));
  }
  return step;
}

absl::Status Normalizer::Apply(std::string* text, bool* at_start) const {
  for (const Step& step : steps_) RETURN_IF_ERROR(ApplyStep(step, text, at_start));
  return absl::OkStatus();
}

absl::Status Normalizer::ApplyStep(const Step& step, std::string* text, bool* at_start) {
  switch (step.kind) {
    case Kind::kNfc:
      *text = Normalize(NormalForm::kNfc, *text);
      break;
    case Kind::kNfd:
      *text = Normalize(NormalForm::kNfd, *text);
      break;
    case Kind::kNfkc:
      *text = Normalize(NormalForm::kNfkc, *text);
      break;
    case Kind::kNfkd:
      *text = Normalize(NormalForm::kNfkd, *text);
      break;
    case Kind::kLowercase:
      *text = Lowercase(*text);
      break;
    case Kind::kPrepend:
      if (!text->empty()) text->insert(0, step.content);
      break;
    case Kind::kReplaceLiteral:
      if (step.content.empty() && absl::StartsWith(*text, step.pattern)) *at_start = false;
      absl::StrReplaceAll({{step.pattern, step.content}}, text);
      break;
    case Kind::kReplaceRegex: {
      std::string out;
      size_t previous = 0;
      RETURN_IF_ERROR(step.regex->ForEachMatch(*text, [&](size_t begin, size_t end) {
        if (begin == 0 && end > 0 && step.content.empty()) *at_start = false;
        out.append(*text, previous, begin - previous).append(step.content);
        previous = end;
      }));
      *text = out.append(*text, previous, std::string::npos);
      break;
    }
    case Kind::kStrip:
      Strip(step.left, step.right, text, at_start);
      break;
    case Kind::kByteLevel: {
      std::string out;
      AppendByteLevel(*text, &out);
      *text = std::move(out);
      break;
    }
  }
  return absl::OkStatus();
}

}  // namespace stretto::engine
