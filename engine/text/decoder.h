// The "decoder" section of a tokenizer.json: how tokens become text. Known: ByteLevel, Metaspace,
// Replace, ByteFallback, Fuse, Strip, Sequence. Each step is a stage that takes tokens one at a
// time and lets through what no later token can change; decoding a whole sequence is running a
// stream to its end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/json_node.h"
#include "engine/text/regex.h"

namespace stretto::engine {

// The state of one step in one stream.
class DecodeStage {
 public:
  virtual ~DecodeStage() = default;
  // Takes one token (valid UTF-8) and appends what is certain to `out`.
  virtual void Push(absl::string_view token, std::vector<std::string>* out) = 0;
  // The stream ends: appends what was held back.
  virtual void Finish(std::vector<std::string>* out) = 0;
};

// Immutable and thread-safe.
class Decoder {
 public:
  // No decoder: tokens are joined by spaces.
  Decoder() = default;
  static absl::StatusOr<Decoder> FromJson(const JsonNode& node);

  // Fresh stages of one stream.
  std::vector<std::unique_ptr<DecodeStage>> MakeStages() const;
  // The bytes that a token stands for in the middle of a text.
  std::string TokenBytes(absl::string_view token) const;

 private:
  enum class Kind { kByteLevel, kMetaspace, kReplace, kByteFallback, kFuse, kStrip };
  struct Step {
    Kind kind = Kind::kFuse;
    std::shared_ptr<const Regex> regex;  // Replace
    std::string content;                 // Replace: by what; Strip: what; Metaspace: the mark
    bool drop_first = false;             // Metaspace: the first token's marks are no spaces
    size_t start = 0, stop = 0;          // Strip: at most how many at each end
  };
  static absl::Status Append(const JsonNode& node, int depth, std::vector<Step>* steps);
  static absl::StatusOr<Step> MakeStep(const JsonNode& node, const std::string& type);
  static absl::StatusOr<Step> MakeStrip(const JsonNode& node);
  static std::unique_ptr<DecodeStage> MakeStage(const Step& step, bool fused);

  std::vector<Step> steps_;
};

// Sends one token through all stages; returns the text that became certain.
std::string PushThrough(const std::vector<std::unique_ptr<DecodeStage>>& stages,
                        absl::string_view token);
// Ends all stages in order.
std::string FinishThrough(const std::vector<std::unique_ptr<DecodeStage>>& stages);

}  // namespace stretto::engine
