#include "services/trainer/group_seat.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::services {
void GroupSeat::SetHost(std::string host) {
  absl::MutexLock lock(&mutex_);
  host_ = std::move(host);
}

absl::StatusOr<std::string> GroupSeat::Prepare(uint64_t epoch) {
  absl::MutexLock lock(&mutex_);
  if (epoch < epoch_ || (epoch == epoch_ && !listener_.has_value())) {
    return absl::FailedPreconditionError(
        absl::StrCat("group epoch ", epoch, " is over here; the present one is ", epoch_));
  }
  if (epoch == epoch_) return address_;
  if (group_ != nullptr) group_->Abort(absl::StrCat("group epoch ", epoch, " is being formed"));
  group_ = nullptr;
  ASSIGN_OR_RETURN(listener_, engine::Listener::Open(bind_));
  epoch_ = epoch;
  address_ = listener_->address();
  if (!host_.empty()) {
    address_ = absl::StrCat(host_, address_.substr(address_.rfind(':')));
  }
  return address_;
}

absl::StatusOr<std::shared_ptr<engine::Communicator>> GroupSeat::Join(
    const engine::GroupTable& table, int rank, absl::Duration timeout) {
  absl::optional<engine::Listener> listener;
  {
    absl::MutexLock lock(&mutex_);
    if (static_cast<uint64_t>(table.epoch) != epoch_ || !listener_.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "group epoch ", table.epoch, " is not prepared here; the present one is ", epoch_));
    }
    listener = std::move(listener_);
    listener_.reset();
  }
  // A peer may have gone since it was prepared: the next group's preparation ends this one's
  // making.
  const auto is_over = [this, epoch = static_cast<uint64_t>(table.epoch)] {
    absl::MutexLock lock(&mutex_);
    return epoch_ != epoch;
  };
  ASSIGN_OR_RETURN(std::unique_ptr<engine::Communicator> connected,
                   engine::ConnectGroup(*std::move(listener), table, rank,
                                        {.timeout = timeout,
                                         .connect_timeout = timeout,
                                         .is_cancelled = is_over,
                                         .carrier = carrier_}));
  std::shared_ptr<engine::Communicator> group = std::move(connected);
  absl::MutexLock lock(&mutex_);
  if (static_cast<uint64_t>(table.epoch) != epoch_) {
    group->Abort(absl::StrCat("group epoch ", epoch_, " is being formed"));
    return group->status();
  }
  group_ = group;
  return group;
}

void GroupSeat::Leave() {
  absl::MutexLock lock(&mutex_);
  if (group_ != nullptr) group_->Abort("its process ends");
  epoch_ = UINT64_MAX;
}
}  // namespace stretto::services
