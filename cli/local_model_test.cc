#include "cli/local_model.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "base/testing.h"

namespace stretto::cli {
namespace {
// Weights are loaded while the tokenizer is read: what has been loaded is freed before its device.
TEST_CASE("a model whose tokenizer can't be read is an error, not a crash") {
  const std::string good = STRETTO_SOURCE_DIR "/examples/tiny-model";
  const testing::TempDir dir;
  const std::string broken = dir.path() + "/model";
  std::filesystem::copy(good, broken);
  std::ofstream(broken + "/tokenizer.json", std::ios::trunc) << "{\"a";
  LocalModelOptions options;
  options.host.threads = 1;
  options.host.path = broken;
  options.host.prompts.chat_format = "none";
  CHECK(!LocalModel::Open(options).ok());
  options.host.path = good;
  options.host.prompts.chat_format = "no such format";
  CHECK(!LocalModel::Open(options).ok());
  options.host.prompts.chat_format = "none";
  CHECK(LocalModel::Open(options).ok());
}
}  // namespace
}  // namespace stretto::cli
