#include "services/coordinator/event_file.h"

#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace stretto::services {
namespace {
std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78u : 0u);
    table[i] = value;
  }
  return table;
}

template <class T>
void AppendLittleEndian(T value, std::string* out) {
  for (size_t i = 0; i < sizeof(T); ++i)
    out->push_back(static_cast<char>((value >> (8 * i)) & 0xff));
}

// Protocol buffer wire format: fields by number.
void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}
void AppendInt(uint32_t field, int64_t value, std::string* out) {
  AppendVarint(field << 3, out);
  AppendVarint(static_cast<uint64_t>(value), out);
}
void AppendDouble(uint32_t field, double value, std::string* out) {
  AppendVarint((field << 3) | 1, out);
  AppendLittleEndian(std::bit_cast<uint64_t>(value), out);
}
void AppendFloat(uint32_t field, float value, std::string* out) {
  AppendVarint((field << 3) | 5, out);
  AppendLittleEndian(std::bit_cast<uint32_t>(value), out);
}
void AppendBytes(uint32_t field, absl::string_view bytes, std::string* out) {
  AppendVarint((field << 3) | 2, out);
  AppendVarint(bytes.size(), out);
  absl::StrAppend(out, bytes);
}
}  // namespace

uint32_t Crc32c(absl::string_view bytes) {
  static const std::array<uint32_t, 256> table = MakeTable();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = (crc >> 8) ^ table[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

uint32_t MaskedCrc32c(absl::string_view bytes) {
  const uint32_t crc = Crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

absl::StatusOr<std::unique_ptr<EventFile>> EventFile::Create(Files& files,
                                                             const std::string& folder,
                                                             int64_t wall_us,
                                                             const std::string& suffix) {
  RETURN_IF_ERROR(files.MakeDirs(folder));
  ASSIGN_OR_RETURN(auto file,
                   files.Create(JoinPath(folder, absl::StrCat("events.out.tfevents.",
                                                              wall_us / 1000000, ".", suffix))));
  std::unique_ptr<EventFile> events(new EventFile(std::move(file)));
  std::string event;
  AppendDouble(1, static_cast<double>(wall_us) * 1e-6, &event);
  AppendBytes(3, "brain.Event:2", &event);
  RETURN_IF_ERROR(events->WriteRecord(event));
  return events;
}

absl::Status EventFile::AddScalars(int64_t step, int64_t wall_us,
                                   const std::map<std::string, double>& scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) {
    std::string entry;
    AppendBytes(1, tag, &entry);
    AppendFloat(2, static_cast<float>(value), &entry);
    AppendBytes(1, entry, &summary);
  }
  std::string event;
  AppendDouble(1, static_cast<double>(wall_us) * 1e-6, &event);
  AppendInt(2, step, &event);
  AppendBytes(5, summary, &event);
  return WriteRecord(event);
}

absl::Status EventFile::WriteRecord(const std::string& bytes) {
  std::string record;
  AppendLittleEndian(uint64_t{bytes.size()}, &record);
  AppendLittleEndian(MaskedCrc32c(record), &record);
  record += bytes;
  AppendLittleEndian(MaskedCrc32c(bytes), &record);
  return file_->Append(AsBytes(record));
}
}  // namespace stretto::services
