// Saves in the background: exact while training goes on, the same content from any number of ranks
// to any other, and less to write when little has changed.
#include "engine/training/checkpoint_writer.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "base/fault_files.h"
#include "base/testing.h"
#include "engine/collectives/testing.h"
#include "engine/training/checkpoint_reader.h"
#include "engine/training/testing.h"

namespace stretto::engine {
namespace {
using namespace testing;  // NOLINT(google-build-using-namespace)
using stretto::testing::Fault;
using stretto::testing::FaultFiles;
constexpr int64_t kLength = 40;
constexpr DataParallel kLayouts[] = {DataParallel::kDdp, DataParallel::kZero1, DataParallel::kZero2,
                                     DataParallel::kFsdp};

// A batch on which nothing is learned: the step is skipped, the version raised.
class NotFinite final : public Objective {
 public:
  void Evaluate(const ObjectiveInput& in, ObjectiveOutput& out) const override {
    TestObjective().Evaluate(in, out);
    out.loss = std::numeric_limits<double>::quiet_NaN();
  }
};

struct Setup {
  Setup() : random(stretto::testing::Seed(), 60), config(RandomConfig(random)) {
    device = MakeDevice("cpu");
    options = SmallOptions(kLength);
    options.parallel.reduction_leaves = 64;
    for (int i = 0; i < 4; ++i) batches.push_back(RandomBatch(config, kLength, random));
  }
  std::unique_ptr<TrainerEngine> Engine(uint64_t seed = 7) {
    return MakeEngine(*device, config, options, seed);
  }
  std::string root() const { return dir.File("checkpoints"); }
  CheckpointWriterOptions Options(int64_t max_chain = 0) const {
    CheckpointWriterOptions o;
    o.root = root();
    o.max_chain = max_chain;
    o.chunk_elements = 128;
    return o;
  }
  std::unique_ptr<TrainerEngine> InGroup(Communicator& group, Device& rank_device,
                                         DataParallel kind) const {
    TrainerOptions o = options;
    o.parallel.kind = kind;
    auto engine = TrainerEngine::Create(rank_device, config, o, Clock::Real(), &group);
    STRETTO_CHECK_MSG(engine.ok(), std::string(engine.status().message()).c_str());
    STRETTO_CHECK((*engine)->InitRandom(7, 0.2).ok());
    return *std::move(engine);
  }

  PhiloxStream random;
  ModelConfig config;
  TrainerOptions options;
  std::unique_ptr<Device> device;
  std::vector<TrainBatch> batches;
  stretto::testing::TempDir dir;
};

TEST_CASE("a background save holds the state it began with, while training goes on") {
  Setup s;
  const auto engine = s.Engine();
  CheckpointWriter writer(Files::Real(), s.Options());
  CHECK(!writer.Wait().has_value());
  std::vector<std::vector<float>> states;
  for (const TrainBatch& batch : s.batches) {
    REQUIRE_OK(engine->Step(batch, TestObjective()));
    states.push_back(FullState(*engine));
    REQUIRE_OK(writer.Start(*engine, "{}"));
  }
  const auto report = writer.Wait();
  REQUIRE(report.has_value());
  REQUIRE_OK(report->status);
  CHECK(report->info.counters.version == 4);
  CHECK(report->bytes_written >= static_cast<int64_t>(states[0].size() * sizeof(float)));
  CHECK(report->blocked_seconds >= 0);
  const auto folders = ListCheckpoints(Files::Real(), s.root());
  REQUIRE_OK(folders);
  REQUIRE(folders->size() == 3);
  for (int v = 2; v <= 4; ++v) {
    const auto reader = s.Engine(99);
    const auto info = LoadCheckpoint(Files::Real(), folders->at(v - 2), *reader);
    REQUIRE_OK(info);
    CHECK(info->counters.version == v);
    CHECK(SameBits(FullState(*reader), states[v - 1]));
  }
  // The same content, and the same bytes of every file, as one that was waited for.
  const auto waited = SaveCheckpoint(Files::Real(), {s.dir.File("waited"), 1}, *engine, "{}");
  REQUIRE_OK(waited);
  CHECK(waited->checkpoint_hash == report->info.checkpoint_hash);
  for (const char* name :
       {"masters.safetensors", "m.safetensors", "v.safetensors", "manifest.json"}) {
    CHECK(*Files::Real().ReadAll(waited->path + "/" + name) ==
          *Files::Real().ReadAll(report->info.path + "/" + name));
  }
}

TEST_CASE("a critic is saved with its policy, and restored with it") {
  Setup s;
  const ModelConfig of_critic = WithValueHead(s.config);
  const auto engine = s.Engine();
  const auto critic = MakeEngine(*s.device, of_critic, s.options, 8);
  CheckpointWriter writer(Files::Real(), s.Options());
  std::vector<float> policy_state, critic_state;
  for (const TrainBatch& batch : s.batches) {
    // Two updates of the critic in one step, and a save while the next ones change both.
    REQUIRE_OK(critic->Step(batch, TestObjective(), 1e30, {0, 2}));
    REQUIRE_OK(engine->Step(batch, TestObjective()));
    REQUIRE_OK(critic->Step(batch, TestObjective(), 1e30, {1, 2}));
    policy_state = FullState(*engine);
    critic_state = FullState(*critic);
    REQUIRE_OK(writer.Start(*engine, "{}", critic.get()));
  }
  const auto report = writer.Wait();
  REQUIRE(report.has_value());
  REQUIRE_OK(report->status);
  CHECK(report->info.critic->optimizer_steps == 8);

  const auto restored = s.Engine(99);
  const auto restored_critic = MakeEngine(*s.device, of_critic, s.options, 98);
  const auto info = LoadNewestCheckpoint(
      Files::Real(), s.root(), *restored, [](const std::string&, const absl::Status&) {},
      restored_critic.get());
  REQUIRE_OK(info);
  CHECK(SameBits(FullState(*restored), policy_state));
  CHECK(SameBits(FullState(*restored_critic), critic_state));
  CHECK(restored_critic->counters().optimizer_steps == 8);
  CHECK(restored_critic->version() == 4);
  // The policy's weights are a model's, without the critic's.
  const auto masters = OpenMasters(Files::Real(), info->path);
  REQUIRE_OK(masters);
  CHECK((*masters)->tensors().size() == engine->layout().parameters().size());
  CHECK((*masters)->Find("critic.score.weight") == nullptr);
  // A run without a critic doesn't take it for its own, nor the other way round.
  const auto without = LoadCheckpoint(Files::Real(), info->path, *restored);
  CHECK(absl::IsInvalidArgument(without.status()));
  CHECK(without.status().message().find("has a critic, the run has none") != std::string::npos);
  REQUIRE_OK(writer.Start(*engine, "{}"));
  const auto second = writer.Wait();
  REQUIRE_OK(second->status);
  const auto lacking = LoadCheckpoint(Files::Real(), info->path, *restored, restored_critic.get());
  CHECK(absl::IsInvalidArgument(lacking.status()));
}

TEST_CASE("an update waits for the snapshot, or copies what is left of it") {
  Setup s;
  // Masters and moments as f32 in memory, moments in 8 bits, or all of it in files.
  const std::string storage = GENERATE("f32", "8bit", "files");
  INFO(storage);
  s.options.storage.eight_bit_moments = storage == "8bit";
  if (storage == "files") s.options.storage.offload_folder = s.dir.path();
  const auto engine = s.Engine();
  REQUIRE_OK(engine->Step(s.batches[0], TestObjective()));
  auto before = FullState(*engine);
  // What the host reaches is copied while training goes on, not when the snapshot is taken.
  for (const StatePart& part : engine->PartsToWrite()) {
    CHECK((part.read || s.device->HostMemory(part.values) != nullptr));
  }
  const auto snapshot = std::make_shared<StateSnapshot>(Clock::Real());
  const auto read = [&] {
    std::vector<float> values;
    for (const SnapshotPart& part : snapshot->parts()) {
      snapshot->ForRuns(part, 0, part.values.size(), [&](absl::Span<const float> run) {
        values.insert(values.end(), run.begin(), run.end());
      });
    }
    return values;
  };
  // Before an update it is read where it is, without a copy; then from the copy.
  StateSnapshot::Take(snapshot, *engine);
  CHECK(SameBits(read(), before));
  CHECK(!snapshot->wants_copy());
  REQUIRE_OK(engine->Step(s.batches[1], TestObjective()));
  CHECK(!SameBits(FullState(*engine), before));
  CHECK(SameBits(read(), before));
  CHECK(snapshot->wants_copy());
  // What is released isn't copied.
  const auto released = std::make_shared<StateSnapshot>(Clock::Real());
  StateSnapshot::Take(released, *engine);
  for (const StateTensor which : {StateTensor::kMaster, StateTensor::kM, StateTensor::kV}) {
    released->Release(which);
  }
  released->FinishReading();
  CHECK(!released->wants_copy());
  before = FullState(*engine);
  for (int round = 0; round < 2; ++round) {
    StateSnapshot::Take(snapshot, *engine);
    // Nobody has copied anything when the state changes.
    REQUIRE_OK(engine->Step(s.batches[2], TestObjective()));
    CHECK(!SameBits(FullState(*engine), before));
    std::vector<float> copied;
    for (const SnapshotPart& part : snapshot->parts()) {
      copied.insert(copied.end(), part.values.begin(), part.values.end());
    }
    CHECK(SameBits(copied, before) == (round == 0));
    CHECK(copied.size() == before.size());
    CHECK(snapshot->blocked_seconds() >= 0);
  }
  // An engine may end before its snapshot is copied.
  auto second = s.Engine();
  const auto state = FullState(*second);
  StateSnapshot::Take(snapshot, *second);
  second.reset();
  std::vector<float> copied;
  for (const SnapshotPart& part : snapshot->parts()) {
    copied.insert(copied.end(), part.values.begin(), part.values.end());
  }
  CHECK(SameBits(copied, state));
}

TEST_CASE("any number of ranks in any layout writes the same checkpoint, and any other loads it") {
  Setup s;
  INFO("seed " << stretto::testing::Seed());
  std::string hash;
  std::vector<float> state;
  {
    const auto engine = s.Engine();
    REQUIRE_OK(engine->Step(s.batches[0], TestObjective()));
    state = FullState(*engine);
    hash = SaveCheckpoint(Files::Real(), {s.dir.File("alone"), 1}, *engine, "{}")->checkpoint_hash;
  }
  int turn = 0;
  for (const DataParallel kind : kLayouts) {
    const int num_writers = 2 + turn % 2, num_readers = 1 + (turn + 2) % 3;
    const DataParallel other = kLayouts[(turn + 1) % 4];
    INFO(Name(kind) << " of " << num_writers << " to " << Name(other) << " of " << num_readers);
    const auto reports = RunRanks<SaveReport>(num_writers, [&](Communicator& c) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = s.InGroup(c, *device, kind);
      STRETTO_CHECK(engine->Step(s.batches[0], TestObjective()).ok());
      CheckpointWriter writer(Files::Real(), s.Options());
      STRETTO_CHECK(writer.Start(*engine, "{}").ok());
      // It is not waited for: another step begins at once.
      STRETTO_CHECK(engine->Step(s.batches[1], TestObjective()).ok());
      return *writer.Wait();
    });
    for (const SaveReport& r : reports) {
      REQUIRE_OK(r.status);
      CHECK(r.info.checkpoint_hash == hash);
    }
    const std::string path = reports[0].info.path;
    CHECK(ReadCheckpointInfo(Files::Real(), path)->checkpoint_hash == hash);
    CHECK(Files::Real().Exists(path + "/masters-00001-of-0000" + std::to_string(num_writers) +
                               ".safetensors"));
    for (const auto& read : RunRanks<std::vector<float>>(num_readers, [&](Communicator& c) {
           const auto device = MakeDevice("cpu", 1);
           const auto engine = s.InGroup(c, *device, other);
           const auto info = LoadCheckpoint(Files::Real(), path, *engine);
           STRETTO_CHECK_MSG(info.ok(), std::string(info.status().message()).c_str());
           return FullState(*engine);
         })) {
      CHECK(SameBits(read, state));
    }
    const auto masters = OpenMasters(Files::Real(), path);
    const auto whole = OpenMasters(Files::Real(), s.dir.File("alone") + "/step-00000001");
    REQUIRE_OK(masters);
    REQUIRE_OK(whole);
    REQUIRE((*masters)->tensors().size() == (*whole)->tensors().size());
    for (const TensorInfo& t : (*whole)->tensors()) {
      CHECK((*masters)->Find(t.name)->bytes == t.bytes);
    }
    ++turn;
  }
}

TEST_CASE("a rank whose disk fails ends the save of all with its name, and the next is good") {
  Setup s;
  for (const int bad : {0, 1}) {
    const auto all = RunRanks<std::pair<SaveReport, SaveReport>>(2, [&](Communicator& c) {
      const auto device = MakeDevice("cpu", 1);
      const auto engine = s.InGroup(c, *device, DataParallel::kZero1);
      // The first operation that fails is the creation of its first file.
      FaultFiles files(c.rank() == bad ? Fault::kOnce : Fault::kNone, 1);
      CheckpointWriter writer(files, s.Options(2));
      STRETTO_CHECK(writer.Start(*engine, "1").ok());
      SaveReport first = *writer.Wait();
      STRETTO_CHECK(engine->Step(s.batches[0], TestObjective()).ok());
      STRETTO_CHECK(writer.Start(*engine, "2").ok());
      return std::pair(first, *writer.Wait());
    });
    for (const auto& [first, second] : all) {
      CHECK(!first.status.ok());
      CHECK_THAT(std::string(first.status.message()), Catch::Contains("input/output error"));
      REQUIRE_OK(second.status);
      CHECK(!second.is_incremental);
    }
    CHECK_THAT(std::string(all[1 - bad].first.status.message()),
               Catch::Contains("rank " + std::to_string(bad)));
    CHECK(ListCheckpoints(Files::Real(), s.root())->size() == 1);
    CHECK(Files::Real().List(s.root())->size() == 2);
  }
}

TEST_CASE("a rank that never comes is named, and a writer that ends waits for nobody") {
  Setup s;
  const auto statuses = RunRanks<absl::Status>(2, [&](Communicator& c) {
    const auto device = MakeDevice("cpu", 1);
    const auto engine = s.InGroup(c, *device, DataParallel::kFsdp);
    CheckpointWriterOptions options = s.Options();
    // Rank 1 writes elsewhere: a disk of its own.
    if (c.rank() == 1) options.root = s.dir.File("elsewhere");
    if (c.rank() == 0) options.peer_timeout_seconds = 0.3;
    absl::Status status;
    options.on_done = [&](const SaveReport& r) { status = r.status; };
    CheckpointWriter(Files::Real(), options).Start(*engine, "{}").IgnoreError();
    return status;
  });
  CHECK(!statuses[0].ok());
  CHECK(absl::IsCancelled(statuses[1]));
}

TEST_CASE("an incremental checkpoint writes what changed and loads like a whole one") {
  Setup s;
  const auto engine = s.Engine();
  CheckpointWriterOptions options = s.Options(/*max_chain=*/2);
  options.keep = 2;
  CheckpointWriter writer(Files::Real(), options);
  std::vector<SaveReport> reports;
  std::vector<std::vector<float>> states;
  for (int v = 1; v <= 8; ++v) {
    // Every second step changes nothing but the version.
    if (v % 2 == 1) {
      REQUIRE_OK(engine->Step(s.batches[v % 4], TestObjective()));
    } else {
      REQUIRE_OK(engine->Step(s.batches[v % 4], NotFinite()));
    }
    REQUIRE_OK(writer.Start(*engine, "{}"));
    reports.push_back(*writer.Wait());
    REQUIRE_OK(reports.back().status);
    states.push_back(FullState(*engine));
    const auto waited = SaveCheckpoint(Files::Real(), {s.dir.File("whole"), 1}, *engine, "{}");
    REQUIRE_OK(waited);
    CHECK(waited->checkpoint_hash == reports.back().info.checkpoint_hash);
    const auto folders = ListCheckpoints(Files::Real(), s.root());
    REQUIRE_OK(folders);
    CHECK(folders->size() <= 6);  // two chains at most
    for (const std::string& folder : *folders) {
      const auto reader = s.Engine(99);
      const auto info = LoadCheckpoint(Files::Real(), folder, *reader);
      INFO(folder << " after version " << v);
      REQUIRE_OK(info);
      CHECK(SameBits(FullState(*reader), states[info->counters.version - 1]));
    }
  }
  for (int v = 1; v <= 8; ++v) {
    const SaveReport& r = reports[v - 1];
    CHECK(r.is_incremental == (v % 3 != 1));
    if (v % 2 == 0 && r.is_incremental) CHECK(r.bytes_written == 0);
    if (!r.is_incremental) {
      CHECK(r.bytes_written == static_cast<int64_t>(states[0].size() * sizeof(float)));
    }
  }
  // A damaged first link takes its chain with it, and no other: one is kept that doesn't need it.
  REQUIRE(CheckpointReader::Open(Files::Real(), reports[7].info.path).ok());
  for (const char* name : {"masters.safetensors", "m.safetensors", "v.safetensors"}) {
    std::filesystem::resize_file(reports[6].info.path + "/" + name, 100);
  }
  std::vector<std::string> damaged;
  const auto reader = s.Engine(99);
  const auto info = LoadNewestCheckpoint(
      Files::Real(), s.root(), *reader,
      [&](const std::string& folder, const absl::Status&) { damaged.push_back(folder); });
  REQUIRE_OK(info);
  CHECK(info->counters.version == 6);
  CHECK(damaged == std::vector<std::string>{reports[7].info.path, reports[6].info.path});
}

// Rows and columns as tensor parallelism divides them.
TEST_CASE("boxes of a tensor are joined to the whole") {
  Setup s;
  constexpr int64_t kRows = 7, kCols = 10;
  std::vector<float> whole(kRows * kCols);
  for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i);
  std::vector<std::vector<float>> memory;
  std::vector<SnapshotPart> parts;
  for (const TensorBox& box :
       {TensorBox{0, 3, 0, 10}, TensorBox{3, 7, 0, 4}, TensorBox{3, 7, 4, 10}}) {
    std::vector<float>& values = memory.emplace_back();
    for (int64_t r = box.row_begin; r < box.row_end; ++r) {
      for (int64_t c = box.col_begin; c < box.col_end; ++c) values.push_back(whole[r * kCols + c]);
    }
  }
  size_t i = 0;
  for (const TensorBox& box :
       {TensorBox{0, 3, 0, 10}, TensorBox{3, 7, 0, 4}, TensorBox{3, 7, 4, 10}}) {
    const absl::Span<const float> values = memory[i++];
    parts.push_back({StateTensor::kMaster, "w", {kRows, kCols}, box, 0, values.subspan(0, 5)});
    parts.push_back({StateTensor::kMaster, "w", {kRows, kCols}, box, 5, values.subspan(5)});
  }
  REQUIRE_OK(Files::Real().MakeDirs(s.root()));
  ShardWriter writer(Files::Real(), {0, 1, 0});
  auto shard = writer.Write(s.root(), "step-00000001", parts);
  REQUIRE_OK(shard);
  CheckpointReader reader(s.root(), shard->fragment);
  const auto hash = reader.HashOf(StateTensor::kMaster, "w");
  REQUIRE_OK(hash);
  CHECK(*hash ==
        HashBytes({reinterpret_cast<const uint8_t*>(whole.data()), whole.size() * sizeof(float)}));
  CheckpointManifest manifest = shard->fragment;
  manifest.tensors.begin()->second.hash = *hash;
  CheckpointReader again(s.root(), manifest);
  const auto read = again.Read(StateTensor::kMaster, "w", {kRows, kCols});
  REQUIRE_OK(read);
  CHECK(std::vector<float>(read->begin(), read->end()) == whole);
  CHECK(absl::IsInvalidArgument(again.Read(StateTensor::kMaster, "w", {kCols, kRows}).status()));
  // One part less is not the tensor.
  manifest.tensors.begin()->second.parts.pop_back();
  CHECK(absl::IsDataLoss(CheckpointReader(s.root(), manifest)
                             .Read(StateTensor::kMaster, "w", {kRows, kCols})
                             .status()));
}

TEST_CASE("checkpoints of the first format are still read") {
  Setup s;
  const auto engine = s.Engine();
  REQUIRE_OK(engine->Step(s.batches[0], TestObjective()));
  const auto saved = SaveCheckpoint(Files::Real(), {s.root(), 1}, *engine, "extra");
  REQUIRE_OK(saved);
  const auto manifest = ReadManifest(Files::Real(), saved->path);
  REQUIRE_OK(manifest);
  std::string tensors;
  for (const auto& [name, tensor] : manifest->tensors) {
    absl::StrAppend(&tensors, tensors.empty() ? "" : ",\n", "  \"", name, "\": \"", tensor.hash,
                    "\"");
  }
  REQUIRE_OK(Files::Real().WriteAtomically(
      saved->path + "/manifest.json",
      absl::StrCat("{\n \"format\": 1,\n \"checkpoint_hash\": \"", saved->checkpoint_hash,
                   "\",\n \"version\": 1,\n \"optimizer_steps\": 1,\n \"extra\": \"extra\",\n "
                   "\"tensors\": {\n",
                   tensors, "\n }\n}")));
  const auto reader = s.Engine(99);
  const auto info = LoadCheckpoint(Files::Real(), saved->path, *reader);
  REQUIRE_OK(info);
  CHECK(info->extra_json == "extra");
  CHECK(SameBits(FullState(*reader), FullState(*engine)));
  CHECK(OpenMasters(Files::Real(), saved->path).ok());
  ModelConfig other = s.config;
  other.vocab_size += 1;
  CHECK(absl::IsInvalidArgument(
      LoadCheckpoint(Files::Real(), saved->path,
                     *MakeEngine(*s.device, other, SmallOptions(kLength), 7))
          .status()));
  std::filesystem::resize_file(saved->path + "/m.safetensors", 5000);
  CHECK(absl::IsDataLoss(LoadCheckpoint(Files::Real(), saved->path, *reader).status()));
}
}  // namespace
}  // namespace stretto::engine
