// Rows of a head read by a thread of the host, in order of position. No Kokkos kernel, so that any
// thread may.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cache/cache_impl.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::detail {

/// target[i] = Element(source[i]), rounded once; the same bits if the types are the same.
template <class Value, class Element>
void convert_elements(const Value* source, Element* target, std::int64_t count) {
  if constexpr (std::is_same_v<Value, Element>) {
    std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(Value));
  } else if constexpr (std::is_same_v<Element, float>) {
    widen(source, target, count);
  } else if constexpr (std::is_same_v<Value, float>) {
    narrow(source, target, count);
  } else {
    constexpr std::int64_t piece = 512;
    float wide[piece];
    for (std::int64_t i = 0; i < count; i += piece) {
      const std::int64_t n = std::min(piece, count - i);
      widen(source + i, wide, n);
      narrow(wide, target + i, n);
    }
  }
}

template <class Value, PageOrder order>
class RawReader {
 public:
  using Raw = typename KVCache<Value, order>::RawRows;
  /// `raw` outlives the reader.
  explicit RawReader(const Raw& raw) : m_raw(raw) {}

  /// Of rows begin … begin + count - 1.
  template <class Integer>
  void positions(std::int64_t begin, std::int64_t count, Integer* target) const {
    each_run(begin, count, [&](const Run& run) {
      const std::int32_t* const held =
          run.page ? page_positions<Value>(reinterpret_cast<std::uintptr_t>(run.page),
                                           m_raw.page_rows, m_raw.dim)
                   : nullptr;
      for (std::int64_t i = 0; i < run.rows; ++i) {
        *target++ = static_cast<Integer>(held ? held[run.slot + i] : run.position + i);
      }
    });
  }
  void scores(std::int64_t begin, std::int64_t count, float* target) const {
    each_run(begin, count, [&](const Run& run) {
      const float* const held = run.page
                                    ? page_scores<Value>(reinterpret_cast<std::uintptr_t>(run.page),
                                                         m_raw.page_rows, m_raw.dim)
                                    : m_raw.ring_scores;
      target = std::copy_n(held + run.slot, run.rows, target);
    });
  }
  /// Keys, or values: (row, dim), rounded to Element.
  template <class Element>
  void elements(bool values, std::int64_t begin, std::int64_t count, Element* target) const {
    each_run(begin, count, [&](const Run& run) {
      const int capacity = run.page ? m_raw.page_rows : m_raw.window;
      const Block<order> block{capacity, m_raw.dim};
      const Value* const base = (run.page ? reinterpret_cast<const Value*>(run.page) : m_raw.ring) +
                                (values ? block.values_offset() : std::int64_t{0}) +
                                block.row_offset(run.slot);
      if constexpr (order == PageOrder::token_major) {
        convert_elements(base, target, run.rows * m_raw.dim);
      } else {
        transpose(base, capacity, run.rows, target);
      }
      target += run.rows * m_raw.dim;
    });
  }

 private:
  // Rows that lie one behind the other, in a page or (without one) in the ring.
  struct Run {
    const char* page;
    std::int64_t slot, rows, position;
  };

  template <class Work>
  void each_run(std::int64_t begin, std::int64_t count, const Work& work) const {
    for (std::int64_t row = begin; row < begin + count;) {
      Run run{nullptr, 0, begin + count - row, 0};
      if (row < m_raw.retained) {
        run.page = m_raw.pages[row / m_raw.page_rows];
        run.slot = row % m_raw.page_rows;
        run.rows =
            std::min({run.rows, m_raw.page_rows - run.slot, std::int64_t{m_raw.retained - row}});
      } else {
        run.position = m_raw.tokens - m_raw.ring_rows + row - m_raw.retained;
        run.slot = (run.position - m_raw.ring_first) % m_raw.window;
        run.rows = std::min(run.rows, m_raw.window - run.slot);
      }
      work(run);
      row += run.rows;
    }
  }

  // A dimension's rows are neighbours: few rows at a time, so that their part of the target stays
  // in the nearest cache.
  template <class Element>
  void transpose(const Value* source, int capacity, std::int64_t rows, Element* target) const {
    constexpr std::int64_t block = 32;
    const std::int64_t dim = m_raw.dim;
    Element converted[block];
    for (std::int64_t r = 0; r < rows; r += block) {
      const std::int64_t n = std::min(block, rows - r);
      for (std::int64_t d = 0; d < dim; ++d) {
        convert_elements(source + d * capacity + r, converted, n);
        for (std::int64_t i = 0; i < n; ++i) target[(r + i) * dim + d] = converted[i];
      }
    }
  }

  const Raw& m_raw;
};

}  // namespace kvzap::detail
