// `stretto export`: a run's newest checkpoint (or a given one) as a Hugging Face folder.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/files.h"
#include "base/status.h"
#include "cli/checkpoint_lookup.h"
#include "cli/commands.h"
#include "cli/local_model.h"
#include "config/run_config.h"
#include "engine/formats/export_hf.h"
#include "engine/training/checkpoint_adapter.h"

namespace stretto::cli {
namespace {
struct ExportFlags {
  std::string run_dir, checkpoint, out, dtype = "bf16";
  bool overwrite = false, adapter = false;
};

absl::Status Export(const ExportFlags& flags) {
  ASSIGN_OR_RETURN(const RunConfig run, LoadRunConfig(RunFileOf(flags.run_dir)));
  ASSIGN_OR_RETURN(const std::string checkpoint, FindCheckpoint(flags.run_dir, flags.checkpoint));
  ASSIGN_OR_RETURN(const auto files, engine::OpenModel(run.model.path));
  if (flags.adapter) {
    RETURN_IF_ERROR(engine::ExportCheckpointAdapter(Files::Real(), checkpoint, files.config,
                                                    {flags.out, files.path, flags.overwrite}));
    std::printf("Exported the adapter of %s to %s\n", checkpoint.c_str(), flags.out.c_str());
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const auto device, engine::CreateDevice({.backend = run.cluster.backend}));
  ASSIGN_OR_RETURN(const auto masters, OpenPolicy(checkpoint, *device, files));
  RETURN_IF_ERROR(Annotate(engine::CheckShapes(files.config, *masters), checkpoint));
  engine::ExportOptions options;
  options.path = flags.out;
  options.type = flags.dtype == "f32" ? DType::kF32 : DType::kBF16;
  options.config = files.config;
  if (run.model.chat_format != "auto") options.config.chat_format = run.model.chat_format;
  options.generation = files.generation;
  options.overwrite = flags.overwrite;
  if (files.kind == engine::ModelFiles::Kind::kFolder) {
    options.tokenizer_folder = files.path;
  } else {
    ASSIGN_OR_RETURN(const auto tokenizer, engine::OpenTokenizer(files));
    options.tokenizer_files = {{"tokenizer.json", tokenizer->ToTokenizerJson()},
                               {"tokenizer_config.json", tokenizer->ToTokenizerConfigJson()}};
  }
  RETURN_IF_ERROR(engine::ExportHf(
      Files::Real(), options,
      [&masters](const engine::TensorSpec& tensor, int64_t begin, int64_t end, DType type,
                 void* dst) { return masters->ReadRows(tensor.name, begin, end, type, dst); }));
  std::printf("Exported %s to %s\n", checkpoint.c_str(), flags.out.c_str());
  return absl::OkStatus();
}
}  // namespace

void AddExportCommand(CLI::App& app, Command* chosen) {
  auto flags = std::make_shared<ExportFlags>();
  CLI::App* command =
      app.add_subcommand("export", "Writes a run's policy as a Hugging Face folder.");
  command->add_option("run_dir", flags->run_dir, "The run's folder")->required();
  command->add_option("out", flags->out, "The folder to write")->required();
  command->add_option(
      "--checkpoint", flags->checkpoint,
      "Which: latest (default), a step, a name in the run's checkpoints, or a path");
  command->add_flag("--adapter", flags->adapter,
                    "The adapter alone (lora.rank), in f32, as a folder for PEFT");
  command->add_option("--dtype", flags->dtype, "Of the weights that are written")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "f32"}));
  command->add_flag("--overwrite", flags->overwrite, "Replace the folder if it exists");
  command->callback([flags, chosen] { *chosen = [flags] { return Finish(Export(*flags)); }; });
}
}  // namespace stretto::cli
