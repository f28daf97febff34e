#include "services/generator/openai/openai_tokens.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "services/generator/openai/openai_chat.h"
#include "services/generator/openai/openai_fields.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;
constexpr size_t kMaxAnswerTokens = size_t{1} << 20;

absl::StatusOr<std::vector<int32_t>> EncodeText(const engine::PromptEncoder& prompts,
                                                const std::string& text, bool add_special_tokens) {
  if (add_special_tokens) return prompts.EncodeRaw(text, /*parse_special=*/true);
  return prompts.tokenizer().Encode(text, {.add_special_tokens = false, .parse_special = true});
}

Json Strings(const engine::Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  Json strings = Json::array();
  for (const int32_t id : ids) strings.push_back(std::string(tokenizer.TokenText(id)));
  return strings;
}
}  // namespace

absl::StatusOr<TokensAnswer> Tokenize(const std::string& body, const engine::PromptEncoder& prompts,
                                      int64_t max_model_len, const ReadBounds& bounds) {
  ASSIGN_OR_RETURN(const Json json, ParseJsonObject(body, kMaxJsonDepth));
  RETURN_IF_ERROR(bounds.check());
  TokensAnswer answer;
  Fields fields(json);
  std::string text;
  bool add_special_tokens = true, strings = false;
  fields.String("model", &answer.model);
  const bool has_text = fields.String("prompt", &text);
  const Json* messages = fields.Take("messages");
  const bool chat = messages != nullptr;
  if (fields.Bool("add_special_tokens", &add_special_tokens) && chat && add_special_tokens) {
    fields.Fail("add_special_tokens", "the chat format says what is added: expected false");
  }
  const ChatFields how = ReadChatFields(fields, prompts);
  for (const char* key :
       {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"}) {
    if (!chat && fields.Take(key) != nullptr) fields.Fail(key, "only with 'messages'");
  }
  fields.Bool("return_token_strs", &strings);
  if (has_text == chat) fields.Fail("prompt", "expected either 'prompt', a text, or 'messages'");
  RETURN_IF_ERROR(fields.Finish());
  std::vector<int32_t> ids;
  if (chat) {
    ASSIGN_OR_RETURN(ids, EncodeChat(messages, how, prompts, bounds));
  } else {
    auto encoded = EncodeText(prompts, text, add_special_tokens);
    if (!encoded.ok()) return ParamError("prompt", std::string(encoded.status().message()));
    ids = *std::move(encoded);
  }
  if (ids.size() > kMaxAnswerTokens) {
    return ParamError(chat ? "messages" : "prompt",
                      absl::StrCat("there are ", ids.size(), " tokens; up to ", kMaxAnswerTokens,
                                   " are told in one answer"));
  }
  answer.json = {{"count", ids.size()}, {"max_model_len", max_model_len}, {"tokens", ids}};
  answer.json["token_strs"] = strings ? Strings(prompts.tokenizer(), ids) : Json();
  return answer;
}

absl::StatusOr<TokensAnswer> Detokenize(const std::string& body,
                                        const engine::PromptEncoder& prompts) {
  ASSIGN_OR_RETURN(const Json json, ParseJsonObject(body, kMaxJsonDepth));
  TokensAnswer answer;
  Fields fields(json);
  std::vector<int32_t> ids;
  fields.String("model", &answer.model);
  if (fields.Take("tokens") == nullptr) fields.Fail("tokens", "expected a list of token ids");
  fields.Int32List("tokens", &ids);
  RETURN_IF_ERROR(fields.Finish());
  if (ids.size() > kMaxAnswerTokens) {
    return ParamError("tokens", absl::StrCat("'tokens': there are ", ids.size(), "; up to ",
                                             kMaxAnswerTokens, " are told in one answer"));
  }
  const engine::Tokenizer& tokenizer = prompts.tokenizer();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && !tokenizer.TokenText(ids[i]).empty()) continue;
    return ParamError("tokens", absl::StrCat("'tokens[", i, "]' is ", ids[i],
                                             ": the tokenizer has no such token"));
  }
  answer.json = {{"prompt", tokenizer.Decode(ids, /*skip_special=*/false)}};
  return answer;
}
}  // namespace stretto::services
