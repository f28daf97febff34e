#include "services/coordinator/journal_checksum.h"

#include "base/xxh3.h"

namespace stretto::services {
namespace {
// Parts are told apart by their lengths.
class Sum {
 public:
  Sum() { XXH3_64bits_reset(&state_); }
  template <class T>
  Sum& Number(T value) {
    XXH3_64bits_update(&state_, &value, sizeof(value));
    return *this;
  }
  template <class T>
  Sum& Numbers(absl::Span<const T> values) {
    Number<uint64_t>(values.size());
    XXH3_64bits_update(&state_, values.data(), values.size() * sizeof(T));
    return *this;
  }
  Sum& Text(const std::string& text) { return Numbers(absl::MakeConstSpan(text)); }
  int64_t value() const { return static_cast<int64_t>(XXH3_64bits_digest(&state_)); }

 private:
  XXH3_state_t state_;
};
}  // namespace

int64_t PromptChecksum(absl::Span<const int32_t> ids) { return Sum().Numbers(ids).value(); }

int64_t RolloutChecksum(uint64_t group, const RolloutRecord& rollout) {
  return Sum()
      .Number(group)
      .Number(rollout.sample_index)
      .Numbers(absl::MakeConstSpan(rollout.ids))
      .Numbers(absl::MakeConstSpan(rollout.logprobs))
      .Numbers(absl::MakeConstSpan(rollout.versions))
      .Numbers(absl::MakeConstSpan(rollout.sampling_logprobs))
      .Text(rollout.finish_reason)
      .value();
}

int64_t ScoreChecksum(uint64_t group, const RolloutRecord& rollout, const std::string& components) {
  return Sum()
      .Number(group)
      .Number(rollout.sample_index)
      .Number(rollout.reward + 0.0)  // SQLite knows one zero
      .Text(components)
      .Numbers(absl::MakeConstSpan(rollout.reference_logprobs))
      .value();
}
}  // namespace stretto::services
