// The tokenizer that a GGUF file carries in its metadata (keys "tokenizer.ggml.*" and
// "tokenizer.chat_template"), as plain data. engine/formats fills it while reading the file;
// Tokenizer::FromGguf turns it into a tokenizer. Key names and token types are those of the GGUF
// specification (github.com/ggml-org/ggml, docs/gguf.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stretto::engine {

// Values of tokenizer.ggml.token_type.
enum GgufTokenType : int32_t {
  kGgufTokenNormal = 1,
  kGgufTokenUnknown = 2,
  kGgufTokenControl = 3,      // special: skipped by Decode, never made from ordinary text
  kGgufTokenUserDefined = 4,  // always matched in text, but not special
  kGgufTokenUnused = 5,
  kGgufTokenByte = 6,  // "<0xE4>": one byte (SentencePiece byte fallback)
};

struct GgufVocab {
  std::string model;                 // tokenizer.ggml.model: "gpt2" (byte-level BPE), "llama" (SPM)
  std::string pre;                   // tokenizer.ggml.pre; empty when the file has none
  std::vector<std::string> tokens;   // tokenizer.ggml.tokens; the index is the id
  std::vector<float> scores;         // tokenizer.ggml.scores; needed by "llama", else may be empty
  std::vector<int32_t> token_types;  // tokenizer.ggml.token_type; may be empty (all normal)
  std::vector<std::string> merges;   // tokenizer.ggml.merges, "left right"; needed by "gpt2"
  int bos = -1;                      // tokenizer.ggml.{bos,eos,padding,unknown}_token_id; -1: none
  int eos = -1;
  int pad = -1;
  int unk = -1;
  // tokenizer.ggml.add_bos_token, .add_eos_token, .add_space_prefix. Where the file lacks the key,
  // the reader sets DefaultAddBos(model, pre), false, and true.
  bool add_bos = false;
  bool add_eos = false;
  bool add_space_prefix = true;
  std::string chat_template;  // tokenizer.chat_template (Jinja); empty when the file has none
};

// What a missing tokenizer.ggml.add_bos_token means: the models that were trained with a BOS in
// front (SentencePiece, Llama 3, Tekken) get one, the others don't.
inline bool DefaultAddBos(const std::string& model, const std::string& pre) {
  return model == "llama" || pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3" ||
         pre == "tekken";
}

}  // namespace stretto::engine
