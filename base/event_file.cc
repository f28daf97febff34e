#include "base/event_file.h"

#include <array>
#include <bit>

#include "base/status.h"

namespace stretto {
namespace {
std::array<uint32_t, 256> MakeCrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0);
    table[i] = crc;
  }
  return table;
}

// Records hold rotated and shifted checksums, so that a checksum of checksums stays useful.
uint32_t Masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; }

void AppendFixed(std::string* out, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}
void AppendVarint(std::string* out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}
// Protocol Buffers' wire types: 0 varint, 1 fixed64, 2 length-delimited, 5 fixed32.
void AppendTag(std::string* out, int field, int wire_type) {
  AppendVarint(out, static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire_type));
}
void AppendBytes(std::string* out, int field, const std::string& bytes) {
  AppendTag(out, field, 2);
  AppendVarint(out, bytes.size());
  out->append(bytes);
}

std::string EventHead(double wall_seconds, int64_t step) {
  std::string event;
  AppendTag(&event, 1, 1);
  AppendFixed(&event, std::bit_cast<uint64_t>(wall_seconds), 8);
  AppendTag(&event, 2, 0);
  AppendVarint(&event, static_cast<uint64_t>(step));
  return event;
}
}  // namespace

uint32_t Crc32c(absl::Span<const uint8_t> bytes) {
  static const std::array<uint32_t, 256> table = MakeCrcTable();
  uint32_t crc = ~0u;
  for (const uint8_t byte : bytes) crc = (crc >> 8) ^ table[(crc ^ byte) & 0xff];
  return ~crc;
}

absl::StatusOr<std::unique_ptr<EventFile>> EventFile::Create(Files& files, Clock& clock,
                                                             const std::string& folder,
                                                             const std::string& suffix) {
  RETURN_IF_ERROR(files.MakeDirs(folder));
  const std::string path = JoinPath(
      folder, absl::StrCat("events.out.tfevents.", clock.WallUs() / 1'000'000, ".", suffix));
  ASSIGN_OR_RETURN(auto file, files.Create(path));
  auto events = std::unique_ptr<EventFile>(new EventFile(clock, path, std::move(file)));
  std::string version = EventHead(static_cast<double>(clock.WallUs()) * 1e-6, 0);
  AppendBytes(&version, 3, "brain.Event:2");
  RETURN_IF_ERROR(events->WriteRecord(version));
  return events;
}

absl::Status EventFile::AddScalars(int64_t step, const std::map<std::string, double>& scalars) {
  std::string summary;
  for (const auto& [name, value] : scalars) {
    std::string entry;
    AppendBytes(&entry, 1, name);
    AppendTag(&entry, 2, 5);
    AppendFixed(&entry, std::bit_cast<uint32_t>(static_cast<float>(value)), 4);
    AppendBytes(&summary, 1, entry);
  }
  std::string event = EventHead(static_cast<double>(clock_.WallUs()) * 1e-6, step);
  AppendBytes(&event, 5, summary);
  return WriteRecord(event);
}

absl::Status EventFile::WriteRecord(const std::string& event) {
  std::string record;
  AppendFixed(&record, event.size(), 8);
  AppendFixed(&record, Masked(Crc32c(AsBytes(record))), 4);
  record += event;
  AppendFixed(&record, Masked(Crc32c(AsBytes(event))), 4);
  return file_->Append(AsBytes(record));
}
}  // namespace stretto
