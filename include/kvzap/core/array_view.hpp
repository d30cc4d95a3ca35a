// Arrays whose value type is known at run time: what kernels take from callers that are no
// templates over value types.
#pragma once

#include <array>
#include <kvzap/core/types.hpp>
#include <type_traits>

namespace kvzap {

/// Calls work(Value()) with the type of `dtype`: float, half or bfloat16. Returns its result.
template <class Work>
decltype(auto) with_value_type(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::f32:
      return work(float{});
    case DType::f16:
      return work(half{});
    case DType::bf16:
      break;
  }
  return work(bfloat16{});
}

/// An array in MemorySpace whose type and shape are known at run time, as DLPack describes them.
/// Does not own. An array without data is absent. Data: void or const void.
template <class Data>
struct BasicArrayView {
  Data* data = nullptr;
  DType dtype = DType::f32;
  /// A matrix (rows, columns) has extents {rows, 1, columns}, a vector {1, 1, values}.
  std::array<std::int64_t, 3> extents = {1, 1, 1};
  /// In elements.
  std::array<std::int64_t, 3> strides = {1, 1, 1};

  BasicArrayView() = default;
  BasicArrayView(Data* data_, DType dtype_, const std::array<std::int64_t, 3>& extents_,
                 const std::array<std::int64_t, 3>& strides_)
      : data(data_), dtype(dtype_), extents(extents_), strides(strides_) {}
  /// Refers to the elements of a Kokkos view of rank 1, 2 or 3 of float, half or bfloat16.
  /// Implicit, so that functions take views of any layout.
  template <class T, class... Properties>
  // NOLINTNEXTLINE(google-explicit-constructor)
  BasicArrayView(const Kokkos::View<T, Properties...>& view)
      : data(view.data()),
        dtype(DTypeOf<typename Kokkos::View<T, Properties...>::non_const_value_type>::value) {
    using View = Kokkos::View<T, Properties...>;
    constexpr int rank = static_cast<int>(View::rank);
    static_assert(rank >= 1 && rank <= 3, "expected a view of rank 1, 2 or 3");
    static_assert(
        Kokkos::SpaceAccessibility<ExecutionSpace, typename View::memory_space>::accessible,
        "expected a view that kvzap::ExecutionSpace can access");
    for (int i = 0; i < rank; ++i) {
      const int at = i == rank - 1 ? 2 : i;
      extents[at] = static_cast<std::int64_t>(view.extent(i));
      strides[at] = static_cast<std::int64_t>(view.stride(i));
    }
  }
  /// What may be written may be read.
  template <class Other, class = std::enable_if_t<std::is_same_v<const Other, Data>>>
  // NOLINTNEXTLINE(google-explicit-constructor)
  BasicArrayView(const BasicArrayView<Other>& other)
      : data(other.data), dtype(other.dtype), extents(other.extents), strides(other.strides) {}

  /// Returns `count` elements of the first dimension, from `first` on.
  BasicArrayView rows(std::int64_t first, std::int64_t count) const {
    BasicArrayView part = rows_from(first);
    part.extents[0] = count;
    return part;
  }
  /// Returns the array from element `first` of its first dimension on.
  BasicArrayView rows_from(std::int64_t first) const {
    using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
    BasicArrayView rest = *this;
    rest.data =
        static_cast<Byte*>(data) + first * strides[0] * static_cast<std::int64_t>(size_of(dtype));
    rest.extents[0] -= first;
    return rest;
  }
  explicit operator bool() const { return data != nullptr; }

  /// The element type of `as`.
  template <class Value>
  using Element = std::conditional_t<std::is_const_v<Data>, const Value, Value>;
  /// Returns the data as values of a type, which must be that of `dtype`.
  template <class Value>
  Element<Value>* values() const {
    return static_cast<Element<Value>*>(data);
  }
  /// Returns an unmanaged view of the array, whose `dtype` must be Value's.
  template <class Value>
  auto as() const {
    using View = Kokkos::View<Element<Value>***, Kokkos::LayoutStride, MemorySpace,
                              Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    return View(values<Value>(), Kokkos::LayoutStride(extents[0], strides[0], extents[1],
                                                      strides[1], extents[2], strides[2]));
  }
};

/// An array that a function may write.
using ArrayView = BasicArrayView<void>;
/// An array that a function only reads.
using ConstArrayView = BasicArrayView<const void>;

}  // namespace kvzap
