#include "bench/model_folder.h"

#include "base/bfloat16.h"
#include "base/files.h"
#include "base/philox.h"
#include "engine/formats/export_hf.h"

namespace stretto::bench {
absl::Status WriteModelFolder(const std::string& folder, engine::ModelConfig config) {
  config.eos_token_ids = {0};
  engine::ExportOptions options;
  options.path = folder;
  options.type = DType::kBF16;
  options.config = config;
  options.tokenizer_folder = "examples/tiny-model";
  options.overwrite = true;
  const engine::RowReader read = [](const engine::TensorSpec& tensor, int64_t begin, int64_t end,
                                    DType, void* dst) {
    PhiloxStream random(7, std::hash<std::string>()(tensor.name) + static_cast<uint64_t>(begin));
    const float mean = tensor.shape.size() == 1 ? 1 : 0;  // norms
    const int64_t count = (end - begin) * tensor.shape.back();
    for (int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>((random.NextDouble() - 0.5) * 0.1);
      static_cast<uint16_t*>(dst)[i] = F32ToBf16(mean + value);
    }
    return absl::OkStatus();
  };
  return engine::ExportHf(Files::Real(), options, read);
}
}  // namespace stretto::bench
