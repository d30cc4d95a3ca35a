// Memory for keys and values of a step, whose type is known at run time.
#pragma once

#include <kvzap/core/array_view.hpp>

#include "base/scratch.hpp"

namespace kvzap::engine {

/// Grows on demand. Copies share the memory.
class ValueBuffer {
 public:
  explicit ValueBuffer(DType dtype) : m_dtype(dtype) {}

  /// Makes room for this number of values. If that allocates, earlier values are lost.
  void reserve(std::int64_t values, const char* label) {
    base::reserve_scratch(m_bytes, values * static_cast<std::int64_t>(size_of(m_dtype)), label);
  }
  void release() { m_bytes = {}; }
  DType dtype() const { return m_dtype; }
  /// Returns the number of values that there is room for.
  std::int64_t capacity() const { return m_bytes.extent(0) / size_of(m_dtype); }
  /// Returns the values from `first` on as an array of these extents, row-major.
  ArrayView array(std::int64_t rows, std::int64_t heads, std::int64_t dim,
                  std::int64_t first = 0) const {
    char* const data = m_bytes.data() + first * static_cast<std::int64_t>(size_of(m_dtype));
    return {data, m_dtype, {rows, heads, dim}, {heads * dim, dim, 1}};
  }

 private:
  Kokkos::View<char*, MemorySpace> m_bytes;
  DType m_dtype;
};

}  // namespace kvzap::engine
