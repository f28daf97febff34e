// Work beside a device's own: a caller that computes for a while in its own thread (a new version's
// preparation) takes a processor away from whoever the device computes for. Where all threads of an
// operation wait for the last one, that stops them all for as long as it lasts. So the caller
// borrows a thread of the device's first, and the rest goes on at its own pace.
#pragma once

#include <memory>

#include "engine/device/device.h"

namespace stretto::engine {
class LendsThreads {
 public:
  virtual ~LendsThreads() = default;
  // See below.
  virtual std::shared_ptr<void> LendThread() = 0;
};

// As long as what is returned lives, operations of `device` compute with one thread less. Null
// where the device has no threads of its own. Changes no bit. Thread-safe.
inline std::shared_ptr<void> BorrowThread(Device& device) {
  auto* lender = dynamic_cast<LendsThreads*>(&device);
  return lender != nullptr ? lender->LendThread() : nullptr;
}
}  // namespace stretto::engine
