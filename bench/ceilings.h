// The two ceilings of a machine: fused multiply-adds a second and bytes read from memory a second.
#pragma once

namespace stretto::bench {
// f32 floating-point operations (an FMA counts two) a second of `num_threads` threads together, in
// registers, with the widest instructions the machine has.
double PeakFlops(int num_threads);
// Bytes a second that `num_threads` threads together read from a buffer far larger than the caches.
double ReadBandwidth(int num_threads);
}  // namespace stretto::bench
