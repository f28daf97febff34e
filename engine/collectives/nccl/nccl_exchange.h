// Frames between ranks through NCCL: for groups in which every rank has a CUDA device of its own.
// The group's TCP connections stay and carry what the ranks agree on (which operation it is, how
// long each frame is), so that silent ranks and those that do something else are named as over TCP;
// only payloads go from device to device. Sums are added where they arrive, in the order of their
// tree: the bits are the same as over TCP.
#pragma once

#include "absl/status/statusor.h"
#include "engine/collectives/communicator.h"

namespace stretto::engine {
// CUDA devices that this process may use (CUDA_VISIBLE_DEVICES counts); 0 without a driver.
int NumNcclDevices();

// For CommunicatorOptions: payloads through NCCL on this device. A group's making fails with
// FAILED_PRECONDITION, naming the rank, where a rank has no such device.
FrameCarrier OverNccl(int device);
}  // namespace stretto::engine
