// Writes the tokenizer of a GGUF file as a tokenizer.json, the form that everything here runs on
// and that other tools load.
#pragma once

#include "absl/status/statusor.h"
#include "engine/text/gguf_vocab.h"
#include "engine/text/json_node.h"

namespace stretto::engine {

// What error messages call the source.
constexpr absl::string_view kGgufName = "GGUF tokenizer";

// Model "gpt2" becomes byte-level BPE with the pre-tokenizer that `pre` names; an unknown name is
// an error that lists the known ones. Model "llama" becomes BPE with byte fallback, its merges
// derived from the scores: any two pieces that join to a piece merge, in the order of that piece's
// score.
absl::StatusOr<Json> TokenizerJsonFromGguf(const GgufVocab& vocab);

// The tokenizer_config.json that goes with it.
Json TokenizerConfigFromGguf(const GgufVocab& vocab);

}  // namespace stretto::engine
