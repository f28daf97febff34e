// The gRPC server of a process: its services, grpc.health.v1, reflection, and the one place where
// every call is counted (stretto_rpcs_total, stretto_rpc_seconds, stretto_rpcs_in_flight).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/common/metrics.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace stretto::services {
struct GrpcServerOptions {
  std::string bind = "127.0.0.1";
  int port = 0;                          // 0: a free one
  std::vector<grpc::Service*> services;  // outlive the server
  Metrics* metrics = nullptr;            // outlives the server
};

// Thread-safe. The destructor cancels what still runs.
class GrpcServer {
 public:
  // Starts serving. UNAVAILABLE when the port can't be had (never shared with another process).
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options);
  ~GrpcServer();

  int port() const;
  // What health checks are told; true from the start.
  void SetServing(bool serving);
  // Gives running calls `grace_ms` and their clients a moment to read the answers, takes no new
  // ones, then cancels what is left. Blocks.
  void Shutdown(int64_t grace_ms);

 private:
  struct Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};
}  // namespace stretto::services
