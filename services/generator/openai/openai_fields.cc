#include "services/generator/openai/openai_fields.h"

#include <cmath>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/printable.h"
#include "base/status.h"
#include "services/common/json_unique.h"
#include "services/generator/openai/openai_request.h"

namespace stretto::services {
namespace {
using Json = nlohmann::json;

// A number that 64 bits don't hold has become the nearest floating-point one.
std::string Found(const Json& value) {
  if (!value.is_number()) return value.type_name();
  const bool is_rounded = value.is_number_float() && std::fabs(value.get<double>()) >= 0x1p53;
  return absl::StrCat(is_rounded ? "about " : "", value.dump());
}

// Whether brackets outside strings open deeper than `max_depth`.
bool IsTooDeep(const std::string& text, size_t max_depth) {
  size_t depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > max_depth) return true;
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return false;
}
}  // namespace

std::string Brief(absl::string_view text, size_t max_bytes) { return Printable(text, max_bytes); }

absl::StatusOr<Json> ParseJsonObject(const std::string& body, size_t max_depth) {
  if (IsTooDeep(body, max_depth)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the body is nested more than ", max_depth, " levels deep"));
  }
  auto parsed = ParseUniqueJson(body);
  if (const auto field = parsed.status().GetPayload(kJsonFieldPayload); field.has_value()) {
    const std::string name = Brief(std::string(*field));
    return ParamError(name, absl::StrCat("'", name, "': ", parsed.status().message()));
  }
  if (!parsed.ok()) return Annotate(parsed.status(), "the body");
  Json json = *std::move(parsed);
  if (json.is_object()) return json;
  return absl::InvalidArgumentError(
      absl::StrCat("the body must be a JSON object, found ", json.type_name()));
}

const Json* Fields::Take(const std::string& key) {
  known_.insert(key);
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void Fields::Fail(const std::string& key, const std::string& message) {
  if (!status_.ok()) return;
  const std::string name = prefix_ + Brief(key);
  status_ = ParamError(name, absl::StrCat("'", name, "': ", message));
}

void Fields::FailInside(const std::string& key, const absl::Status& inner,
                        const std::string& hint) {
  if (inner.ok() || !status_.ok()) return;
  status_ = ParamError(prefix_ + Brief(key), absl::StrCat(inner.message(), hint));
}

bool Fields::Bool(const std::string& key, bool* out) {
  const Json* value = Take(key);
  if (value == nullptr) return false;
  if (!value->is_boolean()) {
    Fail(key, absl::StrCat("expected true or false, found ", value->type_name()));
    return false;
  }
  *out = value->get<bool>();
  return true;
}

bool Fields::Float(const std::string& key, float* out) {
  const Json* value = Take(key);
  if (value == nullptr) return false;
  if (!value->is_number()) {
    Fail(key, absl::StrCat("expected a number, found ", value->type_name()));
    return false;
  }
  const auto number = value->get<double>();
  *out = static_cast<float>(number);
  if ((*out == 0) != (number == 0) || !std::isfinite(*out)) {
    Fail(key, absl::StrCat("expected a number that 32 bits can hold, found ", value->dump()));
    return false;
  }
  return true;
}

bool Fields::Int(const std::string& key, int64_t min, int64_t max, int64_t* out) {
  const Json* value = Take(key);
  if (value == nullptr) return false;
  // 1.0 is 1, as languages without integers write it.
  constexpr double kExact = 9007199254740992.0;
  const bool is_whole = value->is_number_float() && std::abs(value->get<double>()) <= kExact &&
                        std::trunc(value->get<double>()) == value->get<double>();
  const bool fits =
      is_whole || (value->is_number_integer() &&
                   !(value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX));
  if (!fits || value->get<int64_t>() < min || value->get<int64_t>() > max) {
    Fail(key,
         absl::StrCat("expected an integer from ", min, " to ", max, ", found ", Found(*value)));
    return false;
  }
  *out = value->get<int64_t>();
  return true;
}

bool Fields::Int32(const std::string& key, int64_t min, int64_t max, int32_t* out) {
  int64_t wide = 0;
  if (!Int(key, min, max, &wide)) return false;
  *out = static_cast<int32_t>(wide);
  return true;
}

bool Fields::String(const std::string& key, std::string* out) {
  const Json* value = Take(key);
  if (value == nullptr) return false;
  if (!value->is_string()) {
    Fail(key, absl::StrCat("expected a string, found ", value->type_name()));
    return false;
  }
  *out = value->get<std::string>();
  return true;
}

bool Fields::Int32List(const std::string& key, std::vector<int32_t>* out) {
  const Json* value = Take(key);
  if (value == nullptr) return false;
  std::vector<int32_t> list;
  bool good = value->is_array();
  for (size_t i = 0; good && i < value->size(); ++i) {
    const Json& entry = (*value)[i];
    // Unsigned ones of 64 bits would turn negative.
    good = entry.is_number_unsigned()
               ? entry.get<uint64_t>() <= INT32_MAX
               : entry.is_number_integer() && entry.get<int64_t>() >= INT32_MIN;
    if (good) list.push_back(entry.get<int32_t>());
  }
  if (!good) {
    Fail(key, "expected a list of token ids");
    return false;
  }
  *out = std::move(list);
  return true;
}

bool Fields::StringOrList(const std::string& key, std::vector<std::string>* out) {
  const Json* value = Take(key);
  if (value == nullptr) return false;
  std::vector<std::string> list;
  if (value->is_string()) {
    list.push_back(value->get<std::string>());
  } else if (value->is_array()) {
    for (const Json& entry : *value) {
      if (!entry.is_string()) {
        Fail(key, "expected a string or a list of strings");
        return false;
      }
      list.push_back(entry.get<std::string>());
    }
  } else {
    Fail(key, "expected a string or a list of strings");
    return false;
  }
  *out = std::move(list);
  return true;
}

void Fields::Ignore(std::initializer_list<const char*> keys) {
  for (const char* key : keys) known_.insert(key);
}

absl::Status Fields::Finish() {
  for (const auto& [key, value] : object_.items()) {
    if (!known_.count(key)) Fail(key, "this server doesn't know this field");
  }
  return status_;
}
}  // namespace stretto::services
