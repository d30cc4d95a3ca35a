// Copies between arrays of any type and strides and the decoder's rows.
#pragma once

#include <Kokkos_Core.hpp>
#include <kvzap/engine/external_layer.hpp>

namespace kvzap::engine {

template <class From, class To>
void copy_array(const ExecutionSpace& exec, const From* from,
                const std::array<std::int64_t, 3>& from_strides, To* to,
                const std::array<std::int64_t, 3>& to_strides,
                const std::array<std::int64_t, 3>& extents) {
  const std::int64_t from_row = from_strides[0], from_head = from_strides[1],
                     from_value = from_strides[2];
  const std::int64_t to_row = to_strides[0], to_head = to_strides[1], to_value = to_strides[2];
  const std::int64_t heads = extents[1], values = extents[2];
  Kokkos::parallel_for(
      "kvzap::decoder::copy_array",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0,
                                                                           extents[0] * heads),
      KOKKOS_LAMBDA(const std::int64_t i) {
        const From* const source = from + i / heads * from_row + i % heads * from_head;
        To* const target = to + i / heads * to_row + i % heads * to_head;
        for (std::int64_t v = 0; v < values; ++v) {
          target[v * to_value] = static_cast<To>(static_cast<float>(source[v * from_value]));
        }
      });
}

/// Calls work(pointer of the array's type).
template <class Work>
void with_array(const ArrayView& array, const Work& work) {
  switch (array.dtype) {
    case DType::f32:
      return work(static_cast<float*>(array.data));
    case DType::f16:
      return work(static_cast<half*>(array.data));
    case DType::bf16:
      return work(static_cast<bfloat16*>(array.data));
  }
}

/// Copies an array to rows of `to`: its element (i, j, k) to i * row_stride + j * stride + k.
template <class To>
void read_array(const ExecutionSpace& exec, const ArrayView& from, To* to, std::int64_t row_stride,
                std::int64_t stride) {
  with_array(from, [&](const auto* data) {
    copy_array(exec, data, from.strides, to, {row_stride, stride, 1}, from.extents);
  });
}

/// Copies rows of `from` to an array, in the same order.
template <class From>
void write_array(const ExecutionSpace& exec, const From* from, std::int64_t row_stride,
                 std::int64_t stride, const ArrayView& to) {
  with_array(to, [&](auto* data) {
    copy_array(exec, from, {row_stride, stride, 1}, data, to.strides, to.extents);
  });
}

}  // namespace kvzap::engine
