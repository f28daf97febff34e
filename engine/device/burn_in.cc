#include "engine/device/burn_in.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bfloat16.h"
#include "base/clock.h"
#include "base/status.h"

namespace stretto::engine {
namespace {
constexpr int64_t kSize = kBurnInRows * kBurnInN;
constexpr int64_t kProductsInRun = 16;
constexpr double kFlops = 2.0 * kBurnInRows * kBurnInN * kBurnInK;

uint64_t HashOf(absl::Span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const float value : values) {
    hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  }
  return hash;
}

// x_TK from index 0 on, w_NK from where x ends.
std::vector<uint8_t> Operand(int64_t first, int64_t size, bool is_whole, DType dtype) {
  std::vector<uint8_t> bytes(static_cast<size_t>(size) * SizeOf(dtype));
  for (int64_t i = 0; i < size; ++i) {
    const float value = BurnInValue(first + i, is_whole);
    if (dtype == DType::kBF16) {
      reinterpret_cast<uint16_t*>(bytes.data())[i] = F32ToBf16(value);
    } else {
      reinterpret_cast<float*>(bytes.data())[i] = value;
    }
  }
  return bytes;
}

// The processors that this process may use.
std::vector<int> Processors() {
  std::vector<int> processors;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return processors;
  for (int p = 0; p < CPU_SETSIZE; ++p) {
    if (CPU_ISSET(p, &set)) processors.push_back(p);
  }
  return processors;
}

std::string StayOn(const std::vector<int>& processors, int thread) {
  if (static_cast<size_t>(thread) >= processors.size()) return absl::StrCat("thread ", thread);
  const int processor = processors[static_cast<size_t>(thread)];
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  // That it can't be held there changes no result.
  (void)sched_setaffinity(0, sizeof(set), &set);
  return absl::StrCat("processor ", processor);
}

// One thread's products.
class Burner {
 public:
  Burner(const BurnInOptions& options, DType dtype, int thread)
      : options_(options), dtype_(dtype), thread_(thread) {}

  absl::Status Run(const DeviceOptions& device_options, const std::string& where) {
    DeviceOptions one = device_options;
    one.num_threads = 1;
    ASSIGN_OR_RETURN(device_, CreateDevice(one));
    stream_ = device_->CreateStream();
    expected_ = KnownProductHash(device_->Profile(dtype_).instruction_set != "nofma", dtype_);
    RETURN_IF_ERROR(Annotate(Whole(), where));
    return Annotate(Real(), where);
  }
  int64_t num_products() const { return num_products_; }
  // Of the fastest run of products: others may use the processor for some of the time.
  double flops() const { return best_flops_; }

 private:
  struct Operands {
    Buffer x, w, y;
    Tensor x_TK, w_NK, y_TN;
    std::unique_ptr<PackedWeight> packed;
  };
  absl::StatusOr<Operands> Make(bool is_whole) {
    Operands o;
    const size_t element = SizeOf(dtype_);
    ASSIGN_OR_RETURN(o.x, device_->Allocate(kBurnInRows * kBurnInK * element));
    ASSIGN_OR_RETURN(o.w, device_->Allocate(kBurnInN * kBurnInK * element));
    ASSIGN_OR_RETURN(o.y, device_->Allocate(kSize * sizeof(float)));
    o.x_TK = o.x.View(dtype_, kBurnInRows, kBurnInK);
    o.w_NK = o.w.View(dtype_, kBurnInN, kBurnInK);
    o.y_TN = o.y.View(DType::kF32, kBurnInRows, kBurnInN);
    const int64_t x_size = kBurnInRows * kBurnInK;
    device_->Upload(*stream_, o.x_TK, Operand(0, x_size, is_whole, dtype_).data());
    device_->Upload(*stream_, o.w_NK,
                    Operand(x_size, kBurnInN * kBurnInK, is_whole, dtype_).data());
    ASSIGN_OR_RETURN(o.packed, device_->Pack(*stream_, {o.w_NK}));
    return o;
  }
  // The seconds that it took.
  double Multiply(const Operands& o, std::vector<float>& product) {
    const double start = Clock::Real().NowSeconds();
    device_->Linear(*stream_, o.y_TN, o.x_TK, *o.packed, {});
    device_->Synchronize(*stream_);
    const double seconds = Clock::Real().NowSeconds() - start;
    product.resize(kSize);
    device_->Download(*stream_, o.y_TN, product.data());
    if (options_.tamper != nullptr) options_.tamper(thread_, absl::MakeSpan(product));
    return seconds;
  }

  // Of integers: exact in any order, so every element's right value can be told.
  absl::Status Whole() {
    ASSIGN_OR_RETURN(const Operands o, Make(/*is_whole=*/true));
    std::vector<float> product;
    Multiply(o, product);
    std::vector<int64_t> values(kBurnInK * (kBurnInRows + kBurnInN));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<int64_t>(BurnInValue(static_cast<int64_t>(i), /*is_whole=*/true));
    }
    for (int64_t i = 0; i < kSize; ++i) {
      const int64_t* x = values.data() + i / kBurnInN * kBurnInK;
      const int64_t* w = values.data() + (kBurnInRows + i % kBurnInN) * kBurnInK;
      int64_t sum = 0;
      for (int64_t k = 0; k < kBurnInK; ++k) sum += x[k] * w[k];
      const float found = product[static_cast<size_t>(i)];
      if (found == static_cast<float>(sum)) continue;
      return absl::DataLossError(absl::StrFormat(
          "a matrix product came out wrong: element (%d, %d) is %g, right is %d; this machine's "
          "processor or memory errs",
          i / kBurnInN, i % kBurnInN, found, sum));
    }
    ++num_products_;
    return absl::OkStatus();
  }

  // Of real numbers, with the bits of the numeric profile.
  absl::Status Real() {
    ASSIGN_OR_RETURN(const Operands o, Make(/*is_whole=*/false));
    std::vector<float> product;
    const double begin = Clock::Real().NowSeconds();
    double seconds_of_run = 0;
    int64_t num_in_run = 0;
    do {
      seconds_of_run += Multiply(o, product);
      ++num_timed_;
      if (++num_in_run == kProductsInRun || best_flops_ == 0) {
        best_flops_ =
            std::max(best_flops_, static_cast<double>(num_in_run) * kFlops / seconds_of_run);
        seconds_of_run = 0;
        num_in_run = 0;
      }
      if (const uint64_t hash = HashOf(product); hash != expected_) {
        return absl::DataLossError(absl::StrFormat(
            "matrix product %d came out with other bits than numeric profile %s has (hash %016x, "
            "right is %016x); this machine's processor or memory errs",
            num_timed_, device_->Profile(dtype_).ToString(), hash, expected_));
      }
      ++num_products_;
    } while (Clock::Real().NowSeconds() - begin < options_.seconds);
    return absl::OkStatus();
  }

  const BurnInOptions& options_;
  const DType dtype_;
  const int thread_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  uint64_t expected_ = 0;
  double best_flops_ = 0;
  int64_t num_products_ = 0, num_timed_ = 0;
};
}  // namespace

float BurnInValue(int64_t index, bool is_whole) {
  const auto mixed =
      static_cast<uint32_t>(static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15u >> 40);
  if (is_whole) return static_cast<float>(static_cast<int32_t>(mixed % 17) - 8);
  return static_cast<float>(static_cast<int32_t>(mixed & 0xffff) - 0x8000) / 0x8000;
}

uint64_t KnownProductHash(bool fma, DType dtype) {
  // Products of bf16 numbers are exact in f32: fused or not, the sums are the same.
  if (dtype == DType::kBF16) return 0x9094437fd72ea241u;
  return fma ? 0x2cfb956b743cb274u : 0xd60b6d205666ddc8u;
}

absl::StatusOr<BurnInResult> BurnIn(const DeviceOptions& device, DType dtype,
                                    const BurnInOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> sample, CreateDevice(device));
  const int num_threads = sample->num_threads();
  const std::vector<int> processors = Processors();
  std::vector<std::unique_ptr<Burner>> burners;
  std::vector<absl::Status> statuses(static_cast<size_t>(num_threads));
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    Burner* burner = burners.emplace_back(std::make_unique<Burner>(options, dtype, t)).get();
    threads.emplace_back([&, t, burner] {
      statuses[static_cast<size_t>(t)] = burner->Run(device, StayOn(processors, t));
    });
  }
  for (std::thread& thread : threads) thread.join();
  BurnInResult result;
  for (int t = 0; t < num_threads; ++t) {
    RETURN_IF_ERROR(statuses[static_cast<size_t>(t)]);
    result.flops += burners[static_cast<size_t>(t)]->flops();
    result.num_products += burners[static_cast<size_t>(t)]->num_products();
  }
  return result;
}
}  // namespace stretto::engine
