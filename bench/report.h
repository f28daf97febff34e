// What the benchmarks share: timing, and a report of named figures printed as a table and written
// as JSON {machine, figures: [{name, value, unit, target, met}]} into build/bench.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace stretto::bench {
inline double SecondsNow() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Median seconds of one call of fn: at least `min_samples` samples, each of as many calls as take
// `sample_seconds`, after one call to warm up.
template <class Fn>
double MedianSeconds(const Fn& fn, int min_samples = 5, double sample_seconds = 0.02) {
  double start = SecondsNow();
  fn();
  const double once = std::max(1e-7, SecondsNow() - start);
  const auto calls = static_cast<int64_t>(std::max(1.0, sample_seconds / once));
  std::vector<double> samples;
  for (int i = 0; i < min_samples; ++i) {
    start = SecondsNow();
    for (int64_t c = 0; c < calls; ++c) fn();
    samples.push_back((SecondsNow() - start) / static_cast<double>(calls));
  }
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

// The processor's name and the number of logical processors.
inline std::string MachineName() {
  std::ifstream info("/proc/cpuinfo");
  std::string line, name = "unknown processor";
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) == 0) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  }
  return name + ", " + std::to_string(std::thread::hardware_concurrency()) + " processors";
}

class Report {
 public:
  explicit Report(std::string name) : name_(std::move(name)) {
    std::printf("%s\n%s\n", name_.c_str(), MachineName().c_str());
  }

  // `target`: the figure is met when value >= target (or <= for `smaller_is_better`).
  void Add(const std::string& figure, double value, const std::string& unit,
           std::optional<double> target = std::nullopt, bool smaller_is_better = false) {
    nlohmann::json entry = {{"name", figure}, {"value", value}, {"unit", unit}};
    std::string verdict;
    if (target) {
      const bool met = smaller_is_better ? value <= *target : value >= *target;
      entry["target"] = *target;
      entry["met"] = met;
      char text[64];
      std::snprintf(text, sizeof(text), "  target %.4g: %s", *target, met ? "met" : "missed");
      verdict = text;
    } else {
      entry["target"] = nullptr;
      entry["met"] = nullptr;
    }
    figures_.push_back(std::move(entry));
    std::printf("  %-58s %12.4g %-10s%s\n", figure.c_str(), value, unit.c_str(), verdict.c_str());
    std::fflush(stdout);
  }

  // Writes folder/NAME.json. False when the file cannot be written.
  bool Write(const std::string& folder = "build/bench") const {
    std::error_code ec;
    std::filesystem::create_directories(folder, ec);
    std::ofstream out(folder + "/" + name_ + ".json");
    out << nlohmann::json({{"machine", MachineName()}, {"figures", figures_}}).dump(2) << "\n";
    out.close();
    if (!out) std::fprintf(stderr, "cannot write %s/%s.json\n", folder.c_str(), name_.c_str());
    return static_cast<bool>(out);
  }

 private:
  std::string name_;
  std::vector<nlohmann::json> figures_;
};
}  // namespace stretto::bench
