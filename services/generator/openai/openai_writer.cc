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
constexpr size_t kMaxMessageBytes = 1000;           // of an error, whatever it quotes
constexpr size_t kMaxChunkBytes = size_t{1} << 20;  // of a stream, about, at a time

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
  prompt_logprobs_.resize(request.prompts.size());
  if (!request.echo) return;
  for (Choice& choice : choices_) choice.owes_prompt_text = choice.changed = true;
}

std::string OpenAiWriter::TokenString(int32_t id) const {
  std::string bytes = tokenizer_.TokenBytes(id);
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

// The tokens whose log-probs have not been written: of an echoed prompt, then of the completion.
std::vector<OpenAiWriter::TokenView> OpenAiWriter::TakeTokens(size_t choice) {
  Choice& out = choices_[choice];
  std::vector<TokenView> tokens;
  if (request_.echo) {
    const std::vector<int32_t>& ids = request_.prompts[PromptOf(choice)];
    const std::vector<engine::PromptLogprob>& known = prompt_logprobs_[PromptOf(choice)];
    for (size_t& i = out.num_prompt_tokens; i < std::min(ids.size(), known.size() + 1); ++i) {
      tokens.push_back(i == 0 ? TokenView{ids[i], nullptr, nullptr}
                              : TokenView{ids[i], &known[i - 1].logprob, &known[i - 1].top});
    }
  }
  for (const Token& token : out.tokens) tokens.push_back({token.id, &token.logprob, &token.top});
  return tokens;
}

// By the tokens' strings, of which two may be the same; null at the first token of a prompt.
Json OpenAiWriter::Alternatives(const TokenView& token) const {
  if (token.logprob == nullptr) return nullptr;
  Json alternatives{{TokenString(token.id), *token.logprob}};
  // There may be more for `prompt_logprobs`.
  const size_t num_top = std::min(token.top->size(), static_cast<size_t>(request_.top_logprobs));
  for (size_t i = 0; i < num_top; ++i) {
    const engine::TokenLogprob& other = (*token.top)[i];
    alternatives[TokenString(other.token)] = other.logprob;
  }
  return alternatives;
}

std::string OpenAiWriter::ChatLogprobs(const std::vector<TokenView>& tokens) const {
  std::string text = R"({"refusal":null,"content":[)";
  for (const TokenView& token : tokens) {
    Json entry = TokenJson({token.id, *token.logprob});
    entry["top_logprobs"] = Json::array();
    for (const auto& t : *token.top) entry["top_logprobs"].push_back(TokenJson(t));
    absl::StrAppend(&text, text.back() == '[' ? "" : ",", Dump(entry));
  }
  return text + "]}";
}

// Written as text at once: as values of JSON they would take a hundred bytes a number.
std::string OpenAiWriter::Logprobs(size_t choice) {
  if (!request_.logprobs) return "null";
  const std::vector<TokenView> tokens = TakeTokens(choice);
  if (request_.chat) return ChatLogprobs(tokens);
  std::string text;
  const auto list = [&](const char* name, const auto& item) {
    absl::StrAppend(&text, text.empty() ? "{\"" : ",\"", name, "\":[");
    for (const TokenView& token : tokens) {
      absl::StrAppend(&text, text.back() == '[' ? "" : ",", item(token));
    }
    text += ']';
  };
  list("tokens", [&](const TokenView& token) { return Dump(TokenString(token.id)); });
  list("token_logprobs", [&](const TokenView& token) {
    return Dump(token.logprob == nullptr ? Json() : Json(*token.logprob));
  });
  size_t& offset = choices_[choice].text_offset;
  list("text_offset", [&](const TokenView& token) {
    const size_t before = offset;
    offset += NumCharacters(tokenizer_.TokenBytes(token.id));
    return absl::StrCat(before);
  });
  if (request_.top_logprobs == 0) return text + R"(,"top_logprobs":null})";
  list("top_logprobs", [&](const TokenView& token) { return Dump(Alternatives(token)); });
  return text + "}";
}

// As vLLM: by the tokens' ids, the first token's is null.
std::string OpenAiWriter::PromptLogprobs(size_t prompt) const {
  const std::vector<int32_t>& ids = request_.prompts[prompt];
  const std::vector<engine::PromptLogprob>& known = prompt_logprobs_[prompt];
  std::string text = "[null";
  for (size_t i = 0; i < std::min(known.size(), ids.size() - 1); ++i) {
    Json entry = Json::object();
    const auto add = [&](int32_t id, float logprob, size_t rank) {
      entry[absl::StrCat(id)] = {
          {"logprob", logprob}, {"rank", rank}, {"decoded_token", TokenString(id)}};
    };
    add(ids[i + 1], known[i].logprob, static_cast<size_t>(known[i].rank));
    const std::vector<engine::TokenLogprob>& top = known[i].top;
    for (size_t k = 0; k < std::min(top.size(), static_cast<size_t>(request_.prompt_logprobs));
         ++k) {
      add(top[k].token, top[k].logprob, k + 1);
    }
    absl::StrAppend(&text, ",", Dump(entry));
  }
  return text + "]";
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
  CountLogprobs(update.ids.size());
  for (size_t i = 0; i < update.ids.size(); ++i) {
    Token& token = out.tokens.emplace_back();
    token.id = update.ids[i];
    token.logprob = update.logprobs[i];
    if (i >= update.top_logprobs.size()) continue;
    const std::vector<engine::TokenLogprob>& top = update.top_logprobs[i];
    const size_t num_top = std::min(top.size(), static_cast<size_t>(request_.top_logprobs));
    token.top.assign(top.begin(), top.begin() + static_cast<ptrdiff_t>(num_top));
  }
}

// An answer that is not sent as it comes is held until its end.
void OpenAiWriter::CountLogprobs(size_t num_tokens) {
  if (request_.stream) return;
  num_logprobs_ += num_tokens * LogprobsPerToken(request_);
  if (num_logprobs_ <= kMaxAnswerLogprobs) return;
  failure_.Update(ParamError(
      "logprobs", absl::StrCat("'logprobs': the answer has more than ", kMaxAnswerLogprobs,
                               " log-probs: ask for fewer choices, tokens or alternatives, or for "
                               "a stream ('stream': true)")));
}

void OpenAiWriter::Add(size_t choice, const SampleUpdate& update) {
  if (!update.prompt_logprobs.empty()) {
    // They come with the first sample and are those of its siblings as well.
    prompt_logprobs_[PromptOf(choice)] = update.prompt_logprobs;
    for (size_t i = 0; i < static_cast<size_t>(request_.n); ++i)
      choices_[choice + i].changed = true;
  }
  if (!request_.prompt_only) AddTokens(choice, update);
  if (!update.finished.has_value()) return;
  Choice& out = choices_[choice];
  out.changed = true;
  out.finish_reason = request_.prompt_only ? "length" : FinishName(*update.finished);
  if (request_.prompt_only) {
    // What was drawn isn't told.
  } else if (update.stop_string >= 0) {
    out.stop_reason = request_.sampling.stop_strings[static_cast<size_t>(update.stop_string)];
  } else if (update.stop_id >= 0) {
    out.stop_reason = update.stop_id;
  }
  // The other choices share the first one's prompt, which is counted once.
  if (choice % static_cast<size_t>(request_.n) == 0) cached_tokens_ += update.cached_prompt_tokens;
  if (*update.finished == engine::FinishReason::kError) {
    failure_.Update(absl::InternalError(update.error));
  } else if (*update.finished == engine::FinishReason::kAborted) {
    failure_.Update(absl::UnavailableError("the generator is stopping: ask again later"));
  }
}

// What is new of a choice, as JSON; then nothing is.
std::string OpenAiWriter::TakeChoice(size_t index, bool chunk) {
  Choice& choice = choices_[index];
  std::string text = choice.owes_prompt_text
                         ? absl::StrCat(request_.prompt_texts[PromptOf(index)], choice.text)
                         : std::move(choice.text);
  Json json{{"index", index},
            {"finish_reason", choice.finish_reason.empty() ? Json() : Json(choice.finish_reason)},
            {"stop_reason", choice.stop_reason}};
  if (!request_.chat) {
    json["text"] = std::move(text);
  } else if (chunk) {
    // Clients add contents up; where none is new, as in half a character, it is empty.
    const bool last = !choice.finish_reason.empty();
    json["delta"] = text.empty() && last ? Json::object() : Json{{"content", std::move(text)}};
  } else {
    json["message"] = {{"role", "assistant"}, {"content", std::move(text)}, {"refusal", nullptr}};
  }
  if (request_.return_token_ids) {
    json["token_ids"] = choice.ids;
    json["policy_versions"] = choice.versions;
    if (!chunk) json["prompt_token_ids"] = request_.prompts[PromptOf(index)];
  }
  std::string written =
      absl::StrCat("{\"logprobs\":", Logprobs(index), ",", absl::string_view(Dump(json)).substr(1));
  if (request_.prompt_logprobs >= 0 && !request_.chat) {
    written.pop_back();
    absl::StrAppend(&written, ",\"prompt_logprobs\":", PromptLogprobs(PromptOf(index)), "}");
  }
  Choice next;
  next.num_prompt_tokens = choice.num_prompt_tokens;
  next.text_offset = choice.text_offset;
  choice = std::move(next);
  return written;
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

std::optional<std::string> OpenAiWriter::NextPiece() {
  const size_t index = next_piece_++;
  if (index > choices_.size()) return std::nullopt;
  if (index < choices_.size()) {
    return absl::StrCat(index == 0 ? "{\"choices\":[" : ",", TakeChoice(index, /*chunk=*/false));
  }
  Json json = Envelope(/*chunk=*/false);
  json["usage"] = Usage();
  std::string end = "],";
  if (request_.prompt_logprobs >= 0 && request_.chat) {
    absl::StrAppend(&end, "\"prompt_logprobs\":", PromptLogprobs(0), ",");
  }
  return absl::StrCat(end, absl::string_view(Dump(json)).substr(1));
}

std::string OpenAiWriter::Whole() {
  std::string whole;
  while (const std::optional<std::string> piece = NextPiece()) whole += *piece;
  return whole;
}

std::string OpenAiWriter::Event(const std::string& choices, const Json* usage) const {
  Json json = Envelope(/*chunk=*/true);
  if (request_.include_usage) {
    json["usage"] = usage != nullptr ? *usage : request_.continuous_usage ? Usage() : Json();
  }
  return absl::StrCat("data: {\"choices\":[", choices, "],",
                      absl::string_view(Dump(json)).substr(1), "\n\n");
}

std::string OpenAiWriter::Begin() {
  if (!request_.chat) return "";
  std::string events;
  for (size_t i = 0; i < choices_.size(); ++i) {
    absl::StrAppend(&events, Event(Dump({{"index", i},
                                         {"delta", {{"role", "assistant"}, {"content", ""}}},
                                         {"logprobs", nullptr},
                                         {"finish_reason", nullptr}})));
  }
  return events;
}

bool OpenAiWriter::HasChunks() const {
  return std::any_of(choices_.begin(), choices_.end(),
                     [](const Choice& choice) { return choice.changed; });
}

std::string OpenAiWriter::TakeChunks() {
  std::string events;
  for (size_t i = 0; i < choices_.size() && events.size() < kMaxChunkBytes; ++i) {
    if (choices_[i].changed) absl::StrAppend(&events, Event(TakeChoice(i, /*chunk=*/true)));
  }
  return events;
}

std::string OpenAiWriter::End() {
  if (!failure_.ok()) return absl::StrCat("data: ", ErrorJson(failure_), "\n\ndata: [DONE]\n\n");
  std::string events;
  if (request_.include_usage) {
    const Json usage = Usage();
    events = Event("", &usage);
  }
  return absl::StrCat(events, "data: [DONE]\n\n");
}
}  // namespace stretto::services
