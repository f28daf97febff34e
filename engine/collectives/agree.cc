#include "engine/collectives/agree.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/collectives/socket.h"

namespace stretto::engine {
absl::StatusOr<std::vector<std::string>> GatherTexts(Communicator& group, const std::string& mine) {
  std::vector<int64_t> sizes(group.size());
  const auto size = static_cast<int64_t>(mine.size());
  RETURN_IF_ERROR(
      group.AllGather({reinterpret_cast<const uint8_t*>(&size), sizeof(size)},
                      {reinterpret_cast<uint8_t*>(sizes.data()), sizes.size() * sizeof(int64_t)}));
  int64_t total = 0;
  for (const int64_t s : sizes) total += s;
  std::string all(static_cast<size_t>(total), '\0');
  CollectiveCall call;
  call.kind = CollectiveKind::kAllGather;
  call.counts = sizes;
  call.num_elements = size;
  call.input = mine.data();
  call.output = all.data();
  RETURN_IF_ERROR(group.Start(std::move(call)).Wait());
  std::vector<std::string> texts;
  size_t begin = 0;
  for (const int64_t s : sizes) {
    texts.push_back(all.substr(begin, static_cast<size_t>(s)));
    begin += static_cast<size_t>(s);
  }
  return texts;
}

absl::Status AgreeOnStatus(Communicator& group, const absl::Status& mine) {
  MessageWriter w;
  w.Add(static_cast<int64_t>(mine.code()));
  w.Add(absl::string_view(mine.message()));
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(group, w.text()));
  for (size_t r = 0; r < texts.size(); ++r) {
    MessageReader reader(texts[r]);
    const auto code = static_cast<absl::StatusCode>(reader.Integer());
    const std::string message = reader.String();
    if (code == absl::StatusCode::kOk) continue;
    return absl::Status(code,
                        absl::StrCat(group.group().Describe(static_cast<int>(r)), ": ", message));
  }
  return absl::OkStatus();
}

}  // namespace stretto::engine
