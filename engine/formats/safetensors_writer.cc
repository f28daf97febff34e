// The writing half of safetensors.h.
#include <unistd.h>

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/checked.h"
#include "engine/formats/json.h"
#include "engine/formats/safetensors.h"

namespace stretto::engine {
namespace {
using Tensor = SafetensorsWriter::Tensor;
// In the order of the data, so that a reader goes through the file forwards.
using OrderedJson = nlohmann::ordered_json;

absl::StatusOr<int64_t> TensorBytes(const std::string& path, const Tensor& tensor) {
  const auto elements = CheckedProduct(tensor.shape);
  const auto bytes = elements.has_value()
                         ? CheckedMul(*elements, static_cast<int64_t>(SizeOf(tensor.type)))
                         : std::nullopt;
  if (!bytes.has_value() || tensor.shape.size() > kMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": tensor ", tensor.name, " has an impossible shape"));
  }
  return *bytes;
}

absl::Status CheckNames(const std::string& path, const std::vector<Tensor>& tensors) {
  std::vector<absl::string_view> names;
  for (const Tensor& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == "__metadata__" || (i > 0 && names[i] == names[i - 1])) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor name ", names[i], " is reserved or appears twice"));
    }
  }
  return absl::OkStatus();
}

// The header's length and text, padded with blanks so that the data begins at a multiple of 8.
std::string HeaderBytes(const OrderedJson& header) {
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  return std::string(reinterpret_cast<const char*>(&size), 8) + text;
}
}  // namespace

SafetensorsWriter::SafetensorsWriter(Files& files, std::string path, std::vector<Tensor> tensors)
    : files_(files),
      path_(std::move(path)),
      temporary_path_(absl::StrCat(path_, ".tmp.", ::getpid())),
      tensors_(std::move(tensors)) {}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    Files& files, const std::string& path, std::vector<Tensor> tensors,
    const std::map<std::string, std::string>& metadata) {
  RETURN_IF_ERROR(CheckNames(path, tensors));
  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    const size_t a_size = SizeOf(a.type), b_size = SizeOf(b.type);
    return std::tie(b_size, a.name) < std::tie(a_size, b.name);
  });
  OrderedJson header = OrderedJson::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    ASSIGN_OR_RETURN(const int64_t bytes, TensorBytes(path, tensor));
    if (bytes > INT64_MAX - offset) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": the tensors' sizes overflow"));
    }
    OrderedJson entry;
    entry["dtype"] = std::string(Name(ToStorage(tensor.type)));
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {offset, offset + bytes};
    header.push_back({tensor.name, std::move(entry)});
    offset += bytes;
  }
  auto writer =
      std::unique_ptr<SafetensorsWriter>(new SafetensorsWriter(files, path, std::move(tensors)));
  writer->data_bytes_ = static_cast<uint64_t>(offset);
  ASSIGN_OR_RETURN(writer->file_, files.Create(writer->temporary_path_));
  RETURN_IF_ERROR(writer->file_->Append(AsBytes(HeaderBytes(header))));
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ == nullptr || finished_) return;
  file_.reset();
  (void)files_.RemoveAll(temporary_path_);
}

absl::Status SafetensorsWriter::Append(absl::Span<const uint8_t> bytes) {
  if (bytes.size() > data_bytes_ - appended_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": more than the ", data_bytes_, " bytes that were declared"));
  }
  RETURN_IF_ERROR(file_->Append(bytes));
  appended_ += bytes.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (finished_ || appended_ != data_bytes_) {
    return absl::FailedPreconditionError(absl::StrCat(path_, ": ", appended_, " of ", data_bytes_,
                                                      " declared bytes were written",
                                                      finished_ ? ", and finished already" : ""));
  }
  RETURN_IF_ERROR(file_->Sync());
  RETURN_IF_ERROR(file_->Close());
  RETURN_IF_ERROR(files_.Rename(temporary_path_, path_));
  finished_ = true;
  return absl::OkStatus();
}
}  // namespace stretto::engine
