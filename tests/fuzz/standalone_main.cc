// Runs a libFuzzer target without libFuzzer: replays every file of a corpus, then seeded random
// mutations of them. A pure function of corpus and seed, so that a failure repeats.
//
//   fuzz_NAME CORPUS [RUNS]     STRETTO_TEST_SEED chooses the mutations
//   fuzz_NAME FILE              runs one input
// The input that crashed is written to ./crash-NAME.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/philox.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {
using Bytes = std::vector<uint8_t>;
constexpr int kDefaultRuns = 5000;
constexpr size_t kMaxBytes = size_t{1} << 20;

const Bytes* g_current = nullptr;
std::string* g_crash_path = nullptr;

void SaveCrash() {
  if (g_current == nullptr || g_crash_path == nullptr) return;
  const int fd = ::open(g_crash_path->c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0) return;
  if (::write(fd, g_current->data(), g_current->size()) < 0) return;
  ::close(fd);
  std::fprintf(stderr, "the input was written to %s\n", g_crash_path->c_str());
}
void OnSignal(int signal) {
  SaveCrash();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// The target sees an exactly sized block of the heap, so that a sanitizer sees every overrun.
void RunOne(const Bytes& input) {
  g_current = &input;
  const auto exact = std::make_unique<uint8_t[]>(input.size());
  if (!input.empty()) std::memcpy(exact.get(), input.data(), input.size());
  (void)LLVMFuzzerTestOneInput(exact.get(), input.size());
  g_current = nullptr;
}

class Mutator {
 public:
  Mutator(const std::vector<Bytes>& corpus, uint64_t seed) : corpus_(corpus), random_(seed) {}

  Bytes Next() {
    Bytes input = corpus_[Below(corpus_.size())];
    for (uint64_t n = 1 + Below(4); n > 0; --n) Mutate(input);
    if (input.size() > kMaxBytes) input.resize(kMaxBytes);
    return input;
  }

 private:
  size_t Below(uint64_t bound) { return random_.Below(std::max<uint64_t>(bound, 1)); }
  // Structure lies at the beginning of most formats: half of all places are in the first 256 bytes.
  size_t Place(size_t size) {
    return Below(2) == 0 ? Below(size) : Below(std::min<size_t>(size, 256));
  }

  void Mutate(Bytes& input) {
    const size_t at = Place(input.size());
    const size_t left = input.size() - at;
    switch (Below(8)) {
      case 0:
        if (left > 0) input[at] ^= static_cast<uint8_t>(1u << Below(8));
        break;
      case 1:
        if (left > 0) input[at] = static_cast<uint8_t>(Below(256));
        break;
      case 2:
        Overwrite(input, at);
        break;
      case 3:
        input.resize(at);
        break;
      case 4:
        input.erase(input.begin() + static_cast<ptrdiff_t>(at),
                    input.begin() + static_cast<ptrdiff_t>(at + Below(std::min(left, kPiece) + 1)));
        break;
      case 5:
        Insert(input, at, Piece(input));
        break;
      case 6:
        Insert(input, at, Piece(corpus_[Below(corpus_.size())]));
        break;
      default:
        SwapToken(input);
    }
  }

  // A little-endian integer at the edges of its type.
  void Overwrite(Bytes& input, size_t at) {
    static constexpr uint64_t kEdges[] = {0,
                                          1,
                                          2,
                                          3,
                                          7,
                                          8,
                                          15,
                                          31,
                                          32,
                                          64,
                                          255,
                                          256,
                                          1000,
                                          65535,
                                          65536,
                                          0x7fffffff,
                                          0x80000000,
                                          0xffffffff,
                                          0x100000000,
                                          0x3fffffffffffffff,
                                          0x7fffffffffffffff,
                                          0x8000000000000000,
                                          ~0ull};
    const uint64_t value = kEdges[Below(std::size(kEdges))];
    const size_t size = std::min<size_t>(size_t{1} << Below(4), input.size() - at);
    if (size > 0) std::memcpy(input.data() + at, &value, size);
  }

  // In text: a number, word or bracket in the place of a digit or quote.
  void SwapToken(Bytes& input) {
    static constexpr const char* kTokens[] = {"-1",
                                              "0",
                                              "1e400",
                                              "0.5",
                                              "18446744073709551616",
                                              "9223372036854775807",
                                              "null",
                                              "true",
                                              "[]",
                                              "{}",
                                              "[[[[",
                                              "\"\"",
                                              "\"\\u0000\"",
                                              "NaN",
                                              ",",
                                              "\xff",
                                              "\"type\":\"yarn\","};
    const auto is_token = [](uint8_t c) { return (c >= '0' && c <= '9') || c == '"' || c == ':'; };
    const auto from = input.begin() + static_cast<ptrdiff_t>(Place(input.size()));
    const auto it = std::find_if(from, input.end(), is_token);
    if (it == input.end()) return;
    const auto end = std::find_if_not(it, input.end(), is_token);
    const size_t at = static_cast<size_t>(it - input.begin());
    input.erase(it, end);
    const std::string token = kTokens[Below(std::size(kTokens))];
    Insert(input, at, Bytes(token.begin(), token.end()));
  }

  Bytes Piece(const Bytes& from) {
    const size_t at = Place(from.size());
    const size_t size = Below(std::min(from.size() - at, kPiece) + 1);
    const auto begin = from.begin() + static_cast<ptrdiff_t>(at);
    return Bytes(begin, begin + static_cast<ptrdiff_t>(size));
  }
  static void Insert(Bytes& input, size_t at, const Bytes& piece) {
    input.insert(input.begin() + static_cast<ptrdiff_t>(std::min(at, input.size())), piece.begin(),
                 piece.end());
  }

  static constexpr size_t kPiece = 64;
  const std::vector<Bytes>& corpus_;
  stretto::PhiloxStream random_;
};

Bytes ReadFile(const std::string& path) {
  auto content = stretto::Files::Real().ReadAll(path);
  if (!content.ok()) {
    std::fprintf(stderr, "%s\n", content.status().ToString().c_str());
    std::exit(2);
  }
  return Bytes(content->begin(), content->end());
}

std::vector<Bytes> ReadCorpus(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return {ReadFile(path)};
  auto names = stretto::Files::Real().List(path);
  if (!names.ok() || names->empty()) {
    std::fprintf(stderr, "%s: no corpus\n", path.c_str());
    std::exit(2);
  }
  std::vector<Bytes> corpus;
  for (const std::string& name : *names) {
    corpus.push_back(ReadFile(stretto::JoinPath(path, name)));
  }
  return corpus;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS_OR_FILE [RUNS]\n", argv[0]);
    return 2;
  }
  g_crash_path = new std::string("crash-" + std::filesystem::path(argv[0]).filename().string());
  for (const int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS}) std::signal(signal, OnSignal);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(SaveCrash);
  const std::vector<Bytes> corpus = ReadCorpus(argv[1]);
  for (const Bytes& input : corpus) RunOne(input);
  const bool one_file = !std::filesystem::is_directory(argv[1]);
  const int runs = one_file ? 0 : argc > 2 ? std::atoi(argv[2]) : kDefaultRuns;
  const char* seed_text = std::getenv("STRETTO_TEST_SEED");
  const uint64_t seed = seed_text != nullptr ? std::strtoull(seed_text, nullptr, 10) : 20240229;
  std::fprintf(stderr, "%zu inputs, then %d mutations with seed %llu\n", corpus.size(), runs,
               static_cast<unsigned long long>(seed));
  Mutator mutator(corpus, seed);
  for (int i = 0; i < runs; ++i) RunOne(mutator.Next());
  return 0;
}
