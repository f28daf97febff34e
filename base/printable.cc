#include "base/printable.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_format.h"

namespace stretto {
namespace {
// The bytes of the well-formed character at the beginning of `text`; 0: there is none. Its code
// point goes to `code`.
size_t CharacterSize(absl::string_view text, uint32_t* code) {
  const auto byte = [&text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  size_t size = 1;
  if (first >= 0xC2 && first <= 0xDF) size = 2;
  if (first >= 0xE0 && first <= 0xEF) size = 3;
  if (first >= 0xF0 && first <= 0xF4) size = 4;
  if ((first >= 0x80 && size == 1) || text.size() < size) return 0;
  *code = size == 1 ? first : first & (0xFFu >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    *code = (*code << 6) | (byte(i) & 0x3Fu);
  }
  const bool overlong = (size == 3 && *code < 0x800) || (size == 4 && *code < 0x10000);
  const bool surrogate = *code >= 0xD800 && *code <= 0xDFFF;
  return overlong || surrogate || *code > 0x10FFFF ? 0 : size;
}

bool IsHarmless(uint32_t code) {
  const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool separator = code == 0x2028 || code == 0x2029;
  const bool direction = code == 0x061C || (code >= 0x200E && code <= 0x200F) ||
                         (code >= 0x202A && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
  return !control && !separator && !direction;
}

void AppendEscaped(absl::string_view bytes, std::string* out) {
  for (const char c : bytes) {
    if (c == '\n') {
      *out += "\\n";
    } else if (c == '\t') {
      *out += "\\t";
    } else if (c == '\r') {
      *out += "\\r";
    } else {
      absl::StrAppendFormat(out, "\\x%02x", static_cast<unsigned char>(c));
    }
  }
}
}  // namespace

std::string PrintableLines(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of("\n\t"), text.size());
    out += Printable(text.substr(0, end), end);
    if (end < text.size()) out += text[end];
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

std::string Printable(absl::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    uint32_t code = 0;
    const size_t size = CharacterSize(text.substr(i), &code);
    const size_t step = size == 0 ? 1 : size;
    if (i + step > max_bytes) return out + "\u2026";
    if (size > 0 && IsHarmless(code)) {
      out.append(text.data() + i, size);
    } else {
      AppendEscaped(text.substr(i, step), &out);
    }
    i += step;
  }
  return out;
}
}  // namespace stretto
