// Whose mistake it is.
#pragma once

#include "absl/status/status.h"

namespace stretto {
// For what is read from files that people don't write by hand: INVALID_ARGUMENT, which whoever
// asked would be blamed for, becomes DATA_LOSS.
inline absl::Status BlameFile(const absl::Status& status) {
  return absl::IsInvalidArgument(status) ? absl::DataLossError(status.message()) : status;
}
}  // namespace stretto
