// The "normalizer" section of a tokenizer.json: what is done to a text before it is cut. Known:
// NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip, ByteLevel, Sequence.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/json_node.h"
#include "engine/text/regex.h"

namespace stretto::engine {

// Immutable and thread-safe.
class Normalizer {
 public:
  // Does nothing.
  Normalizer() = default;
  static absl::StatusOr<Normalizer> FromJson(const JsonNode& node);

  bool empty() const { return steps_.empty(); }
  // Normalizes `text` (valid UTF-8, stays so) in place. `*at_start` says whether the text begins at
  // the very start of the input; it becomes false when the beginning is cut away.
  absl::Status Apply(std::string* text, bool* at_start) const;

 private:
  enum class Kind {
    kNfc,
    kNfd,
    kNfkc,
    kNfkd,
    kLowercase,
    kPrepend,
    kReplaceLiteral,
    kReplaceRegex,
    kStrip,
    kByteLevel
  };
  struct Step {
    Kind kind;
    std::string pattern, content;
    std::shared_ptr<const Regex> regex;
    bool left = false, right = false;
  };
  static absl::Status Append(const JsonNode& node, int depth, std::vector<Step>* steps);
  static absl::StatusOr<Step> MakeStep(const JsonNode& node, const std::string& type);
  static absl::Status ApplyStep(const Step& step, std::string* text, bool* at_start);

  std::vector<Step> steps_;
};

// The {"String": s} or {"Regex": r} of a "pattern" field.
struct JsonPattern {
  bool is_regex = false;
  std::string text;
};
absl::StatusOr<JsonPattern> ReadPattern(const JsonNode& node);

// How deep Sequence may nest in a tokenizer.json.
constexpr int kMaxSequenceDepth = 8;

}  // namespace stretto::engine
