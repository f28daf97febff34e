// The GGUF format, versions 2 and 3, little-endian
// (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, metadata
// key-values, tensor infos, padding, aligned tensor data. Import only.
//
// The reader trusts nothing: every count and length is bounded by the bytes that are left before
// anything is allocated, arrays nest at most four deep, keys and names are unique, alignment is a
// power of two, offsets are aligned, dimensions are whole blocks, products don't overflow, tensors
// lie in the file and do not overlap. Messages name file and tensor or key.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "base/files.h"
#include "engine/formats/gguf_tokenizer.h"
#include "engine/formats/model_config.h"
#include "engine/formats/tensor_file.h"

namespace stretto::engine {
struct GgufValue;
// Elements of one type, widened: unsigned, signed, float, bool, string, or arrays.
using GgufArray = std::variant<std::vector<uint64_t>, std::vector<int64_t>, std::vector<double>,
                               std::vector<bool>, std::vector<std::string>, std::vector<GgufValue>>;
struct GgufValue {
  std::variant<uint64_t, int64_t, double, bool, std::string, GgufArray> value;
};

// A parsed file. Tensors keep the file's names, order and row order; their shapes are turned to
// row-major (GGUF writes the fastest dimension first). The spans point into the bytes parsed.
struct GgufFile {
  std::string path;
  uint32_t version = 0;
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::vector<TensorInfo> tensors;
};
absl::StatusOr<GgufFile> ParseGguf(const std::string& path, absl::Span<const uint8_t> bytes);

// The model configuration in the metadata (general.architecture llama, mistral, qwen2 or qwen3).
// Llama-3 files carry their RoPE scaling as the tensor rope_freqs.weight of head_dim/2 divisors: it
// becomes RopeScaling kLlama3 where the published parameters give these numbers, else kFactors.
absl::StatusOr<ModelConfig> ConfigFromGguf(const GgufFile& file);
absl::StatusOr<GgufTokenizer> TokenizerFromGguf(const GgufFile& file);

// The model's tensors under Hugging Face names and in Hugging Face's row order: llama.cpp permutes
// the rows of attn_q and attn_k for architecture llama (pairs of a head's halves interleaved),
// which ReadRows undoes. rope_freqs.weight keeps its name, "rope_freqs.weight", as it has none in
// Hugging Face. A tensor whose name has no counterpart keeps its own, so that CheckShapes names it.
// `mapping` is kept alive by the source.
absl::StatusOr<std::shared_ptr<const TensorSource>> GgufTensors(
    GgufFile file, const ModelConfig& config, std::shared_ptr<const MappedFile> mapping);
}  // namespace stretto::engine
