// Writes a model as a Hugging Face folder that other tools load: config.json,
// generation_config.json, model.safetensors and the tokenizer's files. The folder appears complete
// or not at all: it is written beside its place and renamed.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "base/files.h"
#include "engine/formats/model_config.h"

namespace stretto::engine {
struct ExportOptions {
  std::string path;           // the folder; must not exist unless `overwrite` (CheckReplaceable)
  DType type = DType::kBF16;  // kBF16 or kF32
  ModelConfig config;
  GenerationDefaults generation;
  bool overwrite = false;
  // Where the tokenizer's files come from: copied from this folder as they are, byte for byte …
  std::string tokenizer_folder;
  // … or these (file name → content), or both, where these win.
  std::map<std::string, std::string> tokenizer_files;
};
// Writes rows [row_begin, row_end) of a parameter as `type` to `dst`; as TensorSource::ReadRows.
using RowReader = std::function<absl::Status(const TensorSpec& tensor, int64_t row_begin,
                                             int64_t row_end, DType type, void* dst)>;

// Blocks until everything is on disk. Calls `read` in the file's order of tensors, a few MB a call.
absl::Status ExportHf(Files& files, const ExportOptions& options, const RowReader& read);
// Whether `path` may be replaced: it doesn't exist, is empty or holds nothing but what an export
// writes. FAILED_PRECONDITION names the first thing that would be lost.
absl::Status CheckReplaceable(Files& files, const std::string& path);

// The names of tokenizer files that ExportHf copies where they exist (tokenizer.json, …).
const std::vector<std::string>& TokenizerFileNames();
}  // namespace stretto::engine
