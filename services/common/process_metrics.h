// What Prometheus's own clients tell of every process, under their names (process_cpu_seconds_total
// and so on), from /proc/self.
#pragma once

#include <string>

namespace stretto::services {
// In Prometheus's text format; without what the system doesn't tell. Any thread.
std::string ProcessMetricsText();
}  // namespace stretto::services
