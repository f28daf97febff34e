#include "engine/inference/validation.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/counts.h"
#include "base/status.h"
#include "engine/constrain/constraint.h"

namespace stretto::engine {
namespace {
template <class Number>
absl::Status Invalid(absl::string_view field, Number value, absl::string_view expected) {
  return RefuseField(field, absl::StrCat(field, " is ", value, ": expected ", expected));
}

absl::Status ValidateIds(absl::string_view field, const std::vector<int32_t>& ids,
                         const RequestLimits& limits) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < limits.vocab_size) continue;
    return RefuseField(field,
                       absl::StrCat(field, "[", i, "] is ", ids[i], ": expected a token id in [0, ",
                                    limits.vocab_size, ")"));
  }
  return absl::OkStatus();
}

// The negated comparisons refuse NaN as well.
absl::Status ValidateDistribution(const SamplingParams& p) {
  if (!(p.temperature >= 0 && p.temperature <= 100)) {
    return Invalid("temperature", p.temperature, "a number in [0, 100]");
  }
  if (p.temperature > 0 && p.temperature < 1e-4f) {
    return Invalid("temperature", p.temperature, "0 (greedy) or at least 1e-4");
  }
  if (p.top_logprobs < 0 || p.top_logprobs > kMaxTopLogprobs) {
    return RefuseField("top_logprobs", absl::StrCat("top_logprobs is ", p.top_logprobs,
                                                    ": expected 0 to ", kMaxTopLogprobs));
  }
  if (p.top_k < 0) return Invalid("top_k", p.top_k, "0 (off) or more");
  if (!(p.top_p > 0 && p.top_p <= 1)) return Invalid("top_p", p.top_p, "a number in (0, 1]");
  if (!(p.min_p >= 0 && p.min_p <= 1)) return Invalid("min_p", p.min_p, "a number in [0, 1]");
  return absl::OkStatus();
}

absl::Status ValidatePenalties(const SamplingParams& p, const RequestLimits& limits) {
  // Much smaller ones would take logits out of what f32 can hold.
  if (!(p.repetition_penalty >= 0.01F && p.repetition_penalty <= 100)) {
    return Invalid("repetition_penalty", p.repetition_penalty, "a number from 0.01 to 100");
  }
  if (!(std::fabs(p.presence_penalty) <= 100)) {
    return Invalid("presence_penalty", p.presence_penalty, "a number in [-100, 100]");
  }
  if (!(std::fabs(p.frequency_penalty) <= 100)) {
    return Invalid("frequency_penalty", p.frequency_penalty, "a number in [-100, 100]");
  }
  if (p.logit_bias.size() > kMaxLogitBias) {
    return RefuseField("logit_bias", absl::StrCat("logit_bias has ", p.logit_bias.size(),
                                                  " ids: expected up to ", kMaxLogitBias));
  }
  for (const auto& [token, bias] : p.logit_bias) {
    if (token < 0 || token >= limits.vocab_size) {
      return RefuseField("logit_bias",
                         absl::StrCat("logit_bias has token ", token,
                                      ": expected a token id in [0, ", limits.vocab_size, ")"));
    }
    if (!(std::fabs(bias) <= 1e6f)) {
      return Invalid("logit_bias", bias, "a number in [-1e6, 1e6]");
    }
  }
  return absl::OkStatus();
}

std::string ContextOf(const RequestLimits& limits) {
  return absl::StrCat("a context of ", Count(limits.max_context, "token"),
                      limits.cache_is_short
                          ? " (all that the KV cache holds: enlarge the cache, --kv-cache-mb)"
                          : "");
}

// Whether `s` is well-formed UTF-8 (Unicode 15, table 3-7).
bool IsUtf8(absl::string_view s) {
  for (size_t i = 0; i < s.size();) {
    const auto byte = [&](size_t j) { return j < s.size() ? static_cast<uint8_t>(s[j]) : 0u; };
    const uint32_t first = byte(i);
    const size_t size = first < 0x80   ? 1
                        : first < 0xC2 ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                        : first < 0xF5 ? 4
                                       : 0;
    if (size == 0) return false;
    for (size_t j = 1; j < size; ++j) {
      if ((byte(i + j) & 0xC0) != 0x80) return false;
    }
    if ((first == 0xE0 && byte(i + 1) < 0xA0) || (first == 0xED && byte(i + 1) > 0x9F) ||
        (first == 0xF0 && byte(i + 1) < 0x90) || (first == 0xF4 && byte(i + 1) > 0x8F)) {
      return false;
    }
    i += size;
  }
  return true;
}

absl::Status ValidateStops(const Request& request, const RequestLimits& limits) {
  const SamplingParams& p = request.sampling;
  if (p.stop_ids.size() > kMaxStopIds) {
    return RefuseField("stop_ids", absl::StrCat("stop_ids has ", p.stop_ids.size(),
                                                " entries: expected up to ", kMaxStopIds));
  }
  RETURN_IF_ERROR(ValidateIds("stop_ids", p.stop_ids, limits));
  if (!limits.has_text && (request.want_text || !p.stop_strings.empty())) {
    return absl::InvalidArgumentError(
        "text and stop strings need a tokenizer, which this engine doesn't have: use stop_ids");
  }
  if (p.stop_strings.size() > kMaxStopStrings) {
    return RefuseField("stop_strings", absl::StrCat("stop_strings has ", p.stop_strings.size(),
                                                    " entries: expected up to ", kMaxStopStrings));
  }
  for (const std::string& s : p.stop_strings) {
    if (s.empty() || s.size() > kMaxStopStringBytes) {
      return RefuseField("stop_strings",
                         absl::StrCat("a stop string has ", s.size(), " bytes: expected 1 to ",
                                      kMaxStopStringBytes));
    }
    if (!IsUtf8(s)) return RefuseField("stop_strings", "a stop string isn't valid UTF-8");
  }
  return absl::OkStatus();
}
}  // namespace

absl::Status ValidateRequest(const Request& request, const RequestLimits& limits) {
  const SamplingParams& p = request.sampling;
  if (request.prompt_ids.empty()) {
    return RefuseField("prompt_ids", "the prompt is empty: expected at least one token");
  }
  RETURN_IF_ERROR(ValidateIds("prompt_ids", request.prompt_ids, limits));
  RETURN_IF_ERROR(ValidateIds("forced_prefix", request.forced_prefix, limits));
  const auto num_prompt = static_cast<int64_t>(request.prompt_ids.size());
  if (num_prompt >= limits.max_context) {
    return RefuseField("prompt_ids", absl::StrCat("the prompt has ", Count(num_prompt, "token"),
                                                  ", which leaves no room in ", ContextOf(limits)));
  }
  if (p.max_tokens < 0 || p.min_tokens < 0 || (p.max_tokens > 0 && p.min_tokens > p.max_tokens)) {
    return RefuseField(
        "min_tokens", absl::StrCat("min_tokens is ", p.min_tokens, " and max_tokens ", p.max_tokens,
                                   ": expected 0 <= min_tokens <= max_tokens"));
  }
  if (num_prompt + p.max_tokens > limits.max_context) {
    return RefuseField(
        "max_tokens",
        absl::StrCat("max_tokens is ", p.max_tokens, " and the prompt has ",
                     Count(num_prompt, "token"), ", together ", num_prompt + p.max_tokens,
                     ", more than ", ContextOf(limits), ": expected at most ",
                     limits.max_context - num_prompt, ", or none for what the context leaves"));
  }
  RETURN_IF_ERROR(ValidateDistribution(p));
  RETURN_IF_ERROR(ValidatePenalties(p, limits));
  if (p.constraint != nullptr && p.constraint->vocab_size() > limits.vocab_size) {
    return RefuseField("constraint",
                       absl::StrCat("the constraint is about ", p.constraint->vocab_size(),
                                    " tokens, the model has ", limits.vocab_size));
  }
  return ValidateStops(request, limits);
}
}  // namespace stretto::engine
