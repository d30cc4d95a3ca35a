// Formats of quantised weights, and the panels in which products read them.
//
// A value is scale * (code - centre) + minimum. Its code is an integer of 4 to 8 bits, a nibble
// that indexes a table of integers, or a float of 8 bits. Blocks of 32 to 256 consecutive inputs
// share scales. The stored layouts are those of GGUF files (see gguf/block_formats.hpp), and two
// that checkpoints become. AWQ, GPTQ: INT4, an f16 scale, a zero point of one byte, 32 nibbles in
// GGUF's order. FP8: F8_E4M3, an f32 scale, 128 codes.
//
// A panel holds 16 outputs: first the scales of all blocks, then the codes, group after group of 32
// inputs. Integers are in the order of products of bytes: quad after quad of inputs, the four of
// each output together, so that a register of 64 bytes holds one quad of all outputs. Floats are in
// the order of inputs, 16 outputs of each.
#pragma once

#include <array>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <string_view>

namespace kvzap::linalg::quantised {

inline constexpr int panel_outputs = 16;
inline constexpr int group_inputs = 32;
inline constexpr int group_quads = 8;
/// Bytes of one quad of all outputs, and the alignment of scales and codes.
inline constexpr int quad_bytes = 64;

/// How the codes of a group are stored.
enum class CodeKind : std::uint8_t {
  nibbles,            // 4 registers: quads 0 … 3 in the low nibbles, 4 … 7 in the high ones
  centred_nibbles,    // the same, minus 8
  five_bits,          // one register before nibbles: bit j is the fifth bit of quad j
  centred_five_bits,  // the same, minus 16
  six_bits,  // two registers before nibbles: two bits of quads 0 … 3, of 4 … 7; minus 32
  bytes,     // 8 registers of signed bytes
  table,     // nibbles that index a table of signed bytes
  float8     // 32 inputs, each of 16 floats (e4m3)
};

/// The bits of codes beside the nibbles, in one register or two before them.
KOKKOS_INLINE_FUNCTION constexpr int high_bits(CodeKind kind) {
  switch (kind) {
    case CodeKind::five_bits:
    case CodeKind::centred_five_bits:
      return 1;
    case CodeKind::six_bits:
      return 2;
    default:
      return 0;
  }
}

/// What is subtracted from stored codes.
KOKKOS_INLINE_FUNCTION constexpr int centre(CodeKind kind) {
  switch (kind) {
    case CodeKind::centred_nibbles:
      return 8;
    case CodeKind::centred_five_bits:
      return 16;
    case CodeKind::six_bits:
      return 32;
    default:
      return 0;
  }
}

/// Whether codes are floats. Products take those as they are; a matrix has them alone or not at
/// all.
KOKKOS_INLINE_FUNCTION constexpr bool is_float(CodeKind kind) { return kind == CodeKind::float8; }

/// How the scales of a block are stored, each for all outputs.
enum class ScaleKind : std::uint8_t {
  single,         // f32
  half,           // f16
  half_minimum,   // f16, then the minimum in f16
  half_zero,      // f16, then the zero point in one byte, which is subtracted from the code
  exponent,       // a power of two, by its biased exponent; the table has twice the values
  group_minimum,  // two f16, which multiply 8 scales and 8 minima of one byte each
  group_of_16     // f16, which multiplies 16 signed bytes, each for 16 inputs
};

/// The parts of one stored block.
struct SplitBlock {
  std::array<std::uint8_t, 256> codes;
  std::uint16_t scale, minimum;  // f16; or the exponent; or the zero point; or halves of an f32
  std::array<std::uint8_t, 16> group_scales;
  std::array<std::uint8_t, 8> group_minima;
};

struct Format {
  std::string_view name;  // of GGUF's type
  CodeKind codes;
  ScaleKind scales;
  std::int32_t values;       // of a block
  std::int32_t bytes;        // of a stored block
  const std::int8_t* table;  // 16 values, or null
  void (*split)(const std::uint8_t* block, SplitBlock& parts);
};

/// Returns the format of this name, or nullptr if products cannot read it.
const Format* find_format(std::string_view name);

KOKKOS_INLINE_FUNCTION constexpr std::int64_t code_bytes(CodeKind kind) {
  switch (kind) {
    case CodeKind::bytes:
    case CodeKind::float8:
      return 8 * quad_bytes;
    default:
      return (4 + high_bits(kind)) * quad_bytes;
  }
}

/// Bytes of the scales of one block, for all outputs.
KOKKOS_INLINE_FUNCTION constexpr std::int64_t scale_bytes(ScaleKind kind) {
  switch (kind) {
    case ScaleKind::half:
      return 2 * panel_outputs;
    case ScaleKind::single:
    case ScaleKind::half_minimum:
      return 4 * panel_outputs;
    case ScaleKind::half_zero:
      return 3 * panel_outputs;
    case ScaleKind::exponent:
      return panel_outputs;
    case ScaleKind::group_minimum:
      return (4 + 2 * 8) * panel_outputs;
    case ScaleKind::group_of_16:
      return (2 + 16) * panel_outputs;
  }
  return 0;
}

/// Where the panels of a matrix are, and how they are read. Trivial, for kernels of a device.
struct Panels {
  const std::uint8_t* data = nullptr;
  std::int64_t inputs = 0;  // with padding: whole blocks
  std::int64_t block = 0;   // values of a block
  CodeKind codes = {};
  ScaleKind scales = {};
  alignas(16) std::int8_t table[16] = {};  // kernels read words of it

  KOKKOS_INLINE_FUNCTION std::int64_t scales_size() const {
    return (inputs / block * scale_bytes(scales) + quad_bytes - 1) / quad_bytes * quad_bytes;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t panel_bytes() const {
    return scales_size() + inputs / group_inputs * code_bytes(codes);
  }
  const std::uint8_t* scales_of(std::int64_t panel) const { return data + panel * panel_bytes(); }
  const std::uint8_t* codes_of(std::int64_t panel) const {
    return scales_of(panel) + scales_size();
  }
};

/// Returns 2^(exponent - 128), half the power of two that MXFP4 stores.
KOKKOS_INLINE_FUNCTION float half_power(std::uint32_t exponent) {
  return base::bits_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

/// Returns the float of 8 bits: sign, 4 bits of exponent, 3 of mantissa, no infinities (OCP 8-bit
/// Floating Point Specification). Its NaN, all bits set but the sign, must not occur.
KOKKOS_INLINE_FUNCTION float e4m3_value(std::int8_t bits) {
  // The multiplication by 2^120 moves the exponent up. It is exact, subnormals included.
  const auto wide = static_cast<std::uint32_t>(static_cast<std::int32_t>(bits)) << 20;
  return base::bits_float(wide & 0x87f00000u) * 0x1p120f;
}

KOKKOS_INLINE_FUNCTION float half_at(const std::uint8_t* source) {
  half value;
  value.bits = static_cast<std::uint16_t>(source[0] | source[1] << 8);
  return static_cast<float>(value);
}

/// The reference of all other ways to read a panel: the value of one output and input.
KOKKOS_INLINE_FUNCTION float value_at(const Panels& panels, std::int64_t output,
                                      std::int64_t input) {
  const std::uint8_t* const panel = panels.data + output / panel_outputs * panels.panel_bytes();
  const int lane = static_cast<int>(output % panel_outputs);
  const int within = static_cast<int>(input % group_inputs);
  const int quad = within / 4;
  const int byte = 4 * lane + within % 4;
  const std::uint8_t* group =
      panel + panels.scales_size() + input / group_inputs * code_bytes(panels.codes);
  const std::uint8_t* const scales = panel + input / panels.block * scale_bytes(panels.scales);
  if (is_float(panels.codes)) {
    const std::uint8_t* const own = scales + 4 * lane;
    const float scale = base::bits_float(own[0] | own[1] << 8 | own[2] << 16 |
                                         static_cast<std::uint32_t>(own[3]) << 24);
    return scale * e4m3_value(static_cast<std::int8_t>(group[within * panel_outputs + lane]));
  }
  int high = 0;
  if (high_bits(panels.codes) == 1) {
    high = (group[byte] >> quad & 1) << 4;
    group += quad_bytes;
  } else if (high_bits(panels.codes) == 2) {
    high = (group[quad / 4 * quad_bytes + byte] >> quad % 4 * 2 & 3) << 4;
    group += 2 * quad_bytes;
  }
  int code = 0;
  if (panels.codes == CodeKind::bytes) {
    code = static_cast<std::int8_t>(group[quad * quad_bytes + byte]);
  } else {
    code = group[quad % 4 * quad_bytes + byte] >> quad / 4 * 4 & 15;
    code = panels.codes == CodeKind::table ? panels.table[code] : code | high;
  }
  const auto centred = static_cast<float>(code - centre(panels.codes));
  const int in_block = static_cast<int>(input % panels.block);
  switch (panels.scales) {
    case ScaleKind::single:
      break;  // of floats, above
    case ScaleKind::half:
      return half_at(scales + 2 * lane) * centred;
    case ScaleKind::half_minimum:
      return half_at(scales + 2 * lane) * centred + half_at(scales + 2 * (panel_outputs + lane));
    case ScaleKind::half_zero:
      return half_at(scales + 2 * lane) *
             (centred - static_cast<float>(scales[2 * panel_outputs + lane]));
    case ScaleKind::exponent:
      return half_power(scales[lane]) * centred;
    case ScaleKind::group_minimum: {
      const std::uint8_t* const bytes =
          scales + 4 * panel_outputs + in_block / 32 * panel_outputs + lane;
      return half_at(scales + 2 * lane) * static_cast<float>(bytes[0]) * centred -
             half_at(scales + 2 * (panel_outputs + lane)) *
                 static_cast<float>(bytes[8 * panel_outputs]);
    }
    case ScaleKind::group_of_16: {
      const auto own = static_cast<std::int8_t>(scales[(2 + in_block / 16) * panel_outputs + lane]);
      return half_at(scales + 2 * lane) * static_cast<float>(own) * centred;
    }
  }
  return 0;
}

}  // namespace kvzap::linalg::quantised
