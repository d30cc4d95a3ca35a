// Quantiles of the scores of kept rows, for reports.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

namespace kvzap::driver {

inline constexpr std::array<double, 5> quantile_shares = {0, 0.25, 0.5, 0.75, 1};
inline constexpr std::array<const char*, 5> quantile_names = {"min", "q25", "median", "q75", "max"};
/// Absent if there are no values.
using Quantiles = std::optional<std::array<double, quantile_shares.size()>>;

/// Returns quantiles, interpolated between the two nearest of the sorted values as numpy.quantile
/// does by default. If one of the two is infinite, returns the nearer one. Reorders `values`, and
/// ignores NaN.
Quantiles quantiles_of(std::vector<float>& values);

/// Returns {"min": …, "q25": …, …}; null if there are none.
nlohmann::ordered_json quantiles_json(const Quantiles& quantiles);

/// Converts a number for JSON, which has no infinity: "inf", "-inf"; NaN becomes null.
nlohmann::ordered_json number_json(double value);

}  // namespace kvzap::driver
