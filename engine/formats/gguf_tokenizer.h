// The tokenizer that a GGUF file carries in its metadata (keys tokenizer.*), as plain values: what
// they mean is the tokenizer's business (engine/text).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace stretto::engine {
struct GgufTokenizer {
  std::string path;   // the file, for messages
  std::string model;  // tokenizer.ggml.model: "gpt2" is byte-level BPE, "llama" SentencePiece BPE
  std::string pre;    // tokenizer.ggml.pre: name of the pre-tokenizer pattern; empty if absent
  std::vector<std::string> tokens;   // by id; as many as the vocabulary
  std::vector<float> scores;         // by id, or empty
  std::vector<int32_t> token_types;  // by id, or empty: 1 normal, 2 unknown, 3 control,
                                     // 4 user-defined, 5 unused, 6 byte
  std::vector<std::string> merges;   // "left right", best first; empty for "llama"
  std::optional<int64_t> bos_id, eos_id, eot_id, unk_id, pad_id;  // inside [0, tokens.size())
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  std::string chat_template;  // Jinja text; empty if absent
};
}  // namespace stretto::engine
