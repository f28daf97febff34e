// Measures the CPU device against the machine's two ceilings: products and attention at the shapes
// of SmolLM2-135M (hidden 576, MLP 1536, 9 query and 3 kv heads of 64, vocabulary 49152), the
// vocabulary's operations and the optimizer. A product's ceiling is the larger of its time at peak
// arithmetic and its time at reading the weights from memory. Writes build/bench/device.json.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/philox.h"
#include "bench/ceilings.h"
#include "bench/report.h"
#include "engine/device/device.h"

namespace stretto::bench {
namespace {
using engine::Buffer;
using engine::Device;
using engine::Tensor;

// A device, its stream and what is alive on it.
class Lab {
 public:
  explicit Lab(int num_threads) {
    engine::DeviceOptions options;
    options.num_threads = num_threads;
    auto device = engine::CreateDevice(options);
    STRETTO_CHECK(device.ok());
    device_ = *std::move(device);
    stream_ = device_->CreateStream();
  }
  Device* operator->() { return device_.get(); }
  engine::Stream& stream() { return *stream_; }

  Tensor New(int64_t rows, int64_t cols, DType dtype) {
    auto buffer = device_->Allocate(static_cast<size_t>(rows * cols) * SizeOf(dtype));
    STRETTO_CHECK(buffer.ok());
    Tensor t = buffer->View(dtype, rows, cols);
    buffers_.push_back(*std::move(buffer));
    return t;
  }
  // Small values without structure.
  Tensor Random(int64_t rows, int64_t cols, DType dtype) {
    std::vector<float> v(static_cast<size_t>(rows * cols));
    uint32_t state = 12345;
    for (float& x : v) {
      state = state * 1664525u + 1013904223u;
      x = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    }
    Tensor wide = New(rows, cols, DType::kF32);
    device_->Upload(*stream_, wide, v.data());
    if (dtype == DType::kF32) return wide;
    Tensor narrow = New(rows, cols, dtype);
    device_->Copy(*stream_, narrow, wide);
    buffers_.erase(buffers_.end() - 2);
    return narrow;
  }
  Tensor Ints(const std::vector<int32_t>& v) {
    Tensor t = New(1, static_cast<int64_t>(v.size()), DType::kI32);
    device_->Upload(*stream_, t, v.data());
    return t;
  }
  void Clear() { buffers_.clear(); }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<engine::Stream> stream_;
  std::vector<Buffer> buffers_;
};

// Median over rounds of a share of the ceiling, which is read anew in each.
template <class Fn>
double ShareOfCeiling(CeilingMeter& meter, double operations, double bytes, const Fn& fn) {
  std::vector<double> shares;
  for (int round = 0; round < 5; ++round) {
    const Ceilings now = meter.Read();
    shares.push_back(now.Seconds(operations, bytes) / MedianSeconds(fn, 3, 0.01));
  }
  std::sort(shares.begin(), shares.end());
  return shares[2];
}

void Linears(Lab& lab, Report& report, CeilingMeter& meter, const std::string& threads) {
  struct Shape {
    const char* name;
    int64_t n, k;
  };
  for (const Shape& s : {Shape{"qkv", 960, 576}, Shape{"o", 576, 576}, Shape{"gate_up", 3072, 576},
                         Shape{"down", 576, 1536}, Shape{"lm_head", 49152, 576}}) {
    // As many copies as it takes to leave the caches: a model's layers don't stay there either.
    const int64_t bytes = s.n * s.k * 2;
    const int64_t copies = std::max<int64_t>(1, (int64_t{96} << 20) / bytes);
    Tensor w = lab.Random(s.n, s.k, DType::kBF16);
    std::vector<std::unique_ptr<engine::PackedWeight>> packed;
    for (int64_t i = 0; i < copies; ++i) {
      auto p = lab->Pack(lab.stream(), {w});
      STRETTO_CHECK(p.ok());
      packed.push_back(*std::move(p));
    }
    for (int64_t m : {1, 2, 4, 8, 16, 32, 64, 128, 512, 2048}) {
      if (s.n > 10000 && m > 512) continue;
      Tensor x = lab.Random(m, s.k, DType::kBF16);
      Tensor y = lab.New(m, s.n, s.n > 10000 ? DType::kF32 : DType::kBF16);
      size_t next = 0;
      const double flops = 2.0 * static_cast<double>(m * s.n * s.k);
      const double share = ShareOfCeiling(meter, flops, static_cast<double>(bytes), [&] {
        lab->Linear(lab.stream(), y, x, *packed[next++ % packed.size()], Tensor{});
      });
      std::optional<double> target;
      if (m == 1) target = 0.80;
      if (m >= 512) target = 0.85;
      report.Add(threads + " linear " + s.name + " M=" + std::to_string(m), share, "of ceiling",
                 target);
    }
    lab.Clear();
  }
}

void Backwards(Lab& lab, Report& report, CeilingMeter& meter, const std::string& threads) {
  const int64_t m = 1024, n = 3072, k = 576;
  Tensor x = lab.Random(m, k, DType::kBF16), w = lab.Random(n, k, DType::kBF16);
  Tensor d_y = lab.Random(m, n, DType::kF32);
  Tensor d_x = lab.New(m, k, DType::kF32), d_w = lab.Random(n, k, DType::kF32);
  const double flops = 2.0 * static_cast<double>(m * n * k);
  const double input = ShareOfCeiling(
      meter, flops, 0, [&] { lab->LinearBackwardInput(lab.stream(), d_x, d_y, w, false); });
  report.Add(threads + " input gradient, gate_up, 1024 rows", input, "of peak", 0.80);
  const double weight = ShareOfCeiling(
      meter, flops, 0, [&] { lab->LinearBackwardWeight(lab.stream(), d_w, d_y, x); });
  report.Add(threads + " weight gradient, gate_up, 1024 rows", weight, "of peak", 0.80);
  lab.Clear();
}

engine::AttentionShape SmolShape() {
  engine::AttentionShape shape;
  shape.num_heads = 9;
  shape.num_kv_heads = 3;
  shape.head_dim = 64;
  shape.scale = 0.125f;
  return shape;
}

void PackedAttentions(Lab& lab, Report& report, CeilingMeter& meter, const std::string& threads) {
  // Eight prompts of 128 tokens with four completions of 64.
  engine::SegmentTable table;
  int32_t rows = 0;
  double pairs = 0;  // (query, key) pairs
  for (int g = 0; g < 8; ++g) {
    const auto root = static_cast<int32_t>(table.num_segments());
    for (int s = 0; s < 5; ++s) {
      const int32_t length = s == 0 ? 128 : 64;
      table.row_begin.push_back(rows);
      table.num_rows.push_back(length);
      table.parent.push_back(s == 0 ? -1 : root);
      rows += length;
      pairs += (s == 0 ? 0 : 128.0 * length) + 0.5 * length * (length + 1);
    }
  }
  engine::PackedAttentionBackward b;
  b.forward.shape = SmolShape();
  b.forward.segments = &table;
  b.forward.q = lab.Random(rows, 576, DType::kBF16);
  b.forward.k = lab.Random(rows, 192, DType::kBF16);
  b.forward.v = lab.Random(rows, 192, DType::kBF16);
  b.forward.out = lab.New(rows, 576, DType::kBF16);
  b.d_out = lab.Random(rows, 576, DType::kF32);
  b.d_q = lab.New(rows, 576, DType::kF32);
  b.d_k = lab.New(rows, 192, DType::kF32);
  b.d_v = lab.New(rows, 192, DType::kF32);
  const double flops = pairs * 9 * 64 * 4;
  const double forward = MedianSeconds([&] { lab->Attention(lab.stream(), b.forward); });
  report.Add(threads + " packed attention, 3072 rows", flops / forward / meter.Median().flops,
             "of peak");
  report.Add(threads + " packed attention, 3072 rows", forward * 1e3, "ms");
  const double backward = MedianSeconds([&] { lab->AttentionBackward(lab.stream(), b); });
  report.Add(threads + " packed attention backward", 2.5 * flops / backward / meter.Median().flops,
             "of peak");
  report.Add(threads + " packed attention backward", backward * 1e3, "ms");
  lab.Clear();
}

void PagedAttentions(Lab& lab, Report& report, CeilingMeter& meter, const std::string& threads) {
  // 32 sequences decode one token each at a context of 512.
  const int32_t sequences = 32, context = 512, blocks = context / engine::kBlockTokens;
  auto cache = lab->AllocateKvCache({1, int64_t{sequences} * blocks, 3, 64, DType::kBF16});
  STRETTO_CHECK(cache.ok());
  std::vector<int32_t> slots, table, sequence, length;
  for (int32_t i = 0; i < sequences * context; ++i) slots.push_back(i);
  for (int32_t i = 0; i < sequences * blocks; ++i) table.push_back((i * 37) % (sequences * blocks));
  for (int32_t i = 0; i < sequences; ++i) {
    sequence.push_back(i);
    length.push_back(context);
  }
  Tensor k = lab.Random(sequences * context, 192, DType::kBF16);
  const Tensor slots_T = lab.Ints(slots);
  const double write =
      MedianSeconds([&] { lab->WriteKv(lab.stream(), **cache, 0, k, k, slots_T); });
  report.Add(threads + " writing keys and values", write / (sequences * context) * 1e9, "ns/token");
  engine::PagedAttention args;
  args.shape = SmolShape();
  args.q = lab.Random(sequences, 576, DType::kBF16);
  args.out = lab.New(sequences, 576, DType::kBF16);
  args.row_sequence_T = lab.Ints(sequence);
  args.context_length_T = lab.Ints(length);
  args.block_tables_SM = lab.Ints(table).Reshape(sequences);
  const double seconds = MedianSeconds([&] { lab->Attention(lab.stream(), **cache, args); });
  const double flops = 4.0 * sequences * context * 9 * 64;
  const double bytes = 2.0 * 2 * sequences * context * 3 * 64;
  report.Add(
      threads + " paged attention, 32 x 512",
      std::max(flops / meter.Median().flops, bytes / meter.Median().bytes_per_second) / seconds,
      "of ceiling");
  report.Add(threads + " paged attention, 32 x 512", seconds * 1e6, "us");
  lab.Clear();
}

void Vocabularies(Lab& lab, Report& report, const std::string& threads) {
  const int64_t rows = 64, n = 49152;
  Tensor logits = lab.Random(rows, n, DType::kF32);
  lab->Scale(lab.stream(), logits, 8.0f);
  const Tensor targets = lab.Ints(std::vector<int32_t>(rows, 7));
  Tensor lp = lab.New(1, rows, DType::kF32), h = lab.New(1, rows, DType::kF32);
  const double per_row = 1e6 / static_cast<double>(rows);
  report.Add(
      threads + " log-probs and entropy, V=49152",
      per_row * MedianSeconds([&] { lab->LogProbs(lab.stream(), lp, h, logits, targets, 0.9f); }),
      "us/row");
  std::vector<engine::Sampled> sampled(rows);
  std::vector<engine::SamplingRow> settings(rows);
  for (size_t i = 0; i < settings.size(); ++i) settings[i].uniform = static_cast<float>(i) / 64.0f;
  const auto sample = [&] { lab->Sample(lab.stream(), logits, settings, absl::MakeSpan(sampled)); };
  report.Add(threads + " sampling, untruncated", per_row * MedianSeconds(sample), "us/row");
  for (auto& s : settings) s.top_p = 0.95f;
  report.Add(threads + " sampling, top-p 0.95", per_row * MedianSeconds(sample), "us/row");
  for (auto& s : settings) s.top_k = 50;
  report.Add(threads + " sampling, top-k 50 and top-p 0.95", per_row * MedianSeconds(sample),
             "us/row");
  for (auto& s : settings) s.temperature = 0;
  report.Add(threads + " sampling, greedy", per_row * MedianSeconds(sample), "us/row");
  Tensor keep = lab.New(rows, n, DType::kF32);
  const double copy = MedianSeconds([&] { lab->Copy(lab.stream(), keep, logits); });
  const double both = MedianSeconds([&] {
    lab->Copy(lab.stream(), keep, logits);
    lab->LogProbsBackward(lab.stream(), {keep, keep, lp, h, targets, 0.9f, Tensor{}});
  });
  report.Add(threads + " gradient of logits with entropy", per_row * (both - copy), "us/row");
  lab.Clear();
}

void RowOperations(Lab& lab, Report& report, const std::string& threads) {
  const int64_t rows = 1024;
  Tensor x = lab.Random(rows, 576, DType::kBF16), y = lab.New(rows, 576, DType::kBF16);
  Tensor w = lab.Random(1, 576, DType::kBF16);
  Tensor gate_up = lab.Random(rows, 3072, DType::kBF16), act = lab.New(rows, 1536, DType::kBF16);
  const double per_row = 1e9 / static_cast<double>(rows);
  report.Add(threads + " rms norm 576",
             per_row * MedianSeconds([&] { lab->RmsNorm(lab.stream(), y, x, w, 1e-5f, 1); }),
             "ns/row");
  report.Add(threads + " swiglu 1536",
             per_row * MedianSeconds([&] { lab->SwiGlu(lab.stream(), act, gate_up); }), "ns/row");
  report.Add(threads + " add 576",
             per_row * MedianSeconds([&] { lab->Add(lab.stream(), y, x, y); }), "ns/row");
  lab.Clear();
}

void Optimizers(Lab& lab, Report& report, CeilingMeter& meter, const std::string& threads) {
  const int64_t n = 16'000'000;
  Tensor w = lab.New(1, n, DType::kBF16);
  Tensor master = lab.Random(1, n, DType::kF32), m = lab.Random(1, n, DType::kF32);
  Tensor v = lab.New(1, n, DType::kF32), grad = lab.Random(1, n, DType::kF32);
  lab->Fill(lab.stream(), v, 0.1f);
  engine::AdamWStep step;
  step.lr = 1e-4f;
  const double adamw =
      MedianSeconds([&] { lab->AdamW(lab.stream(), w, master, m, v, grad, step); });
  // Reads four arrays and writes three and a half; a written line is read first.
  report.Add(threads + " AdamW", 30.0 * n / adamw / meter.Median().bytes_per_second,
             "of bandwidth");
  report.Add(threads + " AdamW", adamw / n * 1e9, "ns/element");
  const double norm = MedianSeconds([&] { lab->SquaredNorm(lab.stream(), grad); });
  report.Add(threads + " squared norm", 4.0 * n / norm / meter.Median().bytes_per_second,
             "of bandwidth");
  lab.Clear();
}

int Main() {
  Report report("device");
  const int all = static_cast<int>(std::thread::hardware_concurrency());
  for (int threads : all > 1 ? std::vector<int>{1, all} : std::vector<int>{1}) {
    CeilingMeter meter(threads);
    const Ceilings ceilings = meter.Read();
    const std::string label = std::to_string(threads) + (threads == 1 ? " thread:" : " threads:");
    report.Add(label + " multiply-add peak", ceilings.flops * 1e-9, "GFLOP/s");
    report.Add(label + " memory read bandwidth", ceilings.bytes_per_second * 1e-9, "GB/s");
    Lab lab(threads);
    Linears(lab, report, meter, label);
    Backwards(lab, report, meter, label);
    PackedAttentions(lab, report, meter, label);
    PagedAttentions(lab, report, meter, label);
    Vocabularies(lab, report, label);
    RowOperations(lab, report, label);
    Optimizers(lab, report, meter, label);
  }
  return report.Write() ? 0 : 1;
}
}  // namespace
}  // namespace stretto::bench

int main() { return stretto::bench::Main(); }
