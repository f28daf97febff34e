#include "services/generator/openai/openai_writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/text/utf8.h"
#include "services/common/http_message.h"
#include "services/generator/openai/openai_fields.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;
constexpr size_t kMaxMessageBytes = 1000;  // of an error, whatever it quotes

// Text of tokens may be a part of a character; JSON holds whole ones.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

size_t NumCharacters(const std::string& bytes) {
  return static_cast<size_t>(std::count_if(bytes.begin(), bytes.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

const char* FinishName(engine::FinishReason reason) {
  return reason == engine::FinishReason::kStop ? "stop" : "length";
}

// OpenAI's words where it has any.
struct ErrorKind {
  const char* type;
  Json code;
};

ErrorKind KindOf(int http_status) {
  static constexpr char kInvalid[] = "invalid_request_error";
  switch (http_status) {
    case 401:
      return {kInvalid, "invalid_api_key"};
    case 404:
      return {kInvalid, "not_found"};
    case 405:
      return {kInvalid, "method_not_allowed"};
    case 408:
      return {kInvalid, "request_timeout"};
    case 413:
      return {kInvalid, "body_too_large"};
    case 415:
      return {kInvalid, "unsupported_media_type"};
    case 429:
      return {"rate_limit_error", "rate_limit_exceeded"};
    case kHttpClientGone:
      return {kInvalid, "cancelled"};
    case 503:
      return {"server_error", "unavailable"};
    default:
      return {http_status < 500 ? kInvalid : "server_error", nullptr};
  }
}
}  // namespace

int HttpStatusOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return 400;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kUnimplemented:
      return 405;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kCancelled:
      return kHttpClientGone;
    case absl::StatusCode::kUnavailable:
      return 503;
    default:
      return 500;
  }
}

std::string ErrorJson(const absl::Status& status) {
  return ErrorJson(status, HttpStatusOf(status));
}

std::string ErrorJson(const absl::Status& status, int http_status) {
  const ErrorKind kind = KindOf(http_status);
  const std::string param = ParamOf(status);
  return Dump({{"error",
                {{"message", Brief(status.message(), kMaxMessageBytes)},
                 {"type", kind.type},
                 {"param", param.empty() ? Json() : Json(Brief(param))},
                 {"code", kind.code}}}});
}

OpenAiWriter::OpenAiWriter(const OpenAiRequest& request, const engine::Tokenizer& tokenizer,
                           WriterOptions options)
    : request_(request), tokenizer_(tokenizer), options_(std::move(options)) {
  choices_.resize(request.prompts.size() * static_cast<size_t>(request.n));
  text_offset_.resize(choices_.size());
  num_prompt_logprobs_.resize(choices_.size());
  for (Choice& choice : choices_) choice.logprobs = EmptyLogprobs();
  if (!request.echo) return;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const size_t prompt = i / static_cast<size_t>(request.n);
    choices_[i].text = request.prompt_texts[prompt];
    choices_[i].changed = true;
    if (request.logprobs) AddLogprob(i, request.prompts[prompt][0], nullptr, nullptr);
    num_prompt_logprobs_[i] = 1;
  }
}

Json OpenAiWriter::EmptyLogprobs() const {
  if (!request_.logprobs) return nullptr;
  if (request_.chat) return {{"content", Json::array()}, {"refusal", nullptr}};
  return {{"tokens", Json::array()},
          {"token_logprobs", Json::array()},
          {"top_logprobs", request_.top_logprobs > 0 ? Json::array() : Json()},
          {"text_offset", Json::array()}};
}

std::string OpenAiWriter::TokenString(int32_t id) const {
  const std::string bytes = tokenizer_.TokenBytes(id);
  if (engine::IsValidUtf8(bytes)) return bytes;
  // A part of a character. A chat's answer has the bytes beside it.
  std::string text;
  if (request_.chat) {
    engine::AppendValidUtf8(bytes, /*flush=*/true, &text);
    return text;
  }
  text = "bytes:";
  for (const char c : bytes) absl::StrAppendFormat(&text, "\\x%02x", static_cast<uint8_t>(c));
  return text;
}

Json OpenAiWriter::TokenJson(const engine::TokenLogprob& token) const {
  Json bytes = Json::array();
  for (const char c : tokenizer_.TokenBytes(token.token)) {
    bytes.push_back(static_cast<unsigned char>(c));
  }
  return {
      {"token", TokenString(token.token)}, {"logprob", token.logprob}, {"bytes", std::move(bytes)}};
}

// `logprob` is null for a prompt's first token, which has none; `top` where none was asked for.
void OpenAiWriter::AddLogprob(size_t choice, int32_t id, const float* logprob,
                              const std::vector<engine::TokenLogprob>* top) {
  Json& out = choices_[choice].logprobs;
  if (request_.chat) {
    Json entry = TokenJson({id, *logprob});
    entry["top_logprobs"] = Json::array();
    if (top != nullptr) {
      for (const auto& t : *top) entry["top_logprobs"].push_back(TokenJson(t));
    }
    out["content"].push_back(std::move(entry));
    return;
  }
  out["tokens"].push_back(TokenString(id));
  out["token_logprobs"].push_back(logprob == nullptr ? Json() : Json(*logprob));
  out["text_offset"].push_back(text_offset_[choice]);
  text_offset_[choice] += NumCharacters(tokenizer_.TokenBytes(id));
  if (request_.top_logprobs == 0) return;
  Json alternatives;  // null at the first token of a prompt
  if (logprob != nullptr) {
    alternatives = {{TokenString(id), *logprob}};
    if (top != nullptr) {
      for (const auto& t : *top) alternatives[TokenString(t.token)] = t.logprob;
    }
  }
  out["top_logprobs"].push_back(std::move(alternatives));
}

void OpenAiWriter::AddPrompt(size_t choice, const SampleUpdate& update) {
  const std::vector<int32_t>& ids = request_.prompts[choice / static_cast<size_t>(request_.n)];
  size_t& done = num_prompt_logprobs_[choice];
  for (const engine::PromptLogprob& entry : update.prompt_logprobs) {
    AddLogprob(choice, ids[done++], &entry.logprob, &entry.top);
    choices_[choice].changed = true;
  }
}

void OpenAiWriter::AddTokens(size_t choice, const SampleUpdate& update) {
  Choice& out = choices_[choice];
  out.text += update.text;
  out.changed = out.changed || !update.ids.empty() || !update.text.empty();
  completion_tokens_ += static_cast<int64_t>(update.ids.size());
  if (!update.versions.empty()) version_ = update.versions.back();
  if (request_.return_token_ids) {
    out.ids.insert(out.ids.end(), update.ids.begin(), update.ids.end());
    out.versions.insert(out.versions.end(), update.versions.begin(), update.versions.end());
  }
  if (!request_.logprobs) return;
  for (size_t i = 0; i < update.ids.size(); ++i) {
    AddLogprob(choice, update.ids[i], &update.logprobs[i],
               i < update.top_logprobs.size() ? &update.top_logprobs[i] : nullptr);
  }
}

void OpenAiWriter::Add(size_t choice, const SampleUpdate& update) {
  if (request_.echo && request_.logprobs && !update.prompt_logprobs.empty()) {
    // They come with the first sample and are those of its siblings as well.
    for (size_t i = 0; i < static_cast<size_t>(request_.n); ++i) AddPrompt(choice + i, update);
  }
  if (!request_.prompt_only) AddTokens(choice, update);
  if (!update.finished.has_value()) return;
  Choice& out = choices_[choice];
  out.changed = true;
  out.finish_reason = request_.prompt_only ? "length" : FinishName(*update.finished);
  // The other choices share the first one's prompt, which is counted once.
  if (choice % static_cast<size_t>(request_.n) == 0) cached_tokens_ += update.cached_prompt_tokens;
  if (*update.finished == engine::FinishReason::kError) {
    failure_.Update(absl::InternalError(update.error));
  } else if (*update.finished == engine::FinishReason::kAborted) {
    failure_.Update(absl::UnavailableError("the generator is stopping: ask again later"));
  }
}

Json OpenAiWriter::ChoiceJson(size_t index, const Choice& choice, bool chunk) const {
  Json json{{"index", index},
            {"logprobs", choice.logprobs},
            {"finish_reason", choice.finish_reason.empty() ? Json() : Json(choice.finish_reason)}};
  if (!request_.chat) {
    json["text"] = choice.text;
  } else if (chunk) {
    // Clients add contents up; where none is new, as in half a character, it is empty.
    const bool last = !choice.finish_reason.empty();
    json["delta"] = choice.text.empty() && last ? Json::object() : Json{{"content", choice.text}};
  } else {
    json["message"] = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
  }
  if (!request_.return_token_ids) return json;
  json["token_ids"] = choice.ids;
  json["policy_versions"] = choice.versions;
  if (!chunk) json["prompt_token_ids"] = request_.prompts[index / static_cast<size_t>(request_.n)];
  return json;
}

Json OpenAiWriter::Envelope(bool chunk) const {
  const char* object = !request_.chat ? "text_completion"
                       : chunk        ? "chat.completion.chunk"
                                      : "chat.completion";
  return {{"id", absl::StrCat(request_.chat ? "chatcmpl-" : "cmpl-", options_.id)},
          {"object", object},
          {"created", options_.created_seconds},
          {"model", options_.model},
          {"system_fingerprint",
           version_ < 0 ? Json() : Json(absl::StrCat("policy-version-", version_))}};
}

Json OpenAiWriter::Usage() const {
  int64_t prompt_tokens = 0;
  for (const auto& prompt : request_.prompts) prompt_tokens += static_cast<int64_t>(prompt.size());
  return {{"prompt_tokens", prompt_tokens},
          {"completion_tokens", completion_tokens_},
          {"total_tokens", prompt_tokens + completion_tokens_},
          {"prompt_tokens_details", {{"cached_tokens", cached_tokens_}}}};
}

std::string OpenAiWriter::Whole() const {
  Json json = Envelope(/*chunk=*/false);
  json["choices"] = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    json["choices"].push_back(ChoiceJson(i, choices_[i], /*chunk=*/false));
  }
  json["usage"] = Usage();
  return Dump(json);
}

std::string OpenAiWriter::Event(Json choices, const Json* usage) const {
  Json json = Envelope(/*chunk=*/true);
  json["choices"] = std::move(choices);
  if (request_.include_usage) json["usage"] = usage == nullptr ? Json() : *usage;
  return absl::StrCat("data: ", Dump(json), "\n\n");
}

std::string OpenAiWriter::Begin() {
  if (!request_.chat) return "";
  std::string events;
  for (size_t i = 0; i < choices_.size(); ++i) {
    absl::StrAppend(&events, Event({{{"index", i},
                                     {"delta", {{"role", "assistant"}, {"content", ""}}},
                                     {"logprobs", nullptr},
                                     {"finish_reason", nullptr}}}));
  }
  return events;
}

std::string OpenAiWriter::TakeChunks() {
  std::string events;
  for (size_t i = 0; i < choices_.size(); ++i) {
    Choice& choice = choices_[i];
    if (!choice.changed) continue;
    absl::StrAppend(&events, Event(Json::array({ChoiceJson(i, choice, /*chunk=*/true)})));
    choice = Choice();
    choice.logprobs = EmptyLogprobs();
  }
  return events;
}

std::string OpenAiWriter::End() {
  if (!failure_.ok()) return absl::StrCat("data: ", ErrorJson(failure_), "\n\n");
  std::string events;
  if (request_.include_usage) {
    const Json usage = Usage();
    events = Event(Json::array(), &usage);
  }
  return absl::StrCat(events, "data: [DONE]\n\n");
}
}  // namespace stretto::services
