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

using Processors = std::vector<int>;

TEST_CASE("lists of processors, as the kernel writes them") {
  for (const auto& [text, list] : std::vector<std::pair<std::string, Processors>>{
           {"0-3,8\n", {0, 1, 2, 3, 8}}, {"5", {5}}, {"\n", {}}, {"0,2-3,5-5", {0, 2, 3, 5}}}) {
    const auto parsed = ParseProcessorList(text);
    REQUIRE_OK(parsed);
    CHECK(*parsed == list);
    const auto again = ParseProcessorList(FormatProcessorList(list));
    REQUIRE_OK(again);
    CHECK(*again == list);
  }
  CHECK(FormatProcessorList({0, 1, 2, 3, 8}) == "0-3,8");
  for (const char* bad : {"a", "1-", "-1", "3-1", "1-2-3", "0-99999999"}) {
    CHECK(absl::IsInvalidArgument(ParseProcessorList(bad).status()));
  }
}

TEST_CASE("memory nodes, cut to the processors that are allowed") {
  Kernel kernel;
  const auto nodes = [&](const Processors& allowed) {
    return MemoryNodes(Files::Real(), allowed, kernel.folder.path());
  };
  // No nodes are told of.
  REQUIRE(nodes({0, 1}).size() == 1);
  CHECK(nodes({0, 1})[0].processors == Processors{0, 1});
  kernel.Write("/sys/devices/system/node/node0/cpulist", "0-1,4-5\n");
  kernel.Write("/sys/devices/system/node/node1/cpulist", "2-3,6-7\n");
  kernel.Write("/sys/devices/system/node/node10/cpulist", "8\n");
  kernel.Write("/sys/devices/system/node/node2/cpulist", "\n");  // memory alone
  kernel.Write("/sys/devices/system/node/possible", "0-10\n");
  const auto all = nodes({0, 1, 2, 3, 4, 5, 6, 7, 8});
  REQUIRE(all.size() == 3);
  CHECK((all[0].id == 0 && all[0].processors == Processors{0, 1, 4, 5}));
  CHECK((all[1].id == 1 && all[1].processors == Processors{2, 3, 6, 7}));
  CHECK((all[2].id == 10 && all[2].processors == Processors{8}));
  const auto some = nodes({1, 2});
  REQUIRE(some.size() == 2);
  CHECK(some[1].processors == Processors{2});
  CHECK(nodes({4, 5}).size() == 1);
  // A processor of no node: the picture isn't whole.
  CHECK(nodes({0, 2, 99}).size() == 1);
}

TEST_CASE("members share processors: each apart, in the fewest nodes") {
  const std::vector<MemoryNode> nodes = {{0, {0, 1, 2, 3}}, {1, {4, 5, 6, 7}}};
  const auto share = [&](const std::vector<int>& counts) {
    std::vector<std::string> texts;
    for (const auto& member : ShareProcessors(nodes, counts)) {
      std::string text;
      for (const MemoryNode& node : member) {
        absl::StrAppend(&text, text.empty() ? "" : " ", node.id, ":",
                        FormatProcessorList(node.processors));
      }
      texts.push_back(text);
    }
    return texts;
  };
  using Texts = std::vector<std::string>;
  CHECK(share({4, 4}) == Texts{"0:0-3", "1:4-7"});
  CHECK(share({2, 4, 2}) == Texts{"1:4-5", "0:0-3", "1:6-7"});
  CHECK(share({3, 3, 1, 1}) == Texts{"0:0-2", "1:4-6", "0:3", "1:7"});
  CHECK(share({6, 2}) == Texts{"0:0-3 1:4-5", "1:6-7"});
  CHECK(share({1}) == Texts{"0:0"});
  CHECK(share({0, 2}) == Texts{"", "0:0-1"});
  CHECK(share({5, 4}).empty());
  CHECK(share({3, 3, 2}) == Texts{"0:0-2", "1:4-6", "0:3 1:7"});
}

TEST_CASE("this thread may run somewhere, on processors of some node") {
  const Processors allowed = AllowedProcessors();
  REQUIRE(!allowed.empty());
  size_t count = 0;
  for (const MemoryNode& node : MemoryNodes(Files::Real(), allowed)) {
    count += node.processors.size();
  }
  CHECK(count == allowed.size());
}
}  // namespace
}  // namespace stretto
