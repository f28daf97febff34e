// A model of random weights as a Hugging Face folder, with the tiny model's tokenizer: for
// benchmarks that start services.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "engine/formats/model_config.h"

namespace stretto::bench {
// Replaces what is there.
absl::Status WriteModelFolder(const std::string& folder, engine::ModelConfig config);
}  // namespace stretto::bench
