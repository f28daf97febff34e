// safetensors: what is written is read back; every rule of the format that a file breaks is named;
// no prefix and no changed byte does more than fail.
#include "engine/formats/safetensors.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "base/bfloat16.h"
#include "base/testing.h"
#include "engine/formats/testing/exercise.h"

namespace stretto::engine {
namespace {
std::vector<uint8_t> Bytes(const std::string& header, size_t data_bytes) {
  const uint64_t size = header.size();
  std::vector<uint8_t> out(8 + header.size() + data_bytes);
  std::memcpy(out.data(), &size, 8);
  std::memcpy(out.data() + 8, header.data(), header.size());
  for (size_t i = 0; i < data_bytes; ++i) out[8 + header.size() + i] = static_cast<uint8_t>(i);
  return out;
}

std::string Entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

void Refused(const std::vector<uint8_t>& bytes, const std::string& why) {
  const absl::Status status = ParseSafetensors("x.safetensors", bytes).status();
  INFO(status.ToString() << " should say " << why);
  REQUIRE(!status.ok());
  REQUIRE(std::string(status.message()).find("x.safetensors") == 0);
  REQUIRE(std::string(status.message()).find(why) != std::string::npos);
}

void WriteFile(const std::string& path, absl::Span<const uint8_t> bytes) {
  REQUIRE_OK(Files::Real().WriteAtomically(
      path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
}

TEST_CASE("tensors of all readable types come out as f32 and bf16, aligned or not") {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a.f32":)" + Entry("F32", "[2,3]", "[0,24]") +
      R"(,"b.bf16":)" + Entry("BF16", "[2]", "[24,28]") + R"(,"c.f16":)" +
      Entry("F16", "[1,1,1]", "[28,30]") + R"(,"d.f64":)" + Entry("F64", "[]", "[30,38]") +
      R"(,"e.i64":)" + Entry("I64", "[0]", "[38,38]") + "}";
  for (const size_t pad : {0, 1, 2, 3}) {
    std::vector<uint8_t> bytes = Bytes(header + std::string(pad, ' '), 38);
    uint8_t* data = bytes.data() + bytes.size() - 38;
    const float f32[6] = {1, -2, 3.5f, 1e-40f, 1e30f, 1.00390625f};
    const uint16_t bf16[2] = {F32ToBf16(5), F32ToBf16(-6)}, f16 = F32ToF16(0.25f);
    const double f64 = -0.1;
    std::memcpy(data, f32, 24);
    std::memcpy(data + 24, bf16, 4);
    std::memcpy(data + 28, &f16, 2);
    std::memcpy(data + 30, &f64, 8);
    testing::TempDir folder;
    WriteFile(folder.File("m.safetensors"), bytes);
    auto source = OpenSafetensors(folder.File("m.safetensors"));
    REQUIRE_OK(source);
    REQUIRE((*source)->tensors().size() == 5);
    float out[6];
    REQUIRE_OK((*source)->ReadAll("a.f32", DType::kF32, out));
    REQUIRE(std::memcmp(out, f32, 24) == 0);
    uint16_t narrow[3];
    REQUIRE_OK((*source)->ReadRows("a.f32", 1, 2, DType::kBF16, narrow));
    for (int i = 0; i < 3; ++i) REQUIRE(narrow[i] == F32ToBf16(f32[3 + i]));
    REQUIRE_OK((*source)->ReadAll("b.bf16", DType::kBF16, narrow));
    REQUIRE(std::memcmp(narrow, bf16, 4) == 0);
    REQUIRE_OK((*source)->ReadAll("b.bf16", DType::kF32, out));
    REQUIRE(out[1] == -6.0f);
    REQUIRE_OK((*source)->ReadAll("c.f16", DType::kF32, out));
    REQUIRE(out[0] == 0.25f);
    REQUIRE_OK((*source)->ReadAll("d.f64", DType::kF32, out));
    REQUIRE(out[0] == -0.1f);
    REQUIRE((*source)->ReadAll("e.i64", DType::kF32, out).code() ==
            absl::StatusCode::kInvalidArgument);
    REQUIRE(absl::IsNotFound((*source)->ReadAll("f", DType::kF32, out)));
    REQUIRE(absl::IsOutOfRange((*source)->ReadRows("a.f32", 1, 3, DType::kF32, out)));
    REQUIRE(absl::IsOutOfRange((*source)->ReadRows("a.f32", -1, 1, DType::kF32, out)));
    REQUIRE(absl::IsOutOfRange((*source)->ReadRows("a.f32", 2, 1, DType::kF32, out)));
  }
}

TEST_CASE("each broken rule is named") {
  const std::string ok = Entry("U8", "[4]", "[0,4]");
  REQUIRE_OK(ParseSafetensors("x", Bytes(R"({"a":)" + ok + "}", 4)));
  Refused({1, 2, 3}, "too few");
  std::vector<uint8_t> long_header = Bytes("{}", 0);
  long_header[1] = 1;
  Refused(long_header, "header of 258 bytes");
  long_header.assign(8, 0xff);
  Refused(long_header, "header of 18446744073709551615 bytes");
  Refused(Bytes("", 0), "malformed JSON");
  Refused(Bytes("[]", 0), "not a JSON object");
  Refused(Bytes(R"({"a":)", 0), "malformed JSON");
  Refused(Bytes("{\"\xff\":1}", 0), "malformed JSON");
  Refused(Bytes(R"({"a":)" + ok + R"(,"a":)" + ok + "}", 4), "appears twice");
  Refused(Bytes(R"({"a":{"dtype":"U8","dtype":"U8"}})", 4), "appears twice");
  Refused(Bytes(R"({"a":[[[[[]]]]]})", 0), "nested deeper");
  Refused(Bytes(R"({"__metadata__":{"a":1}})", 0), "__metadata__");
  Refused(Bytes(R"({"a":{"dtype":"U8","shape":[4]}})", 4), "expected exactly the fields");
  Refused(Bytes(R"({"a":7})", 4), "tensor a: expected exactly the fields");
  Refused(Bytes(R"({"a":)" + Entry("Q9", "[4]", "[0,4]") + "}", 4), "unknown dtype \"Q9\"");
  Refused(Bytes(R"({"a":)" + Entry("Q4_0", "[32]", "[0,18]") + "}", 18), "unknown dtype");
  Refused(Bytes(R"({"a":)" + Entry("U8", "4", "[0,4]") + "}", 4), "shape is not a list");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[-4]", "[0,4]") + "}", 4), "not a size");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[4.0]", "[0,4]") + "}", 4), "not a size");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[1,1,1,1,1,1,1,1,4]", "[0,4]") + "}", 4), "shape");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[4]", "[0]") + "}", 4), "[begin, end]");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[4]", "[-1,3]") + "}", 4), "[begin, end]");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[5]", "[0,4]") + "}", 4), "takes 5 bytes");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[4]", "[4,0]") + "}", 4), "takes 4 bytes");
  const std::string huge = "[4294967296,4294967296]";
  Refused(Bytes(R"({"a":)" + Entry("U8", huge, "[0,0]") + "}", 0), "overflows");
  Refused(Bytes(R"({"a":)" + Entry("F64", "[4611686018427387904]", "[0,0]") + "}", 0), "overflows");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[0," + huge.substr(1), "[0,0]") + "}", 0), "overflows");
  Refused(Bytes(R"({"a":)" + Entry("U8", "[8]", "[0,8]") + "}", 4), "truncated");
  Refused(Bytes(R"({"a":)" + ok + R"(,"b":)" + Entry("U8", "[4]", "[2,6]") + "}", 6), "inside");
  Refused(Bytes(R"({"a":)" + ok + R"(,"b":)" + Entry("U8", "[2]", "[5,7]") + "}", 7), "hole");
  Refused(Bytes(R"({"a":)" + ok + "}", 5), "its tensors take 4");
}

// Two tensors of random numbers in a file.
std::string WriteSample(const std::string& path) {
  auto writer = SafetensorsWriter::Create(
      Files::Real(), path,
      {{"b", DType::kBF16, {3, 5}}, {"c", DType::kF32, {}}, {"a", DType::kF32, {7}}});
  REQUIRE_OK(writer);
  REQUIRE((*writer)->tensors()[0].name == "a");  // wider elements first, then by name
  REQUIRE((*writer)->tensors()[1].name == "c");
  REQUIRE((*writer)->tensors()[2].name == "b");
  std::vector<uint8_t> data(28 + 4 + 30);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 7);
  for (size_t i = 0; i < data.size(); i += 9) {  // in pieces that cross tensors
    REQUIRE_OK((*writer)->Append(absl::MakeSpan(data).subspan(i, 9)));
  }
  REQUIRE(!Files::Real().Exists(path));
  REQUIRE_OK((*writer)->Finish());
  return std::string(data.begin(), data.end());
}

TEST_CASE("what the writer writes the reader reads, aligned") {
  testing::TempDir folder;
  const std::string path = folder.File("model.safetensors");
  const std::string data = WriteSample(path);
  auto source = OpenSafetensorsFolder(folder.path());
  REQUIRE_OK(source);
  const TensorInfo *a = (*source)->Find("a"), *b = (*source)->Find("b"), *c = (*source)->Find("c");
  REQUIRE(a->shape == std::vector<int64_t>{7});
  REQUIRE(b->shape == std::vector<int64_t>{3, 5});
  REQUIRE(c->shape.empty());
  REQUIRE(reinterpret_cast<uintptr_t>(a->bytes.data()) % 8 == 0);
  REQUIRE(std::memcmp(a->bytes.data(), data.data(), 28) == 0);
  REQUIRE(std::memcmp(c->bytes.data(), data.data() + 28, 4) == 0);
  REQUIRE(std::memcmp(b->bytes.data(), data.data() + 32, 30) == 0);
  REQUIRE(Files::Real().List(folder.path())->size() == 1);
}

TEST_CASE("the writer refuses too many or too few bytes and leaves nothing behind") {
  testing::TempDir folder;
  const std::string path = folder.File("m.safetensors");
  {
    auto writer = SafetensorsWriter::Create(Files::Real(), path, {{"a", DType::kF32, {2}}});
    REQUIRE_OK(writer);
    const std::vector<uint8_t> bytes(9);
    REQUIRE(absl::IsFailedPrecondition((*writer)->Append(bytes)));
    REQUIRE_OK((*writer)->Append(absl::MakeSpan(bytes).subspan(0, 7)));
    REQUIRE(absl::IsFailedPrecondition((*writer)->Finish()));
  }
  REQUIRE(Files::Real().List(folder.path())->empty());
  const auto create = [&](std::vector<SafetensorsWriter::Tensor> tensors) {
    return SafetensorsWriter::Create(Files::Real(), path, std::move(tensors)).status().code();
  };
  REQUIRE(create({{"a", DType::kF32, {}}, {"a", DType::kF32, {}}}) ==
          absl::StatusCode::kInvalidArgument);
  REQUIRE(create({{"__metadata__", DType::kF32, {}}}) == absl::StatusCode::kInvalidArgument);
  REQUIRE(create({{"a", DType::kF32, {-1}}}) == absl::StatusCode::kInvalidArgument);
  REQUIRE(create({{"a", DType::kF32, {1 << 30, 1 << 30, 1 << 30}}}) ==
          absl::StatusCode::kInvalidArgument);
}

TEST_CASE("a sharded folder is one source, and its index must tell the truth") {
  testing::TempDir folder;
  const auto write = [&](const std::string& file, const std::string& tensor) {
    WriteFile(folder.File(file),
              Bytes("{\"" + tensor + "\":" + Entry("U8", "[4]", "[0,4]") + "}", 4));
  };
  const auto open = [&](const std::string& weight_map) {
    REQUIRE_OK(Files::Real().WriteAtomically(folder.File("model.safetensors.index.json"),
                                             "{\"weight_map\":" + weight_map + "}"));
    return OpenSafetensorsFolder(folder.path());
  };
  const auto refused = [&](const std::string& weight_map, const std::string& why) {
    const absl::Status status = open(weight_map).status();
    INFO(status.ToString() << " should say " << why);
    REQUIRE(!status.ok());
    REQUIRE(std::string(status.message()).find("index.json") != std::string::npos);
    REQUIRE(std::string(status.message()).find(why) != std::string::npos);
  };
  REQUIRE(absl::IsNotFound(OpenSafetensorsFolder(folder.path()).status()));
  write("1", "x");
  write("2", "b");
  auto source = open(R"({"x":"1","b":"2"})");
  REQUIRE_OK(source);
  REQUIRE((*source)->tensors().size() == 2);
  REQUIRE((*source)->tensors()[0].name == "b");
  refused(R"({"x":"1","b":"3"})", "shard 3");
  refused(R"({"x":"1","b":"2","c":"2"})", "tensor c: the index places it in 2, which lacks it");
  refused(R"({"x":"1","b":"1"})", "tensor b: the index places it in 1, which lacks it");
  refused(R"({"b":"1"})", "tensor x: lies in 1, but the index places it nowhere");
  refused(R"({"x":"1","b":"../2"})", "plain name");
  refused(R"({"x":"1","b":2})", "not a file name");
  refused("{}", "weight_map");
}

TEST_CASE("no prefix and no changed byte of a file does more than fail") {
  testing::TempDir folder;
  WriteSample(folder.File("m"));
  const std::string whole = *Files::Real().ReadAll(folder.File("m"));
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::vector<uint8_t> prefix(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
    if (ParseSafetensors("x", prefix).ok()) FAIL("a prefix of " << size << " bytes was accepted");
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int flip = 1; flip < 256; ++flip) {
      std::vector<uint8_t> bytes(whole.begin(), whole.end());
      bytes[at] ^= static_cast<uint8_t>(flip);
      auto tensors = ParseSafetensors("x", bytes);
      if (tensors.ok())
        formats_testing::ExerciseTensors(formats_testing::MemoryTensors(*std::move(tensors)));
    }
  }
}
}  // namespace
}  // namespace stretto::engine
