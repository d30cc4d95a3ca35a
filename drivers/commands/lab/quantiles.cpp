#include "commands/lab/quantiles.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvzap::driver {

Quantiles quantiles_of(std::vector<float>& values) {
  values.erase(
      std::remove_if(values.begin(), values.end(), [](float value) { return std::isnan(value); }),
      values.end());
  if (values.empty()) return std::nullopt;
  Quantiles quantiles{std::in_place};
  auto sorted_to = values.begin();
  for (std::size_t i = 0; i < quantile_shares.size(); ++i) {
    const double place = quantile_shares[i] * static_cast<double>(values.size() - 1);
    const auto below = static_cast<std::ptrdiff_t>(place);
    const double share = place - static_cast<double>(below);
    const auto low = values.begin() + below;
    std::nth_element(sorted_to, low, values.end());
    sorted_to = low;
    double value = *low;
    if (share > 0) {
      const double next = *std::min_element(low + 1, values.end());
      const double between = value + (next - value) * share;
      value = std::isfinite(value) && std::isfinite(next) ? between : (share < 0.5 ? value : next);
    }
    (*quantiles)[i] = value;
  }
  return quantiles;
}

nlohmann::ordered_json quantiles_json(const Quantiles& quantiles) {
  nlohmann::ordered_json json;
  if (!quantiles) return json;
  for (std::size_t i = 0; i < quantile_names.size(); ++i) {
    json[quantile_names[i]] = number_json((*quantiles)[i]);
  }
  return json;
}

nlohmann::ordered_json number_json(double value) {
  if (std::isnan(value)) return nullptr;
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

}  // namespace kvzap::driver
