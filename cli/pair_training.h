// What `stretto dpo` and `stretto reward-model` share: pairs of which one completion is preferred,
// as a dataset has them and as a step trains on them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cli/finetune_session.h"
#include "rl/pairs.h"

namespace stretto::cli {
// What of a completion is compared.
enum class PairScore {
  kLogProbs,   // rl::ScoreSequence of its log-probs
  kLastValue,  // the value that a model with a value head gives the whole
};

struct PairData {
  // By example: a group of two, `chosen` and `rejected`, in this order. For kLastValue each has one
  // token more, whose own value nobody asks for: it brings out the value of what is before it.
  std::vector<engine::TrainGroup> pairs;
  std::vector<double> margins;     // kLastValue: the lines' `margin`, 0 without one
  int64_t micro_batch_tokens = 0;  // both completions of a pair must come in one micro-batch
};
// Errors name file and line.
absl::StatusOr<PairData> ReadPairs(const engine::PromptEncoder& prompts, const FinetuneFlags& flags,
                                   PairScore score);

struct PairStepOptions {
  PairScore score = PairScore::kLogProbs;
  rl::PreferenceLoss loss = rl::PreferenceLoss::kSigmoid;  // kLogProbs
};
// Takes the session's steps. Their lines tell accuracy and margin.
absl::Status TrainOnPairs(const PairStepOptions& options, const rl::PairObjective& objective,
                          const PairData& data, engine::TrainerEngine& trainer,
                          FinetuneSession& session);
}  // namespace stretto::cli
