// A critic: a model with a value head that begins with another model's weights.
#pragma once

#include <memory>

#include "engine/formats/tensor_file.h"

namespace stretto::engine {
// The tensors of a model, without its language-model head, and with a value head of zeros (every
// value is 0 then) where it has none of its own, as a reward model of transformers'
// …ForSequenceClassification has. `hidden_size` is the width of a head of zeros.
std::shared_ptr<const TensorSource> CriticTensors(std::shared_ptr<const TensorSource> model,
                                                  int64_t hidden_size);
}  // namespace stretto::engine
