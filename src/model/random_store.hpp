// Random weights, for shapes without a checkpoint.
#pragma once

#include <cstdint>

#include "model/weight_store.hpp"

namespace kvzap::model {

/// Normally distributed matrices of standard deviation 0.02, norms of 1 and biases of 0. A value
/// depends only on the seed, the tensor's name and the index, not on the split over ranks.
class RandomStore final : public WeightStore {
 public:
  explicit RandomStore(std::uint64_t seed) : m_seed(seed) {}

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override;
  bool has(std::string_view /*name*/) const override { return true; }

 private:
  std::uint64_t m_seed;
};

}  // namespace kvzap::model
