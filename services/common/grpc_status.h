// absl::Status is the error type of this program, grpc::Status that of the wire; their codes are
// the same numbers.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace stretto::services {
// gRPC carries messages in a header; longer ones would make the whole answer fail.
inline constexpr size_t kMaxStatusMessageBytes = 4096;

inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.raw_code()),
          std::string(status.message().substr(0, kMaxStatusMessageBytes))};
}

inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}
}  // namespace stretto::services
