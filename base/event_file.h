// TensorBoard event files: scalars over steps. The format (tensorflow/core/lib/io/record_writer.h
// and core/util/event.proto): records of length, masked CRC-32C of the length, an Event message,
// masked CRC-32C of the message. Only the needed fields are encoded, by hand, so that nothing of
// TensorFlow is needed. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/files.h"

namespace stretto {
class EventFile {
 public:
  // Creates <folder>/events.out.tfevents.<seconds>.<suffix>, a new file for every start of a run,
  // as TensorBoard expects. `files` and `clock` outlive the object.
  static absl::StatusOr<std::unique_ptr<EventFile>> Create(Files& files, Clock& clock,
                                                           const std::string& folder,
                                                           const std::string& suffix);
  // One event with a scalar for each entry. Non-finite values are written as they are.
  absl::Status AddScalars(int64_t step, const std::map<std::string, double>& scalars);
  const std::string& path() const { return path_; }

 private:
  EventFile(Clock& clock, std::string path, std::unique_ptr<WritableFile> file)
      : clock_(clock), path_(std::move(path)), file_(std::move(file)) {}
  absl::Status WriteRecord(const std::string& event);

  Clock& clock_;
  std::string path_;
  std::unique_ptr<WritableFile> file_;
};

// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78).
uint32_t Crc32c(absl::Span<const uint8_t> bytes);
}  // namespace stretto
