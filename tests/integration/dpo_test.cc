// `stretto dpo` as its users run it, on the tiny model.
#include <catch2/catch.hpp>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
constexpr int64_t kTimeoutMs = 120000;

class Dpo {
 public:
  // Trains to prefer wrong answers.
  Dpo() {
    std::ofstream data(File("pairs.jsonl"));
    for (int a = 1; a <= 8; ++a) {
      data << "{\"prompt\": \"" << a << "+1=\", \"chosen\": \"" << a + 2 << "\", \"rejected\": \""
           << a + 1 << "\"}\n";
    }
  }
  std::string File(const std::string& name) const { return folder_.File(name); }
  // The log of a run that writes `out`.
  std::string Run(const std::string& out, int exit_code, const std::vector<std::string>& more,
                  const std::string& data = "pairs.jsonl") const {
    std::vector<std::string> arguments = {"dpo",
                                          "--model",
                                          absl::StrCat(STRETTO_SOURCE_DIR, "/examples/tiny-model"),
                                          "--data",
                                          File(data),
                                          "--out",
                                          File(out),
                                          "--steps",
                                          "40",
                                          "--batch",
                                          "4",
                                          "--lr",
                                          "3e-4",
                                          "--warmup",
                                          "5",
                                          "--max-sequence-length",
                                          "32",
                                          "--chat-format",
                                          "none"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Process process("stretto", std::move(arguments), File(out + ".log"));
    INFO(process.Log());
    CHECK(process.WaitForExit(kTimeoutMs) == exit_code);
    return process.Log();
  }
  std::string Weights(const std::string& out) const {
    return Files::Real().ReadAll(File(out) + "/model.safetensors").value_or("");
  }

 private:
  TempDir folder_;
};

TEST_CASE("preferences are learned from log 2 on, with bits that know no threads") {
  const Dpo dpo;
  const std::string log = dpo.Run("a", 0, {"--threads", "1"});
  INFO(log);
  CHECK(log.find("step 1/40  loss 0.6931") != std::string::npos);  // policy and reference are one
  const size_t last = log.find("step 40/40");
  REQUIRE(last != std::string::npos);
  CHECK(log.find("accuracy 1.000", last) != std::string::npos);
  dpo.Run("b", 0, {"--threads", "3"});
  CHECK(dpo.Weights("a").size() > 1000);
  CHECK(dpo.Weights("a") == dpo.Weights("b"));
  CHECK(dpo.Weights("a") !=
        Files::Real()
            .ReadAll(absl::StrCat(STRETTO_SOURCE_DIR, "/examples/tiny-model/model.safetensors"))
            .value_or(""));
  // Without a reference only the pair's own log-probs count.
  const std::string free_log = dpo.Run("c", 0, {"--reference-free", "--loss", "ipo"});
  CHECK(free_log.find("step 40/40") != std::string::npos);
  CHECK(free_log.find("step 1/40  loss 0.6931") == std::string::npos);
}

TEST_CASE("a bad line of preferences is named with its file") {
  const Dpo dpo;
  std::ofstream(dpo.File("bad.jsonl")) << "{\"prompt\": \"1+1=\", \"chosen\": \"2\", "
                                          "\"rejected\": \"3\"}\n{\"prompt\": \"1\"}\n";
  CHECK(dpo.Run("bad", 2, {}, "bad.jsonl").find("bad.jsonl:2: expected `chosen`, a text") !=
        std::string::npos);
  std::ofstream(dpo.File("long.jsonl")) << "{\"prompt\": \"1+1=\", \"chosen\": \"2\", "
                                           "\"rejected\": \""
                                        << std::string(90, '3') << "\"}\n";
  CHECK(dpo.Run("long", 2, {}, "long.jsonl").find("expected at most 32 tokens") !=
        std::string::npos);
  std::ofstream(dpo.File("same.jsonl")) << "{\"prompt\": \"1+1=\", \"chosen\": \"2\", "
                                           "\"rejected\": \"2\"}\n";
  CHECK(dpo.Run("same", 2, {}, "same.jsonl").find("the same text") != std::string::npos);
  CHECK(dpo.Run("none", 2, {"--label-smoothing", "0.7"}).find("below 0.5") != std::string::npos);
}

TEST_CASE("training that leaves the numbers writes no model") {
  const Dpo dpo;
  const std::string log = dpo.Run("out", 1, {"--beta", "1e300"});
  CHECK(log.find("step 1: ") != std::string::npos);
  CHECK(log.find("nothing was written") != std::string::npos);
  CHECK_FALSE(Files::Real().Exists(dpo.File("out")));
}
}  // namespace
}  // namespace stretto::testing
