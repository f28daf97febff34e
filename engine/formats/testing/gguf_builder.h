// For tests and fuzzing: GGUF files byte by byte, right or wrong, and a walk through everything
// that a parsed file can be asked.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace stretto::engine::formats_testing {
class GgufBuilder {
 public:
  GgufBuilder& Magic(uint32_t magic) {
    magic_ = magic;
    return *this;
  }
  GgufBuilder& Version(uint32_t version) {
    version_ = version;
    return *this;
  }
  // Counts to write instead of the true ones.
  GgufBuilder& Counts(uint64_t tensors, uint64_t keys) {
    num_tensors_ = tensors;
    num_keys_ = keys;
    return *this;
  }
  // A key and the number of its value's type; its value's bytes follow.
  GgufBuilder& Key(const std::string& name, uint32_t type) {
    ++num_keys_;
    Put(keys_, static_cast<uint64_t>(name.size()));
    keys_.insert(keys_.end(), name.begin(), name.end());
    Put(keys_, type);
    return *this;
  }
  GgufBuilder& U8(uint8_t v) { return Value(v); }
  GgufBuilder& U16(uint16_t v) { return Value(v); }
  GgufBuilder& U32(uint32_t v) { return Value(v); }
  GgufBuilder& U64(uint64_t v) { return Value(v); }
  GgufBuilder& F32(float v) { return Value(v); }
  GgufBuilder& F64(double v) { return Value(v); }
  GgufBuilder& String(const std::string& text) {
    Put(keys_, static_cast<uint64_t>(text.size()));
    keys_.insert(keys_.end(), text.begin(), text.end());
    return *this;
  }
  // A tensor's entry, and `data_bytes` more bytes of data behind what is there.
  GgufBuilder& Tensor(const std::string& name, const std::vector<uint64_t>& dims, uint32_t type,
                      uint64_t offset, size_t data_bytes) {
    ++num_tensors_;
    Put(tensors_, static_cast<uint64_t>(name.size()));
    tensors_.insert(tensors_.end(), name.begin(), name.end());
    Put(tensors_, static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) Put(tensors_, dim);
    Put(tensors_, type);
    Put(tensors_, offset);
    num_data_bytes_ += data_bytes;
    return *this;
  }
  std::vector<uint8_t> Build() const {
    std::vector<uint8_t> out;
    Put(out, magic_);
    Put(out, version_);
    Put(out, num_tensors_);
    Put(out, num_keys_);
    out.insert(out.end(), keys_.begin(), keys_.end());
    out.insert(out.end(), tensors_.begin(), tensors_.end());
    out.resize((out.size() + 31) / 32 * 32 + num_data_bytes_);
    return out;
  }

 private:
  template <class T>
  static void Put(std::vector<uint8_t>& out, T value) {
    const size_t at = out.size();
    out.resize(at + sizeof value);
    std::memcpy(out.data() + at, &value, sizeof value);
  }
  template <class T>
  GgufBuilder& Value(T value) {
    Put(keys_, value);
    return *this;
  }
  uint32_t magic_ = 0x46554747, version_ = 3;
  uint64_t num_tensors_ = 0, num_keys_ = 0;
  size_t num_data_bytes_ = 0;
  std::vector<uint8_t> keys_, tensors_;
};
}  // namespace stretto::engine::formats_testing
