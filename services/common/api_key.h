// Keys that clients of an HTTP API must show as `Authorization: Bearer KEY`.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stretto::services {
// Where keys may stand; all that are given count. On a command line other users of the machine can
// read them: a file or the environment is better.
struct ApiKeySources {
  std::vector<std::string> given;
  std::string file;             // one a line; empty lines and those that begin with # don't count
  std::string environment_key;  // a variable's name; its value is one key
};

class ApiKeys {
 public:
  // InvalidArgument: a key is empty, or has characters that no header can carry; a file without
  // keys. NotFound: no such file. The messages never hold a key.
  static absl::StatusOr<ApiKeys> Read(const ApiKeySources& sources);

  // Without keys everybody is let in.
  bool empty() const { return keys_.empty(); }
  // Whether the value of an Authorization header shows one of the keys. The time depends on the
  // value's length alone.
  bool Allow(absl::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};
}  // namespace stretto::services
