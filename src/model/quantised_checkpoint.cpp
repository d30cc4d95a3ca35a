#include "model/quantised_checkpoint.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "linalg/quantised/format.hpp"

namespace kvzap::model {
namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t quotient_up(std::int64_t dividend, std::int64_t divisor) {
  return dividend / divisor + (dividend % divisor != 0 ? 1 : 0);
}

template <class T>
T value_at(const std::byte* data, std::int64_t index) {
  T value = {};
  std::memcpy(&value, data + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

[[noreturn]] void fail_part(const TensorInfo& part, std::string_view expected,
                            std::string_view found) {
  throw Error(
      fmt::format("{}: tensor {}: expected {}, found {}", part.file, part.name, expected, found));
}

std::string text_of(const Shape& shape) {
  if (shape.size() > 8) return fmt::format("of {} extents", shape.size());
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

constexpr std::string_view any_float = "F32, F16 or BF16";

void require_dtype(const TensorInfo& part, std::string_view dtype) {
  if (dtype == any_float ? part.is_weight : part.stored_dtype == dtype) return;
  fail_part(part, fmt::format("dtype {}", dtype), "dtype " + files::shown(part.stored_dtype));
}

void require_shape(const TensorInfo& part, const Shape& shape) {
  if (part.shape == shape) return;
  fail_part(part, "shape " + text_of(shape), "shape " + text_of(part.shape));
}

/// The parts of one quantised matrix.
class QuantisedTensor : public StoredTensor {
 public:
  QuantisedTensor(const SafetensorsFolder& files, const TensorInfo& first)
      : m_files(&files), m_parts{&first} {}

  std::string description() const override {
    return fmt::format("{}: tensor {}", m_parts.front()->file, m_parts.front()->name);
  }
  void release() const override {
    for (const TensorInfo* part : m_parts) m_files->release(*part);
  }

 protected:
  const TensorInfo& first() const { return *m_parts.front(); }

  /// The part called `name`; nullptr if it is missing. Throws Error for another type.
  const TensorInfo* find_part(const std::string& name, std::string_view dtype) {
    const TensorInfo* const part = m_files->find(name);
    if (part == nullptr) return nullptr;
    require_dtype(*part, dtype);
    m_parts.push_back(part);
    return part;
  }
  /// The same; throws Error if it is missing.
  const TensorInfo& part(const std::string& name, std::string_view dtype) {
    const TensorInfo* const found = find_part(name, dtype);
    if (found == nullptr) fail_part(first(), fmt::format("a tensor {} beside it", name), "none");
    return *found;
  }

  static std::vector<float> floats(const TensorInfo& part) {
    std::vector<float> values(part.bytes / size_of(part.dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      switch (part.dtype) {
        case DType::f32:
          values[i] = value_at<float>(part.data, index);
          break;
        case DType::f16:
          values[i] = static_cast<float>(value_at<half>(part.data, index));
          break;
        case DType::bf16:
          values[i] = static_cast<float>(value_at<bfloat16>(part.data, index));
          break;
      }
    }
    return values;
  }

 private:
  const SafetensorsFolder* m_files;
  std::vector<const TensorInfo*> m_parts;
};

bool is_nan_e4m3(std::byte bits) { return (bits & std::byte{127}) == std::byte{127}; }

float e4m3(std::byte bits) {
  return is_nan_e4m3(bits)
             ? std::numeric_limits<float>::quiet_NaN()
             : linalg::quantised::e4m3_value(static_cast<std::int8_t>(std::to_integer<int>(bits)));
}

class Fp8Tensor final : public QuantisedTensor {
 public:
  Fp8Tensor(const SafetensorsFolder& files, const TensorInfo& values, const Shape& shape,
            const QuantisedConfig& config)
      : QuantisedTensor(files, values), m_columns(shape.back()) {
    require_shape(values, shape);
    const std::int64_t rows = m_rows = shape[shape.size() - 2];
    const TensorInfo* scales = find_part(values.name + "_scale_inv", any_float);
    if (scales == nullptr) scales = &part(values.name + "_scale", any_float);
    m_scales = floats(*scales);
    if (config.block_rows != 0) {
      m_block_rows = config.block_rows;
      m_block_columns = config.block_columns;
      m_blocks_in_column = quotient_up(rows, m_block_rows);
      Shape of_blocks = shape;
      of_blocks[shape.size() - 2] = m_blocks_in_column;
      of_blocks.back() = quotient_up(m_columns, m_block_columns);
      require_shape(*scales, of_blocks);
    } else {
      m_block_columns = m_columns;
      const Shape& found = scales->shape;
      if (found == Shape{rows} || found == Shape{rows, 1}) {
        m_block_rows = 1;
      } else if (m_scales.size() == 1) {
        m_block_rows = rows;
      } else {
        fail_part(*scales, fmt::format("shape [], [1], [{}] or [{}, 1]", rows, rows),
                  "shape " + text_of(found));
      }
    }
    m_blocks_in_row = quotient_up(m_columns, m_block_columns);
    m_has_blocks = m_blocks_in_row == 1 || m_block_columns % block_values == 0;
  }

  std::string_view block_format() const override { return m_has_blocks ? "F8_E4M3" : ""; }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    const std::int64_t blocks = quotient_up(m_columns, block_values);
    buffer.assign(static_cast<std::size_t>(blocks * (4 + block_values)), std::byte{0});
    const std::byte* const values = first().data + row * m_columns;
    const float* const scales = scales_of(row);
    std::byte* target = buffer.data();
    for (std::int64_t begin = 0; begin < m_columns; begin += block_values) {
      const std::int64_t count = std::min(block_values, m_columns - begin);
      std::copy_n(values + begin, count, target + 4);
      // Products know no NaN among codes.
      const bool is_nan = std::any_of(target + 4, target + 4 + count, is_nan_e4m3);
      const float scale =
          is_nan ? std::numeric_limits<float>::quiet_NaN() : scales[begin / m_block_columns];
      std::memcpy(target, &scale, sizeof(scale));
      target += 4 + block_values;
    }
    return buffer.data();
  }

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      const std::byte* const values = first().data + row * m_columns;
      const float* const scales = scales_of(row);
      for (std::int64_t column = begin; column < end;) {
        const std::int64_t block = column / m_block_columns;
        const std::int64_t last = std::min(end, (block + 1) * m_block_columns);
        const float scale = scales[block];
        for (; column < last; ++column) {
          *target++ = e4m3(values[column]) * scale;
        }
      }
    }
  }

 private:
  static constexpr std::int64_t block_values = 128;  // see linalg/quantised/format.hpp

  /// Rows of further leading extents follow one another. Blocks end with a matrix.
  const float* scales_of(std::int64_t row) const {
    const std::int64_t first = row / m_rows * m_blocks_in_column;
    return m_scales.data() + (first + row % m_rows / m_block_rows) * m_blocks_in_row;
  }

  std::int64_t m_columns;
  std::int64_t m_rows = 1;  // of a matrix
  std::int64_t m_blocks_in_column = 1;
  bool m_has_blocks = false;
  std::int64_t m_block_rows = 1;
  std::int64_t m_block_columns = 1;
  std::int64_t m_blocks_in_row = 1;
  std::vector<float> m_scales;  // (matrix, blocks of rows, blocks of columns)
};

class Mxfp4Tensor final : public QuantisedTensor {
 public:
  /// scales_are_numbers: whether no scale of a tensor is NaN, which GGUF's type lacks.
  template <class ScalesAreNumbers>
  Mxfp4Tensor(const SafetensorsFolder& files, const TensorInfo& blocks, const std::string& name,
              Shape shape, const ScalesAreNumbers& scales_are_numbers)
      : QuantisedTensor(files, blocks) {
    const std::int64_t columns = shape.back();
    if (columns % block_values != 0) {
      fail_part(blocks, fmt::format("rows of whole blocks of {} values", block_values),
                fmt::format("{} columns", columns));
    }
    require_dtype(blocks, "U8");
    m_blocks_in_row = columns / block_values;
    shape.back() = m_blocks_in_row;
    const TensorInfo& scales = part(name + "_scales", "U8");
    require_shape(scales, shape);
    m_scales = scales.data;
    shape.push_back(block_values / 2);
    require_shape(blocks, shape);
    m_has_blocks = scales_are_numbers(scales);
  }

  std::string_view block_format() const override { return m_has_blocks ? "MXFP4" : ""; }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    constexpr std::size_t half = block_values / 2;
    buffer.resize(static_cast<std::size_t>(m_blocks_in_row) * (1 + half));
    std::byte* target = buffer.data();
    for (std::int64_t i = 0; i < m_blocks_in_row; ++i, target += 1 + half) {
      const std::int64_t block = row * m_blocks_in_row + i;
      const std::byte* const nibbles = first().data + block * static_cast<std::int64_t>(half);
      const auto nibble = [&](std::size_t value) {
        return nibbles[value / 2] >> (value % 2 * 4) & std::byte{15};
      };
      target[0] = m_scales[block];
      for (std::size_t v = 0; v < half; ++v) target[1 + v] = nibble(v) | nibble(v + half) << 4;
    }
    return buffer.data();
  }

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    static constexpr std::array<float, 16> values = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                                     -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      for (std::int64_t column = begin; column < end;) {
        const std::int64_t block = row * m_blocks_in_row + column / block_values;
        const std::byte* const nibbles = first().data + block * (block_values / 2);
        const float scale = power_of_two(std::to_integer<std::uint32_t>(m_scales[block]));
        const std::int64_t last = std::min(end, (column / block_values + 1) * block_values);
        for (; column < last; ++column) {
          const std::int64_t i = column % block_values;
          const auto both = std::to_integer<unsigned>(nibbles[i / 2]);
          *target++ = values[both >> (i % 2 * 4) & 15u] * scale;
        }
      }
    }
  }

 private:
  static constexpr std::int64_t block_values = 32;

  /// 2^(exponent - 127); 255 is NaN. 2^-127 is subnormal.
  static float power_of_two(std::uint32_t exponent) {
    if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
    return base::bits_float(exponent == 0 ? 0x00400000u : exponent << 23);
  }

  std::int64_t m_blocks_in_row = 0;
  const std::byte* m_scales = nullptr;
  bool m_has_blocks = false;
};

constexpr std::int64_t in_word = 8;  // integers of 4 bits

/// Shifts of the eight integers in a word.
using Shifts = std::array<int, in_word>;
constexpr Shifts in_order = {0, 4, 8, 12, 16, 20, 24, 28};
/// AutoAWQ: integers of even numbers are in the lower half of the word.
constexpr Shifts even_first = {0, 16, 4, 20, 8, 24, 12, 28};

/// target[i] = integer first + i of `words`.
void unpack(const std::byte* words, const Shifts& shifts, std::int64_t first, std::int64_t count,
            int* target) {
  const std::int64_t end = first + count;
  for (std::int64_t i = first; i < end;) {
    const auto word = value_at<std::uint32_t>(words, i / in_word);
    const std::int64_t last = std::min(end, (i / in_word + 1) * in_word);
    for (; i < last; ++i) {
      *target++ = static_cast<int>(word >> shifts[static_cast<std::size_t>(i % in_word)] & 15u);
    }
  }
}

/// A file's words of integers of 4 bits: their part, its expected shape, and the order in words of
/// zero points.
struct QuantisedWords {
  const TensorInfo& part;
  Shape shape;
  const Shifts& zero_shifts;
};

/// Integers of 4 bits with a scale and a zero point for each output and group of inputs. The files
/// store inputs as rows.
class GroupedTensor : public QuantisedTensor {
 public:
  GroupedTensor(const SafetensorsFolder& files, const QuantisedWords& words,
                const std::string& layer, const Shape& shape, const QuantisedConfig& config)
      : QuantisedTensor(files, words.part),
        m_outputs(shape[0]),
        m_inputs(shape[1]),
        m_zero_shifts(words.zero_shifts),
        m_zero_offset(config.zeros_less_one ? 1 : 0) {
    require_dtype(words.part, "I32");
    require_shape(words.part, words.shape);
    const std::int64_t group_size = config.group_size == 0 ? m_inputs : config.group_size;
    const std::int64_t groups = quotient_up(m_inputs, group_size);
    const TensorInfo& scales = part(layer + ".scales", any_float);
    require_shape(scales, {groups, m_outputs});
    m_scales = floats(scales);
    const TensorInfo* const zeros = find_part(layer + ".qzeros", "I32");
    if (zeros != nullptr) {
      require_shape(*zeros, {groups, whole_words(*zeros, "outputs", m_outputs)});
      m_zero_words = zeros->data;
    } else if (!config.may_lack_zeros) {
      fail_part(words.part, fmt::format("a tensor {}.qzeros beside it", layer), "none");
    }
    read_groups(
        config.format == QuantisedFormat::gptq ? find_part(layer + ".g_idx", "I32") : nullptr,
        group_size, groups);
    m_in_order = m_inputs % block_inputs == 0 && blocks_are_in_groups();
    // Blocks of smaller groups would be mostly padding.
    m_has_blocks = scales_are_halves() && (m_in_order || m_inputs / groups >= block_inputs);
  }

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    // Tiles: inputs are consecutive in `target`, outputs in the file.
    std::array<std::array<float, tile_outputs>, tile_inputs> tile;
    const std::int64_t width = end - begin;
    for (std::int64_t row = row_begin; row < row_end; row += tile_outputs) {
      const std::int64_t rows = std::min(row_end - row, tile_outputs);
      Zeros zeros;
      for (std::int64_t input = begin; input < end; input += tile_inputs) {
        const std::int64_t inputs = std::min(end - input, tile_inputs);
        for (std::int64_t i = 0; i < inputs; ++i) {
          widen_input(input + i, row, rows, zeros, tile[static_cast<std::size_t>(i)].data());
        }
        for (std::int64_t r = 0; r < rows; ++r) {
          float* const to = target + (row - row_begin + r) * width + (input - begin);
          for (std::int64_t i = 0; i < inputs; ++i) {
            to[i] = tile[static_cast<std::size_t>(i)][static_cast<std::size_t>(r)];
          }
        }
      }
    }
  }

  std::string_view block_format() const override { return m_has_blocks ? "INT4" : ""; }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    if (!m_in_order) return nullptr;
    return blocks_of(
        row, m_inputs, [](std::int64_t i) { return i; }, buffer);
  }
  const std::vector<std::int32_t>* input_groups() const override {
    return m_has_blocks && !m_in_order ? &m_group_of : nullptr;
  }
  const std::byte* ordered_blocks(std::int64_t row, const InputOrder& order,
                                  std::vector<std::byte>& buffer) const override {
    const auto input_at = [&](std::int64_t i) {
      return std::int64_t{order[static_cast<std::size_t>(i)]};
    };
    return blocks_of(row, static_cast<std::int64_t>(order.size()), input_at, buffer);
  }

  /// Words that hold `extent` integers; throws Error if these are no whole words.
  static std::int64_t whole_words(const TensorInfo& part, const char* name, std::int64_t extent) {
    if (extent % in_word != 0) {
      fail_part(part, fmt::format("a multiple of {} {}", in_word, name), fmt::format("{}", extent));
    }
    return extent / in_word;
  }

 protected:
  std::int64_t outputs() const { return m_outputs; }

  /// quantised[i] = the integer of output first + i.
  virtual void integers(std::int64_t input, std::int64_t first, std::int64_t count,
                        int* quantised) const = 0;

 private:
  static constexpr std::int64_t tile_outputs = 64;
  static constexpr std::int64_t tile_inputs = 16;
  static constexpr int middle = 8;                  // zero point of symmetric integers
  static constexpr std::int64_t block_inputs = 32;  // of INT4, see linalg/quantised/format.hpp

  /// The zero points of a tile's outputs in one group.
  struct Zeros {
    std::int64_t group = -1;
    std::array<int, tile_outputs> values = {};
  };

  /// Without `order`, inputs are grouped in order.
  void read_groups(const TensorInfo* order, std::int64_t group_size, std::int64_t groups) {
    if (order != nullptr) require_shape(*order, {m_inputs});
    m_group_of.resize(static_cast<std::size_t>(m_inputs));
    for (std::int64_t i = 0; i < m_inputs; ++i) {
      const std::int64_t group = order ? value_at<std::int32_t>(order->data, i) : i / group_size;
      if (group < 0 || group >= groups) {
        fail_part(*order, fmt::format("groups from 0 to {}", groups - 1),
                  fmt::format("{} for input {}", group, i));
      }
      m_group_of[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(group);
    }
  }

  /// Blocks of a row whose value i is that of input input_at(i), or any if that is negative. A
  /// block begins with an input.
  template <class InputAt>
  const std::byte* blocks_of(std::int64_t row, std::int64_t count, const InputAt& input_at,
                             std::vector<std::byte>& buffer) const {
    constexpr std::size_t block_bytes = 3 + block_inputs / 2;
    buffer.resize(static_cast<std::size_t>(count / block_inputs) * block_bytes);
    std::byte* block = buffer.data();
    Zeros zeros;
    for (std::int64_t first = 0; first < count; first += block_inputs, block += block_bytes) {
      const std::int64_t group = m_group_of[static_cast<std::size_t>(input_at(first))];
      if (group != zeros.group) read_zeros(group, row, 1, zeros);
      const half scale(m_scales[static_cast<std::size_t>(group * m_outputs + row)]);
      std::memcpy(block, &scale, sizeof(scale));
      block[2] = static_cast<std::byte>(zeros.values[0]);
      std::array<int, block_inputs> codes = {};
      for (std::int64_t i = 0; i < block_inputs; ++i) {
        const std::int64_t input = input_at(first + i);
        if (input >= 0) integers(input, row, 1, &codes[static_cast<std::size_t>(i)]);
      }
      for (std::size_t i = 0; i < block_inputs / 2; ++i) {
        block[3 + i] = static_cast<std::byte>(codes[i] | codes[i + block_inputs / 2] << 4);
      }
    }
    return buffer.data();
  }

  bool scales_are_halves() const {
    return std::all_of(m_scales.begin(), m_scales.end(),
                       [](float scale) { return static_cast<float>(half(scale)) == scale; });
  }
  bool blocks_are_in_groups() const {
    for (std::size_t i = 0; i < m_group_of.size(); ++i) {
      if (m_group_of[i] != m_group_of[i - i % block_inputs]) return false;
    }
    return true;
  }

  void read_zeros(std::int64_t group, std::int64_t first, std::int64_t count, Zeros& zeros) const {
    zeros.group = group;
    if (m_zero_words == nullptr) {
      zeros.values.fill(middle);
      return;
    }
    const std::byte* const words = m_zero_words + group * (m_outputs / in_word) * 4;
    unpack(words, m_zero_shifts, first, count, zeros.values.data());
    // A stored 15 stands for 0, as in AutoGPTQ.
    for (int& zero : zeros.values) zero = (zero + m_zero_offset) & 15;
  }

  /// values[i] = the weight of output first + i.
  void widen_input(std::int64_t input, std::int64_t first, std::int64_t count, Zeros& zeros,
                   float* values) const {
    std::array<int, tile_outputs> quantised;
    const std::int64_t group = m_group_of[static_cast<std::size_t>(input)];
    if (group != zeros.group) read_zeros(group, first, count, zeros);
    integers(input, first, count, quantised.data());
    const float* const scales = m_scales.data() + group * m_outputs + first;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto index = static_cast<std::size_t>(i);
      values[i] = static_cast<float>(quantised[index] - zeros.values[index]) * scales[i];
    }
  }

  std::int64_t m_outputs;
  std::int64_t m_inputs;
  const Shifts& m_zero_shifts;
  int m_zero_offset;
  std::vector<float> m_scales;              // (groups, outputs)
  const std::byte* m_zero_words = nullptr;  // (groups, outputs / 8), or none
  std::vector<std::int32_t> m_group_of;     // (inputs)
  bool m_in_order = false;                  // whether blocks of a row are in one group each
  bool m_has_blocks = false;
};

/// AutoAWQ packs eight outputs into a word.
class AwqTensor final : public GroupedTensor {
 public:
  AwqTensor(const SafetensorsFolder& files, const TensorInfo& words, const std::string& layer,
            const Shape& shape, const QuantisedConfig& config)
      : GroupedTensor(files,
                      {words, {shape[1], whole_words(words, "outputs", shape[0])}, even_first},
                      layer, shape, config) {}

 private:
  void integers(std::int64_t input, std::int64_t first, std::int64_t count,
                int* quantised) const override {
    const std::byte* const words =
        QuantisedTensor::first().data + input * (outputs() / in_word) * 4;
    unpack(words, even_first, first, count, quantised);
  }
};

/// AutoGPTQ packs eight inputs into a word of weights, and eight outputs into a word of zero
/// points.
class GptqTensor final : public GroupedTensor {
 public:
  GptqTensor(const SafetensorsFolder& files, const TensorInfo& words, const std::string& layer,
             const Shape& shape, const QuantisedConfig& config)
      : GroupedTensor(files, {words, {whole_words(words, "inputs", shape[1]), shape[0]}, in_order},
                      layer, shape, config) {}

 private:
  void integers(std::int64_t input, std::int64_t first, std::int64_t count,
                int* quantised) const override {
    const auto shift = static_cast<int>(input % in_word * 4);
    const std::int64_t begin = input / in_word * outputs() + first;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto word = value_at<std::uint32_t>(QuantisedTensor::first().data, begin + i);
      quantised[i] = static_cast<int>(word >> shift & 15u);
    }
  }
};

/// The name of the layer of a weight; empty for other tensors.
std::string layer_of(std::string_view name) {
  constexpr std::string_view ending = ".weight";
  if (name.size() <= ending.size() || name.substr(name.size() - ending.size()) != ending) return "";
  return std::string(name.substr(0, name.size() - ending.size()));
}

}  // namespace

const TensorInfo* QuantisedStore::quantised(std::string_view name) const {
  const SafetensorsFolder& files = m_plain.files();
  switch (m_config.format) {
    case QuantisedFormat::fp8: {
      const TensorInfo* const values = files.find(name);
      return values != nullptr && values->stored_dtype == "F8_E4M3" ? values : nullptr;
    }
    case QuantisedFormat::mxfp4:
      return files.find(std::string(name) + "_blocks");
    case QuantisedFormat::awq:
    case QuantisedFormat::gptq: {
      const std::string layer = layer_of(name);
      return layer.empty() ? nullptr : files.find(layer + ".qweight");
    }
  }
  return nullptr;
}

std::unique_ptr<StoredTensor> QuantisedStore::at(std::string_view name, const Shape& shape) const {
  const TensorInfo* const first = quantised(name);
  if (first == nullptr) return m_plain.at(name, shape);
  const bool has_matrices = m_config.format == QuantisedFormat::mxfp4 ||
                            (m_config.format == QuantisedFormat::fp8 && m_config.block_rows != 0);
  if (shape.size() < 2 || (shape.size() > 2 && !has_matrices)) {
    fail_part(*first, "plain values of shape " + text_of(shape), "quantised ones");
  }
  const SafetensorsFolder& files = m_plain.files();
  switch (m_config.format) {
    case QuantisedFormat::fp8:
      return std::make_unique<Fp8Tensor>(files, *first, shape, m_config);
    case QuantisedFormat::mxfp4:
      return std::make_unique<Mxfp4Tensor>(
          files, *first, std::string(name), shape,
          [this](const TensorInfo& scales) { return scales_are_numbers(scales); });
    case QuantisedFormat::awq:
      return std::make_unique<AwqTensor>(files, *first, layer_of(name), shape, m_config);
    case QuantisedFormat::gptq:
      return std::make_unique<GptqTensor>(files, *first, layer_of(name), shape, m_config);
  }
  throw Error("unknown format of quantised weights");
}

bool QuantisedStore::scales_are_numbers(const TensorInfo& scales) const {
  const std::lock_guard<std::mutex> lock(m_mutex);
  const auto [entry, is_new] = m_are_numbers.emplace(scales.data, false);
  if (is_new) {
    const std::byte* const end = scales.data + scales.bytes;
    entry->second = std::find(scales.data, end, std::byte{255}) == end;
  }
  return entry->second;
}

bool QuantisedStore::has(std::string_view name) const {
  return m_plain.has(name) || quantised(name) != nullptr;
}

}  // namespace kvzap::model
