// Reads the fields of a JSON object one by one, typed, and remembers which ones are known, so that
// the rest can be refused. The first error stays. A null counts as absent.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace stretto::services {
// What a client has written, as errors quote it: at most so many bytes and an ellipsis, control
// characters escaped.
std::string Brief(absl::string_view text, size_t max_bytes = 64);

// The body as an object. InvalidArgument with the place: broken JSON, invalid UTF-8, another type,
// nested too deeply, a key that comes twice in an object.
absl::StatusOr<nlohmann::json> ParseJsonObject(const std::string& body, size_t max_depth);

class Fields {
 public:
  // `object` outlives the reader. `prefix` stands before the names in messages ("messages[2].").
  explicit Fields(const nlohmann::json& object, std::string prefix = "")
      : object_(object), prefix_(std::move(prefix)) {}

  // The field, if it is there.
  const nlohmann::json* Take(const std::string& key);
  // Each leaves `out` as it is where the field is absent or wrong, and returns whether it was read.
  bool Bool(const std::string& key, bool* out);
  bool Float(const std::string& key, float* out);
  bool Int(const std::string& key, int64_t min, int64_t max, int64_t* out);
  bool Int32(const std::string& key, int64_t min, int64_t max, int32_t* out);
  bool String(const std::string& key, std::string* out);
  bool Int32List(const std::string& key, std::vector<int32_t>* out);
  // A string or a list of strings.
  bool StringOrList(const std::string& key, std::vector<std::string>* out);
  // Fields that are taken and change nothing.
  void Ignore(std::initializer_list<const char*> keys);

  void Fail(const std::string& key, const std::string& message);
  // What a reader of the object `key` has found, whose messages name that already. `hint` is put
  // behind an error.
  void FailInside(const std::string& key, const absl::Status& inner, const std::string& hint = "");
  // The first error; or that a field is not known.
  absl::Status Finish();
  bool ok() const { return status_.ok(); }

 private:
  const nlohmann::json& object_;
  const std::string prefix_;
  std::set<std::string> known_;
  absl::Status status_;
};
}  // namespace stretto::services
