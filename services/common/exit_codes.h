// How a service's process ends, for whoever started it.
#pragma once

namespace stretto::services {
inline constexpr int kExitFault = 1;  // the last line of the log says which
// What it was given is wrong (flags, run file, data, model): starting it again changes nothing.
inline constexpr int kExitWrongUse = 2;
inline constexpr int kExitRunFailed = 3;  // a coordinator's: starting it again changes nothing
}  // namespace stretto::services
