// Metrics of the process for Prometheus.
#pragma once

#include <string>

namespace kvzap::driver {

/// Returns the metrics process_… of this process, as Prometheus' own clients name them, and
/// kvzap_build_info. Leaves out those that the system does not tell: outside of Linux all but the
/// processor time, the descriptors' limit and the build.
std::string process_metrics(const std::string& version, const std::string& revision);

}  // namespace kvzap::driver
