// Reads this rank's part of a checkpoint's tensors, or generates it from a seed.
#pragma once

#include <kvzap/core/types.hpp>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "linalg/gemm.hpp"
#include "linalg/linear_weights.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// Half-open index ranges, ascending: a rank's part of a dimension.
using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// A rank's part of the first dimension of a tensor.
struct TensorRows {
  std::string name;
  std::int64_t extent = 0;  // of the whole tensor
  Ranges ranges;
};

inline std::int64_t total(const Ranges& ranges) {
  std::int64_t sum = 0;
  for (const auto& [begin, end] : ranges) sum += end - begin;
  return sum;
}

class WeightSource {
 public:
  explicit WeightSource(const WeightStore& store) : m_store(&store) {}
  /// Normally distributed weights of standard deviation 0.02. The value at an index depends only on
  /// the seed, the tensor's name and the index, not on the split over ranks.
  explicit WeightSource(std::uint64_t seed) : m_seed(seed) {}

  /// Returns the rows of all tensors in `parts`, one tensor after the other, with the columns
  /// `column_ranges` of each. Each tensor must have the shape (extent, columns). Throws Error if a
  /// finite value overflows Value.
  template <class Value>
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> matrix(
      const std::vector<TensorRows>& parts, std::int64_t columns,
      const Ranges& column_ranges) const;

  /// The same, packed if that is worth it (packs_weights, few_outputs).
  template <class Value>
  linalg::LinearWeights<Value> linear(const std::vector<TensorRows>& parts, std::int64_t columns,
                                      const Ranges& column_ranges) const;

  /// Returns the elements of all tensors in `parts`, each of shape (extent), as float. Without a
  /// checkpoint every element is `random_value`: 1 for norms, 0 for biases.
  Kokkos::View<float*, MemorySpace> vector(const std::vector<TensorRows>& parts,
                                           float random_value) const;

 private:
  /// Fills `target` with the columns `column_ranges` of rows row_begin .. row_end - 1.
  template <class Value>
  void read_rows(const StoredTensor* tensor, std::uint64_t key, std::int64_t columns,
                 std::int64_t row_begin, std::int64_t row_end, const Ranges& column_ranges,
                 Value* target) const;

  /// Consecutive rows of a tensor that are also consecutive in the result.
  struct RowRun {
    std::shared_ptr<const StoredTensor> tensor;
    std::uint64_t key = 0;            // of random weights
    std::int64_t begin = 0, end = 0;  // in the tensor
    std::int64_t first = 0;           // in the result
  };
  std::vector<RowRun> runs_of(const std::vector<TensorRows>& parts, std::int64_t columns) const;
  void release(const std::vector<RowRun>& runs) const;

  const WeightStore* m_store = nullptr;
  std::uint64_t m_seed = 0;
  // Reading is logically const; only the allocators' position changes.
  mutable std::tuple<linalg::PackedAllocator<float>, linalg::PackedAllocator<half>,
                     linalg::PackedAllocator<bfloat16>>
      m_allocators;
};

}  // namespace kvzap::model
