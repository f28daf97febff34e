#include "engine/text/pipeline.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/status.h"

namespace stretto::engine {
namespace {

// The ids that `special_tokens` of a template gives the name `name`.
absl::StatusOr<std::vector<int32_t>> TemplateIds(const JsonNode& node, const std::string& name,
                                                 int32_t vocab_size) {
  ASSIGN_OR_RETURN(const JsonNode table, node.Object("special_tokens"));
  ASSIGN_OR_RETURN(const JsonNode entry, table.Object(name));
  ASSIGN_OR_RETURN(const auto elements, entry.Array("ids"));
  std::vector<int32_t> ids;
  for (const JsonNode& element : elements) {
    ASSIGN_OR_RETURN(const int64_t id, element.AsInt());
    if (id < 0 || id >= vocab_size) {
      return element.Error(absl::StrCat("the id ", id, " is not in the vocabulary"));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenizerPipeline>> TokenizerPipeline::FromJson(
    const Json& root, absl::string_view name) {
  auto out = std::make_unique<TokenizerPipeline>();
  const JsonNode node(root, absl::StrCat(name, ":"));
  ASSIGN_OR_RETURN(const JsonNode model, node.Object("model"));
  ASSIGN_OR_RETURN(out->bpe_, Bpe::FromJson(model));
  if (node.Has("normalizer")) {
    ASSIGN_OR_RETURN(const JsonNode section, node.Object("normalizer"));
    ASSIGN_OR_RETURN(out->normalizer_, Normalizer::FromJson(section));
  }
  if (node.Has("pre_tokenizer")) {
    ASSIGN_OR_RETURN(const JsonNode section, node.Object("pre_tokenizer"));
    ASSIGN_OR_RETURN(out->pre_tokenizer_, PreTokenizer::FromJson(section));
  }
  if (node.Has("decoder")) {
    ASSIGN_OR_RETURN(const JsonNode section, node.Object("decoder"));
    ASSIGN_OR_RETURN(out->decoder_, Decoder::FromJson(section));
  }
  ASSIGN_OR_RETURN(out->added_,
                   AddedTokens::FromJson(node, out->bpe_.vocabulary(), out->normalizer_));
  if (node.Has("post_processor")) {
    ASSIGN_OR_RETURN(const JsonNode section, node.Object("post_processor"));
    RETURN_IF_ERROR(out->ReadPostProcessor(section, 0));
  }
  return out;
}

absl::Status TokenizerPipeline::ReadPostProcessor(const JsonNode& node, int depth) {
  if (depth > kMaxSequenceDepth) return node.Error("Sequence is nested too deeply");
  ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type == "ByteLevel") return absl::OkStatus();  // concerns offsets only
  if (type == "TemplateProcessing") return ReadTemplate(node);
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const auto children, node.Array("processors"));
    for (const JsonNode& child : children) RETURN_IF_ERROR(ReadPostProcessor(child, depth + 1));
    return absl::OkStatus();
  }
  return absl::UnimplementedError(absl::StrCat(
      node.where(), ": the post-processor \"", type,
      "\" is not supported; supported are TemplateProcessing, ByteLevel and Sequence"));
}

// "single" is a list of special tokens with the sequence A once among them. What was there before
// (an earlier processor of a Sequence) stands inside.
absl::Status TokenizerPipeline::ReadTemplate(const JsonNode& node) {
  ASSIGN_OR_RETURN(const auto elements, node.Array("single"));
  std::vector<int32_t> before, after;
  bool seen = false;
  for (const JsonNode& element : elements) {
    if (element.Has("SpecialToken")) {
      ASSIGN_OR_RETURN(const JsonNode token, element.Object("SpecialToken"));
      ASSIGN_OR_RETURN(const std::string name, token.String("id"));
      ASSIGN_OR_RETURN(const auto ids, TemplateIds(node, name, vocab_size()));
      auto& side = seen ? after : before;
      side.insert(side.end(), ids.begin(), ids.end());
      continue;
    }
    ASSIGN_OR_RETURN(const JsonNode sequence, element.Object("Sequence"));
    ASSIGN_OR_RETURN(const std::string name, sequence.String("id"));
    if (name != "A" || seen) {
      return element.Error("the template for one text must have the sequence A once");
    }
    seen = true;
  }
  if (!seen) return node.Error("single: the sequence A is missing");
  prefix_.insert(prefix_.begin(), before.begin(), before.end());
  suffix_.insert(suffix_.end(), after.begin(), after.end());
  return absl::OkStatus();
}

absl::Status TokenizerPipeline::Encode(absl::string_view text, Parse parse, bool at_start,
                                       BpeEncoder* encoder, std::vector<int32_t>* ids) const {
  const bool special = parse == Parse::kAll;
  std::vector<TextPart> raw_parts = {{0, text.size(), -1}};
  if (parse != Parse::kNone) raw_parts = added_.Cut(text, /*normalized=*/false, special);
  for (const TextPart& raw : raw_parts) {
    if (raw.id >= 0) {
      ids->push_back(raw.id);
      continue;
    }
    std::string normalized(text.substr(raw.begin, raw.end - raw.begin));
    bool part_at_start = at_start && raw.begin == 0;
    RETURN_IF_ERROR(normalizer_.Apply(&normalized, &part_at_start));
    std::vector<TextPart> parts = {{0, normalized.size(), -1}};
    if (parse != Parse::kNone) parts = added_.Cut(normalized, /*normalized=*/true, special);
    if (parts.size() == 1 && parts[0].id < 0) {
      RETURN_IF_ERROR(EncodeWords(std::move(normalized), part_at_start, encoder, ids));
      continue;
    }
    for (const TextPart& part : parts) {
      if (part.id >= 0) {
        ids->push_back(part.id);
        continue;
      }
      RETURN_IF_ERROR(EncodeWords(normalized.substr(part.begin, part.end - part.begin),
                                  part_at_start && part.begin == 0, encoder, ids));
    }
  }
  return absl::OkStatus();
}

absl::Status TokenizerPipeline::EncodeWords(std::string normalized, bool at_start,
                                            BpeEncoder* encoder, std::vector<int32_t>* ids) const {
  Words words(std::move(normalized));
  words.at_start = at_start;
  RETURN_IF_ERROR(pre_tokenizer_.Apply(&words));
  for (const Words::Range& range : words.ranges) encoder->Encode(words.Word(range), ids);
  return absl::OkStatus();
}

int32_t TokenizerPipeline::vocab_size() const {
  return std::max(bpe_.vocabulary().size(), added_.max_id() + 1);
}

absl::string_view TokenizerPipeline::TokenText(int32_t id) const {
  if (const AddedToken* token = added_.Get(id); token != nullptr) return token->content;
  return bpe_.vocabulary().Text(id);
}

bool TokenizerPipeline::HasToken(int32_t id) const {
  return added_.Get(id) != nullptr || bpe_.vocabulary().Has(id);
}

int32_t TokenizerPipeline::Find(absl::string_view token) const {
  const int32_t id = added_.Find(token);
  return id >= 0 ? id : bpe_.vocabulary().Find(token);
}

}  // namespace stretto::engine
