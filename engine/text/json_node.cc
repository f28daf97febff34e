#include "engine/text/json_node.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "base/status.h"

namespace stretto::engine {

absl::StatusOr<Json> ParseJson(absl::string_view bytes, absl::string_view name) {
  try {
    return Json::parse(bytes.begin(), bytes.end());
  } catch (const Json::exception& e) {
    absl::string_view what = e.what();
    if (const size_t tag = what.find("] "); tag != what.npos) what.remove_prefix(tag + 2);
    return absl::InvalidArgumentError(absl::StrCat(name, ": not valid JSON: ", what));
  }
}

absl::Status JsonNode::Error(absl::string_view message) const {
  const absl::string_view separator = absl::EndsWith(where_, ":") ? " " : ": ";
  return absl::InvalidArgumentError(absl::StrCat(where_, separator, message));
}

bool JsonNode::Has(absl::string_view key) const {
  if (!value_->is_object()) return false;
  const auto it = value_->find(std::string(key));
  return it != value_->end() && !it->is_null();
}

absl::StatusOr<JsonNode> JsonNode::Field(absl::string_view key) const {
  if (!value_->is_object()) {
    return Error(absl::StrCat("expected an object, found ", value_->type_name()));
  }
  const auto it = value_->find(std::string(key));
  if (it == value_->end()) return Error(absl::StrCat("the field \"", key, "\" is missing"));
  const absl::string_view separator = absl::EndsWith(where_, ":") ? " " : ".";
  return JsonNode(*it, absl::StrCat(where_, separator, key));
}

absl::StatusOr<JsonNode> JsonNode::Object(absl::string_view key) const {
  ASSIGN_OR_RETURN(JsonNode field, Field(key));
  if (!field.value().is_object()) {
    return field.Error(absl::StrCat("expected an object, found ", field.value().type_name()));
  }
  return field;
}

absl::StatusOr<std::string> JsonNode::AsString() const {
  if (!value_->is_string()) {
    return Error(absl::StrCat("expected a string, found ", value_->type_name()));
  }
  return value_->get<std::string>();
}

absl::StatusOr<int64_t> JsonNode::AsInt() const {
  if (!value_->is_number_integer()) {
    return Error(absl::StrCat("expected a whole number, found ", value_->type_name()));
  }
  if (value_->is_number_unsigned() &&
      value_->get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
    return Error("the number is too large");
  }
  return value_->get<int64_t>();
}

absl::StatusOr<std::string> JsonNode::String(absl::string_view key) const {
  ASSIGN_OR_RETURN(const JsonNode field, Field(key));
  return field.AsString();
}

absl::StatusOr<int64_t> JsonNode::Int(absl::string_view key) const {
  ASSIGN_OR_RETURN(const JsonNode field, Field(key));
  return field.AsInt();
}

absl::StatusOr<std::string> JsonNode::StringOr(absl::string_view key,
                                               absl::string_view otherwise) const {
  if (!Has(key)) return std::string(otherwise);
  return String(key);
}

absl::StatusOr<bool> JsonNode::BoolOr(absl::string_view key, bool otherwise) const {
  if (!Has(key)) return otherwise;
  ASSIGN_OR_RETURN(const JsonNode field, Field(key));
  if (!field.value().is_boolean()) {
    return field.Error(absl::StrCat("expected true or false, found ", field.value().type_name()));
  }
  return field.value().get<bool>();
}

absl::StatusOr<std::vector<JsonNode>> JsonNode::Array(absl::string_view key) const {
  ASSIGN_OR_RETURN(const JsonNode field, Field(key));
  if (!field.value().is_array()) {
    return field.Error(absl::StrCat("expected an array, found ", field.value().type_name()));
  }
  std::vector<JsonNode> elements;
  elements.reserve(field.value().size());
  for (size_t i = 0; i < field.value().size(); ++i) {
    elements.emplace_back(field.value()[i], absl::StrCat(field.where(), "[", i, "]"));
  }
  return elements;
}

}  // namespace stretto::engine
