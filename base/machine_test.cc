#include "base/machine.h"

#include <catch2/catch.hpp>

#include "base/testing.h"

namespace stretto {
namespace {
constexpr int64_t kGiB = int64_t{1} << 30;

// A file system of its own with 16 GiB in /proc/meminfo.
struct Kernel {
  Kernel() {
    Write("/proc/meminfo", "MemFree:  7 kB\nMemTotal:       16777216 kB\nBuffers: 1 kB\n");
  }
  void Write(const std::string& path, const std::string& text) {
    const std::string file = folder.path() + path;
    REQUIRE_OK(Files::Real().MakeDirs(file.substr(0, file.rfind('/'))));
    REQUIRE_OK(Files::Real().WriteAtomically(file, text));
  }
  int64_t Bytes() {
    const auto bytes = UsableMemoryBytes(Files::Real(), folder.path());
    REQUIRE_OK(bytes);
    return *bytes;
  }
  testing::TempDir folder;
};

TEST_CASE("without limits the machine's memory is there to be used") {
  Kernel kernel;
  CHECK(kernel.Bytes() == 16 * kGiB);
  kernel.Write("/proc/self/cgroup", "0::/user.slice/job\n");
  CHECK(kernel.Bytes() == 16 * kGiB);
  kernel.Write("/sys/fs/cgroup/user.slice/job/memory.max", "max\n");
  CHECK(kernel.Bytes() == 16 * kGiB);
}

TEST_CASE("control groups cut it, the least limit on the way up counts") {
  Kernel kernel;
  kernel.Write("/proc/self/cgroup", "0::/user.slice/job\n");
  kernel.Write("/sys/fs/cgroup/user.slice/memory.max", absl::StrCat(3 * kGiB, "\n"));
  CHECK(kernel.Bytes() == 3 * kGiB);
  kernel.Write("/sys/fs/cgroup/user.slice/job/memory.max", absl::StrCat(5 * kGiB, "\n"));
  CHECK(kernel.Bytes() == 3 * kGiB);
  kernel.Write("/sys/fs/cgroup/user.slice/job/memory.max", absl::StrCat(2 * kGiB, "\n"));
  CHECK(kernel.Bytes() == 2 * kGiB);
  // In a container the group's own folder is the root, whatever its path is called outside.
  kernel.Write("/proc/self/cgroup", "0::/docker/0123\n");
  CHECK(kernel.Bytes() == 16 * kGiB);
  kernel.Write("/sys/fs/cgroup/memory.max", absl::StrCat(kGiB, "\n"));
  CHECK(kernel.Bytes() == kGiB);
}

TEST_CASE("so do those of version 1, where no limit is a number beyond all memory") {
  Kernel kernel;
  kernel.Write("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n");
  kernel.Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(kernel.Bytes() == 16 * kGiB);
  kernel.Write("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", absl::StrCat(4 * kGiB, "\n"));
  CHECK(kernel.Bytes() == 4 * kGiB);
}

TEST_CASE("a machine that says nothing of its memory is an error that names the file") {
  testing::TempDir empty;
  const absl::Status none = UsableMemoryBytes(Files::Real(), empty.path()).status();
  CHECK(std::string(none.message()).find("/proc/meminfo") != std::string::npos);
  Kernel kernel;
  kernel.Write("/proc/meminfo", "MemTotal: much kB\n");
  CHECK(!UsableMemoryBytes(Files::Real(), kernel.folder.path()).ok());
}

TEST_CASE("this machine has memory") {
  const auto bytes = UsableMemoryBytes(Files::Real());
  REQUIRE_OK(bytes);
  CHECK(*bytes > (int64_t{64} << 20));
}
}  // namespace
}  // namespace stretto
