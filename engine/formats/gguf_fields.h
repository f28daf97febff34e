// Typed reading of GGUF metadata. The first error sticks and is returned by status().
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/formats/gguf.h"

namespace stretto::engine {
class GgufFields {
 public:
  // `file` outlives this.
  explicit GgufFields(const GgufFile& file) : file_(file) {}
  const std::string& path() const { return file_.path; }
  bool Has(const std::string& key) const { return file_.metadata.contains(key); }
  // Required without a fallback. Any integer type will do for Int; integers for Number, too.
  int64_t Int(const std::string& key, int64_t min, int64_t max,
              std::optional<int64_t> fallback = {});
  double Number(const std::string& key, double min, double max,
                std::optional<double> fallback = {});
  bool Bool(const std::string& key);
  std::string String(const std::string& key, std::optional<std::string> fallback = {});
  // Arrays of T (one of GgufArray's element types); empty where absent.
  template <class T>
  std::vector<T> Array(const std::string& key, absl::string_view expected);

  // Records "path: problem" unless there is an error already.
  void Fail(absl::string_view problem);
  const absl::Status& status() const { return status_; }

 private:
  template <class T>
  const T* Get(const std::string& key) const {
    const auto it = file_.metadata.find(key);
    return it == file_.metadata.end() ? nullptr : std::get_if<T>(&it->second.value);
  }
  void FailType(const std::string& key, absl::string_view expected);
  const GgufFile& file_;
  absl::Status status_;
};

template <class T>
std::vector<T> GgufFields::Array(const std::string& key, absl::string_view expected) {
  if (!Has(key)) return {};
  const GgufArray* array = Get<GgufArray>(key);
  const auto* elements = array != nullptr ? std::get_if<std::vector<T>>(array) : nullptr;
  if (elements == nullptr) {
    FailType(key, expected);
    return {};
  }
  return *elements;
}
}  // namespace stretto::engine
