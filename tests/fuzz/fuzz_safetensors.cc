// One safetensors file: whatever parses can be read to its last byte.
#include "engine/formats/safetensors.h"
#include "engine/formats/testing/exercise.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stretto::engine;
  auto tensors = ParseSafetensors("input", {data, size});
  if (tensors.ok())
    formats_testing::ExerciseTensors(formats_testing::MemoryTensors(*std::move(tensors)));
  return 0;
}
