// One tokenizer.json: whatever loads encodes and decodes, is stable under being read again, and
// streams what it decodes.
#include "base/check.h"
#include "engine/text/stream_decoder.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stretto::engine;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = Tokenizer::FromJson(bytes, "input");
  if (!tokenizer.ok()) return 0;
  const auto again = Tokenizer::FromJson((*tokenizer)->ToTokenizerJson(), "again");
  STRETTO_CHECK(again.ok());
  for (const absl::string_view text :
       {"", "Hello  world \n", " <s>a</s> 12 \xE6\x97\xA5 \xFF", "aaa \xCC\x81"}) {
    const auto ids = (*tokenizer)->Encode(text);
    if (!ids.ok()) continue;  // a pattern that exceeds its limits
    STRETTO_CHECK(*ids == *(*again)->Encode(text));
    StreamDecoder stream(**tokenizer);
    std::string streamed;
    for (const int32_t id : *ids) {
      STRETTO_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
      streamed += stream.Push(id);
      (*tokenizer)->TokenBytes(id);
    }
    streamed += stream.Finish();
    STRETTO_CHECK(IsValidUtf8(streamed));
    STRETTO_CHECK(streamed == (*tokenizer)->Decode(*ids));
  }
  return 0;
}
