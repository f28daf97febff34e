// The parser of gguf.h: bytes to metadata and tensors.
#include "engine/formats/gguf.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "engine/formats/checked.h"

namespace stretto::engine {
namespace {
constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint64_t kMaxTensorNameBytes = 1024;
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kMaxAlignment = uint64_t{1} << 20;
constexpr int kMaxArrayDepth = 4;

enum ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
  kNumValueTypes
};
// The fewest bytes that a value of a type takes.
constexpr uint64_t kMinBytes[kNumValueTypes] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};

// ggml's numbering of tensor types; gaps are types that are gone or not supported.
std::optional<StorageType> TensorType(uint32_t id) {
  switch (id) {
    case 0:
      return StorageType::kF32;
    case 1:
      return StorageType::kF16;
    case 2:
      return StorageType::kQ4_0;
    case 3:
      return StorageType::kQ4_1;
    case 6:
      return StorageType::kQ5_0;
    case 7:
      return StorageType::kQ5_1;
    case 8:
      return StorageType::kQ8_0;
    case 10:
      return StorageType::kQ2_K;
    case 11:
      return StorageType::kQ3_K;
    case 12:
      return StorageType::kQ4_K;
    case 13:
      return StorageType::kQ5_K;
    case 14:
      return StorageType::kQ6_K;
    case 15:
      return StorageType::kQ8_K;
    case 24:
      return StorageType::kI8;
    case 25:
      return StorageType::kI16;
    case 26:
      return StorageType::kI32;
    case 27:
      return StorageType::kI64;
    case 28:
      return StorageType::kF64;
    case 30:
      return StorageType::kBF16;
    default:
      return std::nullopt;
  }
}

// Reads forwards through the bytes and never beyond them. The first failure sticks; what is read
// after it is zero or empty.
class Cursor {
 public:
  Cursor(const std::string& path, absl::Span<const uint8_t> bytes) : path_(path), bytes_(bytes) {}
  const absl::Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  size_t position() const { return position_; }
  uint64_t left() const { return bytes_.size() - position_; }

  void Fail(absl::string_view problem) {
    if (ok()) {
      status_ = absl::InvalidArgumentError(
          absl::StrCat(path_, ": at byte ", position_, ": ", context_, problem));
    }
  }
  // What is being read, for messages: "metadata key x: ".
  void SetContext(std::string context) { context_ = std::move(context); }

  template <class T>
  T Read() {
    T value{};
    if (!ok() || left() < sizeof(T)) {
      Fail("the file ends here (truncated?)");
      return value;
    }
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }
  bool ReadBool() {
    const auto byte = Read<uint8_t>();
    if (byte > 1) Fail(absl::StrCat("a bool of value ", byte, ", expected 0 or 1"));
    return byte == 1;
  }
  std::string ReadString(uint64_t max_bytes) {
    const auto size = Read<uint64_t>();
    if (ok() && (size > left() || size > max_bytes)) {
      Fail(absl::StrCat("a string of ", size, " bytes, but ", left(), " are left and the limit is ",
                        max_bytes));
    }
    if (!ok()) return "";
    std::string text(reinterpret_cast<const char*>(bytes_.data()) + position_, size);
    position_ += size;
    return text;
  }
  // A count of things of which each takes at least `min_bytes`.
  uint64_t ReadCount(absl::string_view what, uint64_t min_bytes) {
    const auto count = Read<uint64_t>();
    if (ok() && count > left() / min_bytes) {
      Fail(absl::StrCat(count, " ", what, ", but only ", left(), " bytes are left"));
    }
    return ok() ? count : 0;
  }

 private:
  const std::string& path_;
  absl::Span<const uint8_t> bytes_;
  size_t position_ = 0;
  std::string context_;
  absl::Status status_;
};

uint64_t ReadUnsigned(Cursor& in, uint32_t type) {
  switch (type) {
    case kUint8:
      return in.Read<uint8_t>();
    case kUint16:
      return in.Read<uint16_t>();
    case kUint32:
      return in.Read<uint32_t>();
    default:
      return in.Read<uint64_t>();
  }
}

int64_t ReadSigned(Cursor& in, uint32_t type) {
  switch (type) {
    case kInt8:
      return in.Read<int8_t>();
    case kInt16:
      return in.Read<int16_t>();
    case kInt32:
      return in.Read<int32_t>();
    default:
      return in.Read<int64_t>();
  }
}

template <class T, class ReadOne>
std::vector<T> ReadElements(Cursor& in, uint64_t count, const ReadOne& read) {
  std::vector<T> elements;
  elements.reserve(count);
  for (uint64_t i = 0; i < count && in.ok(); ++i) elements.push_back(read());
  return elements;
}

GgufArray ReadArray(Cursor& in, int depth) {
  const auto type = in.Read<uint32_t>();
  if (in.ok() && type >= kNumValueTypes) {
    in.Fail(absl::StrCat("unknown type ", type, " of array elements"));
  }
  if (in.ok() && depth >= kMaxArrayDepth) {
    in.Fail(absl::StrCat("arrays nested deeper than ", kMaxArrayDepth));
  }
  if (!in.ok()) return {};
  const uint64_t count = in.ReadCount("array elements", kMinBytes[type]);
  switch (type) {
    case kUint8:
    case kUint16:
    case kUint32:
    case kUint64:
      return ReadElements<uint64_t>(in, count, [&] { return ReadUnsigned(in, type); });
    case kInt8:
    case kInt16:
    case kInt32:
    case kInt64:
      return ReadElements<int64_t>(in, count, [&] { return ReadSigned(in, type); });
    case kFloat32:
      return ReadElements<double>(in, count, [&] { return double{in.Read<float>()}; });
    case kFloat64:
      return ReadElements<double>(in, count, [&] { return in.Read<double>(); });
    case kBool:
      return ReadElements<bool>(in, count, [&] { return in.ReadBool(); });
    case kString:
      return ReadElements<std::string>(in, count, [&] { return in.ReadString(UINT64_MAX); });
    default:
      return ReadElements<GgufValue>(in, count,
                                     [&] { return GgufValue{ReadArray(in, depth + 1)}; });
  }
}

GgufValue ReadValue(Cursor& in) {
  const auto type = in.Read<uint32_t>();
  switch (type) {
    case kUint8:
    case kUint16:
    case kUint32:
    case kUint64:
      return {ReadUnsigned(in, type)};
    case kInt8:
    case kInt16:
    case kInt32:
    case kInt64:
      return {ReadSigned(in, type)};
    case kFloat32:
      return {double{in.Read<float>()}};
    case kFloat64:
      return {in.Read<double>()};
    case kBool:
      return {in.ReadBool()};
    case kString:
      return {in.ReadString(UINT64_MAX)};
    case kArray:
      return {ReadArray(in, 0)};
    default:
      in.Fail(absl::StrCat("unknown value type ", type));
      return {uint64_t{0}};
  }
}

void ReadMetadata(Cursor& in, uint64_t count, GgufFile& file) {
  for (uint64_t i = 0; i < count && in.ok(); ++i) {
    in.SetContext(absl::StrCat("metadata key ", i + 1, " of ", count, ": "));
    std::string key = in.ReadString(kMaxKeyBytes);
    in.SetContext(absl::StrCat("metadata ", key.substr(0, 200), ": "));
    GgufValue value = ReadValue(in);
    if (!file.metadata.emplace(std::move(key), std::move(value)).second) {
      in.Fail("the key appears twice");
    }
  }
}

absl::StatusOr<uint64_t> Alignment(const GgufFile& file) {
  const auto it = file.metadata.find("general.alignment");
  if (it == file.metadata.end()) return 32;
  const auto* value = std::get_if<uint64_t>(&it->second.value);
  if (value == nullptr || *value == 0 || *value > kMaxAlignment || (*value & (*value - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path, ": general.alignment is not a power of two up to ", kMaxAlignment));
  }
  return *value;
}

struct Placed {
  TensorInfo info;
  uint64_t offset = 0, size = 0;
};

// The bytes of a tensor, checking its dimensions.
uint64_t TensorBytes(Cursor& in, const TensorInfo& info) {
  const auto elements = CheckedProduct(info.shape);
  const int64_t row = info.shape.back(), block = BlockElements(info.type);
  if (!elements.has_value() || *elements == 0) {
    in.Fail(absl::StrCat("impossible shape [", absl::StrJoin(info.shape, ", "), "]"));
    return 0;
  }
  if (row % block != 0) {
    in.Fail(absl::StrCat("rows of ", row, " elements, expected a multiple of ", block, " for ",
                         Name(info.type)));
    return 0;
  }
  const auto bytes = CheckedMul(*elements / block, BlockBytes(info.type));
  if (!bytes.has_value()) in.Fail("its size overflows");
  return static_cast<uint64_t>(bytes.value_or(0));
}

Placed ReadTensorInfo(Cursor& in, uint64_t alignment) {
  Placed placed;
  TensorInfo& info = placed.info;
  info.name = in.ReadString(kMaxTensorNameBytes);
  in.SetContext(absl::StrCat("tensor ", info.name.substr(0, 200), ": "));
  const auto num_dims = in.Read<uint32_t>();
  if (in.ok() && (num_dims == 0 || num_dims > kMaxDims)) {
    in.Fail(absl::StrCat(num_dims, " dimensions, expected 1 to ", kMaxDims));
  }
  for (uint32_t i = 0; i < num_dims && in.ok(); ++i) {
    const auto dim = in.Read<uint64_t>();
    if (dim > static_cast<uint64_t>(INT64_MAX)) in.Fail("a dimension overflows");
    info.shape.insert(info.shape.begin(), static_cast<int64_t>(dim));
  }
  const auto type_id = in.Read<uint32_t>();
  placed.offset = in.Read<uint64_t>();
  if (!in.ok()) return placed;
  const auto type = TensorType(type_id);
  if (!type.has_value()) {
    in.Fail(absl::StrCat("type ", type_id, " is not supported (F32, F16, BF16, Q4_0, Q4_1, Q5_0, ",
                         "Q5_1, Q8_0, Q2_K to Q6_K and Q8_K are)"));
    return placed;
  }
  info.type = *type;
  placed.size = TensorBytes(in, info);
  if (in.ok() && placed.offset % alignment != 0) {
    in.Fail(absl::StrCat("offset ", placed.offset, " is not a multiple of ", alignment));
  }
  return placed;
}

absl::Status PlaceTensors(absl::Span<const uint8_t> data, std::vector<Placed>& placed,
                          GgufFile& file) {
  const auto bad = [&](const Placed& tensor, absl::string_view problem) {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path, ": tensor ", tensor.info.name, ": ", problem));
  };
  for (Placed& tensor : placed) {
    if (tensor.offset > data.size() || tensor.size > data.size() - tensor.offset) {
      return bad(tensor,
                 absl::StrCat("takes ", tensor.size, " bytes from ", tensor.offset,
                              " of the data, but there are ", data.size(), " (truncated?)"));
    }
    tensor.info.bytes = data.subspan(tensor.offset, tensor.size);
  }
  std::vector<const Placed*> by_offset;
  std::set<absl::string_view> names;
  for (const Placed& tensor : placed) {
    if (!names.insert(tensor.info.name).second) return bad(tensor, "the name appears twice");
    by_offset.push_back(&tensor);
  }
  std::sort(by_offset.begin(), by_offset.end(),
            [](const Placed* a, const Placed* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < by_offset.size(); ++i) {
    const Placed &before = *by_offset[i - 1], &tensor = *by_offset[i];
    if (before.offset + before.size > tensor.offset) {
      return bad(tensor, absl::StrCat("overlaps tensor ", before.info.name));
    }
  }
  for (Placed& tensor : placed) file.tensors.push_back(std::move(tensor.info));
  return absl::OkStatus();
}

absl::Status CheckVersion(const std::string& path, uint32_t version) {
  if (version == 2 || version == 3) return absl::OkStatus();
  const bool big_endian = version == 0x02000000 || version == 0x03000000;
  return absl::UnimplementedError(
      big_endian ? absl::StrCat(path, ": a big-endian GGUF file, expected little-endian")
                 : absl::StrCat(path, ": GGUF version ", version, ", expected 2 or 3"));
}
}  // namespace

absl::StatusOr<GgufFile> ParseGguf(const std::string& path, absl::Span<const uint8_t> bytes) {
  GgufFile file;
  file.path = path;
  Cursor in(path, bytes);
  const auto magic = in.Read<uint32_t>();
  if (in.ok() && magic != kMagic) in.Fail("not a GGUF file (no \"GGUF\" at its start)");
  file.version = in.Read<uint32_t>();
  RETURN_IF_ERROR(in.status());
  RETURN_IF_ERROR(CheckVersion(path, file.version));
  const uint64_t num_tensors = in.ReadCount("tensors", 32);
  const uint64_t num_keys = in.ReadCount("metadata keys", 13);
  ReadMetadata(in, num_keys, file);
  RETURN_IF_ERROR(in.status());
  ASSIGN_OR_RETURN(const uint64_t alignment, Alignment(file));
  std::vector<Placed> placed;
  for (uint64_t i = 0; i < num_tensors && in.ok(); ++i) {
    in.SetContext(absl::StrCat("tensor ", i + 1, " of ", num_tensors, ": "));
    placed.push_back(ReadTensorInfo(in, alignment));
  }
  RETURN_IF_ERROR(in.status());
  const uint64_t data_begin = (in.position() + alignment - 1) / alignment * alignment;
  const auto data = bytes.subspan(std::min<uint64_t>(data_begin, bytes.size()));
  RETURN_IF_ERROR(PlaceTensors(data, placed, file));
  return file;
}
}  // namespace stretto::engine
