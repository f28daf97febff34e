// Memory for the tensors of versions, which come and go by the hundred megabyte with every step:
// what one version has left is handed to the next. Fresh memory would cost a page fault for every 4
// KiB, several times what filling it costs. No more is kept than is in use. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace stretto {
// Contents undefined. Whoever lets the last copy go gives the memory back.
std::shared_ptr<uint8_t> TakeBytes(size_t size);

// Bytes that are kept for the next ones.
size_t NumSpareBytes();
}  // namespace stretto
