// Quality of predictions.
#pragma once

#include <cstdint>
#include <kvzap/lab/train.hpp>
#include <vector>

namespace kvzap::train {

/// Sets r2, mse_of_head, mse, validation, oracle and predicted of `report` from scores and
/// predictions, both (pairs, heads).
void judge(const std::vector<float>& oracle, const std::vector<float>& predicted,
           std::int64_t heads, LayerReport& report);

}  // namespace kvzap::train
