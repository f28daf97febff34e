// Checkpoints restore every bit, name what is damaged, and survive failures of the disk.
#include "engine/training/checkpoint.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "base/testing.h"
#include "engine/formats/safetensors.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)
constexpr int64_t kLength = 40;

struct Setup {
  Setup() : random(stretto::testing::Seed(), 40), config(RandomConfig(random)) {
    device = MakeDevice("cpu");
    for (int i = 0; i < 5; ++i) batches.push_back(RandomBatch(config, kLength, random));
  }
  std::unique_ptr<TrainerEngine> Engine(uint64_t seed = 7) {
    return MakeEngine(*device, config, SmallOptions(kLength), seed);
  }
  CheckpointOptions Options() { return {dir.File("checkpoints"), 2}; }

  PhiloxStream random;
  ModelConfig config;
  std::unique_ptr<Device> device;
  std::vector<TrainBatch> batches;
  stretto::testing::TempDir dir;
  Files& files = Files::Real();
};

void FlipByte(const std::string& path, int64_t from_end) {
  std::fstream f(path, std::ios::in | std::ios::out | std::ios::binary);
  f.seekg(-from_end, std::ios::end);
  const int byte = f.get();
  f.seekp(-from_end, std::ios::end);
  f.put(static_cast<char>(byte ^ 0x10));
}

TEST_CASE("a run continued from a checkpoint has the bits of one that never stopped") {
  Setup s;
  INFO("seed " << stretto::testing::Seed());
  const auto whole = s.Engine();
  std::string hash;
  for (int i = 0; i < 5; ++i) {
    REQUIRE_OK(whole->Step(s.batches[i], TestObjective()));
    if (i != 2) continue;
    const auto saved = SaveCheckpoint(s.files, s.Options(), *whole, "{\"cursor\": 12}");
    REQUIRE_OK(saved);
    hash = saved->checkpoint_hash;
  }
  const auto resumed = s.Engine(/*seed=*/99);
  const auto latest = LatestCheckpoint(s.files, s.Options().root);
  REQUIRE_OK(latest);
  const auto info = LoadCheckpoint(s.files, *latest, *resumed);
  REQUIRE_OK(info);
  CHECK(info->extra_json == "{\"cursor\": 12}");
  CHECK(info->checkpoint_hash == hash);
  CHECK(resumed->version() == 3);
  for (int i = 3; i < 5; ++i) REQUIRE_OK(resumed->Step(s.batches[i], TestObjective()));
  CHECK(SameBits(FullState(*resumed), FullState(*whole)));
  const auto a = SaveCheckpoint(s.files, {s.dir.File("a"), 1}, *whole, "");
  const auto b = SaveCheckpoint(s.files, {s.dir.File("b"), 1}, *resumed, "other");
  REQUIRE_OK(a);
  REQUIRE_OK(b);
  CHECK(a->checkpoint_hash == b->checkpoint_hash);
  CHECK(a->checkpoint_hash != hash);
}

TEST_CASE("old checkpoints are pruned and the newest can be written again") {
  Setup s;
  const auto engine = s.Engine();
  for (int i = 0; i < 4; ++i) {
    REQUIRE_OK(engine->Step(s.batches[i], TestObjective()));
    REQUIRE_OK(SaveCheckpoint(s.files, s.Options(), *engine, std::to_string(i)));
  }
  REQUIRE_OK(SaveCheckpoint(s.files, s.Options(), *engine, "again"));
  const auto list = ListCheckpoints(s.files, s.Options().root);
  REQUIRE_OK(list);
  REQUIRE(list->size() == 2);
  CHECK_THAT(list->at(0), Catch::EndsWith("step-00000003"));
  CHECK_THAT(list->at(1), Catch::EndsWith("step-00000004"));
  const auto info = ReadCheckpointInfo(s.files, list->at(1));
  REQUIRE_OK(info);
  CHECK(info->extra_json == "again");
  CHECK(*LatestCheckpoint(s.files, s.Options().root) == list->at(1));
  // Nothing but the two folders and the pointer.
  CHECK(s.files.List(s.Options().root)->size() == 3);
  std::filesystem::remove_all(list->at(1));
  CHECK(*LatestCheckpoint(s.files, s.Options().root) == list->at(0));
  CHECK(absl::IsNotFound(LatestCheckpoint(s.files, s.dir.File("nowhere")).status()));
}

TEST_CASE("damage is found before the engine is touched, and named") {
  Setup s;
  const auto engine = s.Engine();
  REQUIRE_OK(engine->Step(s.batches[0], TestObjective()));
  const auto victim = s.Engine(/*seed=*/8);
  const auto before = FullState(*victim);
  for (const char* file : {"masters.safetensors", "m.safetensors", "v.safetensors"}) {
    const auto saved = SaveCheckpoint(s.files, s.Options(), *engine, "x");
    REQUIRE_OK(saved);
    const std::string path = saved->path + "/" + file;
    CHECK(OpenMasters(s.files, saved->path).ok());
    FlipByte(path, 5);
    CHECK(OpenMasters(s.files, saved->path).ok() == (std::string(file) != "masters.safetensors"));
    const auto loaded = LoadCheckpoint(s.files, saved->path, *victim);
    CHECK(loaded.status().code() == absl::StatusCode::kDataLoss);
    CHECK_THAT(std::string(loaded.status().message()), Catch::Contains(path));
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
    const auto cut = LoadCheckpoint(s.files, saved->path, *victim);
    CHECK(cut.status().code() == absl::StatusCode::kDataLoss);
    CHECK_THAT(std::string(cut.status().message()), Catch::Contains(path));
  }
  const auto saved = SaveCheckpoint(s.files, s.Options(), *engine, "x");
  REQUIRE_OK(saved);
  const std::string manifest = saved->path + "/manifest.json";
  const std::string text = *s.files.ReadAll(manifest);
  for (size_t cut = 0; cut < text.size(); cut += 1 + text.size() / 40) {
    REQUIRE_OK(s.files.WriteAtomically(manifest, text.substr(0, cut)));
    CHECK_FALSE(LoadCheckpoint(s.files, saved->path, *victim).ok());
  }
  std::string wrong = text;
  wrong.replace(wrong.find("\"version\": 1"), 12, "\"version\": 2");
  REQUIRE_OK(s.files.WriteAtomically(manifest, wrong));
  CHECK_THAT(std::string(LoadCheckpoint(s.files, saved->path, *victim).status().message()),
             Catch::Contains("does not have its hash"));
  CHECK(SameBits(FullState(*victim), before));
  CHECK(victim->version() == 0);
}

TEST_CASE("a checkpoint of another model is refused") {
  Setup s;
  const auto saved = SaveCheckpoint(s.files, s.Options(), *s.Engine(), "");
  REQUIRE_OK(saved);
  ModelConfig other = s.config;
  other.vocab_size += 1;
  const auto engine = MakeEngine(*s.device, other, SmallOptions(kLength), 7);
  const auto loaded = LoadCheckpoint(s.files, saved->path, *engine);
  CHECK(loaded.status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(loaded.status().message()), Catch::Contains("another model"));
}

// The real files, until `budget` operations have been done; every later one fails like a full disk.
class FailingFiles final : public Files {
 public:
  explicit FailingFiles(int budget) : budget_(budget) {}
  bool failed() const { return budget_ < 0; }
  absl::StatusOr<std::string> ReadAll(const std::string& path) override {
    return real_.ReadAll(path);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    if (absl::Status s = Spend(); !s.ok()) return s;
    auto file = real_.Create(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(*this, *std::move(file));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (absl::Status s = Spend(); !s.ok()) return s;
    return real_.Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override {
    if (absl::Status s = Spend(); !s.ok()) return s;
    return real_.RemoveAll(path);
  }
  absl::Status MakeDirs(const std::string& path) override {
    if (absl::Status s = Spend(); !s.ok()) return s;
    return real_.MakeDirs(path);
  }
  bool Exists(const std::string& path) override { return real_.Exists(path); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    return real_.List(path);
  }

 private:
  class File final : public WritableFile {
   public:
    File(FailingFiles& owner, std::unique_ptr<WritableFile> file)
        : owner_(owner), file_(std::move(file)) {}
    absl::Status Append(absl::Span<const uint8_t> bytes) override {
      if (absl::Status s = owner_.Spend(); !s.ok()) {
        // A torn write: a part arrives.
        file_->Append(bytes.subspan(0, bytes.size() / 2)).IgnoreError();
        return s;
      }
      return file_->Append(bytes);
    }
    absl::Status Sync() override {
      if (absl::Status s = owner_.Spend(); !s.ok()) return s;
      return file_->Sync();
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    FailingFiles& owner_;
    std::unique_ptr<WritableFile> file_;
  };
  absl::Status Spend() {
    if (--budget_ >= 0) return absl::OkStatus();
    budget_ = -1;
    return absl::ResourceExhaustedError("no space left on device");
  }
  Files& real_ = Files::Real();
  int budget_;
};

TEST_CASE("wherever a save stops, a whole checkpoint remains and loads") {
  Setup s;
  const auto engine = s.Engine();
  REQUIRE_OK(engine->Step(s.batches[0], TestObjective()));
  REQUIRE_OK(SaveCheckpoint(s.files, s.Options(), *engine, "old"));
  const auto old_state = FullState(*engine);
  REQUIRE_OK(engine->Step(s.batches[1], TestObjective()));
  const auto new_state = FullState(*engine);
  const auto reader = s.Engine();
  int failures = 0;
  for (int budget = 0;; budget += 1 + budget / 8) {
    FailingFiles files(budget);
    const auto saved = SaveCheckpoint(files, s.Options(), *engine, "new");
    const auto latest = LatestCheckpoint(s.files, s.Options().root);
    REQUIRE_OK(latest);
    const auto loaded = LoadCheckpoint(s.files, *latest, *reader);
    INFO("stopped after " << budget << " operations");
    REQUIRE_OK(loaded);
    CHECK(SameBits(FullState(*reader), loaded->extra_json == "new" ? new_state : old_state));
    if (!files.failed()) {
      CHECK(loaded->extra_json == "new");
      break;
    }
    CHECK_FALSE(saved.ok());
    ++failures;
  }
  CHECK(failures > 10);
}
}  // namespace
}  // namespace stretto::engine
