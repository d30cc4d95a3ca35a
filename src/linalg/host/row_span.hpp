// Rows of a matrix in memory, as kernels of the host take them.
#pragma once

#include <cstdint>

namespace kvzap::linalg {

/// Row i of `count` begins at data + i * stride.
template <class Value>
struct RowSpan {
  Value* data = nullptr;
  std::int64_t stride = 0, count = 0;

  RowSpan from(std::int64_t first, std::int64_t n) const {
    return {data + first * stride, stride, n};
  }
};

}  // namespace kvzap::linalg
