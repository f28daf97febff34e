// Unicode normalization forms (Unicode Standard Annex 15) and per-character lower-casing, on valid
// UTF-8, from tables generated out of the Unicode Character Database. Pure functions.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace stretto::engine {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

std::string Normalize(NormalForm form, absl::string_view text);

// True when the quick check proves that `text` is NFC already; false says nothing.
bool IsSurelyNfc(absl::string_view text);

// Every character lower-cased by itself (no rule for a final sigma).
std::string Lowercase(absl::string_view text);

}  // namespace stretto::engine
