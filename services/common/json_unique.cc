#include "services/common/json_unique.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/json_builder.h"
#include "base/json_keys.h"
#include "base/printable.h"
#include "nlohmann/json.hpp"

namespace stretto::services {
namespace {
using Json = nlohmann::json;
constexpr size_t kMaxReasonBytes = 300, kMaxKeyBytes = 64, kMaxNumberBytes = 40;

// What the parser says, without its own numbering of errors.
std::string Reason(const std::string& what) {
  const size_t end = what.find("] ");
  return Printable(end == std::string::npos ? what : what.substr(end + 2), kMaxReasonBytes);
}

class Reader final : public JsonBuilder<Json> {
 public:
  RepeatedKey<Json> keys;

 private:
  bool See(Event event, const std::string& key) override { return keys.See(event, key); }
};

absl::Status OutOfRange(const Reader& reader) {
  absl::Status status = absl::InvalidArgumentError(
      absl::StrCat("the number ", Printable(reader.overflowing_number(), kMaxNumberBytes), " at ",
                   Printable(reader.keys.NextPlace(), kMaxReasonBytes),
                   " is out of range: numbers have up to 64 bits, whose largest is 1.8e308"));
  status.SetPayload(kJsonFieldPayload, absl::Cord(reader.keys.FirstKey()));
  return status;
}
}  // namespace

absl::StatusOr<Json> ParseUniqueJson(absl::string_view text) {
  Reader reader;
  if (!Json::sax_parse(text.begin(), text.end(), &reader)) {
    if (!reader.overflowing_number().empty()) return OutOfRange(reader);
    return absl::InvalidArgumentError(
        absl::StrCat("not valid JSON in UTF-8: ", Reason(reader.error())));
  }
  if (!reader.keys.found()) return std::move(reader.value());
  const std::string place = Printable(reader.keys.place(), kMaxReasonBytes);
  return absl::InvalidArgumentError(
      absl::StrCat("the key '", Printable(reader.keys.key(), kMaxKeyBytes), "' comes twice",
                   place.empty() ? "" : " in ", place));
}
}  // namespace stretto::services
