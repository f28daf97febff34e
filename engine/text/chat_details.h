// What a model's chat template says of itself: which families' markers its text has, and what
// varies inside a family. The template isn't run. Pure functions.
#pragma once

#include <vector>

#include "absl/strings/string_view.h"
#include "engine/text/chat_template.h"

namespace stretto::engine {
// The families whose markers the template has. None, or several: it is of another kind.
std::vector<ChatFormat> FamiliesOf(absl::string_view jinja);

// The format as the template writes it; as most of its models do where `jinja` is empty.
ChatTemplate DetailsOf(ChatFormat format, absl::string_view jinja);
}  // namespace stretto::engine
