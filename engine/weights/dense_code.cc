#include "engine/weights/dense_code.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/weights/varint.h"

namespace stretto::engine {
namespace {
constexpr uint32_t kFewElements = 192;  // are no context of their own; nor is a small share
constexpr uint32_t kSmallShare = 40;

absl::Status Corrupt(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("delta: ", what));
}

double Log2(uint32_t count) { return std::log2(static_cast<double>(count)); }

// Where changes of a context lead that are not small: by exponent, flip of the sign and mantissa.
class FarCounts {
 public:
  void Add(uint16_t from, uint16_t to) {
    const uint32_t exponent = to >> 7 & 0xffu;
    if (totals_[exponent]++ == 0) {
      counts_of_[exponent] = counts_.size();
      counts_.resize(counts_.size() + kCounts);
    }
    ++counts_[counts_of_[exponent] + ((from ^ to) >> 15 << 7 | (to & 0x7fu))];
    ++total_;
  }
  // The window that has the most of them, and the mantissa's bits that take the least room.
  void Choose(ChangeSymbols& symbols) const;
  // Of the elements in the window and of the code's lengths, in bits.
  double Cost(const ChangeSymbols& symbols) const {
    const size_t width = size_t{1} << (7 - symbols.mantissa_bits);
    double bits = 0;
    uint32_t sum = 0;
    for (int e = symbols.first_exponent; e < symbols.first_exponent + symbols.num_exponents; ++e) {
      if (totals_[static_cast<size_t>(e)] == 0) continue;
      for (size_t begin = 0; begin < kCounts; begin += width) {
        const auto first =
            counts_.begin() + static_cast<ptrdiff_t>(counts_of_[static_cast<size_t>(e)] + begin);
        const uint32_t count = std::accumulate(first, first + static_cast<ptrdiff_t>(width), 0u);
        if (count == 0) continue;
        bits += 4 + count * (7 - symbols.mantissa_bits - Log2(count));
        sum += count;
      }
    }
    return bits + (sum > 0 ? sum * Log2(sum) : 0);
  }

 private:
  static constexpr size_t kCounts = 256;
  static constexpr uint32_t kFew = 64;

  std::array<uint32_t, 256> totals_ = {};  // by exponent
  std::array<size_t, 256> counts_of_ = {};
  std::vector<uint32_t> counts_;
  uint32_t total_ = 0;
};

void FarCounts::Choose(ChangeSymbols& symbols) const {
  if (total_ == 0) return;
  uint32_t most = 0, inside = 0;
  for (int last = 0; last < 256; ++last) {
    inside += totals_[static_cast<size_t>(last)];
    if (last >= kMaxWindow) inside -= totals_[static_cast<size_t>(last - kMaxWindow)];
    if (inside <= most) continue;
    most = inside;
    symbols.first_exponent = static_cast<uint8_t>(std::max(0, last - kMaxWindow + 1));
    symbols.num_exponents = last - symbols.first_exponent + 1;
  }
  while (totals_[symbols.first_exponent] == 0) {
    ++symbols.first_exponent;
    --symbols.num_exponents;
  }
  if (total_ < kFew) return;
  ChangeSymbols candidate = symbols;
  double least = Cost(symbols);
  for (const int bits : {1, 2, 3, 7}) {
    candidate.mantissa_bits = bits;
    const double cost = Cost(candidate);
    if (cost < least && (bits < 7 || total_ * 2 >= candidate.size())) {
      least = cost;
      symbols = candidate;
    }
  }
}

struct Context {
  void Count(uint16_t from, uint16_t to) {
    const auto by = static_cast<int16_t>(static_cast<uint16_t>(to - from));
    const int size = by < 0 ? -by : by;
    if (size <= ChangeSymbols::kNear) return;
    if (size > ChangeSymbols::kWideNear) return far.Add(from, to);
    ++middle[static_cast<size_t>(by + ChangeSymbols::kWideNear)];
    changes.push_back({from, to});
  }
  // From what has been counted.
  void Choose() {
    // Whether changes of 8 to 63 steps are told by their steps or by where they lead.
    uint32_t total = 0;
    double by_steps = 0;
    for (const uint32_t count : middle) {
      if (count == 0) continue;
      by_steps += 4 - count * Log2(count);
      total += count;
    }
    if (total > 0) {
      FarCounts counts;
      for (const auto& [from, to] : changes) counts.Add(from, to);
      ChangeSymbols places;
      counts.Choose(places);
      if (by_steps + total * Log2(total) < counts.Cost(places)) {
        symbols.near = ChangeSymbols::kWideNear;
      } else {
        for (const auto& [from, to] : changes) far.Add(from, to);
      }
    }
    far.Choose(symbols);
    counts.resize(symbols.size());
  }

  uint8_t last_exponent = 255;
  std::array<uint32_t, 2 * ChangeSymbols::kWideNear + 1> middle = {};
  std::vector<std::pair<uint16_t, uint16_t>> changes;  // counted in `middle`
  FarCounts far;
  ChangeSymbols symbols;
  std::vector<uint32_t> counts;   // by symbol
  std::vector<SymbolStep> steps;  // by symbol
};

// Ranges of exponents that have more than a few elements each.
std::vector<Context> MakeContexts(const std::array<uint32_t, 256>& totals) {
  std::vector<Context> contexts(1);
  uint32_t left = std::accumulate(totals.begin(), totals.end(), 0u), in_context = 0;
  const uint32_t few = std::max(kFewElements, left / kSmallShare);
  for (int e = 0; e < 256; ++e) {
    left -= totals[static_cast<size_t>(e)];
    in_context += totals[static_cast<size_t>(e)];
    if (in_context < few || left < few || contexts.size() == kMaxContexts) continue;
    contexts.back().last_exponent = static_cast<uint8_t>(e);
    contexts.emplace_back();
    in_context = 0;
  }
  return contexts;
}
}  // namespace

Bytes DenseEncoder::Finish() const {
  if (num_ == 0) return {};
  std::vector<Context> contexts = MakeContexts(totals_);
  std::array<Context*, 256> context_of;
  for (size_t e = 0, c = 0; e < 256; ++e) {
    context_of[e] = &contexts[c];
    c += e == contexts[c].last_exponent ? 1 : 0;
  }
  const auto of = [&](const Element& e) -> Context& { return *context_of[e.from >> 7 & 0xff]; };
  for (const Element& e : elements()) of(e).Count(e.from, e.to);
  for (Context& context : contexts) context.Choose();
  std::vector<uint16_t> symbols(num_);
  for (size_t i = 0; i < num_; ++i) {
    Context& context = of(elements_[i]);
    const int symbol = context.symbols.Of(elements_[i].from, elements_[i].to);
    ++context.counts[static_cast<size_t>(symbol)];
    symbols[i] = static_cast<uint16_t>(symbol);
  }
  Bytes out = {static_cast<uint8_t>(contexts.size())};
  for (Context& context : contexts) {
    const ChangeSymbols& symbols = context.symbols;
    out.push_back(context.last_exponent);
    out.push_back(symbols.first_exponent);
    const int wide = symbols.near == ChangeSymbols::kWideNear ? 1 : 0;
    out.push_back(
        static_cast<uint8_t>(symbols.num_exponents | wide << 4 | symbols.mantissa_bits << 5));
    const std::vector<uint8_t> levels = LevelsOf(context.counts);
    PutLevels(levels, out);
    context.steps = StepsOf(FrequenciesOf(levels));
  }
  SymbolEncoder encoder(num_);
  BitWriter rest;
  BitCursor cursor = rest.Begin(num_ * 16);
  for (size_t i = 0; i < num_; ++i) {
    const Context& context = of(elements_[i]);
    encoder.Add(context.steps[symbols[i]]);
    const int bits = context.symbols.RestBits(symbols[i]);
    cursor.Put(elements_[i].to & ((1u << bits) - 1), bits);
  }
  rest.End(cursor);
  const Bytes coded = encoder.Finish(), rest_bytes = rest.Finish();
  PutVarint(out, coded.size());
  out.insert(out.end(), coded.begin(), coded.end());
  out.insert(out.end(), rest_bytes.begin(), rest_bytes.end());
  return out;
}

absl::Status DenseDecoder::Start(absl::Span<const uint8_t> in) {
  // Without contexts every element cuts it off.
  contexts_ = {{0, 0, 0}};
  entries_ = {{.size = 1, .offset = 0, .add = 0, .rest_bits = 1, .keep_sign = 0, .keep_all = 0}};
  rest_ = in;
  symbols_ = SymbolDecoder();
  if (in.empty()) return absl::OkStatus();
  const size_t num_contexts = in[0];
  in.remove_prefix(1);
  if (num_contexts == 0 || num_contexts > kMaxContexts) return Corrupt("impossible contexts");
  contexts_.clear();
  entries_.clear();
  std::vector<uint8_t> levels;
  size_t exponent = 0;
  for (size_t c = 0; c < num_contexts; ++c) {
    if (in.size() < 3) return Corrupt("its contexts are cut off");
    const size_t last = in[0];
    ChangeSymbols symbols;
    symbols.near = (in[2] & 16) != 0 ? ChangeSymbols::kWideNear : ChangeSymbols::kNear;
    symbols.first_exponent = in[1];
    symbols.num_exponents = in[2] & kMaxWindow;
    symbols.mantissa_bits = in[2] >> 5;
    in.remove_prefix(3);
    if (last < exponent || (last == 255) != (c + 1 == num_contexts)) {
      return Corrupt("impossible contexts");
    }
    for (; exponent <= last; ++exponent) context_of_[exponent] = static_cast<uint8_t>(c);
    if (symbols.first_exponent + symbols.num_exponents > 256) {
      return Corrupt("an impossible window");
    }
    if (symbols.size() > kMostSymbols || !GetLevels(in, symbols.size(), levels)) {
      return Corrupt("impossible frequencies");
    }
    AddContext(symbols, levels);
  }
  uint64_t size = 0;
  if (!GetVarint(in, size) || size < sizeof(uint32_t) || size > in.size()) {
    return Corrupt("its symbols are cut off");
  }
  symbols_ = SymbolDecoder(in.subspan(0, size));
  rest_ = in.subspan(size);
  return absl::OkStatus();
}

void DenseDecoder::AddContext(const ChangeSymbols& symbols, absl::Span<const uint8_t> levels) {
  const Frequencies of = FrequenciesOf(levels);
  const auto begin = static_cast<uint32_t>(entries_.size());
  contexts_.push_back({begin, (1u << of.bits) - 1, of.bits});
  entries_.reserve(begin + (1u << of.bits));
  for (int symbol = 0; symbol < static_cast<int>(levels.size()); ++symbol) {
    const uint32_t size =
        of.begins[static_cast<size_t>(symbol) + 1] - of.begins[static_cast<size_t>(symbol)];
    if (size == 0) continue;
    Entry entry = {.size = static_cast<uint16_t>(size),
                   .offset = 0,
                   .add = 0,
                   .rest_bits = static_cast<uint8_t>(symbols.RestBits(symbol)),
                   .keep_sign = symbol > symbols.outside(),
                   .keep_all = symbol < symbols.outside()};
    if (entry.keep_all) entry.add = static_cast<uint16_t>(symbol - symbols.near);
    if (entry.keep_sign) {
      const int far = symbol - symbols.first_far(), place = far >> symbols.mantissa_bits;
      const int flip = place >= symbols.num_exponents ? 1 : 0;
      const int exponent = symbols.first_exponent + place - flip * symbols.num_exponents;
      const int mantissa = far & ((1 << symbols.mantissa_bits) - 1);
      entry.add = static_cast<uint16_t>(flip << 15 | exponent << 7 |
                                        mantissa << (7 - symbols.mantissa_bits));
    }
    for (; entry.offset < size; ++entry.offset) entries_.push_back(entry);
  }
}

bool DenseDecoder::AtEnd() const {
  const size_t left = rest_.size() * 8 - at_;
  return symbols_.AtEnd() && !IsCutOff() && left < 8 &&
         (left == 0 || rest_.back() >> (8 - left) == 0);
}
}  // namespace stretto::engine
