// Numbers of things in messages.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace stretto {
// "1 token", "2 tokens".
inline std::string Count(int64_t number, absl::string_view thing) {
  return absl::StrCat(number, " ", thing, number == 1 ? "" : "s");
}
}  // namespace stretto
