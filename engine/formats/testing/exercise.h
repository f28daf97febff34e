// For tests and fuzzing: walks through everything that parsed files can be asked. A broken promise
// aborts; errors that are returned are fine.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/formats/gguf.h"
#include "engine/formats/model_files.h"

namespace stretto::engine::formats_testing {
// Tensors over bytes that somebody else keeps.
class MemoryTensors final : public TensorSource {
 public:
  explicit MemoryTensors(std::vector<TensorInfo> tensors) : tensors_(std::move(tensors)) {}
  const std::string& path() const override { return path_; }
  absl::Span<const TensorInfo> tensors() const override { return tensors_; }

 private:
  std::string path_ = "memory";
  std::vector<TensorInfo> tensors_;  // sorted by name
};

// Reads every row of every tensor, in both types.
inline void ExerciseTensors(const TensorSource& source) {
  for (const TensorInfo& info : source.tensors()) {
    STRETTO_CHECK(source.Find(info.name) == &info);
    if (!IsReadable(info.type)) continue;
    std::vector<float> wide(static_cast<size_t>(NumElements(info)));
    std::vector<uint16_t> narrow(wide.size());
    STRETTO_CHECK(source.ReadAll(info.name, DType::kF32, wide.data()).ok());
    STRETTO_CHECK(source.ReadAll(info.name, DType::kBF16, narrow.data()).ok());
  }
}

// A config that was accepted is valid and survives the way through its JSON.
inline void ExerciseConfig(const ModelConfig& config) {
  STRETTO_CHECK(ValidateConfig("x", config).ok());
  if (config.num_layers < 100) {
    for (const TensorSpec& spec : ExpectedTensors(config)) {
      for (const int64_t dim : spec.shape) STRETTO_CHECK(dim > 0);
    }
  }
  const std::string json = ToHfConfigJson(config, config.torch_dtype);
  const auto back = ParseHfConfig("written", json);
  STRETTO_CHECK(back.ok());
  STRETTO_CHECK(ToHfConfigJson(*back, back->torch_dtype) == json);
}

// Takes a file that parsed through all that OpenModel does.
inline void ExerciseGguf(GgufFile file) {
  (void)TokenizerFromGguf(file).ok();
  auto config = ConfigFromGguf(file);
  auto source = GgufTensors(std::move(file), config.ok() ? *config : ModelConfig{}, nullptr);
  if (source.ok()) ExerciseTensors(**source);
  if (!config.ok()) return;
  if (source.ok() && config->num_layers < 100) (void)CheckShapes(*config, **source).ok();
  ExerciseConfig(*config);
}
}  // namespace stretto::engine::formats_testing
