#include "engine/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace stretto::engine {
namespace {
using std::numbers::pi;

// theta^(−2i / head_dim), i = 0, 1, …
std::vector<double> PlainFrequencies(double theta, int64_t head_dim) {
  std::vector<double> f(head_dim / 2);
  for (size_t i = 0; i < f.size(); ++i) {
    f[i] = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
  }
  return f;
}

// "Dynamic NTK": the base grows with the sequence so that its longest wave covers it.
double DynamicTheta(const ModelConfig& config, int64_t length) {
  const RopeScaling& s = config.rope_scaling;
  const auto original = static_cast<double>(s.original_max_position_embeddings);
  const double reach = std::max(original, static_cast<double>(length));
  const auto dim = static_cast<double>(config.head_dim);
  return config.rope_theta *
         std::pow(s.factor * reach / original - (s.factor - 1.0), dim / (dim - 2.0));
}

// Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated.
void ScaleLlama3(const RopeScaling& s, std::vector<double>& f) {
  const auto original = static_cast<double>(s.original_max_position_embeddings);
  for (double& frequency : f) {
    const double wavelength = 2.0 * pi / frequency;
    if (wavelength < original / s.high_freq_factor) continue;
    if (wavelength > original / s.low_freq_factor) {
      frequency /= s.factor;
    } else {
      const double smooth =
          (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
      frequency = (1.0 - smooth) * frequency / s.factor + smooth * frequency;
    }
  }
}

// The dimension whose wave turns `rotations` times within the original context (YaRN, Peng et al.
// 2023, "find_correction_dim").
double CorrectionDim(double rotations, const ModelConfig& config) {
  const auto original = static_cast<double>(config.rope_scaling.original_max_position_embeddings);
  return static_cast<double>(config.head_dim) * std::log(original / (rotations * 2.0 * pi)) /
         (2.0 * std::log(config.rope_theta));
}

void ScaleYarn(const ModelConfig& config, std::vector<double>& f) {
  const RopeScaling& s = config.rope_scaling;
  double low = CorrectionDim(s.beta_fast, config), high = CorrectionDim(s.beta_slow, config);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.head_dim) - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < f.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    f[i] = f[i] / s.factor * ramp + f[i] * (1.0 - ramp);
  }
}

double YarnAttentionFactor(const RopeScaling& s) {
  if (s.attention_factor.has_value()) return *s.attention_factor;
  const auto scale = [&](double mscale) {
    return s.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(s.factor) + 1.0;
  };
  const double mscale = s.mscale.value_or(0.0), all_dim = s.mscale_all_dim.value_or(0.0);
  return mscale != 0.0 && all_dim != 0.0 ? scale(mscale) / scale(all_dim) : scale(1.0);
}
}  // namespace

RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config, int64_t max_sequence_length) {
  const RopeScaling& s = config.rope_scaling;
  const double theta = s.type == RopeScaling::Type::kDynamic
                           ? DynamicTheta(config, max_sequence_length)
                           : config.rope_theta;
  std::vector<double> f = PlainFrequencies(theta, config.head_dim);
  RopeFrequencies out;
  switch (s.type) {
    case RopeScaling::Type::kNone:
    case RopeScaling::Type::kDynamic:
      break;
    case RopeScaling::Type::kLinear:
      for (double& frequency : f) frequency /= s.factor;
      break;
    case RopeScaling::Type::kLlama3:
      ScaleLlama3(s, f);
      break;
    case RopeScaling::Type::kYarn:
      ScaleYarn(config, f);
      out.attention_factor = YarnAttentionFactor(s);
      break;
    case RopeScaling::Type::kFactors:
      STRETTO_CHECK(s.frequency_factors.size() == f.size());
      for (size_t i = 0; i < f.size(); ++i) f[i] /= double{s.frequency_factors[i]};
      break;
  }
  for (double frequency : f) out.inverse.push_back(static_cast<float>(frequency));
  return out;
}

RopeTables ComputeRopeTables(const ModelConfig& config, int64_t num_positions) {
  const RopeFrequencies frequencies = ComputeRopeFrequencies(config, num_positions);
  RopeTables tables;
  tables.cos.reserve(num_positions * frequencies.inverse.size());
  tables.sin.reserve(tables.cos.capacity());
  for (int64_t p = 0; p < num_positions; ++p) {
    for (float inverse : frequencies.inverse) {
      const float angle = static_cast<float>(p) * inverse;
      tables.cos.push_back(
          static_cast<float>(std::cos(double{angle}) * frequencies.attention_factor));
      tables.sin.push_back(
          static_cast<float>(std::sin(double{angle}) * frequencies.attention_factor));
    }
  }
  return tables;
}
}  // namespace stretto::engine
