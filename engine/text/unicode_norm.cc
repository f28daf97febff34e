#include "engine/text/unicode_norm.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/text/utf8.h"

namespace stretto::engine {
namespace {

#include "engine/text/unicode_tables.inc"

// Hangul syllables are composed by arithmetic (Unicode standard, section 3.12).
constexpr char32_t kSBase = 0xAC00, kLBase = 0x1100, kVBase = 0x1161, kTBase = 0x11A7;
constexpr char32_t kLCount = 19, kVCount = 21, kTCount = 28, kSCount = kLCount * kVCount * kTCount;

// The row of a table of ranges (first, last, further columns) that holds `c`, or null.
template <size_t kColumns, size_t kSize>
const uint32_t* FindRange(const uint32_t (&table)[kSize], char32_t c) {
  size_t low = 0, high = kSize / kColumns;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    const uint32_t* row = table + middle * kColumns;
    if (c < row[0]) {
      high = middle;
    } else if (c > row[1]) {
      low = middle + 1;
    } else {
      return row;
    }
  }
  return nullptr;
}

int CombiningClass(char32_t c) {
  if (c < 0x300) return 0;
  const uint32_t* row = FindRange<3>(kCombiningClass, c);
  return row == nullptr ? 0 : static_cast<int>(row[2]);
}

template <size_t kSize>
bool AppendFromTable(const uint32_t (&keys)[kSize], const uint32_t* index, const uint32_t* pool,
                     char32_t c, std::u32string* out) {
  const uint32_t* found = std::lower_bound(std::begin(keys), std::end(keys), c);
  if (found == std::end(keys) || *found != c) return false;
  const uint32_t entry = index[found - keys];
  out->append(pool + (entry >> 5), pool + (entry >> 5) + (entry & 31));
  return true;
}

void AppendDecomposed(char32_t c, bool compatibility, std::u32string* out) {
  if (c < 0xA0) {
    out->push_back(c);
    return;
  }
  if (c >= kSBase && c < kSBase + kSCount) {
    const char32_t s = c - kSBase;
    out->push_back(kLBase + s / (kVCount * kTCount));
    out->push_back(kVBase + s % (kVCount * kTCount) / kTCount);
    if (s % kTCount != 0) out->push_back(kTBase + s % kTCount);
    return;
  }
  if (compatibility && AppendFromTable(kCompatKeys, kCompatIndex, kCompatPool, c, out)) return;
  if (AppendFromTable(kCanonicalKeys, kCanonicalIndex, kCanonicalPool, c, out)) return;
  out->push_back(c);
}

// Sorts every run of combining marks by class, keeping the order inside a class.
void Reorder(std::u32string* text, std::vector<uint8_t>* classes) {
  classes->resize(text->size());
  for (size_t i = 0; i < text->size(); ++i) {
    (*classes)[i] = static_cast<uint8_t>(CombiningClass((*text)[i]));
  }
  for (size_t begin = 0; begin < text->size();) {
    if ((*classes)[begin] == 0) {
      ++begin;
      continue;
    }
    size_t end = begin;
    std::vector<std::pair<uint8_t, char32_t>> run;
    for (; end < text->size() && (*classes)[end] != 0; ++end) {
      run.emplace_back((*classes)[end], (*text)[end]);
    }
    std::stable_sort(run.begin(), run.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = begin; i < end; ++i) {
      std::tie((*classes)[i], (*text)[i]) = run[i - begin];
    }
    begin = end;
  }
}

// The character that `first` and `second` compose to, or 0.
char32_t ComposePair(char32_t first, char32_t second) {
  if (first >= kLBase && first < kLBase + kLCount && second >= kVBase &&
      second < kVBase + kVCount) {
    return kSBase + ((first - kLBase) * kVCount + (second - kVBase)) * kTCount;
  }
  if (first >= kSBase && first < kSBase + kSCount && (first - kSBase) % kTCount == 0 &&
      second > kTBase && second < kTBase + kTCount) {
    return first + (second - kTBase);
  }
  const uint64_t key = uint64_t{first} << 32 | second;
  const uint64_t* found = std::lower_bound(std::begin(kComposeKeys), std::end(kComposeKeys), key);
  if (found == std::end(kComposeKeys) || *found != key) return 0;
  return kComposeValues[found - kComposeKeys];
}

// The composition algorithm of UAX 15: a mark joins the last starter unless one of the same or a
// higher class stands between them.
void Compose(std::u32string* text, const std::vector<uint8_t>& classes) {
  size_t out = 0;
  size_t starter = SIZE_MAX;
  int last_class = -1;  // class of the last character kept after the starter; -1: none
  for (size_t i = 0; i < text->size(); ++i) {
    const char32_t c = (*text)[i];
    const int cls = classes[i];
    if (starter != SIZE_MAX && last_class < cls) {
      if (const char32_t composed = ComposePair((*text)[starter], c); composed != 0) {
        (*text)[starter] = composed;
        continue;
      }
    }
    if (cls == 0) {
      starter = out;
      last_class = -1;
    } else {
      last_class = cls;
    }
    (*text)[out++] = c;
  }
  text->resize(out);
}

}  // namespace

bool IsSurelyNfc(absl::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const char32_t c = NextCodePoint(text, &i);
    if (c >= 0x300 && FindRange<2>(kNfcUnsafe, c) != nullptr) return false;
  }
  return true;
}

std::string Normalize(NormalForm form, absl::string_view text) {
  const bool ascii = std::all_of(text.begin(), text.end(),
                                 [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  if (ascii || (form == NormalForm::kNfc && IsSurelyNfc(text))) return std::string(text);
  const bool compatibility = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  std::u32string points;
  for (size_t i = 0; i < text.size();) {
    AppendDecomposed(NextCodePoint(text, &i), compatibility, &points);
  }
  std::vector<uint8_t> classes;
  Reorder(&points, &classes);
  if (form == NormalForm::kNfc || form == NormalForm::kNfkc) Compose(&points, classes);
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : points) AppendUtf8(c, &out);
  return out;
}

std::string Lowercase(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const char32_t c = NextCodePoint(text, &i);
    if (c == 0x130) {  // İ: an i and a dot above
      out += "i\xCC\x87";
      continue;
    }
    const uint32_t* row = FindRange<4>(kLowercase, c);
    const bool hit = row != nullptr && (c - row[0]) % row[2] == 0;
    AppendUtf8(hit ? static_cast<char32_t>(c + row[3]) : c, &out);
  }
  return out;
}

}  // namespace stretto::engine
