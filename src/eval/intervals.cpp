#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/core/types.hpp>
#include <kvzap/lab/metrics.hpp>
#include <limits>
#include <random>

namespace kvzap {
namespace {

// Draws uniformly below `size`; the standard's distributions differ between libraries.
// Multiplication (Lemire, arXiv 1805.10941, without rejection) has a bias below size / 2^32.
std::size_t bootstrap_index(std::mt19937_64& generator, std::size_t size) {
  return static_cast<std::size_t>(((generator() >> 32) * static_cast<std::uint64_t>(size)) >> 32);
}

// Interpolates linearly, as numpy.quantile does by default. `sorted` must not be empty.
double bootstrap_quantile(const std::vector<double>& sorted, double share) {
  const double position = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

// Computes the mean as an offset from the first value, so that equal values give exactly that
// value.
template <class At>
double bootstrap_mean_of(std::size_t count, double origin, At&& at) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += at(i) - origin;
  return origin + sum / static_cast<double>(count);
}

// Wilson's interval of the mean of `count` scores in [0, 1] with this sum.
Interval wilson_of(double sum, double count) {
  const double mean = sum / count;  // NaN without values
  constexpr double z = 1.959964;    // the normal distribution's quantile of 0.975
  const double scale = 1 / (count + z * z);
  const double center = (sum + z * z / 2) * scale;
  const double half = z * scale * std::sqrt(sum * (count - sum) / count + z * z / 4);
  // Exact at the ends, where the difference would leave a rounding error.
  return {mean, sum == 0 && count > 0 ? 0 : center - half,
          sum == count && count > 0 ? 1 : center + half};
}

}  // namespace

Interval bootstrap_mean(const std::vector<double>& values, std::uint64_t seed, double share,
                        int resamples) {
  if (!(share > 0 && share < 1)) {
    throw Error(
        fmt::format("bootstrap: share: expected more than 0 and less than 1, found {}", share));
  }
  if (resamples < 1 || values.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(
        fmt::format("bootstrap: expected 1 or more resamples of at most 2^32 - 1 values, "
                    "found {} of {}",
                    resamples, values.size()));
  }
  const bool are_finite =
      std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
  if (values.empty() || !are_finite) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    return {nan, nan, nan};
  }
  const double origin = values.front();
  std::mt19937_64 generator(seed);
  std::vector<double> means(static_cast<std::size_t>(resamples));
  for (double& mean : means) {
    mean = bootstrap_mean_of(values.size(), origin, [&](std::size_t) {
      return values[bootstrap_index(generator, values.size())];
    });
  }
  std::sort(means.begin(), means.end());
  return {bootstrap_mean_of(values.size(), origin, [&](std::size_t i) { return values[i]; }),
          bootstrap_quantile(means, (1 - share) / 2), bootstrap_quantile(means, (1 + share) / 2)};
}

Interval wilson_interval(std::int64_t right, std::int64_t n) {
  if (right < 0 || right > n) {
    throw Error(
        fmt::format("wilson: expected 0 <= right <= n, found right = {}, n = {}", right, n));
  }
  return wilson_of(static_cast<double>(right), static_cast<double>(n));
}

Interval mean_of_scores(const std::vector<double>& scores, std::uint64_t seed, int resamples) {
  const bool are_right_or_wrong = std::all_of(
      scores.begin(), scores.end(), [](double score) { return score == 0 || score == 1; });
  const auto count = static_cast<std::int64_t>(scores.size());
  if (are_right_or_wrong) {
    return wilson_interval(std::count(scores.begin(), scores.end(), 1.0), count);
  }
  // All samples of equal scores have the same mean: the bootstrap would have no width. No scores in
  // [0, 1] of a mean vary more than zeros and ones.
  const double first = scores.front();
  const bool are_equal =
      std::all_of(scores.begin(), scores.end(), [&](double score) { return score == first; });
  if (!are_equal || first < 0 || first > 1) return bootstrap_mean(scores, seed, 0.95, resamples);
  Interval interval = wilson_of(first * static_cast<double>(count), static_cast<double>(count));
  interval.mean = first;
  return interval;
}

double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k) {
  if (k < 1 || k > n || c < 0 || c > n) {
    throw Error(
        fmt::format("pass@k: expected 1 <= k <= n and 0 <= c <= n, found k = {}, n = {}, "
                    "c = {}",
                    k, n, c));
  }
  if (n - c < k) return 1;
  // Multiplies C(n - c, k) / C(n, k) factor by factor, because the binomials themselves overflow.
  double none_right = 1;
  for (std::int64_t i = n - c + 1; i <= n; ++i) {
    none_right *= 1 - static_cast<double>(k) / static_cast<double>(i);
  }
  return 1 - none_right;
}

}  // namespace kvzap
