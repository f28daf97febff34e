#include "cli/checkpoint_lookup.h"

#include <filesystem>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/printable.h"
#include "base/status.h"
#include "engine/training/checkpoint.h"

namespace stretto::cli {
absl::StatusOr<std::string> FindCheckpoint(const std::string& run_dir, const std::string& which) {
  Files& files = Files::Real();
  const std::string root = JoinPath(run_dir, "checkpoints");
  if (which.empty() || which == "latest") return engine::LatestCheckpoint(files, root);
  const auto is_checkpoint = [&files](const std::string& folder) {
    return files.Exists(JoinPath(folder, "manifest.json"));
  };
  ASSIGN_OR_RETURN(const std::vector<std::string> folders, engine::ListCheckpoints(files, root));
  std::string known;
  int64_t step = 0;
  const bool is_step = absl::SimpleAtoi(which, &step);
  for (const std::string& folder : folders) {
    const std::string name = std::filesystem::path(folder).filename().string();
    int64_t number = -1;
    if (name == which) return folder;
    if (is_step && absl::SimpleAtoi(name.substr(name.rfind('-') + 1), &number) && number == step) {
      return folder;
    }
    absl::StrAppend(&known, known.empty() ? "" : ", ", name);
  }
  for (const std::string& path : {which, JoinPath(run_dir, which)}) {
    if (is_checkpoint(path)) return path;
  }
  return absl::NotFoundError(
      absl::StrCat("--checkpoint ", Printable(which),
                   ": no such checkpoint; expected `latest`, a step, a name "
                   "or a path. ",
                   root, known.empty() ? " holds none" : absl::StrCat(" holds ", known)));
}
}  // namespace stretto::cli
