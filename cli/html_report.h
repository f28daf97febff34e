// One self-contained HTML page about a run, from its metrics.jsonl (a JSON object a step; every
// numeric field is a series) and summary.json: plots as inline SVG, no script, nothing fetched.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/files.h"

namespace stretto::cli {
// The page's text. NotFound: the folder has no metrics yet. A line that is no JSON object is an
// error that names file and line, except a last one without an end (a run that is being written).
absl::StatusOr<std::string> RenderHtmlReport(Files& files, const std::string& run_dir);
}  // namespace stretto::cli
