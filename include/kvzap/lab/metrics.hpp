// Metrics that score answers.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/lab/tasks.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// A metric of answers.
struct MetricInfo {
  std::string name;    // "string_match_all"
  std::string help;    // one line: the answers that score 1, and the source
  bool needs_classes;  // requires Task::classes
  /// The metric is the perplexity of the given text (lower is better), not an accuracy: `score` is
  /// empty.
  bool is_perplexity;
  std::int64_t max_new_tokens;  // for rows that give none
  /// Score in [0, 1] of the text that the model wrote after Task::answer_prefix.
  std::function<double(const Task& task, std::string_view answer)> score;
  /// Throws Error, with the reason, for a task that this metric cannot score. May be empty.
  std::function<void(const Task& task)> check;
};

/// Returns all metrics, ordered by name.
const std::vector<MetricInfo>& metrics();
/// Returns the metric that Task::metric names. Without a name, returns the metric of the RULER or
/// LongBench task named Task::task, or else string_match_all. Throws Error for an unknown name
/// (with the nearest one) and for a task that the metric cannot score.
const MetricInfo& metric_of(const Task& task);
/// Returns max_new_tokens for a row that gives none: the number of the RULER or LongBench task of
/// that name, or else the metric's. Throws Error as metric_of does.
std::int64_t default_max_new_tokens(const Task& task);

/// A mean and its interval.
struct Interval {
  double mean = 0;
  double low = 0;
  double high = 0;
};
/// Percentile bootstrap of the mean: the interval that contains the fraction `share` of the means
/// of `resamples` samples drawn with replacement. A seed gives the same interval on every platform.
/// The result is NaN without values or if a value is not finite.
Interval bootstrap_mean(const std::vector<double>& values, std::uint64_t seed, double share = 0.95,
                        int resamples = 2000);
/// Wilson's score interval at 95 % (z = 1.959964; E. B. Wilson, JASA 22, 1927) of the share
/// right / n. Unlike the bootstrap's, it has a width if all or none of n are right: 5 of 5 give
/// 0.566 to 1. NaN if n is 0. Throws Error unless 0 <= right <= n.
Interval wilson_interval(std::int64_t right, std::int64_t n);
/// Returns the mean of scores and its interval at 95 %: Wilson's if every score is 0 or 1, or if
/// all are equal (of the mean in place of right / n), else that of bootstrap_mean.
Interval mean_of_scores(const std::vector<double>& scores, std::uint64_t seed,
                        int resamples = 2000);

/// Estimates the probability that at least one of k tries is right, from n tries with c right ones.
/// It is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1). Throws Error unless
/// 1 <= k <= n and 0 <= c <= n.
double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k);

}  // namespace kvzap
