#include "model/weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <kvzap/core/array_view.hpp>
#include <numeric>

#include "base/host_threads.hpp"
#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "linalg/device/float8.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::model {
namespace {

/// Rounds `count` values of `tensor` to `dtype`. Throws Error if a finite value overflows.
void narrow(const float* source, DType dtype, std::byte* target, std::int64_t count,
            const StoredTensor& tensor) {
  with_value_type(dtype, [&](auto zero) {
    linalg::narrow(source, reinterpret_cast<decltype(zero)*>(target), count);
  });
  if (dtype != DType::f16) return;
  int is_large = 0;  // without branches, so that the loop vectorizes
  for (std::int64_t i = 0; i < count; ++i) {
    is_large |= static_cast<int>(std::fabs(source[i]) >= 65520.0f);
  }
  for (std::int64_t i = 0; is_large != 0 && i < count; ++i) {
    if (std::fabs(source[i]) >= 65520.0f && std::isfinite(source[i])) {
      throw Error(fmt::format("{}: {} overflows f16 (largest 65504); use dtype bf16 or f32",
                              tensor.description(), source[i]));
    }
  }
}

/// Widens values of `dtype`. The file format guarantees no alignment.
void widen(const std::byte* source, DType dtype, float* target, std::int64_t count) {
  with_value_type(dtype, [&](auto zero) {
    using Stored = decltype(zero);
    thread_local std::vector<Stored> aligned;
    aligned.resize(count);
    std::memcpy(aligned.data(), source, count * sizeof(Stored));
    linalg::widen(aligned.data(), target, count);
  });
}

/// Reads `count` values of a plain tensor.
void read_plain(const StoredTensor& tensor, const PlainValues& values, std::int64_t first,
                std::int64_t count, DType dtype, std::byte* target) {
  const std::byte* source = values.data + first * size_of(values.dtype);
  if (values.dtype == dtype) {
    std::memcpy(target, source, count * size_of(dtype));
    return;
  }
  thread_local std::vector<float> wide;
  wide.resize(count);
  widen(source, values.dtype, wide.data(), count);
  narrow(wide.data(), dtype, target, count, tensor);
}

/// Widens the columns `column_ranges` of rows row_begin … row_end - 1 and rounds them to `dtype`.
void read_widened(const StoredTensor& tensor, std::int64_t row_begin, std::int64_t row_end,
                  const Ranges& column_ranges, DType dtype, std::byte* target) {
  thread_local std::vector<float> wide;
  const std::size_t bytes = size_of(dtype);
  const std::int64_t inputs = total(column_ranges);
  for (const auto& [begin, end] : column_ranges) {
    const std::int64_t width = end - begin;
    wide.resize((row_end - row_begin) * width);
    tensor.read(row_begin, row_end, begin, end, wide.data());
    for (std::int64_t row = 0; row < row_end - row_begin; ++row) {
      narrow(wide.data() + row * width, dtype, target + row * inputs * bytes, width, tensor);
    }
    target += width * bytes;
  }
}

/// Fills `target` with the columns `column_ranges` of rows row_begin … row_end - 1.
void read_rows(const StoredTensor& tensor, std::int64_t columns, std::int64_t row_begin,
               std::int64_t row_end, const Ranges& column_ranges, DType dtype, std::byte* target) {
  const auto plain = tensor.plain();
  if (!plain) return read_widened(tensor, row_begin, row_end, column_ranges, dtype, target);
  if (column_ranges.size() == 1 && total(column_ranges) == columns) {
    const std::int64_t count = (row_end - row_begin) * columns;
    return read_plain(tensor, *plain, row_begin * columns, count, dtype, target);
  }
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (const auto& [begin, end] : column_ranges) {
      read_plain(tensor, *plain, row * columns + begin, end - begin, dtype, target);
      target += (end - begin) * size_of(dtype);
    }
  }
}

linalg::Bytes allocate(const std::string& name, std::int64_t rows, std::int64_t columns,
                       std::size_t value_bytes) {
  try {
    linalg::Bytes bytes(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::" + name),
        static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * value_bytes);
    if constexpr (base::runs_on_host) base::advise_huge_pages(bytes.data(), bytes.size());
    return bytes;
  } catch (const std::exception&) {
    throw Error(fmt::format("out of memory: no room for {} ({} x {} values of {} bytes)", name,
                            rows, columns, value_bytes));
  }
}

/// Returns the common name of the tensors, for messages.
std::string names_of(const std::vector<TensorRows>& parts) {
  std::string names;
  for (const TensorRows& part : parts) names += (names.empty() ? "" : " + ") + part.name;
  return names;
}

std::int64_t total(const std::vector<TensorRows>& parts) {
  std::int64_t sum = 0;
  for (const TensorRows& part : parts) sum += model::total(part.ranges);
  return sum;
}

/// Columns in the order of their groups.
struct GroupedColumns {
  InputOrder order;                  // each group padded to whole blocks
  std::vector<std::int32_t> places;  // there, of the columns in their own order
};

GroupedColumns by_groups(const std::vector<std::int32_t>& groups, const Ranges& ranges) {
  constexpr std::size_t block = linalg::quantised::group_inputs;
  std::vector<std::int32_t> columns;
  for (const auto& [begin, end] : ranges) {
    for (std::int64_t c = begin; c < end; ++c) columns.push_back(static_cast<std::int32_t>(c));
  }
  std::vector<std::size_t> sorted(columns.size());
  std::iota(sorted.begin(), sorted.end(), std::size_t{0});
  const auto group_of = [&](std::size_t i) { return groups[columns[i]]; };
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](std::size_t a, std::size_t b) { return group_of(a) < group_of(b); });
  GroupedColumns grouped;
  grouped.places.resize(columns.size());
  const auto pad = [&] {
    grouped.order.resize((grouped.order.size() + block - 1) / block * block, -1);
  };
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (i > 0 && group_of(sorted[i]) != group_of(sorted[i - 1])) pad();
    grouped.places[sorted[i]] = static_cast<std::int32_t>(grouped.order.size());
    grouped.order.push_back(columns[sorted[i]]);
  }
  pad();
  return grouped;
}

/// Whether both are null or equal.
bool are_same_groups(const std::vector<std::int32_t>* a, const std::vector<std::int32_t>* b) {
  return a == b || (a != nullptr && b != nullptr && *a == *b);
}

}  // namespace

linalg::LinearWeights WeightSource::rows(const std::vector<TensorRows>& parts, std::int64_t columns,
                                         const Ranges& column_ranges, DType dtype) const {
  const std::int64_t outputs = total(parts);
  const std::int64_t inputs = total(column_ranges);
  const std::size_t value_bytes = size_of(dtype);
  if (plans(outputs, inputs, static_cast<std::int64_t>(value_bytes))) {
    for (const TensorRows& part : parts) open(part, columns);  // or its error
    return {};
  }
  const linalg::Bytes bytes = allocate(names_of(parts), outputs, inputs, value_bytes);
  const auto host = Kokkos::create_mirror_view(bytes);
  auto* const target = reinterpret_cast<std::byte*>(host.data());
  constexpr std::int64_t at_once = 64;
  const std::vector<RowRun> runs = runs_of(parts, columns);
  for (const RowRun& run : runs) {
    const std::int64_t rows = run.end - run.begin;
    base::for_each_on_threads((rows + at_once - 1) / at_once, [&](std::int64_t i) {
      const std::int64_t begin = i * at_once;
      read_rows(*run.tensor, columns, run.begin + begin,
                run.begin + std::min(rows, begin + at_once), column_ranges, dtype,
                target + (run.first + begin) * inputs * value_bytes);
    });
  }
  release(runs);
  Kokkos::deep_copy(bytes, host);
  return {linalg::WeightLayout::rows, dtype, outputs, inputs, bytes};
}

Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> WeightSource::matrix(
    const std::vector<TensorRows>& parts, std::int64_t columns, const Ranges& column_ranges) const {
  const linalg::LinearWeights weights = rows(parts, columns, column_ranges, DType::f32);
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> copy(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::matrix"), weights.outputs(),
      weights.inputs());
  Kokkos::deep_copy(copy, weights.rows<float>());
  return copy;
}

bool WeightSource::plans(std::int64_t rows, std::int64_t columns, std::int64_t bytes) const {
  if (!m_plans) return false;
  if (__builtin_mul_overflow(bytes, rows, &bytes) ||
      __builtin_mul_overflow(bytes, columns, &bytes) ||
      __builtin_add_overflow(m_planned, bytes, &m_planned)) {
    throw Error("weights: expected numbers of bytes below 2^63, found a larger one");
  }
  return true;
}

std::unique_ptr<StoredTensor> WeightSource::open(const TensorRows& part,
                                                 std::int64_t columns) const {
  if (part.padding) {
    const HeadPadding padding = *part.padding;
    TensorRows stored{part.name, part.extent, {}};
    std::int64_t& padded = padding.of_columns ? columns : stored.extent;
    const std::int64_t all = columns;
    padded = padded / padding.padded * padding.stored;
    return pad_heads(open(stored, columns), padding, all);
  }
  if (part.slice) return m_store.slice(part.name, *part.slice, part.extent, columns);
  if (part.is_scalar) return m_store.at(part.name, {});
  if (part.is_column) return m_store.at(part.name, {1, 1, part.extent, 1});
  if (part.is_convolution) return m_store.at(part.name, {part.extent, 1, columns});
  if (columns == 0) return m_store.at(part.name, {part.extent});
  return m_store.at(part.name, {part.extent, columns});
}

std::vector<WeightSource::RowRun> WeightSource::runs_of(const std::vector<TensorRows>& parts,
                                                        std::int64_t columns) const {
  std::vector<RowRun> runs;
  std::int64_t first = 0;
  for (const TensorRows& part : parts) {
    const std::shared_ptr<const StoredTensor> tensor = open(part, columns);
    for (const auto& [begin, end] : part.ranges) {
      runs.push_back({tensor, begin, end, first});
      first += end - begin;
    }
  }
  return runs;
}

void WeightSource::release(const std::vector<RowRun>& runs) const {
  const StoredTensor* before = nullptr;
  for (const RowRun& run : runs) {
    if (run.tensor.get() != before) run.tensor->release();
    before = run.tensor.get();
  }
}

std::shared_ptr<const linalg::quantised::Matrix> WeightSource::quantised(
    const std::vector<TensorRows>& parts, std::int64_t columns, const Ranges& column_ranges) const {
  namespace quantised = linalg::quantised;
  if (m_storage == WeightStorage::unpacked) return nullptr;
  const std::vector<RowRun> runs = runs_of(parts, columns);
  std::vector<quantised::Matrix::Part> formats;
  const std::vector<std::int32_t>* const groups =
      runs.empty() ? nullptr : runs.front().tensor->input_groups();
  for (const RowRun& run : runs) {
    if (!are_same_groups(run.tensor->input_groups(), groups)) return nullptr;
    const quantised::Format* const format = quantised::find_format(run.tensor->block_format());
    if (format == nullptr) return nullptr;
    const auto* const before = formats.empty() ? format : formats.front().format;
    if (quantised::is_float(before->codes) != quantised::is_float(format->codes)) return nullptr;
    if (formats.empty() || formats.back().format != format) formats.push_back({format, 0});
    formats.back().outputs += run.end - run.begin;
  }
  const GroupedColumns grouped = groups ? by_groups(*groups, column_ranges) : GroupedColumns();
  // Where many ranks share the columns, a rank has few of each group.
  constexpr std::size_t most_padding = 2;
  if (grouped.order.size() > most_padding * grouped.places.size()) return nullptr;
  const auto matrix =
      groups ? std::make_shared<quantised::Matrix>(formats, grouped.places,
                                                   static_cast<std::int64_t>(grouped.order.size()))
             : std::make_shared<quantised::Matrix>(formats, column_ranges);
  if (matrix->bytes() == 0) return nullptr;
  if (plans(1, matrix->bytes(), 1)) return matrix;
  const auto view = m_allocator(matrix->bytes(), 1);
  auto host = Kokkos::create_mirror_view(view);
  matrix->place(view);
  // The thread that packs a panel is the one that later multiplies by it.
  base::for_each_on_threads(matrix->n_panels(), [&](std::int64_t i) {
    thread_local std::array<std::vector<std::byte>, quantised::panel_outputs> buffers;
    std::array<const std::byte*, quantised::panel_outputs> rows = {};
    const auto [section, panel] = matrix->panel(i);
    const std::int64_t first = section->first + panel * quantised::panel_outputs;
    const std::int64_t last =
        std::min(section->first + section->outputs, first + quantised::panel_outputs);
    for (const RowRun& run : runs) {
      const std::int64_t begin = std::max(first, run.first);
      const std::int64_t end = std::min(last, run.first + run.end - run.begin);
      for (std::int64_t output = begin; output < end; ++output) {
        const std::int64_t row = run.begin + output - run.first;
        std::vector<std::byte>& buffer = buffers[output - first];
        rows[output - first] = groups ? run.tensor->ordered_blocks(row, grouped.order, buffer)
                                      : run.tensor->row_blocks(row, buffer);
      }
    }
    matrix->pack(i, rows.data(), host.data());
  });
  release(runs);
  if (linalg::wants_float8()) matrix->find_scales(host.data());
  Kokkos::deep_copy(view, host);
  return matrix;
}

linalg::LinearWeights WeightSource::table(const std::vector<TensorRows>& parts,
                                          std::int64_t columns, const Ranges& column_ranges) const {
  if (auto blocks = quantised(parts, columns, column_ranges)) return {m_dtype, std::move(blocks)};
  return rows(parts, columns, column_ranges, m_dtype);
}

linalg::LinearWeights WeightSource::linear(const std::vector<TensorRows>& parts,
                                           std::int64_t columns,
                                           const Ranges& column_ranges) const {
  const std::int64_t outputs = total(parts);
  const std::int64_t inputs = total(column_ranges);
  if (m_plans || !linalg::packs_weights() || outputs <= linalg::few_outputs || inputs == 0) {
    return table(parts, columns, column_ranges);
  }
  if (auto blocks = quantised(parts, columns, column_ranges)) return {m_dtype, std::move(blocks)};
  const auto weights = linalg::packed_weights(m_allocator, m_dtype, outputs, inputs);
  // Rows pass through a buffer of one block, which stays in cache. The thread that packs a block is
  // the one that later multiplies by it (few rows of x), so the block lies near its memory.
  constexpr std::int64_t block = linalg::LinearWeights::block_outputs;
  const std::size_t row_bytes = inputs * size_of(m_dtype);
  const std::vector<RowRun> runs = runs_of(parts, columns);
  const auto pack = [&](std::int64_t i) {
    thread_local std::vector<std::byte> buffer;  // its memory is aligned for any type
    buffer.resize(block * row_bytes);
    const std::int64_t first = i * block;
    const std::int64_t last = std::min(outputs, first + block);
    for (const RowRun& run : runs) {
      const std::int64_t begin = std::max(first, run.first);
      const std::int64_t end = std::min(last, run.first + run.end - run.begin);
      if (begin >= end) continue;
      const std::int64_t row = run.begin + begin - run.first;
      read_rows(*run.tensor, columns, row, row + end - begin, column_ranges, m_dtype,
                buffer.data() + (begin - first) * row_bytes);
    }
    linalg::pack_rows(buffer.data(), first, last - first, weights);
  };
  base::for_each_on_threads((outputs + block - 1) / block, pack);
  release(runs);
  return weights;
}

linalg::LinearWeights WeightSource::arranged(const TensorRows& part, std::int64_t columns,
                                             std::int64_t outputs, std::int64_t inputs,
                                             const Arrange& arrange) const {
  const std::size_t value_bytes = size_of(m_dtype);
  if (plans(outputs, inputs, static_cast<std::int64_t>(value_bytes))) {
    open(part, columns);  // or its error
    return {};
  }
  const std::vector<RowRun> runs = runs_of({part}, columns);
  std::vector<float> rows(static_cast<std::size_t>(model::total(part.ranges) * columns));
  std::vector<float> made(static_cast<std::size_t>(outputs * inputs));
  for (const RowRun& run : runs) {
    run.tensor->read(run.begin, run.end, 0, columns, rows.data() + run.first * columns);
  }
  arrange(rows.data(), made.data());
  std::vector<std::byte> narrowed(made.size() * value_bytes);
  narrow(made.data(), m_dtype, narrowed.data(), outputs * inputs, *runs.front().tensor);
  release(runs);
  if (linalg::packs_weights() && outputs > linalg::few_outputs) {
    const auto weights = linalg::packed_weights(m_allocator, m_dtype, outputs, inputs);
    linalg::pack_rows(narrowed.data(), 0, outputs, weights);
    return weights;
  }
  const linalg::Bytes bytes = allocate(part.name, outputs, inputs, value_bytes);
  const auto host = Kokkos::create_mirror_view(bytes);
  std::memcpy(host.data(), narrowed.data(), narrowed.size());
  Kokkos::deep_copy(bytes, host);
  return {linalg::WeightLayout::rows, m_dtype, outputs, inputs, bytes};
}

Kokkos::View<bfloat16*, MemorySpace> rounded(const Kokkos::View<float*, MemorySpace>& numbers) {
  const Kokkos::View<bfloat16*, MemorySpace> result("kvzap::weights::rounded", numbers.extent(0));
  const auto source = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), numbers);
  const auto target = Kokkos::create_mirror_view(result);
  std::transform(source.data(), source.data() + source.size(), target.data(),
                 [](float number) { return bfloat16(number); });
  Kokkos::deep_copy(result, target);
  return result;
}

Kokkos::View<float*, MemorySpace> WeightSource::vector(const std::vector<TensorRows>& parts,
                                                       float summand, float factor) const {
  if (plans(total(parts), 1, sizeof(float))) {
    for (const TensorRows& part : parts) open(part, 0);  // or its error
    return {};
  }
  Kokkos::View<float*, MemorySpace> view(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::" + names_of(parts)),
      total(parts));
  auto host = Kokkos::create_mirror_view(view);
  float* target = host.data();
  for (const TensorRows& part : parts) {
    const auto tensor = open(part, 0);
    for (const auto& [begin, end] : part.ranges) {
      if (part.slice || part.is_column) {
        tensor->read(begin, end, 0, 1, target);
      } else {
        tensor->read(0, 1, begin, end, target);
      }
      target += end - begin;
    }
  }
  if (summand != 0 || factor != 1) {
    for (float* value = host.data(); value < target; ++value) *value = factor * (*value + summand);
  }
  Kokkos::deep_copy(view, host);
  return view;
}

Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> WeightSource::sinusoids(
    std::int64_t first, std::int64_t end, std::int64_t columns) const {
  if (plans(end - first, columns, sizeof(float))) return {};
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> view(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::sinusoids"), end - first,
      columns);
  const auto host = Kokkos::create_mirror_view(view);
  const std::int64_t half = columns / 2;
  const float step = static_cast<float>(std::log(10000.0) / static_cast<double>(half - 1));
  for (std::int64_t row = first; row < end; ++row) {
    for (std::int64_t c = 0; c < half; ++c) {
      const float angle = static_cast<float>(row) * std::exp(static_cast<float>(c) * -step);
      host(row - first, c) = std::sin(angle);
      host(row - first, half + c) = std::cos(angle);
    }
  }
  Kokkos::deep_copy(view, host);
  return view;
}

Kokkos::View<float*, MemorySpace> WeightSource::ones(std::int64_t count) const {
  if (plans(count, 1, sizeof(float))) return {};
  Kokkos::View<float*, MemorySpace> view("kvzap::weights::ones", count);
  Kokkos::deep_copy(view, 1.0f);
  return view;
}

float WeightSource::value(const TensorRows& part) const {
  const auto tensor = open(part, 0);
  float value = 0;
  if (!m_plans) tensor->read(0, 1, 0, 1, &value);
  return value;
}

}  // namespace kvzap::model
