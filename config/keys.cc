// The table itself. A key is spelled once: the macros make its name and its field the same word.
#include "config/keys.h"

namespace stretto::config_internal {
namespace {
Rule Any() { return {}; }
Rule AtLeast(double min) { return {.min = min}; }
// An integer or a word that stands for one.
Rule AtLeastOr(double min, std::map<std::string, int64_t> words) {
  Rule rule = AtLeast(min);
  rule.words = std::move(words);
  return rule;
}
Rule BetweenOr(double min, double max, std::map<std::string, int64_t> words) {
  Rule rule = AtLeastOr(min, std::move(words));
  rule.max = max;
  return rule;
}
Rule Positive() { return {.min = 0, .min_excluded = true}; }
Rule Between(double min, double max) { return {.min = min, .max = max}; }
// min < value <= max.
Rule AboveUpTo(double min, double max) { return {.min = min, .max = max, .min_excluded = true}; }
// min <= value < max.
Rule FromBelow(double min, double max) { return {.min = min, .max = max, .max_excluded = true}; }
Rule OneOf(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }
// Names of the literature that are an algorithm with a setting here, or a command.
Rule Algorithm() {
  Rule rule = OneOf({"grpo", "ppo", "reinforce", "rloo"});
  rule.hints = {
      {"gspo", "GSPO is `name: grpo` with `ratio_level: sequence`"},
      {"dr_grpo",
       "Dr. GRPO is `name: grpo` with `advantage_scale: none` and `loss_denominator: "
       "constant`"},
      {"dr.grpo",
       "Dr. GRPO is `name: grpo` with `advantage_scale: none` and `loss_denominator: "
       "constant`"},
      {"dapo", "DAPO's clipping is `name: grpo` with `clip_high: 0.28`"},
      {"reinforce++", "REINFORCE++ is `name: reinforce` with `advantage_scale: batch_std`"},
      {"dpo", "preferences are trained on with `stretto dpo`"},
      {"sft", "completions are imitated with `stretto sft`"}};
  return rule;
}
Rule ExistingPath() { return {.path = Rule::Path::kExisting}; }
Rule ExistingPathIfGiven() { return {.path = Rule::Path::kExistingIfGiven}; }
Rule NameRule() { return {.is_name = true}; }
}  // namespace

#define KEY(section, key, rule, help)                                                        \
  KeyDef<RunConfig> {                                                                        \
#section, #key, [](RunConfig & c) -> FieldRef { return &c.section.key; }, rule, help, {} \
  }
#define REWARD_KEY(key, rule, help, ...)                                           \
  KeyDef<RewardSpec> {                                                             \
    "rewards", #key, [](RewardSpec& r) -> FieldRef { return &r.key; }, rule, help, \
        std::vector<std::string> {                                                 \
      __VA_ARGS__                                                                  \
    }                                                                              \
  }

const std::vector<KeyDef<RunConfig>>& RunKeys() {
  static const auto* keys = new std::vector<KeyDef<RunConfig>>{
      KEY(run, name, NameRule(), "Names the run; part of the run id."),
      KEY(run, dir, Any(),
          "The run's folder, relative to the current folder. Empty: `runs/<name>`."),
      KEY(run, seed, AtLeast(0), "Seeds the shuffle of the data and every sampled token."),

      KEY(model, path, ExistingPath(),
          "Hugging Face folder or GGUF file, relative to the run file. Required."),
      KEY(model, dtype, OneOf({"bf16", "f32"}), "Of weights and activations."),
      KEY(model, chat_format,
          OneOf({"auto", "none", "chatml", "llama3", "qwen3", "qwen3-nothink", "phi4", "phi3",
                 "gemma", "llama2", "mistral", "mistral-v7", "zephyr", "deepseek-r1", "smollm3",
                 "smollm3-nothink"}),
          "How chat messages become a prompt; `auto` goes by the model's own template "
          "(docs/chat-formats.md)."),
      KEY(model, max_sequence_length, BetweenOr(2, 1 << 20, {{"auto", ModelSection::kAutoLength}}),
          "Tokens of prompt and completion together, at most those that the model was made for; "
          "also fixes `dynamic` rope scaling. `auto`: the model's own, but at most 1024; "
          "completions end there even where `rollout.max_tokens` is more."),

      KEY(lora, rank, Between(0, 65536),
          "Rank of an adapter that is trained instead of the model's weights (docs/lora.md). 0: "
          "none, or that of `adapter`."),
      KEY(lora, alpha, AtLeast(0), "The adapter's product is scaled by alpha / rank. 0: 2 · rank."),
      KEY(lora, targets, Any(),
          "Linear maps that are adapted: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
          "down_proj. Empty: all."),
      KEY(lora, adapter, ExistingPathIfGiven(),
          "PEFT folder to start from, relative to the run file. Empty: A at random, B zero."),

      KEY(data, train, ExistingPath(),
          "JSONL file, relative to the run file. Each line has `prompt` (text) or `messages` "
          "(chat: `role` and `content`, as docs/generate.md says; a list as `prompt` is the same) "
          "and what the rewards need "
          "(`answer`, …); other fields are for reward services. Required."),
      KEY(data, eval, ExistingPathIfGiven(), "Held-out JSONL file. Empty: no evaluation."),
      KEY(data, shuffle, Any(), "Shuffles each epoch; the order depends on seed and epoch alone."),
      KEY(data, on_bad_line, OneOf({"fail", "skip"}),
          "What a malformed line does: end the run, or be named, counted and left out."),
      KEY(data, system_prompt, Any(),
          "Put before prompts that have no system message. Empty: what the template does."),
      KEY(data, max_prompt_tokens, AtLeast(0),
          "The most tokens of a prompt, its chat template's included. 0: what the context leaves."),
      KEY(data, on_long_prompt, OneOf({"replace", "cut"}),
          "What is done with a longer prompt: another takes its place, or it loses its first "
          "tokens (those of the chat template as well)."),

      KEY(rollout, group_size, Between(1, 4096), "Completions of one prompt."),
      KEY(rollout, temperature, Between(1e-4, 100), "Divides the logits."),
      KEY(rollout, top_k, AtLeast(0), "Samples among the k likeliest tokens. 0: off."),
      KEY(rollout, top_p, AboveUpTo(0, 1), "Samples within this probability mass. 1: off."),
      KEY(rollout, min_p, FromBelow(0, 1),
          "Leaves out tokens less likely than this share of the likeliest. 0: off."),
      KEY(rollout, max_tokens, AtLeast(1), "Longest completion."),
      KEY(rollout, first_max_tokens, AtLeast(0),
          "A curriculum of lengths: what the first step allows; it grows with every step. 0: "
          "`max_tokens` from the beginning."),
      KEY(rollout, ramp_steps, AtLeast(1),
          "Steps until `first_max_tokens` has grown to `max_tokens`."),
      KEY(rollout, min_tokens, AtLeast(0), "No end of sequence before."),
      KEY(rollout, stop, Any(),
          "Texts that end a completion. Their tokens stay with it and are trained on; rewards "
          "judge the "
          "text before."),
      KEY(rollout, weight_dtype, OneOf({"bf16", "int8", "int4", "fp8"}),
          "How generators store matrices; `bf16`: as `model.dtype` says. Others need "
          "`schedule.numerics: fast` and an `algorithm.importance_cap`."),
      KEY(rollout, kv_dtype, OneOf({"bf16", "int8", "fp8"}),
          "How generators keep keys and values; `bf16`: as `model.dtype` says. Others hold about "
          "twice the tokens in the same memory and need what other `weight_dtype`s need."),

      KEY(algorithm, name, Algorithm(), "The objective; docs/objectives.md has their formulas."),
      KEY(algorithm, clip_low, AboveUpTo(0, 1), "Ratios below 1 − clip_low are clipped."),
      KEY(algorithm, clip_high, Positive(), "Ratios above 1 + clip_high are clipped."),
      KEY(algorithm, dual_clip, AtLeast(0),
          "Negative advantages are weighed by no ratio above this; at least 1 + clip_high. 0: off. "
          "For grpo and rloo."),
      KEY(algorithm, ratio_level, OneOf({"token", "sequence"}),
          "`sequence`: the tokens of a completion share the geometric mean of their ratios (GSPO). "
          "For grpo."),
      KEY(algorithm, kl_coef, AtLeast(0),
          "Weight of the KL term to the reference. 0: none, and no reference log-probs are "
          "computed."),
      KEY(algorithm, kl_target, AtLeast(0),
          "If positive, kl_coef adapts so that the measured KL approaches this."),
      KEY(algorithm, kl_horizon, Positive(), "Rollouts over which the adaptive kl_coef reacts."),
      KEY(algorithm, kl_estimator, OneOf({"k1", "k2", "k3"}), "Per-token estimator of the KL."),
      KEY(algorithm, advantage_scale, OneOf({"std", "none", "leave_one_out", "batch_std"}),
          "`std`: (r − mean) / (std + 1e-4); `none`: r − mean; `leave_one_out`: r − mean of the "
          "others; "
          "over the group. `batch_std`: `none`, then divided by the root mean square over the "
          "step. "
          "rloo, if nothing is said: `leave_one_out`."),
      KEY(algorithm, loss_denominator, OneOf({"token_mean", "sequence_mean", "constant"}),
          "`token_mean`: one sum over the step's tokens, divided by their number; `sequence_mean`: "
          "the mean over sequences of their token means; `constant`: one sum over the step's "
          "tokens, divided by sequences times `rollout.max_tokens` (Dr. GRPO). rloo takes the mean "
          "over sequences."),
      KEY(algorithm, entropy_coef, AtLeast(0), "Weight of the entropy in the objective."),
      KEY(algorithm, dynamic_sampling, Any(),
          "Groups whose completions all have the same reward, from which nothing can be learnt, "
          "are "
          "replaced by others, at most `train.max_group_replacements` a step."),
      KEY(algorithm, importance_cap, AtLeast(0),
          "Cap of truncated importance sampling for stale tokens. 0: off."),

      KEY(ppo, critic_model, ExistingPathIfGiven(),
          "Model folder or GGUF file, relative to the run file, that the critic begins with; its "
          "architecture may be another, its tokenizer not. Empty: `model.path`. The value head "
          "begins with zeros, or is that of a reward model (`…ForSequenceClassification` with one "
          "label)."),
      KEY(ppo, critic_lr, Between(0, 1000), "The critic's learning rate. 0: `train.lr`."),
      KEY(ppo, critic_warmup_steps, AtLeast(0),
          "First steps, in which the critic alone is trained."),
      KEY(ppo, epochs, Between(1, 1000), "Times that a step's batch is trained on."),
      KEY(ppo, mini_batch, Between(1, 1 << 20), "Completions of one update."),
      KEY(ppo, gamma, Between(0, 1), "Discount of later rewards, a token."),
      KEY(ppo, lambda, Between(0, 1), "Of generalised advantage estimation."),
      KEY(ppo, value_clip, AtLeast(0),
          "How far a value may move in one step before its loss doesn't fall any more. 0: any "
          "distance."),
      KEY(ppo, whiten_advantages, Any(),
          "Advantages of a step's tokens are given mean 0 and variance 1."),

      KEY(train, steps, AtLeast(0), "Optimizer steps. 0: evaluation only."),
      KEY(train, prompts_per_step, Between(1, 1 << 20), "Groups in a step's batch."),
      KEY(train, lr, AboveUpTo(0, 1000), "AdamW's learning rate."),
      KEY(train, warmup_steps, AtLeast(0), "Steps over which the rate rises linearly."),
      KEY(train, lr_schedule, OneOf({"constant", "linear", "cosine"}),
          "After the warm-up; `linear` and `cosine` fall to 0 at `steps`."),
      KEY(train, beta1, FromBelow(0, 1), "AdamW."),
      KEY(train, beta2, FromBelow(0, 1), "AdamW."),
      KEY(train, eps, Positive(), "AdamW."),
      KEY(train, weight_decay, AtLeast(0), "AdamW."),
      KEY(train, max_grad_norm, Positive(), "Gradients are scaled down to this global norm."),
      KEY(train, micro_batch_tokens, AtLeast(1), "Tokens of one forward and backward pass."),
      KEY(train, reduction_leaves, Between(1, 65536),
          "Leaves of the tree that adds up a step's gradients: the most ranks that can ever share "
          "the run. Part of what its bits depend on."),
      KEY(train, k_leaves, Between(1, 1024),
          "Leaves of the sums that ranks divide which share one copy of the model "
          "(`cluster.tensor_parallel`): the most that ever can. All members compute with them. "
          "Part "
          "of what the run's bits depend on."),
      KEY(train, checkpointing, OneOf({"none", "selective", "full"}),
          "Activations computed again in the backward pass: none, the MLP's first product, or all "
          "but each layer's input. The bits are the same."),
      KEY(train, optimizer_state, OneOf({"f32", "8bit"}),
          "Adam's moments: 8 bytes a parameter, or 2 (docs/parallel-training.md). Part of what the "
          "run's bits depend on."),
      KEY(train, gradient_dtype, OneOf({"f32", "bf16"}),
          "What products of the backward pass read the gradients of activations in. `bf16` is "
          "faster where the processor multiplies bf16 (docs/processors.md); sums, gradients of "
          "weights and all else stay f32. Part of what the run's bits depend on."),
      KEY(train, checkpoint_every, AtLeastOr(0, {{"auto", TrainSection::kAutoInterval}}),
          "Steps between checkpoints. 0: only at the end. `auto`: as often as loses the least "
          "time, "
          "from how long a save takes and `checkpoint_mtbf_hours` (Young and Daly)."),
      KEY(train, checkpoint_mtbf_hours, Positive(),
          "Mean time between failures of the trainers, for `checkpoint_every: auto`."),
      KEY(train, checkpoint_kind, OneOf({"full", "incremental"}),
          "`incremental`: a checkpoint holds what has changed since the one before."),
      KEY(train, checkpoint_chain, AtLeast(1), "Incremental checkpoints after a full one."),
      KEY(train, checkpoint_failure, OneOf({"warn", "stop"}),
          "What a checkpoint that can't be written does: it is told of and tried again, or ends "
          "the "
          "run."),
      KEY(train, keep_checkpoints, AtLeast(1), "Newest checkpoints kept."),
      KEY(train, grad_spike_factor, AtLeast(0),
          "A gradient norm above so many times the median of the last 64 steps' is a spike (from 8 "
          "steps on). 0: none is."),
      KEY(train, grad_spike, OneOf({"skip", "stop", "warn"}),
          "What a spike does: the step changes nothing, which is told; that, and the run ends; or "
          "it "
          "is only told of."),
      KEY(train, not_finite_step, OneOf({"skip", "stop"}),
          "What a loss or gradient that isn't finite does: the step changes nothing, which is "
          "told; "
          "or that, and the run ends."),
      KEY(train, max_group_replacements, AtLeast(0),
          "Groups that may be replaced in one step; with more the run stops and says why."),

      KEY(schedule, max_staleness, Between(0, 1000),
          "Versions that a trained token may be behind. 0: strictly on-policy. Above 0, a step "
          "does "
          "not wait for its slowest group while one of a later step is complete, which takes its "
          "place; each is trained on within this bound."),
      KEY(schedule, weight_update, OneOf({"finish", "recompute", "keep"}),
          "What running rollouts do at a swap: end on their version, recompute their keys and "
          "values, "
          "or keep them."),
      KEY(schedule, numerics, OneOf({"exact", "fast"}),
          "`exact`: a token's log-prob has the same bits wherever it is computed. `fast`: "
          "generators "
          "may round otherwise where that is faster; `logprob_mismatch_max` tells by how much."),

      KEY(eval, before, Any(), "Evaluate before the first step."),
      KEY(eval, after, Any(), "Evaluate after the last step."),
      KEY(eval, every, AtLeast(0), "Steps between evaluations. 0: only before and after."),
      KEY(eval, max_prompts, AtLeast(0), "Evaluate on the first so many lines. 0: all."),
      KEY(eval, max_tokens, AtLeast(0), "Longest completion. 0: `rollout.max_tokens`."),
      KEY(eval, reward, Any(),
          "The reward, by name, that counts as correct when it is at least 1. Empty: the first."),

      KEY(cluster, backend, OneOf({"cpu", "reference"}), "What computes."),
      KEY(cluster, generators, Between(1, 1024), "Generator processes that `stretto up` starts."),
      KEY(cluster, scorers, Between(1, 1024), "Scorer processes that `stretto up` starts."),
      KEY(cluster, trainers, Between(1, 1024),
          "Trainer processes (ranks) that train together and that `stretto up` starts; at most "
          "`train.reduction_leaves`."),
      KEY(cluster, min_trainers, Between(1, 1024),
          "Fewest ranks that train when others are missing; whole copies of the model in any case "
          "(`cluster.tensor_parallel`)."),
      KEY(cluster, burn_in_ms, Between(0, 3600000),
          "How long each processor of a trainer computes products with known answers before it "
          "joins. 0: not at all."),
      KEY(cluster, trainer_layout, OneOf({"ddp", "zero1", "zero2", "fsdp"}),
          "What ranks divide: nothing, masters and moments, gradients too, weights too. Changes no "
          "bit."),
      KEY(cluster, tensor_parallel, Between(1, 1024),
          "Ranks that share one copy of the model; divides `cluster.trainers` and "
          "`train.k_leaves`. Changes no bit."),
      KEY(cluster, collectives, OneOf({"tcp", "nccl"}),
          "What carries what trainers exchange. `nccl`: for trainers that were built with it and "
          "have a CUDA device each. Changes no bit."),
      KEY(cluster, offload_optimizer, Any(),
          "Trainers keep masters and moments in files of the run's folder. Changes no bit."),
      KEY(cluster, trainer_grace_ms, Between(0, 86400000),
          "How long a missing rank is waited for before fewer go on."),
      KEY(cluster, collective_timeout_ms, Between(100, 3600000),
          "A rank that takes no part in an exchange for so long ends the step, and is named."),
      KEY(cluster, relay_fanout, Between(1, 64),
          "Generators that each sender of new weights (the trainer, and generators that pass on "
          "what "
          "they receive) feeds at once. 1: a chain, which is the fastest where links are slow."),
      KEY(cluster, generator_threads, Between(0, 1024), "0: what the machine grants."),
      KEY(cluster, scorer_threads, Between(0, 1024), "0: what the machine grants."),
      KEY(cluster, trainer_threads, Between(0, 1024),
          "Of each trainer. 0: what the machine grants, shared among the trainers that `stretto "
          "up` "
          "starts; while generators compute as well (`schedule.max_staleness` above 0), less "
          "their `generator_threads`."),
      KEY(cluster, bind, Any(), "Address that services listen on."),
      KEY(cluster, base_port, Between(0, 65535),
          "The coordinator's port; the others follow. 0: free ports are found."),
      KEY(cluster, http_port, Between(-1, 65535),
          "Port of the OpenAI-compatible HTTP API of the first generator that `stretto up` starts; "
          "those of the others follow. 0: free ports are found. -1: no HTTP API."),
      KEY(cluster, heartbeat_ms, Between(10, 60000), "Between a member's signs of life."),
      KEY(cluster, lease_ms, Between(20, 600000),
          "A member silent for so long loses its work to others."),
      KEY(cluster, kv_cache_mb, AtLeast(1), "A generator's budget for keys and values, MiB."),
      KEY(cluster, kv_cache_share, FromBelow(0, 1),
          "If positive, the budget instead: this share of the memory that a generator's machine or "
          "control group grants it."),
      KEY(cluster, max_running, Between(1, 65536), "Sequences a generator decodes at once."),
      KEY(cluster, prefill_tokens, AtLeast(1),
          "Prompt tokens computed per engine step; 256 at most while other sequences decode."),
      KEY(cluster, speculation, OneOf({"off", "ngram", "model"}),
          "How generators guess tokens ahead: from what followed the same tokens earlier, or by a "
          "smaller model. Never changes a token."),
      KEY(cluster, draft_model, ExistingPathIfGiven(),
          "For `speculation: model`: the smaller model, with the same tokenizer."),
      KEY(cluster, draft_tokens, Between(1, 16), "Most tokens guessed for a sequence and step."),
  };
  return *keys;
}

const std::vector<KeyDef<RewardSpec>>& RewardKeys() {
  static const auto* keys = new std::vector<KeyDef<RewardSpec>>{
      REWARD_KEY(type,
                 OneOf({"exact", "contains", "integer", "numeric", "regex", "length", "json",
                        "service", "model"}),
                 "What judges. Required."),
      REWARD_KEY(name, NameRule(), "In metrics; unique. Empty: the type."),
      REWARD_KEY(weight, Any(), "A rollout's reward is the weighted sum."),
      REWARD_KEY(answer_field, Any(), "Field of the data line to compare with.", "exact",
                 "contains", "integer", "numeric"),
      REWARD_KEY(tolerance, AtLeast(0), "Relative or absolute difference allowed.", "numeric"),
      REWARD_KEY(take, OneOf({"last", "first", "only"}),
                 "Which number of the completion counts; `only`: it must be nothing else.",
                 "integer", "numeric"),
      REWARD_KEY(ignore_case, Any(), "Whether letters' case is ignored.", "exact", "contains"),
      REWARD_KEY(pattern, Any(), "Searched for in the completion (PCRE2). Required.", "regex"),
      REWARD_KEY(target_tokens, AtLeast(0),
                 "1 up to so many tokens, then falling linearly to 0 at `rollout.max_tokens`.",
                 "length"),
      REWARD_KEY(required_keys, Any(), "Keys that the completion's object must have.", "json"),
      REWARD_KEY(address, Any(), "host:port of a `stretto.v1.Reward` service. Required.",
                 "service"),
      REWARD_KEY(timeout_ms, Between(1, 3600000), "Of one call.", "service"),
      REWARD_KEY(max_attempts, Between(1, 100), "Calls, after which the group is replaced.",
                 "service"),
      REWARD_KEY(path, ExistingPath(),
                 "Folder of a reward model (`…ForSequenceClassification` with one label, as "
                 "`stretto reward-model` and other tools write them), relative to the run file. "
                 "Scorers compute its scores of prompt and completion; its tokenizer may be "
                 "another than the policy's. Required.",
                 "model"),
      REWARD_KEY(chat_format, Any(),
                 "How it reads a conversation: `auto` (its own template) or a format's name.",
                 "model"),
  };
  return *keys;
}
#undef KEY
#undef REWARD_KEY
}  // namespace stretto::config_internal
