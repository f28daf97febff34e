// A generator without a coordinator, as a process of its own, for tests that speak to it.
#pragma once

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/client.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
inline const std::vector<int32_t> kPrompt = {21, 14, 20, 32};

struct GeneratorServer {
  explicit GeneratorServer(std::vector<std::string> more = {}) : port(FreePort()) {
    WriteTestModel(folder.File("model"));
    Restart(std::move(more));
  }
  void Restart(std::vector<std::string> more = {}, int threads = 1) {
    std::vector<std::string> arguments = {"--model",       folder.File("model"),
                                          "--port",        absl::StrCat(port),
                                          "--dtype",       "bf16",
                                          "--chat-format", "none",
                                          "--threads",     absl::StrCat(threads),
                                          "--kv-cache-mb", "16"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    process = std::make_unique<Process>("stretto-generator", arguments, folder.File("log"));
    const bool up = WaitForPort(*process, port);
    INFO(process->Log());
    REQUIRE(up);
    stub = Connect<v1::Generator>(absl::StrCat("127.0.0.1:", port));
  }
  v1::GeneratorStatus Status() {
    CallContext context;
    v1::GeneratorStatus status;
    REQUIRE(stub->GetGeneratorStatus(&context, {}, &status).ok());
    return status;
  }

  TempDir folder;
  int port;
  std::unique_ptr<Process> process;
  std::unique_ptr<v1::Generator::Stub> stub;
};

inline grpc::StatusCode CodeOf(GeneratorServer& server, const v1::GenerateRequest& request) {
  return Generate(*server.stub, request).status.error_code();
}
}  // namespace stretto::testing
