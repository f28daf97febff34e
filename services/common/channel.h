// Client connections to other services: short reconnects, keepalive, deadlines. Include it where
// gRPC is included already.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace stretto::services {
// A connection of its own (not shared with earlier ones to the same address, so that its state is
// fresh). Never blocks; errors show in the calls.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address);

inline void SetDeadline(grpc::ClientContext& context, int64_t timeout_ms) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
}
}  // namespace stretto::services
