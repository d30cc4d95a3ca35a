#include "train/quality.hpp"

#include <algorithm>
#include <limits>

namespace kvzap::train {

void judge(const std::vector<float>& oracle, const std::vector<float>& predicted,
           std::int64_t heads, LayerReport& report) {
  constexpr double unknown = std::numeric_limits<double>::quiet_NaN();
  const auto pairs = static_cast<std::int64_t>(oracle.size()) / heads;
  const auto count = static_cast<double>(pairs);
  report.validation = pairs;
  report.r2.assign(static_cast<std::size_t>(heads), unknown);
  report.mse_of_head.assign(static_cast<std::size_t>(heads), unknown);
  report.mse = pairs == 0 ? unknown : 0;
  for (std::int64_t h = 0; h < heads && pairs > 0; ++h) {
    double oracle_mean = 0, predicted_mean = 0, squares = 0;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double y = oracle[i * heads + h], p = predicted[i * heads + h];
      oracle_mean += y / count;
      predicted_mean += p / count;
      squares += (y - p) * (y - p);
    }
    double yy = 0, pp = 0, yp = 0;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double y = oracle[i * heads + h] - oracle_mean;
      const double p = predicted[i * heads + h] - predicted_mean;
      yy += y * y;
      pp += p * p;
      yp += y * p;
    }
    if (yy > 0 && pp > 0) report.r2[h] = std::min(1.0, yp * yp / (yy * pp));
    report.mse_of_head[h] = squares / count;
    report.mse += squares / count / static_cast<double>(heads);
  }
  const std::int64_t samples = std::min(pairs, max_plotted_pairs);
  report.oracle.clear();
  report.predicted.clear();
  for (std::int64_t s = 0; s < samples; ++s) {
    const std::int64_t i = s * pairs / samples;
    for (std::int64_t h = 0; h < heads; ++h) {
      report.oracle.push_back(oracle[i * heads + h]);
      report.predicted.push_back(predicted[i * heads + h]);
    }
  }
}

}  // namespace kvzap::train
