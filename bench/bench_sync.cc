// Measures weight deltas on consecutive optimizer steps of a real run:
//   bench_sync CHECKPOINTS   a run's folder of checkpoints, one for each step
// Every pair of neighbours is coded, applied and compared; bytes stand beside the empirical entropy
// and two simple codes, seconds beside a plain copy of the weights, one thread, in turns; and
// beside what no encoder and no receiver can do without: both versions are read, the new one is
// hashed.
#include <zstd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/files.h"
#include "bench/report.h"
#include "engine/training/checkpoint.h"
#include "engine/weights/delta.h"
#include "engine/weights/varint.h"

namespace stretto::bench {
namespace {
using engine::Bytes;
using Weights = std::vector<Bytes>;  // bf16 tensors in order of name

Weights ReadWeights(const std::string& checkpoint) {
  const auto masters = engine::OpenMasters(Files::Real(), checkpoint);
  if (!masters.ok()) {
    std::fprintf(stderr, "bench_sync: %s\n", std::string(masters.status().message()).c_str());
    std::exit(1);
  }
  Weights weights;
  for (const engine::TensorInfo& tensor : (*masters)->tensors()) {
    int64_t size = 1;
    for (int64_t extent : tensor.shape) size *= extent;
    Bytes& bytes = weights.emplace_back(static_cast<size_t>(size) * 2);
    STRETTO_CHECK((*masters)->ReadAll(tensor.name, DType::kBF16, bytes.data()).ok());
  }
  return weights;
}

size_t Size(const Weights& weights) {
  size_t size = 0;
  for (const Bytes& bytes : weights) size += bytes.size();
  return size;
}

uint16_t Word(const Bytes& bytes, size_t i) {
  uint16_t word;
  std::memcpy(&word, bytes.data() + 2 * i, 2);
  return word;
}

struct Changes {
  double elements = 0, changed = 0, entropy_bytes = 0;
};
// Of (changed or not, by how many grid steps) given the exponent of the old weight, over all
// tensors together.
Changes Measure(const Weights& before, const Weights& after) {
  constexpr int64_t kNear = 64;
  struct Counts {
    std::array<double, 2 * kNear + 1> near = {};
    std::map<int64_t, double> far;
  };
  std::vector<Counts> counts(256);
  for (size_t t = 0; t < before.size(); ++t) {
    for (size_t i = 0; i < before[t].size() / 2; ++i) {
      const uint16_t old = Word(before[t], i);
      const int64_t by = engine::ToGrid(Word(after[t], i)) - engine::ToGrid(old);
      Counts& of = counts[old >> 7 & 0xff];
      ++(by >= -kNear && by <= kNear ? of.near[by + kNear] : of.far[by]);
    }
  }
  Changes result;
  for (const Counts& of : counts) {
    std::vector<double> steps(of.near.begin(), of.near.end());
    for (const auto& [by, count] : of.far) steps.push_back(count);
    const double total = std::accumulate(steps.begin(), steps.end(), 0.0);
    for (double count : steps) {
      if (count > 0) result.entropy_bytes -= count * std::log2(count / total) / 8;
    }
    result.elements += total;
    result.changed += total - of.near[kNear];
  }
  return result;
}

size_t ZstdSize(const Bytes& raw) {
  Bytes out(ZSTD_compressBound(raw.size()));
  return ZSTD_compress(out.data(), out.size(), raw.data(), raw.size(), /*level=*/3);
}
size_t XorZstd(const Weights& before, const Weights& after) {
  size_t size = 0;
  for (size_t t = 0; t < before.size(); ++t) {
    Bytes bits = before[t];
    for (size_t i = 0; i < bits.size(); ++i) bits[i] ^= after[t][i];
    size += ZstdSize(bits);
  }
  return size;
}
size_t ListsZstd(const Weights& before, const Weights& after) {
  size_t size = 0;
  for (size_t t = 0; t < before.size(); ++t) {
    Bytes indices, values;
    for (uint32_t i = 0; i < before[t].size() / 2; ++i) {
      const uint16_t now = Word(after[t], i);
      if (Word(before[t], i) == now) continue;
      for (int b = 0; b < 4; ++b) indices.push_back(static_cast<uint8_t>(i >> (8 * b)));
      for (int b = 0; b < 2; ++b) values.push_back(static_cast<uint8_t>(now >> (8 * b)));
    }
    size += ZstdSize(indices) + ZstdSize(values);
  }
  return size;
}

struct Seconds {
  std::vector<double> encode, apply, copy, read, hash;
};
double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Codes, applies and copies all tensors, in turns; the last deltas stay in `deltas`.
Seconds Time(const Weights& before, const Weights& after, Weights& deltas) {
  constexpr int kRounds = 7;
  Seconds seconds;
  Weights copies = before, out = before;
  for (int round = 0; round <= kRounds; ++round) {  // the first warms up
    deltas.clear();
    const double start = SecondsNow();
    for (size_t t = 0; t < before.size(); ++t) {
      deltas.push_back(engine::EncodeDelta(DType::kBF16, before[t], after[t]));
    }
    const double encoded = SecondsNow();
    for (size_t t = 0; t < before.size(); ++t) {
      STRETTO_CHECK(
          engine::ApplyDelta(DType::kBF16, before[t], deltas[t], absl::MakeSpan(out[t])).ok());
    }
    const double applied = SecondsNow();
    STRETTO_CHECK(out == after);
    const double compared = SecondsNow();
    for (size_t t = 0; t < before.size(); ++t) {
      std::memcpy(copies[t].data(), before[t].data(), before[t].size());
    }
    const double copied = SecondsNow();
    STRETTO_CHECK(copies == before);
    const double read = SecondsNow();
    for (const Bytes& tensor : out) STRETTO_CHECK(!engine::TensorHash(tensor).empty());
    const double hashed = SecondsNow();
    if (round == 0) continue;
    seconds.read.push_back(read - copied);
    seconds.hash.push_back(hashed - read);
    seconds.encode.push_back(encoded - start);
    seconds.apply.push_back(applied - encoded);
    seconds.copy.push_back(copied - compared);
  }
  return seconds;
}

void Run(const std::string& folder) {
  const auto paths = engine::ListCheckpoints(Files::Real(), folder);
  if (!paths.ok() || paths->size() < 2) {
    std::fprintf(stderr, "bench_sync: %s: expected a run's folder with at least two checkpoints\n",
                 folder.c_str());
    std::exit(1);
  }
  Report report("sync");
  Weights before = ReadWeights((*paths)[0]);
  const double dense = static_cast<double>(Size(before));
  report.Add("weights", dense * 1e-6, "MB");
  for (size_t step = 1; step < paths->size(); ++step) {
    Weights after = ReadWeights((*paths)[step]), deltas;
    const std::string name = "step " + std::to_string(step) + ": ";
    const Changes changes = Measure(before, after);
    const Seconds seconds = Time(before, after, deltas);
    const double bytes = static_cast<double>(Size(deltas));
    const double encode = Median(seconds.encode), apply = Median(seconds.apply);
    const double copy = Median(seconds.copy);
    report.Add(name + "elements that changed", 100 * changes.changed / changes.elements, "%");
    report.Add(name + "delta", bytes * 1e-6, "MB");
    report.Add(name + "delta to entropy", bytes / changes.entropy_bytes, "x", 1.10, true);
    report.Add(name + "smaller than the weights", dense / bytes, "x", 150);
    report.Add(name + "XOR and zstd: smaller", dense / XorZstd(before, after), "x");
    report.Add(name + "lists and zstd: smaller", dense / ListsZstd(before, after), "x");
    report.Add(name + "encoding", dense * 1e-9 / encode, "GB/s", 2);
    report.Add(name + "applying", dense * 1e-9 / apply, "GB/s", 2);
    report.Add(name + "copying", dense * 1e-9 / copy, "GB/s");
    report.Add(name + "reading both versions", dense * 1e-9 / Median(seconds.read), "GB/s");
    report.Add(name + "hashing", dense * 1e-9 / Median(seconds.hash), "GB/s");
    report.Add(name + "encoding: times the seconds of a copy", encode / copy, "x", 2, true);
    report.Add(name + "applying: times the seconds of a copy", apply / copy, "x", 2, true);
    before = std::move(after);
  }
  report.Write();
}
}  // namespace
}  // namespace stretto::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: bench_sync CHECKPOINTS\n");
    return 2;
  }
  stretto::bench::Run(argv[1]);
  return 0;
}
