// The version of the programs, as they tell it.
#pragma once

namespace stretto {
inline constexpr char kVersion[] = "0.1.0";
}  // namespace stretto
