// Reads this rank's part of a checkpoint's tensors.
#pragma once

#include <functional>
#include <kvzap/core/types.hpp>
#include <kvzap/model/model.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "linalg/gemm.hpp"
#include "linalg/linear_weights.hpp"
#include "model/padded_tensor.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// Half-open index ranges, ascending: a rank's part of a dimension.
using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// A rank's part of the first dimension of a tensor.
struct TensorRows {
  std::string name;
  std::int64_t extent = 0;  // of the whole tensor
  Ranges ranges;
  /// The tensor is a slice of the one called `name`.
  std::optional<TensorSlice> slice = std::nullopt;
  /// The tensor's shape is (extent, 1, columns): a convolution of each channel by itself.
  bool is_convolution = false;
  /// The tensor's shape is (1, 1, extent, 1).
  bool is_column = false;
  /// The tensor is one value, without extents.
  bool is_scalar = false;
  /// The tensor's heads are padded; extents and ranges count the padding.
  std::optional<HeadPadding> padding = std::nullopt;
};

inline void append_shifted(Ranges& ranges, const Ranges& added, std::int64_t by) {
  for (const auto& [begin, end] : added) ranges.emplace_back(begin + by, end + by);
}

/// Returns a copy of numbers in bf16.
Kokkos::View<bfloat16*, MemorySpace> rounded(const Kokkos::View<float*, MemorySpace>& numbers);

inline std::int64_t total(const Ranges& ranges) {
  std::int64_t sum = 0;
  for (const auto& [begin, end] : ranges) sum += end - begin;
  return sum;
}

class WeightSource {
 public:
  /// Plain weights become values of type `dtype`. `store` must outlive the source.
  WeightSource(const WeightStore& store, DType dtype, WeightStorage storage)
      : m_store(store), m_dtype(dtype), m_storage(storage) {}

  /// From now on nothing is read: matrices and vectors come back empty, and planned_bytes() counts
  /// what they would take.
  void only_plan() { m_plans = true; }
  bool only_plans() const { return m_plans; }
  std::int64_t planned_bytes() const { return m_planned; }

  /// Returns the rows of all tensors in `parts` for products, one tensor after the other, with the
  /// columns `column_ranges` of each. Each tensor must have the shape (extent, columns). They are
  /// quantised as they are stored, or packed if that is worth it (packs_weights, few_outputs).
  /// Throws Error if a finite value overflows the type.
  linalg::LinearWeights linear(const std::vector<TensorRows>& parts, std::int64_t columns,
                               const Ranges& column_ranges) const;

  /// The same as a table whose rows are looked up: plain rows, or quantised as they are stored.
  linalg::LinearWeights table(const std::vector<TensorRows>& parts, std::int64_t columns,
                              const Ranges& column_ranges) const;

  /// The same as a matrix of floats.
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> matrix(
      const std::vector<TensorRows>& parts, std::int64_t columns,
      const Ranges& column_ranges) const;

  /// Reads rows (row, columns) of a tensor and writes weights (output, input) that follow from
  /// them.
  using Arrange = std::function<void(const float* rows, float* weights)>;
  /// Returns weights for products that `arrange` makes of the rows of a tensor, plain or packed, in
  /// the value type.
  linalg::LinearWeights arranged(const TensorRows& part, std::int64_t columns, std::int64_t outputs,
                                 std::int64_t inputs, const Arrange& arrange) const;

  /// Returns the elements of all tensors in `parts`, each of shape (extent), as float, plus
  /// `summand`, times `factor`.
  Kokkos::View<float*, MemorySpace> vector(const std::vector<TensorRows>& parts, float summand = 0,
                                           float factor = 1) const;

  /// Returns rows first … end - 1 of a table (row, column): sin(row f^c), then cos(row f^c) for c
  /// from 0 to columns / 2 - 1, where f^(columns / 2 - 1) = 1 / 10000 (XGLM).
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> sinusoids(std::int64_t first,
                                                                    std::int64_t end,
                                                                    std::int64_t columns) const;

  /// Returns `count` ones.
  Kokkos::View<float*, MemorySpace> ones(std::int64_t count) const;

  /// Returns the only element of a tensor; 0 if nothing is to be read.
  float value(const TensorRows& part) const;

 private:
  /// Consecutive rows of a tensor that are also consecutive in the result.
  struct RowRun {
    std::shared_ptr<const StoredTensor> tensor;
    std::int64_t begin = 0, end = 0;  // in the tensor
    std::int64_t first = 0;           // in the result
  };
  /// Returns plain rows of any type.
  linalg::LinearWeights rows(const std::vector<TensorRows>& parts, std::int64_t columns,
                             const Ranges& column_ranges, DType dtype) const;
  /// Returns the weights in their stored blocks if all parts have formats that products read; else
  /// null.
  std::shared_ptr<const linalg::quantised::Matrix> quantised(const std::vector<TensorRows>& parts,
                                                             std::int64_t columns,
                                                             const Ranges& column_ranges) const;
  /// Counts count values of `bytes` bytes each if nothing is to be read. Throws Error on overflow.
  bool plans(std::int64_t rows, std::int64_t columns, std::int64_t bytes) const;
  /// columns: 0 for a vector.
  std::unique_ptr<StoredTensor> open(const TensorRows& part, std::int64_t columns) const;
  std::vector<RowRun> runs_of(const std::vector<TensorRows>& parts, std::int64_t columns) const;
  void release(const std::vector<RowRun>& runs) const;

  const WeightStore& m_store;
  DType m_dtype;
  WeightStorage m_storage;
  bool m_plans = false;
  mutable std::int64_t m_planned = 0;
  // Reading is logically const; only the allocator's position changes.
  mutable linalg::PackedAllocator m_allocator;
};

}  // namespace kvzap::model
