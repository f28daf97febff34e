#include "engine/weights/grid_transpose.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace stretto::engine {
namespace {
std::atomic<bool> is_forbidden{false};
}  // namespace

void ForbidTransposeForTest(bool forbid) { is_forbidden = forbid; }

#if defined(__x86_64__)
#define STRETTO_TARGET                                                             \
  __attribute__((                                                                  \
      target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vpopcntdq,gfni," \
             "bmi,bmi2,popcnt")))
#define STRETTO_INLINE STRETTO_TARGET __attribute__((always_inline))

bool CanTranspose() {
  static const bool can =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("gfni");
  return can && !is_forbidden.load(std::memory_order_relaxed);
}

namespace {
constexpr size_t kHalf = kLine / 2;  // elements of a vector
constexpr size_t kSlots = ChunkGroups::kSlots;

// The line that lies a chunk ahead; where there is none, fetching does no harm.
STRETTO_INLINE inline void Fetch(const uint16_t* line) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(line) + sizeof(uint16_t) * kChunk;
  __builtin_prefetch(reinterpret_cast<const void*>(ahead), 0, 2);
  __builtin_prefetch(reinterpret_cast<const void*>(ahead + sizeof(uint16_t) * kHalf), 0, 2);
}

// A line's elements, by group.
class MaskReader {
 public:
  STRETTO_TARGET explicit MaskReader(const ClassGroups& groups)
      : MaskReader(groups.first_exponent, groups.bits) {}
  STRETTO_TARGET MaskReader(uint8_t first_exponent,
                            const std::array<uint8_t, kNumClasses>& bits_of_classes) {
    alignas(64) uint8_t odd[64], gather[64];
    for (size_t i = 0; i < 64; ++i) {
      odd[i] = static_cast<uint8_t>(2 * i + 1);
      gather[i] = static_cast<uint8_t>(i % 8 * 8 + i / 8);
    }
    odd_ = _mm512_load_si512(odd);
    gather_ = _mm512_load_si512(gather);
    diagonal_ = _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201));
    first_ = _mm512_set1_epi8(static_cast<char>(first_exponent));
    last_ = _mm512_set1_epi8(kNumClasses - 1);
    table_ = _mm512_maskz_broadcast_i32x4(
        0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(bits_of_classes.data())));
  }
  // Each element's bit of ClassGroups, in order, of the line's two halves.
  STRETTO_INLINE __m512i BitsOf(__m512i a, __m512i b) const {
    // Without the sign, the exponent is the upper byte.
    const __m512i exponents =
        _mm512_permutex2var_epi8(_mm512_add_epi16(a, a), odd_, _mm512_add_epi16(b, b));
    const __m512i classes = _mm512_min_epu8(_mm512_subs_epu8(exponents, first_), last_);
    return _mm512_shuffle_epi8(table_, classes);
  }
  // The eight groups' masks.
  STRETTO_INLINE __m512i Masks(__m512i bits) const {
    // Of every eight elements: byte g has their bits g, from the last element to the first.
    const __m512i turned = _mm512_gf2p8affine_epi64_epi8(diagonal_, bits, 0);
    const __m512i in_order = _mm512_gf2p8affine_epi64_epi8(turned, diagonal_, 0);
    return _mm512_maskz_permutexvar_epi8(~uint64_t{0}, gather_, in_order);
  }

 private:
  __m512i odd_, gather_, diagonal_, first_, last_, table_;
};

// Masks and what stands before each line.
class MaskWriter {
 public:
  STRETTO_TARGET explicit MaskWriter(ChunkGroups& chunk)
      : chunk_(chunk), at_(_mm512_setzero_si512()) {}
  STRETTO_INLINE void Put(size_t line, __m512i masks) {
    _mm512_store_si512(&chunk_.masks[line * kSlots], masks);
    _mm_store_si128(reinterpret_cast<__m128i*>(&chunk_.line_begins[line * kSlots]),
                    _mm512_maskz_cvtepi64_epi16(0xff, at_));
    at_ = _mm512_add_epi64(at_, _mm512_popcnt_epi64(masks));
  }
  STRETTO_TARGET void Finish() {
    alignas(64) std::array<uint64_t, kSlots> sizes;
    _mm512_store_si512(sizes.data(), at_);
    for (size_t g = 0; g < kMaxSparseGroups; ++g) {
      chunk_.sizes[g] = static_cast<uint32_t>(sizes[g]);
    }
  }

 private:
  ChunkGroups& chunk_;
  __m512i at_;
};

// By how much elements changed, as signed bytes, of which small numbers stay what they are and no
// other becomes one.
class StepReader {
 public:
  STRETTO_TARGET StepReader() : order_(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7)) {}
  STRETTO_INLINE __m512i Steps(__m512i a, __m512i b, const uint16_t* next) const {
    const __m512i packed =
        _mm512_packs_epi16(_mm512_sub_epi16(_mm512_loadu_si512(next), a),
                           _mm512_sub_epi16(_mm512_loadu_si512(next + kHalf), b));
    return _mm512_maskz_permutexvar_epi64(0xff, order_, packed);
  }

 private:
  __m512i order_;
};

// Which words of two vectors, one after the other, make the first of a stage's two vectors.
struct BeginsOrder {
  alignas(64) uint16_t of[3][kHalf] = {};
  constexpr BeginsOrder() {
    for (size_t stage = 0; stage < 3; ++stage) {
      const size_t lines = size_t{4} << stage;  // of a vector
      for (size_t i = 0; i < kHalf; ++i) {
        const size_t line = i % (2 * lines), group = i / (2 * lines);
        const size_t word =
            stage == 0 ? line % lines * kSlots + group : group * lines + line % lines;
        of[stage][i] = static_cast<uint16_t>(line / lines * kHalf + word);
      }
    }
  }
};
constexpr BeginsOrder kBeginsOrder;

// Lines' begins by line become those by group.
STRETTO_TARGET void TransposeBegins(ChunkGroups& chunk) {
  constexpr size_t kVectors = kChunkLines * kSlots / kHalf;
  __m512i first[kVectors], second[kVectors];
  __m512i *from = first, *to = second;
  for (size_t k = 0; k < kVectors; ++k) from[k] = _mm512_load_si512(&chunk.line_begins[kHalf * k]);
  // A vector has some lines and some groups: after each stage twice the lines and half the groups.
  for (size_t stage = 0; stage < 3; ++stage) {
    const __m512i low = _mm512_load_si512(kBeginsOrder.of[stage]);
    const __m512i high =
        _mm512_add_epi16(low, _mm512_set1_epi16(static_cast<int16_t>(stage == 0 ? 4 : 16)));
    const size_t apart = size_t{1} << stage;  // vectors of the same lines
    for (size_t k = 0; k < kVectors; k += 2 * apart) {
      for (size_t v = 0; v < apart; ++v) {
        const __m512i a = from[k + v], b = from[k + apart + v];
        to[k + 2 * v] = _mm512_permutex2var_epi16(a, low, b);
        to[k + 2 * v + 1] = _mm512_permutex2var_epi16(a, high, b);
      }
    }
    std::swap(from, to);
  }
  for (size_t g = 0; g < kMaxSparseGroups; ++g) {
    _mm512_store_si512(chunk.begins[g].data(), from[g]);
    _mm512_store_si512(chunk.begins[g].data() + kHalf, from[kSlots + g]);
  }
}
}  // namespace

STRETTO_TARGET void CompareTransposed(const ClassGroups& groups, const Lines& base,
                                      const uint16_t* next, ChunkGroups& chunk, OneSteps& steps,
                                      uint64_t* others) {
  const MaskReader reader(groups);
  const StepReader step_reader;
  MaskWriter writer(chunk);
  const __m512i one = _mm512_set1_epi8(1), sparse = _mm512_set1_epi8(0x7f);
  size_t num = 0, num_rest = 0;
  const auto compare = [&](size_t line, uint64_t there) STRETTO_INLINE {
    const uint16_t *p = base.elements + line * kLine, *q = next + line * kLine;
    Fetch(p);
    Fetch(q);
    const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + kHalf);
    const __m512i bits = _mm512_maskz_mov_epi8(there, reader.BitsOf(a, b));
    writer.Put(line, reader.Masks(bits));
    const __m512i by = step_reader.Steps(a, b, q);
    const uint64_t told =
        _mm512_mask_cmpeq_epi8_mask(_mm512_test_epi8_mask(bits, sparse), _mm512_abs_epi8(by), one);
    const uint64_t dense = _mm512_movepi8_mask(bits);  // kDenseGroup's bit is the highest
    const uint64_t other = _mm512_test_epi8_mask(by, by) & there & ~told & ~dense;
    others[line] = other;
    chunk.rest_lines[num_rest] = static_cast<uint16_t>(line);
    num_rest += (other | dense) != 0 ? 1 : 0;
    steps.masks[num] = told;
    steps.lines[num] = static_cast<uint16_t>(line);
    num += told != 0 ? 1 : 0;
  };
  for (size_t line = 0; line + 1 < base.count; ++line) compare(line, ~uint64_t{0});
  compare(base.count - 1, base.last_line);
  steps.num = num;
  chunk.num_rest_lines = num_rest;
  writer.Finish();
}

STRETTO_TARGET void GroupTransposed(const ClassGroups& groups, const Lines& base,
                                    ChunkGroups& chunk) {
  const MaskReader reader(groups);
  MaskWriter writer(chunk);
  size_t num_rest = 0;
  const auto group = [&](size_t line, uint64_t there) STRETTO_INLINE {
    const uint16_t* const p = base.elements + line * kLine;
    Fetch(p);
    const __m512i bits = _mm512_maskz_mov_epi8(
        there, reader.BitsOf(_mm512_loadu_si512(p), _mm512_loadu_si512(p + kHalf)));
    writer.Put(line, reader.Masks(bits));
    chunk.rest_lines[num_rest] = static_cast<uint16_t>(line);
    num_rest += _mm512_movepi8_mask(bits) != 0 ? 1 : 0;
  };
  for (size_t line = 0; line + 1 < base.count; ++line) group(line, ~uint64_t{0});
  group(base.count - 1, base.last_line);
  chunk.num_rest_lines = num_rest;
  writer.Finish();
  std::fill(chunk.line_begins.begin() + static_cast<ptrdiff_t>(base.count * kSlots),
            chunk.line_begins.end(), uint16_t{INT16_MAX});
  TransposeBegins(chunk);
}
STRETTO_TARGET void CountTransposed(uint8_t first_exponent, const uint16_t* base,
                                    const uint16_t* next, size_t num_lines, ClassCounts& counts) {
  constexpr size_t kClasses = kNumClasses / 2;
  const StepReader step_reader;
  const __m512i one = _mm512_set1_epi8(1);
  for (size_t first = 0; first < kNumClasses; first += kClasses) {
    std::array<uint8_t, kNumClasses> bits_of_classes = {};
    for (size_t c = 0; c < kClasses; ++c)
      bits_of_classes[first + c] = static_cast<uint8_t>(1u << c);
    const MaskReader reader(first_exponent, bits_of_classes);
    __m512i all = _mm512_setzero_si512(), changed = all, by_one = all;
    for (size_t line = 0; line < num_lines; ++line) {
      const uint16_t* const p = base + line * kLine;
      const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + kHalf);
      const __m512i masks = reader.Masks(reader.BitsOf(a, b));
      all = _mm512_add_epi64(all, _mm512_popcnt_epi64(masks));
      const __m512i by = step_reader.Steps(a, b, next + line * kLine);
      const uint64_t any = _mm512_test_epi8_mask(by, by);
      if (any == 0) continue;
      const uint64_t single = _mm512_cmpeq_epi8_mask(_mm512_abs_epi8(by), one);
      const auto count = [&](uint64_t of) STRETTO_INLINE {
        const __m512i mask = _mm512_set1_epi64(static_cast<int64_t>(of));
        return _mm512_popcnt_epi64(_mm512_and_si512(masks, mask));
      };
      changed = _mm512_add_epi64(changed, count(any));
      by_one = _mm512_add_epi64(by_one, count(single));
    }
    const auto add = [&](__m512i sums, std::array<uint32_t, kNumClasses>& to) STRETTO_TARGET {
      alignas(64) std::array<uint64_t, kClasses> of;
      _mm512_store_si512(of.data(), sums);
      for (size_t c = 0; c < kClasses; ++c) to[first + c] += static_cast<uint32_t>(of[c]);
    };
    add(all, counts.all);
    add(changed, counts.changed);
    add(by_one, counts.by_one);
  }
}
#else
bool CanTranspose() { return false; }
void CompareTransposed(const ClassGroups&, const Lines&, const uint16_t*, ChunkGroups&, OneSteps&,
                       uint64_t*) {
  STRETTO_CHECK(false);
}
void GroupTransposed(const ClassGroups&, const Lines&, ChunkGroups&) { STRETTO_CHECK(false); }
void CountTransposed(uint8_t, const uint16_t*, const uint16_t*, size_t, ClassCounts&) {
  STRETTO_CHECK(false);
}
#endif
}  // namespace stretto::engine
