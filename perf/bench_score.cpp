#include "common.hpp"
void kvzap::perf::register_benchmarks(const Options&) {}
