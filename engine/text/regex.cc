#include "engine/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

constexpr size_t kMaxPatternBytes = 1 << 16;
// Contents of a class: Unicode White_Space, and the word characters of UTS 18.
constexpr absl::string_view kSpace = R"(\x{9}-\x{d}\x{85}\p{Z})";
constexpr absl::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";

absl::Status Unsupported(absl::string_view pattern, absl::string_view what) {
  return absl::UnimplementedError(
      absl::StrCat("the pattern \"", pattern, "\" uses ", what, ", which is not supported"));
}

// The set of the class escape `escape`, or empty when PCRE2 reads it as Oniguruma does.
absl::string_view ClassContents(char escape) {
  switch (escape) {
    case 's':
    case 'S':
      return kSpace;
    case 'w':
    case 'W':
      return kWord;
    case 'h':
    case 'H':
      return "0-9A-Fa-f";
    default:
      return "";
  }
}

absl::Status AppendEscape(absl::string_view pattern, char escape, bool in_class, std::string* out) {
  const absl::string_view contents = ClassContents(escape);
  if (contents.empty()) {
    absl::StrAppend(out, "\\", std::string(1, escape));
    return absl::OkStatus();
  }
  const bool negated = escape >= 'A' && escape <= 'Z';
  if (!in_class) {
    absl::StrAppend(out, negated ? "[^" : "[", contents, "]");
  } else if (!negated) {
    absl::StrAppend(out, contents);
  } else if (escape == 'S') {
    absl::StrAppend(out, R"(\P{White_Space})");
  } else {
    return Unsupported(pattern, absl::StrCat("\\", std::string(1, escape), " inside a class"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> FromOniguruma(absl::string_view pattern) {
  std::string out;
  bool in_class = false;
  size_t class_start = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      RETURN_IF_ERROR(AppendEscape(pattern, pattern[++i], in_class, &out));
      continue;
    }
    if (!in_class && c == '[') {
      in_class = true;
      class_start = i + (i + 1 < pattern.size() && pattern[i + 1] == '^' ? 2 : 1);
    } else if (in_class && c == ']' && i > class_start) {
      in_class = false;
    } else if (in_class && c == '[') {
      return Unsupported(pattern, "a class inside a class");
    } else if (in_class && c == '&' && i + 1 < pattern.size() && pattern[i + 1] == '&') {
      return Unsupported(pattern, "an intersection of classes");
    }
    out.push_back(c);
  }
  return out;
}

std::string ErrorText(int code) {
  PCRE2_UCHAR8 text[256];
  pcre2_get_error_message_8(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

// What one search needs besides the pattern.
struct Scratch {
  explicit Scratch(const pcre2_code_8* code)
      : data(pcre2_match_data_create_from_pattern_8(code, nullptr)),
        context(pcre2_match_context_create_8(nullptr)) {
    STRETTO_CHECK_MSG(data != nullptr && context != nullptr, "out of memory");
  }
  ~Scratch() {
    pcre2_match_data_free_8(data);
    pcre2_match_context_free_8(context);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  pcre2_match_data_8* data;
  pcre2_match_context_8* context;
};

}  // namespace

struct Regex::Code {
  ~Code() { pcre2_code_free_8(compiled); }
  pcre2_code_8* compiled = nullptr;
  std::string pattern;
};

Regex::Regex(std::unique_ptr<Code> code) : code_(std::move(code)) {}
Regex::~Regex() = default;

absl::StatusOr<std::shared_ptr<const Regex>> Regex::Compile(absl::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pattern of ", pattern.size(), " bytes; at most ", kMaxPatternBytes));
  }
  ASSIGN_OR_RETURN(const std::string translated, FromOniguruma(pattern));
  // Ruby syntax, which Oniguruma uses here: ^ and $ match at every line.
  const uint32_t flags = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  int error = 0;
  PCRE2_SIZE at = 0;
  auto code = std::make_unique<Code>();
  code->pattern = std::string(pattern);
  code->compiled = pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(translated.data()),
                                   translated.size(), flags, &error, &at, nullptr);
  if (code->compiled == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the pattern \"", pattern, "\" does not compile: ", ErrorText(error)));
  }
  // Where there is no JIT (or no executable memory), matching interprets: slower, same matches.
  pcre2_jit_compile_8(code->compiled, PCRE2_JIT_COMPLETE);
  return std::shared_ptr<const Regex>(new Regex(std::move(code)));
}

absl::StatusOr<std::shared_ptr<const Regex>> Regex::Literal(absl::string_view text) {
  std::string escaped;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = NextCodePoint(text, &i);
    absl::StrAppend(&escaped, "\\x{", absl::Hex(static_cast<uint32_t>(c)), "}");
  }
  return Compile(escaped);
}

absl::Status Regex::ForEachMatch(absl::string_view text,
                                 const std::function<void(size_t, size_t)>& found) const {
  Scratch scratch(code_->compiled);
  const auto subject = reinterpret_cast<PCRE2_SPTR8>(text.data());
  size_t position = 0;
  size_t last_end = SIZE_MAX;
  while (position <= text.size()) {
    int count = pcre2_match_8(code_->compiled, subject, text.size(), position, PCRE2_NO_UTF_CHECK,
                              scratch.data, scratch.context);
    if (count == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter keeps its state on the heap
      count = pcre2_match_8(code_->compiled, subject, text.size(), position,
                            PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, scratch.data, scratch.context);
    }
    if (count == PCRE2_ERROR_NOMATCH) break;
    if (count < 0) {
      return absl::ResourceExhaustedError(absl::StrCat("searching a text of ", text.size(),
                                                       " bytes with the pattern \"", code_->pattern,
                                                       "\": ", ErrorText(count)));
    }
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer_8(scratch.data);
    const size_t begin = range[0], end = range[1];
    if (begin > end || begin < position) {
      return Unsupported(code_->pattern, "\\K in a way");
    }
    if (begin == end) {  // an empty match: only away from the last one, then on by a character
      if (begin != last_end) found(begin, end);
      position = begin < text.size() ? begin + Utf8Length(text[begin]) : begin + 1;
      last_end = end;
      continue;
    }
    found(begin, end);
    position = last_end = end;
  }
  return absl::OkStatus();
}

}  // namespace stretto::engine
