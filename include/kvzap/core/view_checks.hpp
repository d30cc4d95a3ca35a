// What the templates over a caller's views share: checks of spaces, value types and extents.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <kvzap/core/types.hpp>
#include <string>
#include <type_traits>

namespace kvzap::base {

#if KOKKOS_VERSION >= 30700
namespace math = Kokkos;
#else
namespace math = Kokkos::Experimental;
#endif

/// Whether kernels of Exec can access all of the views.
template <class Exec, class... Views>
inline constexpr bool reaches =
    (Kokkos::SpaceAccessibility<Exec, typename Views::memory_space>::accessible && ...);

/// Whether the views' values convert to float, as float, half and bfloat16 do.
template <class... Views>
inline constexpr bool reads_floats =
    (std::is_constructible_v<float, typename Views::non_const_value_type> && ...);

/// Whether the views' values can be written and convert from float.
template <class... Views>
inline constexpr bool writes_floats =
    ((!std::is_const_v<typename Views::value_type> &&
      std::is_constructible_v<typename Views::value_type, float>)&&...);

inline std::string extents_text(std::initializer_list<std::int64_t> extents) {
  std::string text;
  for (const std::int64_t extent : extents) {
    text += (text.empty() ? "(" : ", ") + std::to_string(extent);
  }
  return text + ")";
}

inline void expect(bool good, const char* function, const std::string& message) {
  if (!good) throw Error(std::string(function) + ": " + message);
}

/// Throws Error unless the view has the expected extents. axes: their meaning, "(head, token)".
template <class View>
void expect_extents(const char* function, const char* argument, const char* axes, const View& view,
                    std::initializer_list<std::int64_t> expected) {
  std::string found;
  bool good = true;
  std::size_t axis = 0;
  for (const std::int64_t extent : expected) {
    const auto of_view = static_cast<std::int64_t>(view.extent(axis++));
    good = good && of_view == extent;
    found += (found.empty() ? "(" : ", ") + std::to_string(of_view);
  }
  expect(good, function,
         std::string(argument) + " is " + found + "); expected " + extents_text(expected) + " = " +
             axes);
}

}  // namespace kvzap::base
