// Rewards of completions: the weighted sum of the run file's verifiers, reward services and reward
// models. A
// component that could not be had is an error of the completion, never a zero. Thread-safe; blocks
// for the reward services. Knows neither gRPC nor the model.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/run_config.h"
#include "services/common/metrics.h"
#include "services/scorer/reward_client.h"
#include "services/scorer/verifiers.h"

namespace stretto::services {
struct RewardPart {
  std::string name;
  double value = 0;
  double weight = 1;
};

struct Judgement {
  double reward = 0;
  std::vector<RewardPart> parts;
  absl::Status status;  // not OK: there is no reward
};

struct JudgedCompletion {
  std::string text;  // decoded, without special tokens
  int64_t num_tokens = 0;
};

struct JudgeQuery {
  std::string run_id;
  std::string line_json;  // the dataset line
  std::vector<JudgedCompletion> completions;
};

// Scores by something that needs a model. Thread-safe.
class CompletionScorer {
 public:
  virtual ~CompletionScorer() = default;
  // A finite number or why there is none, by completion. Blocks for the computation.
  virtual std::vector<absl::StatusOr<double>> Score(const JudgeQuery& query) = 0;
  // Changes whenever the scores could.
  virtual std::string identity() const = 0;
};

struct JudgeOptions {
  int64_t max_tokens = 0;      // rollout.max_tokens
  Metrics* metrics = nullptr;  // failures are counted there; outlives the judge
  // Opens what judges by a reward of type model; null where it isn't to be asked (only checked).
  std::function<absl::StatusOr<std::unique_ptr<CompletionScorer>>(const RewardSpec&)> open_model;
};

class Judge {
 public:
  // Errors of MakeVerifier and `open_model`, with the reward's place in the list.
  static absl::StatusOr<std::unique_ptr<Judge>> Create(const std::vector<RewardSpec>& specs,
                                                       const JudgeOptions& options);
  // One judgement a completion. INVALID_ARGUMENT: the line is no JSON object.
  absl::StatusOr<std::vector<Judgement>> Score(const JudgeQuery& query,
                                               const std::function<bool()>& cancelled);
  // Looks whether each reward service answers, for at most `timeout_ms` each. UNAVAILABLE: the
  // first that doesn't, with its name.
  absl::Status Probe(int64_t timeout_ms);
  // What keeps rewards from coming now, for people; empty: nothing.
  std::string trouble() const;
  // Text that changes whenever the rewards could.
  const std::string& description() const { return description_; }

 private:
  struct Component {
    RewardSpec spec;
    std::unique_ptr<Verifier> verifier;    // or
    std::unique_ptr<RewardClient> client;  // or
    std::unique_ptr<CompletionScorer> model;
    Counter failures;
  };
  Judge() = default;
  static absl::Status Open(const JudgeOptions& options, Component* component);
  // One value or failure a completion.
  std::vector<absl::StatusOr<double>> Values(const Component& component, const JudgeQuery& query,
                                             const nlohmann::json& line,
                                             const std::function<bool()>& cancelled);

  std::vector<Component> components_;
  std::string description_;
};
}  // namespace stretto::services
