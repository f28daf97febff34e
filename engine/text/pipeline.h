// The whole of a tokenizer.json, put together: text → parts at added tokens → normalized → words →
// ids → post-processor; and ids → tokens → decoder. Tokenizer owns one and adds what stands in
// other files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/text/added_tokens.h"
#include "engine/text/bpe.h"
#include "engine/text/decoder.h"
#include "engine/text/json_node.h"
#include "engine/text/normalizer.h"
#include "engine/text/pre_tokenizer.h"

namespace stretto::engine {

// Immutable and thread-safe.
class TokenizerPipeline {
 public:
  // `root` is a parsed tokenizer.json; `name` is what errors call it.
  static absl::StatusOr<std::unique_ptr<TokenizerPipeline>> FromJson(const Json& root,
                                                                     absl::string_view name);

  // How much of the added tokens is looked for in a text.
  enum class Parse { kAll, kNotSpecial, kNone };
  // Appends the ids of `text` (valid UTF-8). `at_start` says that nothing comes before it;
  // `encoder` may be shared by calls of one thread.
  absl::Status Encode(absl::string_view text, Parse parse, bool at_start, BpeEncoder* encoder,
                      std::vector<int32_t>* ids) const;

  const Bpe& bpe() const { return bpe_; }
  const AddedTokens& added() const { return added_; }
  const Decoder& decoder() const { return decoder_; }
  // What the post-processor puts before and after a text.
  const std::vector<int32_t>& prefix() const { return prefix_; }
  const std::vector<int32_t>& suffix() const { return suffix_; }

  int32_t vocab_size() const;
  absl::string_view TokenText(int32_t id) const;  // empty when there is none
  bool HasToken(int32_t id) const;
  int32_t Find(absl::string_view token) const;  // -1 when there is none

 private:
  absl::Status ReadPostProcessor(const JsonNode& node, int depth);
  absl::Status ReadTemplate(const JsonNode& node);
  absl::Status EncodeWords(std::string normalized, bool at_start, BpeEncoder* encoder,
                           std::vector<int32_t>* ids) const;

  Bpe bpe_;
  AddedTokens added_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  Decoder decoder_;
  std::vector<int32_t> prefix_, suffix_;
};

}  // namespace stretto::engine
