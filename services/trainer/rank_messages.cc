#include "services/trainer/rank_messages.h"

#include <cstring>
#include <map>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/collectives/agree.h"
#include "engine/collectives/socket.h"

namespace stretto::services {
namespace {
using engine::Communicator;
using engine::MessageReader;
using engine::MessageWriter;

// Ranks run the same program (they have to, for equal bits), so structs are sent as they are.
static_assert(std::is_trivially_copyable_v<rl::LossSums>);

void Write(MessageWriter& w, const SequenceSums& sequence) {
  w.Add(sequence.ref.group);
  w.Add(sequence.ref.completion);
  w.Add(absl::string_view(reinterpret_cast<const char*>(&sequence.sums), sizeof(sequence.sums)));
}

bool Read(MessageReader& r, SequenceSums& sequence) {
  sequence.ref.group = r.Integer();
  sequence.ref.completion = r.Integer();
  const std::string bytes = r.String();
  if (bytes.size() != sizeof(sequence.sums)) return false;
  std::memcpy(&sequence.sums, bytes.data(), bytes.size());
  return true;
}

std::string ToText(const StepSums& sums) {
  MessageWriter w;
  w.Add(static_cast<int64_t>(sums.refused.status.code()));
  w.Add(absl::string_view(sums.refused.status.message()));
  w.Add(sums.refused.ref.group);
  w.Add(sums.refused.ref.completion);
  w.Add(static_cast<int64_t>(sums.sequences.size()));
  for (const SequenceSums& sequence : sums.sequences) Write(w, sequence);
  return w.text();
}

bool FromText(const std::string& text, StepSums& sums) {
  MessageReader r(text);
  const auto code = static_cast<absl::StatusCode>(r.Integer());
  sums.refused.status = absl::Status(code, r.String());
  sums.refused.ref.group = r.Integer();
  sums.refused.ref.completion = r.Integer();
  const int64_t count = r.Integer();
  for (int64_t i = 0; i < count; ++i) {
    SequenceSums sequence;
    if (!Read(r, sequence)) return false;
    sums.sequences.push_back(sequence);
  }
  return r.ok();
}
}  // namespace

absl::StatusOr<StepSums> GatherSums(Communicator& group, const StepSums& mine,
                                    const std::vector<engine::CompletionRef>& order) {
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(group, ToText(mine)));
  std::map<std::pair<int64_t, int64_t>, SequenceSums> by_ref;
  std::map<std::pair<int64_t, int64_t>, absl::Status> refused;
  for (size_t r = 0; r < texts.size(); ++r) {
    StepSums sums;
    if (!FromText(texts[r], sums)) {
      return absl::DataLossError(absl::StrCat(group.group().Describe(static_cast<int>(r)),
                                              " sent damaged sums of a step"));
    }
    for (const SequenceSums& s : sums.sequences) by_ref[{s.ref.group, s.ref.completion}] = s;
    const engine::CompletionRef ref = sums.refused.ref;
    if (!sums.refused.status.ok()) refused[{ref.group, ref.completion}] = sums.refused.status;
  }
  StepSums joined;
  for (const engine::CompletionRef& ref : order) {
    const auto sequence = by_ref.find({ref.group, ref.completion});
    if (sequence != by_ref.end()) joined.sequences.push_back(sequence->second);
    const auto error = refused.find({ref.group, ref.completion});
    if (error != refused.end() && joined.refused.status.ok()) joined.refused = {ref, error->second};
  }
  return joined;
}
}  // namespace stretto::services
