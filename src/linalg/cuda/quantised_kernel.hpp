// Products of few rows with quantised weights on tensor cores. A panel's 16 outputs are the rows of
// a tile. Codes become pairs of bf16, which holds each of them; rows of x are two bf16 each. Scales
// multiply the sums of a group of 32 inputs.
#pragma once

#include <cmath>

#include "base/byte_permute.hpp"
#include "base/cuda/tiles.hpp"
#include "base/row_vector.hpp"
#include "linalg/device/chosen_products.hpp"
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

/// The same for each choice, a row of y with one of several maps' weights.
struct ChosenProduct {
  QuantisedProduct any;  // one row; its panels, bias and inputs are those of the choice
  const ChosenPlace* places;
  const std::int64_t* chosen;
  std::int64_t share;  // choices that have a row of x together

  KVZAP_CUDA QuantisedProduct of(int choice) const {
    const ChosenPlace place = places[chosen[choice]];
    QuantisedProduct own = any;
    own.panels.data = static_cast<const std::uint8_t*>(place.weights);
    own.bias = place.bias;
    own.x += choice / share * any.x_stride;
    own.y += choice * any.y_row_stride;
    return own;
  }
};

struct alignas(16) Float4 {
  float value[4];
};

/// A lane has outputs 2 (l / 4) and the next of a panel, which are rows l / 4 and l / 4 + 8 of a
/// tile: so their codes and scales lie side by side.
KVZAP_CUDA int first_output(int lane) { return lane / 4 * 2; }

/// The codes of a lane for one group of 32 inputs: of its outputs, inputs 4 (l % 4) and the next
/// three, and those 16 further. biased: 128 is added to what they are.
template <CodeKind kind, bool biased>
struct LaneCodes {
  static constexpr int high = quantised::high_bits(kind);
  static constexpr int words = kind == CodeKind::bytes ? 2 : 1;  // of an output
  base::Bytes8 low[words];
  base::Bytes8 upper[high > 0 ? high : 1];

  KVZAP_CUDA void load(const std::uint8_t* group, int lane) {
    const auto* const own = reinterpret_cast<const base::Bytes8*>(group) + lane / 4;
    constexpr int in_quad = 8;
    KVZAP_UNROLL
    for (int h = 0; h < high; ++h) upper[h] = own[in_quad * h];
    KVZAP_UNROLL
    for (int w = 0; w < words; ++w) low[w] = own[in_quad * (high + lane % 4 + 4 * w)];
  }

  /// Four codes of output i, less their centre, as two pairs: of the first 16 inputs of a group
  /// (step 0) or of the others.
  KVZAP_CUDA void decode(int i, int step, int lane, const std::int8_t* table,
                         std::uint32_t (&pairs)[2]) const {
    if constexpr (kind == CodeKind::bytes) {
      pair_signed(low[step].word[i], pairs);
    } else if constexpr (kind == CodeKind::table) {
      pair_signed(looked_up(low[0].word[i] >> (4 * step) & 0x0f0f0f0fu, table), pairs);
    } else {
      std::uint32_t codes = low[0].word[i] >> (4 * step) & 0x0f0f0f0fu;
      // Other bits of these words cross their bytes, and are left out.
      if constexpr (high == 1) {
        codes |= rotated_right(upper[0].word[i], lane % 4 + 4 * step - 4) & 0x10101010u;
      } else if constexpr (high == 2) {
        codes |= rotated_right(upper[step].word[i], 2 * (lane % 4) - 4) & 0x30303030u;
      }
      // 0x4300 + code is 128 + code in bf16.
      constexpr std::uint32_t centre = 0x43004300u + quantised::centre(kind) * 0x10001u;
      pairs[0] = base::permute_bytes(codes, 0x43434343u, 0x4140);
      pairs[1] = base::permute_bytes(codes, 0x43434343u, 0x4342);
      if constexpr (!biased) {
        pairs[0] = difference_of_pairs<bfloat16>(pairs[0], centre);
        pairs[1] = difference_of_pairs<bfloat16>(pairs[1], centre);
      }
    }
  }

 private:
  KVZAP_CUDA static std::uint32_t rotated_right(std::uint32_t word, int bits) {
    const auto own = static_cast<std::uint32_t>(bits) % 32u;
    return word >> own | word << ((32u - own) % 32u);
  }
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

  /// x: of each row of a lane, its first input of the group. left: inputs from there on.
  template <bool is_whole>
  KVZAP_CUDA void load(const float* const (&x)[tiles], int group, std::int32_t left) {
    KVZAP_UNROLL
    for (int n = 0; n < tiles; ++n) {
      KVZAP_UNROLL
      for (int step = 0; step < 2; ++step) {
        const int first = 32 * group + 16 * step;
        values[n][step] = is_whole || first < left ? *reinterpret_cast<const Float4*>(x[n] + first)
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
  /// sums = a x, or sums += a x
  template <bool is_first>
  KVZAP_CUDA void add(float (&sums)[4], const std::uint32_t (&a)[4]) const {
    if constexpr (is_first) {
      multiply_first<bfloat16>(sums, a, rest[0], rest[1]);
    } else {
      base::cuda::multiply<bfloat16>(sums, a, rest[0], rest[1]);
    }
    base::cuda::multiply<bfloat16>(sums, a, upper[0], upper[1]);
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

/// The stored scales of a lane's two outputs for one group.
template <ScaleKind kind>
struct StoredScales {
  // A pair of half or of bytes each: of the block (scales; minima or zero points) and of the group.
  std::uint32_t block[2], group[2];

  /// data: the scales of a group's block. own: the group's number there.
  KVZAP_CUDA void load(const std::uint8_t* data, int own, int lane) {
    constexpr int outputs = quantised::panel_outputs;
    const int first = first_output(lane);
    if constexpr (kind == ScaleKind::exponent) {
      block[0] = pair_at(data + first);
    } else {
      block[0] = reinterpret_cast<const base::Bytes4*>(data + 2 * first)->word;
    }
    if constexpr (kind == ScaleKind::half_minimum || kind == ScaleKind::group_minimum) {
      block[1] = reinterpret_cast<const base::Bytes4*>(data + 2 * (outputs + first))->word;
    } else if constexpr (kind == ScaleKind::half_zero) {
      block[1] = pair_at(data + 2 * outputs + first);
    }
    load_group(data, own, lane);
  }
  /// The same for a group of the block of `other`.
  KVZAP_CUDA void load_next(const StoredScales& other, const std::uint8_t* data, int own,
                            int lane) {
    block[0] = other.block[0];
    if constexpr (kind == ScaleKind::group_minimum) block[1] = other.block[1];
    load_group(data, own, lane);
  }

  /// The scales of output i. biased: for codes with 128 more.
  template <bool biased>
  KVZAP_CUDA GroupScales of(int i) const {
    if constexpr (kind == ScaleKind::exponent) {
      const float scale = quantised::half_power(static_cast<std::uint8_t>(block[0] >> (8 * i)));
      return {{scale, scale}, 0};
    } else {
      const float scale = half_of(block[0], i);
      GroupScales found{{scale, scale}, 0};
      if constexpr (kind == ScaleKind::half_minimum) {
        found.minimum = half_of(block[1], i);
      } else if constexpr (kind == ScaleKind::half_zero) {
        found.minimum = times_byte(-scale, block[1], i);
      } else if constexpr (kind == ScaleKind::group_minimum) {
        found.scale[0] = found.scale[1] = times_byte(scale, group[0], i);
        found.minimum = times_byte(-half_of(block[1], i), group[1], i);
      } else if constexpr (kind == ScaleKind::group_of_16) {
        found.scale[0] = times_signed_byte(scale, group[0], i);
        found.scale[1] = times_signed_byte(scale, group[1], i);
      } else {
        static_assert(kind == ScaleKind::half);
      }
      if constexpr (biased) found.minimum = std::fmaf(-128.0f, found.scale[0], found.minimum);
      return found;
    }
  }

 private:
  KVZAP_CUDA void load_group(const std::uint8_t* data, int own, int lane) {
    constexpr int outputs = quantised::panel_outputs;
    if constexpr (kind == ScaleKind::group_minimum) {
      const std::uint8_t* const bytes = data + (4 + own) * outputs + first_output(lane);
      group[0] = pair_at(bytes);
      group[1] = pair_at(bytes + 8 * outputs);
    } else if constexpr (kind == ScaleKind::group_of_16) {
      const std::uint8_t* const bytes = data + (2 + 2 * own) * outputs + first_output(lane);
      group[0] = pair_at(bytes);
      group[1] = pair_at(bytes + outputs);
    }
  }
  KVZAP_CUDA static std::uint32_t pair_at(const std::uint8_t* bytes) {
    return *reinterpret_cast<const std::uint16_t*>(bytes);
  }
  KVZAP_CUDA static float half_of(std::uint32_t pair, int i) {
    const FloatPair both = floats_of<half>(pair);
    return i == 0 ? both.lower : both.upper;
  }
  /// factor * byte i, by one rounding: 2^23 + byte are the bits that a permutation gives.
  KVZAP_CUDA static float times_byte(float factor, std::uint32_t bytes, int i) {
    const float raised = base::bits_float(
        base::permute_bytes(bytes, 0x4b000000u, 0x7440u | static_cast<unsigned>(i)));
    return std::fmaf(factor, raised, factor * -8388608.0f);
  }
  KVZAP_CUDA static float times_signed_byte(float factor, std::uint32_t bytes, int i) {
    const float raised = base::bits_float(
        base::permute_bytes(bytes ^ 0x8080u, 0x4b000000u, 0x7440u | static_cast<unsigned>(i)));
    return factor * (raised - 8388736.0f);
  }
};

/// What a lane loads of a group of a panel, and what it adds.
template <CodeKind codes, ScaleKind scales>
struct PanelGroup {
  // The sum of x takes out what is added to codes, where there is one.
  static constexpr bool biased =
      has_minimum<scales> && (codes == CodeKind::nibbles || codes == CodeKind::five_bits);
  LaneCodes<codes, biased> own;
  StoredScales<scales> stored;

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
    const GroupScales of[2] = {stored.template of<biased>(0), stored.template of<biased>(1)};
    KVZAP_UNROLL
    for (int n = 0; n < tiles; ++n) {
      float found[2][4];  // of each step, or of both
      float all[4];       // of the rows of x themselves
      constexpr std::uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
      const InputPairs x0(inputs.values[n][0]), x1(inputs.values[n][1]);
      x0.template add<true>(found[0], a[0]);
      x1.template add<has_two>(found[has_two ? 1 : 0], a[1]);
      if constexpr (has_minimum<scales>) {
        x0.template add<true>(all, ones);
        x1.template add<false>(all, ones);
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
      sums[(warp_of_block() * 8 * tiles + row) * stride + first_output(lane) + i / 2] = own[n][i];
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

/// Where a panel's scales and codes begin.
struct PanelPlace {
  const std::uint8_t* scales;
  const std::uint8_t* codes;
};

/// Adds the products of `count` groups of `panels` panels from group `first` on. x: of each row of
/// a lane, its first input. inputs: from there on. is_whole: all of the groups and inputs exist.
template <CodeKind codes, ScaleKind scales, int count, bool is_whole, int tiles, int panels>
KVZAP_CUDA void add_groups(const QuantisedProduct& product, const PanelPlace (&places)[panels],
                           int first, int n_groups, const float* const (&x)[tiles],
                           float (&sums)[panels][tiles][4]) {
  constexpr int of_block = groups_of_block(scales);
  constexpr auto bytes_of_block = static_cast<int>(quantised::scale_bytes(scales));
  constexpr auto bytes_of_group = static_cast<int>(quantised::code_bytes(codes));
  static_assert(of_block % count == 0 || of_block == 1, "a load lies in one block");
  const int lane = lane_of_warp();
  PanelGroup<codes, scales> loaded[count][panels];
  LaneInputs<tiles> inputs[count];
  const float* own[tiles];
  KVZAP_UNROLL
  for (int n = 0; n < tiles; ++n) own[n] = x[n] + quantised::group_inputs * first;
  const std::int32_t left = product.inputs - 4 * (lane % 4) - quantised::group_inputs * first;
  KVZAP_UNROLL
  for (int i = 0; i < count; ++i) {
    if (!is_whole && first + i >= n_groups) break;
    KVZAP_UNROLL
    for (int p = 0; p < panels; ++p) {
      const std::uint8_t* const block =
          places[p].scales + (first / of_block + (of_block == 1 ? i : 0)) * bytes_of_block;
      const int group = first % of_block + i;
      if (of_block == 1 || i == 0) {
        loaded[i][p].stored.load(block, group, lane);
      } else {
        loaded[i][p].stored.load_next(loaded[0][p].stored, block, group, lane);
      }
      loaded[i][p].own.load(places[p].codes + first * bytes_of_group + i * bytes_of_group, lane);
    }
    inputs[i].template load<is_whole>(own, i, left);
  }
  KVZAP_UNROLL
  for (int i = 0; i < count; ++i) {
    if (!is_whole && first + i >= n_groups) break;
    KVZAP_UNROLL
    for (int p = 0; p < panels; ++p) {
      loaded[i][p].add(inputs[i], product.panels.table, lane, sums[p]);
    }
  }
}

/// Block = `panels` panels, whose inputs are read once; its warps take turns in runs of groups of
/// inputs. tiles: of 8 rows of x.
template <CodeKind codes, ScaleKind scales, int tiles, int panels>
KVZAP_CUDA void multiply_own_panels(const QuantisedProduct& product) {
  constexpr int count = loads_at_once / panels;
  const int lane = lane_of_warp(), first_panel = block_x() * panels;
  const auto n_groups = static_cast<int>(product.panels.inputs / quantised::group_inputs);
  const auto n_panels = (product.outputs + quantised::panel_outputs - 1) / quantised::panel_outputs;
  PanelPlace places[panels];
  KVZAP_UNROLL
  for (int p = 0; p < panels; ++p) {
    // The last block may repeat a panel, whose sums it does not write.
    const int panel = first_panel + p < n_panels ? first_panel + p : n_panels - 1;
    places[p].scales = product.panels.data + panel * product.panels.panel_bytes();
    places[p].codes = places[p].scales + product.panels.scales_size();
  }
  // Sums of rows that do not exist are not written either.
  const float* x[tiles];
  KVZAP_UNROLL
  for (int n = 0; n < tiles; ++n) {
    const int row = 8 * n + lane / 4 < product.rows ? 8 * n + lane / 4 : product.rows - 1;
    x[n] = product.x + row * product.x_stride + 4 * (lane % 4);
  }
  float sums[panels][tiles][4] = {};
  const int whole_groups = product.inputs / quantised::group_inputs;
  int first = warp_of_block() * count;
  for (; first + count <= whole_groups; first += warps * count) {
    add_groups<codes, scales, count, true>(product, places, first, n_groups, x, sums);
  }
  for (; first < n_groups; first += warps * count) {
    add_groups<codes, scales, count, false>(product, places, first, n_groups, x, sums);
  }
  KVZAP_UNROLL
  for (int p = 0; p < panels; ++p) {
    if (first_panel + p < n_panels) store_panel(product, first_panel + p, sums[p]);
  }
}

template <CodeKind codes, ScaleKind scales, int tiles, int panels>
KVZAP_CUDA_KERNEL(32 * warps, tiles == 1 ? 2 : 1)
multiply_panels(KVZAP_CUDA_ARGUMENT QuantisedProduct product) {
  multiply_own_panels<codes, scales, tiles, panels>(product);
}

/// Block = (panel, choice).
template <CodeKind codes, ScaleKind scales>
KVZAP_CUDA_KERNEL(32 * warps, 2)
multiply_chosen(KVZAP_CUDA_ARGUMENT ChosenProduct product) {
  multiply_own_panels<codes, scales, 1, 1>(product.of(block_y()));
}

}  // namespace kvzap::linalg::cuda
