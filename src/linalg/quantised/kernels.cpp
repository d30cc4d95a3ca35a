#include "linalg/quantised/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/byte_products.hpp"
#include "base/machine.hpp"
#include "linalg/host/row_kernels.hpp"

// Within a group, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg::quantised {
namespace {

void round_to_bytes_portable(const float* x, const ByteRows& row) {
  const std::int64_t groups = row.groups();
  for (std::int64_t g = 0; g < groups; ++g) {
    const float* const values = x + g * group_inputs;
    std::int8_t* const bytes = row.values + g * group_inputs;
    std::uint32_t largest = 0;  // as an integer, so that NaN is the largest
    for (int i = 0; i < group_inputs; ++i) {
      largest = std::max(largest, base::float_bits(values[i]) & 0x7fffffffu);
    }
    const float magnitude = base::bits_float(largest);
    const bool is_finite = largest < 0x7f800000u;
    const float scale = is_finite ? magnitude / 127.0f : base::bits_float(0x7fc00000u);
    // A magnitude whose 127th part is subnormal has no exact inverse; such groups count as zero.
    const float inverse = is_finite && scale >= 1.17549435e-38f ? 127.0f / magnitude : 0.0f;
    int sums[2] = {0, 0};
    for (int i = 0; i < group_inputs; ++i) {
      // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
      const float shifted = (is_finite ? values[i] : 0.0f) * inverse + 12582912.0f;
      const int byte = static_cast<int>(base::float_bits(shifted)) - 0x4b400000;
      bytes[i] = static_cast<std::int8_t>(byte);
      sums[i / 16] += byte;
    }
    row.scales[g] = scale;
    row.sums[2 * g] = scale * static_cast<float>(sums[0]);
    row.sums[2 * g + 1] = scale * static_cast<float>(sums[1]);
    row.totals[g] = row.sums[2 * g] + row.sums[2 * g + 1];
    row.starts[g] = -128 * (sums[0] + sums[1]);
  }
}

/// The coefficients of one block of group scales: factors (16), and minima if there are any,
/// multiply bytes. The compiler vectorizes these loops badly, hence the other forms.
void widen_group_minimum(const std::uint8_t* block, float* target) {
  const std::uint8_t* bytes = block + 4 * panel_outputs;
  for (int group = 0; group < 8; ++group) {
    for (int i = 0; i < panel_outputs; ++i) {
      const float minimum = half_at(block + 2 * (panel_outputs + i));
      target[i] = half_at(block + 2 * i) * static_cast<float>(bytes[i]);
      target[panel_outputs + i] = -minimum * static_cast<float>(bytes[8 * panel_outputs + i]);
    }
    bytes += panel_outputs;
    target += 2 * panel_outputs;
  }
}

void widen_group_of_16(const std::uint8_t* block, float offset, float* target) {
  const auto* bytes = reinterpret_cast<const std::int8_t*>(block + 2 * panel_outputs);
  for (int group = 0; group < 16; ++group) {
    for (int i = 0; i < panel_outputs; ++i) {
      const float scale = half_at(block + 2 * i) * static_cast<float>(bytes[i]);
      target[i] = scale;
      target[panel_outputs + i] = -offset * scale;
    }
    bytes += panel_outputs;
    target += 2 * panel_outputs;
  }
}

KVZAP_BODY void shift_by_offset_body(const float* scales, std::int64_t groups, float offset,
                                     float* target) {
  for (std::int64_t g = 0; g < groups; ++g) {
#pragma omp simd
    for (int i = 0; i < panel_outputs; ++i) target[i] = scales[i];
#pragma omp simd
    for (int i = 0; i < panel_outputs; ++i) target[panel_outputs + i] = -offset * scales[i];
    scales += panel_outputs;
    target += 2 * panel_outputs;
  }
}
KVZAP_KERNEL(void, shift_by_offset,
             (const float* scales, std::int64_t groups, float offset, float* target),
             (scales, groups, offset, target))

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

/// codes[i][output] = code of the i-th input of a quad, without its offset.
KVZAP_BODY void quad_codes(CodeKind kind, const std::uint8_t* group, int quad,
                           const std::int8_t* table, int (&codes)[4][panel_outputs]) {
  std::uint32_t low[panel_outputs], high[panel_outputs];
  const std::uint8_t* nibbles = group;
  if (kind == CodeKind::five_bits || kind == CodeKind::six_bits) {
    const bool five = kind == CodeKind::five_bits;
    nibbles += (five ? 1 : 2) * quad_bytes;
    std::memcpy(high, five ? group : group + quad / 4 * quad_bytes, quad_bytes);
    const int shift = five ? quad : quad % 4 * 2;
    const std::uint32_t mask = five ? 0x01010101u : 0x03030303u;
#pragma omp simd
    for (int o = 0; o < panel_outputs; ++o) high[o] = (high[o] >> shift & mask) << 4;
  }
  if (kind == CodeKind::bytes) {
    std::memcpy(low, group + quad * quad_bytes, quad_bytes);
    for (int i = 0; i < 4; ++i) {
#pragma omp simd
      for (int o = 0; o < panel_outputs; ++o) {
        codes[i][o] = static_cast<std::int32_t>(low[o] << (24 - 8 * i)) >> 24;
      }
    }
    return;
  }
  std::memcpy(low, nibbles + quad % 4 * quad_bytes, quad_bytes);
#pragma omp simd
  for (int o = 0; o < panel_outputs; ++o) low[o] = low[o] >> quad / 4 * 4 & 0x0f0f0f0fu;
  if (kind == CodeKind::five_bits || kind == CodeKind::six_bits) {
#pragma omp simd
    for (int o = 0; o < panel_outputs; ++o) low[o] |= high[o];
  }
  for (int i = 0; i < 4; ++i) {
#pragma omp simd
    for (int o = 0; o < panel_outputs; ++o) {
      const int code = static_cast<int>(low[o] >> 8 * i & 255u);
      codes[i][o] = kind == CodeKind::table ? table[code] : code;
    }
  }
}

template <CodeKind Kind>
KVZAP_BODY void add_groups(const Chunk& chunk, const ByteRows& x, int n_rows, float* sums) {
  constexpr bool halves = Kind == CodeKind::six_bits;
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    int codes[group_quads][4][panel_outputs];
    for (int quad = 0; quad < group_quads; ++quad) {
      quad_codes(Kind, chunk.codes + g * code_bytes(Kind), quad, chunk.table, codes[quad]);
    }
    const float* const coefficients = chunk.coefficients + g * coefficients_of_group(Kind);
    for (int m = 0; m < n_rows; ++m) {
      const ByteRows row = x.row(m);
      const std::int64_t group = chunk.first + g;
      const std::int8_t* const bytes = row.values + group * group_inputs;
      int dots[2][panel_outputs] = {};
      for (int quad = 0; quad < group_quads; ++quad) {
        for (int i = 0; i < 4; ++i) {
#pragma omp simd
          for (int o = 0; o < panel_outputs; ++o) {
            dots[halves ? quad / 4 : 0][o] += codes[quad][i][o] * bytes[4 * quad + i];
          }
        }
      }
      float* const sum = sums + m * panel_outputs;
      for (int part = 0; part < (halves ? 2 : 1); ++part) {
        const float* const own = coefficients + 2 * part * panel_outputs;
        const float total = halves ? row.sums[2 * group + part] : row.totals[group];
#pragma omp simd
        for (int o = 0; o < panel_outputs; ++o) {
          sum[o] += static_cast<float>(dots[part][o]) * (own[o] * row.scales[group]);
          if (!is_signed(Kind)) sum[o] += own[panel_outputs + o] * total;
        }
      }
    }
  }
}

KVZAP_BODY void add_chunk_portable_body(CodeKind kind, const Chunk& chunk, const ByteRows& x,
                                        int n_rows, float* sums){
    KVZAP_FOR_CODE_KIND(kind, add_groups, chunk, x, n_rows, sums)}

/// Writes the values of one group of a panel of integers.
KVZAP_BODY void unpack_group(const Panels& panels, const std::uint8_t* group,
                             const float* coefficients, float* target) {
  for (int quad = 0; quad < group_quads; ++quad) {
    const int part = panels.codes == CodeKind::six_bits ? quad / 4 : 0;
    const float* const scale = coefficients + 2 * part * panel_outputs;
    int codes[4][panel_outputs];
    quad_codes(panels.codes, group, quad, panels.table, codes);
    for (int i = 0; i < 4; ++i) {
      float* const values = target + (4 * quad + i) * packed_outputs;
      if (is_signed(panels.codes)) {
#pragma omp simd
        for (int o = 0; o < panel_outputs; ++o) {
          values[o] = scale[o] * static_cast<float>(codes[i][o]);
        }
      } else {
#pragma omp simd
        for (int o = 0; o < panel_outputs; ++o) {
          values[o] = scale[o] * static_cast<float>(codes[i][o]) + scale[panel_outputs + o];
        }
      }
    }
  }
}

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
#if KVZAP_X86_BYTE_PRODUCTS
  const base::SimdLevel level = base::machine().simd();
  if (level >= base::SimdLevel::avx512) return unpack_chunk_avx512(panels.codes, chunk, target);
  if (level == base::SimdLevel::avx2) return unpack_chunk_avx2(panels.codes, chunk, target);
#endif
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    unpack_group(panels, chunk.codes + g * code_bytes(panels.codes),
                 chunk.coefficients + g * coefficients_of_group(panels.codes),
                 target + g * group_inputs * packed_outputs);
  }
}

void unpack_chunk(const Panels& panels, const Chunk& chunk, bfloat16* target) {
#if KVZAP_X86_BYTE_PRODUCTS
  if (!is_float(panels.codes) && base::machine().has(base::SimdLevel::avx512_bf16)) {
    return unpack_chunk_avx512_bf16(panels.codes, chunk, target);
  }
#endif
  alignas(64) float values[group_inputs * packed_outputs];
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    const Chunk group{chunk.codes + g * code_bytes(panels.codes),
                      chunk.coefficients + g * coefficients_of_group(panels.codes), chunk.first + g,
                      1, chunk.table};
    unpack_chunk(panels, group, values);
    round_group(values, target + g * group_inputs * packed_outputs);
  }
}

/// Calls work(chunk) for all groups of a panel, in chunks with their coefficients.
template <class Work>
void for_each_chunk(const Panels& panels, std::int64_t panel, const Work& work) {
  alignas(64) float coefficients[chunk_groups * 4 * panel_outputs];
  const std::int64_t groups = panels.inputs / group_inputs;
  const std::uint8_t* const codes = panels.codes_of(panel);
  const bool has_group_scales =
      panels.scales == ScaleKind::group_minimum || panels.scales == ScaleKind::group_of_16;
  for (std::int64_t first = 0; first < groups; first += chunk_groups) {
    const std::int64_t count = std::min(chunk_groups, groups - first);
    const std::uint8_t* const own = codes + first * code_bytes(panels.codes);
    // Widening these scales takes so long that memory would wait. With the first codes asked for,
    // one row multiplies Q4_K 1.14 times as fast, Q6_K 1.09 times (medians of 6 pairs, two cores of
    // an AMD EPYC, Zen 3; not measured with AVX-512).
    if (has_group_scales) {
      for (int line = 0; line < near_prefetch_bytes; line += 64) __builtin_prefetch(own + line);
    }
    widen_scales(panels, panel, first, count, coefficients);
    work(Chunk{own, coefficients, first, count, panels.table});
  }
}

template <class Value>
void unpack_panel(const Panels& panels, std::int64_t panel, Value* target) {
  for_each_chunk(panels, panel, [&](const Chunk& chunk) {
    unpack_chunk(panels, chunk, target + chunk.first * group_inputs * packed_outputs);
  });
}

}  // namespace

void round_to_bytes(const float* x, const ByteRows& row) {
#if KVZAP_X86_BYTE_PRODUCTS
  if (base::machine().has(base::SimdLevel::avx2)) return round_to_bytes_avx2(x, row);
#endif
  round_to_bytes_portable(x, row);
}

void widen_scales(const Panels& panels, std::int64_t panel, std::int64_t first, std::int64_t count,
                  float* coefficients) {
  const std::int64_t begin = first * group_inputs / panels.block;
  const std::int64_t end = (first + count) * group_inputs / panels.block;
  const std::int64_t step = coefficients_of_group(panels.codes) * (panels.block / group_inputs);
  const std::uint8_t* const scales = panels.scales_of(panel) + begin * scale_bytes(panels.scales);
  // f16 values are at even addresses.
  const auto* const halves = reinterpret_cast<const half*>(scales);
  alignas(64) float factors[chunk_groups * panel_outputs];
  switch (panels.scales) {
    case ScaleKind::single:
      for (std::int64_t g = 0; g < count; ++g) {
        const std::int64_t block = (first + g) * group_inputs / panels.block - begin;
        std::memcpy(coefficients + g * panel_outputs,
                    scales + block * scale_bytes(ScaleKind::single), panel_outputs * sizeof(float));
      }
      return;
    case ScaleKind::half:
      if (is_signed(panels.codes)) return widen(halves, coefficients, count * panel_outputs);
      widen(halves, factors, count * panel_outputs);
      return shift_by_offset(factors, count, panels.offset, coefficients);
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
#if KVZAP_X86_BYTE_PRODUCTS
  const base::SimdLevel level = base::machine().simd();
  const auto minimum = level >= base::SimdLevel::avx512 ? widen_group_minimum_avx512
                       : level == base::SimdLevel::avx2 ? widen_group_minimum_avx2
                                                        : widen_group_minimum;
  const auto of_16 = level >= base::SimdLevel::avx512 ? widen_group_of_16_avx512
                     : level == base::SimdLevel::avx2 ? widen_group_of_16_avx2
                                                      : widen_group_of_16;
#else
  const auto minimum = widen_group_minimum;
  const auto of_16 = widen_group_of_16;
#endif
  for (std::int64_t i = 0; i < end - begin; ++i) {
    const std::uint8_t* const block = scales + i * scale_bytes(panels.scales);
    float* const target = coefficients + i * step;
    if (panels.scales == ScaleKind::group_minimum) {
      minimum(block, target);
    } else {
      of_16(block, panels.offset, target);
    }
  }
}

KVZAP_KERNEL(void, add_chunk_portable,
             (CodeKind kind, const Chunk& chunk, const ByteRows& x, int n_rows, float* sums),
             (kind, chunk, x, n_rows, sums))

AddChunk add_chunk_in_use() {
#if KVZAP_X86_BYTE_PRODUCTS
  switch (base::byte_products()) {
    case base::ByteProducts::portable:
      return add_chunk_portable;
    case base::ByteProducts::avx2:
      return add_chunk_avx2;
    case base::ByteProducts::avx_vnni:
      return add_chunk_avx_vnni;
    case base::ByteProducts::avx512_vnni:
      return add_chunk_avx512_vnni;
  }
#endif
  return add_chunk_portable;
}

void product(AddChunk add_chunk, const Section& section, std::int64_t panel, const ByteRows& x,
             int n_rows, const float* bias, float* y, std::int64_t y_stride) {
  alignas(64) float sums[most_rows * panel_outputs];
  const Panels& panels = section.panels;
  std::fill_n(sums, n_rows * panel_outputs, 0.0f);
  for_each_chunk(panels, panel, [&](const Chunk& chunk) {
    if (is_float(panels.codes)) {
      add_chunk_float8(chunk, x, n_rows, sums);
    } else {
      add_chunk(panels.codes, chunk, x, n_rows, sums);
    }
  });
  const auto outputs = static_cast<int>(
      std::min<std::int64_t>(panel_outputs, section.outputs - panel * panel_outputs));
  for (int m = 0; m < n_rows; ++m) {
    for (int o = 0; o < outputs; ++o) {
      y[m * y_stride + o] = sums[m * panel_outputs + o] + (bias != nullptr ? bias[o] : 0.0f);
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
