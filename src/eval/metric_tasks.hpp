// Metrics and answer lengths of the published benchmarks, by the task's name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvzap::detail {

struct TaskDefaults {
  std::string metric;               // empty: unavailable, see `missing`
  std::int64_t max_new_tokens = 0;  // 0: the metric's
  std::string missing;              // reason why the published metric is unavailable
};

/// RULER's, LongBench's (and LongBench-E's), LongBench-v2's, InfiniteBench's, LooGLE's, AIME's and
/// MATH-500's tasks; string_match_all for any other name.
TaskDefaults task_defaults(std::string_view task);

/// The name of LongBench's data set for a task of LongBench-E ("trec_e" and "trec-e": "trec"); any
/// other name unchanged.
std::string_view longbench_name(std::string_view task);

/// Whether LongBench scores only the first line of the answer.
bool judges_first_line(std::string_view task);

}  // namespace kvzap::detail
