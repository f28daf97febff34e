// Masters and Adam moments of the elements that a rank holds, in one of several ways: f32 on the
// device; moments in 8 bits (moment_format.h); masters and moments in files. What isn't f32 on the
// device passes through a window of it, a piece at a time. An update's bits depend on the format of
// the moments alone, not on where they are or how elements are divided among ranks.
//
// Not thread-safe, but that Read may be called by others while nobody writes.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/model/memory.h"
#include "engine/training/moment_format.h"

namespace stretto::engine {
enum class StateTensor : uint8_t { kMaster, kM, kV };

struct OptimizerStorage {
  bool eight_bit_moments = false;
  // Not empty: masters and moments are in files of this folder, which have no name there: they are
  // gone when the process is. Checkpoints have what they held.
  std::string offload_folder;

  bool is_plain() const { return !eight_bit_moments && offload_folder.empty(); }
};
// Elements of the window that a state of so many elements passes through.
size_t OptimizerWindow(size_t elements);

// "f32" or "8bit" as OptimizerStorage::eight_bit_moments; InvalidArgument for others.
absl::StatusOr<bool> ParseOptimizerState(absl::string_view name);

class OptimizerState {
 public:
  // A run of elements whose blocks count from its beginning: a rank's part of a unit.
  struct Run {
    int64_t begin = 0, count = 0;
  };
  struct Tensors {
    Tensor master, m, v;  // f32, of one row
  };

  // `runs` follow one another from 0 on. All zeros. `device` and `stream` outlive the state.
  // ResourceExhausted: not enough memory or disk; InvalidArgument: the host doesn't reach the
  // device's memory, and storage isn't plain.
  static absl::StatusOr<std::unique_ptr<OptimizerState>> Create(Device& device, Stream& stream,
                                                                std::vector<Run> runs,
                                                                const OptimizerStorage& storage);
  ~OptimizerState();

  bool is_plain() const { return storage_.is_plain(); }
  // Whole, of a plain state.
  const Tensor& Flat(StateTensor which) const { return flat_[static_cast<size_t>(which)]; }

  // Elements [begin, begin + count), which lie in one run, to and from the host.
  absl::Status Read(StateTensor which, int64_t begin, int64_t count, float* dst) const;
  absl::Status Write(StateTensor which, int64_t begin, int64_t count, const float* src);
  // After Writes: blocks that several of them filled are encoded.
  absl::Status FinishWrites();
  absl::Status Clear(StateTensor which);

  // Elements of a run that Load may be given: at most so many, from a multiple of it (counted from
  // the run's beginning) on.
  int64_t window() const { return window_; }
  // The elements as tensors, which may be changed. Store takes them back with the rounding of this
  // optimizer step; valid until the next Load.
  absl::StatusOr<Tensors> Load(int64_t begin, int64_t count);
  absl::Status Store(int64_t begin, int64_t count, const MomentRounding& rounding);
  absl::StatusOr<Tensor> LoadMaster(int64_t begin, int64_t count);

  size_t bytes() const;         // of the state, on the device and the host
  size_t window_bytes() const;  // of the window
  size_t file_bytes() const;

 private:
  class File;
  // A kind of state that isn't f32 on the device.
  struct Moments {
    std::vector<uint8_t> codes;  // every run begins a block
    std::vector<float> scales;
    std::unordered_map<int64_t, std::vector<float>> pending;  // blocks that were written in part
  };

  OptimizerState(Device& device, Stream& stream, std::vector<Run> runs,
                 const OptimizerStorage& storage);
  absl::Status Allocate();
  bool IsEncoded(StateTensor which) const {
    return which != StateTensor::kMaster && storage_.eight_bit_moments;
  }
  Moments& MomentsOf(StateTensor which) { return moments_[which == StateTensor::kM ? 0 : 1]; }
  const Moments& MomentsOf(StateTensor which) const {
    return moments_[which == StateTensor::kM ? 0 : 1];
  }
  // Where an element's code is.
  int64_t CodeOf(int64_t element) const;
  // Elements of the block that a code begins.
  int64_t SizeOfBlock(int64_t first_code) const;
  void Decode(StateTensor which, int64_t begin, int64_t count, float* dst) const;
  void Encode(StateTensor which, int64_t begin, int64_t count, const float* src,
              const MomentRounding& rounding);
  void WriteEncoded(StateTensor which, int64_t begin, int64_t count, const float* src);
  absl::StatusOr<Tensor> LoadOne(StateTensor which, int64_t begin, int64_t count);
  absl::Status StoreOne(StateTensor which, int64_t begin, int64_t count,
                        const MomentRounding& rounding);
  float* Host(const Tensor& tensor) const {
    return static_cast<float*>(device_.HostMemory(tensor));
  }

  Device& device_;
  Stream& stream_;
  const std::vector<Run> runs_;
  const OptimizerStorage storage_;
  std::vector<int64_t> code_begins_;  // of runs
  int64_t size_ = 0, num_codes_ = 0, window_ = 0;
  DeviceMemory memory_, window_memory_;
  Tensor flat_[3], windows_[3];
  std::array<bool, 3> is_touched_{};  // since they were made, of zeros
  Moments moments_[2];
  std::unique_ptr<File> files_[3];
};
}  // namespace stretto::engine
