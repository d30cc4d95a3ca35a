// Sixteen bytes of a row at once, as device kernels read them.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <type_traits>

namespace kvzap::attention {

/// 16 bytes that one instruction loads or stores, if the processor has such an instruction. They
/// may hold values of any type.
#if defined(__GNUC__)
struct __attribute__((may_alias, aligned(16))) Bytes16 {
#else
struct alignas(16) Bytes16 {
#endif
  std::uint32_t word[4];
};

KOKKOS_INLINE_FUNCTION bool is_vector_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % sizeof(Bytes16) == 0;
}

/// `width` consecutive values of a row.
template <class Value>
struct RowVector {
  static constexpr int width = static_cast<int>(sizeof(Bytes16) / sizeof(Value));

  /// target[i] = float(source[i]) for i < width; source is aligned to 16 bytes.
  KOKKOS_INLINE_FUNCTION static void load(const Value* source, float* target) {
    const Bytes16 bytes = *reinterpret_cast<const Bytes16*>(source);
    for (int i = 0; i < width; ++i) {
      if constexpr (std::is_same_v<Value, float>) {
        target[i] = base::bits_float(bytes.word[i]);
      } else {
        Value value{};
        // Every backend stores the lower half of a word first.
        value.bits = static_cast<std::uint16_t>(bytes.word[i / 2] >> (16 * (i % 2)));
        target[i] = static_cast<float>(value);
      }
    }
  }
};

}  // namespace kvzap::attention
