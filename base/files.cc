#include "base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/last_words.h"
#include "base/status.h"

namespace stretto {
namespace {
namespace fs = std::filesystem;

absl::Status SystemError(absl::string_view what, const std::string& path, int error) {
  const std::string message = absl::StrCat(what, " ", path, ": ", std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(message);
  if (error == ENOSPC || error == EDQUOT || error == EMFILE) {
    return absl::ResourceExhaustedError(message);
  }
  if (error == EACCES || error == EPERM || error == EROFS) {
    return absl::PermissionDeniedError(message);
  }
  return absl::UnavailableError(message);
}

const char* KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

// What is no regular file and ends all the same.
bool MayBeRead(const std::string& path, int fd, mode_t mode) {
  if (path == "/dev/null") return true;
  const bool is_open_already = path == "/dev/stdin" || absl::StartsWith(path, "/dev/fd/") ||
                               absl::StartsWith(path, "/proc/self/fd/");
  return is_open_already && (S_ISFIFO(mode) || ::isatty(fd) != 0);
}

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  ~PosixWritableFile() override {
    if (fd_ >= 0) ::close(fd_);
  }
  absl::Status Append(absl::Span<const uint8_t> bytes) override {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
      if (n < 0) {
        if (errno == EINTR) continue;
        return SystemError("cannot write", path_, errno);
      }
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }
  absl::Status Sync() override {
    if (::fsync(fd_) != 0) return SystemError("cannot sync", path_, errno);
    return absl::OkStatus();
  }
  absl::Status Close() override {
    const int fd = std::exchange(fd_, -1);
    if (fd >= 0 && ::close(fd) != 0) return SystemError("cannot close", path_, errno);
    return absl::OkStatus();
  }

 private:
  std::string path_;
  int fd_;
};

class PosixFiles final : public Files {
 public:
  absl::StatusOr<std::string> ReadAll(const std::string& path) override {
    ASSIGN_OR_RETURN(const int fd, OpenForReading(path));
    std::string content;
    char chunk[1 << 16];
    for (;;) {
      const ssize_t n = ::read(fd, chunk, sizeof chunk);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        const int error = errno;
        ::close(fd);
        return SystemError("cannot read", path, error);
      }
      if (n == 0) break;
      content.append(chunk, static_cast<size_t>(n));
    }
    ::close(fd);
    return content;
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return SystemError("cannot create", path, errno);
    return std::make_unique<PosixWritableFile>(path, fd);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return SystemError("cannot rename to", to, errno);
    std::string parent = fs::path(to).parent_path().string();
    if (parent.empty()) parent = ".";
    const int fd = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return SystemError("cannot open folder", parent, errno);
    const int result = ::fsync(fd);
    const int error = errno;
    ::close(fd);
    if (result != 0) return SystemError("cannot sync folder", parent, error);
    return absl::OkStatus();
  }
  absl::Status RemoveAll(const std::string& path) override {
    std::error_code ec;
    fs::remove_all(path, ec);
    return ec ? SystemError("cannot remove", path, ec.value()) : absl::OkStatus();
  }
  absl::Status MakeDirs(const std::string& path) override {
    std::error_code ec;
    fs::create_directories(path, ec);
    return ec ? SystemError("cannot create folder", path, ec.value()) : absl::OkStatus();
  }
  bool Exists(const std::string& path) override {
    std::error_code ec;
    return fs::symlink_status(path, ec).type() != fs::file_type::not_found;
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    std::error_code ec;
    std::vector<std::string> names;
    fs::directory_iterator it(path, ec);
    if (ec) return SystemError("cannot list", path, ec.value());
    for (; it != fs::directory_iterator(); it.increment(ec)) {
      if (ec) return SystemError("cannot list", path, ec.value());
      names.push_back(it->path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
};
}  // namespace

absl::StatusOr<int> OpenForReading(const std::string& path) {
  // Without O_NONBLOCK opening a pipe waits for whoever writes to it.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return SystemError("cannot open", path, errno);
  struct stat info {};
  absl::Status status;
  if (::fstat(fd, &info) != 0) {
    status = SystemError("cannot look at", path, errno);
  } else if (!S_ISREG(info.st_mode) && !MayBeRead(path, fd, info.st_mode)) {
    status = absl::InvalidArgumentError(
        absl::StrCat(path, ": is ", KindOf(info.st_mode), ", expected a file"));
  } else if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK) != 0) {
    status = SystemError("cannot open", path, errno);
  }
  if (status.ok()) return fd;
  ::close(fd);
  return status;
}

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  ASSIGN_OR_RETURN(const int fd, OpenForReading(path));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, ": is no file that can be mapped"));
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* data = nullptr;
  if (size > 0) {
    data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      return SystemError("cannot map", path, error);
    }
  }
  ::close(fd);
  std::shared_ptr<const MappedFile> file(
      new MappedFile(path, static_cast<const uint8_t*>(data), size));
  if (data != nullptr) NoteMapping(data, size, file->path_.c_str());
  return file;
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  ForgetMapping(data_);
  ::munmap(const_cast<uint8_t*>(data_), size_);
}

void MappedFile::LetPagesGo() const {
  if (data_ != nullptr) ::madvise(const_cast<uint8_t*>(data_), size_, MADV_DONTNEED);
}

absl::Status Files::WriteAtomically(const std::string& path, absl::string_view content) {
  const std::string temporary = absl::StrCat(path, ".tmp.", ::getpid());
  ASSIGN_OR_RETURN(auto file, Create(temporary));
  absl::Status status = file->Append(AsBytes(content));
  if (status.ok()) status = file->Sync();
  if (status.ok()) status = file->Close();
  if (status.ok()) status = Rename(temporary, path);
  if (!status.ok()) (void)RemoveAll(temporary);
  return status;
}

Files& Files::Real() {
  static PosixFiles* files = new PosixFiles;
  return *files;
}

std::string JoinPath(absl::string_view folder, absl::string_view name) {
  if (folder.empty()) return std::string(name);
  return absl::StrCat(folder, folder.back() == '/' ? "" : "/", name);
}
}  // namespace stretto
