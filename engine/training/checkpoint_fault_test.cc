// Wherever a save is killed, wherever the disk is full, and whichever byte of a file flips: what is
// loaded is exactly an old state or the new one, and the damaged file is named.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/fault_files.h"
#include "base/testing.h"
#include "engine/training/checkpoint_writer.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)
using stretto::testing::Fault;
using stretto::testing::FaultFiles;
namespace fs = std::filesystem;
constexpr int64_t kLength = 40;
constexpr int kSteps = 4;

// States of a small model after each of a few steps, as engines that stand there.
struct Setup {
  Setup() : random(stretto::testing::Seed(), 50), config(RandomConfig(random)) {
    device = MakeDevice("cpu");
    for (int i = 0; i <= kSteps; ++i) {
      engines.push_back(MakeEngine(*device, config, SmallOptions(kLength), 7));
      for (int j = 0; j < i; ++j) {
        if (static_cast<int>(batches.size()) <= j) {
          batches.push_back(RandomBatch(config, kLength, random));
        }
        STRETTO_CHECK(engines[i]->Step(batches[j], TestObjective()).ok());
      }
      states.push_back(FullState(*engines[i]));
    }
    reader = MakeEngine(*device, config, SmallOptions(kLength), 8);
  }
  CheckpointWriterOptions Options(const std::string& root, int64_t max_chain) {
    CheckpointWriterOptions o;
    o.root = root;
    o.keep = 2;
    o.max_chain = max_chain;
    o.chunk_elements = 64;
    return o;
  }
  // Saves a version's state with a writer of its own, or the given one.
  SaveReport Save(CheckpointWriter& writer, int version) {
    STRETTO_CHECK(writer.Start(*engines[version], Extra(version)).ok());
    return *writer.Wait();
  }
  static std::string Extra(int64_t version) {
    return "{\"step\": " + std::to_string(version) + "}";
  }
  // The version that is loaded; its state must be that version's, to the bit.
  int64_t Load(const std::string& root, std::vector<std::string>* damaged = nullptr) {
    const auto info = LoadNewestCheckpoint(
        Files::Real(), root, *reader, [&](const std::string& folder, const absl::Status& why) {
          INFO(why.ToString());
          CHECK(absl::StrContains(why.message(), folder.substr(0, folder.rfind('/'))));
          if (damaged != nullptr) damaged->push_back(std::string(why.message()));
        });
    REQUIRE_OK(info);
    const int64_t version = info->counters.version;
    CHECK(info->extra_json == Extra(version));
    CHECK(reader->version() == version);
    CHECK(SameBits(FullState(*reader), states[version]));
    return version;
  }

  PhiloxStream random;
  ModelConfig config;
  std::unique_ptr<Device> device;
  std::vector<TrainBatch> batches;
  std::vector<std::unique_ptr<TrainerEngine>> engines;
  std::vector<std::vector<float>> states;
  std::unique_ptr<TrainerEngine> reader;
  stretto::testing::TempDir dir;
};

// Saves versions 1 to `last` into a fresh folder, all well.
void SaveUpTo(Setup& s, const std::string& root, int last, int64_t max_chain) {
  CheckpointWriter writer(Files::Real(), s.Options(root, max_chain));
  for (int v = 1; v <= last; ++v) REQUIRE_OK(s.Save(writer, v).status);
}

// Saves versions 3 and 4 where 1 and 2 lie, with a fault; what is loaded then.
void SaveWithFault(Setup& s, Fault fault, int64_t at, int64_t max_chain, bool& came) {
  const std::string root = s.dir.File("root");
  fs::remove_all(root);
  fs::copy(s.dir.File("start"), root, fs::copy_options::recursive);
  FaultFiles files(fault, at, stretto::testing::Seed());
  INFO("seed " << stretto::testing::Seed() << ", fault " << static_cast<int>(fault)
               << " at operation " << at << ", chain " << max_chain);
  int64_t saved = 2;
  {
    CheckpointWriter writer(files, s.Options(root, max_chain));
    for (const int v : {3, 4}) {
      const SaveReport report = s.Save(writer, v);
      if (report.status.ok()) saved = v;
      if (!report.status.ok()) CHECK(absl::StrContains(report.status.message(), "version"));
      if (!report.status.ok() && fault != Fault::kOnce) break;
    }
  }
  came = files.failed();
  files.Crash();
  const int64_t loaded = s.Load(root);
  CHECK(loaded >= saved);  // what was called durable is there
  // And the next save is a save like any other.
  CheckpointWriter writer(Files::Real(), s.Options(root, max_chain));
  REQUIRE_OK(s.Save(writer, 4).status);
  CHECK(s.Load(root) == 4);
  const auto names = Files::Real().List(root);
  REQUIRE_OK(names);
  for (const std::string& name : *names) {
    CHECK((name == "latest" || name.find('.') == std::string::npos));
  }
}

TEST_CASE("a save that is killed, or whose disk is full, leaves an old state or the new one") {
  Setup s;
  for (const int64_t max_chain : {0, 2}) {
    fs::remove_all(s.dir.File("start"));
    SaveUpTo(s, s.dir.File("start"), 2, max_chain);
    for (const Fault fault : {Fault::kOnce, Fault::kDiskFull, Fault::kKilled, Fault::kPowerLoss}) {
      bool came = true;
      int64_t num_faults = 0;
      // Every operation of the first ones, of which each follows another kind; then some.
      for (int64_t at = 0; came; at += 1 + at / 12) {
        SaveWithFault(s, fault, at, max_chain, came);
        ++num_faults;
      }
      CHECK(num_faults > 20);
    }
  }
}

// All files under a folder.
std::vector<std::string> FilesUnder(const std::string& root) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST_CASE("whichever byte flips, the state is exact or the damaged file is named") {
  Setup s;
  INFO("seed " << stretto::testing::Seed());
  for (const int64_t max_chain : {0, 1}) {
    const std::string root = s.dir.File("flips" + std::to_string(max_chain));
    SaveUpTo(s, root, 4, max_chain);
    const std::vector<std::string> files = FilesUnder(root);
    for (int i = 0; i < 100; ++i) {
      const std::string& path = files[s.random.Below(files.size())];
      const int64_t size = static_cast<int64_t>(fs::file_size(path));
      // Half of them among headers and text.
      const int64_t at = s.random.Below(2) == 0 ? s.random.Below(size)
                                                : s.random.Below(std::min<int64_t>(size, 400));
      std::fstream f(path, std::ios::in | std::ios::out | std::ios::binary);
      f.seekg(at);
      const char before = static_cast<char>(f.get());
      const char after = static_cast<char>(before ^ (1 + s.random.Below(255)));
      f.seekp(at);
      f.put(after);
      f.flush();
      INFO(path << ", byte " << at << ": " << int{before} << " became " << int{after});
      std::vector<std::string> damaged;
      const int64_t version = s.Load(root, &damaged);
      CHECK(version >= 1);
      if (version != 4 && !absl::EndsWith(path, "/latest")) {
        REQUIRE(!damaged.empty());
        CHECK(absl::StrContains(damaged[0], path));
      }
      f.seekp(at);
      f.put(before);
      f.close();
      CHECK(s.Load(root) == 4);
    }
  }
}

TEST_CASE("a file that is cut, empty or gone is damage like any other") {
  Setup s;
  const std::string root = s.dir.File("cut");
  for (const bool removes : {false, true}) {
    for (const char* name : {"masters.safetensors", "m.safetensors", "manifest.json"}) {
      fs::remove_all(root);
      SaveUpTo(s, root, 3, 0);
      const std::string path = root + "/step-00000003/" + name;
      INFO(path);
      if (removes) {
        fs::remove(path);
      } else {
        fs::resize_file(path, fs::file_size(path) / 2);
      }
      CHECK(s.Load(root) == 2);
    }
  }
  for (const int version : {1, 2, 3}) {
    fs::remove_all(root + "/step-0000000" + std::to_string(version));
  }
  CHECK(absl::IsNotFound(
      LoadNewestCheckpoint(Files::Real(), root, *s.reader, [](const auto&, const auto&) {
      }).status()));
}
}  // namespace
}  // namespace stretto::engine
