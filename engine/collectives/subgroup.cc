#include "engine/collectives/subgroup.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr size_t kAddressBytes = 256;

// The host that others reach this member at.
std::string HostOf(const std::string& address) { return address.substr(0, address.rfind(':')); }
}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> JoinSubgroup(Communicator& world,
                                                           const std::string& name,
                                                           const std::vector<int>& ranks,
                                                           const CommunicatorOptions& options) {
  const auto me = std::find(ranks.begin(), ranks.end(), world.rank());
  STRETTO_CHECK(me != ranks.end() && std::is_sorted(ranks.begin(), ranks.end()));
  // A member that can't listen says so, rather than leave the others waiting.
  auto listener = Listener::Open(HostOf(world.group().members[world.rank()].address));
  std::string mine = listener.ok() ? listener->address() : std::string();
  STRETTO_CHECK(mine.size() < kAddressBytes);
  mine.resize(kAddressBytes, '\0');
  std::string all(kAddressBytes * static_cast<size_t>(world.size()), '\0');
  RETURN_IF_ERROR(world.AllGather({reinterpret_cast<const uint8_t*>(mine.data()), mine.size()},
                                  {reinterpret_cast<uint8_t*>(all.data()), all.size()}));
  RETURN_IF_ERROR(listener.status());
  GroupTable group{absl::StrCat(world.group().group, "/", name), world.group().epoch, {}};
  for (const int rank : ranks) {
    const std::string address = all.c_str() + kAddressBytes * static_cast<size_t>(rank);
    if (address.empty()) {
      return absl::UnavailableError(
          absl::StrCat(world.group().Describe(rank), " can't listen for group ", group.group));
    }
    group.members.push_back({world.group().members[rank].name, address});
  }
  // Whoever ends the world ends the wait for a member that has gone meanwhile.
  CommunicatorOptions in_world = options;
  if (in_world.carrier == nullptr) in_world.carrier = world.carrier();
  in_world.is_cancelled = [&world] { return !world.status().ok(); };
  return ConnectGroup(*std::move(listener), group, static_cast<int>(me - ranks.begin()), in_world);
}
}  // namespace stretto::engine
