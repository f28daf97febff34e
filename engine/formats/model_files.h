// Opens a model wherever it lies: a Hugging Face folder (config.json, safetensors) or one GGUF
// file, with the same face for both.
#pragma once

#include <memory>
#include <string>

#include "engine/formats/gguf_tokenizer.h"
#include "engine/formats/model_config.h"
#include "engine/formats/tensor_file.h"

namespace stretto::engine {
struct ModelFiles {
  enum class Kind : uint8_t { kFolder, kGguf };
  Kind kind = Kind::kFolder;
  std::string path;  // as given; for kFolder the tokenizer's files lie here
  ModelConfig config;
  GenerationDefaults generation;
  std::shared_ptr<const TensorSource> tensors;
  std::shared_ptr<const GgufTokenizer> gguf_tokenizer;  // kGguf only, else null
};

// Reads and checks the headers; weights stay on disk, mapped. Does not check tensors against the
// config: see CheckShapes. A model that writes: one with a value head is an error.
absl::StatusOr<ModelFiles> OpenModel(const std::string& path);
// The same, of a model with whichever head.
absl::StatusOr<ModelFiles> OpenModelOfAnyHead(const std::string& path);

// Every expected tensor is there, readable, with the shape that the config says, and nothing is
// there that the model would silently ignore, except what is known to be harmless
// (rotary_emb.inv_freq, lm_head.weight beside tied embeddings). The message names up to ten
// tensors.
absl::Status CheckShapes(const ModelConfig& config, const TensorSource& source);
// Reads every expected tensor and names the first with a NaN or infinity, and how many it has.
absl::Status ScanForNonFinite(const ModelConfig& config, const TensorSource& source);
}  // namespace stretto::engine
