#include "services/generator/openai/openai_request.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/json_builder.h"
#include "base/printable.h"
#include "base/status.h"
#include "engine/inference/validation.h"
#include "services/generator/openai/openai_chat.h"
#include "services/generator/openai/openai_fields.h"
#include "services/generator/openai/openai_neutral.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;
constexpr char kParamPayload[] = "stretto.openai.param";
constexpr int64_t kMaxTokens = 1 << 30;
constexpr float kLeastTemperature = 1e-4F;
using engine::kMaxLogitBias;

void ReadLogitBias(Fields& fields, engine::SamplingParams* sampling) {
  const Json* bias = fields.Take("logit_bias");
  if (bias == nullptr) return;
  if (!bias->is_object()) return fields.Fail("logit_bias", "expected an object of token ids");
  if (bias->size() > kMaxLogitBias) {
    return fields.Fail("logit_bias", absl::StrCat("has ", bias->size(), " ids; at most ",
                                                  kMaxLogitBias, " are taken"));
  }
  for (const auto& [key, value] : bias->items()) {
    int32_t id = 0;
    // As it is written only: another spelling would name an id twice.
    if (!absl::SimpleAtoi(key, &id) || absl::StrCat(id) != key || !value.is_number()) {
      return fields.Fail("logit_bias", absl::StrCat("'", Brief(key),
                                                    "' must be a token id, its value a "
                                                    "number"));
    }
    sampling->logit_bias.emplace_back(id, value.get<float>());
  }
}

void ReadSampling(Fields& fields, engine::SamplingParams* s) {
  // Some write a tiny one for greedy decoding, where two tokens may still be equally likely.
  if (fields.Float("temperature", &s->temperature) && s->temperature > 0) {
    s->temperature = std::max(s->temperature, kLeastTemperature);
  }
  fields.Float("top_p", &s->top_p);
  fields.Float("min_p", &s->min_p);
  if (fields.Int32("top_k", -1, INT32_MAX, &s->top_k) && s->top_k < 0) s->top_k = 0;
  fields.Float("presence_penalty", &s->presence_penalty);
  fields.Float("frequency_penalty", &s->frequency_penalty);
  fields.Float("repetition_penalty", &s->repetition_penalty);
  fields.Int32("min_tokens", 0, kMaxTokens, &s->min_tokens);
  fields.StringOrList("stop", &s->stop_strings);
  fields.Int32List("stop_token_ids", &s->stop_ids);
  fields.Bool("ignore_eos", &s->ignore_eos);
  fields.Bool("include_stop_str_in_output", &s->keep_stop_string);
  fields.Bool("skip_special_tokens", &s->skip_special_tokens);
  ReadLogitBias(fields, s);
}

// Keeps what stands at `path` of the body, its keys in their order: nothing else, and not too much,
// as objects in order find their keys by walking over all of them.
class SchemaReader final : public JsonBuilder<nlohmann::ordered_json> {
 public:
  explicit SchemaReader(const std::vector<std::string>& path) : path_(path) {}
  bool too_large() const { return num_keys_ > kMaxKeys; }

 private:
  static constexpr int kMaxKeys = 4096;

  bool See(Event event, const std::string& key) override {
    if (event == Event::object_end || event == Event::array_end) --depth_;
    const bool keeps = event == Event::key ? SeeKey(key) : depth_ >= path_.size() && Matches();
    if (event == Event::object_start || event == Event::array_start) ++depth_;
    return keeps && !too_large();
  }
  bool SeeKey(const std::string& key) {
    if (depth_ > path_.size()) {
      if (Matches()) ++num_keys_;
      return Matches();
    }
    const bool matches = num_matched_ >= depth_ - 1 && key == path_[depth_ - 1];
    num_matched_ = matches ? depth_ : std::min(num_matched_, depth_ - 1);
    return false;
  }
  bool Matches() const { return num_matched_ == path_.size(); }

  const std::vector<std::string>& path_;
  int num_keys_ = 0;
  size_t depth_ = 0;        // objects and lists around
  size_t num_matched_ = 0;  // of the path, by the keys that lead to where the parser is
};

// The text of the schema at `path` of the body, its properties in their order; empty if it has more
// keys than a schema that could be used.
std::string SchemaText(const std::string& body, const std::vector<std::string>& path) {
  SchemaReader reader(path);
  (void)nlohmann::ordered_json::sax_parse(body, &reader);  // has been parsed before
  if (reader.too_large()) return "";
  const auto& schema = reader.value();
  return schema.is_string() ? schema.get<std::string>() : schema.dump();
}

// Reads the fields that say what the answer must match, of which there may be one.
class ConstraintReader {
 public:
  ConstraintReader(const std::string& body, OpenAiRequest* request)
      : body_(body), request_(*request) {}

  void Read(Fields& fields) {
    ReadResponseFormat(fields);
    ReadOne(fields, "guided_regex", "", ReadRegex);
    ReadOne(fields, "guided_json", "", ReadSchema);
    ReadOne(fields, "guided_choice", "", ReadChoice);
    const Json* outputs = fields.Take("structured_outputs");
    if (outputs == nullptr) return;
    if (!outputs->is_object()) return fields.Fail("structured_outputs", "expected an object");
    Fields inner(*outputs, "structured_outputs.");
    ReadOne(inner, "regex", "structured_outputs", ReadRegex);
    ReadOne(inner, "json", "structured_outputs", ReadSchema);
    ReadOne(inner, "choice", "structured_outputs", ReadChoice);
    bool any_object = false;
    if (inner.Bool("json_object", &any_object) && any_object) {
      Set(inner, "json_object", "structured_outputs", {Kind::kJsonObject, ""});
    }
    fields.FailInside("structured_outputs", inner.Finish());
  }

 private:
  using Kind = engine::ConstraintSpec::Kind;
  enum Form { ReadRegex, ReadSchema, ReadChoice };

  void Set(Fields& fields, const std::string& key, const std::string& outer,
           engine::ConstraintSpec spec) {
    if (request_.constraint.has_value()) {
      return fields.Fail(key, absl::StrCat("'", request_.constraint_param,
                                           "' says already what the answer must match"));
    }
    request_.constraint = std::move(spec);
    request_.constraint_param = outer.empty() ? key : outer;
  }

  // A field in the body itself, or in the object `outer` of it.
  void ReadOne(Fields& fields, const std::string& key, const std::string& outer, Form form) {
    const Json* value = fields.Take(key);
    if (value == nullptr) return;
    if (form == ReadRegex) {
      if (!value->is_string()) return fields.Fail(key, "expected a regular expression");
      return Set(fields, key, outer, {Kind::kRegex, value->get<std::string>()});
    }
    if (form == ReadChoice) {
      std::vector<std::string> texts;
      if (!fields.StringOrList(key, &texts)) return;
      auto spec = engine::SpecOfTexts(texts);
      if (!spec.ok()) return fields.Fail(key, std::string(spec.status().message()));
      return Set(fields, key, outer, *std::move(spec));
    }
    if (!value->is_object() && !value->is_string()) {
      return fields.Fail(key, "expected a JSON Schema (an object, or its text)");
    }
    std::vector<std::string> path{key};
    if (!outer.empty()) path.insert(path.begin(), outer);
    SetSchema(fields, key, outer, path);
  }
  void SetSchema(Fields& fields, const std::string& key, const std::string& outer,
                 const std::vector<std::string>& path) {
    std::string text = SchemaText(body_, path);
    if (text.empty()) return fields.Fail(key, "expected a JSON Schema of up to 4096 keys");
    Set(fields, key, outer, {Kind::kJsonSchema, std::move(text)});
  }

  void ReadResponseFormat(Fields& fields) {
    const char* key = "response_format";
    const Json* format = fields.Take(key);
    if (format == nullptr) return;
    if (!format->is_object()) return fields.Fail(key, "expected an object");
    Fields inner(*format, "response_format.");
    std::string type;
    inner.String("type", &type);
    const Json* schema = inner.Take("json_schema");
    if (type == "json_object") {
      Set(fields, key, "", {Kind::kJsonObject, ""});
    } else if (type == "json_schema") {
      if (schema == nullptr || !schema->is_object() ||
          !schema->value("schema", Json()).is_object()) {
        return fields.Fail(key, "expected a 'json_schema' with a 'schema' that is an object");
      }
      SetSchema(fields, key, "", {key, "json_schema", "schema"});
    } else if (type != "text") {
      inner.Fail("type", "expected text, json_object or json_schema");
    }
    fields.FailInside(key, inner.Finish());
  }

  const std::string& body_;
  OpenAiRequest& request_;
};

void ReadStream(Fields& fields, OpenAiRequest* request) {
  fields.Bool("stream", &request->stream);
  const Json* options = fields.Take("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) return fields.Fail("stream_options", "expected an object");
  if (!request->stream) return fields.Fail("stream_options", "only with 'stream': true");
  Fields inner(*options, "stream_options.");
  inner.Bool("include_usage", &request->include_usage);
  inner.Bool("continuous_usage_stats", &request->continuous_usage);
  inner.Ignore({"include_obfuscation"});
  fields.FailInside("stream_options", inner.Finish());
}

void ReadPromptFields(Fields& fields, OpenAiRequest* request) {
  fields.Int32("prompt_logprobs", 0, kMaxTopLogprobs, &request->prompt_logprobs);
  const char* key = "truncate_prompt_tokens";
  if (fields.Int32(key, -1, kMaxTokens, &request->truncate_prompt_tokens) &&
      request->truncate_prompt_tokens == 0) {
    fields.Fail(key,
                "expected 1 or more, the last tokens to keep, or -1 for what the context has "
                "room for");
  }
}

// What both kinds of request have.
void ReadCommon(const std::string& body, Fields& fields, OpenAiRequest* request) {
  fields.String("model", &request->model);
  fields.Int32("n", 1, kMaxChoices, &request->n);
  int64_t seed = 0;
  // -1 is none, as vLLM's clients write it.
  if (fields.Int("seed", INT64_MIN, INT64_MAX, &seed) && seed != -1) {
    request->seed = static_cast<uint64_t>(seed);
  }
  fields.Int32("priority", INT32_MIN, INT32_MAX, &request->priority);
  fields.Bool("return_token_ids", &request->return_token_ids);
  ReadSampling(fields, &request->sampling);
  ReadPromptFields(fields, request);
  ConstraintReader(body, request).Read(fields);
  ReadStream(fields, request);
  TakeNeutralFields(fields, request->n);
  // As vLLM: they belong to the whole prompt, which no event of a stream does.
  if (request->stream && request->prompt_logprobs >= 0) {
    fields.Fail("prompt_logprobs", "not with 'stream': true");
  }
}

bool IsIdList(const Json& value) {
  return value.is_array() && !value.empty() && value[0].is_number();
}

absl::Status AddPrompt(const Json& value, const engine::PromptEncoder& prompts,
                       OpenAiRequest* request) {
  std::vector<int32_t> ids;
  std::string text;
  if (value.is_string()) {
    text = value.get<std::string>();
    if (text.empty()) return ParamError("prompt", "'prompt': a prompt is empty");
    ASSIGN_OR_RETURN(ids, prompts.EncodeRaw(text, /*parse_special=*/true));
  } else {
    Json object{{"prompt", value}};
    Fields fields(object);
    fields.Int32List("prompt", &ids);
    RETURN_IF_ERROR(fields.Finish());
    if (ids.empty()) return ParamError("prompt", "'prompt': a prompt is empty");
    if (request->echo) text = prompts.tokenizer().Decode(ids, /*skip_special=*/false);
  }
  request->prompts.push_back(std::move(ids));
  if (request->echo) request->prompt_texts.push_back(std::move(text));
  return absl::OkStatus();
}

// Text, a list of texts, ids, or a list of lists of ids.
absl::Status ReadPrompts(const Json* prompt, const engine::PromptEncoder& prompts,
                         const ReadBounds& bounds, OpenAiRequest* request) {
  if (prompt == nullptr) return ParamError("prompt", "'prompt' is missing");
  if (prompt->is_string() || IsIdList(*prompt)) return AddPrompt(*prompt, prompts, request);
  if (!prompt->is_array() || prompt->empty()) {
    return ParamError("prompt",
                      "'prompt': expected a text, a list of token ids, or a list of such prompts");
  }
  if (prompt->size() * static_cast<size_t>(request->n) > kMaxChoices) {
    return ParamError("prompt", absl::StrCat("'prompt': ", prompt->size(), " prompts with n ",
                                             request->n, ": at most ", kMaxChoices, " choices"));
  }
  for (const Json& entry : *prompt) {
    RETURN_IF_ERROR(bounds.check());
    RETURN_IF_ERROR(AddPrompt(entry, prompts, request));
  }
  return absl::OkStatus();
}

// Each choice of a completion repeats its prompt's log-probs, which are the server's work and not
// the client's.
absl::Status CheckRepeated(const OpenAiRequest& request, const std::string& param,
                           size_t num_alternatives) {
  size_t num_tokens = 0;
  for (const auto& prompt : request.prompts) num_tokens += prompt.size();
  const size_t num = num_tokens * static_cast<size_t>(request.n) * (1 + num_alternatives);
  if (num <= kMaxAnswerLogprobs) return absl::OkStatus();
  return ParamError(
      param, absl::StrCat("'", param, "' with ", num_alternatives, " alternatives: ", num_tokens,
                          " prompt tokens in ", request.n, " choices each are ", num,
                          " log-probs, more than the ", kMaxAnswerLogprobs,
                          " of one answer: ask with 'n': 1, for fewer prompts or alternatives"));
}

absl::Status CheckPromptLogprobs(const OpenAiRequest& request) {
  if (request.echo && request.logprobs) {
    RETURN_IF_ERROR(CheckRepeated(request, "echo", static_cast<size_t>(request.top_logprobs)));
  }
  if (request.prompt_logprobs < 0) return absl::OkStatus();
  return CheckRepeated(request, "prompt_logprobs", static_cast<size_t>(request.prompt_logprobs));
}
}  // namespace

absl::Status ParamError(const std::string& param, const std::string& message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kParamPayload, absl::Cord(param));
  return status;
}

std::string ParamOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kParamPayload);
  return payload.has_value() ? std::string(*payload) : std::string();
}

void TruncatePrompts(int64_t max_model_len, const engine::Tokenizer& tokenizer,
                     OpenAiRequest* request) {
  if (request->truncate_prompt_tokens == 0) return;
  int64_t keep = request->truncate_prompt_tokens;
  if (keep < 0) {
    const bool asks = !request->max_tokens_param.empty();
    keep = std::max<int64_t>(max_model_len - (asks ? request->sampling.max_tokens : 1), 1);
  }
  for (size_t i = 0; i < request->prompts.size(); ++i) {
    std::vector<int32_t>& ids = request->prompts[i];
    const auto size = static_cast<int64_t>(ids.size());
    if (size <= keep) continue;
    ids.erase(ids.begin(), ids.begin() + (size - keep));
    if (request->echo) request->prompt_texts[i] = tokenizer.Decode(ids, /*skip_special=*/false);
  }
}

engine::SamplingParams SamplingOf(const OpenAiRequest& request, size_t index,
                                  int64_t max_model_len) {
  engine::SamplingParams sampling = request.sampling;
  if (request.max_tokens_param.empty()) {
    const int64_t left = max_model_len - static_cast<int64_t>(request.prompts[index].size());
    // None left is an error that the engine tells.
    sampling.max_tokens = static_cast<int32_t>(std::clamp<int64_t>(left, 0, sampling.max_tokens));
  }
  // Ranks come with the likeliest, of which one at least is asked for.
  const int of_prompt = request.prompt_logprobs < 0 ? 0 : std::max(1, request.prompt_logprobs);
  sampling.top_logprobs = std::max(request.logprobs ? request.top_logprobs : 0, of_prompt);
  return sampling;
}

absl::Status InFieldsOfBody(const absl::Status& status, const OpenAiRequest& request) {
  const auto payload = status.GetPayload(engine::kFieldPayload);
  if (!payload.has_value()) return status;
  std::vector<std::pair<std::string, std::string>> names = {
      {"prompt_ids", request.chat ? "messages" : "prompt"},
      {"stop_ids", "stop_token_ids"},
      {"stop_strings", "stop"},
      {"keep_stop_string", "include_stop_str_in_output"},
      {"top_logprobs", request.chat ? "top_logprobs" : "logprobs"},
      {"max_tokens", request.max_tokens_param.empty() ? "max_tokens" : request.max_tokens_param}};
  if (!request.constraint_param.empty()) {
    names.emplace_back("constraint", request.constraint_param);
  }
  std::string param(*payload);
  for (const auto& [field, name] : names) {
    if (field == param) {
      param = name;
      break;
    }
  }
  // The engine's messages quote nothing of a client's but numbers.
  const std::string message = absl::StrReplaceAll(status.message(), names);
  return ParamError(param, absl::StrCat("'", param, "': ", message));
}

absl::StatusOr<OpenAiRequest> ParseCompletion(const std::string& body,
                                              const engine::PromptEncoder& prompts,
                                              const ReadBounds& bounds) {
  ASSIGN_OR_RETURN(const Json json, ParseJsonObject(body, kMaxJsonDepth));
  RETURN_IF_ERROR(bounds.check());
  OpenAiRequest request;
  Fields fields(json);
  ReadCommon(body, fields, &request);
  fields.Bool("echo", &request.echo);
  request.logprobs = fields.Int32("logprobs", 0, kMaxTopLogprobs, &request.top_logprobs);
  request.sampling.max_tokens = kDefaultMaxTokens;
  if (fields.Int32("max_tokens", request.echo ? 0 : 1, kMaxTokens, &request.sampling.max_tokens)) {
    request.max_tokens_param = "max_tokens";
  }
  TakeNeutralCompletionFields(fields);
  const Json* prompt = fields.Take("prompt");
  RETURN_IF_ERROR(fields.Finish());
  RETURN_IF_ERROR(ReadPrompts(prompt, prompts, bounds, &request));
  RETURN_IF_ERROR(CheckPromptLogprobs(request));
  if (request.sampling.max_tokens == 0) {
    request.prompt_only = true;
    request.sampling.max_tokens = 1;
  }
  return request;
}

absl::StatusOr<OpenAiRequest> ParseChat(const std::string& body,
                                        const engine::PromptEncoder& prompts,
                                        const ReadBounds& bounds) {
  ASSIGN_OR_RETURN(const Json json, ParseJsonObject(body, kMaxJsonDepth));
  RETURN_IF_ERROR(bounds.check());
  OpenAiRequest request;
  request.chat = true;
  Fields fields(json);
  ReadCommon(body, fields, &request);
  fields.Bool("logprobs", &request.logprobs);
  if (fields.Int32("top_logprobs", 0, kMaxTopLogprobs, &request.top_logprobs) &&
      request.top_logprobs > 0 && !request.logprobs) {
    fields.Fail("top_logprobs", "only with 'logprobs': true");
  }
  if (fields.Int32("max_tokens", 1, kMaxTokens, &request.sampling.max_tokens)) {
    request.max_tokens_param = "max_tokens";
  }
  const int32_t max_tokens = request.sampling.max_tokens;
  if (fields.Int32("max_completion_tokens", 1, kMaxTokens, &request.sampling.max_tokens)) {
    if (!request.max_tokens_param.empty() && request.sampling.max_tokens != max_tokens) {
      fields.Fail("max_completion_tokens",
                  absl::StrCat("is ", request.sampling.max_tokens, " beside a 'max_tokens' of ",
                               max_tokens, ": expected one of the two, or the same number"));
    }
    request.max_tokens_param = "max_completion_tokens";
  }
  TakeNeutralChatFields(fields);
  const ChatFields chat = ReadChatFields(fields, prompts);
  const Json* list = fields.Take("messages");
  RETURN_IF_ERROR(fields.Finish());
  ReadBounds cut = bounds;
  if (request.truncate_prompt_tokens != 0) cut.max_model_len = INT64_MAX;  // any length fits
  ASSIGN_OR_RETURN(auto ids, EncodeChat(list, chat, prompts, cut));
  request.prompts.push_back(std::move(ids));
  RETURN_IF_ERROR(CheckPromptLogprobs(request));
  return request;
}
}  // namespace stretto::services
