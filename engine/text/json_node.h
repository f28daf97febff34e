// Typed reading of JSON that may hold anything: every error names the file and the path to the
// field ("tokenizer.json: model.merges[5]: ..."). A field that is null counts as absent.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stretto::engine {

using Json = nlohmann::json;

// Parses `bytes`; errors name `name` and the byte.
absl::StatusOr<Json> ParseJson(absl::string_view bytes, absl::string_view name);

// A value and where it stands; of a whole file, "file:". The Json it was made from must outlive it.
class JsonNode {
 public:
  JsonNode(const Json& value, std::string where) : value_(&value), where_(std::move(where)) {}

  const Json& value() const { return *value_; }
  const std::string& where() const { return where_; }
  // An error about this node: "where: message".
  absl::Status Error(absl::string_view message) const;

  bool Has(absl::string_view key) const;
  // The fields of an object; an error where the field is missing or of another type.
  absl::StatusOr<JsonNode> Object(absl::string_view key) const;
  absl::StatusOr<std::string> String(absl::string_view key) const;
  absl::StatusOr<int64_t> Int(absl::string_view key) const;
  // The same with a value for absent fields.
  absl::StatusOr<std::string> StringOr(absl::string_view key, absl::string_view otherwise) const;
  absl::StatusOr<bool> BoolOr(absl::string_view key, bool otherwise) const;
  // The elements of the array in a field.
  absl::StatusOr<std::vector<JsonNode>> Array(absl::string_view key) const;
  // This node itself as a value.
  absl::StatusOr<std::string> AsString() const;
  absl::StatusOr<int64_t> AsInt() const;

 private:
  absl::StatusOr<JsonNode> Field(absl::string_view key) const;

  const Json* value_;
  std::string where_;
};

}  // namespace stretto::engine
