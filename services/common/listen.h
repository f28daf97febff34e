// A listening socket, or why there can be none in words for the person who chose the address.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace stretto::services {
// Port 0: a free one. The socket doesn't block and is the caller's to close. InvalidArgument: no
// such address, or it isn't this machine's; PermissionDenied: a port below 1024, mostly;
// Unavailable: the port is in use, and the rest.
absl::StatusOr<int> ListenAt(const std::string& bind, int port);
// InvalidArgument: `bind` is neither an address nor the name of one.
absl::Status CheckBind(const std::string& bind);
}  // namespace stretto::services
