#include "cli/finetune_session.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/printable.h"
#include "base/status.h"
#include "engine/formats/model_files.h"
#include "engine/training/adapted_model.h"
#include "engine/training/checkpoint.h"
#include "engine/weights/version.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;
constexpr int64_t kKeep = 2;  // one more than is needed: the newest may turn out damaged
constexpr int64_t kPrintEvery = 20;
constexpr int64_t kMaxSilenceNs = 10'000'000'000;

std::atomic<int> g_interrupts{0};
void OnInterrupt(int) {
  if (g_interrupts.fetch_add(1) > 0) ::_exit(130);
}

// Signals ask for an end while this object lives.
class Interrupts {
 public:
  Interrupts() {
    g_interrupts = 0;
    struct sigaction action {};
    action.sa_handler = OnInterrupt;
    for (size_t i = 0; i < 2; ++i) ::sigaction(kSignals[i], &action, &before_[i]);
  }
  ~Interrupts() {
    for (size_t i = 0; i < 2; ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
  }
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  static bool requested() { return g_interrupts > 0; }

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM};
  struct sigaction before_[2] = {};
};

std::string Absolute(const std::string& path) {
  std::error_code ec;
  const auto absolute = std::filesystem::weakly_canonical(path, ec);
  return ec || path.empty() ? path : absolute.string();
}

absl::StatusOr<Json> SettingsOf(const FinetuneFlags& flags, const std::string& settings_json) {
  ASSIGN_OR_RETURN(const std::string data, Files::Real().ReadAll(flags.data));
  Json settings = Json::parse(settings_json);
  settings["model"] = Absolute(flags.model);
  if (!flags.model.empty()) {  // what lies there, too: it may have been replaced
    ASSIGN_OR_RETURN(const auto files, engine::OpenModelOfAnyHead(flags.model));
    RETURN_IF_ERROR(engine::CheckShapes(files.config, *files.tensors));
    ASSIGN_OR_RETURN(settings["model-content"], engine::HashOfBase(files.config, *files.tensors));
  }
  settings["config"] = Absolute(flags.config);
  settings["tokenizer"] = Absolute(flags.tokenizer);
  settings["data"] = engine::TensorHash(AsBytes(data));
  settings["dtype"] = flags.dtype;
  settings["chat-format"] = flags.prompts.chat_format;
  settings["system"] = flags.prompts.system_prompt.value_or("");
  if (flags.prompts.system_prompt == "") settings["system-empty"] = true;
  settings["steps"] = flags.steps;
  settings["batch"] = flags.batch;
  settings["max-sequence-length"] = flags.max_sequence_length;
  settings["warmup"] = flags.warmup;
  settings["lr"] = flags.lr;
  settings["weight-decay"] = flags.weight_decay;
  settings["seed"] = flags.seed;
  if (flags.optimizer_state != "f32") settings["optimizer-state"] = flags.optimizer_state;
  if (flags.lora_rank == 0 && flags.lora_adapter.empty()) return settings;
  settings["lora-rank"] = flags.lora_rank;
  settings["lora-alpha"] = flags.lora_alpha;
  settings["lora-targets"] = flags.lora_targets;
  settings["lora-adapter"] = Absolute(flags.lora_adapter);
  return settings;
}
}  // namespace

FinetuneSession::FinetuneSession(const FinetuneFlags& flags, std::string settings)
    : flags_(flags), root_(CheckpointsOf(flags)), settings_(std::move(settings)) {}

absl::StatusOr<FinetuneSession> FinetuneSession::Open(const FinetuneFlags& flags,
                                                      const std::string& settings_json) {
  ASSIGN_OR_RETURN(const Json settings, SettingsOf(flags, settings_json));
  FinetuneSession session(
      flags, settings.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace));
  if (flags.restart) RETURN_IF_ERROR(session.RemoveCheckpoints());
  ASSIGN_OR_RETURN(const auto folders, engine::ListCheckpoints(Files::Real(), session.root_));
  for (const std::string& folder : folders) RETURN_IF_ERROR(session.CheckSettings(folder));
  return session;
}

// A folder that can't be read is no reason to refuse: Restore passes it over.
absl::Status FinetuneSession::CheckSettings(const std::string& folder) const {
  const auto info = engine::ReadCheckpointInfo(Files::Real(), folder);
  if (!info.ok()) return absl::OkStatus();
  const Json before = Json::parse(info->extra_json, nullptr, /*allow_exceptions=*/false);
  const Json now = Json::parse(settings_);
  std::string difference = before.is_object() ? "" : "they are of another program";
  for (const auto& [key, value] : now.items()) {
    const Json was = before.is_object() ? before.value(key, Json()) : Json();
    if (was == value || !difference.empty()) continue;
    difference = absl::StrCat("--", key, " was ", was.dump(), ", is ", value.dump());
    if (key == "data" || key == "model-content") {
      difference = absl::StrCat(key == "data" ? "--data" : "--model", " has other content");
    }
  }
  if (difference.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(root_, ": checkpoints of training with other settings (", Printable(difference),
                   "). With the same ones it goes on; --restart begins anew and removes them"));
}

absl::Status FinetuneSession::Restore(engine::TrainerEngine& trainer) {
  const auto restored = engine::LoadNewestCheckpoint(
      Files::Real(), root_, trainer, [](const std::string&, const absl::Status& why) {
        std::fprintf(stderr, "stretto: passing over a damaged checkpoint: %s\n",
                     PrintableLines(why.message()).c_str());
      });
  if (absl::IsNotFound(restored.status())) return absl::OkStatus();
  if (!restored.ok()) {
    return Annotate(restored.status(),
                    absl::StrCat(root_, " (--restart removes it and begins anew)"));
  }
  std::printf("Resuming after step %lld (%s)\n", static_cast<long long>(trainer.version()),
              restored->path.c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status FinetuneSession::Save(engine::TrainerEngine& trainer) {
  RETURN_IF_ERROR(Files::Real().MakeDirs(root_));
  return engine::SaveCheckpoint(Files::Real(), {.root = root_, .keep = kKeep}, trainer, settings_)
      .status();
}

absl::Status FinetuneSession::Stop(int64_t step, engine::TrainerEngine& trainer) {
  RETURN_IF_ERROR(Annotate(Save(trainer), "interrupted, and not saved"));
  return absl::CancelledError(absl::StrCat("interrupted; saved after step ", step, " in ", root_,
                                           ". The same command goes on from there"));
}

absl::Status FinetuneSession::Run(size_t num_examples, engine::TrainerEngine& trainer,
                                  TakeFinetuneStep take) {
  RETURN_IF_ERROR(Restore(trainer));
  const Interrupts interrupts;
  EpochOrder order(num_examples, flags_.seed);
  Clock& clock = Clock::Real();
  const double start = clock.NowSeconds();
  int64_t printed_ns = clock.NowNs();
  std::vector<size_t> batch(static_cast<size_t>(flags_.batch));
  const int64_t begin = trainer.version();
  for (int64_t step = 1; step <= flags_.steps; ++step) {
    for (size_t& example : batch) example = order.Next();
    if (step <= begin) continue;  // taken before; the order goes on from it
    ASSIGN_OR_RETURN(const FinetuneStep taken, take(step, batch));
    RETURN_IF_ERROR(CheckFinite(step, taken.result));
    if (step == 1 || step % kPrintEvery == 0 || step == flags_.steps ||
        clock.NowNs() - printed_ns >= kMaxSilenceNs) {
      PrintStep(flags_, step, taken.result, taken.more, clock.NowSeconds() - start);
      printed_ns = clock.NowNs();
    }
    if (Interrupts::requested()) return Stop(step, trainer);
    const bool is_due = flags_.checkpoint_every > 0 && step % flags_.checkpoint_every == 0;
    if (is_due && step < flags_.steps) RETURN_IF_ERROR(Save(trainer));
  }
  return absl::OkStatus();
}

absl::Status FinetuneSession::RemoveCheckpoints() { return Files::Real().RemoveAll(root_); }
}  // namespace stretto::cli
