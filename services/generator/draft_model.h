// How a generator speculates: from names and paths as run file and flags have them to the engine's
// options, with the draft model opened on the policy's device. Its weights never change: while the
// policy learns, fewer drafts are accepted (see speculation_metrics.h), never other tokens written.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/inference/speculation_options.h"
#include "services/common/model_host.h"

namespace stretto::services {
// The options' draft model lives as long as this.
struct Speculation {
  std::unique_ptr<engine::Transformer> transformer;  // if there is a draft model
  engine::SpeculationOptions options;
  std::string notice;  // what one should know of the draft model; empty: nothing
};
// `kind`: off, ngram or model. Errors name the setting, or the draft model's path and reason; one
// with another tokenizer than the policy's is refused. Blocks for reading the draft model.
absl::StatusOr<Speculation> OpenSpeculation(const ModelHost& host, const std::string& kind,
                                            const std::string& draft_model, int64_t draft_tokens);
}  // namespace stretto::services
