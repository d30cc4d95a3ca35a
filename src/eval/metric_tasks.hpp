// Which metric and how many tokens the published benchmarks take for a task of a name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvzap::detail {

struct TaskDefaults {
  std::string metric;               // empty: there is none, for the reason in `missing`
  std::int64_t max_new_tokens = 0;  // 0: the metric's
  std::string missing;              // why the published metric is not to be had
};

/// RULER's, LongBench's (and LongBench-E's), LongBench-v2's, InfiniteBench's, LooGLE's, AIME's and
/// MATH-500's tasks; string_match_all for any other name.
TaskDefaults task_defaults(std::string_view task);

/// The name of LongBench's data set for a task of LongBench-E ("trec_e" and "trec-e": "trec"), any
/// other name as it is.
std::string_view longbench_name(std::string_view task);

/// Whether LongBench judges the first line of the answer alone.
bool judges_first_line(std::string_view task);

}  // namespace kvzap::detail
