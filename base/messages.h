// Messages of a conversation as they stand in JSON: in data sets, prompts' files and requests
// alike, so that the same messages are the same prompt wherever they come from.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace stretto {
struct Message {
  std::string role;  // system, user or assistant; `developer`, OpenAI's newer name, is system
  std::string content;
};

// `name` is the message's in errors ("messages[2]"). `content` is a text or a list of parts of type
// text; an assistant's may be null or missing, which is no text. `name` (whose message it is) is
// passed over, as no chat format here writes it, and so is what is null or says that no tools were
// called; any other field is an error that names it.
absl::StatusOr<Message> ReadMessage(const nlohmann::json& json, const std::string& name);
// A list of at least one, `messages` in errors.
absl::StatusOr<std::vector<Message>> ReadMessages(const nlohmann::json& list);
// What a line of a data set asks: the list of its messages, which stand in `messages` or, as TRL's
// data sets have them, in `prompt`; nullptr: `prompt` is no list (a text, if it's valid). An error:
// neither of the two fields, or both.
absl::StatusOr<const nlohmann::json*> FindMessages(const nlohmann::json& line);
// Whether an object has the field with something in it: a null counts as absent.
bool HasField(const nlohmann::json& object, const char* field);
}  // namespace stretto
