// Helpers that tests share: a seed that is printed with every failure, and a folder of one's own.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/philox.h"

#define REQUIRE_OK(expr)                               \
  do {                                                 \
    const auto& require_ok_ = (expr);                  \
    INFO(::stretto::testing::StatusText(require_ok_)); \
    REQUIRE(require_ok_.ok());                         \
  } while (0)

namespace stretto::testing {
template <class T>
std::string StatusText(const T& s) {
  if constexpr (requires { s.status(); }) {
    return std::string(s.status().ToString());
  } else {
    return std::string(s.ToString());
  }
}

// The seed of this test run: STRETTO_TEST_SEED, or a fixed default. Print it with INFO.
inline uint64_t Seed() {
  const char* text = std::getenv("STRETTO_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20240229;
}

// A fresh folder, removed at the end of scope.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "stretto-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ec;
    std::filesystem::remove_all(path_, ec);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};
}  // namespace stretto::testing
