// Text to token ids and back, as Hugging Face's `tokenizers` does it: the pipeline of a
// tokenizer.json (added tokens, normalizer, pre-tokenizer, BPE model, post-processor, decoder),
// read from that file or made from the metadata of a GGUF file. Ids and decoded text are equal to
// those of the `tokenizers` library (golden tests).
//
// A Tokenizer is immutable once made: every const method may be called from any thread at once.
// Input that is not valid UTF-8 is first made valid by replacing each maximal broken part with
// U+FFFD, as Python's errors="replace" does; so Decode(Encode(x)) == x needs x to be valid.
//
// Not read: the "truncation" and "padding" sections of tokenizer.json (how much to keep is the
// caller's decision) and pair templates (there is one sequence).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "engine/text/gguf_vocab.h"

namespace stretto::engine {

struct EncodeOptions {
  // Lets the post-processor add what the model expects around a text (mostly a BOS in front).
  bool add_special_tokens = true;
  // False: text that reads like a special token ("<|im_end|>") stays text. Use it for whatever
  // comes from outside.
  bool parse_special = true;
  // False: no added token is looked for in the text, special or not.
  bool parse_added = true;
};

// One stretch of a prompt whose parts must not be confused: either ordinary text (special tokens
// in it stay text) or exactly one token.
struct EncodePiece {
  std::string text;       // ordinary text; unused when token_id >= 0
  int32_t token_id = -1;  // >= 0: this very token
};

class TokenizerPipeline;  // the machine behind it; engine/text/pipeline.h

class Tokenizer {
 public:
  // Reads one tokenizer.json. bos/eos/pad and the chat template are not in that file: they are
  // -1 and empty. Blocks on the file.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromFile(const std::string& path);
  // The same from bytes; `name` is what error messages call the file.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(absl::string_view bytes,
                                                             absl::string_view name);
  // Reads tokenizer.json, tokenizer_config.json (special tokens, chat template) and
  // chat_template.jinja of a Hugging Face folder; only the first must exist.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromFolder(const std::string& folder);
  // Error messages say "GGUF tokenizer".
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromGguf(const GgufVocab& vocab);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Fails only where a pattern of the pre-tokenizer exceeds the limits of the regex engine.
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              const EncodeOptions& options = {}) const;
  // The ids of a text that was assembled from trusted tokens and untrusted text: pieces of text are
  // cut and encoded as if the tokens between them had been matched in one whole text, but no
  // special token is looked for inside them, and with `parse_added` false no added token at all.
  // Adjacent text pieces are joined first. Adds nothing. Errors: a token_id that is not in the
  // vocabulary, and those of Encode.
  absl::StatusOr<std::vector<int32_t>> EncodePieces(absl::Span<const EncodePiece> pieces,
                                                    bool parse_added = true) const;

  // Ids that have no token are skipped. Bytes that are not UTF-8 become U+FFFD.
  std::string Decode(absl::Span<const int32_t> ids, bool skip_special = true) const;

  // The bytes a token stands for in the middle of a text (the space of "Ġthe", the byte of
  // "<0xE4>"); may be a part of a character. Empty for an id without a token.
  std::string TokenBytes(int32_t id) const;
  // The token as the vocabulary writes it ("Ġthe"). Empty for an id without a token.
  absl::string_view TokenText(int32_t id) const;
  // The id of the token written exactly so, or nothing.
  absl::optional<int32_t> Find(absl::string_view token) const;
  bool IsSpecial(int32_t id) const;

  // One more than the largest id. The model's embedding may have more rows (padding).
  int32_t vocab_size() const;
  // -1 where the tokenizer's files name none.
  int32_t bos_id() const { return bos_id_; }
  int32_t eos_id() const { return eos_id_; }
  int32_t pad_id() const { return pad_id_; }
  int32_t unk_id() const { return unk_id_; }
  // The model's Jinja chat template, empty where there is none (see chat_template.h).
  const std::string& chat_template() const { return chat_template_; }

  // A tokenizer.json and a tokenizer_config.json that `tokenizers` and `transformers` load to the
  // same behaviour: the very bytes that were read, or made from the GGUF metadata.
  const std::string& ToTokenizerJson() const { return tokenizer_json_; }
  const std::string& ToTokenizerConfigJson() const { return tokenizer_config_json_; }

  // For engine/text itself.
  const TokenizerPipeline& pipeline() const { return *pipeline_; }

 private:
  Tokenizer();
  absl::Status ReadConfig(const std::string& folder);

  std::unique_ptr<const TokenizerPipeline> pipeline_;
  std::string tokenizer_json_;
  std::string tokenizer_config_json_;
  std::string chat_template_;
  int32_t bos_id_ = -1;
  int32_t eos_id_ = -1;
  int32_t pad_id_ = -1;
  int32_t unk_id_ = -1;
};

}  // namespace stretto::engine
