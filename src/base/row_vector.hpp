// Sixteen bytes of a row at once, as device kernels read them.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <type_traits>

namespace kvzap::base {

/// Bytes that one instruction loads or stores, if the processor has such an instruction. They may
/// hold values of any type.
#if defined(__GNUC__)
#define KVZAP_BYTES(size) __attribute__((may_alias, aligned(size)))
#else
#define KVZAP_BYTES(size) alignas(size)
#endif
struct KVZAP_BYTES(16) Bytes16 {
  std::uint32_t word[4];
};
struct KVZAP_BYTES(8) Bytes8 {
  std::uint32_t word[2];
};
struct KVZAP_BYTES(4) Bytes4 {
  std::uint32_t word;
};
#undef KVZAP_BYTES

KOKKOS_INLINE_FUNCTION bool is_vector_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % sizeof(Bytes16) == 0;
}

/// target[i] = source[i] for i < count: one number, or vectors of four that are aligned to 16
/// bytes.
template <int count>
KOKKOS_INLINE_FUNCTION void load_floats(const float* source, float* target) {
  static_assert(count == 1 || count % 4 == 0);
  if constexpr (count == 1) target[0] = source[0];
  for (int i = 0; i + 4 <= count; i += 4) {
    const Bytes16 bytes = *reinterpret_cast<const Bytes16*>(source + i);
    for (int e = 0; e < 4; ++e) target[i + e] = bits_float(bytes.word[e]);
  }
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
        target[i] = bits_float(bytes.word[i]);
      } else {
        Value value{};
        // Every backend stores the lower half of a word first.
        value.bits = static_cast<std::uint16_t>(bytes.word[i / 2] >> (16 * (i % 2)));
        target[i] = static_cast<float>(value);
      }
    }
  }
};

}  // namespace kvzap::base
