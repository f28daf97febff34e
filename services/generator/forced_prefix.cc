#include "services/generator/forced_prefix.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::services {
namespace {
// A certain token's log-prob is 0 but for rounding.
constexpr float kMaxLogprob = 1e-5f;

template <class... Parts>
absl::Status Invalid(const std::string& field, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(field, parts...));
}

std::string At(const std::string& field, int index) { return absl::StrCat(field, "[", index, "]"); }

absl::Status CheckLength(const std::string& field, int found, int num_ids) {
  if (found == 0 || found == num_ids) return absl::OkStatus();
  return Invalid(field, ": ", found, " entries: expected none, or one for each of the ", num_ids,
                 " ids");
}

absl::Status CheckIds(const v1::Completion& prefix, const std::string& name,
                      const PrefixLimits& limits) {
  const std::string field = name + ".ids";
  if (prefix.ids_size() > limits.max_tokens) {
    return Invalid(field, ": ", prefix.ids_size(),
                   " tokens: expected at most sampling.max_tokens (", limits.max_tokens,
                   "), which counts them as well");
  }
  for (int i = 0; i < prefix.ids_size(); ++i) {
    const int32_t id = prefix.ids(i);
    if (id < 0 || id >= limits.vocab_size) {
      return Invalid(At(field, i), " is ", id, ": expected a token id in [0, ", limits.vocab_size,
                     ")");
    }
    const bool ends = std::count(limits.stop_ids.begin(), limits.stop_ids.end(), id) > 0;
    if (ends && i + 1 < prefix.ids_size()) {
      return Invalid(At(field, i), " is ", id,
                     ", which ends a completion: expected it nowhere but at the end (or "
                     "sampling.ignore_eos)");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLogprobs(const google::protobuf::RepeatedField<float>& values, int num_ids,
                           const std::string& field) {
  RETURN_IF_ERROR(CheckLength(field, values.size(), num_ids));
  for (int i = 0; i < values.size(); ++i) {
    // The negated comparison refuses NaN as well.
    if (std::isfinite(values[i]) && !(values[i] > kMaxLogprob)) continue;
    return Invalid(At(field, i), " is ", values[i], ": expected a log-prob, finite and at most 0");
  }
  return absl::OkStatus();
}

absl::Status CheckVersions(const v1::Completion& prefix, const std::string& name,
                           const PrefixLimits& limits) {
  const std::string field = name + ".versions";
  RETURN_IF_ERROR(CheckLength(field, prefix.versions_size(), prefix.ids_size()));
  int64_t before = 0;
  for (int i = 0; i < prefix.versions_size(); ++i) {
    const int64_t version = prefix.versions(i);
    if (version < 0 || version > limits.version) {
      return Invalid(At(field, i), " is ", version, ": expected one from 0 to ", limits.version,
                     ", the newest that this generator has");
    }
    if (version < before) {
      return Invalid(At(field, i), " is ", version, " behind ", before,
                     ": expected versions that never fall");
    }
    before = version;
  }
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<std::vector<int32_t>> CheckForcedPrefix(const v1::SampleRequest& sample,
                                                       const std::string& name,
                                                       const PrefixLimits& limits) {
  const v1::Completion& prefix = sample.prefix();
  const std::string field = name + ".prefix";
  if (prefix.sample_index() != 0 && prefix.sample_index() != sample.sample_index()) {
    return Invalid(field, ".sample_index is ", prefix.sample_index(), ": expected ",
                   sample.sample_index(), ", the sample's");
  }
  if (prefix.finish_reason() != v1::FINISH_REASON_UNSPECIFIED &&
      prefix.finish_reason() != v1::FINISH_REASON_ABORTED) {
    const std::string& known = v1::FinishReason_Name(prefix.finish_reason());
    const std::string name = known.empty() ? absl::StrCat(prefix.finish_reason()) : known;
    return Invalid(field, ".finish_reason is ", name,
                   ": expected a completion that hasn't ended (none, or FINISH_REASON_ABORTED)");
  }
  RETURN_IF_ERROR(CheckIds(prefix, field, limits));
  RETURN_IF_ERROR(CheckLogprobs(prefix.logprobs(), prefix.ids_size(), field + ".logprobs"));
  RETURN_IF_ERROR(
      CheckLogprobs(prefix.sampling_logprobs(), prefix.ids_size(), field + ".sampling_logprobs"));
  RETURN_IF_ERROR(CheckVersions(prefix, field, limits));
  return std::vector<int32_t>(prefix.ids().begin(), prefix.ids().end());
}
}  // namespace stretto::services
