#include "engine/training/checkpoint_reader.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/safetensors.h"
#include "engine/training/tree_hash.h"

namespace stretto::engine {
namespace {
int64_t Product(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t s : shape) {
    if (s > 0 && product > (int64_t{1} << 60) / s) return -1;
    product *= s;
  }
  return product;
}

absl::Span<const uint8_t> Bytes(absl::Span<const float> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
}

// Puts elements [begin, …) of a box, row by row, in their places of a matrix of `cols` columns.
void Scatter(const TensorBox& box, int64_t begin, absl::Span<const float> values, int64_t cols,
             float* matrix) {
  const int64_t width = box.col_end - box.col_begin;
  const auto count = static_cast<int64_t>(values.size());
  for (int64_t done = 0; done < count;) {
    const int64_t row = (begin + done) / width, col = (begin + done) % width;
    const int64_t n = std::min(width - col, count - done);
    std::copy_n(values.data() + done, n,
                matrix + (box.row_begin + row) * cols + box.col_begin + col);
    done += n;
  }
}

// Whether parts that are no boxes follow one another from the first element to the last.
bool Cover(std::vector<CheckpointPart> parts, int64_t size) {
  std::sort(parts.begin(), parts.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  int64_t covered = 0;
  for (const CheckpointPart& p : parts) {
    if (p.begin != covered) return false;
    covered += p.count;
  }
  return covered == size;
}
}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(
    Files& files, const std::string& folder) {
  ASSIGN_OR_RETURN(CheckpointManifest manifest, ReadManifest(files, folder));
  return std::make_unique<CheckpointReader>(folder, std::move(manifest));
}

absl::Status CheckpointReader::Damaged(int64_t file, absl::string_view what) const {
  return absl::DataLossError(
      absl::StrCat(FileOfCheckpoint(folder_, manifest_.files[file]), ": ", what));
}

absl::StatusOr<const TensorSource*> CheckpointReader::Source(int64_t file) {
  auto& source = sources_[file];
  if (source == nullptr) {
    auto opened = OpenSafetensors(FileOfCheckpoint(folder_, manifest_.files[file]));
    if (absl::IsNotFound(opened.status()) || absl::IsInvalidArgument(opened.status())) {
      return absl::DataLossError(
          absl::StrCat("damaged checkpoint file: ", opened.status().message()));
    }
    if (!opened.ok()) return opened.status();
    source = *std::move(opened);
  }
  return source.get();
}

absl::StatusOr<const TensorInfo*> CheckpointReader::Stored(const std::string& name,
                                                           const CheckpointPart& part) {
  ASSIGN_OR_RETURN(const TensorSource* source, Source(part.file));
  const TensorInfo* t = source->Find(StoredName(name, part.box, part.stored_begin, false));
  if (t == nullptr && part.stored_begin == 0 && part.box.is_all()) t = source->Find(name);
  if (t == nullptr) {
    return Damaged(part.file, absl::StrCat("tensor ", name, " is not there, the manifest has it"));
  }
  if (t->type != StorageType::kF32) {
    return Damaged(part.file,
                   absl::StrCat("tensor ", t->name, " is of ", Name(t->type), ", not F32"));
  }
  return t;
}

absl::StatusOr<absl::Span<const float>> CheckpointReader::ReadPart(const std::string& name,
                                                                   const CheckpointPart& part) {
  ASSIGN_OR_RETURN(const TensorInfo* stored, Stored(name, part));
  const absl::Span<const float> all(reinterpret_cast<const float*>(stored->bytes.data()),
                                    stored->bytes.size() / sizeof(float));
  const int64_t offset = part.begin - part.stored_begin;
  const auto size = static_cast<int64_t>(all.size());
  const int64_t count = part.count < 0 ? size : part.count;
  if (offset + count > size) {
    return Damaged(part.file, absl::StrCat("tensor ", stored->name, " has ", size, " elements, ",
                                           offset + count, " are expected"));
  }
  const auto values = all.subspan(offset, count);
  if (HashBytes(Bytes(values)) != part.hash) {
    return Damaged(part.file, absl::StrCat("tensor ", stored->name,
                                           ": content does not match the manifest's hash"));
  }
  return values;
}

absl::StatusOr<absl::Span<const float>> CheckpointReader::Join(const std::string& name,
                                                               const CheckpointTensor& tensor) {
  const int64_t size = Product(tensor.shape);
  const int64_t cols = tensor.shape.empty() ? 1 : tensor.shape.back();
  const bool boxes = std::any_of(tensor.parts.begin(), tensor.parts.end(),
                                 [](const CheckpointPart& p) { return !p.box.is_all(); });
  int64_t total = 0;
  bool fits = size >= 0 && (boxes || Cover(tensor.parts, size));
  for (const CheckpointPart& p : tensor.parts) {
    total += p.count;
    fits = fits && p.count >= 0 && p.count <= size;
    if (p.box.is_all()) continue;
    fits = fits && cols > 0 && p.box.col_end <= cols && p.box.row_end <= size / cols &&
           p.begin + p.count <= p.box.size();
  }
  if (!fits || total != size) {
    return absl::DataLossError(absl::StrCat(JoinPath(folder_, kManifestFile), ": the parts of ",
                                            name, " are not the whole tensor"));
  }
  if (joined_capacity_ < size) {
    joined_.reset(new float[size]);
    joined_capacity_ = size;
  }
  for (const CheckpointPart& p : tensor.parts) {
    ASSIGN_OR_RETURN(const absl::Span<const float> values, ReadPart(name, p));
    if (p.box.is_all()) {
      std::copy(values.begin(), values.end(), joined_.get() + p.begin);
    } else {
      Scatter(p.box, p.begin, values, cols, joined_.get());
    }
  }
  return absl::MakeConstSpan(joined_.get(), size);
}

absl::StatusOr<std::vector<int64_t>> CheckpointReader::ShapeOf(StateTensor which,
                                                               const std::string& name) {
  const auto found = manifest_.tensors.find(TensorKey(which, name));
  if (found == manifest_.tensors.end() || found->second.parts.empty()) {
    return absl::NotFoundError(absl::StrCat("no tensor ", name));
  }
  if (found->second.parts[0].count >= 0) return found->second.shape;
  ASSIGN_OR_RETURN(const TensorInfo* stored, Stored(name, found->second.parts[0]));
  return stored->shape;
}

absl::StatusOr<absl::Span<const float>> CheckpointReader::Read(StateTensor which,
                                                               const std::string& name,
                                                               const std::vector<int64_t>& shape) {
  const std::string key = TensorKey(which, name);
  const auto found = manifest_.tensors.find(key);
  const auto another_model = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat(folder_, ": tensor ", name,
                     ": absent or of another shape; the checkpoint belongs to another model"));
  };
  if (found == manifest_.tensors.end()) return another_model();
  const CheckpointTensor& tensor = found->second;
  const bool is_old = tensor.parts.size() == 1 && tensor.parts[0].count < 0;
  if (!is_old && tensor.shape != shape) return another_model();
  if (is_old || (tensor.parts.size() == 1 && tensor.parts[0].box.is_all() &&
                 tensor.parts[0].count == Product(shape))) {
    ASSIGN_OR_RETURN(const absl::Span<const float> values, ReadPart(name, tensor.parts[0]));
    if (!is_old) return values;
    // Its content is what was written, so is its shape.
    ASSIGN_OR_RETURN(const TensorInfo* stored, Stored(name, tensor.parts[0]));
    if (stored->shape != shape) return another_model();
    return values;
  }
  ASSIGN_OR_RETURN(const absl::Span<const float> values, Join(name, tensor));
  if (HashBytes(Bytes(values)) != tensor.hash) {
    return absl::DataLossError(absl::StrCat(folder_, ": tensor ", name,
                                            ": its joined parts do not match the manifest's hash"));
  }
  return values;
}

absl::StatusOr<std::string> CheckpointReader::HashOf(StateTensor which, const std::string& name) {
  const auto found = manifest_.tensors.find(TensorKey(which, name));
  if (found == manifest_.tensors.end()) {
    return absl::NotFoundError(absl::StrCat("no tensor ", name));
  }
  ASSIGN_OR_RETURN(const absl::Span<const float> values, Join(name, found->second));
  return HashBytes(Bytes(values));
}

std::vector<std::string> CheckpointReader::Names(StateTensor which) const {
  const std::string prefix = TensorKey(which, "");
  std::vector<std::string> names;
  for (auto it = manifest_.tensors.lower_bound(prefix); it != manifest_.tensors.end(); ++it) {
    if (!absl::StartsWith(it->first, prefix)) break;
    names.push_back(it->first.substr(prefix.size()));
  }
  return names;
}
}  // namespace stretto::engine
