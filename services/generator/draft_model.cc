#include "services/generator/draft_model.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::services {
namespace {
// Guesses are token ids: they mean something to the policy only if they are the same tokens there.
absl::Status CheckSameTokenizer(const engine::Tokenizer& policy, const engine::Tokenizer& draft) {
  const int32_t size = std::max(policy.vocab_size(), draft.vocab_size());
  for (int32_t id = 0; id < size; ++id) {
    if (policy.TokenText(id) == draft.TokenText(id) &&
        policy.IsSpecial(id) == draft.IsSpecial(id)) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "it has another tokenizer than the policy: token ", id, " is '", draft.TokenText(id),
        "' there and '", policy.TokenText(id), "' here; use a draft model of the same family"));
  }
  return absl::OkStatus();
}

// Quantised files are computed in the policy's dtype: size on disk says nothing about time or
// memory.
std::string NoticeOf(const engine::TensorSource& tensors, DType dtype) {
  int64_t num_elements = 0;
  std::map<absl::string_view, int64_t> quantized;  // elements by type
  for (const engine::TensorInfo& tensor : tensors.tensors()) {
    num_elements += engine::NumElements(tensor);
    if (engine::BlockElements(tensor.type) == 1) continue;
    quantized[engine::Name(tensor.type)] += engine::NumElements(tensor);
  }
  if (quantized.empty()) return "";
  std::string type;
  for (const auto& [name, count] : quantized)
    absl::StrAppend(&type, type.empty() ? "" : ", ", name);
  const int64_t bytes = num_elements * (dtype == DType::kBF16 ? 2 : 4);
  return absl::StrCat("the draft model ", tensors.path(), " is quantised (", type,
                      ") on disk only: it is read into ", Name(dtype), ", takes ", bytes >> 20,
                      " MiB and drafts as slowly as an unquantised one");
}

absl::Status OpenDraftModel(const ModelHost& host, const std::string& path,
                            Speculation* speculation) {
  ASSIGN_OR_RETURN(const engine::ModelFiles files, engine::OpenModel(path));
  RETURN_IF_ERROR(engine::CheckShapes(files.config, *files.tensors));
  ASSIGN_OR_RETURN(const auto tokenizer, engine::OpenTokenizer(files));
  RETURN_IF_ERROR(CheckSameTokenizer(host.prompts->tokenizer(), *tokenizer));
  engine::TransformerOptions options;
  options.dtype = host.dtype;
  options.max_sequence_length = std::min(host.transformer->options().max_sequence_length,
                                         files.config.max_position_embeddings);
  ASSIGN_OR_RETURN(speculation->transformer,
                   engine::Transformer::Create(*host.device, files.config, options));
  const std::unique_ptr<engine::Stream> stream = host.device->CreateStream();
  ASSIGN_OR_RETURN(
      std::unique_ptr<engine::ModelWeights> weights,
      engine::ModelWeights::Load(*host.device, *stream, files.config, host.dtype, *files.tensors));
  speculation->notice = NoticeOf(*files.tensors, host.dtype);
  speculation->options.draft_model = speculation->transformer.get();
  speculation->options.draft_weights = std::move(weights);
  return absl::OkStatus();
}
}  // namespace

absl::StatusOr<Speculation> OpenSpeculation(const ModelHost& host, const std::string& kind,
                                            const std::string& draft_model, int64_t draft_tokens) {
  Speculation speculation;
  engine::SpeculationOptions& options = speculation.options;
  if (kind == "ngram") {
    options.kind = engine::SpeculationKind::kNgram;
  } else if (kind == "model") {
    options.kind = engine::SpeculationKind::kModel;
  } else if (kind != "off") {
    return absl::InvalidArgumentError(
        absl::StrCat("speculation '", kind, "': expected off, ngram or model"));
  }
  if (kind == "model" && draft_model.empty()) {
    return absl::InvalidArgumentError("speculation model: needs a draft model (--draft-model)");
  }
  if (kind != "model" && !draft_model.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "draft model ", draft_model, " (--draft-model): is for speculation model, not ", kind));
  }
  if (draft_tokens < 1 || draft_tokens > engine::kMaxDraft) {
    return absl::InvalidArgumentError(
        absl::StrCat("draft tokens: ", draft_tokens, ": expected 1 to ", engine::kMaxDraft));
  }
  options.max_draft = static_cast<int32_t>(draft_tokens);
  if (!draft_model.empty()) {
    const absl::Status status = OpenDraftModel(host, draft_model, &speculation);
    if (!status.ok()) return Annotate(status, absl::StrCat("draft model ", draft_model));
  }
  return speculation;
}
}  // namespace stretto::services
