#include "linalg/quantised/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bytes.hpp"
#include "base/machine.hpp"
#include "linalg/host/row_kernels.hpp"

// Within a group, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

// Calls function<kind>(arguments) for kinds of integers.
#define KVZAP_FOR_CODE_KIND(kind, function, ...)                 \
  switch (kind) {                                                \
    case CodeKind::nibbles:                                      \
      return function<CodeKind::nibbles>(__VA_ARGS__);           \
    case CodeKind::centred_nibbles:                              \
      return function<CodeKind::centred_nibbles>(__VA_ARGS__);   \
    case CodeKind::five_bits:                                    \
      return function<CodeKind::five_bits>(__VA_ARGS__);         \
    case CodeKind::centred_five_bits:                            \
      return function<CodeKind::centred_five_bits>(__VA_ARGS__); \
    case CodeKind::six_bits:                                     \
      return function<CodeKind::six_bits>(__VA_ARGS__);          \
    case CodeKind::bytes:                                        \
      return function<CodeKind::bytes>(__VA_ARGS__);             \
    case CodeKind::table:                                        \
      return function<CodeKind::table>(__VA_ARGS__);             \
    case CodeKind::float8:                                       \
      return;                                                    \
  }
// Loops over registers; and loops that GCC would unroll to keep all their products on the stack.
#define KVZAP_UNROLL _Pragma("GCC unroll 16")
#define KVZAP_ROLL _Pragma("GCC unroll 1")

#define KVZAP_LEVEL_BODY "linalg/quantised/kernels.inc"
#include "base/each_level.hpp"
#define KVZAP_PRODUCTS_BODY "linalg/quantised/product_kernels.inc"
#include "base/each_byte_products.hpp"

#undef KVZAP_UNROLL
#undef KVZAP_ROLL

namespace kvzap::linalg::quantised {
namespace {

/// Scales and zero points of blocks that are one group each.
KVZAP_BODY void widen_half_zero_body(const std::uint8_t* scales, std::int64_t groups,
                                     float* target) {
  for (std::int64_t g = 0; g < groups; ++g) {
    half factors[panel_outputs];
    std::memcpy(factors, scales, sizeof(factors));
    const std::uint8_t* const zeros = scales + sizeof(factors);
#pragma omp simd
    for (int i = 0; i < panel_outputs; ++i) {
      const auto factor = static_cast<float>(factors[i]);
      target[i] = factor;
      target[panel_outputs + i] = -factor * static_cast<float>(static_cast<int>(zeros[i]));
    }
    scales += scale_bytes(ScaleKind::half_zero);
    target += 2 * panel_outputs;
  }
}
KVZAP_KERNEL(void, widen_half_zero,
             (const std::uint8_t* scales, std::int64_t groups, float* target),
             (scales, groups, target))

/// Rounds the values of one group.
KVZAP_BODY void round_group_body(const float* values, bfloat16* target) {
  for (int pair = 0; pair < group_inputs / 2; ++pair) {
    const float* const even = values + 2 * pair * packed_outputs;
    std::uint32_t both[panel_outputs];
#pragma omp simd
    for (int o = 0; o < panel_outputs; ++o) {
      both[o] = bfloat16(even[o]).bits |
                static_cast<std::uint32_t>(bfloat16(even[packed_outputs + o]).bits) << 16;
    }
    std::memcpy(target + 2 * pair * packed_outputs, both, sizeof(both));
  }
}
KVZAP_KERNEL(void, round_group, (const float* values, bfloat16* target), (values, target))

void unpack_chunk(const Panels& panels, const Chunk& chunk, float* target) {
  if (is_float(panels.codes)) return unpack_chunk_float8(chunk, target);
  KVZAP_AT_LEVEL(unpack)(panels.codes, chunk, target);
}

void unpack_chunk(const Panels& panels, const Chunk& chunk, bfloat16* target) {
  if (!is_float(panels.codes)) {
#if KVZAP_X86
    if (base::machine().has(base::SimdLevel::avx512_bf16)) {
      KVZAP_FOR_CODE_KIND(panels.codes, avx512_bf16::unpack_pairs, chunk, target)
    }
#elif KVZAP_NEON
    if (base::machine().has(base::SimdLevel::neon_bf16)) {
      KVZAP_FOR_CODE_KIND(panels.codes, neon_bf16::unpack_pairs, chunk, target)
    }
#endif
  }
  alignas(64) float values[group_inputs * packed_outputs];
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    const Chunk group{chunk.codes + g * code_bytes(panels.codes),
                      chunk.coefficients + g * coefficients_of_group(panels.codes), chunk.first + g,
                      1, chunk.table};
    unpack_chunk(panels, group, values);
    round_group(values, target + g * group_inputs * packed_outputs);
  }
}

/// Calls work(chunk) for all groups of `together` panels, in chunks with their coefficients.
template <class Work>
void for_each_chunk(const Panels& panels, std::int64_t panel, int together, const Work& work) {
  alignas(64) float coefficients[chunk_groups * 2 * panel_outputs];
  const std::int64_t groups = panels.inputs / group_inputs;
  const std::uint8_t* const codes = panels.codes_of(panel);
  const bool has_group_scales =
      panels.scales == ScaleKind::group_minimum || panels.scales == ScaleKind::group_of_16;
  const std::int64_t at_once = chunk_groups / together;
  for (std::int64_t first = 0; first < groups; first += at_once) {
    const std::int64_t count = std::min(at_once, groups - first);
    const std::uint8_t* const own = codes + first * code_bytes(panels.codes);
    // Widening these scales takes so long that memory would wait. With the first codes asked for,
    // one row multiplies Q4_K 1.14 times as fast, Q6_K 1.09 times (medians of 6 pairs, two cores of
    // an AMD EPYC, Zen 3; not measured with AVX-512).
    if (has_group_scales) {
      for (int line = 0; line < near_prefetch_bytes; line += 64) __builtin_prefetch(own + line);
    }
    const Chunk chunk{own,      coefficients,        first, count, panels.table,
                      together, panels.panel_bytes()};
    for (int p = 0; p < together; ++p) {
      widen_scales(panels, panel + p, first, count,
                   coefficients + p * chunk.coefficients_of_panel(panels.codes));
    }
    work(chunk);
  }
}

template <class Value>
void unpack_panel(const Panels& panels, std::int64_t panel, Value* target) {
  for_each_chunk(panels, panel, 1, [&](const Chunk& chunk) {
    unpack_chunk(panels, chunk, target + chunk.first * group_inputs * packed_outputs);
  });
}

}  // namespace

void round_to_bytes(const float* x, const ByteRows& row) { KVZAP_AT_LEVEL(round_row)(x, row); }

void list_rests(const ByteRows& block) {
  for (std::int64_t g = 0; g < block.groups(); ++g) {
    const float* const scales = block.scales + (block.groups() + g) * block.rows;
    std::uint8_t* const rows = block.rest_rows + g * block.rows;
    int count = 0;
    for (int m = 0; m < block.rows; ++m) {
      rows[count] = static_cast<std::uint8_t>(m);
      count += scales[m] != 0 ? 1 : 0;
    }
    block.rest_counts[g] = static_cast<std::uint8_t>(count);
  }
}

void widen_scales(const Panels& panels, std::int64_t panel, std::int64_t first, std::int64_t count,
                  float* coefficients) {
  const std::int64_t begin = first * group_inputs / panels.block;
  const std::int64_t end = (first + count) * group_inputs / panels.block;
  const std::int64_t step = coefficients_of_group(panels.codes) * (panels.block / group_inputs);
  const std::uint8_t* const scales = panels.scales_of(panel) + begin * scale_bytes(panels.scales);
  // f16 values are at even addresses.
  const auto* const halves = reinterpret_cast<const half*>(scales);
  switch (panels.scales) {
    case ScaleKind::single:
      for (std::int64_t g = 0; g < count; ++g) {
        const std::int64_t block = (first + g) * group_inputs / panels.block - begin;
        std::memcpy(coefficients + g * panel_outputs,
                    scales + block * scale_bytes(ScaleKind::single), panel_outputs * sizeof(float));
      }
      return;
    case ScaleKind::half:
      return widen(halves, coefficients, count * panel_outputs);
    case ScaleKind::half_minimum:
      return widen(halves, coefficients, 2 * count * panel_outputs);
    case ScaleKind::half_zero:
      return widen_half_zero(scales, count, coefficients);
    case ScaleKind::exponent:
      for (std::int64_t i = 0; i < count * panel_outputs; ++i) {
        coefficients[i] = half_power(scales[i]);
      }
      return;
    case ScaleKind::group_minimum:
    case ScaleKind::group_of_16:
      break;
  }
  const auto minimum = KVZAP_AT_LEVEL(widen_group_minimum);
  const auto of_16 = KVZAP_AT_LEVEL(widen_group_of_16);
  for (std::int64_t i = 0; i < end - begin; ++i) {
    const std::uint8_t* const block = scales + i * scale_bytes(panels.scales);
    float* const target = coefficients + i * step;
    if (panels.scales == ScaleKind::group_minimum) {
      minimum(block, target);
    } else {
      of_16(block, target);
    }
  }
}

AddChunk add_chunk_of(base::ByteProducts products) {
  switch (products) {
#if KVZAP_NEON
    case base::ByteProducts::neon_dot:
      return neon_dot::kernel;
#elif KVZAP_X86
    case base::ByteProducts::avx2:
      return avx2::kernel;
#if KVZAP_AVX_VNNI
    case base::ByteProducts::avx_vnni:
      return avx_vnni::kernel;
#endif
    case base::ByteProducts::avx512_vnni:
      return avx512_vnni::kernel;
#endif
    default:
      return portable::kernel;
  }
}

AddChunk add_chunk_in_use() { return add_chunk_of(base::byte_products()); }

void product(const AddChunk& add_chunk, const Section& section, std::int64_t panel, int together,
             const ByteRows& x, const float* bias, RowSpan<float> y) {
  const auto n_rows = static_cast<int>(y.count);
  alignas(64) float sums[most_rows * most_panels * panel_outputs];
  const Panels& panels = section.panels;
  together = static_cast<int>(std::min<std::int64_t>(together, section.n_panels() - panel));
  const int stride = together * panel_outputs;
  std::fill_n(sums, n_rows * stride, 0.0f);
  for (int m = 0; m < n_rows; ++m) {
    __builtin_prefetch(y.data + m * y.stride, 1, 2);
    __builtin_prefetch(y.data + m * y.stride + stride - 1, 1, 2);
  }
  for_each_chunk(panels, panel, together, [&](const Chunk& chunk) {
    if (is_float(panels.codes)) {
      add_chunk_float8(chunk, x, n_rows, sums);
    } else {
      add_chunk.add(panels.codes, chunk, x, n_rows, sums);
    }
  });
  const auto outputs =
      static_cast<int>(std::min<std::int64_t>(stride, section.outputs - panel * panel_outputs));
  for (int m = 0; m < n_rows; ++m) {
    const float* const own = sums + m * stride;
    float* const target = y.data + m * y.stride;
    if (bias == nullptr) {
      std::copy_n(own, outputs, target);
    } else {
      for (int o = 0; o < outputs; ++o) target[o] = own[o] + bias[o];
    }
  }
}

void unpack(const Panels& panels, std::int64_t panel, float* target) {
  unpack_panel(panels, panel, target);
}
void unpack(const Panels& panels, std::int64_t panel, bfloat16* target) {
  unpack_panel(panels, panel, target);
}

}  // namespace kvzap::linalg::quantised

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
