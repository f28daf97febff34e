// The generator as a process of its own.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/integration/generator_server.h"

namespace stretto::testing {
namespace {
using Server = GeneratorServer;

std::string ReadLog(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}
}  // namespace

TEST_CASE("a generator without a coordinator: tokens are functions of their prefix and identity") {
  Server server;
  const v1::GenerateRequest request = MakeGenerateRequest(kPrompt, 3, 20);
  const Generated first = Generate(*server.stub, request);
  INFO(first.status.error_message());
  REQUIRE(first.status.ok());
  REQUIRE(first.completions.size() == 3);
  for (const auto& [index, completion] : first.completions) {
    CHECK(completion.ids_size() >= 1);
    CHECK(completion.ids_size() <= 20);
    CHECK(completion.logprobs_size() == completion.ids_size());
    CHECK(completion.versions_size() == completion.ids_size());
    CHECK(completion.sampling_logprobs_size() == 0);
    for (const float logprob : completion.logprobs()) CHECK(logprob <= 0);
    const bool stopped = completion.finish_reason() == v1::FINISH_REASON_STOP;
    CHECK((stopped || completion.finish_reason() == v1::FINISH_REASON_LENGTH));
    CHECK(stopped == (completion.ids(completion.ids_size() - 1) == 0));
  }
  CHECK(first.completions.at(0).SerializeAsString() != first.completions.at(1).SerializeAsString());

  SECTION("asking again gives the same bits") {
    CHECK(Same(first, Generate(*server.stub, request)));
  }
  SECTION("so does a process that was killed and started again") {
    server.process->Kill();
    server.Restart({}, 2);
    CHECK(Same(first, Generate(*server.stub, request)));
  }
  SECTION("a rollout that another generator began ends the same") {
    v1::GenerateRequest rest = MakeGenerateRequest(kPrompt, 0, 20);
    const v1::Completion& whole = first.completions.at(2);
    const int num_prefix = whole.ids_size() / 2;
    v1::SampleRequest* sample = rest.add_samples();
    sample->set_sample_index(2);
    for (int i = 0; i < num_prefix; ++i) {
      sample->mutable_prefix()->add_ids(whole.ids(i));
      sample->mutable_prefix()->add_logprobs(whole.logprobs(i));
    }
    const Generated end = Generate(*server.stub, rest);
    REQUIRE(end.status.ok());
    const v1::Completion& tail = end.completions.at(2);
    REQUIRE(tail.ids_size() == whole.ids_size() - num_prefix);
    for (int i = 0; i < tail.ids_size(); ++i) {
      CHECK(tail.ids(i) == whole.ids(num_prefix + i));
      CHECK(tail.logprobs(i) == whole.logprobs(num_prefix + i));
    }
  }
  SECTION("other samples, prompts and seeds draw other tokens") {
    v1::GenerateRequest other = request;
    other.set_run_seed(8);
    CHECK(!Same(first, Generate(*server.stub, other)));
    other = request;
    other.mutable_prompt_id()->set_epoch(1);
    CHECK(!Same(first, Generate(*server.stub, other)));
  }
  SECTION("text is the decoded tokens") {
    v1::GenerateRequest text = request;
    text.set_return_text(true);
    const Generated result = Generate(*server.stub, text);
    CHECK(Same(first, result));
    for (const auto& [index, completion] : result.completions) {
      CHECK((completion.ids_size() == 1 || !result.texts.at(index).empty()));
    }
  }
  SECTION("truncated sampling tells both log-probs") {
    v1::GenerateRequest truncated = request;
    truncated.mutable_sampling()->set_top_k(3);
    const Generated result = Generate(*server.stub, truncated);
    REQUIRE(result.status.ok());
    const v1::Completion& completion = result.completions.at(0);
    REQUIRE(completion.sampling_logprobs_size() == completion.ids_size());
    for (int i = 0; i < completion.ids_size(); ++i) {
      CHECK(completion.sampling_logprobs(i) >= completion.logprobs(i));
    }
  }
}

TEST_CASE("what a generator refuses, and says why") {
  Server server;
  v1::GenerateRequest request = MakeGenerateRequest(kPrompt, 1, 8);
  using grpc::StatusCode;
  SECTION("no prompt") {
    request.clear_prompt_ids();
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
  }
  SECTION("an id outside the vocabulary") {
    request.add_prompt_ids(257);
    const Generated result = Generate(*server.stub, request);
    CHECK(result.status.error_code() == StatusCode::INVALID_ARGUMENT);
    CHECK(result.status.error_message().find("257") != std::string::npos);
    request.set_prompt_ids(4, -1);
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
  }
  SECTION("longer than the context") {
    for (int i = 0; i < 300; ++i) request.add_prompt_ids(5);
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
  }
  SECTION("no samples, a sample twice, no tokens, wild sampling") {
    request.clear_samples();
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
    request.add_samples();
    request.add_samples();
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
    request = MakeGenerateRequest(kPrompt, 1, 0);
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
    request = MakeGenerateRequest(kPrompt, 1, 8, -1.0f);
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
    request = MakeGenerateRequest(kPrompt, 1, 8);
    request.mutable_samples(0)->mutable_prefix()->add_ids(9999);
    CHECK(CodeOf(server, request) == StatusCode::INVALID_ARGUMENT);
  }
  SECTION("other weights than expected") {
    request.mutable_expected_version()->set_number(3);
    CHECK(CodeOf(server, request) == StatusCode::FAILED_PRECONDITION);
    request.mutable_expected_version()->set_number(0);
    request.mutable_expected_version()->set_hash("00000000000000000000000000000000");
    CHECK(CodeOf(server, request) == StatusCode::FAILED_PRECONDITION);
    request.mutable_expected_version()->set_hash(server.Status().version().hash());
    CHECK(CodeOf(server, request) == StatusCode::OK);
  }
  SECTION("an epoch that it was never given") {
    request.mutable_caller()->set_member_epoch(12);
    CHECK(CodeOf(server, request) == StatusCode::UNAVAILABLE);
  }
  SECTION("weights that it has not prepared, or that nobody has") {
    CallContext commit_context;
    v1::CommitWeightsRequest commit;
    commit.mutable_version()->set_number(1);
    commit.mutable_version()->set_hash("00000000000000000000000000000000");
    v1::CommitWeightsResponse committed;
    CHECK(server.stub->CommitWeights(&commit_context, commit, &committed).error_code() ==
          StatusCode::FAILED_PRECONDITION);
    CallContext prepare_context;
    v1::PrepareWeightsRequest prepare;
    *prepare.mutable_version() = commit.version();
    prepare.add_sources(absl::StrCat("127.0.0.1:", FreePort()));
    v1::PrepareWeightsResponse prepared;
    CHECK(server.stub->PrepareWeights(&prepare_context, prepare, &prepared).error_code() ==
          StatusCode::UNAVAILABLE);
  }
  // Whatever was refused left no trace.
  const v1::GeneratorStatus status = server.Status();
  CHECK(status.num_running() == 0);
  CHECK(status.num_queued() == 0);
  CHECK(Generate(*server.stub, MakeGenerateRequest(kPrompt, 1, 8)).status.ok());
}

TEST_CASE("quantised weights write tokens under a profile of their own, the same every time") {
  Server server({"--weight-dtype", "int8"});
  CHECK(server.Status().profile().dtype() == "bf16+int8");
  const Generated first = Generate(*server.stub, MakeGenerateRequest(kPrompt, 2, 8));
  const Generated again = Generate(*server.stub, MakeGenerateRequest(kPrompt, 2, 8));
  REQUIRE(first.status.ok());
  REQUIRE(again.status.ok());
  REQUIRE(first.completions.size() == 2);
  for (const auto& [index, completion] : first.completions) {
    CHECK(completion.SerializeAsString() == again.completions.at(index).SerializeAsString());
  }
}

TEST_CASE("a caller that goes away frees what it had begun") {
  Server server;
  v1::GenerateRequest request = MakeGenerateRequest(kPrompt, 8, 200);
  request.mutable_sampling()->set_ignore_eos(true);
  CallContext context;
  auto reader = server.stub->Generate(&context, request);
  v1::GenerateEvent event;
  REQUIRE(reader->Read(&event));
  context.TryCancel();
  while (reader->Read(&event)) {
  }
  CHECK(reader->Finish().error_code() == grpc::StatusCode::CANCELLED);
  CHECK(Eventually([&] {
    const v1::GeneratorStatus status = server.Status();
    return status.num_running() == 0 && status.num_queued() == 0;
  }));
}

TEST_CASE("health, metrics, draining and an orderly end") {
  const int metrics_port = FreePort();
  Server server({"--metrics-port", absl::StrCat(metrics_port), "--grace-ms", "200"});
  REQUIRE(Generate(*server.stub, MakeGenerateRequest(kPrompt, 1, 8)).status.ok());
  const auto has = [&](const char* text) {
    return HttpGet(metrics_port, "/metrics").find(text) != std::string::npos;
  };
  // A call is counted when the server has let go of it: a moment after the client saw its end.
  CHECK(Eventually([&] {
    return has("stretto_rpcs_total{code=\"OK\",method=\"stretto.v1.Generator/Generate\"} 1");
  }));
  CHECK(Eventually([&] { return has("stretto_generator_tokens_total"); }));

  SECTION("drained, it takes no new work and says so") {
    CallContext context;
    v1::DrainResponse response;
    REQUIRE(server.stub->Drain(&context, {}, &response).ok());
    CHECK(CodeOf(server, MakeGenerateRequest(kPrompt, 1, 8)) == grpc::StatusCode::UNAVAILABLE);
    CHECK(server.Status().draining());
    v1::DrainRequest request;
    request.set_end(true);
    CallContext again;
    REQUIRE(server.stub->Drain(&again, request, &response).ok());
    CHECK(CodeOf(server, MakeGenerateRequest(kPrompt, 1, 8)) == grpc::StatusCode::OK);
    CHECK(!server.Status().draining());
  }
  SECTION("SIGTERM ends running rollouts as aborted, with what they have") {
    v1::GenerateRequest request = MakeGenerateRequest(kPrompt, 600, 240);
    request.mutable_sampling()->set_ignore_eos(true);
    Generated result;
    std::thread call([&] { result = Generate(*server.stub, request); });
    CHECK(Eventually([&] { return server.Status().num_running() > 0; }));
    server.process->Signal(SIGTERM);
    CHECK(server.process->WaitForExit(10000) == 0);
    call.join();
    INFO(result.status.error_code() << ": " << result.status.error_message());
    INFO(server.process->Log());
    CHECK(result.status.ok());
    int num_aborted = 0;
    for (const auto& [index, completion] : result.completions) {
      CHECK(completion.logprobs_size() == completion.ids_size());
      num_aborted += completion.finish_reason() == v1::FINISH_REASON_ABORTED ? 1 : 0;
    }
    CHECK(num_aborted > 0);
  }
}

// Lets everybody connect by gRPC, and answers nobody.
class SilentServer {
 public:
  SilentServer() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    REQUIRE(bind(fd_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(listen(fd_, 16) == 0);
    REQUIRE(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] {
      for (int client = accept(fd_, nullptr, nullptr); client >= 0;
           client = accept(fd_, nullptr, nullptr)) {
        constexpr char kSettings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};  // HTTP/2: none, the defaults
        (void)!send(client, kSettings, sizeof(kSettings), MSG_NOSIGNAL);
        clients_.push_back(client);
      }
    });
  }
  ~SilentServer() {
    shutdown(fd_, SHUT_RDWR);
    thread_.join();
    close(fd_);
    for (const int client : clients_) close(client);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  const int fd_;
  int port_ = 0;
  std::vector<int> clients_;
  std::thread thread_;
};

TEST_CASE("a source of weights that answers nothing holds up neither a newer version nor the end") {
  const SilentServer silent;
  Server server({"--grace-ms", "1000"});
  const auto prepare = [&](int64_t number, const std::string& hash, const std::string& source) {
    v1::PrepareWeightsRequest request;
    request.mutable_version()->set_number(number);
    request.mutable_version()->set_hash(hash);
    request.add_sources(source);
    CallContext context;
    v1::PrepareWeightsResponse response;
    return server.stub->PrepareWeights(&context, request, &response);
  };
  grpc::Status bogus, first, repeated, last;
  const int64_t begin_ms = NowMs();
  // Newer by far, but nobody has it: the others don't wait for it.
  std::thread far([&] { bogus = prepare(1'000'000'000, "9", silent.address()); });
  SleepMs(100);
  std::thread one([&] { first = prepare(1, "1", silent.address()); });
  std::thread repeat([&] { repeated = prepare(1, "1", silent.address()); });
  SleepMs(300);
  // Of the weights in use: nothing needs to be fetched.
  CHECK(prepare(2, server.Status().version().hash(), silent.address()).ok());
  one.join();
  repeat.join();
  CHECK(NowMs() - begin_ms < 5000);
  for (const grpc::Status& status : {first, repeated}) {
    INFO(status.error_message());
    CHECK(status.error_code() == grpc::StatusCode::ABORTED);
    CHECK(status.error_message().find("version 2 has been announced") != std::string::npos);
  }
  std::thread waiting([&] { last = prepare(3, "3", silent.address()); });
  SleepMs(300);
  const int64_t signal_ms = NowMs();
  server.process->Signal(SIGTERM);
  CHECK(server.process->WaitForExit(20000) == 0);
  CHECK(NowMs() - signal_ms < 5000);
  waiting.join();
  far.join();
  INFO(bogus.error_message());
  CHECK(last.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(bogus.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(bogus.error_message().find("stopping") != std::string::npos);
}

TEST_CASE("a generator that cannot start says why and exits with 1 or 2") {
  TempDir folder;
  const std::string model = folder.File("model"), log = folder.File("log");
  WriteTestModel(model);
  const auto run = [&](std::vector<std::string> arguments) {
    Process process("stretto-generator", std::move(arguments), log);
    return process.WaitForExit(20000);
  };
  const auto log_has = [&](const std::string& text) {
    const std::string content = ReadLog(log);
    INFO(content);
    return content.find(text) != std::string::npos;
  };
  SECTION("flags that can't be, each named") {
    CHECK(run({"--run", "run.yaml", "--max-running", "3"}) == 2);
    CHECK(log_has("--max-running: is for --model: with --run"));
    for (const char* flag : {"--served-model-name", "--api-key"}) {
      CHECK(run({"--model", model, flag, "x"}) == 2);
      CHECK(log_has(absl::StrCat(flag, ": is for the HTTP API: give --http-port too")));
    }
    CHECK(run({"--model", model, "--draft-tokens", "3"}) == 2);
    CHECK(log_has("--draft-tokens: is for --speculation"));
    CHECK(run({"--model", ""}) == 2);
    CHECK(log_has("--model: expected a value, found an empty text"));
    CHECK(run({"--model", model, "--kv-dtype", "int3"}) == 2);
    CHECK(log_has("--kv-dtype: int3: expected bf16, int8 or fp8"));
    CHECK(run({"--model", model, "--grace-ms", "nan"}) == 2);
    CHECK(log_has("--grace-ms: nan: expected an integer from 0 to"));
    CHECK(run({"--version"}) == 0);
    CHECK(log_has("stretto-generator "));
    CHECK(run({"--help"}) == 0);
    CHECK(log_has("--grace-ms INT=3000"));
  }
  SECTION("the port is in use") {
    Server other;
    const int code =
        run({"--model", model, "--chat-format", "none", "--port", absl::StrCat(other.port)});
    INFO(ReadLog(log));
    CHECK(code == 1);
    CHECK(log_has("the port is in use"));
  }
  SECTION("there is no such model") {
    CHECK(run({"--model", folder.File("nowhere")}) == 2);
    CHECK(log_has(folder.File("nowhere")));
  }
  SECTION("the weights are cut off") {
    const std::string weights = model + "/model.safetensors";
    std::filesystem::resize_file(weights, std::filesystem::file_size(weights) / 2);
    CHECK(run({"--model", model, "--chat-format", "none"}) == 2);
    CHECK(log_has("model.safetensors"));
  }
  SECTION("the tokenizer is damaged") {
    std::filesystem::resize_file(model + "/tokenizer.json", 100);
    CHECK(run({"--model", model, "--chat-format", "none"}) == 2);
    CHECK(log_has("tokenizer.json"));
  }
  SECTION("a longer context than the model's") {
    CHECK(run({"--model", model, "--chat-format", "none", "--max-sequence-length", "257"}) == 2);
    CHECK(log_has("257 tokens"));
    CHECK(log_has("expected at most 256"));
  }
  SECTION("a pipe where a file should be") {
    for (const std::string name : {"tokenizer.json", "config.json", "model.safetensors"}) {
      const std::string path = model + "/" + name;
      std::filesystem::rename(path, folder.File("kept"));
      REQUIRE(mkfifo(path.c_str(), 0600) == 0);
      CHECK(run({"--model", model, "--chat-format", "none"}) == 2);
      CHECK(log_has(path + ": is a pipe, expected a file"));
      std::filesystem::remove(path);
      std::filesystem::rename(folder.File("kept"), path);
    }
    CHECK(run({"--run", folder.path()}) == 2);
    CHECK(log_has("is a folder, expected a file"));
  }
  SECTION("an address that isn't this machine's") {
    CHECK(run({"--model", model, "--chat-format", "none", "--bind", "192.0.2.1"}) == 2);
    CHECK(log_has("not this machine's"));
    CHECK(run({"--model", model, "--chat-format", "none", "--bind", "999.1.1.1"}) == 2);
    CHECK(log_has("] --bind '999.1.1.1' is no address: expected one such as 127.0.0.1"));
  }
  SECTION("a log file on a full disk: it serves all the same") {
    if (!std::filesystem::exists("/dev/full")) return;
    Server other({"--log-file", "/dev/full"});
    CHECK(Generate(*other.stub, MakeGenerateRequest(kPrompt, 1, 8)).status.ok());
    CHECK(other.process->Log().find("cannot write the log file /dev/full") != std::string::npos);
  }
  SECTION("wrong flags") {
    CHECK(run({"--model", model, "--http-port", "0", "--cors-origin", "localhost/"}) == 2);
    CHECK(log_has("scheme://host"));
    CHECK(run({"--no-such-flag"}) == 2);
    CHECK(run({"--port", "70000"}) == 2);
    CHECK(run({}) == 2);
    CHECK(log_has("--model"));
  }
  SECTION("there is no such run file") {
    CHECK(run({"--run", folder.File("no.yaml")}) == 2);
    CHECK(log_has("no.yaml"));
  }
}
}  // namespace stretto::testing
