#include "services/generator/openai/openai_neutral.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;

struct Neutral {
  const char* key;
  std::vector<Json> values;  // beside null, which is as good as leaving it out
  const char* reason;
};

void Take(Fields& fields, const Neutral& neutral) {
  const Json* value = fields.Take(neutral.key);
  if (value == nullptr) return;
  if (std::count(neutral.values.begin(), neutral.values.end(), *value) > 0) return;
  std::string expected;
  for (size_t i = 0; i < neutral.values.size(); ++i) {
    const Json& allowed = neutral.values[i];
    if (std::count(neutral.values.begin(), neutral.values.begin() + static_cast<long>(i), allowed))
      continue;
    absl::StrAppend(&expected, expected.empty() ? ": expected " : " or ", allowed.dump());
  }
  fields.Fail(neutral.key, absl::StrCat(neutral.reason, expected, expected.empty() ? ": " : ", or ",
                                        "leave it out"));
}

const Json kNoList = Json::array(), kNoObject = Json::object();
constexpr char kNoTools[] = "tools aren't supported";
constexpr char kTextOnly[] = "only text is supported";
}  // namespace

void TakeNeutralFields(Fields& fields, int n) {
  const std::vector<Neutral> all = {
      {"best_of", {1, n}, "choices aren't drawn beyond 'n'"},
      {"use_beam_search", {false}, "beam search isn't supported"},
      {"length_penalty", {1}, "beam search isn't supported"},
      {"early_stopping", {false}, "beam search isn't supported"},
      {"spaces_between_special_tokens", {true}, "special tokens stand as the tokenizer has them"},
      {"logits_processors", {kNoList}, "code of clients isn't run here"},
      {"bad_words", {kNoList}, "isn't supported ('logit_bias' bars tokens)"},
      {"allowed_token_ids", {}, "isn't supported ('logit_bias' bars tokens)"},
      {"detokenize", {true}, "answers have their text ('return_token_ids' adds the ids)"},
      {"return_tokens_as_token_ids", {false}, "'return_token_ids' gives the ids"},
      {"guided_grammar", {}, "grammars aren't supported ('guided_regex' and 'guided_json' are)"},
      {"guided_whitespace_pattern", {}, "isn't supported"},
      {"guided_decoding_backend", {"auto"}, "there is one way of guiding here"},
      {"kv_transfer_params", {kNoObject}, "isn't supported"},
      {"vllm_xargs", {kNoObject}, "isn't supported"},
      {"cache_salt", {}, "isn't supported"},
      {"lora_request", {}, "isn't supported"}};
  for (const Neutral& neutral : all) Take(fields, neutral);
  // Say who asks or how it is billed; nothing depends on them.
  fields.Ignore({"user", "metadata", "store", "service_tier", "safety_identifier",
                 "prompt_cache_key", "request_id"});
}

void TakeNeutralCompletionFields(Fields& fields) {
  Take(fields, {"suffix", {""}, "nothing can be put between two texts"});
  Take(fields, {"add_special_tokens", {true}, "the tokenizer adds what the model expects"});
}

void TakeNeutralChatFields(Fields& fields) {
  const std::vector<Neutral> all = {
      {"tools", {kNoList}, kNoTools},
      {"tool_choice", {"none", "auto"}, kNoTools},
      {"functions", {kNoList}, "functions aren't supported"},
      {"function_call", {"none", "auto"}, "functions aren't supported"},
      // Of tools, of which there are none.
      {"parallel_tool_calls", {true, false}, kNoTools},
      {"modalities", {Json::array({"text"})}, kTextOnly},
      {"audio", {}, kTextOnly},
      {"prediction", {}, "isn't supported"},
      {"web_search_options", {}, "isn't supported"},
      {"reasoning_effort", {"none"}, "isn't supported"},
      {"verbosity", {"medium"}, "isn't supported"},
      {"echo", {false}, "an answer never begins with the conversation"},
      {"add_special_tokens", {false}, "the chat format says what is added"},
      {"chat_template", {}, "the chat format is the server's (--chat-format)"},
      {"documents", {kNoList}, "isn't supported"},
      {"mm_processor_kwargs", {kNoObject}, kTextOnly}};
  for (const Neutral& neutral : all) Take(fields, neutral);
}
}  // namespace stretto::services
