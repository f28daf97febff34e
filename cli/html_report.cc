#include "cli/html_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status.h"

namespace stretto::cli {
namespace {
using Json = nlohmann::json;
using Points = std::vector<std::pair<double, double>>;  // (step, value), finite

// Plots that come first, in this order and with these titles; other series follow by name.
constexpr std::pair<const char*, const char*> kTitles[] = {
    {"reward_mean", "Reward"},
    {"eval", "Held-out accuracy"},
    {"kl", "KL to the reference"},
    {"entropy", "Entropy (nats)"},
    {"completion_length", "Completion length (tokens)"},
    {"tokens_per_second", "Tokens generated per second"},
    {"grad_norm", "Gradient norm"},
    {"loss", "Loss"},
    {"logprob_mismatch_max", "Largest generator–trainer log-prob difference"},
    {"staleness_mean", "Staleness (steps)"},
    {"step_seconds", "Seconds a step"},
};

std::string Escape(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

absl::StatusOr<std::map<std::string, Points>> ReadSeries(Files& files, const std::string& path) {
  ASSIGN_OR_RETURN(const std::string content, files.ReadAll(path));
  std::map<std::string, Points> series;
  size_t begin = 0;
  for (int64_t number = 1; begin < content.size(); ++number) {
    const size_t end = content.find('\n', begin);
    const bool whole = end != std::string::npos;
    const std::string line = content.substr(begin, whole ? end - begin : std::string::npos);
    begin = whole ? end + 1 : content.size();
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number()) {
      if (!whole) break;
      return absl::DataLossError(
          absl::StrCat(path, ":", number, ": expected a JSON object with a number `step`"));
    }
    const double step = json["step"].get<double>();
    for (const auto& [name, value] : json.items()) {
      if (name == "step" || !value.is_number()) continue;
      if (const double v = value.get<double>(); std::isfinite(v))
        series[name].emplace_back(step, v);
    }
  }
  return series;
}

struct Range {
  double low, high;
  double At(double value, double length) const { return (value - low) / (high - low) * length; }
};

Range RangeOf(const Points& points, bool of_steps) {
  Range range{INFINITY, -INFINITY};
  for (const auto& [step, value] : points) {
    range.low = std::min(range.low, of_steps ? step : value);
    range.high = std::max(range.high, of_steps ? step : value);
  }
  if (range.low == range.high) {
    const double margin = range.low == 0 ? 1 : std::abs(range.low) * 0.1;
    range.low -= margin;
    range.high += margin;
  }
  return range;
}

// A line plot with the range written on its axes and a hover text for each point.
std::string Plot(const std::string& title, const Points& points) {
  constexpr double kWidth = 300, kHeight = 120, kLeft = 62, kTop = 8;
  const Range steps = RangeOf(points, true), values = RangeOf(points, false);
  const auto x = [&](double step) { return kLeft + steps.At(step, kWidth); };
  const auto y = [&](double value) { return kTop + kHeight - values.At(value, kHeight); };
  std::string line, dots;
  for (const auto& [step, value] : points) {
    absl::StrAppendFormat(&line, "%.1f,%.1f ", x(step), y(value));
    absl::StrAppendFormat(&dots,
                          "<circle cx='%.1f' cy='%.1f' r='4'><title>step %g: %.6g</title></circle>",
                          x(step), y(value), step, value);
  }
  std::string svg = absl::StrFormat(
      "<figure><figcaption>%s <b>%.5g</b></figcaption>"
      "<svg viewBox='0 0 %g %g' role='img' aria-label='%s'>",
      Escape(title), points.back().second, kLeft + kWidth + 12, kTop + kHeight + 24, Escape(title));
  for (const double value : {values.low, (values.low + values.high) / 2, values.high}) {
    absl::StrAppendFormat(&svg,
                          "<line x1='%g' x2='%g' y1='%.1f' y2='%.1f'/>"
                          "<text x='%g' y='%.1f' text-anchor='end'>%.4g</text>",
                          kLeft, kLeft + kWidth, y(value), y(value), kLeft - 6, y(value) + 4,
                          value);
  }
  for (const double step : {steps.low, steps.high}) {
    absl::StrAppendFormat(&svg, "<text x='%.1f' y='%g' text-anchor='middle'>%g</text>", x(step),
                          kTop + kHeight + 18, std::round(step));
  }
  absl::StrAppend(&svg, "<polyline points='", line, "'/>", dots, "</svg></figure>\n");
  return svg;
}

std::string SummaryTable(Files& files, const std::string& path) {
  const auto text = files.ReadAll(path);
  const Json summary =
      text.ok() ? Json::parse(*text, nullptr, /*allow_exceptions=*/false) : Json(nullptr);
  if (!summary.is_object()) return "<p>The run has not ended yet.</p>\n";
  std::string table = "<table>\n";
  for (const auto& [key, value] : summary.items()) {
    if (value.is_structured()) continue;
    const std::string shown = value.is_string() ? value.get<std::string>() : value.dump();
    absl::StrAppend(&table, "<tr><th>", Escape(key), "</th><td>", Escape(shown), "</td></tr>\n");
  }
  return table + "</table>\n";
}

constexpr char kStyle[] =
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;"
    "color:#1c2126;background:#fff}"
    "main{display:grid;grid-template-columns:repeat(auto-fill,minmax(21rem,1fr));gap:1rem}"
    "figure{margin:0;padding:.75rem;border:1px solid #dde2e7;border-radius:8px}"
    "figcaption{margin-bottom:.4rem}figcaption b{float:right;font-weight:600}"
    "svg{width:100%;height:auto}svg text{font-size:11px;fill:#5c6770}svg line{stroke:#e8ecef}"
    "polyline{fill:none;stroke:#1a6fb5;stroke-width:1.8}circle{fill:#1a6fb5;opacity:0}"
    "circle:hover{opacity:1}table{border-collapse:collapse;margin:1rem 0}"
    "th{text-align:left;font-weight:500;padding:.15rem 1.5rem .15rem 0;color:#5c6770}"
    "td{font-variant-numeric:tabular-nums}"
    "@media(prefers-color-scheme:dark){body{background:#14181c;color:#e4e8eb}"
    "figure{border-color:#2c343b}svg line{stroke:#242b31}svg text,th{fill:#9aa5ae;color:#9aa5ae}"
    "polyline{stroke:#5aa9e6}circle{fill:#5aa9e6}}";
}  // namespace

absl::StatusOr<std::string> RenderHtmlReport(Files& files, const std::string& run_dir) {
  ASSIGN_OR_RETURN(auto series, ReadSeries(files, JoinPath(run_dir, "metrics.jsonl")));
  if (series.empty()) return absl::NotFoundError(absl::StrCat(run_dir, ": no step has ended yet"));
  const std::string name = run_dir.substr(run_dir.find_last_of('/', run_dir.size() - 2) + 1);
  std::string page = absl::StrCat(
      "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
      "<meta name='viewport' content='width=device-width'><title>Stretto: ",
      Escape(name), "</title><style>", kStyle, "</style></head><body>\n<h1>", Escape(name),
      "</h1>\n", SummaryTable(files, JoinPath(run_dir, "summary.json")), "<main>\n");
  for (const auto& [key, title] : kTitles) {
    const auto it = series.find(key);
    if (it == series.end()) continue;
    page += Plot(title, it->second);
    series.erase(it);
  }
  for (const auto& [key, points] : series) page += Plot(key, points);
  return page + "</main></body></html>\n";
}
}  // namespace stretto::cli
