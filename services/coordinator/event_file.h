// TensorBoard event files: TFRecord framing (length, masked CRC-32C, bytes, masked CRC-32C; all
// little-endian) around tensorflow.Event messages with scalar summaries. The format is TensorFlow's
// (tensorflow/core/lib/io/record_writer.h, core/util/event.proto, core/framework/summary.proto).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/files.h"

namespace stretto::services {
// Not thread-safe.
class EventFile {
 public:
  // Creates `<folder>/events.out.tfevents.<seconds>.<suffix>`; the folder is made.
  static absl::StatusOr<std::unique_ptr<EventFile>> Create(Files& files, const std::string& folder,
                                                           int64_t wall_us,
                                                           const std::string& suffix);
  absl::Status AddScalars(int64_t step, int64_t wall_us,
                          const std::map<std::string, double>& scalars);

 private:
  explicit EventFile(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}
  absl::Status WriteRecord(const std::string& bytes);
  std::unique_ptr<WritableFile> file_;
};

// CRC-32C (Castagnoli), and TensorFlow's masking of it.
uint32_t Crc32c(absl::string_view bytes);
uint32_t MaskedCrc32c(absl::string_view bytes);
}  // namespace stretto::services
