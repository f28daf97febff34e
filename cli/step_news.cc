#include "cli/step_news.h"

#include <sys/stat.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

namespace stretto::cli {
namespace {
std::optional<StepNews> Parse(const std::string& line) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) {
    return std::nullopt;
  }
  StepNews news{.step = json["step"].get<int64_t>(), .reward = {}, .metrics = {}};
  news.is_evaluation = json.contains("eval") && json["eval"].is_number();
  if (news.is_evaluation) {
    news.accuracy = json["eval"].get<double>();
    if (json.contains("eval_reward") && json["eval_reward"].is_number()) {
      news.reward = json["eval_reward"].get<double>();
    }
    return news;
  }
  news.was_skipped = json.contains("skip_reason");
  for (const auto& [name, value] : json.items()) {
    if (value.is_number()) news.metrics[name] = value.get<double>();
  }
  return news;
}
}  // namespace

std::vector<StepNews> MetricsReader::Read(bool* is_there) {
  struct stat info {};
  *is_there = ::stat(path_.c_str(), &info) == 0;
  if (!*is_there) return {};
  const auto size = static_cast<size_t>(info.st_size);
  if (info.st_ino != inode_ || size < offset_) offset_ = 0;
  inode_ = info.st_ino;
  std::vector<StepNews> all;
  if (size == offset_) return all;
  std::ifstream file(path_, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset_));
  std::string line;
  while (std::getline(file, line) && !file.eof()) {  // the last one may still be written
    auto news = Parse(line);
    if (!news.has_value()) {
      // Not where a line begins: the file was written anew and has become longer since.
      offset_ = 0;
      return all;
    }
    offset_ += line.size() + 1;
    all.push_back(*std::move(news));
  }
  return all;
}
}  // namespace stretto::cli
