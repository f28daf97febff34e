// GGUF against files that llama.cpp's Python package wrote and dequantised (tests/golden/gguf), and
// against files written here that break one rule each.
#include "engine/formats/gguf.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "base/bfloat16.h"
#include "base/testing.h"
#include "engine/formats/model_files.h"
#include "engine/formats/safetensors.h"
#include "engine/formats/testing/exercise.h"
#include "engine/formats/testing/gguf_builder.h"

namespace stretto::engine {
namespace {
const std::string kGolden = std::string(STRETTO_SOURCE_DIR) + "/tests/golden/gguf/";

std::vector<float> ReadF32(const TensorSource& source, const std::string& name) {
  const TensorInfo* info = source.Find(name);
  REQUIRE(info != nullptr);
  std::vector<float> values(static_cast<size_t>(NumElements(*info)));
  REQUIRE_OK(source.ReadAll(name, DType::kF32, values.data()));
  return values;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

TEST_CASE("every type is dequantised to the bits of the reference") {
  auto mapping = MappedFile::Open(kGolden + "quants.gguf");
  REQUIRE_OK(mapping);
  auto file = ParseGguf(kGolden + "quants.gguf", (*mapping)->bytes());
  REQUIRE_OK(file);
  auto source = GgufTensors(*file, ModelConfig{}, *mapping);
  REQUIRE_OK(source);
  auto expected = OpenSafetensors(kGolden + "quants.safetensors");
  REQUIRE_OK(expected);
  REQUIRE((*expected)->tensors().size() == 14);
  for (const TensorInfo& info : (*expected)->tensors()) {
    INFO(info.name);
    const TensorInfo* quantised = (*source)->Find(info.name);
    REQUIRE(quantised != nullptr);
    REQUIRE(Name(quantised->type) == info.name);
    REQUIRE(quantised->shape == info.shape);
    const std::vector<float> wanted = ReadF32(**expected, info.name);
    REQUIRE(SameBits(ReadF32(**source, info.name), wanted));
    // The middle row alone, as bf16.
    std::vector<uint16_t> row(512);
    REQUIRE_OK((*source)->ReadRows(info.name, 1, 2, DType::kBF16, row.data()));
    for (size_t i = 0; i < row.size(); ++i) REQUIRE(row[i] == F32ToBf16(wanted[512 + i]));
  }
}

TEST_CASE("a GGUF model is the Hugging Face folder it was made from") {
  for (const std::string arch : {"llama", "qwen2", "qwen3"}) {
    INFO(arch);
    auto gguf = OpenModel(kGolden + arch + ".gguf");
    auto folder = OpenModel(kGolden + arch);
    REQUIRE_OK(gguf);
    REQUIRE_OK(folder);
    REQUIRE(gguf->kind == ModelFiles::Kind::kGguf);
    REQUIRE_OK(CheckShapes(gguf->config, *gguf->tensors));
    REQUIRE_OK(CheckShapes(folder->config, *folder->tensors));
    REQUIRE_OK(ScanForNonFinite(gguf->config, *gguf->tensors));
    for (const TensorSpec& spec : ExpectedTensors(folder->config)) {
      INFO(spec.name);
      REQUIRE(SameBits(ReadF32(*gguf->tensors, spec.name), ReadF32(*folder->tensors, spec.name)));
    }
    // The same configuration, field by field, through its JSON.
    REQUIRE(ToHfConfigJson(gguf->config, DType::kF16) ==
            ToHfConfigJson(folder->config, DType::kF16));
    REQUIRE(gguf->config.torch_dtype == DType::kF16);
  }
}

TEST_CASE("rows of a permuted tensor can be read in any slices") {
  auto model = OpenModel(kGolden + "llama.gguf");
  REQUIRE_OK(model);
  const std::string name = "model.layers.1.self_attn.q_proj.weight";
  const std::vector<float> all = ReadF32(*model->tensors, name);
  for (int64_t begin = 0; begin <= 32; ++begin) {
    for (int64_t end = begin; end <= 32; ++end) {
      std::vector<float> part(static_cast<size_t>((end - begin) * 32) + 1, 7.0f);
      REQUIRE_OK(model->tensors->ReadRows(name, begin, end, DType::kF32, part.data()));
      REQUIRE(std::memcmp(part.data(), all.data() + begin * 32, (part.size() - 1) * 4) == 0);
      REQUIRE(part.back() == 7.0f);
    }
  }
}

TEST_CASE("the tokenizer in the metadata") {
  auto model = OpenModel(kGolden + "llama.gguf");
  REQUIRE_OK(model);
  REQUIRE(model->gguf_tokenizer != nullptr);
  const GgufTokenizer& t = *model->gguf_tokenizer;
  REQUIRE(t.model == "gpt2");
  REQUIRE(t.pre == "smollm");
  REQUIRE(t.tokens.size() == 24);
  REQUIRE(t.tokens[23] == "t23");
  REQUIRE(t.token_types == std::vector<int32_t>{3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
  REQUIRE(t.merges == std::vector<std::string>{"t 1", "t 2", "t1 0"});
  REQUIRE(t.bos_id == 1);
  REQUIRE(t.eos_id == 2);
  REQUIRE(t.eot_id == 0);
  REQUIRE(t.add_bos == false);
  REQUIRE(!t.add_eos.has_value());
  REQUIRE(t.chat_template == "{{ messages[0]['content'] }}");
}

TEST_CASE("RoPE divisors that Llama 3 did not publish stay divisors") {
  auto mapping = MappedFile::Open(kGolden + "llama.gguf");
  REQUIRE_OK(mapping);
  std::vector<uint8_t> bytes((*mapping)->bytes().begin(), (*mapping)->bytes().end());
  auto file = ParseGguf("x", bytes);
  REQUIRE_OK(file);
  for (TensorInfo& info : file->tensors) {
    if (info.name != "rope_freqs.weight") continue;
    const float other[4] = {1, 2, 3, 5};
    std::memcpy(bytes.data() + (info.bytes.data() - bytes.data()), other, sizeof other);
  }
  auto config = ConfigFromGguf(*file);
  REQUIRE_OK(config);
  REQUIRE(config->rope_scaling.type == RopeScaling::Type::kFactors);
  REQUIRE(config->rope_scaling.frequency_factors == std::vector<float>{1, 2, 3, 5});
  auto back = ParseHfConfig("config.json", ToHfConfigJson(*config, DType::kF32));
  REQUIRE_OK(back);
  REQUIRE(back->rope_scaling.frequency_factors == config->rope_scaling.frequency_factors);
}

// Parses what a builder made; the bytes live on the heap, so that a sanitizer sees every overrun.
absl::Status Parse(const formats_testing::GgufBuilder& builder) {
  const std::vector<uint8_t> bytes = builder.Build();
  return ParseGguf("x.gguf", bytes).status();
}

TEST_CASE("metadata of every type, and nested arrays") {
  formats_testing::GgufBuilder builder;
  builder.Key("u8", 0).U8(200).Key("i8", 1).U8(0xff).Key("u16", 2).U16(65535);
  builder.Key("i16", 3).U16(0xffff).Key("u32", 4).U32(~0u).Key("i32", 5).U32(~0u);
  builder.Key("f32", 6).F32(1.5f).Key("bool", 7).U8(1).Key("string", 8).String("text");
  builder.Key("u64", 10).U64(~0ull).Key("i64", 11).U64(~0ull).Key("f64", 12).F64(2.5);
  builder.Key("nested", 9).U32(9).U64(2).U32(0).U64(1).U8(5).U32(8).U64(1).String("x");
  const std::vector<uint8_t> bytes = builder.Build();
  auto file = ParseGguf("x", bytes);
  REQUIRE_OK(file);
  const auto& m = file->metadata;
  REQUIRE(std::get<uint64_t>(m.at("u8").value) == 200);
  REQUIRE(std::get<int64_t>(m.at("i8").value) == -1);
  REQUIRE(std::get<uint64_t>(m.at("u16").value) == 65535);
  REQUIRE(std::get<int64_t>(m.at("i16").value) == -1);
  REQUIRE(std::get<uint64_t>(m.at("u32").value) == 0xffffffffu);
  REQUIRE(std::get<int64_t>(m.at("i32").value) == -1);
  REQUIRE(std::get<double>(m.at("f32").value) == 1.5);
  REQUIRE(std::get<bool>(m.at("bool").value));
  REQUIRE(std::get<std::string>(m.at("string").value) == "text");
  REQUIRE(std::get<uint64_t>(m.at("u64").value) == UINT64_MAX);
  REQUIRE(std::get<int64_t>(m.at("i64").value) == -1);
  REQUIRE(std::get<double>(m.at("f64").value) == 2.5);
  const auto& nested = std::get<std::vector<GgufValue>>(std::get<GgufArray>(m.at("nested").value));
  REQUIRE(nested.size() == 2);
  REQUIRE(std::get<std::vector<std::string>>(std::get<GgufArray>(nested[1].value)) ==
          std::vector<std::string>{"x"});
}

TEST_CASE("files that break one rule are refused with its name") {
  const auto refused = [](const formats_testing::GgufBuilder& builder, const std::string& why) {
    const absl::Status status = Parse(builder);
    INFO(status.ToString() << " should say " << why);
    REQUIRE(!status.ok());
    REQUIRE(std::string(status.message()).find(why) != std::string::npos);
    REQUIRE(std::string(status.message()).find("x.gguf") == 0);
  };
  using B = formats_testing::GgufBuilder;
  REQUIRE_OK(Parse(B().Tensor("a", {32}, 8, 0, 34)));
  refused(B().Magic(1), "not a GGUF file");
  refused(B().Version(1), "version 1");
  refused(B().Version(0x03000000), "big-endian");
  refused(B().Key("a", 4).U32(1).Key("a", 4).U32(1), "twice");
  refused(B().Key("a", 13).U32(1), "unknown value type");
  refused(B().Key("a", 7).U8(2), "bool of value 2");
  refused(B().Key("a", 8).U64(1ull << 60), "string of");
  refused(B().Key("a", 9).U32(4).U64(1ull << 62), "array elements");
  refused(B().Key("a", 9).U32(77).U64(0), "unknown type");
  refused(B().Key("a", 9).U32(9).U64(1).U32(9).U64(1).U32(9).U64(1).U32(9).U64(1).U32(0).U64(0),
          "nested deeper");
  refused(B().Key("general.alignment", 4).U32(24), "general.alignment");
  refused(B().Key("general.alignment", 4).U32(0), "general.alignment");
  refused(B().Key("general.alignment", 8).String("32"), "general.alignment");
  refused(B().Counts(1ull << 61, 0), "tensors");
  refused(B().Counts(0, 1ull << 61), "metadata keys");
  refused(B().Tensor("a", {}, 0, 0, 0), "0 dimensions");
  refused(B().Tensor("a", {1, 1, 1, 1, 1}, 0, 0, 4), "5 dimensions");
  refused(B().Tensor("a", {0}, 0, 0, 4), "impossible shape");
  refused(B().Tensor("a", {1ull << 63}, 0, 0, 4), "overflows");
  refused(B().Tensor("a", {1ull << 32, 1ull << 32}, 0, 0, 4), "impossible shape");
  refused(B().Tensor("a", {1ull << 62}, 0, 0, 4), "overflows");
  refused(B().Tensor("a", {33}, 8, 0, 64), "multiple of 32");
  refused(B().Tensor("a", {128, 2}, 12, 0, 144), "multiple of 256");
  refused(B().Tensor("a", {4}, 4, 0, 16), "type 4 is not supported");
  refused(B().Tensor("a", {4}, 0, 8, 24), "not a multiple of 32");
  refused(B().Tensor("a", {4}, 0, 0, 15), "truncated");
  refused(B().Tensor("a", {4}, 0, ~31ull, 16), "truncated");
  refused(B().Tensor("a", {4}, 0, 0, 64).Tensor("a", {4}, 0, 32, 0), "twice");
  refused(B().Tensor("a", {16}, 0, 0, 96).Tensor("b", {16}, 0, 32, 0), "overlaps");
}

TEST_CASE("no prefix and no changed byte of a model does more than fail") {
  auto mapping = MappedFile::Open(kGolden + "llama.gguf");
  REQUIRE_OK(mapping);
  const auto whole = (*mapping)->bytes();
  auto parsed = ParseGguf("x", whole);
  REQUIRE_OK(parsed);
  const size_t header = static_cast<size_t>(parsed->tensors[0].bytes.data() - whole.data());
  for (size_t size = 0; size < whole.size(); size += size < header ? 1 : 97) {
    const std::vector<uint8_t> prefix(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
    if (ParseGguf("x", prefix).ok()) FAIL("a prefix of " << size << " bytes was accepted");
  }
  for (size_t at = 0; at < header; ++at) {
    for (const uint8_t flip : {0x01, 0x80, 0xff}) {
      std::vector<uint8_t> bytes(whole.begin(), whole.end());
      bytes[at] ^= flip;
      auto file = ParseGguf("x", bytes);
      if (file.ok()) formats_testing::ExerciseGguf(*std::move(file));
    }
  }
}
}  // namespace
}  // namespace stretto::engine
