// Metrics and answer lengths of the published benchmarks, by the task's name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvzap::eval {

struct TaskDefaults {
  std::string metric;               // empty: no metric, see `missing`
  std::int64_t max_new_tokens = 0;  // 0: the default of the metric
  std::string missing;              // reason why the published metric is unavailable
};

/// Returns the defaults of a task of RULER, LongBench (and LongBench-E), LongBench-v2,
/// InfiniteBench, LooGLE, AIME or MATH-500. Returns string_match_all for any other name.
TaskDefaults task_defaults(std::string_view task);

/// Returns the name of LongBench's data set for a task of LongBench-E ("trec_e" and "trec-e":
/// "trec"). Returns any other name unchanged.
std::string_view longbench_name(std::string_view task);

/// Returns whether LongBench scores only the first line of the answer.
bool judges_first_line(std::string_view task);

}  // namespace kvzap::eval
