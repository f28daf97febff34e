#include "engine/text/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "engine/text/normalizer.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

// GPT-2's pattern, which ByteLevel brings along.
constexpr absl::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// Here the reference's words are those of Rust's regex crate, where joiners belong to them.
constexpr absl::string_view kWhitespacePattern =
    R"([\w\p{Join_Control}]+|[^\w\s\p{Join_Control}]+)";
constexpr absl::string_view kPunctuationPattern = R"([\p{P}$+<=>\^`|~])";

// Compiles `pattern`; errors say where it stood.
absl::StatusOr<std::shared_ptr<const Regex>> CompileAt(const JsonNode& node,
                                                       absl::string_view pattern) {
  auto regex = Regex::Compile(pattern);
  if (!regex.ok()) return Annotate(regex.status(), node.where());
  return regex;
}

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::FromJson(const JsonNode& node) {
  PreTokenizer out;
  RETURN_IF_ERROR(Append(node, 0, &out.steps_));
  return out;
}

absl::Status PreTokenizer::Append(const JsonNode& node, int depth, std::vector<Step>* steps) {
  if (depth > kMaxSequenceDepth) return node.Error("Sequence is nested too deeply");
  ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const auto children, node.Array("pretokenizers"));
    for (const JsonNode& child : children) RETURN_IF_ERROR(Append(child, depth + 1, steps));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(Step step, MakeStep(node, type));
  steps->push_back(std::move(step));
  return absl::OkStatus();
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::MakeStep(const JsonNode& node,
                                                          const std::string& type) {
  Step step;
  absl::string_view pattern;
  if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
    ASSIGN_OR_RETURN(step.add_prefix_space, node.BoolOr("add_prefix_space", true));
    ASSIGN_OR_RETURN(const bool use_regex, node.BoolOr("use_regex", true));
    if (use_regex) pattern = kGpt2Pattern;
  } else if (type == "Split") {
    return MakeSplit(node);
  } else if (type == "Metaspace") {
    return MakeMetaspace(node);
  } else if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, node.BoolOr("individual_digits", false));
    pattern = R"(\p{N})";
    step.behavior = individual ? Behavior::kIsolated : Behavior::kContiguous;
  } else if (type == "Whitespace") {
    pattern = kWhitespacePattern;
    step.behavior = Behavior::kRemoved;
    step.invert = true;
  } else if (type == "WhitespaceSplit") {
    pattern = R"(\s)";
    step.behavior = Behavior::kRemoved;
  } else if (type == "Punctuation") {
    pattern = kPunctuationPattern;
    ASSIGN_OR_RETURN(step.behavior, ReadBehavior(node, "Isolated"));
  } else {
    return absl::UnimplementedError(absl::StrCat(
        node.where(), ": the pre-tokenizer \"", type,
        "\" is not supported; supported are ByteLevel, Split, Digits, Whitespace, WhitespaceSplit, "
        "Punctuation, Metaspace and Sequence"));
  }
  if (!pattern.empty()) {
    ASSIGN_OR_RETURN(step.regex, CompileAt(node, pattern));
  }
  return step;
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::MakeSplit(const JsonNode& node) {
  Step step;
  ASSIGN_OR_RETURN(const JsonPattern pattern, ReadPattern(node));
  auto regex = pattern.is_regex ? Regex::Compile(pattern.text) : Regex::Literal(pattern.text);
  if (!regex.ok()) return Annotate(regex.status(), node.where());
  step.regex = *std::move(regex);
  ASSIGN_OR_RETURN(step.behavior, ReadBehavior(node, ""));
  ASSIGN_OR_RETURN(step.invert, node.BoolOr("invert", false));
  return step;
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::MakeMetaspace(const JsonNode& node) {
  Step step;
  step.kind = Kind::kMetaspace;
  ASSIGN_OR_RETURN(step.replacement, node.StringOr("replacement", "\u2581"));
  // Files from before "prepend_scheme" have "add_prefix_space" instead.
  ASSIGN_OR_RETURN(const bool add_prefix_space, node.BoolOr("add_prefix_space", true));
  ASSIGN_OR_RETURN(const std::string scheme,
                   node.StringOr("prepend_scheme", add_prefix_space ? "always" : "never"));
  if (scheme == "always") {
    step.prepend = Prepend::kAlways;
  } else if (scheme == "first") {
    step.prepend = Prepend::kFirst;
  } else if (scheme != "never") {
    return node.Error(
        absl::StrCat("prepend_scheme is \"", scheme, "\"; expected always, first or never"));
  }
  ASSIGN_OR_RETURN(const bool split, node.BoolOr("split", true));
  if (step.replacement.empty() || Utf8Length(step.replacement[0]) != step.replacement.size()) {
    return node.Error("replacement must be one character");
  }
  if (split) {
    ASSIGN_OR_RETURN(step.regex, Regex::Literal(step.replacement));
  }
  step.behavior = Behavior::kMergedWithNext;
  return step;
}

absl::StatusOr<PreTokenizer::Behavior> PreTokenizer::ReadBehavior(const JsonNode& node,
                                                                  const std::string& otherwise) {
  ASSIGN_OR_RETURN(const std::string name, node.StringOr("behavior", otherwise));
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return node.Error(absl::StrCat("behavior is \"", name,
                                 "\"; expected Isolated, Removed, MergedWithPrevious, "
                                 "MergedWithNext or Contiguous"));
}

// All of `word`, as an alternation of matches and what lies between them.
absl::Status PreTokenizer::CutWord(const Step& step, absl::string_view word,
                                   std::vector<Cut>* cuts) {
  cuts->clear();
  size_t previous = 0;
  const auto add = [&](size_t begin, size_t end, bool match) {
    const bool is_match = match != step.invert;
    cuts->push_back({begin, end, is_match, is_match && step.behavior == Behavior::kRemoved});
  };
  RETURN_IF_ERROR(step.regex->ForEachMatch(word, [&](size_t begin, size_t end) {
    if (begin > previous) add(previous, begin, false);
    add(begin, end, true);
    previous = end;
  }));
  if (previous < word.size()) add(previous, word.size(), false);
  Merge(step.behavior, cuts);
  return absl::OkStatus();
}

// Joins neighbours as the behavior says, in place.
void PreTokenizer::Merge(Behavior behavior, std::vector<Cut>* cuts) {
  if (behavior == Behavior::kIsolated || behavior == Behavior::kRemoved) return;
  const bool backwards = behavior == Behavior::kMergedWithNext;
  if (backwards) std::reverse(cuts->begin(), cuts->end());
  size_t kept = 0;
  bool previous_match = false;
  for (size_t i = 0; i < cuts->size(); ++i) {
    const Cut cut = (*cuts)[i];
    const bool joins = behavior == Behavior::kContiguous ? cut.is_match == previous_match
                                                         : cut.is_match && !previous_match;
    previous_match = cut.is_match;
    if (joins && kept > 0) {
      Cut& last = (*cuts)[kept - 1];
      (backwards ? last.begin : last.end) = backwards ? cut.begin : cut.end;
    } else {
      (*cuts)[kept++] = cut;
    }
  }
  cuts->resize(kept);
  if (backwards) std::reverse(cuts->begin(), cuts->end());
}

absl::Status PreTokenizer::Apply(Words* words) const {
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kSplit:
        RETURN_IF_ERROR(ApplySplit(step, words));
        break;
      case Kind::kByteLevel:
        RETURN_IF_ERROR(ApplyByteLevel(step, words));
        break;
      case Kind::kMetaspace:
        RETURN_IF_ERROR(ApplyMetaspace(step, words));
        break;
    }
  }
  return absl::OkStatus();
}

absl::Status PreTokenizer::ApplySplit(const Step& step, Words* words) {
  std::vector<Words::Range> ranges;
  std::vector<Cut> cuts;
  const bool had_words = !words->ranges.empty();
  const size_t first = had_words ? words->ranges[0].begin : 0;
  for (const Words::Range& range : words->ranges) {
    RETURN_IF_ERROR(CutWord(step, words->Word(range), &cuts));
    for (const Cut& cut : cuts) {
      if (cut.removed || cut.begin == cut.end) continue;
      ranges.push_back({range.begin + cut.begin, range.begin + cut.end});
    }
  }
  if (!ranges.empty() && ranges[0].begin != first) words->at_start = false;
  words->ranges = std::move(ranges);
  return absl::OkStatus();
}

absl::Status PreTokenizer::ApplyByteLevel(const Step& step, Words* words) {
  Words out{std::string()};
  out.text.reserve(words->text.size() * 5 / 4);
  out.at_start = words->at_start;
  std::vector<Cut> cuts;
  std::string prefixed;
  for (const Words::Range& range : words->ranges) {
    absl::string_view word = words->Word(range);
    if (step.add_prefix_space && word[0] != ' ') {
      prefixed = absl::StrCat(" ", word);
      word = prefixed;
    }
    if (step.regex != nullptr) {
      RETURN_IF_ERROR(CutWord(step, word, &cuts));
    } else {
      cuts.assign(1, {0, word.size(), false, false});
    }
    for (const Cut& cut : cuts) {
      const size_t begin = out.text.size();
      AppendByteLevel(word.substr(cut.begin, cut.end - cut.begin), &out.text);
      if (out.text.size() > begin) out.ranges.push_back({begin, out.text.size()});
    }
  }
  *words = std::move(out);
  return absl::OkStatus();
}

absl::Status PreTokenizer::ApplyMetaspace(const Step& step, Words* words) {
  Words out{std::string()};
  out.at_start = words->at_start;
  std::vector<Cut> cuts;
  bool first = words->at_start;
  for (const Words::Range& range : words->ranges) {
    std::string word(words->Word(range));
    absl::StrReplaceAll({{" ", step.replacement}}, &word);
    const bool prepend =
        step.prepend == Prepend::kAlways || (step.prepend == Prepend::kFirst && first);
    if (prepend && !absl::StartsWith(word, step.replacement)) word.insert(0, step.replacement);
    first = false;
    if (step.regex != nullptr) {
      RETURN_IF_ERROR(CutWord(step, word, &cuts));
    } else {
      cuts.assign(1, {0, word.size(), false, false});
    }
    const size_t base = out.text.size();
    out.text += word;
    for (const Cut& cut : cuts) {
      if (cut.end > cut.begin) out.ranges.push_back({base + cut.begin, base + cut.end});
    }
  }
  *words = std::move(out);
  return absl::OkStatus();
}

}  // namespace stretto::engine
