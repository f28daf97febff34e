// What tests of the model and of training share: devices, small random models, parameters as host
// arrays, and ways to run a prompt with its completions through either face.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "engine/device/device.h"
#include "engine/model/packed_pass.h"
#include "engine/model/transformer.h"

namespace stretto::engine::testing {
// "reference" or "cpu"; aborts when it cannot be had.
std::unique_ptr<Device> MakeDevice(const std::string& backend, int num_threads = 2);

// A small valid model with every feature drawn at random.
ModelConfig RandomConfig(PhiloxStream& random);

// All parameters of a model on the host, in f32.
using HostParameters = std::map<std::string, std::vector<float>>;
// Norm weights about 1, everything else normal with standard deviation 0.3 / sqrt(columns) and
// more, so that small models have lively logits.
HostParameters RandomParameters(const ModelConfig& config, PhiloxStream& random);
HostParameters ParametersFrom(const ModelConfig& config, const TensorSource& source);
ParameterReader Reader(const HostParameters& parameters);

// A model on a device, with flat parameters and gradients as the trainer has them.
struct TestModel {
  TestModel(Device& device, const ModelConfig& config, DType dtype, int64_t max_sequence_length,
            const HostParameters& parameters);
  HostParameters Gradients();  // by name
  void ZeroGradients();

  Device& device;
  std::unique_ptr<Stream> stream;
  ParameterLayout layout;
  DeviceMemory memory;
  Tensor flat, gradients;
  std::unique_ptr<Transformer> transformer;
  std::unique_ptr<ModelWeights> weights;
};

// A prompt and its completions; all of them in one batch.
struct TestGroup {
  std::vector<int32_t> prompt;
  std::vector<std::vector<int32_t>> completions;
};
std::vector<TestGroup> RandomGroups(const ModelConfig& config, int64_t max_sequence_length,
                                    PhiloxStream& random);

// Targets stand group by group, completion by completion, token by token. With `share` a prompt is
// one segment, else every completion has its own copy of it.
PackedBatch Pack(const std::vector<TestGroup>& groups, bool share);

// Log-probs of the same targets in the same order through the paged face: sequences in random
// chunks, mixed with one another in random batches, on randomly placed blocks.
std::vector<float> PagedLogProbs(TestModel& model, const std::vector<TestGroup>& groups,
                                 float temperature, PhiloxStream& random);
}  // namespace stretto::engine::testing
