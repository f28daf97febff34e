// What the coordinator measures.
#include <algorithm>

#include "services/common/log.h"
#include "services/coordinator/coordinator.h"

namespace stretto::services {
// This and the next two are for people, and for scripts that measure how soon a run goes on:
// docs/faults.md.
void Coordinator::Lose(uint64_t group, const std::string& member) {
  lost_groups_[group] = {NowNs(), member};
  ++num_lost_[member];
}

void Coordinator::TellLosses() {
  for (const auto& [member, count] : num_lost_) LogInfo(member, " lost ", count, " groups");
  num_lost_.clear();
}

void Coordinator::Recovered(const GenerateGroup& command) {
  const int64_t now_ns = NowNs();
  const auto seconds = [&](int64_t from_ns) {
    return static_cast<double>(now_ns - from_ns) * 1e-9;
  };
  if (!has_token_) {
    has_token_ = true;
    LogInfo("first token ", seconds(start_ns_), " s after the start, of group ", command.group,
            " at ", command.member);
  }
  const auto lost = lost_groups_.find(command.group);
  if (lost == lost_groups_.end()) return;
  parts_.metrics
      ->histogram("stretto_reissue_seconds",
                  "From the loss of a group by its generator to its first token elsewhere.")
      .Observe(seconds(lost->second.at_ns));
  LogInfo("group ", command.group, ", lost by ", lost->second.member, ", has a token of ",
          command.member, " after ", seconds(lost->second.at_ns), " s");
  lost_groups_.erase(lost);
}

void Coordinator::Do(const CountFault& command) {
  parts_.metrics
      ->counter("stretto_faults_total", "What went wrong and was dealt with, by kind.",
                {{"kind", command.kind}, {"member", command.member}})
      .Add();
}

// Time goes on for those who have work.
void Coordinator::CountBusy() {
  const int64_t now_ns = NowNs();
  int64_t busy_generators = 0, busy_scorers = 0;
  for (const auto& [name, member] : core_->members()) {
    if (!member.is_live || member.num_in_flight == 0) continue;
    busy_generators += member.pool == PoolKind::kGenerator ? 1 : 0;
    busy_scorers += member.pool == PoolKind::kScorer ? 1 : 0;
  }
  balance_.Pass(static_cast<double>(now_ns - busy_since_ns_) * 1e-9, busy_generators, busy_scorers);
  busy_since_ns_ = now_ns;
}

void Coordinator::PublishBalance() {
  const auto set = [this](const char* pool, const Balance::Pool& measured) {
    parts_.metrics
        ->gauge("stretto_desired_replicas",
                "Members with which the pool would keep the trainers fed; 0: not known yet.",
                {{"pool", pool}})
        .Set(static_cast<double>(balance_.Desired(measured)));
  };
  set("generator", balance_.generators());
  set("scorer", balance_.scorers());
  const auto rate = [this](const char* pool, const Balance::Pool& measured) {
    parts_.metrics
        ->gauge("stretto_rollouts_per_second",
                "Of one member of the pool (of all trainers together) while it has work.",
                {{"pool", pool}})
        .Set(measured.Rate());
  };
  rate("generator", balance_.generators());
  rate("scorer", balance_.scorers());
  rate("trainer", balance_.trainers());
}

void Coordinator::PublishCheckpointMetrics() {
  const CheckpointLog& log = core_->checkpoints();
  Metrics& metrics = *parts_.metrics;
  metrics.gauge("stretto_checkpoint_version", "Of the newest checkpoint; -1: there is none.")
      .Set(static_cast<double>(log.version));
  metrics.gauge("stretto_checkpoint_failures", "Saves that failed since the coordinator started.")
      .Set(static_cast<double>(log.num_failures));
  metrics
      .gauge("stretto_checkpoint_seconds",
             "The last checkpoint took from its beginning until all ranks had it on disk.")
      .Set(std::max(0.0, log.save_seconds));
  metrics
      .gauge("stretto_checkpoint_interval_seconds",
             "That train.checkpoint_every: auto takes between checkpoints.")
      .Set(log.interval_seconds);
}

void Coordinator::PublishRankMetrics() {
  if (config_.cluster.trainers <= 1) return;
  Metrics& metrics = *parts_.metrics;
  metrics.gauge("stretto_trainer_group_epoch", "Of the trainers' group, or of the attempt at one.")
      .Set(static_cast<double>(core_->trainers().epoch));
  metrics.gauge("stretto_trainer_group_size", "Ranks of the trainers' group.")
      .Set(static_cast<double>(core_->trainers().ranks.size()));
  for (const auto& [name, measured] : rank_metrics_) {
    const auto set = [&metrics, &rank = name, &values = measured](
                         const char* gauge, const char* help, const char* metric) {
      const auto found = values.find(metric);
      if (found != values.end()) metrics.gauge(gauge, help, {{"rank", rank}}).Set(found->second);
    };
    set("stretto_rank_step_seconds", "Of the last step on this rank.", "train_seconds");
    set("stretto_rank_collective_seconds", "Of that, exchanges (overlapped ones included).",
        "collective_seconds");
  }
  for (const auto& [name, rank] : rank_health_.ranks()) {
    const Labels labels = {{"rank", name}};
    metrics.gauge("stretto_rank_compute_seconds", "Of the last step, without exchanges.", labels)
        .Set(rank.compute_seconds);
    metrics
        .gauge(
            "stretto_rank_gradient",
            "Of the last step's loss, by the log-probs of the rank's own tokens: root of the mean "
            "square of those that aren't 0.",
            labels)
        .Set(rank.gradient);
    metrics.gauge("stretto_rank_slow", "1: computes slower than the others.", labels)
        .Set(rank.is_slow ? 1 : 0);
    metrics.gauge("stretto_rank_large_gradients", "1: gradients unlike the others'.", labels)
        .Set(rank.has_large_gradients ? 1 : 0);
  }
}

void Coordinator::PublishMetrics() {
  Metrics& metrics = *parts_.metrics;
  metrics.gauge("stretto_step", "Optimizer steps taken.")
      .Set(static_cast<double>(core_->version_number()));
  metrics.gauge("stretto_buffer_groups", "Complete groups that wait for their batch.")
      .Set(static_cast<double>(core_->num_buffered()));
  metrics.gauge("stretto_rollouts", "Complete training rollouts of the run.")
      .Set(static_cast<double>(num_rollouts_));
  metrics.gauge("stretto_rejected_groups", "Groups replaced since the coordinator started.")
      .Set(static_cast<double>(core_->num_rejected()));
  metrics.gauge("stretto_groups_without_signal", "Replaced because all rewards were the same.")
      .Set(static_cast<double>(core_->num_without_signal()));
  metrics.gauge("stretto_stale_groups", "Groups generated again because they became too old.")
      .Set(static_cast<double>(core_->num_stale_dropped()));
  metrics
      .gauge("stretto_groups_brought_forward",
             "Complete groups that an earlier step was given in place of others.")
      .Set(static_cast<double>(core_->num_brought_forward()));
  metrics.gauge("stretto_skipped_steps", "Steps of the run that changed nothing.")
      .Set(static_cast<double>(num_skipped_));
  metrics
      .gauge("stretto_goodput",
             "Share of the time since the coordinator started that went into steps which count: "
             "what is repeated, lost or waited for doesn't.")
      .Set(useful_seconds_ / std::max(SessionSeconds(), 1e-9));
  PublishRankMetrics();
  PublishBalance();
  std::map<std::string, int> num_live = {{"generator", 0}, {"scorer", 0}, {"trainer", 0}};
  for (const auto& [name, member] : core_->members()) {
    if (member.is_live) ++num_live[PoolName(member.pool)];
  }
  for (const auto& [pool, count] : num_live) {
    metrics.gauge("stretto_live_members", "Members that keep their lease.", {{"pool", pool}})
        .Set(count);
  }
  for (const auto& [name, value] : last_metrics_) {
    metrics.gauge("stretto_step_metric", "Metrics of the last step.", {{"metric", name}})
        .Set(value);
  }
}
}  // namespace stretto::services
