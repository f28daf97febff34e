#include "engine/weights/growing_tensors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace stretto::engine {
namespace {
absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("weights transfer: ", what));
}

std::vector<int64_t> SizesOf(const std::vector<SharedBytes>& tensors) {
  std::vector<int64_t> sizes;
  sizes.reserve(tensors.size());
  for (const SharedBytes& tensor : tensors) sizes.push_back(static_cast<int64_t>(tensor.size()));
  return sizes;
}
}  // namespace

GrowingTensors::GrowingTensors(std::vector<int64_t> limits, bool exact)
    : limits_(std::move(limits)), exact_(exact) {}

GrowingTensors::GrowingTensors(std::vector<SharedBytes> tensors)
    : limits_(SizesOf(tensors)), exact_(true), done_(std::move(tensors)) {}

absl::Status GrowingTensors::Add(size_t tensor, size_t offset, absl::string_view data, bool last) {
  absl::MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  if (done_.size() >= limits_.size()) return Corrupt("more tensors than the manifest has");
  const auto limit = static_cast<size_t>(limits_[done_.size()]);
  if (tensor != done_.size() || offset != current_.size())
    return Corrupt("a piece is out of order");
  if (data.size() > limit - current_.size()) return Corrupt("a tensor is too long");
  if (exact_) current_.reserve(limit);
  current_.insert(current_.end(), data.begin(), data.end());
  bytes_added_ += data.size();
  if (!last) return absl::OkStatus();
  if (exact_ && current_.size() != limit) return Corrupt("a tensor is too short");
  done_.emplace_back(std::move(current_));
  current_ = Bytes();
  return absl::OkStatus();
}

void GrowingTensors::AddTensor(SharedBytes tensor) {
  absl::MutexLock lock(&mutex_);
  STRETTO_CHECK(done_.size() < limits_.size() && current_.empty());
  bytes_added_ += tensor.size();
  done_.push_back(std::move(tensor));
}

absl::StatusOr<SharedBytes> GrowingTensors::AwaitTensor(size_t i) const {
  absl::MutexLock lock(&mutex_);
  const auto is_there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return done_.size() > i || !failure_.ok();
  };
  mutex_.Await(absl::Condition(&is_there));
  if (done_.size() > i) return done_[i];
  return failure_;
}

void GrowingTensors::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = status;
}

TensorPiece GrowingTensors::End() const {
  absl::MutexLock lock(&mutex_);
  return {.tensor = done_.size(), .offset = current_.size(), .data = "", .last = false};
}

uint64_t GrowingTensors::bytes_added() const {
  absl::MutexLock lock(&mutex_);
  return bytes_added_;
}

absl::StatusOr<std::vector<SharedBytes>> GrowingTensors::Tensors() const {
  absl::MutexLock lock(&mutex_);
  if (done_.size() != limits_.size()) return Corrupt("it ended early");
  return done_;
}

bool GrowingTensors::HasMore(size_t tensor, size_t offset) const {
  return tensor < done_.size() || (tensor == done_.size() && offset < current_.size());
}

absl::StatusOr<GrowingTensors::Found> GrowingTensors::Next(TensorPiece& piece, size_t max_bytes,
                                                           absl::Duration timeout) const {
  const size_t tensor = piece.last ? piece.tensor + 1 : piece.tensor;
  const size_t offset = piece.last ? 0 : piece.offset + piece.data.size();
  if (tensor >= limits_.size()) return Found::kEnd;
  piece = {.tensor = tensor, .offset = offset, .data = std::move(piece.data), .last = false};
  piece.data.clear();
  SharedBytes whole;
  {
    absl::MutexLock lock(&mutex_);
    const auto is_there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return HasMore(tensor, offset) || !failure_.ok();
    };
    mutex_.AwaitWithTimeout(absl::Condition(&is_there), timeout);
    if (!HasMore(tensor, offset)) {
      if (!failure_.ok()) return failure_;
      return Found::kNothingYet;
    }
    if (tensor == done_.size()) {
      const size_t size = std::min(max_bytes, current_.size() - offset);
      piece.data.assign(reinterpret_cast<const char*>(current_.data()) + offset, size);
      return Found::kPiece;
    }
    whole = done_[tensor];
  }
  if (offset > whole.size()) return Corrupt("asked for bytes behind a tensor's end");
  const size_t size = std::min(max_bytes, whole.size() - offset);
  piece.data.assign(reinterpret_cast<const char*>(whole.span().data()) + offset, size);
  piece.last = offset + size == whole.size();
  return Found::kPiece;
}
}  // namespace stretto::engine
