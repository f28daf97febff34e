#include "engine/text/utf8.h"

#include <array>

namespace stretto::engine {
namespace {

// The length of the well-formed character at the front of `bytes`; 0 when it is broken, with
// `*broken` the bytes of the maximal subpart (at least 1) and `*may_continue` whether it is a
// proper beginning cut off by the end of `bytes`.
size_t WellFormedLength(absl::string_view bytes, size_t* broken, bool* may_continue) {
  *may_continue = false;
  *broken = 1;
  const auto at = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (size_t i = 1; i < length; ++i) {
    if (i >= bytes.size()) {
      *may_continue = true;
      return 0;
    }
    unsigned char low = 0x80, high = 0xBF;  // table 3-7 of the Unicode standard
    if (i == 1) {
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    }
    if (at(i) < low || at(i) > high) return 0;
    *broken = i + 1;
  }
  return length;
}

struct ByteLevelTables {
  std::array<char32_t, 256> to_char{};
  std::array<int16_t, 0x144> to_byte{};
  ByteLevelTables() {
    to_byte.fill(-1);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable =
          (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      to_char[b] = printable ? static_cast<char32_t>(b) : next++;
      to_byte[to_char[b]] = static_cast<int16_t>(b);
    }
  }
};

const ByteLevelTables& ByteLevel() {
  static const ByteLevelTables tables;
  return tables;
}

}  // namespace

char32_t NextCodePoint(absl::string_view text, size_t* position) {
  const char* p = text.data() + *position;
  const auto byte = [p](int i) { return static_cast<char32_t>(static_cast<unsigned char>(p[i])); };
  const size_t length = Utf8Length(*p);
  *position += length;
  switch (length) {
    case 1:
      return byte(0);
    case 2:
      return (byte(0) & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    default:
      return (byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 |
             (byte(3) & 0x3F);
  }
}

size_t PreviousCharStart(absl::string_view text, size_t position) {
  do {
    --position;
  } while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80);
  return position;
}

void AppendUtf8(char32_t c, std::string* out) {
  const auto push = [out](char32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    push(c);
  } else if (c < 0x800) {
    push(0xC0 | c >> 6);
    push(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    push(0xE0 | c >> 12);
    push(0x80 | (c >> 6 & 0x3F));
    push(0x80 | (c & 0x3F));
  } else {
    push(0xF0 | c >> 18);
    push(0x80 | (c >> 12 & 0x3F));
    push(0x80 | (c >> 6 & 0x3F));
    push(0x80 | (c & 0x3F));
  }
}

bool IsValidUtf8(absl::string_view text) {
  size_t broken;
  bool may_continue;
  while (!text.empty()) {
    const size_t length = WellFormedLength(text, &broken, &may_continue);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

size_t AppendValidUtf8(absl::string_view bytes, bool flush, std::string* out) {
  size_t broken;
  bool may_continue;
  while (!bytes.empty()) {
    const size_t length = WellFormedLength(bytes, &broken, &may_continue);
    if (length > 0) {
      out->append(bytes.data(), length);
      bytes.remove_prefix(length);
      continue;
    }
    if (may_continue && !flush) return bytes.size();
    AppendUtf8(kReplacementChar, out);
    bytes.remove_prefix(broken);
  }
  return 0;
}

bool IsWhitespace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

char32_t ByteLevelChar(uint8_t byte) { return ByteLevel().to_char[byte]; }

int ByteLevelByte(char32_t c) {
  const auto& table = ByteLevel().to_byte;
  return c < table.size() ? table[c] : -1;
}

void AppendByteLevel(absl::string_view bytes, std::string* out) {
  for (const char b : bytes) AppendUtf8(ByteLevelChar(static_cast<uint8_t>(b)), out);
}

}  // namespace stretto::engine
