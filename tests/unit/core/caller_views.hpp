// Views as a caller of the library may have them: any value type, layout and memory space.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <random>
#include <type_traits>
#include <vector>

namespace kvzap::test {

/// A caller's value type, layout and execution space.
template <class ValueOf, class LayoutOf, class ExecOf>
struct Caller {
  using Value = ValueOf;
  using Layout = LayoutOf;
  using Exec = ExecOf;
  using Space = typename Exec::memory_space;
};

using Callers =
    ::testing::Types<Caller<float, Kokkos::LayoutRight, Kokkos::DefaultExecutionSpace>,
                     Caller<half, Kokkos::LayoutLeft, Kokkos::DefaultExecutionSpace>,
                     Caller<bfloat16, Kokkos::LayoutStride, Kokkos::DefaultExecutionSpace>,
                     Caller<float, Kokkos::LayoutStride, Kokkos::DefaultHostExecutionSpace>,
                     Caller<bfloat16, Kokkos::LayoutLeft, Kokkos::DefaultHostExecutionSpace>
#if defined(KOKKOS_ENABLE_SERIAL)
                     ,
                     Caller<half, Kokkos::LayoutRight, Kokkos::Serial>
#endif
                     >;

/// A host's array, (i, j, k).
struct HostArray {
  std::array<std::size_t, 3> extents = {0, 0, 0};
  std::vector<float> values;

  HostArray() = default;
  HostArray(std::size_t a, std::size_t b, std::size_t c) : extents{a, b, c}, values(a * b * c) {}
  float& operator()(std::size_t i, std::size_t j, std::size_t k = 0) {
    return values[(i * extents[1] + j) * extents[2] + k];
  }
  float operator()(std::size_t i, std::size_t j, std::size_t k = 0) const {
    return values[(i * extents[1] + j) * extents[2] + k];
  }
};

/// Numbers in [-1, 1), as Value rounds them.
template <class Value>
HostArray random_array(std::size_t a, std::size_t b, std::size_t c, std::mt19937& random) {
  HostArray array(a, b, c);
  for (float& value : array.values) {
    value = static_cast<float>(Value(static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f));
  }
  return array;
}

/// A view of rank 3 with the array's values. LayoutStride: every second value of a larger view.
template <class Value, class Layout, class Space>
auto view_of(const HostArray& array) {
  const auto& n = array.extents;
  const auto fill = [&](const auto& view, const auto& at) {
    const auto host = Kokkos::create_mirror_view(view);
    for (std::size_t i = 0; i < n[0]; ++i) {
      for (std::size_t j = 0; j < n[1]; ++j) {
        for (std::size_t k = 0; k < n[2]; ++k) at(host, i, j, k) = Value(array(i, j, k));
      }
    }
    Kokkos::deep_copy(view, host);
  };
  if constexpr (std::is_same_v<Layout, Kokkos::LayoutStride>) {
    const Kokkos::View<Value****, Kokkos::LayoutRight, Space> parent("parent", n[0], n[1], n[2], 2);
    fill(parent,
         [](const auto& host, auto i, auto j, auto k) -> Value& { return host(i, j, k, 1); });
    return Kokkos::View<Value***, Layout, Space>(
        Kokkos::subview(parent, Kokkos::ALL, Kokkos::ALL, Kokkos::ALL, 1));
  } else {
    const Kokkos::View<Value***, Layout, Space> view("view", n[0], n[1], n[2]);
    fill(view, [](const auto& host, auto i, auto j, auto k) -> Value& { return host(i, j, k); });
    return view;
  }
}

/// The same with rank 2, of an array (i, j, 1).
template <class Value, class Layout, class Space>
auto matrix_of(const HostArray& array) {
  if constexpr (std::is_same_v<Layout, Kokkos::LayoutRight>) {
    HostArray turned(1, array.extents[0], array.extents[1]);
    turned.values = array.values;
    return Kokkos::View<Value**, Layout, Space>(
        Kokkos::subview(view_of<Value, Layout, Space>(turned), 0, Kokkos::ALL, Kokkos::ALL));
  } else {
    return Kokkos::View<Value**, Layout, Space>(
        Kokkos::subview(view_of<Value, Layout, Space>(array), Kokkos::ALL, Kokkos::ALL, 0));
  }
}

/// The same with rank 1, of an array (i, 1, 1).
template <class Value, class Space>
Kokkos::View<Value*, Space> vector_of(const HostArray& array) {
  return Kokkos::subview(view_of<Value, Kokkos::LayoutLeft, Space>(array), Kokkos::ALL, 0, 0);
}

/// An element of a view of rank 1, 2 or 3. (A function of its own: nvcc rejects a kernel's lambda
/// that names a captured view only after `if constexpr`.)
template <class View>
KOKKOS_INLINE_FUNCTION float element(const View& view, std::size_t i,
                                     [[maybe_unused]] std::size_t j,
                                     [[maybe_unused]] std::size_t k) {
  constexpr int rank = static_cast<int>(View::rank);
  if constexpr (rank == 1) {
    return static_cast<float>(view(i));
  } else if constexpr (rank == 2) {
    return static_cast<float>(view(i, j));
  } else {
    return static_cast<float>(view(i, j, k));
  }
}

/// Copies a view of rank 1, 2 or 3 to the host, in float.
template <class Exec, class View>
HostArray on_host(const Exec& exec, const View& view) {
  constexpr int rank = static_cast<int>(View::rank);
  HostArray array(view.extent(0), rank > 1 ? view.extent(1) : 1, rank > 2 ? view.extent(2) : 1);
  const Kokkos::View<float*, typename Exec::memory_space> flat("flat", array.values.size());
  const std::size_t columns = array.extents[1], depth = array.extents[2];
  Kokkos::parallel_for(
      "on_host", Kokkos::RangePolicy<Exec>(exec, 0, array.values.size()),
      KOKKOS_LAMBDA(std::size_t at) {
        flat(at) = element(view, at / depth / columns, at / depth % columns, at % depth);
      });
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, flat);
  std::copy(host.data(), host.data() + host.size(), array.values.begin());
  return array;
}

/// Integers of a view of rank 1.
template <class View>
std::vector<std::int64_t> integers_of(const View& view) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, view);
  return std::vector<std::int64_t>(host.data(), host.data() + host.size());
}

}  // namespace kvzap::test
