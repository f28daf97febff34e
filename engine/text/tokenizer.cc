#include "engine/text/tokenizer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/files.h"
#include "base/status.h"
#include "engine/text/gguf_json.h"
#include "engine/text/pipeline.h"
#include "engine/text/stream_decoder.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

// The content of a "bos_token"-like field: a string, or an object with the string in "content".
absl::StatusOr<std::string> SpecialTokenText(const JsonNode& config, absl::string_view key) {
  if (!config.Has(key)) return std::string();
  if (config.value()[std::string(key)].is_object()) {
    ASSIGN_OR_RETURN(const JsonNode token, config.Object(key));
    return token.String("content");
  }
  return config.String(key);
}

// The "chat_template" field: a string, or a list of named templates of which "default" counts.
absl::StatusOr<std::string> ChatTemplateText(const JsonNode& config) {
  if (!config.Has("chat_template")) return std::string();
  if (!config.value()["chat_template"].is_array()) return config.String("chat_template");
  ASSIGN_OR_RETURN(const auto templates, config.Array("chat_template"));
  for (const JsonNode& entry : templates) {
    ASSIGN_OR_RETURN(const std::string name, entry.String("name"));
    if (name == "default") return entry.String("template");
  }
  return std::string();
}

// A minimal tokenizer_config.json for a tokenizer that came without one.
std::string MakeConfigJson() {
  return Json{{"tokenizer_class", "PreTrainedTokenizerFast"},
              {"clean_up_tokenization_spaces", false}}
             .dump(2) +
         "\n";
}

// `text`, repaired in `storage` when it is not valid UTF-8.
absl::string_view AsValidUtf8(absl::string_view text, std::string* storage) {
  if (IsValidUtf8(text)) return text;
  AppendValidUtf8(text, /*flush=*/true, storage);
  return *storage;
}

}  // namespace

Tokenizer::Tokenizer() = default;
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(absl::string_view bytes,
                                                               absl::string_view name) {
  ASSIGN_OR_RETURN(const Json root, ParseJson(bytes, name));
  std::unique_ptr<Tokenizer> out(new Tokenizer());
  ASSIGN_OR_RETURN(out->pipeline_, TokenizerPipeline::FromJson(root, name));
  out->tokenizer_json_ = std::string(bytes);
  out->tokenizer_config_json_ = MakeConfigJson();
  out->unk_id_ = out->pipeline_->bpe().unk_id();
  return out;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, Files::Real().ReadAll(path));
  return FromJson(bytes, path);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromFolder(const std::string& folder) {
  ASSIGN_OR_RETURN(auto out, FromFile(JoinPath(folder, "tokenizer.json")));
  RETURN_IF_ERROR(out->ReadConfig(folder));
  return out;
}

absl::Status Tokenizer::ReadConfig(const std::string& folder) {
  const std::string path = JoinPath(folder, "tokenizer_config.json");
  if (Files::Real().Exists(path)) {
    ASSIGN_OR_RETURN(tokenizer_config_json_, Files::Real().ReadAll(path));
    ASSIGN_OR_RETURN(const Json root, ParseJson(tokenizer_config_json_, path));
    const JsonNode config(root, absl::StrCat(path, ":"));
    const std::pair<absl::string_view, int32_t*> fields[] = {{"bos_token", &bos_id_},
                                                             {"eos_token", &eos_id_},
                                                             {"pad_token", &pad_id_},
                                                             {"unk_token", &unk_id_}};
    for (const auto& [key, id] : fields) {
      ASSIGN_OR_RETURN(const std::string token, SpecialTokenText(config, key));
      if (token.empty()) continue;
      *id = pipeline_->Find(token);
      if (*id < 0) {
        return config.Error(
            absl::StrCat(key, " is \"", token, "\", which tokenizer.json does not have"));
      }
    }
    ASSIGN_OR_RETURN(chat_template_, ChatTemplateText(config));
  }
  const std::string jinja_path = JoinPath(folder, "chat_template.jinja");
  if (Files::Real().Exists(jinja_path)) {  // where newer versions of transformers write it
    ASSIGN_OR_RETURN(chat_template_, Files::Real().ReadAll(jinja_path));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromGguf(const GgufVocab& vocab) {
  ASSIGN_OR_RETURN(const Json root, TokenizerJsonFromGguf(vocab));
  std::unique_ptr<Tokenizer> out(new Tokenizer());
  ASSIGN_OR_RETURN(out->pipeline_, TokenizerPipeline::FromJson(root, kGgufName));
  out->tokenizer_json_ = root.dump(1) + "\n";
  out->tokenizer_config_json_ = TokenizerConfigFromGguf(vocab).dump(2) + "\n";
  out->chat_template_ = vocab.chat_template;
  out->bos_id_ = vocab.bos;
  out->eos_id_ = vocab.eos;
  out->pad_id_ = vocab.pad;
  out->unk_id_ = vocab.unk >= 0 ? vocab.unk : out->pipeline_->bpe().unk_id();
  return out;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(absl::string_view text,
                                                       const EncodeOptions& options) const {
  using Parse = TokenizerPipeline::Parse;
  const Parse parse = !options.parse_added    ? Parse::kNone
                      : options.parse_special ? Parse::kAll
                                              : Parse::kNotSpecial;
  std::string storage;
  BpeEncoder encoder(pipeline_->bpe());
  std::vector<int32_t> ids;
  if (options.add_special_tokens) ids = pipeline_->prefix();
  RETURN_IF_ERROR(
      pipeline_->Encode(AsValidUtf8(text, &storage), parse, /*at_start=*/true, &encoder, &ids));
  if (options.add_special_tokens) {
    ids.insert(ids.end(), pipeline_->suffix().begin(), pipeline_->suffix().end());
  }
  return ids;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodePieces(absl::Span<const EncodePiece> pieces,
                                                             bool parse_added) const {
  using Parse = TokenizerPipeline::Parse;
  BpeEncoder encoder(pipeline_->bpe());
  std::vector<int32_t> ids;
  std::string text;
  bool at_start = true;
  const AddedToken* before = nullptr;  // the token that the text follows
  // `after` is the token that follows the text. Tokens may take the white space beside them.
  const auto flush = [&](const AddedToken* after) -> absl::Status {
    if (before != nullptr && before->rstrip) text.erase(0, SpaceEndAfter(text, 0));
    if (after != nullptr && after->lstrip) text.resize(SpaceStartBefore(text, text.size()));
    before = after;
    if (text.empty()) return absl::OkStatus();
    std::string storage;
    RETURN_IF_ERROR(pipeline_->Encode(AsValidUtf8(text, &storage),
                                      parse_added ? Parse::kNotSpecial : Parse::kNone, at_start,
                                      &encoder, &ids));
    text.clear();
    at_start = false;
    return absl::OkStatus();
  };
  for (const EncodePiece& piece : pieces) {
    if (piece.token_id < 0) {
      text += piece.text;
      continue;
    }
    if (!pipeline_->HasToken(piece.token_id)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the tokenizer has no token with id ", piece.token_id));
    }
    RETURN_IF_ERROR(flush(pipeline_->added().Get(piece.token_id)));
    ids.push_back(piece.token_id);
    at_start = false;
  }
  RETURN_IF_ERROR(flush(nullptr));
  return ids;
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids, bool skip_special) const {
  StreamDecoder stream(*this, skip_special);
  std::string text;
  for (const int32_t id : ids) text += stream.Push(id);
  return text + stream.Finish();
}

std::string Tokenizer::TokenBytes(int32_t id) const {
  return pipeline_->decoder().TokenBytes(TokenText(id));
}

absl::string_view Tokenizer::TokenText(int32_t id) const { return pipeline_->TokenText(id); }

absl::optional<int32_t> Tokenizer::Find(absl::string_view token) const {
  const int32_t id = pipeline_->Find(token);
  if (id < 0) return absl::nullopt;
  return id;
}

bool Tokenizer::IsSpecial(int32_t id) const {
  const AddedToken* token = pipeline_->added().Get(id);
  return token != nullptr && token->special;
}

int32_t Tokenizer::vocab_size() const { return pipeline_->vocab_size(); }

}  // namespace stretto::engine
