#include "engine/formats/gguf_tokenizer.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/gguf.h"
#include "engine/formats/gguf_fields.h"

namespace stretto::engine {
namespace {
constexpr char kPrefix[] = "tokenizer.ggml.";

void ReadLists(GgufFields& fields, GgufTokenizer& out) {
  const std::string prefix = kPrefix;
  out.tokens = fields.Array<std::string>(prefix + "tokens", "an array of strings");
  if (out.tokens.empty()) fields.Fail("metadata tokenizer.ggml.tokens is missing or empty");
  for (const double score : fields.Array<double>(prefix + "scores", "an array of floats")) {
    out.scores.push_back(static_cast<float>(score));
  }
  for (const int64_t type :
       fields.Array<int64_t>(prefix + "token_type", "an array of signed integers")) {
    if (type < 0 || type > 6) {
      return fields.Fail(
          absl::StrCat("metadata tokenizer.ggml.token_type holds ", type, ", expected 1 to 6"));
    }
    out.token_types.push_back(static_cast<int32_t>(type));
  }
  out.merges = fields.Array<std::string>(prefix + "merges", "an array of strings");
  const auto check = [&](const char* name, size_t size) {
    if (size == 0 || size == out.tokens.size()) return;
    fields.Fail(absl::StrCat("metadata tokenizer.ggml.", name, " has ", size,
                             " entries, expected one for each of ", out.tokens.size(), " tokens"));
  };
  check("scores", out.scores.size());
  check("token_type", out.token_types.size());
}
}  // namespace

absl::StatusOr<GgufTokenizer> TokenizerFromGguf(const GgufFile& file) {
  GgufFields fields(file);
  const std::string prefix = kPrefix;
  GgufTokenizer out;
  out.path = file.path;
  out.model = fields.String(prefix + "model");
  RETURN_IF_ERROR(fields.status());
  out.pre = fields.String(prefix + "pre", "");
  ReadLists(fields, out);
  RETURN_IF_ERROR(fields.status());
  const auto id = [&](const char* name) -> std::optional<int64_t> {
    const std::string key = absl::StrCat(prefix, name, "_token_id");
    if (!fields.Has(key)) return std::nullopt;
    return fields.Int(key, 0, static_cast<int64_t>(out.tokens.size()) - 1);
  };
  out.bos_id = id("bos");
  out.eos_id = id("eos");
  out.eot_id = id("eot");
  out.unk_id = id("unknown");
  out.pad_id = id("padding");
  const auto flag = [&](const char* name) -> std::optional<bool> {
    const std::string key = prefix + name;
    if (!fields.Has(key)) return std::nullopt;
    return fields.Bool(key);
  };
  out.add_bos = flag("add_bos_token");
  out.add_eos = flag("add_eos_token");
  out.add_space_prefix = flag("add_space_prefix");
  out.chat_template = fields.String("tokenizer.chat_template", "");
  RETURN_IF_ERROR(fields.status());
  return out;
}
}  // namespace stretto::engine
