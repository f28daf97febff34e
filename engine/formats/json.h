// JSON from untrusted files, read strictly: no duplicate keys, bounded depth, and fields taken out
// with errors that name file, field, value and what is expected.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stretto::engine {
// `where` (a file's path) begins each message. Nesting deeper than `max_depth` is an error.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view where, absl::string_view text,
                                         int max_depth = 64);
// The file's content; files above 100 MB are refused.
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path);

// Typed fields of one JSON object. The first error sticks and is returned by status(); later reads
// return their defaults, so that a reader need not check after each field. null counts as absent.
class JsonFields {
 public:
  // `object` outlives this. `scope` is put before field names ("rope_scaling.").
  JsonFields(std::string where, const nlohmann::json& object, std::string scope = "");

  bool Has(const char* name) const;  // present and not null
  bool IsNull(const char* name) const;
  // Integers in [min, max]. Required without a default.
  int64_t Int(const char* name, int64_t min, int64_t max, std::optional<int64_t> fallback = {});
  // Finite numbers in [min, max].
  double Number(const char* name, double min, double max, std::optional<double> fallback = {});
  bool Bool(const char* name, std::optional<bool> fallback = {});
  std::string String(const char* name, std::optional<std::string> fallback = {});
  // The value where present, else null.
  const nlohmann::json* Find(const char* name) const;

  // Records "where: scope+name is VALUE, expected WHAT" unless an error is there already.
  void Fail(const char* name, absl::string_view expected);
  void FailUnsupported(const char* name, absl::string_view supported);
  const absl::Status& status() const { return status_; }
  const std::string& where() const { return where_; }

 private:
  std::string Describe(const char* name, absl::string_view expected) const;
  std::string where_;
  const nlohmann::json& object_;
  std::string scope_;
  absl::Status status_;
};
}  // namespace stretto::engine
