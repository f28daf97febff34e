// Text that came from a file, a request or another process, made fit for a message: nobody's
// terminal or log should obey what a stranger has written.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace stretto {
// The text with control characters (C0, DEL, C1), line breaks, marks that turn the direction of
// text, and bytes that aren't UTF-8 as "\n", "\t", "\r" or "\xNN", cut behind `max_bytes` of it
// with an ellipsis. Other text comes back as it is.
std::string Printable(absl::string_view text, size_t max_bytes = 200);
// The same for a message of several lines: line breaks and tabs stay, nothing is cut.
std::string PrintableLines(absl::string_view text);
}  // namespace stretto
