// For tests: a link to a server on this machine whose first connection falls silent after some
// bytes, as one whose network was taken away; those that come later carry everything.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace stretto::services {
class CutLink {
 public:
  CutLink(int server_port, size_t first_bytes)
      : server_port_(server_port), first_bytes_(first_bytes), listener_(Socket()) {
    sockaddr_in at = Local(0);
    socklen_t size = sizeof(at);
    STRETTO_CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&at), size) == 0);
    STRETTO_CHECK(::listen(listener_, 16) == 0);
    STRETTO_CHECK(::getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    port_ = ntohs(at.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~CutLink() {
    is_over_ = true;
    thread_.join();
    for (std::thread& connection : connections_) connection.join();
    ::close(listener_);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  int num_connections() const { return num_connections_; }

 private:
  static constexpr int kPollMs = 20;

  static int Socket() { return ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); }
  static sockaddr_in Local(int port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<uint16_t>(port));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
  }
  void Run() {
    while (!is_over_) {
      pollfd wanted = {.fd = listener_, .events = POLLIN, .revents = 0};
      if (::poll(&wanted, 1, kPollMs) <= 0) continue;
      const int client = ::accept(listener_, nullptr, nullptr);
      if (client < 0) continue;
      const bool is_first = num_connections_++ == 0;
      connections_.emplace_back([this, client, is_first] { Carry(client, is_first); });
    }
  }
  void Carry(int client, bool is_cut) {
    const int server = Socket();
    const sockaddr_in at = Local(server_port_);
    bool is_open = ::connect(server, reinterpret_cast<const sockaddr*>(&at), sizeof(at)) == 0;
    size_t num_carried = 0;
    while (is_open && !is_over_) {
      std::array<pollfd, 2> ends = {pollfd{client, POLLIN, 0}, pollfd{server, POLLIN, 0}};
      if (::poll(ends.data(), ends.size(), kPollMs) <= 0) continue;
      for (int from = 0; from < 2 && is_open; ++from) {
        if (ends[static_cast<size_t>(from)].revents == 0) continue;
        is_open = Move(from == 0 ? client : server, from == 0 ? server : client, &num_carried);
      }
      // Neither end is told.
      while (is_cut && num_carried >= first_bytes_ && !is_over_) ::usleep(kPollMs * 1000);
    }
    ::close(server);
    ::close(client);
  }
  static bool Move(int from, int to, size_t* num_carried) {
    std::array<char, 16384> bytes;
    const ssize_t count = ::read(from, bytes.data(), bytes.size());
    for (ssize_t done = 0; done < count;) {
      const ssize_t sent =
          ::send(to, bytes.data() + done, static_cast<size_t>(count - done), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      done += sent;
      *num_carried += static_cast<size_t>(sent);
    }
    return count > 0;
  }

  const int server_port_;
  const size_t first_bytes_;
  const int listener_;
  int port_ = 0;
  std::atomic<bool> is_over_{false};
  std::atomic<int> num_connections_{0};
  std::vector<std::thread> connections_;  // Run's until it has ended
  std::thread thread_;
};
}  // namespace stretto::services
