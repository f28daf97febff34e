// One GGUF file: metadata, configuration, tokenizer, names, and every row of what parses.
#include "engine/formats/testing/exercise.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stretto::engine;
  auto file = ParseGguf("input", {data, size});
  if (file.ok()) formats_testing::ExerciseGguf(*std::move(file));
  return 0;
}
