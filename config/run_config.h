// The run file: everything a run is, as typed values. One YAML file, read by every service of the
// run. Keys are the field names below, section by section (`model.path`, `train.lr`, …);
// docs/run-file.md lists them. Loading validates: an unknown key, a wrong type, a missing file or
// an impossible value is an error that names file and line and says what is expected.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stretto {
struct RunSection {
  std::string name = "run";  // names the run; part of the run id
  std::string dir;           // the run's folder; default runs/<name> beside the current folder
  uint64_t seed = 1;
};

struct ModelSection {
  std::string path;                  // Hugging Face folder or GGUF file
  std::string dtype = "bf16";        // bf16 | f32, of weights and activations
  std::string chat_format = "auto";  // auto (by the model's template), or as in keys.cc
  // Prompt + completion; also fixes `dynamic` rope scaling.
  static constexpr int64_t kAutoLength = 0;   // the model's own, but at most
  static constexpr int64_t kMostAuto = 1024;  // so many
  int64_t max_sequence_length = kAutoLength;
  // What a sequence can't exceed, whatever the model.
  int64_t MostLength() const {
    return max_sequence_length == kAutoLength ? kMostAuto : max_sequence_length;
  }
};

// An adapter that is trained instead of the model's own weights (docs/lora.md).
struct LoraSection {
  int64_t rank = 0;                  // 0: none, or the rank of `adapter`
  double alpha = 0;                  // its product is scaled by alpha / rank; 0: 2 · rank
  std::vector<std::string> targets;  // linear maps, "q_proj"; empty: all
  std::string adapter;               // PEFT folder to start from; empty: A at random, B zero

  bool enabled() const { return rank > 0 || !adapter.empty(); }
};

struct DataSection {
  std::string train;    // JSONL; each line has `prompt` (text) or `messages` (chat), and what
                        // the verifiers need (`answer`, …)
  std::string eval;     // held out; empty: no evaluation
  bool shuffle = true;  // the order of an epoch is a pure function of (seed, epoch)
  std::string on_bad_line = "fail";  // fail | skip (named and counted)
  std::string
      system_prompt;  // put before prompts that have no system message; empty: the template's
  int64_t max_prompt_tokens = 0;           // 0: what the context leaves
  std::string on_long_prompt = "replace";  // what is done with longer ones: replace | cut
};

struct RolloutSection {
  int64_t group_size = 8;  // completions of one prompt
  double temperature = 1.0;
  int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  int64_t max_tokens = 256;
  // A curriculum of lengths: the first step allows so many tokens (0: max_tokens), then more and
  // more, until after ramp_steps it is max_tokens.
  int64_t first_max_tokens = 0;
  int64_t ramp_steps = 100;
  int64_t min_tokens = 0;
  std::vector<std::string> stop;
  std::string weight_dtype = "bf16";  // bf16 | int8 | int4 | fp8: how generators store matrices
  std::string kv_dtype = "bf16";      // bf16 | int8 | fp8: how generators keep keys and values
};

// One verifier or service; a rollout's reward is the weighted sum.
struct RewardSpec {
  // exact | contains | integer | numeric | regex | length | json | service | model
  std::string type;
  std::string name;  // in metrics; default: type
  double weight = 1.0;
  std::string answer_field =
      "answer";             // exact, contains, integer, numeric: the dataset field to compare with
  double tolerance = 1e-6;  // numeric: relative or absolute difference allowed
  std::string take = "last";  // integer, numeric: which number of the completion: last | first |
                              // only (only: the completion is that number and nothing else)
  bool ignore_case = true;    // exact, contains
  std::string pattern;        // regex: searched for in the completion (PCRE2)
  int64_t target_tokens = 0;  // length: 1 up to here, then falling linearly to 0 at max_tokens
  std::vector<std::string> required_keys;  // json: keys the object must have
  std::string address;                     // service: host:port of a stretto.v1.Reward service
  int64_t timeout_ms = 10000;              // service
  int64_t max_attempts = 3;                // service: then the group is replaced
  std::string path;                        // model: a reward model's folder
  std::string chat_format = "auto";        // model: of its prompts, as model.chat_format
};

struct AlgorithmSection {
  std::string name = "grpo";
  double clip_low = 0.2, clip_high = 0.2;
  double dual_clip = 0.0;             // bounds the ratio of negative advantages; 0: off
  std::string ratio_level = "token";  // token | sequence (GSPO)
  double kl_coef = 0.0;         // beta of the KL term to the reference; 0: no reference log-probs
  double kl_target = 0.0;       // > 0: kl_coef adapts so that the measured KL approaches this
  double kl_horizon = 10000.0;  // rollouts over which the adaptive kl_coef reacts
  std::string kl_estimator = "k3";      // k1 | k2 | k3
  std::string advantage_scale = "std";  // std (r − mean)/(std + 1e-4) | none (r − mean) |
                                        // leave_one_out (rloo's default) | batch_std (REINFORCE++)
  std::string loss_denominator = "token_mean";  // token_mean (global) | sequence_mean | constant
  double entropy_coef = 0.0;                    // added to the objective
  bool dynamic_sampling = false;  // groups whose completions all have one reward are replaced
  double importance_cap = 0.0;    // truncated importance sampling for stale tokens; 0: off
};

// Of algorithm `ppo`: a critic, and several updates a step (docs/objectives.md).
struct PpoSection {
  std::string critic_model;         // what the critic begins with; empty: model.path
  double critic_lr = 0;             // 0: train.lr
  int64_t critic_warmup_steps = 0;  // first steps, in which the critic alone is trained
  int64_t epochs = 4;               // times that a batch is trained on
  int64_t mini_batch = 16;          // completions of an update
  double gamma = 1.0, lambda = 0.95;
  double value_clip = 0.2;  // how far values may move in a step; 0: any distance
  bool whiten_advantages = true;
};

struct TrainSection {
  int64_t steps = 100;
  int64_t prompts_per_step = 16;
  double lr = 1e-6;
  int64_t warmup_steps = 20;
  std::string lr_schedule = "constant";  // constant | linear | cosine (to 0 at `steps`)
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.0;
  double max_grad_norm = 1.0;
  int64_t micro_batch_tokens = 4096;
  int64_t reduction_leaves = 1;         // of the tree that adds gradients up; ranks share them
  int64_t k_leaves = 1;                 // of the sums that ranks sharing a model divide
  std::string checkpointing = "none";   // activations: none | selective | full
  std::string optimizer_state = "f32";  // Adam's moments: f32 | 8bit
  std::string gradient_dtype = "f32";   // f32 | bf16: what backward products read
  static constexpr int64_t kAutoInterval = -1;
  int64_t checkpoint_every = 10;            // steps between checkpoints; 0: only at the end
  double checkpoint_mtbf_hours = 24;        // for kAutoInterval: how often something fails
  std::string checkpoint_kind = "full";     // full | incremental
  int64_t checkpoint_chain = 8;             // incremental ones after a full one
  std::string checkpoint_failure = "warn";  // warn | stop: what a save that fails does
  int64_t keep_checkpoints = 3;
  double grad_spike_factor = 0;          // of the median of recent norms; 0: nothing is a spike
  std::string grad_spike = "skip";       // skip | stop | warn: what a spike does
  std::string not_finite_step = "skip";  // skip | stop: what a step that isn't finite does
  int64_t max_group_replacements = 64;   // per step; then the run stops with a clear status
};

struct ScheduleSection {
  int64_t max_staleness = 1;             // 0: strictly on-policy
  std::string weight_update = "finish";  // finish | recompute | keep: what running rollouts do
  std::string numerics = "exact";        // exact | fast
};

struct EvalSection {
  bool before = true, after = true;
  int64_t every = 0;        // steps; 0: only before and after
  int64_t max_prompts = 0;  // 0: all
  int64_t max_tokens = 0;   // 0: rollout.max_tokens
  std::string
      reward;  // name of the reward that counts as correct when it is >= 1; default: the first
};

struct ClusterSection {
  std::string backend = "cpu";  // cpu | reference
  int64_t generators = 1;       // processes that `stretto up` starts
  int64_t scorers = 1;
  int64_t trainers = 1;                // ranks that train together (docs/parallel-training.md)
  int64_t min_trainers = 1;            // fewest that go on without the others
  std::string trainer_layout = "ddp";  // ddp | zero1 | zero2 | fsdp: what ranks divide
  int64_t tensor_parallel = 1;         // ranks that share one copy of the model
  std::string collectives = "tcp";     // tcp | nccl: what carries what trainers exchange
  bool offload_optimizer = false;      // masters and moments in files of the run's folder
  int64_t burn_in_ms = 200;            // a trainer's known products before it joins; 0: none
  int64_t trainer_grace_ms = 30000;    // how long a group waits for a lost rank
  int64_t collective_timeout_ms = 60000;
  int64_t relay_fanout = 1;       // generators that each sender of new weights feeds
  int64_t generator_threads = 0;  // 0: what the machine grants
  int64_t scorer_threads = 0;
  int64_t trainer_threads = 0;
  std::string bind = "127.0.0.1";
  int64_t base_port = 0;   // coordinator's port, others follow; 0: free ports are found
  int64_t http_port = -1;  // of the OpenAI-compatible API of the first generator that `stretto up`
                           // starts, the others' follow; 0: free ports are found, -1: none
  int64_t heartbeat_ms = 300;
  int64_t lease_ms = 1500;
  int64_t kv_cache_mb = 512;        // a generator's budget
  double kv_cache_share = 0;        // if positive, instead: of the memory that it may use
  int64_t max_running = 128;        // sequences a generator decodes at once
  int64_t prefill_tokens = 1024;    // prompt tokens computed per engine step
  std::string speculation = "off";  // off | ngram | model: how generators guess tokens ahead
  std::string draft_model;          // model: a smaller one with the same tokenizer
  int64_t draft_tokens = 8;         // most tokens guessed for a sequence and step
};

struct RunConfig {
  RunSection run;
  ModelSection model;
  LoraSection lora;
  DataSection data;
  RolloutSection rollout;
  std::vector<RewardSpec> rewards;
  AlgorithmSection algorithm;
  PpoSection ppo;
  TrainSection train;
  ScheduleSection schedule;
  EvalSection eval;
  ClusterSection cluster;

  std::string source_path;  // the file it came from
  // XXH3-64 (hex) of what the run computes: every value but run.dir and `cluster`, and of paths
  // only the last part. Equal hashes, equal runs, wherever their files lie and on whatever machines
  // they run.
  std::string hash;

  // A longer prompt leaves no room for a completion, or is longer than the run file wants.
  int64_t MaxPromptTokens() const {
    const int64_t room = model.MostLength() - 1;
    return data.max_prompt_tokens > 0 ? std::min(data.max_prompt_tokens, room) : room;
  }
};

// Reads and validates `path`. Relative paths in the file are relative to the file's folder (data,
// model) or to the current folder (run.dir). `overrides` are "section.key=value" strings that win
// over the file. Errors: "run.yaml:12: train.lr: expected a positive number, found 'fast'".
absl::StatusOr<RunConfig> LoadRunConfig(const std::string& path,
                                        const std::vector<std::string>& overrides = {});
// The same for text; `name` stands for the file in messages.
absl::StatusOr<RunConfig> ParseRunConfig(const std::string& text, const std::string& name,
                                         const std::vector<std::string>& overrides = {});
// What two texts of settings differ in first, by line: "was …, is …"; empty: nothing.
std::string FirstDifference(const std::string& before, const std::string& after);
// A complete YAML file that ParseRunConfig reads back to an equal RunConfig.
std::string ToYaml(const RunConfig& config);
}  // namespace stretto
