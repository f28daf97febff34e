// The "pre_tokenizer" section of a tokenizer.json: cuts a normalized text into the words that the
// model encodes one by one. Known: ByteLevel, Split, Digits, Whitespace, WhitespaceSplit,
// Punctuation, Metaspace, Sequence.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/json_node.h"
#include "engine/text/regex.h"

namespace stretto::engine {

// A text and the words cut from it: ranges of `text`, not empty, in order, without overlap (what
// lies between them was removed).
struct Words {
  struct Range {
    size_t begin = 0, end = 0;
  };
  std::string text;
  std::vector<Range> ranges;
  bool at_start = false;  // the first word begins at the very start of the input

  explicit Words(std::string whole) : text(std::move(whole)) {
    if (!text.empty()) ranges.push_back({0, text.size()});
  }
  absl::string_view Word(const Range& r) const {
    return absl::string_view(text).substr(r.begin, r.end - r.begin);
  }
};

// Immutable and thread-safe.
class PreTokenizer {
 public:
  // Leaves the text whole.
  PreTokenizer() = default;
  static absl::StatusOr<PreTokenizer> FromJson(const JsonNode& node);

  absl::Status Apply(Words* words) const;

 private:
  enum class Kind { kSplit, kByteLevel, kMetaspace };
  enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class Prepend { kAlways, kFirst, kNever };
  struct Step {
    Kind kind = Kind::kSplit;
    std::shared_ptr<const Regex> regex;  // null: don't cut
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;  // what the pattern does not match is the delimiter
    bool add_prefix_space = false;
    Prepend prepend = Prepend::kNever;
    std::string replacement;
  };
  struct Cut {
    size_t begin, end;
    bool is_match, removed;
  };

  static absl::Status Append(const JsonNode& node, int depth, std::vector<Step>* steps);
  static absl::StatusOr<Step> MakeStep(const JsonNode& node, const std::string& type);
  static absl::StatusOr<Step> MakeSplit(const JsonNode& node);
  static absl::StatusOr<Step> MakeMetaspace(const JsonNode& node);
  static absl::StatusOr<Behavior> ReadBehavior(const JsonNode& node, const std::string& otherwise);
  static absl::Status CutWord(const Step& step, absl::string_view word, std::vector<Cut>* cuts);
  static void Merge(Behavior behavior, std::vector<Cut>* cuts);
  static absl::Status ApplySplit(const Step& step, Words* words);
  static absl::Status ApplyByteLevel(const Step& step, Words* words);
  static absl::Status ApplyMetaspace(const Step& step, Words* words);

  std::vector<Step> steps_;
};

}  // namespace stretto::engine
