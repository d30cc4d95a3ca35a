// How answers are judged.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/lab/tasks.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// A way to judge an answer.
struct MetricInfo {
  std::string name;    // "string_match_all"
  std::string help;    // one line: what scores 1, and where it is from
  bool needs_classes;  // Task::classes must be there
  /// The text is given to the model word by word, and its likelihood is what counts: `score` is
  /// empty, and the figure is a perplexity (lower is better), not an accuracy.
  bool is_perplexity;
  std::int64_t max_new_tokens;  // where a row gives none
  /// In [0, 1], of what the model has written after Task::answer_prefix.
  std::function<double(const Task& task, std::string_view answer)> score;
  /// Throws Error, saying why, for a task that this metric cannot judge. May be empty.
  std::function<void(const Task& task)> check;
};

/// All metrics, by name.
const std::vector<MetricInfo>& metrics();
/// The one that Task::metric names, or that belongs to Task::task (RULER's and LongBench's names),
/// else string_match_all. Throws Error for an unknown name (with the nearest one) and where the
/// task does not fit it.
const MetricInfo& metric_of(const Task& task);
/// Where a row gives none: what RULER and LongBench take for the task of that name, else what its
/// metric says. Throws Error as metric_of.
std::int64_t default_max_new_tokens(const Task& task);

/// A mean and its bootstrap interval.
struct Interval {
  double mean = 0;
  double low = 0;
  double high = 0;
};
/// The percentile bootstrap of the mean: `share` of the means of `resamples` samples drawn with
/// replacement lie within. The same for a seed on every platform. NaN of no values, and
/// where one is not finite.
Interval bootstrap_mean(const std::vector<double>& values, std::uint64_t seed, double share = 0.95,
                        int resamples = 2000);

/// Probability that at least one of k tries is right, of n tries of which c were (Chen et al.,
/// arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k). Throws Error unless 1 <= k <= n and
/// 0 <= c <= n.
double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k);

}  // namespace kvzap
