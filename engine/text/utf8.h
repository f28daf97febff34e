// UTF-8 in small pieces: reading and writing code points, repairing broken input, and the
// byte-to-character alphabet of byte-level BPE. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace stretto::engine {

constexpr char32_t kReplacementChar = 0xFFFD;

// Bytes of the character that starts with `lead` in valid UTF-8.
inline size_t Utf8Length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// Reads the character at `*position` of valid UTF-8 and moves past it.
char32_t NextCodePoint(absl::string_view text, size_t* position);
// The start of the character that ends just before `position` > 0.
size_t PreviousCharStart(absl::string_view text, size_t position);
void AppendUtf8(char32_t code_point, std::string* out);

bool IsValidUtf8(absl::string_view text);

// Appends `bytes` to `out`, each maximal broken part (Unicode standard, section 3.9, "U+FFFD
// substitution of maximal subparts") replaced by U+FFFD. Returns how many bytes at the end were
// left out because they begin a character that may be continued; with `flush` these are broken too,
// and 0 is returned.
size_t AppendValidUtf8(absl::string_view bytes, bool flush, std::string* out);

// Unicode property White_Space.
bool IsWhitespace(char32_t code_point);

// The alphabet of byte-level BPE (GPT-2): printable Latin-1 bytes stand for themselves, the other
// 68 for U+0100 onwards.
char32_t ByteLevelChar(uint8_t byte);
// The byte that a character of the alphabet stands for, or -1.
int ByteLevelByte(char32_t code_point);
// `bytes` written in the alphabet.
void AppendByteLevel(absl::string_view bytes, std::string* out);

}  // namespace stretto::engine
