#include "engine/text/decoder.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "engine/text/normalizer.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

using Out = std::vector<std::string>;

std::string Replaced(const Regex& regex, absl::string_view token, const std::string& content) {
  std::string out;
  size_t previous = 0;
  // A search that exceeds its limits leaves the rest as it is; only a pattern made for that does.
  (void)regex.ForEachMatch(token, [&](size_t begin, size_t end) {
    absl::StrAppend(&out, token.substr(previous, begin - previous), content);
    previous = end;
  });
  absl::StrAppend(&out, token.substr(previous));
  return out;
}

// The bytes of a token in the byte-level alphabet; a token with any other character stands for
// itself.
std::string ByteLevelBytes(absl::string_view token) {
  std::string bytes;
  for (size_t i = 0; i < token.size();) {
    const int byte = ByteLevelByte(NextCodePoint(token, &i));
    if (byte < 0) return std::string(token);
    bytes.push_back(static_cast<char>(byte));
  }
  return bytes;
}

// The value of "<0xE4>", or -1.
int FallbackByte(absl::string_view token) {
  if (token.size() != 6 || !absl::StartsWith(token, "<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

class ByteLevelStage : public DecodeStage {
 public:
  void Push(absl::string_view token, Out* out) override {
    pending_ += ByteLevelBytes(token);
    std::string text;
    const size_t held = AppendValidUtf8(pending_, /*flush=*/false, &text);
    pending_.erase(0, pending_.size() - held);
    if (!text.empty()) out->push_back(std::move(text));
  }
  void Finish(Out* out) override {
    std::string text;
    AppendValidUtf8(pending_, /*flush=*/true, &text);
    pending_.clear();
    if (!text.empty()) out->push_back(std::move(text));
  }

 private:
  std::string pending_;  // the beginning of a character
};

class MetaspaceStage : public DecodeStage {
 public:
  MetaspaceStage(std::string mark, bool drop_first, bool fused)
      : mark_(std::move(mark)), drop_first_(drop_first), fused_(fused), first_(true) {}
  void Push(absl::string_view token, Out* out) override {
    const bool drop = drop_first_ && first_;
    first_ = fused_;  // of one fused token, every part is the first token
    out->push_back(absl::StrReplaceAll(token, {{mark_, drop ? "" : " "}}));
  }
  void Finish(Out*) override { first_ = true; }

 private:
  std::string mark_;
  bool drop_first_, fused_, first_;
};

class ReplaceStage : public DecodeStage {
 public:
  ReplaceStage(std::shared_ptr<const Regex> regex, std::string content)
      : regex_(std::move(regex)), content_(std::move(content)) {}
  void Push(absl::string_view token, Out* out) override {
    out->push_back(Replaced(*regex_, token, content_));
  }
  void Finish(Out*) override {}

 private:
  std::shared_ptr<const Regex> regex_;
  std::string content_;
};

// A run of byte tokens is text only if all of it is valid UTF-8; otherwise every byte of it is
// U+FFFD. So nothing of a run is certain before its end.
class ByteFallbackStage : public DecodeStage {
 public:
  void Push(absl::string_view token, Out* out) override {
    if (const int byte = FallbackByte(token); byte >= 0) {
      run_.push_back(static_cast<char>(byte));
      return;
    }
    Finish(out);
    out->emplace_back(token);
  }
  void Finish(Out* out) override {
    if (run_.empty()) return;
    if (IsValidUtf8(run_)) {
      out->push_back(run_);
    } else {
      std::string replacement;
      AppendUtf8(kReplacementChar, &replacement);
      for (size_t i = 0; i < run_.size(); ++i) out->push_back(replacement);
    }
    run_.clear();
  }

 private:
  std::string run_;
};

class FuseStage : public DecodeStage {
 public:
  void Push(absl::string_view token, Out* out) override { out->emplace_back(token); }
  void Finish(Out*) override {}
};

// Removes up to `start` times `content` from the front of every token and up to `stop` times from
// its end. Fused, all that comes is parts of one token.
class StripStage : public DecodeStage {
 public:
  StripStage(std::string content, size_t start, size_t stop, bool fused)
      : content_(std::move(content)), start_(start), stop_(stop), fused_(fused) {}
  void Push(absl::string_view token, Out* out) override {
    std::string text = held_ + std::string(token);
    held_.clear();
    while (at_front_ && !text.empty()) {
      if (cut_ == start_ || !absl::StartsWith(text, content_)) {
        at_front_ = false;
      } else {
        text.erase(0, content_.size());
        ++cut_;
      }
    }
    for (size_t i = 0; i < stop_ && absl::EndsWith(text, content_); ++i) {
      text.resize(text.size() - content_.size());
      held_ += content_;
    }
    if (!text.empty()) out->push_back(std::move(text));
    if (!fused_) Finish(out);
  }
  void Finish(Out*) override {
    held_.clear();
    at_front_ = true;
    cut_ = 0;
  }

 private:
  std::string content_;
  size_t start_, stop_;
  bool fused_;
  bool at_front_ = true;
  size_t cut_ = 0;
  std::string held_;
};

// Gives a step that works on whole tokens the one token that a fused stream is.
class HoldStage : public DecodeStage {
 public:
  explicit HoldStage(std::unique_ptr<DecodeStage> inner) : inner_(std::move(inner)) {}
  void Push(absl::string_view token, Out*) override { absl::StrAppend(&held_, token); }
  void Finish(Out* out) override {
    inner_->Push(held_, out);
    inner_->Finish(out);
    held_.clear();
  }

 private:
  std::unique_ptr<DecodeStage> inner_;
  std::string held_;
};

class JoinStage : public DecodeStage {
 public:
  void Push(absl::string_view token, Out* out) override {
    out->push_back(absl::StrCat(first_ ? "" : " ", token));
    first_ = false;
  }
  void Finish(Out*) override { first_ = true; }

 private:
  bool first_ = true;
};

}  // namespace

absl::StatusOr<Decoder> Decoder::FromJson(const JsonNode& node) {
  Decoder out;
  RETURN_IF_ERROR(Append(node, 0, &out.steps_));
  // An empty Sequence joins by nothing, a missing decoder by spaces.
  if (out.steps_.empty()) out.steps_.emplace_back();
  return out;
}

absl::Status Decoder::Append(const JsonNode& node, int depth, std::vector<Step>* steps) {
  if (depth > kMaxSequenceDepth) return node.Error("Sequence is nested too deeply");
  ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const auto children, node.Array("decoders"));
    for (const JsonNode& child : children) RETURN_IF_ERROR(Append(child, depth + 1, steps));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(Step step, MakeStep(node, type));
  steps->push_back(std::move(step));
  return absl::OkStatus();
}

absl::StatusOr<Decoder::Step> Decoder::MakeStep(const JsonNode& node, const std::string& type) {
  Step step;
  if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else if (type == "ByteFallback") {
    step.kind = Kind::kByteFallback;
  } else if (type == "Fuse") {
    step.kind = Kind::kFuse;
  } else if (type == "Strip") {
    return MakeStrip(node);
  } else if (type == "Metaspace") {
    step.kind = Kind::kMetaspace;
    ASSIGN_OR_RETURN(step.content, node.StringOr("replacement", "\u2581"));
    if (step.content.empty()) return node.Error("replacement is empty");
    ASSIGN_OR_RETURN(const bool add_prefix_space, node.BoolOr("add_prefix_space", true));
    ASSIGN_OR_RETURN(const std::string scheme,
                     node.StringOr("prepend_scheme", add_prefix_space ? "always" : "never"));
    step.drop_first = scheme != "never";
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    ASSIGN_OR_RETURN(const JsonPattern pattern, ReadPattern(node));
    ASSIGN_OR_RETURN(step.content, node.String("content"));
    auto regex = pattern.is_regex ? Regex::Compile(pattern.text) : Regex::Literal(pattern.text);
    if (!regex.ok()) return Annotate(regex.status(), node.where());
    step.regex = *std::move(regex);
  } else {
    return absl::UnimplementedError(absl::StrCat(
        node.where(), ": the decoder \"", type,
        "\" is not supported; supported are ByteLevel, Metaspace, Replace, ByteFallback, Fuse, "
        "Strip and Sequence"));
  }
  return step;
}

absl::StatusOr<Decoder::Step> Decoder::MakeStrip(const JsonNode& node) {
  Step step;
  step.kind = Kind::kStrip;
  ASSIGN_OR_RETURN(step.content, node.StringOr("content", " "));
  int64_t start = 0, stop = 0;
  ASSIGN_OR_RETURN(start, node.Int("start"));
  ASSIGN_OR_RETURN(stop, node.Int("stop"));
  if (start < 0 || stop < 0 || start > 1 << 20 || stop > 1 << 20) {
    return node.Error("start and stop must be between 0 and 1048576");
  }
  if (step.content.empty() || Utf8Length(step.content[0]) != step.content.size()) {
    return node.Error("content must be one character");
  }
  step.start = static_cast<size_t>(start);
  step.stop = static_cast<size_t>(stop);
  return step;
}

std::unique_ptr<DecodeStage> Decoder::MakeStage(const Step& step, bool fused) {
  std::unique_ptr<DecodeStage> stage;
  switch (step.kind) {
    case Kind::kMetaspace:
      return std::make_unique<MetaspaceStage>(step.content, step.drop_first, fused);
    case Kind::kStrip:
      return std::make_unique<StripStage>(step.content, step.start, step.stop, fused);
    case Kind::kFuse:
      return std::make_unique<FuseStage>();
    case Kind::kByteLevel:
      stage = std::make_unique<ByteLevelStage>();
      break;
    case Kind::kByteFallback:
      stage = std::make_unique<ByteFallbackStage>();
      break;
    case Kind::kReplace:
      stage = std::make_unique<ReplaceStage>(step.regex, step.content);
      break;
  }
  if (fused) return std::make_unique<HoldStage>(std::move(stage));
  return stage;
}

std::vector<std::unique_ptr<DecodeStage>> Decoder::MakeStages() const {
  std::vector<std::unique_ptr<DecodeStage>> stages;
  if (steps_.empty()) stages.push_back(std::make_unique<JoinStage>());
  bool fused = false;
  for (const Step& step : steps_) {
    stages.push_back(MakeStage(step, fused));
    fused = fused || step.kind == Kind::kFuse || step.kind == Kind::kByteLevel;
  }
  return stages;
}

std::string Decoder::TokenBytes(absl::string_view token) const {
  std::string text(token);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kByteLevel:
        return ByteLevelBytes(text);
      case Kind::kByteFallback:
        if (const int byte = FallbackByte(text); byte >= 0) {
          return std::string(1, static_cast<char>(byte));
        }
        break;
      case Kind::kMetaspace:
        absl::StrReplaceAll({{step.content, " "}}, &text);
        break;
      case Kind::kReplace:
        text = Replaced(*step.regex, text, step.content);
        break;
      case Kind::kFuse:
        return text;  // what follows works on the whole text
      case Kind::kStrip:
        break;
    }
  }
  return text;
}

std::string PushThrough(const std::vector<std::unique_ptr<DecodeStage>>& stages,
                        absl::string_view token) {
  Out tokens{std::string(token)};
  for (const auto& stage : stages) {
    Out next;
    for (const std::string& t : tokens) stage->Push(t, &next);
    tokens = std::move(next);
  }
  std::string text;
  for (const std::string& t : tokens) text += t;
  return text;
}

std::string FinishThrough(const std::vector<std::unique_ptr<DecodeStage>>& stages) {
  Out tokens;
  for (const auto& stage : stages) {
    Out next;
    for (const std::string& t : tokens) stage->Push(t, &next);
    stage->Finish(&next);
    tokens = std::move(next);
  }
  std::string text;
  for (const std::string& t : tokens) text += t;
  return text;
}

}  // namespace stretto::engine
