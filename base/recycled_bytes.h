// Memory for the tensors of versions, which come and go by the hundred megabyte with every step:
// what one version has left is handed to the next. Fresh memory would cost a page fault for every 4
// KiB, several times what filling it costs. No more is kept than is in use, or was reserved.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace stretto {
// Contents undefined. Whoever lets the last copy go gives the memory back.
std::shared_ptr<uint8_t> TakeBytes(size_t size);

// Makes as much memory as versions of these sizes take ready to be taken, pages and all, before
// there is one: the first ones then come as fast as those that follow. It is kept until then. Ends
// early when `stop` becomes true.
void ReserveBytes(const std::vector<size_t>& sizes, const std::atomic<bool>& stop);

// Bytes that are kept for the next ones.
size_t NumSpareBytes();
}  // namespace stretto
