// Decodes a completion while it is being generated. Text comes out as soon as nothing that follows
// can change it: never half a character, never a word that the next token would rewrite. The
// pieces, concatenated, equal Tokenizer::Decode of all ids (Decode itself runs on this class).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/text/tokenizer.h"

namespace stretto::engine {

class DecodeStage;  // engine/text/decoder.h

// One stream; used by one thread at a time. The tokenizer must outlive it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true);
  ~StreamDecoder();
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;

  // The text that became certain with this token; often empty for a part of a character.
  // Ids without a token add nothing.
  std::string Push(int32_t id);
  // What was held back; broken bytes become U+FFFD. The stream then starts anew.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::vector<std::unique_ptr<DecodeStage>> stages_;
};

}  // namespace stretto::engine
