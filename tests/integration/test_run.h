// A run to test services with: a small random model on disk, a dataset, a run file, and the
// services of the run as real processes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/testing.h"
#include "tests/integration/process.h"

namespace stretto::testing {
struct TestModelOptions {
  uint64_t seed = 1;
  int64_t num_layers = 2;
  // Layers behind so many add nothing: the model computes what one with fewer layers does.
  int64_t num_active_layers = 1 << 20;
};
// Writes a Hugging Face folder with a model of random weights (a pure function of seed and tensor)
// and the byte-level tokenizer of examples/tiny-model.
void WriteTestModel(const std::string& folder, const TestModelOptions& options = {});

struct TestRunOptions {
  // Sections of the run file that replace or extend the test's own: YAML text.
  std::string algorithm = "algorithm: {kl_coef: 0.0}\n";
  std::string rewards = "rewards: [{type: integer}]\n";
  std::string schedule = "schedule: {max_staleness: 0}\n";
  std::string backend = "cpu";
  // More keys of these sections: "weight_dtype: int8, top_k: 5".
  std::string rollout = "", cluster = "";
};

class TestRun {
 public:
  explicit TestRun(const TestRunOptions& options = {});

  std::string File(const std::string& name) const { return folder_.File(name); }
  std::string model() const { return File("model"); }
  std::string run_file() const { return File("run.yaml"); }
  std::string run_dir() const { return File("run"); }
  std::string LogOf(const std::string& name) const { return File(name + ".log"); }

  // Starts "stretto-<kind>" as member `name` of this run at `port`, or a free one.
  Process Start(const std::string& kind, const std::string& name, int port = 0,
                std::vector<std::string> more = {}) const;
  // Where member `name` is reached; aborts the test when it ends or does not come up.
  std::string WaitForAddress(Process& process, const std::string& name) const;
  // "address", "pid", … of its member file; empty if there is none.
  std::string MemberField(const std::string& name, const std::string& field) const;

 private:
  TempDir folder_;
};
}  // namespace stretto::testing
