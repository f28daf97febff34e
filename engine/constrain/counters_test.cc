// Counters: what they take is what is written out without them, in few states; and masks that don't
// depend on them far from where they decide.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/constrain/constraint.h"
#include "engine/constrain/json_schema.h"
#include "engine/constrain/regex.h"

namespace stretto::engine {
namespace {
Automaton Schema(const char* schema) {
  const auto pattern = ParseJsonSchema(schema);
  REQUIRE_OK(pattern.status());
  auto automaton = Automaton::Compile(**pattern);
  REQUIRE_OK(automaton.status());
  return *std::move(automaton);
}
std::string SchemaError(const char* schema) {
  const auto pattern = ParseJsonSchema(schema);
  const absl::Status status =
      pattern.ok() ? Automaton::Compile(**pattern).status() : pattern.status();
  CHECK(absl::IsInvalidArgument(status));
  return std::string(status.message());
}

// What is counted and what is written out take the same texts: random walks through both together.
void CheckSameTexts(const Pattern& pattern, PhiloxStream& random, int num_walks) {
  const auto counted = Automaton::Compile(pattern);
  const auto written = Automaton::Compile(pattern, {.max_nfa_states = 1 << 20,
                                                    .max_states = 1 << 20,
                                                    .max_table_entries = 1 << 26,
                                                    .max_steps = 1 << 28,
                                                    .counters = false});
  REQUIRE_OK(counted.status());
  REQUIRE_OK(written.status());
  for (int walk = 0; walk < num_walks; ++walk) {
    Automaton::State a = counted->start(), b = written->start();
    std::string text;
    for (int step = 0; step < 3000; ++step) {
      if (counted->Accepts(a) != written->Accepts(b)) FAIL(text);
      if (counted->IsEnd(a) != written->IsEnd(b)) FAIL(text);
      std::vector<uint8_t> ways;
      for (int byte = 0; byte < 256; ++byte) {
        const bool leads_on = counted->Next(a, static_cast<uint8_t>(byte)) != Automaton::kDead;
        if (leads_on != (written->Next(b, static_cast<uint8_t>(byte)) != Automaton::kDead)) {
          FAIL(text << " and then " << byte);
        }
        if (leads_on) ways.push_back(static_cast<uint8_t>(byte));
      }
      if (ways.empty()) break;
      // Mostly letters, so that strings come to their ends by length as well as by a quote.
      uint8_t byte = ways[random.Below(ways.size())];
      if (random.Below(8) != 0 && std::count(ways.begin(), ways.end(), 'a') > 0) byte = 'a';
      text += static_cast<char>(byte);
      a = counted->Next(a, byte);
      b = written->Next(b, byte);
    }
  }
}

}  // namespace

TEST_CASE("what is counted takes the texts that it takes written out, no others") {
  PhiloxStream random(testing::Seed());
  INFO("seed " << testing::Seed());
  for (
      const char* schema :
      {R"({"type": "string", "maxLength": 100})", R"({"type": "string", "minLength": 60})",
       R"({"type": "string", "minLength": 20, "maxLength": 120})",
       R"({"type": "string", "minLength": 40, "maxLength": 40})",
       R"({"type": "array", "minItems": 3, "maxItems": 40, "items": {"type": "string", "minLength": 1,
            "maxLength": 30}})",
       R"({"type": "array", "minItems": 5, "items": {"anyOf": [{"type": "null"},
            {"type": "string", "maxLength": 20}, {"type": "array", "maxItems": 7}]}})",
       // Counted together as long as their beginnings are the same.
       R"({"anyOf": [{"type": "string", "maxLength": 50}, {"type": "string", "minLength": 70,
            "maxLength": 90}, {"type": "array", "maxItems": 20, "items": {"type": "string"}}]})",
       R"({"type": "object", "properties": {"a": {"type": "string", "maxLength": 80},
            "ab": {"type": "string", "minLength": 9, "maxLength": 90,
            "pattern": "^(?:[a-e]+(?:[\\u00e4\\u65e5\"]{2}|x))*$"}, "c": {"type": "integer"}}, "required": ["ab"]})"}) {
    INFO(schema);
    const auto pattern = ParseJsonSchema(schema);
    REQUIRE_OK(pattern.status());
    CheckSameTexts(**pattern, random, 15);
  }
  for (const char* regex :
       {"(?:abc|abd[xyz]{1,3}){20,50}!", "(?:(?:a|bb){3,30},){2,20}", "[a-c]{0,90}x?",
        "(?:a{1,40}b){10,30}", "(?:[ab]{70}|[ac]{0,80}d)e*", "(?:ab?){80,}", "(?:a|ab){70,90}c",
        "(?:a{1,70}a){1,3}", "a{0,70}a{0,70}b", "(?:(?:(?:ab){40}c){40}d){2,}"}) {
    INFO(regex);
    const auto pattern = ParseRegex(regex, RegexMatch::kWhole);
    REQUIRE_OK(pattern.status());
    CheckSameTexts(**pattern, random, 10);
  }
}

TEST_CASE("pattern and length together take what the written out ones do") {
  PhiloxStream random(testing::Seed());
  INFO("seed " << testing::Seed());
  for (const char* pattern :
       {"^[a-z]+$", "a", "^(?:ab|\\u00e4{3}|\\u65e5)+$", "^(?:ab)+$", "^a*$|^b{40}",
        "^(?:a|\\n\"){5,}\\u{1F3B5}?x$", "^[^a]*(?:aa)*$", "^.{0,3}$"}) {
    for (const auto& [min, max] : std::vector<std::pair<int, int>>{
             {0, 50}, {30, -1}, {17, 40}, {12, 12}, {3, 100}, {1, 3}}) {
      const std::string schema =
          absl::StrCat(R"({"type": "array", "items": {"type": "string", "minLength": )", min,
                       max < 0 ? "" : absl::StrCat(R"(, "maxLength": )", max), R"(, "pattern": ")",
                       absl::StrReplaceAll(pattern, {{"\\", "\\\\"}, {"\"", "\\\""}}), "\"}}");
      INFO(schema);
      const auto parsed = ParseJsonSchema(schema);
      if (!parsed.ok()) {
        CHECK(absl::StrContains(parsed.status().message(), "together"));
        continue;
      }
      CheckSameTexts(**parsed, random, 5);
    }
  }
}

TEST_CASE("tuples, maps and other keywords of schema generators") {
  const auto check = [](const char* schema, const std::vector<const char*>& good,
                        const std::vector<const char*>& bad) {
    INFO(schema);
    const Automaton a = Schema(schema);
    for (const char* text : good) {
      INFO(text);
      CHECK(a.Matches(text));
    }
    for (const char* text : bad) {
      INFO(text);
      CHECK_FALSE(a.Matches(text));
    }
  };
  const char* pair = R"({"type": "array", "minItems": 2, "maxItems": 2,
      "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}]})";
  check(pair, {R"([1, "abc"])"},
        {"[]", "[1]", R"(["abc", 1])", R"([1, "abcd"])", R"([1, "a", 2])"});
  check(R"({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}]})",
        {"[]", "[1]", "[1, null]"}, {"[null]", "[1, null, 2]", "[1 null]", "[, null]"});
  check(R"({"type": "array", "minItems": 1, "maxItems": 4, "items": {"type": "boolean"},
            "prefixItems": [{"type": "integer"}, {"type": "null"}]})",
        {"[1]", "[1, null]", "[1, null, true, false]"},
        {"[]", "[1, true]", "[1, null, 3]", "[1, null, true, true, true]"});
  check(R"({"type": "array", "minItems": 3, "prefixItems": [{"type": "integer"}]})",
        {R"([1, {"a": []}, "x"])"}, {"[1]", "[1, 2, 3, 4]"});
  check(R"({"type": "array", "items": false, "prefixItems": [{"type": "integer"}]})", {"[]", "[1]"},
        {"[1, 2]"});
  check(R"({"type": "array", "items": {"enum": [1]}, "uniqueItems": true, "maxItems": 1})",
        {"[]", "[1]"}, {"[1, 1]"});
  check(R"({"type": "object", "minProperties": 1, "maxProperties": 3,
            "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}})",
        {R"({"a": 1})", R"({"a": 1, "bc": 2, "d": 3})"},
        {"{}", R"({"A": 1})", R"({"a": "x"})", R"({"a": 1, "b": 2, "c": 3, "d": 4})"});
  check(R"({"type": "object", "propertyNames": {"enum": ["x", "y"]},
            "additionalProperties": {"type": "null"}})",
        {"{}", R"({"y": null, "x": null})"}, {R"({"z": null})"});
  check(R"({"type": "object", "patternProperties": {"^[0-9]{2}$": {"type": "boolean"}},
            "additionalProperties": false})",
        {"{}", R"({"01": true, "99": false})"}, {R"({"1": true})", R"({"11": 1})"});
  check(R"({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "discriminator":
            {"propertyName": "k", "mapping": {"a": "#/$defs/A"}}, "$defs": {
            "A": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            "B": {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"],
                  "unevaluatedProperties": false}}})",
        {R"({"k": "a"})", R"({"k": "b"})"}, {R"({"k": "c"})", "{}"});
  check(R"({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "array",
            "items": {"$ref": "#/properties/b/prefixItems/1"}, "prefixItems": [true, {"const": 3}]}},
            "minProperties": 0, "maxProperties": 2})",
        {R"({"a": ["x", 3, 3], "b": []})"}, {R"({"a": [1, 2]})"});
  CHECK(absl::StrContains(SchemaError(R"({"type": "array", "uniqueItems": true})"),
                          "#/uniqueItems: isn't supported"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "object", "minProperties": 2})"),
                          "#/minProperties"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "object", "properties": {"a": {}, "b": {}},
                                          "maxProperties": 1})"),
                          "#/maxProperties"));
  CHECK(absl::StrContains(SchemaError(R"({"properties": {"a": {"type": "null", "type": "null"}}})"),
                          "#/properties/a: the key 'type' comes twice"));
  CHECK(absl::StrContains(SchemaError(R"({"anyOf": [{}, {"type": "null", "type": "null"}]})"),
                          "#/anyOf/1: the key 'type' comes twice"));
}

TEST_CASE("multiples within bounds, each of them and no others") {
  const Automaton a =
      Schema(R"({"type": "integer", "multipleOf": 7, "minimum": -100, "maximum": 3000})");
  for (int i = -4000; i <= 4000; ++i) {
    if (a.Matches(absl::StrCat(i)) != (i % 7 == 0 && i >= -100 && i <= 3000)) FAIL(i);
  }
  for (const char* bad : {"-0", "07", "7.0", "", "-"}) CHECK(!a.Matches(bad));
  // In cents, and as many digits as they have.
  const Automaton cents =
      Schema(R"({"type": "number", "multipleOf": 0.15, "minimum": -2, "exclusiveMaximum": 12})");
  for (int i = -400; i <= 1500; ++i) {
    const std::string text =
        absl::StrFormat("%s%d.%02d", i < 0 ? "-" : "", std::abs(i) / 100, std::abs(i) % 100);
    if (cents.Matches(text) != (i % 15 == 0 && i >= -200 && i < 1200)) FAIL(text);
  }
  for (const char* bad : {"-0.00", "00.15", "3", "3.0", "3.", ".15", "3.000", "0.1.5", "15e-2"}) {
    CHECK(!cents.Matches(bad));
  }
  const Automaton eighths = Schema(R"({"type": "number", "multipleOf": 0.125})");
  for (const char* good : {"0.125", "-7.250", "123456789012.875"}) CHECK(eighths.Matches(good));
  for (const char* bad : {"0.12", "-7.25", "0.126", "1234567890123.125"}) {
    CHECK(!eighths.Matches(bad));
  }
  Schema(R"({"type": "number", "multipleOf": 4.99})");
  const Automaton thousands =
      Schema(R"({"type": ["number", "null"], "multipleOf": 3e3, "maximum": 100000})");
  for (int i = -50'000; i <= 110'000; i += 500) {
    if (thousands.Matches(absl::StrCat(i)) != (i % 3000 == 0 && i <= 100'000)) FAIL(i);
  }
  for (const char* bad : {"000", "-0", "-0000", "3000.0", "03000"}) CHECK(!thousands.Matches(bad));
}

TEST_CASE("formats") {
  const std::vector<std::array<std::string, 3>> cases = {
      // format, what it takes, what it doesn't
      {"date", "2024-02-28", "2024-02-30"},
      {"date-time", "2024-12-01T23:59:59Z", "2024-12-01 23:59:59"},
      {"time", "23:59:59+01:30", "24:00:00Z"},
      {"duration", "P3DT4H5M6S", "P"},
      {"duration", "PT10M", "P1DT"},
      {"uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000"},
      {"uuid4", "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"},
      {"email", "ada.l@example.co.uk", "ada@example"},
      {"hostname", "a-b.example.org", "-a.org"},
      {"ipv4", "192.168.0.255", "192.168.0.256"},
      {"ipv6", "2001:db8::ff00:42:8329", "2001:db8:::1"},
      {"ipv6", "::", "1:2:3:4:5:6:7"},
      {"ipv6", "1:2:3:4:5:6:7:8", "1::2::3"},
      {"uri", "https://example.org:8080/a/b%20c?x=1&y=2#top", "example.org"},
      {"uri", "http://a.b", "http://a.b/%zz"}};
  for (const auto& [format, good, bad] : cases) {
    INFO(format);
    const Automaton a =
        Schema(absl::StrCat(R"({"type": "string", "format": ")", format, "\"}").c_str());
    CHECK(a.Matches(absl::StrCat("\"", good, "\"")));
    CHECK_FALSE(a.Matches(absl::StrCat("\"", bad, "\"")));
  }
  // With a length, as Pydantic writes HttpUrl.
  const Automaton url =
      Schema(R"({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083})");
  CHECK(url.num_states() < 500);
  const std::string base = "\"https://example.org/";
  CHECK(url.Matches(absl::StrCat(base, std::string(2083 - base.size() + 1, 'x'), "\"")));
  CHECK_FALSE(url.Matches(absl::StrCat(base, std::string(2083 - base.size() + 2, 'x'), "\"")));
  CHECK(Schema(R"({"type": "string", "format": "password", "maxLength": 3})").Matches("\"a?!\""));
}

TEST_CASE("long strings and lists take hardly any states") {
  const auto num_states = [](const char* schema) { return Schema(schema).num_states(); };
  CHECK(num_states(R"({"type": "string", "maxLength": 10000})") ==
        num_states(R"({"type": "string", "maxLength": 100})"));
  const Automaton a = Schema(R"({"type": "object", "required": ["a", "b", "c"], "properties": {
    "a": {"type": "string", "maxLength": 4000}, "b": {"type": "string", "minLength": 2000},
    "c": {"type": "array", "minItems": 900, "maxItems": 1000,
          "items": {"type": "array", "maxItems": 30, "items": {"type": "string", "maxLength": 500}}}}})");
  CHECK(a.num_states() < 300);
  const auto text = [](size_t num_a, size_t num_b, size_t num_items, size_t num_inner) {
    std::vector<std::string> inner(num_inner, absl::StrCat("\"", std::string(500, 'x'), "\""));
    inner.push_back("\"\\n\\u00e4\"");
    std::string all = absl::StrCat("[", absl::StrJoin(inner, ", "), "]");
    std::string items;
    for (size_t i = 0; i < num_items; ++i) absl::StrAppend(&items, i > 0 ? "," : "", all);
    std::string wide;
    for (size_t i = 0; i < num_a; ++i) wide += "\xC3\xA4";
    return absl::StrCat(R"({"a": ")", wide, R"(", "b": ")", std::string(num_b, 'b'), R"(", "c": [)",
                        items, "]}");
  };
  CHECK(a.Matches(text(4000, 2000, 900, 2)));
  CHECK(a.Matches(text(0, 9999, 1000, 29)));
  CHECK_FALSE(a.Matches(text(4001, 2000, 900, 2)));
  CHECK_FALSE(a.Matches(text(4000, 1999, 900, 2)));
  CHECK_FALSE(a.Matches(text(4000, 2000, 899, 2)));
  CHECK_FALSE(a.Matches(text(4000, 2000, 1001, 2)));
  CHECK_FALSE(a.Matches(text(4000, 2000, 900, 30)));
}

TEST_CASE("far from every count the masks of a string are one, near it each is its own") {
  std::vector<std::string> tokens;
  for (int i = 0; i < 256; ++i) tokens.emplace_back(1, static_cast<char>(i));
  for (const char* text : {"aaaaaaaa", "\xC3\xA4\xC3\xA4", "a\"", "\", \"", "bcd", "\\n\\"}) {
    tokens.emplace_back(text);
  }
  const auto trie = std::make_shared<const TokenTrie>(tokens);
  const auto constraint = Constraint::Compile(
      {ConstraintSpec::Kind::kJsonSchema,
       R"({"type": "array", "maxItems": 9, "items": {"type": "string", "minLength": 100,
           "maxLength": 1000}})"},
      trie);
  REQUIRE_OK(constraint.status());
  Constraint::State state = (*constraint)->Next((*constraint)->start(), '[');
  state = (*constraint)->Next(state, '"');
  std::set<const TokenMask*> masks;
  for (int length = 0; length <= 1000; ++length) {
    const auto mask = (*constraint)->Mask(state);
    masks.insert(mask.get());
    for (int32_t t = 0; t < static_cast<int32_t>(tokens.size()); ++t) {
      if (mask->Allows(t) != ((*constraint)->Next(state, t) != Constraint::kDead)) {
        FAIL("token " << t << " behind " << length);
      }
    }
    state = (*constraint)->Next(state, 'a');
  }
  CHECK(state == Constraint::kDead);
  CHECK(masks.size() <= 2 + 2 * 8 + 2);
}

TEST_CASE("what is too large is named by its place") {
  const auto places = [](const char* schema) {
    const std::string error = SchemaError(schema);
    INFO(error);
    return error.substr(std::min(error.find(';'), error.size()));
  };
  // Three letters and a count of them in every combination.
  CHECK(absl::StrContains(
      places(R"({"type": "object", "properties": {"short": {"type": "string", "maxLength": 9},
        "long": {"type": "string", "pattern": "(a|b)*a(a|b){30}"}, "last": {"type": "integer"}}})"),
      "#/properties/long"));
  std::string wide;
  for (int i = 0; i < 40; ++i) {
    absl::StrAppend(&wide, i > 0 ? ", " : "", "\"p", i, R"(": {"type": "array", "items": {}})");
  }
  const std::string schema = absl::StrCat(
      R"({"type": "object", "properties": {"small": {"type": "string"}, "wide": {"type": "object",
          "properties": {)",
      wide, "}}}}");
  CHECK(absl::StrContains(places(schema.c_str()), "#/properties/wide ("));
  // Of hundreds of equal parts none is named as the largest, with "0 %".
  std::string equal;
  for (int i = 0; i < 2000; ++i) {
    absl::StrAppend(&equal, i > 0 ? ", " : "", "\"p", i, R"(": {"type": "number"})");
  }
  const std::string of_equals = absl::StrCat(R"({"type": "object", "properties": {)", equal, "}}");
  CHECK(absl::StrContains(SchemaError(of_equals.c_str()), "states"));
  CHECK(places(of_equals.c_str()) == "");
}
}  // namespace stretto::engine
