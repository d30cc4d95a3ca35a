// Matrices and vectors that are slices of a tensor of all experts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "model/weight_store.hpp"

namespace kvzap::model {

/// Implements WeightStore::slice by WeightStore::at.
std::unique_ptr<StoredTensor> open_slice(const WeightStore& store, const std::string& name,
                                         const TensorSlice& slice, std::int64_t rows,
                                         std::int64_t columns);

}  // namespace kvzap::model
