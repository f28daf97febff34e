#include "engine/text/stream_decoder.h"

#include "engine/text/decoder.h"
#include "engine/text/pipeline.h"

namespace stretto::engine {

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(&tokenizer),
      skip_special_(skip_special),
      stages_(tokenizer.pipeline().decoder().MakeStages()) {}
StreamDecoder::~StreamDecoder() = default;
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;

std::string StreamDecoder::Push(int32_t id) {
  if (!tokenizer_->pipeline().HasToken(id)) return "";
  if (skip_special_ && tokenizer_->IsSpecial(id)) return "";
  return PushThrough(stages_, tokenizer_->TokenText(id));
}

std::string StreamDecoder::Finish() { return FinishThrough(stages_); }

}  // namespace stretto::engine
