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

/// Copies an array to `to`, an array of the same extents, and rounds its values to that type.
inline void copy_array(const ExecutionSpace& exec, const ConstArrayView& from,
                       const ArrayView& to) {
  with_value_type(from.dtype, [&](auto source) {
    with_value_type(to.dtype, [&](auto target) {
      copy_array(exec, from.values<decltype(source)>(), from.strides, to.values<decltype(target)>(),
                 to.strides, from.extents);
    });
  });
}

}  // namespace kvzap::engine
