#include "model/weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/host_threads.hpp"
#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "base/value_types.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::model {
namespace {

// splitmix64's finalizer: a cheap hash whose output bits are all usable.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

// The sum of four uniform 16-bit numbers is close enough to a normal one for weights.
float random_weight(std::uint64_t key, std::uint64_t index) {
  const std::uint64_t bits = mix(key ^ index);
  const int sum = static_cast<int>(bits & 0xffff) + static_cast<int>((bits >> 16) & 0xffff) +
                  static_cast<int>((bits >> 32) & 0xffff) + static_cast<int>(bits >> 48);
  constexpr float standard_deviation = 37837.0f;  // sqrt(4 / 12) * 65536
  return static_cast<float>(sum - 2 * 65535) * (0.02f / standard_deviation);
}

/// Rounds `count` values of `tensor`. Throws Error if a finite value overflows Value.
template <class Value>
void narrow(const float* source, Value* target, std::int64_t count, const StoredTensor& tensor) {
  linalg::narrow(source, target, count);
  if constexpr (std::is_same_v<Value, half>) {
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
}

template <class Stored, class Value>
void convert(const std::byte* source, Value* target, std::int64_t count,
             std::vector<Stored>& buffer, std::vector<float>& wide, const StoredTensor& tensor) {
  if constexpr (std::is_same_v<Stored, Value>) {
    std::memcpy(target, source, count * sizeof(Value));
  } else {
    // The file format guarantees no alignment.
    buffer.resize(count);
    std::memcpy(buffer.data(), source, count * sizeof(Stored));
    wide.resize(count);
    linalg::widen(buffer.data(), wide.data(), count);
    narrow(wide.data(), target, count, tensor);
  }
}

/// Reads `count` values of a plain tensor.
template <class Value>
void read_plain(const StoredTensor& tensor, const PlainValues& values, std::int64_t first,
                std::int64_t count, Value* target) {
  thread_local std::vector<float> buffer_f32, wide;
  thread_local std::vector<half> buffer_f16;
  thread_local std::vector<bfloat16> buffer_bf16;
  const std::byte* source = values.data + first * size_of(values.dtype);
  switch (values.dtype) {
    case DType::f32:
      return convert(source, target, count, buffer_f32, wide, tensor);
    case DType::f16:
      return convert(source, target, count, buffer_f16, wide, tensor);
    case DType::bf16:
      return convert(source, target, count, buffer_bf16, wide, tensor);
  }
}

/// Widens the columns `column_ranges` of rows row_begin … row_end - 1 and rounds them to Value.
template <class Value>
void read_widened(const StoredTensor& tensor, std::int64_t row_begin, std::int64_t row_end,
                  const Ranges& column_ranges, Value* target) {
  thread_local std::vector<float> wide;
  const std::int64_t inputs = total(column_ranges);
  for (const auto& [begin, end] : column_ranges) {
    const std::int64_t width = end - begin;
    wide.resize((row_end - row_begin) * width);
    tensor.read(row_begin, row_end, begin, end, wide.data());
    for (std::int64_t row = 0; row < row_end - row_begin; ++row) {
      narrow(wide.data() + row * width, target + row * inputs, width, tensor);
    }
    target += width;
  }
}

template <class View>
View allocate(const std::string& name, std::int64_t rows, std::int64_t columns) {
  try {
    View view(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::" + name), rows,
              columns);
    if constexpr (base::runs_on_host) {
      base::advise_huge_pages(view.data(), view.size() * sizeof(typename View::value_type));
    }
    return view;
  } catch (const std::exception&) {
    throw Error(fmt::format("out of memory: no room for {} ({} x {} values of {} bytes)", name,
                            rows, columns, sizeof(typename View::value_type)));
  }
}

}  // namespace

template <class Value>
void WeightSource::read_rows(const StoredTensor* tensor, std::uint64_t key, std::int64_t columns,
                             std::int64_t row_begin, std::int64_t row_end,
                             const Ranges& column_ranges, Value* target) const {
  const auto plain = tensor ? tensor->plain() : std::nullopt;
  if (tensor && !plain) return read_widened(*tensor, row_begin, row_end, column_ranges, target);
  const bool whole_rows = column_ranges.size() == 1 && total(column_ranges) == columns;
  if (plain && whole_rows) {
    const std::int64_t count = (row_end - row_begin) * columns;
    return read_plain(*tensor, *plain, row_begin * columns, count, target);
  }
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (const auto& [begin, end] : column_ranges) {
      if (plain) {
        read_plain(*tensor, *plain, row * columns + begin, end - begin, target);
      } else {
        for (std::int64_t i = begin; i < end; ++i) {
          target[i - begin] = Value(random_weight(key, row * columns + i));
        }
      }
      target += end - begin;
    }
  }
}

namespace {

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

}  // namespace

template <class Value>
Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> WeightSource::matrix(
    const std::vector<TensorRows>& parts, std::int64_t columns, const Ranges& column_ranges) const {
  using View = Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>;
  View view = allocate<View>(names_of(parts), total(parts), total(column_ranges));
  auto host = Kokkos::create_mirror_view(view);
  Value* const target = host.data();
  const std::int64_t inputs = total(column_ranges);
  constexpr std::int64_t at_once = 64;
  const std::vector<RowRun> runs = runs_of(parts, columns);
  for (const RowRun& run : runs) {
    const std::int64_t rows = run.end - run.begin;
    base::for_each_on_threads((rows + at_once - 1) / at_once, [&](std::int64_t i) {
      const std::int64_t begin = i * at_once;
      read_rows(run.tensor.get(), run.key, columns, run.begin + begin,
                run.begin + std::min(rows, begin + at_once), column_ranges,
                target + (run.first + begin) * inputs);
    });
  }
  release(runs);
  Kokkos::deep_copy(view, host);
  return view;
}

std::vector<WeightSource::RowRun> WeightSource::runs_of(const std::vector<TensorRows>& parts,
                                                        std::int64_t columns) const {
  std::vector<RowRun> runs;
  std::int64_t first = 0;
  for (const TensorRows& part : parts) {
    std::shared_ptr<const StoredTensor> tensor;
    if (m_store) tensor = m_store->at(part.name, {part.extent, columns});
    const std::uint64_t key = mix(m_seed) ^ hash_of(part.name);
    for (const auto& [begin, end] : part.ranges) {
      runs.push_back({tensor, key, begin, end, first});
      first += end - begin;
    }
  }
  return runs;
}

void WeightSource::release(const std::vector<RowRun>& runs) const {
  const StoredTensor* before = nullptr;
  for (const RowRun& run : runs) {
    if (run.tensor && run.tensor.get() != before) run.tensor->release();
    before = run.tensor.get();
  }
}

template <class Value>
linalg::LinearWeights<Value> WeightSource::linear(const std::vector<TensorRows>& parts,
                                                  std::int64_t columns,
                                                  const Ranges& column_ranges) const {
  const std::int64_t outputs = total(parts);
  const std::int64_t inputs = total(column_ranges);
  if (!linalg::packs_weights<Value>() || outputs <= linalg::few_outputs || inputs == 0) {
    return linalg::LinearWeights<Value>(matrix<Value>(parts, columns, column_ranges));
  }
  auto weights = std::get<linalg::PackedAllocator<Value>>(m_allocators)(outputs, inputs);
  // Rows pass through a buffer of one block, which stays in cache. The thread that packs a block is
  // the one that later multiplies by it (few rows of x), so the block lies near its memory.
  constexpr std::int64_t block = linalg::LinearWeights<Value>::block_outputs;
  const std::vector<RowRun> runs = runs_of(parts, columns);
  const auto pack = [&](std::int64_t i) {
    thread_local std::vector<Value> buffer;
    buffer.resize(block * inputs);
    const std::int64_t first = i * block;
    const std::int64_t last = std::min(outputs, first + block);
    for (const RowRun& run : runs) {
      const std::int64_t begin = std::max(first, run.first);
      const std::int64_t end = std::min(last, run.first + run.end - run.begin);
      if (begin >= end) continue;
      const std::int64_t row = run.begin + begin - run.first;
      read_rows(run.tensor.get(), run.key, columns, row, row + end - begin, column_ranges,
                buffer.data() + (begin - first) * inputs);
    }
    linalg::pack_rows(buffer.data(), first, last - first, weights);
  };
  base::for_each_on_threads((outputs + block - 1) / block, pack);
  release(runs);
  return weights;
}

Kokkos::View<float*, MemorySpace> WeightSource::vector(const std::vector<TensorRows>& parts,
                                                       float random_value) const {
  Kokkos::View<float*, MemorySpace> view(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::" + names_of(parts)),
      total(parts));
  auto host = Kokkos::create_mirror_view(view);
  float* target = host.data();
  for (const TensorRows& part : parts) {
    const auto tensor = m_store ? m_store->at(part.name, {part.extent}) : nullptr;
    for (const auto& [begin, end] : part.ranges) {
      if (tensor) {
        tensor->read(0, 1, begin, end, target);
      } else {
        std::fill_n(target, end - begin, random_value);
      }
      target += end - begin;
    }
  }
  Kokkos::deep_copy(view, host);
  return view;
}

// Value is a type. NOLINTBEGIN(bugprone-macro-parentheses)
#define KVZAP_WEIGHTS(Value)                                                                     \
  template linalg::LinearWeights<Value> WeightSource::linear(const std::vector<TensorRows>&,     \
                                                             std::int64_t, const Ranges&) const; \
  template Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> WeightSource::matrix<Value>(  \
      const std::vector<TensorRows>&, std::int64_t, const Ranges&) const;
// NOLINTEND(bugprone-macro-parentheses)
KVZAP_FOR_EACH_VALUE(KVZAP_WEIGHTS)
#undef KVZAP_WEIGHTS

}  // namespace kvzap::model
