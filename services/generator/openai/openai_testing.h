// What the tests of the OpenAI-compatible API share: a model's prompts, and what is refused.
#pragma once

#include <catch2/catch.hpp>
#include <string>

#include "nlohmann/json.hpp"
#include "services/generator/openai/openai_request.h"

namespace stretto::services {
using Json = nlohmann::json;

inline const engine::PromptEncoder& Prompts() {
  static const engine::PromptEncoder* encoder = [] {
    auto files = engine::OpenModel(std::string(STRETTO_SOURCE_DIR) + "/examples/tiny-model");
    REQUIRE(files.ok());
    auto made = engine::PromptEncoder::Open(*files, {.chat_format = "none", .system_prompt = {}});
    REQUIRE(made.ok());
    return made->release();
  }();
  return *encoder;
}

struct Refusal {
  std::string message, param;
};
inline Refusal RefusalOf(const Json& body, bool chat = false) {
  const auto parsed =
      chat ? ParseChat(body.dump(), Prompts()) : ParseCompletion(body.dump(), Prompts());
  INFO(body.dump());
  REQUIRE(!parsed.ok());
  CHECK(parsed.status().code() == absl::StatusCode::kInvalidArgument);
  return {std::string(parsed.status().message()), ParamOf(parsed.status())};
}
}  // namespace stretto::services
