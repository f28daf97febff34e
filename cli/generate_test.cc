// What `stretto generate` writes, and when; with the model of examples/.
#include "cli/generate_run.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "base/testing.h"
#include "cli/generate_io.h"

namespace stretto::cli {
namespace {
GenerateOptions Options() {
  GenerateOptions options;
  options.model.host.path = STRETTO_SOURCE_DIR "/examples/tiny-model";
  options.model.host.threads = 1;
  options.model.kv_cache_mb = 16;
  options.raw = true;
  options.prompt = "What is 7 + 8?";
  options.sampling.max_tokens = 8;
  options.sampling.ignore_eos = true;
  return options;
}

struct Written {
  absl::Status status;
  std::string text, remarks;
};
Written Run(const GenerateOptions& options) {
  char *out = nullptr, *remarks = nullptr;
  size_t out_size = 0, remarks_size = 0;
  std::FILE* out_file = open_memstream(&out, &out_size);
  std::FILE* remarks_file = open_memstream(&remarks, &remarks_size);
  Written written;
  written.status = Generate(options, out_file, remarks_file);
  std::fclose(out_file);
  std::fclose(remarks_file);
  written.text.assign(out, out_size);
  written.remarks.assign(remarks, remarks_size);
  std::free(out);
  std::free(remarks);
  return written;
}
std::string TextOf(const GenerateOptions& options) {
  const Written written = Run(options);
  REQUIRE_OK(written.status);
  return written.text;
}
std::vector<std::string> LinesOf(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}
// Those of the completions, without headings.
std::vector<std::string> TextLinesOf(const std::string& text) {
  std::vector<std::string> lines = LinesOf(text);
  lines.erase(std::remove_if(lines.begin(), lines.end(),
                             [](const std::string& line) { return line.find("=== ") == 0; }),
              lines.end());
  return lines;
}
}  // namespace

TEST_CASE("guessing ahead writes the same, and a text that was cut off is told of") {
  GenerateOptions options = Options();
  options.prompt = "1+1=2 1+1=2 1+1=2 1+1=";
  const std::string plain = TextOf(options);
  options.model.speculation = "ngram";
  const Written guessed = Run(options);
  CHECK(guessed.text == plain);
  CHECK(absl::StrContains(guessed.remarks, "stretto: speculation: "));
  CHECK(absl::StrContains(guessed.remarks, " tokens drafted, "));
  options.model.speculation = "off";
  options.choices = {"a text of many tokens", "another one"};
  const Written cut = Run(options);
  REQUIRE_OK(cut.status);
  CHECK(absl::StrContains(cut.remarks, "--max-tokens 8 cut off 1 of 1 completions"));
  options.sampling.max_tokens = 64;
  CHECK(Run(options).remarks.empty());
  options.choices = {std::string(20000, '.')};
  const Written refused = Run(options);
  CHECK(absl::StrContains(refused.status.message(), "choice: the 1 texts have 20000 bytes"));
  CHECK_FALSE(absl::StrContains(refused.status.message(), "egular"));
}

TEST_CASE("prompts come from standard input as well") {
  std::FILE* input = std::tmpfile();
  std::fputs("one\r\n \t\n\"two\"\n", input);
  std::rewind(input);
  const auto prompts = ReadPrompts("-", input);
  REQUIRE_OK(prompts);
  REQUIRE(prompts->size() == 2);
  CHECK(((*prompts)[0].text == "one" && (*prompts)[0].place == "standard input:1"));
  CHECK(((*prompts)[1].text == "\"two\"" && (*prompts)[1].place == "standard input:3"));
  CHECK(absl::StrContains(ReadPrompts("-", input).status().message(), "standard input: holds no"));
  std::fclose(input);
}

TEST_CASE("several completions stand apart, and a file's line is named in errors") {
  GenerateOptions options = Options();
  options.num_samples = 2;
  options.choices = {"a", "b\n\nc"};
  const std::string two = TextOf(options);
  CHECK(two.find("=== completion 1 of 2 ===\n") == 0);
  CHECK(absl::StrContains(two, "\n\n=== completion 2 of 2 ===\n"));
  const testing::TempDir dir;
  options.prompts_file = dir.path() + "/prompts.jsonl";
  std::ofstream(options.prompts_file) << "one\n\n{\"prompt\": \"two\"}\n";
  options.raw = false;
  options.model.host.prompts.chat_format = "none";
  const std::string four = absl::StrCat("\n", TextOf(options));
  for (const char* heading : {":1 completion 1 of 2 ===\n", ":1 completion 2 of 2 ===\n",
                              ":3 completion 1 of 2 ===\n", ":3 completion 2 of 2 ===\n"}) {
    CHECK(absl::StrContains(four, absl::StrCat("\n=== ", options.prompts_file, heading)));
  }
  options.num_samples = 1;
  options.json = true;
  options.output = dir.path() + "/out.jsonl";
  std::FILE* remarks = std::tmpfile();
  REQUIRE_OK(GenerateTo(options, remarks));
  std::stringstream written;
  written << std::ifstream(options.output).rdbuf();
  const auto lines = LinesOf(written.str());
  REQUIRE(lines.size() == 2);
  CHECK(absl::StrContains(lines[1], "\"index\":1"));
  options.output = dir.path();
  CHECK(absl::StrContains(GenerateTo(options, remarks).message(), "--output"));
  std::fclose(remarks);
  for (const char* bad :
       {"{\"prompt\": \"x\"", "{\"prompt\": 3}", "{\"prompt\": \"a\", \"prompt\": \"b\"}",
        "{\"messages\": []}", "\xff", "null", "42", "[1, 2, 3]", "true", "{}",
        "{\"prompt\": \"x\", \"max_tokens\": 3}", "{\"prompt\": \"x\", \"prompt_ids\": [1]}",
        "{\"prompt_ids\": []}", "{\"prompt_ids\": [1, -1]}", "{\"prompt_ids\": [1, 257]}",
        "{\"prompt_ids\": [1.5]}", "{\"messages\": [{\"role\": \"user\", \"content\": 3}]}",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"x\", \"tool\": \"y\"}]}",
        "{\"messages\": [{\"role\": \"foo\", \"content\": \"x\"}]}"}) {
    std::ofstream(options.prompts_file, std::ios::trunc) << "one\n\n" << bad << "\n";
    const absl::Status status = Run(options).status;
    INFO(bad << ": " << status.message());
    CHECK(absl::IsInvalidArgument(status));
    CHECK(absl::StartsWith(status.message(), options.prompts_file + ":3: "));
  }
}

TEST_CASE("a file's prompts are what their lines say, and no field is passed over") {
  const auto parsed = [](const std::string& line, bool raw = false, bool other_fields = false) {
    return ParsePrompt({line, "f:1", /*is_line=*/true}, raw, other_fields);
  };
  const auto fault = [&](const std::string& line) {
    return std::string(parsed(line).status().message());
  };
  CHECK(*parsed("plain [1]")->line == R"({"prompt":"plain [1]"})");
  CHECK(*parsed("\"42\"")->line == R"({"prompt":"42"})");
  CHECK(*parsed("[INST] hello")->line == R"({"prompt":"[INST] hello"})");
  CHECK(*parsed("42", /*raw=*/true)->raw == "42");
  CHECK(*ParsePrompt({"42", "--prompt"}, false, false)->line == R"({"prompt":"42"})");
  CHECK(*parsed(R"({"prompt_ids": [3, 1]})")->ids == std::vector<int32_t>{3, 1});
  CHECK(parsed("\"42\"")->shown == R"({"prompt":"42"})");
  CHECK(parsed(R"({"prompt": "x", "answer": 3})")->shown == R"({"prompt":"x"})");
  CHECK(parsed(R"({"messages": [{"role": "user"}]})")->shown ==
        R"({"messages":[{"role":"user"}]})");
  CHECK(parsed(R"({"prompt_ids": [3]})")->shown == "{}");
  REQUIRE_OK(parsed(R"({"prompt": "x", "answer": 3, "chosen": "", "rejected": ""})"));
  REQUIRE_OK(parsed(R"({"prompt": "x", "source": "y"})", false, /*other_fields=*/true));
  CHECK(absl::StrContains(fault("42"), "JSON of another kind (number)"));
  CHECK(absl::StrContains(fault("[1, 2]"), "write {\"prompt_ids\": [...]}"));
  CHECK(absl::StrContains(fault(R"({"prompt": "x", "seed": 3})"),
                          "'seed' isn't known here: expected one of messages, prompt, prompt_ids"));
  CHECK(parsed(" \t{\"prompt_ids\": [3]}")->ids == std::vector<int32_t>{3});
  CHECK(parsed(R"({"prompt_ids": [3], "prompt": null})")->ids == std::vector<int32_t>{3});
  CHECK(absl::StrContains(fault(R"({"prompt": [{"role": "user", "content": "x"}]})"),
                          "a list of messages is `messages`"));
  CHECK(absl::StrContains(fault(R"({"prompt": [1, 2]})"), "token ids are `prompt_ids`"));
  CHECK(absl::StrContains(fault(R"({"text": "x"})"), "the field 'text' isn't known"));
  CHECK(absl::StrContains(fault(R"({"answer": "x"})"), "found none"));
  CHECK(absl::StrContains(fault(R"({"prompt_ids": [1, "2"]})"), "prompt_ids[1]: expected a token"));
}

TEST_CASE("without a chat format a system text is a line before the prompt") {
  GenerateOptions options = Options();
  options.raw = false;
  options.chat_format = "none";
  options.json = true;
  const auto ids = [&](const std::string& prompt) {
    options.prompt = prompt;
    const std::string line = TextOf(options);
    return line.substr(line.find("\"prompt_ids\""));
  };
  const std::string joined = ids("you are\n1+1=");
  options.system = "you are";
  CHECK(ids("1+1=") == joined);
  options.system = "";
  const std::string empty = ids("1+1=");
  options.system.reset();
  CHECK(ids("1+1=") == empty);
}

TEST_CASE("an empty system message is one without text, not the template's") {
  GenerateOptions options = Options();
  options.raw = false;
  options.chat_format = "zephyr";  // whose markers are ordinary text, for a model without any
  options.json = true;
  const auto ids = [&] {
    const std::string line = TextOf(options);
    return line.substr(0, line.find("\"sample\""));
  };
  const std::string without = ids();
  options.system = "";
  const std::string empty = ids();
  CHECK(empty != without);
  options.prompt = R"({"messages": [{"role": "system", "content": ""},
                                    {"role": "user", "content": "What is 7 + 8?"}]})";
  options.system.reset();
  const auto prompt_ids = [](const std::string& line) {
    const size_t begin = line.find("\"prompt_ids\"");
    return line.substr(begin, line.find(']', begin) - begin);
  };
  CHECK(prompt_ids(ids()) == prompt_ids(empty));
}

TEST_CASE("messages are the same prompt however they are written") {
  GenerateOptions options = Options();
  options.raw = false;
  options.chat_format = "zephyr";
  options.json = true;
  const auto ids = [&](const std::string& messages, const std::string& more = "") {
    options.prompt = absl::StrCat(R"({"messages": [)", messages, "]", more, "}");
    const std::string line = TextOf(options);
    const size_t begin = line.find("\"prompt_ids\"");
    return line.substr(begin, line.find(']', begin) - begin);
  };
  const std::string plain = ids(R"({"role": "system", "content": "Add."},
                                   {"role": "user", "content": "1+2"},
                                   {"role": "assistant", "content": ""},
                                   {"role": "user", "content": "3"})");
  CHECK(ids(R"({"role": "developer", "content": [{"type": "text", "text": "Add."}]},
               {"role": "user", "content": [{"type": "text", "text": "1+"},
                                            {"type": "text", "text": "2"}], "name": "ann"},
               {"role": "assistant", "content": null, "tool_calls": [], "refusal": null},
               {"role": "user", "content": "3"})",
            R"(, "prompt": null)") == plain);
  options.prompt = R"({"messages": [{"role": "tool", "content": "x"}]})";
  CHECK(Run(options).status.message() ==
        "--prompt: 'messages[0].role' is 'tool': expected system, developer, user or assistant (no "
        "tools here)");
}

TEST_CASE("an answer that is begun is gone on with, in the format that the model's files name") {
  GenerateOptions options = Options();
  options.raw = false;
  options.chat_format = "zephyr";
  options.json = true;
  const auto ids = [&](const std::string& more) {
    options.prompt =
        absl::StrCat(R"({"messages": [{"role": "user", "content": "1+2"})", more, "]}");
    const std::string line = TextOf(options);
    const size_t begin = line.find("\"prompt_ids\"");
    return line.substr(begin, line.find(']', begin) - begin);
  };
  const std::string asked = ids("");
  const std::string begun = ids(R"(, {"role": "assistant", "content": "3"})");
  CHECK(begun.size() > asked.size());
  CHECK(begun.substr(0, asked.size()) == asked);

  const testing::TempDir dir;
  std::filesystem::copy(options.model.host.path, dir.path() + "/model");
  const auto config = Files::Real().ReadAll(options.model.host.path + "/config.json");
  REQUIRE_OK(config);
  std::ofstream(dir.path() + "/model/config.json")
      << "{\"stretto_chat_format\": \"zephyr\"," << config->substr(config->find('{') + 1);
  options.model.host.path = dir.path() + "/model";
  options.chat_format = "";
  CHECK(ids("") == asked);
}

TEST_CASE("a model without a chat template completes prompts as they are, and says so") {
  GenerateOptions options = Options();
  const std::string raw = TextOf(options);
  options.raw = false;
  const Written plain = Run(options);
  REQUIRE_OK(plain.status);
  CHECK(plain.text == raw);
  CHECK(absl::StrContains(plain.remarks, "no chat template"));
  options.chat_format = "none";
  CHECK(Run(options).remarks.empty());
  options.chat_format = "chatml";
  CHECK(absl::StrContains(Run(options).status.message(), "<|im_start|>"));
}

TEST_CASE("samples of a prompt are those that a seed gives, alone or together") {
  GenerateOptions options = Options();
  const std::string one = TextOf(options);
  options.json = true;
  options.num_samples = 3;
  const auto lines = LinesOf(TextOf(options));
  REQUIRE(lines.size() == 3);
  for (size_t s = 0; s < 3; ++s) CHECK(absl::StrContains(lines[s], absl::StrCat("\"sample\":", s)));
  options.num_samples = 1;
  const std::string first = TextOf(options);
  // The first sample has the bits that it has alone.
  const auto ids = [](const std::string& line) {
    return line.substr(0, line.find("\"finish_reason\""));
  };
  CHECK(ids(lines[0]) == ids(first));
  CHECK(ids(lines[0]) != ids(lines[1]));
  options.json = false;
  CHECK(TextOf(options) == one);
  options.seed = 2;
  CHECK(TextOf(options) != one);
}

TEST_CASE("what a completion must match") {
  GenerateOptions options = Options();
  options.sampling.max_tokens = 100;
  options.num_samples = 4;
  options.choices = {"may(be)", "no|", "\\"};
  for (const std::string& line : TextLinesOf(TextOf(options))) {
    CHECK((line == "may(be)" || line == "no|" || line == "\\"));
  }
  options.choices.clear();
  options.regex = "[ab]{3}x";
  for (const std::string& line : TextLinesOf(TextOf(options))) {
    CHECK((line.size() == 4 && line[3] == 'x'));
  }
  options.choices = {"a"};
  CHECK(absl::StrContains(Run(options).status.message(), "--choice"));
  options.choices.clear();
  options.regex = "(a";
  CHECK(absl::StrContains(Run(options).status.message(), "character"));
  options.regex.clear();
  const testing::TempDir dir;
  options.json_schema_file = dir.path() + "/schema.json";
  std::ofstream(options.json_schema_file) << R"({"type": "integer", "minimum": 7, "maximum": 9})";
  for (const std::string& line : TextLinesOf(TextOf(options))) {
    CHECK((line == "7" || line == "8" || line == "9"));
  }
  std::ofstream(options.json_schema_file, std::ios::trunc) << R"({"type": "what"})";
  CHECK(absl::StrContains(Run(options).status.message(), "schema.json"));
  options.json_schema_file += "x";
  CHECK(absl::StrContains(Run(options).status.message(), "--json-schema"));
}

TEST_CASE("a stop string ends the text right before it, streamed or not") {
  GenerateOptions options = Options();
  options.sampling.stop_strings = {"bc"};
  options.regex = "abca{1,9}";
  CHECK(TextOf(options) == "a\n");
  options.json = true;
  CHECK(absl::StrContains(TextOf(options), "\"text\":\"a\""));
}

TEST_CASE("biases, penalties and ends") {
  GenerateOptions options = Options();
  options.logit_bias = {"66=100"};  // 'A'
  CHECK(TextOf(options) == "AAAAAAAA\n");
  options.sampling.frequency_penalty = 60;
  CHECK(TextOf(options).substr(0, 2) == "AA");
  CHECK(TextOf(options).substr(0, 3) != "AAA");
  options.sampling.frequency_penalty = 0;
  options.sampling.stop_ids = {66};
  options.sampling.min_tokens = 3;
  CHECK(LinesOf(TextOf(options))[0].find('A') != 0);
  for (const char* bad : {"66", "=1", "x=1", "66=", "66=y", "66=nan", "66=inf", "66=2e6"}) {
    options.logit_bias = {bad};
    CHECK(absl::StrContains(Run(options).status.message(), bad));
  }
  options.logit_bias = {"257=1"};
  CHECK(Run(options).status.message() == "--logit-bias: 257: expected a token id from 0 to 256");
  options.logit_bias = {"66=200", "66=-200"};
  CHECK(absl::StrContains(Run(options).status.message(), "token 66 has a bias already"));
  options.logit_bias.clear();
  options.sampling.stop_ids = {257};
  CHECK(Run(options).status.message() == "--stop-token-id: 257: expected a token id from 0 to 256");
  options.sampling.stop_ids.clear();
  options.sampling.min_tokens = 9;
  CHECK(absl::StartsWith(Run(options).status.message(), "--min-tokens: 9: expected at most"));
}

TEST_CASE("log-probs of alternatives are part of the JSON") {
  GenerateOptions options = Options();
  options.sampling.top_logprobs = 2;
  CHECK(absl::StrContains(Run(options).status.message(), "--json"));
  options.json = true;
  CHECK(absl::StrContains(TextOf(options), "\"top_logprobs\":[[{"));
}

TEST_CASE("a completion that the context cuts off is told beforehand") {
  GenerateOptions options = Options();
  options.sampling.max_tokens = 100'000;
  options.max_tokens_given = true;
  options.json = true;
  Written written = Run(options);
  REQUIRE_OK(written.status);
  CHECK(absl::StrContains(written.remarks,
                          "--max-tokens 100000: a context of 256 tokens leaves 242"));
  CHECK(absl::StrContains(written.text, "\"finish_reason\":\"length\""));
  options.model.host.max_sequence_length = 20;
  written = Run(options);
  REQUIRE_OK(written.status);
  CHECK(absl::StrContains(written.remarks, "(the model allows 256: --max-sequence-length)"));
  options.model.host.max_sequence_length = 300;
  CHECK(absl::StrContains(Run(options).status.message(), "was made for 256"));
  options.model.host.max_sequence_length = 0;
  options.sampling.max_tokens = 242;
  CHECK(Run(options).remarks.empty());
  options.sampling.max_tokens = 256;
  options.max_tokens_given = false;
  CHECK(absl::StrContains(
      Run(options).remarks,
      "a context of 256 tokens: 1 of 1 completions ends there, before 256 tokens"));
}

TEST_CASE("a KV cache that is too small is named, and what it can never hold refused") {
  const testing::TempDir dir;
  const std::string model = dir.File("model");
  std::filesystem::copy(STRETTO_SOURCE_DIR "/examples/tiny-model", model);
  std::stringstream config;
  config << std::ifstream(model + "/config.json").rdbuf();
  std::ofstream(model + "/config.json", std::ios::trunc) << absl::StrReplaceAll(
      config.str(), {{"\"max_position_embeddings\": 256", "\"max_position_embeddings\": 4096"}});
  GenerateOptions options = Options();
  options.model.host.path = model;
  options.dtype = "f32";
  options.model.kv_cache_mb = 1;
  options.prompt = std::string(400, 'a');
  options.sampling.max_tokens = 256;
  Written written = Run(options);
  REQUIRE_OK(written.status);
  CHECK(absl::StrContains(
      written.remarks,
      "the KV cache has room for 513 tokens (--kv-cache-mb): 1 of 1 completions ends "
      "there, before 256 tokens"));
  options.max_tokens_given = true;
  written = Run(options);
  CHECK(absl::IsInvalidArgument(written.status));
  CHECK(written.status.message() ==
        "--prompt: --max-tokens 256 and 400 tokens of prompt: the KV cache has room for 513 tokens "
        "(--kv-cache-mb): expected --max-tokens of at most 113, or a larger cache");
  options.sampling.max_tokens = 113;
  CHECK(Run(options).remarks.empty());
}

// Each write of the one completion is a piece of text that is to be seen at once.
TEST_CASE("one completion is written token by token, several each when it is whole") {
  struct Pieces {
    std::vector<std::string> list;
    static ssize_t Write(void* cookie, const char* data, size_t size) {
      static_cast<Pieces*>(cookie)->list.emplace_back(data, size);
      return static_cast<ssize_t>(size);
    }
  };
  const auto pieces_of = [](const GenerateOptions& options) {
    Pieces pieces;
    std::FILE* out = fopencookie(&pieces, "w", {nullptr, Pieces::Write, nullptr, nullptr});
    std::setvbuf(out, nullptr, _IOFBF, 1 << 16);  // as a pipe is
    REQUIRE_OK(Generate(options, out, stderr));
    std::fclose(out);
    return pieces.list;
  };
  GenerateOptions options = Options();
  options.logit_bias = {"66=100"};
  const std::vector<std::string> streamed = pieces_of(options);
  REQUIRE(streamed.size() == 9);
  CHECK(streamed[0] == "A");
  options.num_samples = 2;
  CHECK(pieces_of(options).size() == 2);
}

TEST_CASE("output that can't be written ends the work with an error") {
  GenerateOptions options = Options();
  options.sampling.max_tokens = 200;
  std::FILE* full = std::fopen("/dev/full", "w");
  REQUIRE(full != nullptr);
  CHECK(absl::IsUnavailable(Generate(options, full, stderr)));
  std::fclose(full);
}
}  // namespace stretto::cli
