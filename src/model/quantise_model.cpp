#include "model/quantise_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <kvzap/core/types.hpp>
#include <limits>

#include "base/host_threads.hpp"
#include "gguf/block_encoders.hpp"
#include "gguf/gguf_writer.hpp"
#include "model/convert_model.hpp"
#include "model/gguf_source.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

// Values of a piece, which threads share, and of a part, the work of one thread at a time.
constexpr std::int64_t encoded_piece = std::int64_t{1} << 20;
constexpr std::int64_t encoded_part = std::int64_t{1} << 14;

/// Sums over the values of one part, and its first value that the type cannot hold.
struct PartSums {
  double squares = 0;
  double errors = 0;
  std::int64_t bad_row = -1;
  float bad_value = 0;
};

/// One tensor on its way to the file.
class TensorEncoder {
 public:
  TensorEncoder(const SourceTensor& tensor, const gguf::BlockFormat& format, bool is_quantised)
      : m_tensor(tensor),
        m_format(format),
        m_is_quantised(is_quantised),
        m_row_bytes(tensor.columns() / format.values * format.bytes) {}

  /// Writes all blocks and calls `advance` with the values of each piece.
  template <class Advance>
  void write(const gguf::GgufWriter::Sink& sink, const Advance& advance) {
    const std::int64_t rows = m_tensor.rows(), columns = m_tensor.columns();
    const std::int64_t step = std::max<std::int64_t>(1, encoded_piece / columns);
    for (std::int64_t first = 0; first < rows; first += step) {
      const std::int64_t end = std::min(rows, first + step);
      m_blocks.resize(static_cast<std::size_t>((end - first) * m_row_bytes));
      encode_piece(first, end);
      sink(m_blocks.data(), m_blocks.size());
      advance((end - first) * columns);
    }
    m_tensor.release();
  }

  double relative_error() const {
    return m_sums.squares > 0 ? std::sqrt(m_sums.errors / m_sums.squares) : 0;
  }

 private:
  void encode_piece(std::int64_t first, std::int64_t end) {
    const std::int64_t step = std::max<std::int64_t>(1, encoded_part / m_tensor.columns());
    const std::int64_t parts = (end - first + step - 1) / step;
    std::vector<PartSums> sums(static_cast<std::size_t>(parts));
    base::for_each_on_threads(parts, [&](std::int64_t part) {
      const std::int64_t begin = first + part * step;
      sums[static_cast<std::size_t>(part)] = encode_part(
          begin, std::min(end, begin + step), m_blocks.data() + (begin - first) * m_row_bytes);
    });
    // In the order of the parts: the same sums for every number of threads.
    for (const PartSums& part : sums) {
      if (part.bad_row >= 0) fail(part);
      m_sums.squares += part.squares;
      m_sums.errors += part.errors;
    }
  }

  PartSums encode_part(std::int64_t begin, std::int64_t end, std::byte* blocks) const {
    const std::int64_t count = (end - begin) * m_tensor.columns();
    std::vector<float> values(static_cast<std::size_t>(count));
    m_tensor.read(begin, end, values.data());
    PartSums sums;
    if (m_is_quantised && has_bad_value(values, begin, sums)) return sums;
    const std::int64_t n_blocks = count / m_format.values;
    if (m_tensor.format == &m_format) {
      std::copy_n(m_tensor.blocks + begin * m_row_bytes, (end - begin) * m_row_bytes, blocks);
    } else {
      m_format.encode(values.data(), n_blocks, blocks);
    }
    std::vector<float> decoded(values.size());
    m_format.decode(blocks, n_blocks, decoded.data());
    double squares = 0, errors = 0;
#pragma omp simd reduction(+ : squares, errors)
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = values[i], error = value - decoded[i];
      squares += value * value;
      errors += error * error;
    }
    sums.squares = squares;
    sums.errors = errors;
    return sums;
  }

  float largest() const {
    return m_format.values > 1 ? gguf::largest_encodable : std::numeric_limits<float>::max();
  }

  bool has_bad_value(const std::vector<float>& values, std::int64_t first_row,
                     PartSums& sums) const {
    const float most = largest();
    int bad = 0;
#pragma omp simd reduction(| : bad)
    for (std::size_t i = 0; i < values.size(); ++i) bad |= std::fabs(values[i]) <= most ? 0 : 1;
    if (bad == 0) return false;
    const auto found = std::find_if(values.begin(), values.end(),
                                    [&](float value) { return !(std::fabs(value) <= most); });
    sums.bad_row = first_row + (found - values.begin()) / m_tensor.columns();
    sums.bad_value = *found;
    return true;
  }

  [[noreturn]] void fail(const PartSums& part) const {
    const std::string bound =
        m_format.values > 1 ? fmt::format(" of at most {} in magnitude", largest()) : "";
    throw Error(fmt::format("{}: row {}: expected finite weights{}, found {}", m_tensor.where,
                            part.bad_row, bound, part.bad_value));
  }

  const SourceTensor& m_tensor;
  const gguf::BlockFormat& m_format;
  bool m_is_quantised;
  std::int64_t m_row_bytes;
  std::vector<std::byte> m_blocks;
  PartSums m_sums;
};

}  // namespace

QuantiseReport quantise_model(const fs::path& model, const fs::path& file,
                              const gguf::TypeMixture& mixture, const QuantiseProgress& progress) {
  refuse_existing(file);
  const GgufSource source = open_gguf_source(model);
  const bool is_quantised = gguf::find_block_format(mixture.main_type)->values > 1;
  gguf::GgufWriter writer;
  source.add_metadata(mixture.file_type, writer);
  constexpr std::uint32_t quantization_version = 2;  // of the layouts of blocks
  if (is_quantised) writer.add_u32("general.quantization_version", quantization_version);
  QuantiseReport report;
  report.bytes_before = source.file_bytes;
  report.warnings = writer.warnings();
  std::vector<const gguf::BlockFormat*> formats;
  std::int64_t total = 0;
  for (const SourceTensor& tensor : source.tensors) {
    const gguf::BlockFormat& format = *gguf::find_block_format(
        gguf::tensor_type(mixture, {tensor.name, source.n_layers, tensor.shape, source.is_tied,
                                    source.heads_per_group, source.n_experts}));
    formats.push_back(&format);
    writer.add_tensor(tensor.name, tensor.shape, format);
    WrittenTensor written{tensor.name, format.name};
    written.values = tensor.rows() * tensor.columns();
    written.bytes = written.values / format.values * format.bytes;
    written.has_blocks = format.values > 1;
    total += written.values;
    report.tensors.push_back(std::move(written));
  }
  std::int64_t done = 0;
  writer.write(file, [&](std::size_t index, const gguf::GgufWriter::Sink& sink) {
    TensorEncoder encoder(source.tensors[index], *formats[index], is_quantised);
    encoder.write(sink, [&](std::int64_t values) {
      done += values;
      if (progress) progress(done, total);
    });
    report.tensors[index].relative_error = encoder.relative_error();
  });
  report.bytes_after = fs::file_size(file);
  return report;
}

}  // namespace kvzap::model
