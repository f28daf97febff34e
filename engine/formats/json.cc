#include "engine/formats/json.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
using nlohmann::json;

// Builds the document from the parser's events, watching for what nlohmann's own builder lets pass.
class StrictBuilder : public nlohmann::json_sax<json> {
 public:
  explicit StrictBuilder(int max_depth) : max_depth_(static_cast<size_t>(max_depth)) {}
  json& root() { return root_; }
  const std::string& error() const { return error_; }

  bool null() override { return Put(json()); }
  bool boolean(bool value) override { return Put(json(value)); }
  bool number_integer(int64_t value) override { return Put(json(value)); }
  bool number_unsigned(uint64_t value) override { return Put(json(value)); }
  bool number_float(double value, const std::string&) override { return Put(json(value)); }
  bool string(std::string& value) override { return Put(json(std::move(value))); }
  bool binary(json::binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(std::string& name) override {
    if (open_.back()->contains(name)) {
      error_ = absl::StrCat("the key \"", name.substr(0, 200), "\" appears twice in one object");
      return false;
    }
    key_ = std::move(name);
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    const std::string what = e.what();
    const size_t tag_end = what.find("] ");  // "[json.exception.parse_error.101] …"
    error_ = what.substr(tag_end == std::string::npos ? 0 : tag_end + 2, 400);
    return false;
  }

 private:
  json* Place(json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    return &((*open_.back())[key_] = std::move(value));
  }
  bool Put(json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(json container) {
    if (open_.size() >= max_depth_) {
      error_ = absl::StrCat("nested deeper than ", max_depth_, " levels");
      return false;
    }
    open_.push_back(Place(std::move(container)));
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  size_t max_depth_;
  json root_;
  std::vector<json*> open_;  // a container does not move while something in it is open
  std::string key_, error_;
};

std::string Shortened(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 100) text = absl::StrCat(text.substr(0, 100), "…");
  // An integer that 64 bits don't hold has become the nearest floating-point number.
  if (value.is_number_float() && std::fabs(value.get<double>()) >= 0x1p53) {
    text.insert(0, "about ");
  }
  return text;
}
}  // namespace

absl::StatusOr<json> ParseJson(absl::string_view where, absl::string_view text, int max_depth) {
  StrictBuilder builder(max_depth);
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": malformed JSON: ", builder.error()));
  }
  return std::move(builder.root());
}

absl::StatusOr<json> ReadJsonFile(const std::string& path) {
  constexpr size_t kMaxBytes = 100'000'000;
  ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  if (file->bytes().size() > kMaxBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has ", file->bytes().size(),
                                                   " bytes, expected JSON of up to ", kMaxBytes));
  }
  return ParseJson(path,
                   {reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()});
}

JsonFields::JsonFields(std::string where, const json& object, std::string scope)
    : where_(std::move(where)), object_(object), scope_(std::move(scope)) {
  if (!object_.is_object()) {
    status_ = absl::InvalidArgumentError(
        absl::StrCat(where_, ": ", scope_.empty() ? "the document" : scope_, " is ",
                     Shortened(object_), ", expected a JSON object"));
  }
}

const json* JsonFields::Find(const char* name) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}
bool JsonFields::Has(const char* name) const { return Find(name) != nullptr; }
bool JsonFields::IsNull(const char* name) const {
  return object_.is_object() && object_.contains(name) && object_.at(name).is_null();
}

std::string JsonFields::Describe(const char* name, absl::string_view expected) const {
  const json* value = Find(name);
  return absl::StrCat(where_, ": ", scope_, name, " is ",
                      value == nullptr ? "missing" : Shortened(*value), ", expected ", expected);
}
void JsonFields::Fail(const char* name, absl::string_view expected) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(Describe(name, expected));
}
void JsonFields::FailUnsupported(const char* name, absl::string_view supported) {
  if (status_.ok()) {
    status_ = absl::UnimplementedError(
        absl::StrCat(Describe(name, supported), " (nothing else is supported)"));
  }
}

int64_t JsonFields::Int(const char* name, int64_t min, int64_t max,
                        std::optional<int64_t> fallback) {
  const json* value = Find(name);
  if (value == nullptr && fallback.has_value()) return *fallback;
  const bool fits = value != nullptr && value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
  if (!fits || value->get<int64_t>() < min || value->get<int64_t>() > max) {
    Fail(name, absl::StrCat("an integer from ", min, " to ", max));
    return fallback.value_or(min);
  }
  return value->get<int64_t>();
}

double JsonFields::Number(const char* name, double min, double max,
                          std::optional<double> fallback) {
  const json* value = Find(name);
  if (value == nullptr && fallback.has_value()) return *fallback;
  const double number = value != nullptr && value->is_number() ? value->get<double>() : NAN;
  if (!(number >= min && number <= max)) {
    Fail(name, absl::StrCat("a number from ", min, " to ", max));
    return fallback.value_or(min);
  }
  return number;
}

bool JsonFields::Bool(const char* name, std::optional<bool> fallback) {
  const json* value = Find(name);
  if (value == nullptr && fallback.has_value()) return *fallback;
  if (value == nullptr || !value->is_boolean()) {
    Fail(name, "true or false");
    return fallback.value_or(false);
  }
  return value->get<bool>();
}

std::string JsonFields::String(const char* name, std::optional<std::string> fallback) {
  const json* value = Find(name);
  if (value == nullptr && fallback.has_value()) return *fallback;
  if (value == nullptr || !value->is_string()) {
    Fail(name, "a string");
    return fallback.value_or("");
  }
  return value->get<std::string>();
}
}  // namespace stretto::engine
