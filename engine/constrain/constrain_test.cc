// Regular expressions and JSON Schemas to automata, and masks over a vocabulary.
#include <atomic>
#include <catch2/catch.hpp>
#include <regex>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/constrain/constraint.h"
#include "engine/constrain/json_patterns.h"
#include "engine/constrain/json_schema.h"
#include "engine/constrain/regex.h"
#include "engine/text/utf8.h"
#include "nlohmann/json.hpp"

namespace stretto::engine {
namespace {
using Json = nlohmann::ordered_json;

Automaton Compiled(const absl::StatusOr<PatternPtr>& pattern) {
  INFO(pattern.status());
  REQUIRE(pattern.ok());
  auto automaton = Automaton::Compile(**pattern);
  INFO(automaton.status());
  REQUIRE(automaton.ok());
  return *std::move(automaton);
}
Automaton Regex(absl::string_view expression, RegexMatch match = RegexMatch::kWhole) {
  return Compiled(ParseRegex(expression, match));
}
Automaton Schema(const Json& schema) { return Compiled(ParseJsonSchema(schema.dump())); }

bool Matches(const Automaton& automaton, absl::string_view text) {
  Automaton::State state = automaton.start();
  for (const char byte : text) {
    state = automaton.Next(state, static_cast<uint8_t>(byte));
    if (state == Automaton::kDead) return false;
  }
  return automaton.Accepts(state);
}

std::string ErrorOf(absl::string_view expression) {
  const auto pattern = ParseRegex(expression, RegexMatch::kWhole);
  absl::Status status = pattern.status();
  if (status.ok()) status = Automaton::Compile(**pattern).status();
  INFO(expression);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}
std::string SchemaError(const std::string& schema) {
  const auto pattern = ParseJsonSchema(schema);
  absl::Status status = pattern.status();
  if (status.ok()) status = Automaton::Compile(**pattern).status();
  INFO(schema);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

// A random text that the automaton accepts, or "" if the walk gets too long.
std::string RandomMatch(const Automaton& automaton, PhiloxStream& random) {
  std::string text;
  Automaton::State state = automaton.start();
  while (text.size() < 400) {
    std::vector<uint8_t> ways;
    for (int byte = 0; byte < 256; ++byte) {
      if (automaton.Next(state, static_cast<uint8_t>(byte)) != Automaton::kDead) {
        ways.push_back(static_cast<uint8_t>(byte));
      }
    }
    if (automaton.Accepts(state) && (ways.empty() || random.Below(4) == 0)) return text;
    REQUIRE(!ways.empty());  // no dead ends
    const uint8_t byte = ways[random.Below(ways.size())];
    text += static_cast<char>(byte);
    state = automaton.Next(state, byte);
  }
  return "";
}
}  // namespace

TEST_CASE("regular expressions match what they should, against std::regex") {
  PhiloxStream random(testing::Seed());
  const std::vector<std::string> expressions = {"a",
                                                "ab|cd",
                                                "a*",
                                                "(ab)+",
                                                "a?b",
                                                "[abc]+d",
                                                "[^ab]c",
                                                "a{3}",
                                                "a{2,}",
                                                "a{1,3}b",
                                                "(a|b)*c",
                                                "a(b(c|d)?)*",
                                                "\\d+",
                                                "\\w\\W",
                                                "[a-cx]{2}",
                                                "(?:ab|a)b?",
                                                "a*?b",
                                                "a|",
                                                "()",
                                                "(a*)*",
                                                "(a|aa)+b",
                                                "[]a]",
                                                "[a\\]b-]+",
                                                ".b",
                                                "\\x61\\u0062",
                                                "(a{0,2}b){2}",
                                                "((a|b)(b|c)){1,2}"};
  const std::string alphabet = "abcdx1] -.";
  for (const std::string& expression : expressions) {
    INFO(expression);
    const Automaton automaton = Regex(expression);
    // ECMAScript reads "[]a]" as an empty class.
    const std::regex reference(expression == "[]a]" ? "[\\]a]" : expression);
    for (int i = 0; i < 300; ++i) {
      std::string text;
      for (uint64_t n = random.Below(7); n > 0; --n) text += alphabet[random.Below(10)];
      INFO("'" << text << "'");
      CHECK(Matches(automaton, text) == std::regex_match(text, reference));
    }
    for (int i = 0; i < 20; ++i) {
      const std::string text = RandomMatch(automaton, random);
      if (!IsValidUtf8(text) || text.find_first_not_of(alphabet) != std::string::npos) continue;
      INFO("'" << text << "'");
      CHECK(std::regex_match(text, reference));
    }
  }
}

TEST_CASE("characters are code points in UTF-8, whole ones alone") {
  CHECK(Matches(Regex("."), "\xC3\xA4"));
  CHECK(Matches(Regex("[\xC3\xA4\xE6\x97\xA5]{2}"), "\xE6\x97\xA5\xC3\xA4"));
  CHECK(Matches(Regex("[^a]"), "\xF0\x9F\x8E\xB5"));
  CHECK(!Matches(Regex("."), "\xC3"));
  CHECK(!Matches(Regex("..?"), "\xE6\x97"));
  CHECK(!Matches(Regex("."), "\xED\xA0\x80"));  // a surrogate
  CHECK(!Matches(Regex("."), "\n"));
  CHECK(Matches(Regex("\\u{1F3B5}"), "\xF0\x9F\x8E\xB5"));
  // Every code point through ranges that are cut in every way.
  const Automaton some = Regex("[\\u{7F}-\\u{81}\\u{7FF}-\\u{801}\\u{FFFE}-\\u{10001}]");
  for (char32_t c = 0; c <= 0x10FFFF; c += c > 0x20000 ? 997 : 1) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    AppendUtf8(c, &text);
    const bool expected =
        (c >= 0x7F && c <= 0x81) || (c >= 0x7FF && c <= 0x801) || (c >= 0xFFFE && c <= 0x10001);
    if (Matches(some, text) != expected) FAIL("code point " << static_cast<uint32_t>(c));
  }
  PhiloxStream random(testing::Seed());
  for (int i = 0; i < 300; ++i) CHECK(IsValidUtf8(RandomMatch(Regex("(?:.|[^x])+"), random)));
}

TEST_CASE("searches, anchored or not") {
  CHECK(Matches(Regex("b", RegexMatch::kSearch), "abc"));
  CHECK(!Matches(Regex("^b", RegexMatch::kSearch), "abc"));
  CHECK(!Matches(Regex("b$", RegexMatch::kSearch), "abc"));
  CHECK(Matches(Regex("^ab|c$", RegexMatch::kSearch), "abx"));
  CHECK(Matches(Regex("^ab|c$", RegexMatch::kSearch), "xc"));
  CHECK(!Matches(Regex("^ab|c$", RegexMatch::kSearch), "xab"));
  CHECK(Matches(Regex("^ab$"), "ab"));
}

TEST_CASE("look-ahead at the beginning") {
  const Automaton password = Regex("(?=.*[0-9])(?=[^A-Z]*[A-Z])(?!.*aa|b$)[a-zA-Z0-9]{3,8}");
  for (const char* good : {"aB3", "3xxX", "ABC1", "b1B"}) CHECK(Matches(password, good));
  for (const char* bad : {"aB", "abc1", "ABCD", "aaB3", "aB3 "}) CHECK(!Matches(password, bad));
  CHECK(!Matches(Regex("(?!b$)b1?"), "b"));
  CHECK(Matches(Regex("(?!b$)b1?"), "b1"));
  const Automaton decimal =
      Regex("^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", RegexMatch::kSearch);  // as Pydantic writes it
  for (const char* good : {"0", "-1.50", "+.5", "7."}) CHECK(Matches(decimal, good));
  for (const char* bad : {"", ".", "-", "+.", "1e3"}) CHECK(!Matches(decimal, bad));
  CHECK(Matches(Regex("^(?!ab)a", RegexMatch::kSearch), "axb"));
  CHECK(!Matches(Regex("^(?!ab)a", RegexMatch::kSearch), "ab"));
  CHECK(!ParseRegex("(?!ab)a", RegexMatch::kSearch).ok());
}

TEST_CASE("look-ahead within the group at the end means what others mean by it") {
  // The first as Pydantic writes a decimal of up to 6 digits, 2 of them behind the point.
  for (const char* expression :
       {"^(?!^[-+.]*$)[+-]?0*(?:\\d{0,4}|(?=[\\d.]{1,7}0*$)\\d{0,4}\\.\\d{0,2}0*$)",
        "^0*(?:(?=[1.]{1,3}0*$)1{0,2}\\.1?0*$|(?!.*11)1[01]*)$", "^1*((?=1.0)[1.]*0|(?!10)1.)",
        "1(?:0|(?=.1)[.1]{2,3}|(?!-)(?!1)[-1.]$)"}) {
    const std::regex reference(expression);
    for (const RegexMatch match : {RegexMatch::kSearch, RegexMatch::kWhole}) {
      const Automaton automaton = Regex(expression, match);
      const Automaton json = Compiled(ParseRegex(expression, match, RegexText::kJsonString));
      std::vector<std::string> texts{""};
      size_t num_good = 0, num_wrong = 0;
      for (size_t i = 0; i < texts.size(); ++i) {
        const std::string text = texts[i];
        const bool good = match == RegexMatch::kSearch ? std::regex_search(text, reference)
                                                       : std::regex_match(text, reference);
        num_good += good;
        num_wrong += Matches(automaton, text) != good || Matches(json, text) != good;
        for (size_t c = 0; text.size() < 5 && c < 4; ++c) texts.push_back(text + "01.-"[c]);
      }
      INFO(expression << (match == RegexMatch::kSearch ? ", searched" : ", of the whole"));
      CHECK(num_good > 0);
      CHECK(num_good < texts.size());
      CHECK(num_wrong == 0);
    }
  }
  CHECK(absl::StrContains(ErrorOf("(?:(?=a)a|b)c"), "look-around"));
}

TEST_CASE("expressions that are refused, and where") {
  CHECK(absl::StrContains(ErrorOf("ab(c"), "character 3"));
  CHECK(absl::StrContains(ErrorOf("ab)"), "character 3"));
  CHECK(absl::StrContains(ErrorOf("a[b"), "character 2"));
  CHECK(absl::StrContains(ErrorOf("\xC3\xA4\xC3\xB6*+"), "character 4"));
  CHECK(absl::StrContains(ErrorOf("(a)\\1"), "back references"));
  CHECK(absl::StrContains(ErrorOf("b(?=a)"), "look-around"));
  CHECK(absl::StrContains(ErrorOf("(?=a)b"), "no text matches"));
  CHECK(absl::StrContains(ErrorOf("(?=a)a|b"), "in a group"));
  CHECK(absl::StrContains(ErrorOf("(?=a"), "end of the look-ahead"));
  CHECK(absl::StrContains(ErrorOf("(?<!a)"), "look-around"));
  for (const char* bad :
       {"*a", "a**", "a{2", "a{,2}", "a{3,2}", "a{99999}", "[b-a]", "\\q", "a\\", "\\bword", "a^b",
        "a$b", "\\x1", "\\ud800", "[^\\s\\S]", "\xFF", "\\u{110000}", "(?i)a", "[[:alpha:]]"}) {
    CHECK(!ErrorOf(bad).empty());
  }
}

TEST_CASE("hostile expressions are refused in bounded time and memory") {
  CHECK(absl::StrContains(ErrorOf("(a|b)*a(a|b){30}"), "complex"));
  CHECK(absl::StrContains(ErrorOf("((((a{1,100}){1,100}){1,100}){1,100})"), "too large"));
  CHECK(!ErrorOf("(.*){1,9999}x(.*){1,9999}").empty());
  CHECK(!ErrorOf("(?:.{0,999}a){40}").empty());
  CHECK(absl::StrContains(ErrorOf(std::string(1000, '(') + std::string(1000, ')')), "deep"));
  CHECK(!ErrorOf(std::string(20000, 'a')).empty());
  CHECK(Matches(Regex("(?:(?:(?:){9999}){9999}){9999}"), ""));
}

TEST_CASE("JSON schemas: what matches") {
  const Json schema = Json::parse(R"({
    "type": "object", "title": "a person", "required": ["name", "age"], "additionalProperties": false,
    "properties": {
      "name": {"type": "string", "minLength": 1, "maxLength": 5},
      "nick": {"type": ["string", "null"]},
      "age": {"type": "integer"},
      "tags": {"type": "array", "items": {"enum": ["a", "b", 3, null]}, "minItems": 1, "maxItems": 2},
      "home": {"$ref": "#/$defs/place"}},
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}}})");
  const Automaton a = Schema(schema);
  CHECK(Matches(a, R"({"name": "Ada", "age": 36})"));
  CHECK(Matches(a, R"({"name":"Ada","age":36})"));
  CHECK(Matches(a, R"({"name": "\u00e4\n\"x", "nick": null, "age": -1, "tags": ["a", 3]})"));
  CHECK(Matches(a, R"({"name": "A", "age": 0, "home": {"lat": -1.5e3}})"));
  CHECK(Matches(a, R"({"name": "A", "age": 0, "home": {}})"));
  CHECK(!Matches(a, R"({"age": 36})"));
  CHECK(!Matches(a, R"({"name": "Ada"})"));
  CHECK(!Matches(a, R"({"name": "", "age": 1})"));
  CHECK(!Matches(a, R"({"name": "abcdef", "age": 1})"));
  CHECK(!Matches(a, R"({"name": "A", "age": 01})"));
  CHECK(!Matches(a, R"({"name": "A", "age": 1,})"));
  CHECK(!Matches(a, R"({"name": "A", "age": 1, "tags": []})"));
  CHECK(!Matches(a, R"({"name": "A", "age": 1, "tags": ["c"]})"));
  CHECK(!Matches(a, R"({"name": "A", "age": 1, "more": 1})"));
  CHECK(!Matches(a, R"({"name": "\ud800", "age": 1})"));

  const Automaton optional =
      Schema({{"type", "object"}, {"properties", {{"a", {{"const", 1}}}, {"b", {{"const", 2}}}}}});
  for (const char* good : {"{}", R"({"a": 1})", R"({"b": 2})", R"({"a": 1, "b": 2})"}) {
    CHECK(Matches(optional, good));
  }
  for (const char* bad : {R"({,"b": 2})", R"({"a": 1 "b": 2})", R"({"b": 2, "a": 1})"}) {
    CHECK(!Matches(optional, bad));
  }
  const Automaton pattern = Schema({{"type", "string"}, {"pattern", "^a\"[\\n-]*$"}});
  CHECK(Matches(pattern, R"("a\"\n--")"));
  CHECK(!Matches(pattern, "\"a\"\n\""));
  CHECK(Matches(Schema({{"type", "string"}, {"format", "date"}}), "\"2024-05-01\""));
  const Automaton integers = Schema({{"type", "integer"}, {"enum", {1, "a", 2.5, true, 3}}});
  CHECK(Matches(integers, "3"));
  for (const char* bad : {"\"a\"", "2.5", "true"}) CHECK(!Matches(integers, bad));
  CHECK(Matches(Schema({{"allOf", {{{"type", "null"}}}}, {"title", "x"}}), "null"));
  CHECK(Matches(Schema({{"anyOf", {{{"type", "null"}}, {{"type", "boolean"}}}}}), "true"));
  CHECK(Matches(Schema({{"type", "object"}, {"additionalProperties", {{"type", "integer"}}}}),
                R"({"x": 1, "y": 2})"));
  CHECK(Matches(Compiled(AnyJsonObject()), R"({"a": {"b": [1, "x", {}]}, "c": null})"));
  CHECK(!Matches(Compiled(AnyJsonObject()), "[1]"));
}

TEST_CASE("integers between bounds, each of them and no others") {
  PhiloxStream random(testing::Seed());
  for (int round = 0; round < 40; ++round) {
    const auto bound = [&] { return static_cast<int64_t>(random.Below(2400)) - 1200; };
    int64_t low = bound(), high = bound();
    if (round % 4 == 0) high = low + static_cast<int64_t>(random.Below(3));
    if (low > high) std::swap(low, high);
    INFO(low << " to " << high);
    const Automaton a =
        Schema({{"type", "integer"}, {"minimum", low}, {"exclusiveMaximum", high + 1}});
    for (int64_t i = -13000; i <= 13000; i += i > -1300 && i < 1300 ? 1 : 97) {
      if (Matches(a, absl::StrCat(i)) != (i >= low && i <= high)) FAIL(i);
    }
    CHECK(!Matches(a, "01"));
    CHECK(!Matches(a, "-0"));
  }
  const Automaton positive = Schema({{"type", "integer"}, {"minimum", 1}});
  for (const char* good : {"1", "10", "9999999999999999"}) CHECK(Matches(positive, good));
  for (const char* bad : {"0", "-1", "10000000000000000"}) CHECK(!Matches(positive, bad));
  CHECK(Matches(Schema({{"type", {"integer", "null"}}, {"maximum", -5}}), "-6"));
}

TEST_CASE("random texts of a schema are JSON that obeys it") {
  PhiloxStream random(testing::Seed());
  const Automaton a = Schema(Json::parse(R"({
    "type": "object", "required": ["s", "n"],
    "properties": {
      "s": {"type": "string", "pattern": "^[a-c\"\\\\\n\u00e4]{1,4}$"},
      "n": {"type": "number"},
      "l": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "minItems": 1, "maxItems": 3},
      "b": {"type": "boolean"}}})"));
  int num_seen = 0;
  for (int i = 0; i < 500; ++i) {
    const std::string text = RandomMatch(a, random);
    if (text.empty()) continue;
    ++num_seen;
    INFO(text);
    const Json json = Json::parse(text, nullptr, false);
    REQUIRE(json.is_object());
    REQUIRE(json["s"].is_string());
    CHECK(!json["s"].get<std::string>().empty());
    CHECK(json["n"].is_number());
    if (json.contains("l")) CHECK((json["l"].size() >= 1 && json["l"].size() <= 3));
    if (json.contains("b")) CHECK(json["b"].is_boolean());
  }
  CHECK(num_seen > 300);
}

TEST_CASE("schemas that are refused, and where") {
  CHECK(absl::StrContains(SchemaError("{"), "JSON"));
  CHECK(absl::StrContains(SchemaError("3"), "#: "));
  CHECK(absl::StrContains(SchemaError(R"({"type": "strin"})"), "#/type"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "boolean", "minimum": 1})"), "#/minimum"));
  for (const char* bad : {"0.5", "\"1\"", "99999999999999999999", "-10000000000000000", "1e3",
                          "18446744073709551615", "18446744073709551611"}) {
    CHECK(absl::StrContains(
        SchemaError(absl::StrCat("{\"type\": \"integer\", \"maximum\": ", bad, "}")), "#/maximum"));
  }
  CHECK(!SchemaError(R"({"type": "integer", "minimum": 3, "exclusiveMaximum": 3})").empty());
  CHECK(absl::StrContains(SchemaError(R"({"type": "object", "properties": {"a": {"oneOf": []}}})"),
                          "#/properties/a/oneOf"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "object", "required": ["x"]})"), "#/required"));
  CHECK(absl::StrContains(SchemaError(R"({"type": "string", "pattern": "(a"})"), "#/pattern"));
  CHECK(absl::StrContains(SchemaError(R"({"$ref": "#/$defs/x"})"), "#/$ref"));
  CHECK(absl::StrContains(SchemaError([] {
                            std::string nested = "{}";
                            for (int i = 0; i < 66; ++i)
                              nested = R"({"type": "array", "items": )" + nested + "}";
                            return nested;
                          }()),
                          "nested too deeply"));
  CHECK(!SchemaError(R"({"properties": {"a": {}}})").empty());
  CHECK(!SchemaError(R"({"enum": []})").empty());
  CHECK(!SchemaError(R"({"type": "integer", "enum": ["a"]})").empty());
  CHECK(!SchemaError(R"({"allOf": [{}, {}]})").empty());
  CHECK(absl::StrContains(SchemaError(R"({"enum": )" + std::string(20000, '[')), "levels deep"));
  CHECK(absl::StrContains(SchemaError(std::string(10 << 20, ' ')), "bytes"));
  CHECK(!SchemaError(R"({"type": "string", "minLength": 3, "maxLength": 2})").empty());
  CHECK(!SchemaError(R"({"type": "string", "format": "json-pointer"})").empty());
  // Doubling references: 2^30 schemas.
  Json defs = Json::object();
  for (int i = 0; i < 30; ++i) {
    const Json next = {{"$ref", absl::StrCat("#/$defs/d", i + 1)}};
    defs[absl::StrCat("d", i)] = {{"anyOf", {next, next}}};
  }
  defs["d30"] = {{"type", "null"}};
  CHECK(!SchemaError(Json{{"$ref", "#/$defs/d0"}, {"$defs", defs}}.dump()).empty());
}

TEST_CASE("masks allow the tokens whose bytes lead on, no others") {
  std::vector<std::string> vocabulary(256);
  for (int i = 0; i < 256; ++i)
    vocabulary[static_cast<size_t>(i)] = std::string(1, static_cast<char>(i));
  for (const char* word :
       {"ab", "abc", "b1", "12", "123", "ab", "\xE6\x97", "{\"", "\": ", "true"}) {
    vocabulary.emplace_back(word);
  }
  vocabulary.emplace_back();  // a special token
  const auto trie = std::make_shared<const TokenTrie>(vocabulary);
  PhiloxStream random(testing::Seed());
  for (const char* expression : {"(ab|abc1)*2", "[0-9]{2,4}", "(?:.|a)*b", "\\{\"a\": true\\}"}) {
    INFO(expression);
    auto constraint = Constraint::Compile({ConstraintSpec::Kind::kRegex, expression}, trie);
    REQUIRE(constraint.ok());
    Constraint::State state = (*constraint)->start();
    for (int step = 0; step < 50; ++step) {
      const auto mask = (*constraint)->Mask(state);
      CHECK(mask == (*constraint)->Mask(state));
      std::vector<int32_t> allowed;
      for (int32_t t = 0; t < static_cast<int32_t>(vocabulary.size()); ++t) {
        const bool leads_on = (*constraint)->Next(state, t) != Constraint::kDead;
        CHECK(mask->Allows(t) == leads_on);
        if (leads_on) allowed.push_back(t);
      }
      CHECK(mask->count == static_cast<int32_t>(allowed.size()));
      CHECK(!mask->Allows(static_cast<int32_t>(vocabulary.size())));
      CHECK((*constraint)->MustEnd(state) == allowed.empty());
      if (allowed.empty()) {
        CHECK((*constraint)->MayEnd(state));
        break;
      }
      state = (*constraint)->Next(state, allowed[random.Below(allowed.size())]);
    }
  }
  CHECK((*Constraint::Compile({ConstraintSpec::Kind::kJsonObject, ""}, trie))->MayEnd(0) == false);
  // A vocabulary without "b" can't promise one, and says only what does without.
  vocabulary['b'].clear();
  const auto poor = std::make_shared<const TokenTrie>(vocabulary);
  const auto compile = [&](const char* expression) {
    return Constraint::Compile({ConstraintSpec::Kind::kRegex, expression}, poor);
  };
  CHECK(absl::IsInvalidArgument(compile("ab").status()));
  CHECK(absl::IsInvalidArgument(compile("b?").status()));  // the empty text alone
  CHECK(absl::IsInvalidArgument(compile("").status()));
  const auto without = compile("a(b1|[b-d])");
  REQUIRE(without.ok());
  const auto mask = (*without)->Mask((*without)->Next((*without)->start(), 'a'));
  CHECK(mask->count == 2);
  CHECK((mask->Allows('c') && mask->Allows('d')));

  int num_made = 0;
  ConstraintCache cache([&] { return ++num_made, trie; }, {.capacity = 2});
  CHECK(num_made == 0);
  const auto get = [&](const char* text) {
    return *cache.Get({ConstraintSpec::Kind::kRegex, text});
  };
  const auto first = get("a");
  CHECK(get("a") == first);
  CHECK(get("b") != first);
  (void)get("a");
  (void)get("c");
  CHECK(get("a") == first);  // "b" was the one to go
  // What can't be compiled is remembered too, beside the others: the same message, not one like it.
  const auto refused = cache.Get({ConstraintSpec::Kind::kRegex, "("}).status();
  CHECK(!refused.ok());
  const auto again = cache.Get({ConstraintSpec::Kind::kRegex, "("}).status();
  CHECK(again.message().data() == refused.message().data());
  // Errors speak of what was asked for, whatever else was refused with the same text.
  const auto choice = cache.Get({ConstraintSpec::Kind::kRegex, "(", "choice"}).status();
  CHECK(absl::StartsWith(choice.message(), "choice: "));
  CHECK(absl::StartsWith(refused.message(), "regex: "));
  CHECK(get("a") == first);
  CHECK(num_made == 1);
}

// The mutexes of Debian's Abseil are unknown to ThreadSanitizer, which would see races in every
// use.
#ifndef __SANITIZE_THREAD__
TEST_CASE("who waits for a constraint waits in a short line, and may leave it") {
  absl::Notification reached, go_on;
  std::vector<std::string> bytes(256);
  for (int i = 0; i < 256; ++i) bytes[static_cast<size_t>(i)] += static_cast<char>(i);
  const auto make_trie = [&] {
    reached.Notify();
    go_on.WaitForNotification();
    return std::make_shared<const TokenTrie>(bytes);
  };
  ConstraintCache cache(make_trie, {.capacity = 4, .max_compiling = 1, .max_waiting = 1});
  const auto get = [&](const char* text, const std::function<bool()>& gone = {}) {
    return cache.Get({ConstraintSpec::Kind::kRegex, text}, gone);
  };
  std::atomic<int> num_good = 0;
  std::thread first([&] { num_good += get("a").ok() ? 1 : 0; });
  reached.WaitForNotification();
  std::atomic<int> num_asked = 0;
  std::atomic<bool> leaves = false;
  absl::Status left;
  std::thread second([&] { left = get("b", [&] { return ++num_asked, leaves.load(); }).status(); });
  while (num_asked == 0) std::this_thread::yield();  // it waits
  const absl::Status full = get("c").status();
  INFO(full);
  CHECK(absl::IsResourceExhausted(full));
  CHECK(absl::StrContains(full.message(), "try again"));
  // Whoever asks for what is there already is not one more: nor is it held up when they leave.
  std::thread third([&] { num_good += get("b").ok() ? 1 : 0; });
  std::thread fourth([&] { num_good += get("a").ok() ? 1 : 0; });
  leaves = true;
  second.join();
  CHECK(absl::IsCancelled(left));
  go_on.Notify();
  first.join();
  third.join();
  fourth.join();
  CHECK(num_good == 3);
}

TEST_CASE("threads that share a cache get the same masks") {
  std::vector<std::string> bytes(256);
  for (int i = 0; i < 256; ++i) bytes[static_cast<size_t>(i)] += static_cast<char>(i);
  ConstraintCache cache([&] { return std::make_shared<const TokenTrie>(bytes); }, {.capacity = 2});
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 40; ++round) {
        const int digits = 1 + (round + t) % 4;
        const auto constraint =
            cache.Get({ConstraintSpec::Kind::kRegex, absl::StrCat("[0-9]{", digits, "}")});
        if (!constraint.ok()) {
          ++num_wrong;
          continue;
        }
        Constraint::State state = (*constraint)->start();
        for (int i = 0; i < digits; ++i) {
          num_wrong += (*constraint)->Mask(state)->count == 10 ? 0 : 1;
          state = (*constraint)->Next(state, '7');
        }
        num_wrong += (*constraint)->MustEnd(state) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_wrong == 0);
}
#endif
}  // namespace stretto::engine
