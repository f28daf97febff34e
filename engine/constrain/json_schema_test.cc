// JSON Schemas beyond their basics (constrain_test.cc): oneOf, bounds, recursion, and random
// schemas whose texts a validator of this file's own judges.
#include "engine/constrain/json_schema.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/constrain/constraint.h"
#include "engine/text/utf8.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;

Automaton Schema(const Json& schema) {
  const auto pattern = ParseJsonSchema(schema.dump());
  INFO(schema.dump() << ": " << pattern.status());
  REQUIRE(pattern.ok());
  auto automaton = Automaton::Compile(**pattern);
  INFO(automaton.status());
  REQUIRE(automaton.ok());
  return *std::move(automaton);
}
Automaton Schema(const char* schema) { return Schema(Json::parse(schema)); }

std::string SchemaError(const std::string& schema) {
  const auto pattern = ParseJsonSchema(schema);
  absl::Status status = pattern.status();
  if (status.ok()) status = Automaton::Compile(**pattern).status();
  INFO(schema);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

// A vocabulary of all bytes and some longer tokens.
std::shared_ptr<const TokenTrie> Vocabulary() {
  static const auto trie = [] {
    std::vector<std::string> tokens;
    for (int i = 0; i < 256; ++i) tokens.emplace_back(1, static_cast<char>(i));
    for (const char* text : {"{\"", "\": ", "\", \"", "[1", "0.", "00", "true", "}]", "ab"}) {
      tokens.emplace_back(text);
    }
    return std::make_shared<const TokenTrie>(std::move(tokens));
  }();
  return trie;
}

// A random text, token by token as the masks allow; "" if it gets too long.
std::string RandomText(const Constraint& constraint, PhiloxStream& random) {
  std::string text;
  Constraint::State state = constraint.start();
  while (text.size() < 300) {
    if (constraint.MustEnd(state)) return text;
    if (constraint.MayEnd(state) && random.Below(3) == 0) return text;
    const auto mask = constraint.Mask(state);
    REQUIRE(mask->count > 0);  // no dead ends
    // Rather short ways: quotes and brackets are drawn more often than the many other bytes.
    static const std::string kShort = "\"]},:0123456789.-tfn";
    int32_t token = -1;
    for (int tries = 0; tries < 4 && token < 0; ++tries) {
      const auto byte = static_cast<uint8_t>(kShort[random.Below(kShort.size())]);
      if (mask->Allows(byte)) token = byte;
    }
    for (uint64_t skip = random.Below(static_cast<uint64_t>(mask->count)), t = 0; token < 0; ++t) {
      if (mask->Allows(static_cast<int32_t>(t)) && skip-- == 0) token = static_cast<int32_t>(t);
    }
    text += Vocabulary()->bytes(token);
    state = constraint.Next(state, token);
    REQUIRE(state != Constraint::kDead);
  }
  return "";
}

// The meaning of the keywords as JSON Schema 2020-12 tells it.
class Validator {
 public:
  explicit Validator(const Json& root) : root_(root) {}

  bool Obeys(const Json& v, const Json& s) const {
    if (s.is_boolean()) return s.get<bool>();
    if (s.contains("$ref")) return Obeys(v, Target(s["$ref"].get<std::string>()));
    if (s.contains("type") && !IsOfTypes(v, s["type"])) return false;
    if (s.contains("const") && v != s["const"]) return false;
    if (s.contains("enum") && std::find(s["enum"].begin(), s["enum"].end(), v) == s["enum"].end()) {
      return false;
    }
    const auto count = [&](const char* key) {
      return std::count_if(s[key].begin(), s[key].end(),
                           [&](const Json& part) { return Obeys(v, part); });
    };
    if (s.contains("anyOf") && count("anyOf") == 0) return false;
    if (s.contains("oneOf") && count("oneOf") != 1) return false;
    if (v.is_number()) return ObeysNumber(v, s);
    if (v.is_string()) return ObeysString(v.get<std::string>(), s);
    if (v.is_array()) return ObeysArray(v, s);
    return !v.is_object() || ObeysObject(v, s);
  }

 private:
  const Json& Target(const std::string& ref) const {
    return ref == "#" ? root_ : root_["$defs"][ref.substr(8)];
  }
  static bool IsOfTypes(const Json& v, const Json& types) {
    if (types.is_array()) {
      return std::any_of(types.begin(), types.end(),
                         [&](const Json& type) { return IsOfTypes(v, type); });
    }
    if (types == "integer") return v.is_number() && std::floor(v.get<double>()) == v.get<double>();
    return types == v.type_name();
  }
  static bool ObeysNumber(const Json& v, const Json& s) {
    const double x = v.get<double>();
    if (s.contains("minimum") && x < s["minimum"].get<double>()) return false;
    if (s.contains("exclusiveMinimum") && x <= s["exclusiveMinimum"].get<double>()) return false;
    if (s.contains("maximum") && x > s["maximum"].get<double>()) return false;
    if (s.contains("exclusiveMaximum") && x >= s["exclusiveMaximum"].get<double>()) return false;
    return !s.contains("multipleOf") || v.get<int64_t>() % s["multipleOf"].get<int64_t>() == 0;
  }
  static bool ObeysString(const std::string& v, const Json& s) {
    int64_t length = 0;
    for (size_t at = 0; at < v.size(); ++length) NextCodePoint(v, &at);
    if (s.contains("minLength") && length < s["minLength"].get<int64_t>()) return false;
    if (s.contains("maxLength") && length > s["maxLength"].get<int64_t>()) return false;
    return !s.contains("pattern") ||
           std::regex_search(v, std::regex(s["pattern"].get<std::string>()));
  }
  bool ObeysArray(const Json& v, const Json& s) const {
    if (s.contains("minItems") && v.size() < s["minItems"].get<size_t>()) return false;
    if (s.contains("maxItems") && v.size() > s["maxItems"].get<size_t>()) return false;
    return !s.contains("items") || std::all_of(v.begin(), v.end(), [&](const Json& item) {
      return Obeys(item, s["items"]);
    });
  }
  bool ObeysObject(const Json& v, const Json& s) const {
    if (s.contains("required")) {
      for (const Json& name : s["required"]) {
        if (!v.contains(name.get<std::string>())) return false;
      }
    }
    for (const auto& [name, member] : v.items()) {
      if (s.contains("properties") && s["properties"].contains(name)) {
        if (!Obeys(member, s["properties"][name])) return false;
      } else if (s.contains("additionalProperties") && !Obeys(member, s["additionalProperties"])) {
        return false;
      }
    }
    return true;
  }

  const Json& root_;
};

// Random schemas of the keywords that are read.
class SchemaMaker {
 public:
  explicit SchemaMaker(PhiloxStream* random) : random_(*random) {}

  Json Root() {
    Json root = Make(3);
    if (!root.is_object()) root = {{"anyOf", {root}}};
    root["$defs"]["d"] = Make(2);
    return root;
  }

 private:
  uint64_t Below(uint64_t n) { return random_.Below(n); }
  bool Coin() { return Below(2) == 0; }

  Json Make(int depth) {
    switch (Below(depth > 0 ? 11 : 6)) {
      case 0:
        return {{"type", Coin() ? "null" : "boolean"}};
      case 1:
        return Integer();
      case 2:
        return Number();
      case 3:
        return String();
      case 4:
        return {{"enum", Json(std::vector<Json>{Below(5), "a", nullptr, 0.5, Json::array({1})})}};
      case 5:
        return {{"const", Coin() ? Json("b") : Json(Below(4))}};
      case 6:
        return Object(depth);
      case 7:
        return Array(depth);
      case 8:
        return {{"anyOf", {Make(depth - 1), Make(depth - 1)}}};
      case 9:
        return {{"oneOf", {Make(depth - 1), Make(depth - 1), Make(depth - 1)}}};
      default:
        // Within a list: a schema that is nothing but itself has no meaning.
        return {{"type", "array"},
                {"items", {{"$ref", Coin() ? "#" : "#/$defs/d"}}},
                {"maxItems", 1 + Below(2)}};
    }
  }
  Json Integer() {
    Json s = {{"type", "integer"}};
    const auto low = static_cast<int64_t>(Below(60)) - 30;
    if (Coin()) s[Coin() ? "minimum" : "exclusiveMinimum"] = low;
    if (Coin()) s[Coin() ? "maximum" : "exclusiveMaximum"] = low + 12;
    if (Coin()) s["multipleOf"] = 1 + Below(7);
    return s;
  }
  Json Number() {
    Json s = {{"type", "number"}};
    const double low = (static_cast<double>(Below(4000)) - 2000) / 1000;
    if (Coin()) s[Coin() ? "minimum" : "exclusiveMinimum"] = low;
    if (Coin()) s[Coin() ? "maximum" : "exclusiveMaximum"] = low + (Coin() ? 0.002 : 25.5);
    return s;
  }
  Json String() {
    Json s = {{"type", "string"}};
    if (Coin()) s["minLength"] = Below(3);
    if (Coin()) s["maxLength"] = 3 + Below(4);
    static const char* kPatterns[] = {"^[a-c]+$", "a", "^x", "\"|b$", "^(ab|[0-9]{2})*$"};
    if (Coin()) s["pattern"] = kPatterns[Below(5)];
    return s;
  }
  Json Object(int depth) {
    Json s = {{"type", "object"}, {"properties", Json::object()}};
    for (const char* name : {"a", "b", "kind"}) {
      if (Coin()) s["properties"][name] = Make(depth - 1);
    }
    if (Coin()) s["properties"]["kind"] = {{"const", Coin() ? "x" : "y"}};
    if (s["properties"].empty()) s.erase("properties");
    if (s.contains("properties")) {
      Json required = Json::array();
      for (const auto& [name, value] : s["properties"].items()) {
        if (Coin()) required.push_back(name);
      }
      s["required"] = required;
    }
    if (Coin()) s["additionalProperties"] = false;
    return s;
  }
  Json Array(int depth) {
    Json s = {{"type", "array"}, {"items", Make(depth - 1)}};
    if (Coin()) s["minItems"] = Below(2);
    if (Coin()) s["maxItems"] = 1 + Below(3);
    return s;
  }

  PhiloxStream& random_;
};
}  // namespace

TEST_CASE("random schemas: every text that the masks lead to obeys") {
  PhiloxStream random(testing::Seed());
  INFO("seed " << testing::Seed());
  int num_compiled = 0, num_one_of = 0, num_texts = 0;
  for (int round = 0; round < 400; ++round) {
    const Json schema = SchemaMaker(&random).Root();
    INFO(schema.dump());
    AutomatonLimits limits;
    limits.max_steps = 1 << 20;
    const auto constraint = Constraint::Compile({ConstraintSpec::Kind::kJsonSchema, schema.dump()},
                                                Vocabulary(), limits);
    if (!constraint.ok()) continue;  // not every schema has a value, or can be told apart
    ++num_compiled;
    num_one_of += schema.contains("oneOf") ? 1 : 0;
    const Validator validator(schema);
    for (int i = 0; i < 6; ++i) {
      const std::string text = RandomText(**constraint, random);
      if (text.empty()) continue;
      ++num_texts;
      const Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
      INFO(text);
      REQUIRE(!value.is_discarded());
      REQUIRE(validator.Obeys(value, schema));
    }
  }
  CHECK(num_compiled > 200);
  CHECK(num_one_of > 5);
  CHECK(num_texts > 800);
}

TEST_CASE("numbers between bounds, exactly") {
  PhiloxStream random(testing::Seed());
  for (int round = 0; round < 60; ++round) {
    const double scale = round % 3 == 0 ? 1 : round % 3 == 1 ? 100 : 10000;
    const auto bound = [&] { return (static_cast<double>(random.Below(60000)) - 30000) / scale; };
    double low = bound(), high = round % 4 == 0 ? low + 3 / scale : bound();
    if (low > high) std::swap(low, high);
    high = std::round(high * scale) / scale;  // the double that its decimal text is read as
    const bool low_open = random.Below(2) == 0, high_open = random.Below(2) == 0;
    if (low_open && high_open && high - low < 2 / scale) continue;
    Json schema = {{"type", "number"}};
    schema[low_open ? "exclusiveMinimum" : "minimum"] = low;
    schema[high_open ? "exclusiveMaximum" : "maximum"] = high;
    INFO(schema.dump());
    const Automaton a = Schema(schema);
    for (int i = 0; i < 400; ++i) {
      // Near the bounds, anywhere, and on them.
      const double at = i % 3 == 0 ? low : i % 3 == 1 ? high : bound();
      const auto units = static_cast<int64_t>(std::llround(at * 10000)) +
                         static_cast<int64_t>(random.Below(5)) - 2;
      const double x = static_cast<double>(units) / 10000;
      const bool inside = (low_open ? x > low : x >= low) && (high_open ? x < high : x <= high);
      const auto magnitude = static_cast<uint64_t>(std::llabs(units));
      if (units == 0) continue;
      std::string text = absl::StrCat(units < 0 ? "-" : "", magnitude / 10000, ".");
      const std::string digits = absl::StrCat(magnitude % 10000 + 10000);
      text += digits.substr(1);
      if (a.Matches(text) != inside) FAIL(text);
      while (text.back() == '0') text.pop_back();  // the same number
      if (text.back() == '.') text.pop_back();
      if (a.Matches(text) != inside) FAIL(text);
    }
  }
  const Automaton share = Schema(R"({"type": "number", "exclusiveMinimum": 0, "maximum": 1})");
  for (const char* good : {"0.5", "1", "1.0", "0.0001", "1.0000"}) CHECK(share.Matches(good));
  for (const char* bad : {"0", "0.0", "1.0001", "-0.5", "2", "00.5", ".5", "1.", "1e0"}) {
    CHECK(!share.Matches(bad));
  }
}

TEST_CASE("bounds that can't be kept are refused, and where") {
  CHECK(absl::StrContains(SchemaError(R"({"type": "number", "minimum": 1, "maximum": 0.5})"),
                          "between the bounds"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "number", "minimum": "1"})"), "#/minimum"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "number", "minimum": 1e-20})"), "digits"));
  for (const char* bad : {"0", "-2", "0.501", "501", "\"2\"", "1e-13", "1e13"}) {
    for (const char* type : {"integer", "number"}) {
      CHECK(absl::StrContains(
          SchemaError(absl::StrCat(R"({"type": ")", type, R"(", "multipleOf": )", bad, "}")),
          "#/multipleOf"));
    }
  }
  CHECK(absl::StrContains(SchemaError(R"({"type": "integer", "multipleOf": 0.5})"),
                          "#/multipleOf: of integers"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "integer", "format": "date"})"), "#/format"));
  CHECK(absl::StrContains(
      SchemaError(R"({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13})"),
      "#/multipleOf"));
}

TEST_CASE("length, pattern and format of a string together") {
  const Automaton a =
      Schema(R"({"type": "string", "pattern": "^[a\"]*b?$", "minLength": 2, "maxLength": 3})");
  for (const char* good : {R"("aa")", R"("a\"b")", R"("aab")"}) CHECK(a.Matches(good));
  for (const char* bad : {R"("a")", R"("aaab")", R"("ba")", R"("a"b")", R"("\u0061a")"}) {
    CHECK(!a.Matches(bad));
  }
  // Characters are counted, not bytes; what must be escaped is.
  const Automaton any = Schema(R"({"type": "string", "pattern": "^.*$", "maxLength": 2})");
  CHECK(any.Matches("\"\xE6\x97\xA5\xC3\xA4\""));
  CHECK(any.Matches(R"("\\\u0001")"));
  CHECK(!any.Matches("\"\xE6\x97\xA5\xC3\xA4x\""));
  CHECK(!any.Matches("\"\n\""));
  const Automaton mail = Schema(R"({"type": "string", "format": "email", "maxLength": 12})");
  CHECK(mail.Matches(R"("ada@ab.org")"));
  CHECK(!mail.Matches(R"("ada@abcdef.org")"));
  CHECK(!mail.Matches(R"("ada")"));
  const Automaton address = Schema(R"({"type": "string", "format": "ipv4"})");
  CHECK(address.Matches(R"("127.0.0.255")"));
  CHECK(!address.Matches(R"("127.0.0.256")"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "string", "pattern": "^a$", "minLength": 2})"),
                          "together"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "string", "format": "json-pointer"})"),
                          "#/format"));
}

TEST_CASE("oneOf: alternatives that exclude each other") {
  const Automaton shapes = Schema(R"({"oneOf": [
    {"type": "object", "required": ["kind", "r"],
     "properties": {"kind": {"const": "circle"}, "r": {"type": "number", "minimum": 0}}},
    {"$ref": "#/$defs/square"},
    {"type": "null"},
    {"type": "string", "minLength": 3},
    {"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3, "maximum": 9.5},
    {"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2, "items": {"type": "null"}},
    {"type": "string", "pattern": "^a?$"}, {"enum": [true, 10, "zz"]}],
   "$defs": {"square": {"type": "object", "required": ["kind"],
     "properties": {"kind": {"enum": ["square", "box"]}, "a": {"type": "integer"}}}}})");
  for (const char* good :
       {R"({"kind": "circle", "r": 1.5})", R"({"kind": "box"})", "null", R"("abc")", "-7", "3",
        "9.5", "[]", "[null, null]", R"("a")", "true", "10", R"("zz")"}) {
    INFO(good);
    CHECK(shapes.Matches(good));
  }
  for (const char* bad : {"3.0", "10.5", R"("ab")", "[null, 1]", "false"}) {
    INFO(bad);
    CHECK(!shapes.Matches(bad));
  }
  // A property that the other forbids.
  CHECK(Schema(R"({"oneOf": [
    {"type": "object", "required": ["a"], "properties": {"a": {}}},
    {"type": "object", "properties": {"b": {}}, "additionalProperties": false}]})")
            .Matches(R"({"b": 1})"));
  // The same with recursion on the way.
  CHECK(Schema(R"({"oneOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]})")
            .Matches("[[1], 2]"));
}

TEST_CASE("oneOf: strings that more than one alternative matches are left out") {
  const Automaton a = Schema(R"({"oneOf": [{"type": "string", "pattern": "^[ab]{1,3}$"},
                                          {"type": "string", "pattern": "^[bc\\n]{2,4}$"}]})");
  for (const char* good : {R"("a")", R"("b")", R"("abb")", R"("cc")", R"("b\nc")", R"("bbbb")"}) {
    INFO(good);
    CHECK(a.Matches(good));
  }
  for (const char* bad : {R"("bb")", R"("bbb")", R"("c")", R"("ac")"}) CHECK(!a.Matches(bad));
  // Nothing is left of the first, and so of the whole.
  CHECK(!SchemaError(R"({"oneOf": [{"type": "string"}, {"type": "string"}]})").empty());
}

TEST_CASE("oneOf: what can't be told apart is refused, and which") {
  for (const char* list :
       {R"([{"type": "null"}, {"type": "integer"}, {"type": "number"}])",
        R"([{"type": "null"}, {"type": ["number", "string"]}, {"type": "number"}])",
        R"([{"type": "null"}, {"enum": [1, "a"]}, {"enum": ["b", 1.0]}])",
        R"([{"type": "null"}, {"type": "object"}, {"type": "object", "properties": {"a": {}}}])",
        R"([{"type": "null"}, {"type": "integer", "multipleOf": 2}, {"type": "integer"}])",
        R"([{"type": "null"}, {"type": "string"}, {"const": "a"}])"}) {
    INFO(list);
    const std::string error = SchemaError(absl::StrCat(R"({"oneOf": )", list, "}"));
    CHECK(absl::StrContains(error, "#/oneOf"));
    CHECK(absl::StrContains(error, "alternatives 1 and 2"));
  }
  CHECK(absl::StrContains(SchemaError(R"({"oneOf": []})"), "#/oneOf"));
  // Formats are not told apart: who doesn't check them finds both in any text.
  CHECK(!SchemaError(R"({"oneOf": [{"type": "string", "format": "date"},
                                   {"type": "string", "format": "uuid"}]})")
             .empty());
}

TEST_CASE("a schema within itself is written out to a depth") {
  const Automaton list = Schema(R"({"$ref": "#/$defs/node", "$defs": {"node": {
    "type": "object", "required": ["v"], "additionalProperties": false,
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}}})");
  std::string text = R"({"v": 0})";
  for (int depth = 0; depth <= 8; ++depth) {
    INFO(text);
    CHECK(list.Matches(text) == (depth <= kMaxRefNesting));
    text = absl::StrCat(R"({"v": 1, "next": )", text, "}");
  }
  const Automaton tree = Schema(R"({"anyOf": [{"type": "null"}, {"type": "array",
    "minItems": 2, "maxItems": 2, "items": {"$ref": "#"}}]})");
  CHECK(tree.Matches("[[null, null], [null, [null, null]]]"));
  // Nothing ends it.
  CHECK(absl::StrContains(SchemaError(R"({"$ref": "#"})"), "no possible text"));
  CHECK(absl::StrContains(
      SchemaError(R"({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}})"),
      "no possible text"));
}

TEST_CASE("a recursion too wide for its depth is written out less deep, or refused") {
  const auto tree = [](int width) {
    Json schema = {{"type", "object"}, {"properties", {{"v", {{"type", "integer"}}}}}};
    for (int i = 0; i < width; ++i) {
      schema["properties"][absl::StrCat("child", i)] = {{"$ref", "#"}};
    }
    return Constraint::Compile({ConstraintSpec::Kind::kJsonSchema, schema.dump()}, Vocabulary());
  };
  const auto accepts = [](const Constraint& constraint, const std::string& text) {
    Constraint::State state = constraint.start();
    for (const char c : text) state = constraint.Next(state, static_cast<uint8_t>(c));
    return state != Constraint::kDead && constraint.MayEnd(state);
  };
  const std::string two = R"({"child0": {"child0": {"v": 1}}})";
  const std::string three = absl::StrCat(R"({"child0": )", two, "}");
  const auto narrow = tree(1), wide = tree(6);
  REQUIRE(narrow.ok());
  REQUIRE(wide.ok());
  CHECK((accepts(**narrow, two) && accepts(**narrow, three)));
  CHECK((accepts(**wide, two) && !accepts(**wide, three)));
  CHECK(absl::IsInvalidArgument(tree(200).status()));
}

TEST_CASE("hostile schemas are refused in bounded time") {
  // Alternatives of alternatives of … the same two.
  Json defs = Json::object();
  defs["a"] = {{"anyOf", {{{"$ref", "#/$defs/a"}}, {{"$ref", "#/$defs/b"}}, {{"type", "null"}}}}};
  defs["b"] = {{"anyOf", {{{"$ref", "#/$defs/b"}}, {{"$ref", "#/$defs/a"}}, {{"type", "null"}}}}};
  Json list = Json::array();
  for (int i = 0; i < 30; ++i) list.push_back({{"$ref", i % 2 == 0 ? "#/$defs/a" : "#/$defs/b"}});
  CHECK(!SchemaError(Json{{"oneOf", list}, {"$defs", defs}}.dump()).empty());
  // Strings that each need much work.
  Json heavy = Json::array();
  for (int i = 0; i < 60; ++i) {
    heavy.push_back({{"type", "string"},
                     {"pattern", absl::StrCat("(a|b)*a(a|b){", 8 + i % 4, "}", i)},
                     {"minLength", i}});
  }
  CHECK(!SchemaError(Json{{"oneOf", heavy}}.dump()).empty());
}

}  // namespace stretto::engine
