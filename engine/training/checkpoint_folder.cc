#include "engine/training/checkpoint_folder.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "engine/training/checkpoint.h"

namespace stretto::engine {
namespace {
constexpr char kPartial[] = ".partial", kReplaced[] = ".replaced", kPruned[] = ".pruned";
constexpr char kLatest[] = "latest";

std::string NameOf(const std::string& folder) { return folder.substr(folder.rfind('/') + 1); }

bool IsComplete(Files& files, const std::string& folder) {
  return files.Exists(JoinPath(folder, kManifestFile));
}

// The older checkpoints that one needs; of one whose manifest can't be read nothing is known.
std::vector<std::string> NeededBy(Files& files, const std::string& folder) {
  const auto manifest = ReadManifest(files, folder);
  return manifest.ok() ? FoldersNeeded(*manifest) : std::vector<std::string>();
}

// Names of the folders that stay: the newest `keep` up to `version`, and what they need. When they
// all need one and the same folder, whose damage would be the end of them all, also the newest that
// does not.
std::set<std::string> NamesToKeep(Files& files, const std::vector<std::string>& complete,
                                  int64_t version, int64_t keep) {
  std::set<std::string> names, shared;
  int64_t num_kept = 0;
  for (auto folder = complete.rbegin(); folder != complete.rend(); ++folder) {
    const std::string name = NameOf(*folder);
    if (VersionOfFolder(name).value_or(0) > version) {
      names.insert(name);  // of a future that was given up; it will be written again
      continue;
    }
    std::set<std::string> needed = {name};
    for (std::string& n : NeededBy(files, *folder)) needed.insert(std::move(n));
    std::set<std::string> common;
    std::set_intersection(shared.begin(), shared.end(), needed.begin(), needed.end(),
                          std::inserter(common, common.end()));
    const bool is_independent = num_kept > 0 && common.empty();
    if (num_kept >= keep && (keep == 1 || shared.empty() || !is_independent)) continue;
    shared = num_kept == 0 ? needed : common;
    names.insert(needed.begin(), needed.end());
    ++num_kept;
  }
  return names;
}

absl::Status RemoveFolder(Files& files, const std::string& folder) {
  const std::string pruned = absl::StrCat(folder, kPruned);
  RETURN_IF_ERROR(files.RemoveAll(pruned));
  RETURN_IF_ERROR(files.Rename(folder, pruned));  // at once no checkpoint any more
  return files.RemoveAll(pruned);
}

absl::Status Prune(Files& files, const std::string& root, int64_t version, int64_t keep) {
  ASSIGN_OR_RETURN(const std::vector<std::string> complete, ListCheckpoints(files, root));
  const std::set<std::string> names =
      NamesToKeep(files, complete, version, std::max<int64_t>(1, keep));
  for (const std::string& folder : complete) {
    if (names.count(NameOf(folder)) == 0 && VersionOfFolder(NameOf(folder)).has_value()) {
      RETURN_IF_ERROR(RemoveFolder(files, folder));
    }
  }
  // What interrupted saves left behind.
  ASSIGN_OR_RETURN(const std::vector<std::string> entries, files.List(root));
  for (const std::string& name : entries) {
    const bool is_left = absl::EndsWith(name, kPartial) || absl::EndsWith(name, kReplaced) ||
                         absl::EndsWith(name, kPruned);
    const std::string stem = name.substr(0, name.find('.'));
    if (!is_left || !VersionOfFolder(stem).has_value()) continue;
    if (absl::EndsWith(name, kReplaced) && !IsComplete(files, JoinPath(root, stem))) continue;
    RETURN_IF_ERROR(files.RemoveAll(JoinPath(root, name)));
  }
  return absl::OkStatus();
}
}  // namespace

std::string PartialFolder(const std::string& root, const std::string& name,
                          const std::string& attempt) {
  return absl::StrCat(JoinPath(root, name), attempt.empty() ? "" : ".", attempt, kPartial);
}

absl::Status CommitCheckpoint(Files& files, const std::string& root, const std::string& partial,
                              const CheckpointManifest& manifest, int64_t keep) {
  RETURN_IF_ERROR(files.WriteAtomically(JoinPath(partial, kManifestFile), ManifestText(manifest)));
  const std::string& path = manifest.info.path;
  if (files.Exists(path)) {
    const std::string replaced = absl::StrCat(path, kReplaced);
    RETURN_IF_ERROR(files.RemoveAll(replaced));
    RETURN_IF_ERROR(files.Rename(path, replaced));
  }
  RETURN_IF_ERROR(files.Rename(partial, path));
  RETURN_IF_ERROR(files.WriteAtomically(JoinPath(root, kLatest), NameOf(path) + "\n"));
  return Prune(files, root, manifest.info.counters.version, keep);
}

absl::StatusOr<std::vector<std::string>> ListCheckpoints(Files& files, const std::string& root) {
  std::vector<std::pair<int64_t, std::string>> found;
  if (!files.Exists(root)) return std::vector<std::string>();
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  for (absl::string_view name : names) {
    const std::string folder = JoinPath(root, name);
    absl::string_view stem = name;
    // A crash between the two renames that replace a folder leaves the old one under this name.
    const bool is_replaced = absl::ConsumeSuffix(&stem, kReplaced);
    const auto version = VersionOfFolder(stem);
    if (!version.has_value() || !IsComplete(files, folder)) continue;
    if (is_replaced && IsComplete(files, JoinPath(root, stem))) continue;
    found.emplace_back(*version, folder);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> folders;
  for (auto& [version, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

absl::StatusOr<std::string> LatestCheckpoint(Files& files, const std::string& root) {
  const std::string pointer = JoinPath(root, kLatest);
  if (files.Exists(pointer)) {
    ASSIGN_OR_RETURN(const std::string text, files.ReadAll(pointer));
    const absl::string_view name = absl::StripSuffix(text, "\n");
    const std::string folder = JoinPath(root, name);
    if (VersionOfFolder(name).has_value() && IsComplete(files, folder)) return folder;
  }
  // A crash between two renames leaves the pointer without its folder.
  ASSIGN_OR_RETURN(const std::vector<std::string> folders, ListCheckpoints(files, root));
  if (folders.empty()) return absl::NotFoundError(absl::StrCat(root, ": no checkpoint"));
  return folders.back();
}
}  // namespace stretto::engine
