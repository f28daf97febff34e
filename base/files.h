// Files behind an interface, so that full disks, torn writes and lost syncs can be simulated.
// Every message names the path and the system's reason. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace stretto {
// Opens a file for reading; the caller closes the descriptor. Folders, devices, sockets and pipes,
// which might never end or have no writer, are refused by their name: InvalidArgument. But for
// /dev/null, which is empty, and a pipe or terminal that is open already: /dev/stdin and /dev/fd/N,
// as shells pass `<(command)`.
absl::StatusOr<int> OpenForReading(const std::string& path);

// A read-only memory-mapped file. The bytes live as long as the object.
class MappedFile {
 public:
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  absl::Span<const uint8_t> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  // Pages read so far no longer count as this process's memory; they come back as they are read.
  void LetPagesGo() const;

 private:
  MappedFile(std::string path, const uint8_t* data, size_t size)
      : path_(std::move(path)), data_(data), size_(size) {}
  std::string path_;
  const uint8_t* data_;
  size_t size_;
};

// An append-only file under construction. Close() or the destructor closes it.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  virtual absl::Status Append(absl::Span<const uint8_t> bytes) = 0;
  virtual absl::Status Sync() = 0;
  virtual absl::Status Close() = 0;
};

class Files {
 public:
  virtual ~Files() = default;
  virtual absl::StatusOr<std::string> ReadAll(const std::string& path) = 0;
  // Creates or truncates.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // Atomic replacement; on success the parent folder is synced too.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status RemoveAll(const std::string& path) = 0;
  virtual absl::Status MakeDirs(const std::string& path) = 0;
  virtual bool Exists(const std::string& path) = 0;
  // Names (not paths) in a folder, sorted.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path) = 0;

  // Writes a temporary file beside `path`, syncs it, renames it over `path`: readers see the old or
  // the new content, never a part.
  absl::Status WriteAtomically(const std::string& path, absl::string_view content);
  // The machine's own file system; never destroyed.
  static Files& Real();
};

inline absl::Span<const uint8_t> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}
std::string JoinPath(absl::string_view folder, absl::string_view name);
}  // namespace stretto
