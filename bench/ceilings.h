// The two ceilings of a machine: fused multiply-adds a second and bytes read from memory a second.
// What a machine grants changes from second to second, so a reading is short and is taken again
// beside every figure that is compared with it.
#pragma once

#include <cstddef>
#include <vector>

namespace stretto::bench {
struct Ceilings {
  double flops = 0;             // operations a second into f32, a multiply-add counts two
  double bytes_per_second = 0;  // read from memory

  // Of work that needs so much arithmetic and so many bytes: the longer of both.
  double Seconds(double operations, double bytes) const {
    const double arithmetic = operations / flops, memory = bytes / bytes_per_second;
    return arithmetic > memory ? arithmetic : memory;
  }
};

class CeilingMeter {
 public:
  explicit CeilingMeter(int num_threads);
  ~CeilingMeter();
  CeilingMeter(const CeilingMeter&) = delete;
  CeilingMeter& operator=(const CeilingMeter&) = delete;

  // What all threads together reach now: multiply-adds in registers with the widest instructions
  // the machine has (where it has such for products of bf16, with them, which do twice as many),
  // and reading a buffer far larger than the caches. Takes about 50 ms.
  Ceilings Read();
  // Medians of the readings so far.
  Ceilings Median() const;

 private:
  double PeakFlops();
  double ReadBandwidth();

  const int num_threads_;
  float* buffer_ = nullptr;
  std::vector<double> flops_, bandwidths_;
};
}  // namespace stretto::bench
