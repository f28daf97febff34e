#include "services/common/listen.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace stretto::services {
namespace {
constexpr int kBacklog = 1024;

absl::Status CannotListen(const std::string& bind, int port, int error) {
  const std::string what = absl::StrCat("cannot listen at ", bind, ":", port, ": ");
  if (error == EADDRINUSE) {
    return absl::UnavailableError(
        absl::StrCat(what, "the port is in use (choose another, or 0 for a free one)"));
  }
  if (error == EADDRNOTAVAIL) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, "the address is not this machine's (--bind: 127.0.0.1, 0.0.0.0 for all interfaces)"));
  }
  const std::string message = absl::StrCat(what, std::strerror(error));
  if (error != EACCES) return absl::UnavailableError(message);
  return absl::PermissionDeniedError(
      absl::StrCat(message, " (ports below 1024 are for privileged processes)"));
}

// The socket, or -1 with errno.
int Listen(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0 && listen(fd, kBacklog) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { freeaddrinfo(addresses); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::StatusOr<Addresses> AddressesOf(const std::string& bind, int port) {
  const std::string host(absl::StripSuffix(absl::StripPrefix(bind, "["), "]"));
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  // What consists of digits and points is an address or nothing: no name server is asked.
  const bool is_numeric = host.find_first_not_of("0123456789.") == std::string::npos;
  if (is_numeric) hints.ai_flags |= AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const int unknown = host.empty()
                          ? EAI_NONAME
                          : getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (unknown == 0) return Addresses(found);
  return absl::InvalidArgumentError(
      absl::StrCat("--bind '", bind, "' is no address",
                   is_numeric ? "" : absl::StrCat(" of this machine: ", gai_strerror(unknown)),
                   ": expected one such as 127.0.0.1, or 0.0.0.0 for all interfaces"));
}
}  // namespace

absl::Status CheckBind(const std::string& bind) { return AddressesOf(bind, 0).status(); }

absl::StatusOr<int> ListenAt(const std::string& bind, int port) {
  ASSIGN_OR_RETURN(const Addresses found, AddressesOf(bind, port));
  int fd = -1;
  for (const addrinfo* at = found.get(); at != nullptr && fd < 0; at = at->ai_next) {
    fd = Listen(*at);
  }
  if (fd < 0) return CannotListen(bind, port, errno);
  return fd;
}
}  // namespace stretto::services
