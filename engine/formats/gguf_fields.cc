#include "engine/formats/gguf_fields.h"

#include "absl/strings/str_cat.h"

namespace stretto::engine {
namespace {
std::string Describe(const GgufValue& value) {
  if (const auto* u = std::get_if<uint64_t>(&value.value)) return absl::StrCat(*u);
  if (const auto* i = std::get_if<int64_t>(&value.value)) return absl::StrCat(*i);
  if (const auto* d = std::get_if<double>(&value.value)) return absl::StrCat(*d);
  if (const auto* b = std::get_if<bool>(&value.value)) return *b ? "true" : "false";
  if (const auto* s = std::get_if<std::string>(&value.value)) {
    return absl::StrCat("\"", s->substr(0, 100), "\"");
  }
  return "an array";
}
}  // namespace

void GgufFields::Fail(absl::string_view problem) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(file_.path, ": ", problem));
}

void GgufFields::FailType(const std::string& key, absl::string_view expected) {
  const auto it = file_.metadata.find(key);
  Fail(absl::StrCat("metadata ", key, " is ",
                    it == file_.metadata.end() ? "missing" : Describe(it->second), ", expected ",
                    expected));
}

int64_t GgufFields::Int(const std::string& key, int64_t min, int64_t max,
                        std::optional<int64_t> fallback) {
  if (!Has(key) && fallback.has_value()) return *fallback;
  const auto* u = Get<uint64_t>(key);
  const auto* i = Get<int64_t>(key);
  const bool fits = i != nullptr || (u != nullptr && *u <= static_cast<uint64_t>(INT64_MAX));
  const int64_t value = !fits ? 0 : i != nullptr ? *i : static_cast<int64_t>(*u);
  if (!fits || value < min || value > max) {
    FailType(key, absl::StrCat("an integer from ", min, " to ", max));
    return fallback.value_or(min);
  }
  return value;
}

double GgufFields::Number(const std::string& key, double min, double max,
                          std::optional<double> fallback) {
  if (!Has(key) && fallback.has_value()) return *fallback;
  double value = 0;
  bool found = true;
  if (const auto* d = Get<double>(key)) {
    value = *d;
  } else if (const auto* u = Get<uint64_t>(key)) {
    value = static_cast<double>(*u);
  } else if (const auto* i = Get<int64_t>(key)) {
    value = static_cast<double>(*i);
  } else {
    found = false;
  }
  if (!found || !(value >= min && value <= max)) {
    FailType(key, absl::StrCat("a number from ", min, " to ", max));
    return fallback.value_or(min);
  }
  return value;
}

bool GgufFields::Bool(const std::string& key) {
  const auto* value = Get<bool>(key);
  if (value == nullptr) FailType(key, "a bool");
  return value != nullptr && *value;
}

std::string GgufFields::String(const std::string& key, std::optional<std::string> fallback) {
  if (!Has(key) && fallback.has_value()) return *fallback;
  const auto* value = Get<std::string>(key);
  if (value == nullptr) {
    FailType(key, "a string");
    return "";
  }
  return *value;
}
}  // namespace stretto::engine
