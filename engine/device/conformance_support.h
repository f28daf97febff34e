// What the conformance tests share: host matrices, moving them to and from a device,
// double-precision oracles written independently of every backend, and comparisons.
//
// Legend as in device.h.
#pragma once

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "base/testing.h"
#include "engine/device/cpu/cpu_device.h"
#include "engine/device/device.h"

namespace stretto::engine::conformance {
// A row-major matrix of floats on the host.
struct Host {
  int64_t rows = 0, cols = 0;
  std::vector<float> v;
  Host() = default;
  Host(int64_t r, int64_t c, float x = 0) : rows(r), cols(c), v(static_cast<size_t>(r * c), x) {}
  float& operator()(int64_t r, int64_t c) { return v[static_cast<size_t>(r * cols + c)]; }
  float operator()(int64_t r, int64_t c) const { return v[static_cast<size_t>(r * cols + c)]; }
  Host Rows(int64_t begin, int64_t count) const {
    Host h(count, cols);
    std::copy(v.begin() + begin * cols, v.begin() + (begin + count) * cols, h.v.begin());
    return h;
  }
};

inline float RoundTo(float x, DType dtype) {
  return dtype == DType::kBF16 ? Bf16ToF32(F32ToBf16(x)) : x;
}

// Normal values, rounded to `dtype`.
inline Host Random(PhiloxStream& rng, int64_t rows, int64_t cols, DType dtype = DType::kF32,
                   double scale = 1.0) {
  Host h(rows, cols);
  for (float& x : h.v) x = RoundTo(static_cast<float>(rng.NextGaussian() * scale), dtype);
  return h;
}

// A backend under test. `set`: of the CPU backend, where the machine has it.
struct Backend {
  std::string name;
  bool fma = true;
  int num_threads = 2;
  std::optional<cpu::InstructionSet> set;

  std::string ToString() const {
    std::string text = name + (fma ? "/fma" : "/nofma") + "/threads " + std::to_string(num_threads);
    if (set) text += "/set " + std::to_string(static_cast<int>(*set));
    return text;
  }
};

// All backends that one test body runs on.
inline std::vector<Backend> Backends() {
  return {{"reference", true, 1, {}},
          {"reference", false, 1, {}},
          {"cpu", true, 2, {}},
          {"cpu", false, 3, {}},
          {"cpu", false, 1, cpu::InstructionSet::kScalar}};
}

struct Case {
  Backend backend;
  DType dtype;
};
inline std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Backend& b : Backends()) {
    for (DType d : {DType::kF32, DType::kBF16}) cases.push_back({b, d});
  }
  return cases;
}

// A device with what is alive on it.
class Lab {
 public:
  explicit Lab(const Backend& backend, bool exact = true) {
    DeviceOptions options;
    options.backend = backend.name;
    options.num_threads = backend.num_threads;
    options.allow_fma = backend.fma;
    options.exact = exact;
    auto created = backend.set ? CreateCpuDevice(options, backend.set) : CreateDevice(options);
    REQUIRE_OK(created);
    device_ = *std::move(created);
    stream_ = device_->CreateStream();
  }
  Device& device() { return *device_; }
  Device* operator->() { return device_.get(); }
  Stream& stream() { return *stream_; }

  // Fresh memory; rows are `padding` elements further apart than they need be.
  Tensor New(int64_t rows, int64_t cols, DType dtype, int64_t padding = 0) {
    const int64_t stride = cols + padding;
    auto buffer = device_->Allocate(static_cast<size_t>(rows * stride) * SizeOf(dtype) + 64);
    REQUIRE_OK(buffer);
    Tensor t{buffer->handle(), dtype, rows, cols, stride};
    buffers_.push_back(*std::move(buffer));
    return t;
  }
  Tensor Put(const Host& h, DType dtype, int64_t padding = 0) {
    Tensor t = New(h.rows, h.cols, dtype, padding);
    Set(t, h);
    return t;
  }
  void Set(const Tensor& t, const Host& h) {
    if (t.dtype == DType::kF32) {
      device_->Upload(*stream_, t, h.v.data());
      return;
    }
    std::vector<uint16_t> narrow;
    for (float x : h.v) narrow.push_back(F32ToBf16(x));
    device_->Upload(*stream_, t, narrow.data());
  }
  Tensor Ints(const std::vector<int32_t>& v, int64_t rows = 1) {
    Tensor t = New(rows, static_cast<int64_t>(v.size()) / rows, DType::kI32);
    device_->Upload(*stream_, t, v.data());
    return t;
  }
  Host Get(const Tensor& t) {
    Host h(t.rows, t.cols);
    if (t.dtype == DType::kF32) {
      device_->Download(*stream_, t, h.v.data());
      return h;
    }
    std::vector<uint16_t> narrow(h.v.size());
    device_->Download(*stream_, t, narrow.data());
    for (size_t i = 0; i < narrow.size(); ++i) h.v[i] = Bf16ToF32(narrow[i]);
    return h;
  }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<Buffer> buffers_;
};

// Opens a test body that runs for every backend and element type.
#define STRETTO_CONFORMANCE_CASE(c)                                            \
  const Case c = GENERATE(from_range(Cases()));                                \
  INFO(c.backend.ToString() << ", " << std::string(Name(c.dtype)) << ", seed " \
                            << testing::Seed());                               \
  Lab lab(c.backend);                                                          \
  PhiloxStream rng(testing::Seed())

// Index of the first element whose bits differ, or -1.
inline int64_t FirstDifference(const Host& a, const Host& b) {
  if (a.v.size() != b.v.size()) return 0;
  for (size_t i = 0; i < a.v.size(); ++i) {
    if (std::memcmp(&a.v[i], &b.v[i], sizeof(float)) != 0) return static_cast<int64_t>(i);
  }
  return -1;
}
inline void RequireSameBits(const Host& a, const Host& b, const std::string& what) {
  const int64_t i = FirstDifference(a, b);
  if (i < 0) return;
  INFO(what << ": element " << i << " of " << a.rows << " x " << a.cols << ": " << a.v[i] << " and "
            << b.v[i]);
  REQUIRE(i < 0);
}

// Double-precision values with the size of what was summed to get them (for rounding errors).
struct Want {
  int64_t rows = 0, cols = 0;
  std::vector<double> v, magnitude;
  Want(int64_t r, int64_t c)
      : rows(r), cols(c), v(static_cast<size_t>(r * c)), magnitude(v.size()) {}
  void Set(int64_t r, int64_t c, double value, double size = 0) {
    v[static_cast<size_t>(r * cols + c)] = value;
    magnitude[static_cast<size_t>(r * cols + c)] = std::max(std::abs(value), size);
  }
};

// Requires |got − want| ≤ error · magnitude, plus half a unit of the output's type (with a little
// room for a value near the middle between two).
inline void RequireClose(const Host& got, const Want& want, DType dtype, double error,
                         const std::string& what) {
  REQUIRE(got.v.size() == want.v.size());
  for (size_t i = 0; i < got.v.size(); ++i) {
    const double rounding = dtype == DType::kBF16 ? 0x1.04p-8 : 0x1p-23;
    const double allowed = error * want.magnitude[i] + rounding * std::abs(want.v[i]) + 1e-30;
    if (std::abs(got.v[i] - want.v[i]) <= allowed) continue;
    INFO(what << ": element " << i << " of " << got.rows << " x " << got.cols << ": got "
              << got.v[i] << ", want " << want.v[i] << " within " << allowed);
    REQUIRE(std::abs(got.v[i] - want.v[i]) <= allowed);
  }
}

using DVec = std::vector<double>;
inline DVec Doubles(const Host& h) { return DVec(h.v.begin(), h.v.end()); }

// d loss / d x by central differences of `loss`, which must be smooth.
inline Want Gradient(int64_t rows, int64_t cols, DVec x,
                     const std::function<double(const DVec&)>& loss, double size) {
  Want g(rows, cols);
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < x.size(); ++i) {
    const double keep = x[i];
    x[i] = keep + kStep;
    const double up = loss(x);
    x[i] = keep - kStep;
    const double down = loss(x);
    x[i] = keep;
    g.v[i] = (up - down) / (2 * kStep);
    g.magnitude[i] = std::max(size, std::abs(g.v[i]));
  }
  return g;
}

// softmax attention of one query over keys [begin, end): out[c].
struct AttentionOracle {
  int64_t num_heads, num_kv_heads, head_dim;
  double scale;
  int64_t window;
  // q [T, H*C], k and v [T', G*C]; `context[t]` lists the rows of k and v that row t sees, in
  // order.
  DVec Forward(const DVec& q, const DVec& k, const DVec& v,
               const std::vector<std::vector<int64_t>>& context) const {
    const int64_t heads = num_heads / num_kv_heads, c_size = head_dim;
    DVec out(q.size(), 0.0);
    for (size_t t = 0; t < context.size(); ++t) {
      const auto& rows = context[t];
      const int64_t n = static_cast<int64_t>(rows.size());
      const int64_t begin = window > 0 ? std::max<int64_t>(0, n - window) : 0;
      for (int64_t h = 0; h < num_heads; ++h) {
        const double* qh = &q[(static_cast<int64_t>(t) * num_heads + h) * c_size];
        const int64_t kv = (h / heads) * c_size;
        DVec p(static_cast<size_t>(n), 0.0);
        double max = -1e300, sum = 0;
        for (int64_t j = begin; j < n; ++j) {
          const double* kj = &k[rows[j] * num_kv_heads * c_size + kv];
          for (int64_t c = 0; c < c_size; ++c) p[j] += qh[c] * kj[c];
          p[j] *= scale;
          max = std::max(max, p[j]);
        }
        for (int64_t j = begin; j < n; ++j) sum += p[j] = std::exp(p[j] - max);
        double* o = &out[(static_cast<int64_t>(t) * num_heads + h) * c_size];
        for (int64_t j = begin; j < n; ++j) {
          const double* vj = &v[rows[j] * num_kv_heads * c_size + kv];
          for (int64_t c = 0; c < c_size; ++c) o[c] += p[j] / sum * vj[c];
        }
      }
    }
    return out;
  }
};

// Rows that each packed row sees, by walking the segments.
inline std::vector<std::vector<int64_t>> ContextRows(const SegmentTable& table, int64_t num_rows) {
  std::vector<std::vector<int64_t>> context(static_cast<size_t>(num_rows));
  for (int64_t s = 0; s < table.num_segments(); ++s) {
    std::vector<int64_t> before;
    for (int32_t p = table.parent[s]; p >= 0; p = table.parent[p]) {
      std::vector<int64_t> rows;
      for (int32_t i = 0; i < table.num_rows[p]; ++i) rows.push_back(table.row_begin[p] + i);
      before.insert(before.begin(), rows.begin(), rows.end());
    }
    for (int32_t i = 0; i < table.num_rows[s]; ++i) {
      before.push_back(table.row_begin[s] + i);
      context[static_cast<size_t>(table.row_begin[s] + i)] = before;
    }
  }
  return context;
}
}  // namespace stretto::engine::conformance
