// Products of few rows with quantised weights on tensor cores. A panel's 16 outputs are the rows of
// a tile. Codes become pairs of bf16, which holds each of them; rows of x are two bf16 each. Scales
// multiply the sums of a group of 32 inputs.
#pragma once

#include "base/byte_permute.hpp"
#include "base/cuda/tiles.hpp"
#include "linalg/quantised/format.hpp"

namespace kvzap::linalg::cuda {

using namespace base::cuda;  // NOLINT(google-build-using-namespace): all of the kernel's words
using quantised::CodeKind;
using quantised::Panels;
using quantised::ScaleKind;

// Warps of a block, which share the inputs of its panels.
inline constexpr int warps = 8;
// Loads of a warp that are in flight: codes and scales of so many groups of a panel.
inline constexpr int loads_at_once = 4;

/// y (rows, outputs) = x (rows, inputs) W^T + bias, for the outputs of one section.
struct QuantisedProduct {
  Panels panels;
  // A row's inputs lie one after the other, are a multiple of 4 and begin at a multiple of 16
  // bytes.
  const float* x;
  std::int64_t x_stride;  // of rows
  const float* bias;      // null: none
  float* y;
  std::int64_t y_row_stride, y_stride;
  std::int32_t rows, outputs, inputs;
};

struct alignas(16) Float4 {
  float value[4];
};

/// The codes of a lane for one group of 32 inputs: of outputs l / 4 and l / 4 + 8, inputs 4 (l % 4)
/// and the next three, and those 16 further.
template <CodeKind kind>
struct LaneCodes {
  static constexpr int high = quantised::high_bits(kind);
  static constexpr int words = kind == CodeKind::bytes ? 2 : 1;  // of an output
  std::uint32_t low[2][words];
  std::uint32_t upper[2][high > 0 ? high : 1];

  KVZAP_CUDA void load(const std::uint8_t* group, int lane) {
    const int quad = lane % 4;
    KVZAP_UNROLL
    for (int i = 0; i < 2; ++i) {
      const auto* const own =
          reinterpret_cast<const std::uint32_t*>(group) + lane / 4 + 8 * i;  // 16 words to a quad
      KVZAP_UNROLL
      for (int h = 0; h < high; ++h) upper[i][h] = own[16 * h];
      KVZAP_UNROLL
      for (int w = 0; w < words; ++w) low[i][w] = own[16 * (high + quad + 4 * w)];
    }
  }

  /// Four codes of output i, less their centre, as two pairs: of the first 16 inputs of a group
  /// (step 0) or of the others.
  KVZAP_CUDA void decode(int i, int step, int lane, const std::int8_t* table,
                         std::uint32_t (&pairs)[2]) const {
    if constexpr (kind == CodeKind::bytes) {
      pair_signed(low[i][step], pairs);
    } else if constexpr (kind == CodeKind::table) {
      pair_signed(looked_up(low[i][0] >> (4 * step) & 0x0f0f0f0fu, table), pairs);
    } else {
      std::uint32_t codes = low[i][0] >> (4 * step) & 0x0f0f0f0fu;
      if constexpr (high == 1) {
        codes |= (upper[i][0] >> (lane % 4 + 4 * step) & 0x01010101u) << 4;
      } else if constexpr (high == 2) {
        codes |= (upper[i][step] >> (2 * (lane % 4)) & 0x03030303u) << 4;
      }
      // 0x4300 + code is 128 + code in bf16.
      constexpr std::uint32_t centre = 0x43004300u + quantised::centre(kind) * 0x10001u;
      pairs[0] =
          difference_of_pairs<bfloat16>(base::permute_bytes(codes, 0x43434343u, 0x4140), centre);
      pairs[1] =
          difference_of_pairs<bfloat16>(base::permute_bytes(codes, 0x43434343u, 0x4342), centre);
    }
  }

 private:
  KVZAP_CUDA static void pair_signed(std::uint32_t codes, std::uint32_t (&pairs)[2]) {
    float values[4];
    KVZAP_UNROLL
    for (int e = 0; e < 4; ++e) {
      // The bits of 2^23 + 128 + code.
      values[e] =
          base::bits_float(base::permute_bytes(codes ^ 0x80808080u, 0x4b000000u, 0x7440u | e)) -
          8388736.0f;
    }
    pairs[0] = rounded_pair<bfloat16>(values[0], values[1]);
    pairs[1] = rounded_pair<bfloat16>(values[2], values[3]);
  }
  /// The table's values at four bytes below 16.
  KVZAP_CUDA static std::uint32_t looked_up(std::uint32_t indices, const std::int8_t* table) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(table);
    std::uint32_t selector = indices & 0x07070707u;
    selector |= selector >> 4;
    selector = (selector & 0xffu) | (selector >> 8 & 0xff00u);
    const std::uint32_t of_lower = base::permute_bytes(words[0], words[1], selector);
    const std::uint32_t of_upper = base::permute_bytes(words[2], words[3], selector);
    const std::uint32_t is_upper = (indices >> 3 & 0x01010101u) * 0xffu;
    return (of_lower & ~is_upper) | (of_upper & is_upper);
  }
};

/// A lane's inputs of one group: of row l / 4 of each tile of 8 rows of x.
template <int tiles>
struct LaneInputs {
  Float4 values[tiles][2];  // (tile, step)

  KVZAP_CUDA void load(const QuantisedProduct& product, int group, int lane) {
    KVZAP_UNROLL
    for (int n = 0; n < tiles; ++n) {
      const int row = 8 * n + lane / 4;
      const float* const x = product.x + row * product.x_stride;
      KVZAP_UNROLL
      for (int step = 0; step < 2; ++step) {
        const int first = 32 * group + 16 * step + 4 * (lane % 4);
        values[n][step] = row < product.rows && first < product.inputs
                              ? *reinterpret_cast<const Float4*>(x + first)
                              : Float4{{0, 0, 0, 0}};
      }
    }
  }
};

/// Inputs of one step of a tile, as two multiplicands.
struct InputPairs {
  std::uint32_t upper[2], rest[2];

  KVZAP_CUDA explicit InputPairs(const Float4& inputs) {
    KVZAP_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      const SplitPair<bfloat16, false> split(inputs.value[2 * pair], inputs.value[2 * pair + 1]);
      upper[pair] = split.upper;
      rest[pair] = split.rest;
    }
  }
  /// sums += a x
  KVZAP_CUDA void add(float (&sums)[4], const std::uint32_t (&a)[4]) const {
    multiply<bfloat16>(sums, a, rest[0], rest[1]);
    multiply<bfloat16>(sums, a, upper[0], upper[1]);
  }
};

/// A group's scales for one output: a value is scale * code + minimum, with a scale for each step.
struct GroupScales {
  float scale[2];
  float minimum;
};

template <ScaleKind kind>
constexpr bool has_minimum = kind == ScaleKind::half_minimum || kind == ScaleKind::half_zero ||
                             kind == ScaleKind::group_minimum;

/// Groups of a block: formats with two levels of scales have blocks of 256 inputs.
KOKKOS_INLINE_FUNCTION constexpr int groups_of_block(ScaleKind kind) {
  return kind == ScaleKind::group_minimum || kind == ScaleKind::group_of_16 ? 8 : 1;
}

KVZAP_CUDA float half_of(const std::uint8_t* scales, int i) {
  return floats_of<half>(reinterpret_cast<const std::uint16_t*>(scales)[i]).lower;
}

template <ScaleKind kind>
KVZAP_CUDA GroupScales scales_of(const std::uint8_t* panel, int group, int output) {
  constexpr int outputs = quantised::panel_outputs, groups = groups_of_block(kind);
  constexpr auto bytes_of_block = static_cast<int>(quantised::scale_bytes(kind));
  const std::uint8_t* const block = panel + group / groups * bytes_of_block;
  const int own = group % groups;
  if constexpr (kind == ScaleKind::exponent) {
    const float scale = quantised::half_power(block[output]);
    return {{scale, scale}, 0};
  } else {
    const float scale = half_of(block, output);
    if constexpr (kind == ScaleKind::half_minimum) {
      return {{scale, scale}, half_of(block, outputs + output)};
    } else if constexpr (kind == ScaleKind::half_zero) {
      return {{scale, scale}, -scale * static_cast<float>(block[2 * outputs + output])};
    } else if constexpr (kind == ScaleKind::group_minimum) {
      const std::uint8_t* const bytes = block + 4 * outputs + own * outputs + output;
      const float of_group = scale * static_cast<float>(bytes[0]);
      return {{of_group, of_group},
              -half_of(block, outputs + output) * static_cast<float>(bytes[8 * outputs])};
    } else if constexpr (kind == ScaleKind::group_of_16) {
      const auto* const bytes =
          reinterpret_cast<const std::int8_t*>(block) + (2 + 2 * own) * outputs + output;
      return {{scale * static_cast<float>(bytes[0]), scale * static_cast<float>(bytes[outputs])},
              0};
    } else {
      static_assert(kind == ScaleKind::half);
      return {{scale, scale}, 0};
    }
  }
}

/// What a lane loads of a group of a panel, and what it adds.
template <CodeKind codes, ScaleKind scales>
struct PanelGroup {
  LaneCodes<codes> own;
  GroupScales of[2];  // of the lane's two outputs

  /// scales_size: the bytes of the panel before its codes.
  KVZAP_CUDA void load(const std::uint8_t* panel, int scales_size, int group, int lane) {
    constexpr auto bytes_of_group = static_cast<int>(quantised::code_bytes(codes));
    own.load(panel + scales_size + group * bytes_of_group, lane);
    KVZAP_UNROLL
    for (int i = 0; i < 2; ++i) {
      of[i] = scales_of<scales>(panel, group, lane / 4 + 8 * i);
    }
  }

  /// sums: (tile, element) as tiles of products have them.
  template <int tiles>
  KVZAP_CUDA void add(const LaneInputs<tiles>& inputs, const std::int8_t* table, int lane,
                      float (&sums)[tiles][4]) const {
    constexpr bool has_two = scales == ScaleKind::group_of_16;  // scales, one for each step
    std::uint32_t a[2][4];
    KVZAP_UNROLL
    for (int step = 0; step < 2; ++step) {
      KVZAP_UNROLL
      for (int i = 0; i < 2; ++i) {
        std::uint32_t pairs[2];
        own.decode(i, step, lane, table, pairs);
        a[step][i] = pairs[0];
        a[step][2 + i] = pairs[1];
      }
    }
    KVZAP_UNROLL
    for (int n = 0; n < tiles; ++n) {
      float found[2][4] = {};  // of each step, or of both
      float all[4] = {};       // of the rows of x themselves
      KVZAP_UNROLL
      for (int step = 0; step < 2; ++step) {
        const InputPairs x(inputs.values[n][step]);
        x.add(found[has_two ? step : 0], a[step]);
        if constexpr (has_minimum<scales>) {
          constexpr std::uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
          x.add(all, ones);
        }
      }
      KVZAP_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[n][i] += of[i / 2].scale[0] * found[0][i];
        if constexpr (has_two) sums[n][i] += of[i / 2].scale[1] * found[1][i];
        if constexpr (has_minimum<scales>) sums[n][i] += of[i / 2].minimum * all[i];
      }
    }
  }
};

/// Adds the sums of all warps and writes them. All threads call this.
template <int tiles>
KVZAP_CUDA void store_panel(const QuantisedProduct& product, int panel,
                            const float (&own)[tiles][4]) {
  constexpr int outputs = quantised::panel_outputs;
  constexpr int stride = outputs + 4;  // neighbouring rows begin in different banks
  const int lane = lane_of_warp();
  auto* const sums = reinterpret_cast<float*>(block_memory());  // (warp, row of x, stride)
  KVZAP_UNROLL
  for (int n = 0; n < tiles; ++n) {
    KVZAP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * n + 2 * (lane % 4) + i % 2;
      sums[(warp_of_block() * 8 * tiles + row) * stride + lane / 4 + i / 2 * 8] = own[n][i];
    }
  }
  wait_for_block();
  for (int i = thread_of_block(); i < product.rows * outputs; i += 32 * warps) {
    const int row = i / outputs, output = panel * outputs + i % outputs;
    if (output >= product.outputs) continue;
    float sum = product.bias ? product.bias[output] : 0.0f;
    for (int w = 0; w < warps; ++w) sum += sums[(w * 8 * tiles + row) * stride + i % outputs];
    product.y[row * product.y_row_stride + output * product.y_stride] = sum;
  }
  wait_for_block();
}

/// Shared memory of a block.
constexpr int panel_memory(int tiles) {
  return warps * 8 * tiles * (quantised::panel_outputs + 4) * static_cast<int>(sizeof(float));
}

/// Block = `panels` panels, whose inputs are read once; its warps take turns in the groups of
/// inputs. tiles: of 8 rows of x.
template <CodeKind codes, ScaleKind scales, int tiles, int panels>
KVZAP_CUDA_KERNEL(32 * warps, 1)
multiply_panels(KVZAP_CUDA_ARGUMENT QuantisedProduct product) {
  constexpr int groups_at_once = loads_at_once / panels;
  const int lane = lane_of_warp(), first_panel = block_x() * panels;
  const auto n_groups = static_cast<int>(product.panels.inputs / quantised::group_inputs);
  const auto n_panels = (product.outputs + quantised::panel_outputs - 1) / quantised::panel_outputs;
  const auto scales_size = static_cast<int>(product.panels.scales_size());
  const std::uint8_t* data[panels];
  KVZAP_UNROLL
  for (int p = 0; p < panels; ++p) {
    // The last block may repeat a panel, whose sums it does not write.
    const int panel = first_panel + p < n_panels ? first_panel + p : n_panels - 1;
    data[p] = product.panels.data + panel * product.panels.panel_bytes();
  }
  float sums[panels][tiles][4] = {};
  for (int first = warp_of_block(); first < n_groups; first += warps * groups_at_once) {
    PanelGroup<codes, scales> loaded[groups_at_once][panels];
    LaneInputs<tiles> inputs[groups_at_once];
    KVZAP_UNROLL
    for (int i = 0; i < groups_at_once; ++i) {
      const int group = first + i * warps;
      if (group >= n_groups) continue;
      KVZAP_UNROLL
      for (int p = 0; p < panels; ++p) {
        loaded[i][p].load(data[p], scales_size, group, lane);
      }
      inputs[i].load(product, group, lane);
    }
    KVZAP_UNROLL
    for (int i = 0; i < groups_at_once; ++i) {
      if (first + i * warps >= n_groups) continue;
      KVZAP_UNROLL
      for (int p = 0; p < panels; ++p) {
        loaded[i][p].add(inputs[i], product.panels.table, lane, sums[p]);
      }
    }
  }
  KVZAP_UNROLL
  for (int p = 0; p < panels; ++p) {
    if (first_panel + p < n_panels) store_panel(product, first_panel + p, sums[p]);
  }
}

}  // namespace kvzap::linalg::cuda
