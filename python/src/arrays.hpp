// Vectors as arrays of NumPy.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "runtime.hpp"

namespace kvzap::python {

/// An array that owns its values.
template <class Value>
auto array_of(std::vector<Value> values, std::vector<std::size_t> shape) {
  auto* const owned = new std::vector<Value>(std::move(values));
  const nb::capsule owner(
      owned, [](void* data) noexcept { delete static_cast<std::vector<Value>*>(data); });
  return nb::ndarray<nb::numpy, Value>(owned->data(), shape.size(), shape.data(), owner);
}

template <class Value>
auto array_of(std::vector<Value> values) {
  const std::size_t size = values.size();
  return array_of(std::move(values), {size});
}

/// A matrix of `columns` columns, row after row.
template <class Value>
auto matrix_of(std::vector<Value> values, std::size_t columns) {
  const std::size_t rows = values.size() / columns;
  return array_of(std::move(values), {rows, columns});
}

}  // namespace kvzap::python
