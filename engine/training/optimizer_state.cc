#include "engine/training/optimizer_state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr int64_t kWindowUnit = 4096;  // ranks' runs begin at multiples in a unit
constexpr int64_t kLargestWindow = int64_t{1} << 20;
constexpr StateTensor kKinds[] = {StateTensor::kMaster, StateTensor::kM, StateTensor::kV};

constexpr int64_t kElementsPerThread = 4096;

int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Calls with runs of [0, count) that begin with whole blocks, on up to `num_threads` threads.
void ForBlocks(int num_threads, int64_t count, absl::FunctionRef<void(int64_t, int64_t)> call) {
  const int64_t runs =
      std::clamp<int64_t>(count / kElementsPerThread, 1, static_cast<int64_t>(num_threads));
  const int64_t each = RoundUp((count + runs - 1) / runs, kMomentBlock);
  std::vector<std::thread> threads;
  for (int64_t begin = each; begin < count; begin += each) {
    threads.emplace_back([=] { call(begin, std::min(count, begin + each)); });
  }
  call(0, std::min(count, each));
  for (std::thread& t : threads) t.join();
}
}  // namespace

// A file without a name.
class OptimizerState::File {
 public:
  static absl::StatusOr<std::unique_ptr<File>> Create(const std::string& folder,
                                                      const std::string& name, size_t bytes) {
    RETURN_IF_ERROR(Files::Real().MakeDirs(folder));
    // Ranks may share the folder, from one process or from hosts whose process ids are equal:
    // mkostemp puts what no other name has in place of the six letters.
    std::string path = JoinPath(folder, absl::StrCat(name, ".XXXXXX"));
    const int fd = ::mkostemp(path.data(), O_CLOEXEC);
    if (fd < 0) return Error("open", path, errno);
    std::unique_ptr<File> file(new File(fd, path, bytes));
    ::unlink(path.c_str());
    // Now, and not in the middle of an update, the disk turns out to be full.
    const int error = bytes == 0 ? 0 : ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    if (error != 0) return Error("make room for", path, error);
    return file;
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  absl::Status Read(size_t offset, size_t bytes, void* dst) const {
    auto* to = static_cast<char*>(dst);
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = ::pread(fd_, to + done, bytes - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return Error("read", path_, n == 0 ? EIO : errno);
      done += static_cast<size_t>(n);
    }
    return absl::OkStatus();
  }
  absl::Status Write(size_t offset, size_t bytes, const void* src) {
    const auto* from = static_cast<const char*>(src);
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = ::pwrite(fd_, from + done, bytes - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return Error("write", path_, n == 0 ? EIO : errno);
      done += static_cast<size_t>(n);
    }
    return absl::OkStatus();
  }
  size_t bytes() const { return bytes_; }

 private:
  File(int fd, std::string path, size_t bytes) : fd_(fd), path_(std::move(path)), bytes_(bytes) {}
  static absl::Status Error(absl::string_view what, const std::string& path, int error) {
    const std::string text =
        absl::StrCat("optimizer state: can't ", what, " ", path, ": ", ::strerror(error));
    return error == ENOSPC ? absl::ResourceExhaustedError(text) : absl::UnavailableError(text);
  }

  const int fd_;
  const std::string path_;
  const size_t bytes_;
};

size_t OptimizerWindow(size_t elements) {
  const auto eighth = static_cast<int64_t>(elements / 8);
  return static_cast<size_t>(
      std::min(RoundUp(std::max<int64_t>(1, eighth), kWindowUnit), kLargestWindow));
}

absl::StatusOr<bool> ParseOptimizerState(absl::string_view name) {
  if (name == "f32" || name == "8bit") return name == "8bit";
  return absl::InvalidArgumentError(
      absl::StrCat("optimizer_state '", name, "': expected f32 or 8bit"));
}

OptimizerState::OptimizerState(Device& device, Stream& stream, std::vector<Run> runs,
                               const OptimizerStorage& storage)
    : device_(device), stream_(stream), runs_(std::move(runs)), storage_(storage) {}
OptimizerState::~OptimizerState() = default;

absl::StatusOr<std::unique_ptr<OptimizerState>> OptimizerState::Create(
    Device& device, Stream& stream, std::vector<Run> runs, const OptimizerStorage& storage) {
  std::unique_ptr<OptimizerState> state(
      new OptimizerState(device, stream, std::move(runs), storage));
  RETURN_IF_ERROR(state->Allocate());
  return state;
}

absl::Status OptimizerState::Allocate() {
  for (const Run& run : runs_) {
    code_begins_.push_back(num_codes_);
    size_ = run.begin + run.count;
    num_codes_ += RoundUp(run.count, kMomentBlock);
  }
  const int64_t size = std::max<int64_t>(1, size_);  // a rank may own nothing
  const bool offloads = !storage_.offload_folder.empty();
  window_ = static_cast<int64_t>(OptimizerWindow(static_cast<size_t>(size)));
  static constexpr const char* kNames[] = {"masters", "m", "v"};
  for (const StateTensor which : kKinds) {
    const auto i = static_cast<size_t>(which);
    if (!IsEncoded(which) && !offloads) {
      ASSIGN_OR_RETURN(flat_[i], memory_.MakeZeros(device_, DType::kF32, 1, size));
      continue;
    }
    ASSIGN_OR_RETURN(windows_[i], window_memory_.Make(device_, DType::kF32, 1, window_));
    if (Host(windows_[i]) == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "trainer: 8-bit or offloaded optimizer state needs a device whose memory the host "
          "reaches; this one is ",
          device_.Profile(DType::kF32).backend));
    }
    if (IsEncoded(which)) {
      MomentsOf(which).codes.assign(static_cast<size_t>(num_codes_), 0);
      MomentsOf(which).scales.assign(static_cast<size_t>(num_codes_ / kMomentBlock), 0.0f);
    } else {
      ASSIGN_OR_RETURN(files_[i], File::Create(storage_.offload_folder, kNames[i],
                                               static_cast<size_t>(size_) * sizeof(float)));
    }
  }
  return absl::OkStatus();
}

int64_t OptimizerState::CodeOf(int64_t element) const {
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), element,
                                      [](int64_t e, const Run& run) { return e < run.begin; });
  const auto run = static_cast<size_t>(after - runs_.begin()) - 1;
  return code_begins_[run] + element - runs_[run].begin;
}

int64_t OptimizerState::SizeOfBlock(int64_t first_code) const {
  const auto after = std::upper_bound(code_begins_.begin(), code_begins_.end(), first_code);
  const auto run = static_cast<size_t>(after - code_begins_.begin()) - 1;
  return std::min(kMomentBlock, runs_[run].count - (first_code - code_begins_[run]));
}

void OptimizerState::Decode(StateTensor which, int64_t begin, int64_t count, float* dst) const {
  const Moments& moments = MomentsOf(which);
  const Moment moment = which == StateTensor::kM ? Moment::kM : Moment::kV;
  const int64_t first = CodeOf(begin);
  ForBlocks(device_.num_threads(), count, [&](int64_t from, int64_t to) {
    for (int64_t done = from; done < to;) {
      const int64_t code = first + done;
      const int64_t n = std::min(to - done, kMomentBlock - code % kMomentBlock);
      DecodeMoments(moment, &moments.codes[code], n, moments.scales[code / kMomentBlock],
                    dst + done);
      done += n;
    }
  });
}

// Whole blocks.
void OptimizerState::Encode(StateTensor which, int64_t begin, int64_t count, const float* src,
                            const MomentRounding& rounding) {
  Moments& moments = MomentsOf(which);
  const Moment moment = which == StateTensor::kM ? Moment::kM : Moment::kV;
  const int64_t first = CodeOf(begin);
  STRETTO_CHECK(first % kMomentBlock == 0);
  ForBlocks(device_.num_threads(), count, [&](int64_t from, int64_t to) {
    for (int64_t done = from; done < to; done += kMomentBlock) {
      const int64_t code = first + done, n = std::min(kMomentBlock, to - done);
      moments.scales[code / kMomentBlock] =
          EncodeMoments(moment, src + done, n, rounding, &moments.codes[code]);
    }
  });
}

// Parameters end where they like; their blocks wait until all of them has been written.
void OptimizerState::WriteEncoded(StateTensor which, int64_t begin, int64_t count,
                                  const float* src) {
  Moments& moments = MomentsOf(which);
  const int64_t first = CodeOf(begin);
  for (int64_t done = 0; done < count;) {
    const int64_t in_block = (first + done) % kMomentBlock;
    const int64_t block = first + done - in_block, size = SizeOfBlock(block);
    const int64_t n = std::min(count - done, size - in_block);
    std::vector<float>& values = moments.pending[block];
    if (values.empty()) {
      values.resize(static_cast<size_t>(size));
      Decode(which, begin + done - in_block, size, values.data());
    }
    std::copy_n(src + done, n, values.begin() + in_block);
    if (n == size) {
      Encode(which, begin + done, n, values.data(), MomentRounding(0));
      moments.pending.erase(block);
    }
    done += n;
  }
}

absl::Status OptimizerState::FinishWrites() {
  const MomentRounding rounding(0);
  for (const StateTensor which : {StateTensor::kM, StateTensor::kV}) {
    Moments& moments = MomentsOf(which);
    const Moment moment = which == StateTensor::kM ? Moment::kM : Moment::kV;
    for (const auto& [block, values] : moments.pending) {
      moments.scales[block / kMomentBlock] =
          EncodeMoments(moment, values.data(), static_cast<int64_t>(values.size()), rounding,
                        &moments.codes[block]);
    }
    moments.pending.clear();
  }
  return absl::OkStatus();
}

absl::Status OptimizerState::Read(StateTensor which, int64_t begin, int64_t count,
                                  float* dst) const {
  const auto i = static_cast<size_t>(which);
  if (flat_[i]) {
    device_.Download(stream_, flat_[i].Cols(begin, count), dst);
  } else if (IsEncoded(which)) {
    Decode(which, begin, count, dst);
  } else {
    return files_[i]->Read(static_cast<size_t>(begin) * sizeof(float),
                           static_cast<size_t>(count) * sizeof(float), dst);
  }
  return absl::OkStatus();
}

absl::Status OptimizerState::Write(StateTensor which, int64_t begin, int64_t count,
                                   const float* src) {
  const auto i = static_cast<size_t>(which);
  is_touched_[i] = true;
  if (flat_[i]) {
    device_.Upload(stream_, flat_[i].Cols(begin, count), src);
  } else if (IsEncoded(which)) {
    WriteEncoded(which, begin, count, src);
  } else {
    return files_[i]->Write(static_cast<size_t>(begin) * sizeof(float),
                            static_cast<size_t>(count) * sizeof(float), src);
  }
  return absl::OkStatus();
}

absl::Status OptimizerState::Clear(StateTensor which) {
  const auto i = static_cast<size_t>(which);
  if (!is_touched_[i]) return absl::OkStatus();
  if (flat_[i]) {
    device_.Fill(stream_, flat_[i], 0.0f);
  } else if (IsEncoded(which)) {
    Moments& moments = MomentsOf(which);
    std::fill(moments.codes.begin(), moments.codes.end(), uint8_t{0});
    std::fill(moments.scales.begin(), moments.scales.end(), 0.0f);
    moments.pending.clear();
  } else {
    const std::vector<float> zeros(static_cast<size_t>(window_), 0.0f);
    for (int64_t begin = 0; begin < size_; begin += window_) {
      RETURN_IF_ERROR(Write(which, begin, std::min(window_, size_ - begin), zeros.data()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensor> OptimizerState::LoadOne(StateTensor which, int64_t begin, int64_t count) {
  const auto i = static_cast<size_t>(which);
  if (flat_[i]) return flat_[i].Cols(begin, count);
  STRETTO_CHECK(count <= window_);
  device_.Synchronize(stream_);
  RETURN_IF_ERROR(Read(which, begin, count, Host(windows_[i])));
  return windows_[i].Cols(0, count);
}

absl::Status OptimizerState::StoreOne(StateTensor which, int64_t begin, int64_t count,
                                      const MomentRounding& rounding) {
  const auto i = static_cast<size_t>(which);
  if (flat_[i]) return absl::OkStatus();
  if (!IsEncoded(which)) return Write(which, begin, count, Host(windows_[i]));
  Encode(which, begin, count, Host(windows_[i]), rounding);
  return absl::OkStatus();
}

absl::StatusOr<OptimizerState::Tensors> OptimizerState::Load(int64_t begin, int64_t count) {
  is_touched_.fill(true);
  Tensors tensors;
  ASSIGN_OR_RETURN(tensors.master, LoadOne(StateTensor::kMaster, begin, count));
  ASSIGN_OR_RETURN(tensors.m, LoadOne(StateTensor::kM, begin, count));
  ASSIGN_OR_RETURN(tensors.v, LoadOne(StateTensor::kV, begin, count));
  return tensors;
}

absl::StatusOr<Tensor> OptimizerState::LoadMaster(int64_t begin, int64_t count) {
  return LoadOne(StateTensor::kMaster, begin, count);
}

absl::Status OptimizerState::Store(int64_t begin, int64_t count, const MomentRounding& rounding) {
  device_.Synchronize(stream_);
  for (const StateTensor which : kKinds) {
    RETURN_IF_ERROR(StoreOne(which, begin, count, rounding));
  }
  return absl::OkStatus();
}

size_t OptimizerState::bytes() const {
  size_t total = memory_.bytes();
  for (const Moments& m : moments_) total += m.codes.size() + m.scales.size() * sizeof(float);
  return total;
}

size_t OptimizerState::window_bytes() const { return window_memory_.bytes(); }

size_t OptimizerState::file_bytes() const {
  size_t total = 0;
  for (const auto& file : files_) total += file != nullptr ? file->bytes() : 0;
  return total;
}
}  // namespace stretto::engine
