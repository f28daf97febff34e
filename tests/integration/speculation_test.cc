// Generators that guess tokens ahead, as processes: the same tokens and log-probs as without, and
// metrics that say how often a guess was right.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <regex>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/client.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
// A prompt that repeats itself, so that n-grams find something to guess.
const std::vector<int32_t> kPrompt = {21, 14, 20, 32, 21, 14, 20, 32, 21, 14, 20, 32, 21, 14};

struct Server {
  Server(const std::string& model, const std::string& log, std::vector<std::string> more)
      : metrics_port(FreePort()) {
    const int port = FreePort();
    std::vector<std::string> arguments = {
        "--model",       model,  "--port",         absl::StrCat(port),
        "--chat-format", "none", "--threads",      "1",
        "--kv-cache-mb", "16",   "--metrics-port", absl::StrCat(metrics_port)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    process = std::make_unique<Process>("stretto-generator", arguments, log);
    const bool up = WaitForPort(*process, port);
    INFO(process->Log());
    REQUIRE(up);
    stub = Connect<v1::Generator>(absl::StrCat("127.0.0.1:", port));
  }
  // The value of a counter, all its series together; 0 if there is none.
  double Counter(const std::string& name) const {
    const std::string page = HttpGet(metrics_port, "/metrics");
    const std::regex line("\\n" + name + "(\\{[^}]*\\})? ([0-9.e+]+)");
    double sum = 0;
    for (auto it = std::sregex_iterator(page.begin(), page.end(), line);
         it != std::sregex_iterator(); ++it) {
      sum += std::stod((*it)[2]);
    }
    return sum;
  }

  int metrics_port;
  std::unique_ptr<Process> process;
  std::unique_ptr<v1::Generator::Stub> stub;
};

// Greedy, sampled and truncated; few at once, so that guessing is worth its rows.
std::vector<v1::GenerateRequest> Requests() {
  std::vector<v1::GenerateRequest> requests;
  for (const float temperature : {0.0f, 0.3f, 1.0f}) {
    v1::GenerateRequest request = MakeGenerateRequest(kPrompt, 2, 100, temperature);
    request.mutable_sampling()->set_ignore_eos(true);
    requests.push_back(request);
    request.mutable_sampling()->set_top_k(5);
    requests.push_back(request);
  }
  // Two tokens in turns, more or less: what n-grams can guess.
  requests.push_back(MakeGenerateRequest(kPrompt, 2, 100, 1.0f));
  requests.back().mutable_sampling()->set_ignore_eos(true);
  for (const int32_t token : {14, 20}) {
    (*requests.back().mutable_sampling()->mutable_logit_bias())[token] = 50;
  }
  return requests;
}
}  // namespace

TEST_CASE("speculation changes no token and no log-prob of a generator, and is counted") {
  TempDir folder;
  const std::string model = folder.File("model"), draft = folder.File("draft");
  WriteTestModel(model, {.num_layers = 8, .num_active_layers = 1});
  std::vector<Generated> expected;
  {
    const Server plain(model, folder.File("plain.log"), {});
    for (const auto& request : Requests()) {
      expected.push_back(Generate(*plain.stub, request));
      REQUIRE(expected.back().status.ok());
    }
    CHECK(plain.Counter("stretto_generator_drafted_tokens_total") == 0);
  }
  std::vector<std::string> flags;
  SECTION("by n-grams") { flags = {"--speculation", "ngram", "--draft-tokens", "6"}; }
  SECTION("by a draft model that agrees") {
    WriteTestModel(draft, {.num_layers = 1});
    flags = {"--speculation", "model", "--draft-model", draft};
  }
  SECTION("by a draft model that seldom agrees") {
    WriteTestModel(draft, {.seed = 2, .num_layers = 1});
    flags = {"--speculation", "model", "--draft-model", draft, "--draft-tokens", "3"};
  }
  const Server server(model, folder.File("log"), flags);
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("request " << i);
    const Generated result = Generate(*server.stub, Requests()[i]);
    INFO(result.status.error_message());
    CHECK(Same(result, expected[i]));
  }
  CHECK(Eventually([&] { return server.Counter("stretto_generator_drafted_tokens_total") > 0; }));
  CHECK(Eventually([&] { return server.Counter("stretto_generator_draft_verified_total") > 0; }));
  if (flags[1] == "ngram" || flags.size() == 4) {
    CHECK(Eventually([&] { return server.Counter("stretto_generator_draft_accepted_total") > 0; }));
  }
  CHECK(server.Counter("stretto_generator_draft_accepted_total") <=
        server.Counter("stretto_generator_draft_verified_total"));
}

TEST_CASE("a draft model that cannot help is refused with the reason") {
  TempDir folder;
  const std::string model = folder.File("model"), draft = folder.File("draft"),
                    log = folder.File("log");
  WriteTestModel(model);
  const auto refusal = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"--model", model, "--chat-format", "none"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Process process("stretto-generator", arguments, log);
    CHECK(process.WaitForExit(20000) == 2);
    return process.Log();
  };
  SECTION("another tokenizer: two tokens have changed places") {
    WriteTestModel(draft);
    std::ifstream in(draft + "/tokenizer.json");
    nlohmann::json tokenizer = nlohmann::json::parse(in);
    auto& vocab = tokenizer["model"]["vocab"];
    std::swap(vocab["a"], vocab["b"]);
    std::ofstream(draft + "/tokenizer.json") << tokenizer.dump();
    const std::string text = refusal({"--speculation", "model", "--draft-model", draft});
    INFO(text);
    CHECK(text.find(absl::StrCat("draft model ", draft,
                                 ": it has another tokenizer than the policy: token ")) !=
          std::string::npos);
    CHECK(text.find("is 'b' there and 'a' here") != std::string::npos);
  }
  SECTION("no tokenizer") {
    WriteTestModel(draft);
    std::filesystem::remove(draft + "/tokenizer.json");
    const std::string text = refusal({"--speculation", "model", "--draft-model", draft});
    INFO(text);
    CHECK(text.find("tokenizer.json") != std::string::npos);
  }
  SECTION("no draft model, or one that nobody asked for") {
    CHECK(refusal({"--speculation", "model"}).find("needs --draft-model") != std::string::npos);
    WriteTestModel(draft);
    CHECK(refusal({"--speculation", "ngram", "--draft-model", draft}).find("draft model") !=
          std::string::npos);
    CHECK(refusal({"--speculation", "magic"}).find("expected off, ngram or model") !=
          std::string::npos);
  }
}
}  // namespace stretto::testing
