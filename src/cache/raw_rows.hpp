// Reads and writes the rows of a head in order of position, on any thread of the host. No function
// here runs a Kokkos kernel.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cache/cache_impl.hpp"
#include "cache/quantised_place.hpp"
#include "cache/row_access.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::cache {

/// Converts elements, rounding once. Equal types keep the same bits.
template <class Value, class Element>
void convert_elements(const Value* source, Element* target, std::int64_t count) {
  if constexpr (std::is_same_v<Value, Element>) {
    std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(Value));
  } else if constexpr (std::is_same_v<Element, float>) {
    linalg::widen(source, target, count);
  } else if constexpr (std::is_same_v<Value, float>) {
    linalg::narrow(source, target, count);
  } else {
    constexpr std::int64_t piece = 512;
    float wide[piece];
    for (std::int64_t i = 0; i < count; i += piece) {
      const std::int64_t n = std::min(piece, count - i);
      linalg::widen(source + i, wide, n);
      linalg::narrow(wide, target + i, n);
    }
  }
}

/// Unpacks the first `count` rows to (row, dim), rounding once.
template <class Element>
void unpack_rows(const QuantisedRows& rows, std::int64_t count, Element* target) {
  linalg::RowBuffer row(rows.dim);
  for (std::int64_t r = 0; r < count; ++r, target += rows.dim) {
    linalg::unpack_row(rows, r, row.data());
    convert_elements(row.data(), target, rows.dim);
  }
}

/// Packs rows of (row, dim).
template <class Value>
void pack_rows(RowType type, const Value* source, std::int64_t count, int dim, std::uint8_t* codes,
               bfloat16* scales) {
  linalg::RowBuffer row(dim);
  for (std::int64_t r = 0; r < count; ++r, source += dim) {
    convert_elements(source, row.data(), dim);
    linalg::pack_row(type, row.data(), dim, codes, scales + r);
    codes += QuantisedRows::code_bytes(type, dim);
  }
}

/// Consecutive rows of a head in a page, or (without a page) in the ring.
struct RawRun {
  PageAddress page;
  std::int64_t slot = 0, rows = 0, position = 0;
};

/// Calls work(run) for the runs of rows begin … begin + count - 1, in order.
template <class Work>
void each_raw_run(const RawRows& raw, std::int64_t begin, std::int64_t count, const Work& work) {
  for (std::int64_t row = begin; row < begin + count;) {
    const RowPlace place = raw.place(row, begin + count);
    work(RawRun{place.page < 0 ? PageAddress() : raw.pages[place.page], place.slot, place.rows,
                raw.tokens - raw.rows() + row});
    row += place.rows;
  }
}

/// Sets the ring extents of `raw` for a layer of a sequence with `tokens` appended tokens.
inline void set_ring_extents(RawRows& raw, const KVCache& cache, int layer, std::int64_t tokens,
                             std::int64_t ring_first) {
  const CacheShape& shape = cache.shape();
  raw.tokens = tokens;
  raw.window = shape.ring_rows(layer);
  raw.ring_rows = std::min<std::int64_t>(tokens - ring_first, raw.window);
  raw.ring_begin = tokens - ring_first - raw.ring_rows;
  raw.page_rows = shape.page_rows;
  raw.dim = shape.dim(layer);
  raw.dtype = cache.dtype();
  raw.format = shape.format;
}

/// Returns the type of keys, or values, in pages.
inline RowType row_type(const RawRows& raw, bool values) {
  return values ? raw.format.values : raw.format.keys;
}

/// Returns the place of a run's first key or value in a page with quantised rows.
inline QuantisedPlace quantised_place(const RawRows& raw, const RawRun& run, bool values) {
  return {{raw.format, raw.page_rows, raw.dim}, run.page.rows, run.slot, values};
}

/// Returns the first key or value of a run whose rows are wide. Value is the type of raw.dtype.
template <class Value>
const Value* wide_row(const RawRows& raw, const RawRun& run, bool values) {
  const Block block{run.page.rows ? raw.page_rows : raw.window, raw.dim, raw.format.vectors()};
  return reinterpret_cast<const Value*>(run.page.rows ? reinterpret_cast<const char*>(run.page.rows)
                                                      : raw.ring) +
         (values ? block.values_offset() : std::int64_t{0}) + block.row_offset(run.slot);
}

class RawReader {
 public:
  /// `raw` must outlive the reader.
  explicit RawReader(const RawRows& raw) : m_raw(raw) {}

  /// Reads rows begin … begin + count - 1, as do the next two functions.
  void positions(std::int64_t begin, std::int64_t count, std::int32_t* target) const {
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      const std::int32_t* const held = run.page.rows ? page_positions(run.page.metadata) : nullptr;
      for (std::int64_t i = 0; i < run.rows; ++i) {
        *target++ = held ? held[run.slot + i] : static_cast<std::int32_t>(run.position + i);
      }
    });
  }
  void scores(std::int64_t begin, std::int64_t count, float* target) const {
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      const float* const held =
          run.page.rows ? page_scores(run.page.metadata, m_raw.page_rows) : m_raw.ring_scores;
      target = std::copy_n(held + run.slot, run.rows, target);
    });
  }
  /// Reads the codes of keys, or of values: (row, code_bytes). Rows of the ring are quantised.
  void codes(bool values, std::int64_t begin, std::int64_t count, std::uint8_t* target) const {
    const std::int64_t bytes = code_bytes(values);
    std::vector<bfloat16> unused;
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      if (run.page.rows) {
        std::copy_n(quantised_place(m_raw, run, values).codes, run.rows * bytes, target);
      } else {
        unused.resize(static_cast<std::size_t>(run.rows));
        pack_run(run, values, target, unused.data());
      }
      target += run.rows * bytes;
    });
  }
  /// Reads the scales of such rows.
  void scales(bool values, std::int64_t begin, std::int64_t count, bfloat16* target) const {
    std::vector<std::uint8_t> unused;
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      if (run.page.rows) {
        std::copy_n(quantised_place(m_raw, run, values).scale, run.rows, target);
      } else {
        unused.resize(static_cast<std::size_t>(run.rows * code_bytes(values)));
        pack_run(run, values, unused.data(), target);
      }
      target += run.rows;
    });
  }
  /// Reads keys, or values: (row, dim), rounded to Element.
  template <class Element>
  void elements(bool values, std::int64_t begin, std::int64_t count, Element* target) const {
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      if (run.page.rows && m_raw.format.quantised()) {
        const QuantisedPlace from = quantised_place(m_raw, run, values);
        unpack_rows({from.codes, from.scale, m_raw.dim, row_type(m_raw, values)}, run.rows, target);
      } else {
        with_value_type(m_raw.dtype, [&](auto zero) {
          convert_elements(wide_row<decltype(zero)>(m_raw, run, values), target,
                           run.rows * m_raw.dim);
        });
      }
      target += run.rows * m_raw.dim;
    });
  }

 private:
  /// Packs a run of the ring.
  void pack_run(const RawRun& run, bool values, std::uint8_t* codes, bfloat16* scales) const {
    with_value_type(m_raw.dtype, [&](auto zero) {
      pack_rows(row_type(m_raw, values), wide_row<decltype(zero)>(m_raw, run, values), run.rows,
                m_raw.dim, codes, scales);
    });
  }
  std::int64_t code_bytes(bool values) const {
    return QuantisedRows::code_bytes(row_type(m_raw, values), m_raw.dim);
  }

  const RawRows& m_raw;
};

/// Writes rows that no other thread reads yet.
class RawWriter {
 public:
  /// `raw` must outlive the writer.
  explicit RawWriter(const RawRows& raw) : m_raw(raw) {}

  /// Writes rows begin … begin + count - 1, as do the next functions. Ring rows need no positions.
  void positions(std::int64_t begin, std::int64_t count, const std::int32_t* source) const {
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      if (run.page.rows) {
        std::copy_n(source, run.rows, page_positions(run.page.metadata) + run.slot);
      }
      source += run.rows;
    });
  }
  void scores(std::int64_t begin, std::int64_t count, const float* source) const {
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      float* const target = run.page.rows ? page_scores(run.page.metadata, m_raw.page_rows)
                                          : const_cast<float*>(m_raw.ring_scores);
      std::copy_n(source, run.rows, target + run.slot);
      source += run.rows;
    });
  }
  /// Writes codes and scales of keys, or of values, of rows in pages.
  void quantised(bool values, std::int64_t begin, std::int64_t count, const std::uint8_t* codes,
                 const bfloat16* scales) const {
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      const QuantisedPlace to = quantised_place(m_raw, run, values);
      const std::int64_t bytes = QuantisedRows::code_bytes(row_type(m_raw, values), m_raw.dim);
      std::copy_n(codes, run.rows * bytes, to.codes);
      std::copy_n(scales, run.rows, to.scale);
      codes += run.rows * bytes;
      scales += run.rows;
    });
  }
  /// Writes keys, or values: (row, dim), of the cache's type.
  void elements(bool values, std::int64_t begin, std::int64_t count, const void* source) const {
    const std::int64_t row_bytes = m_raw.dim * static_cast<std::int64_t>(size_of(m_raw.dtype));
    const char* from = static_cast<const char*>(source);
    if (m_raw.format.quantised()) {
      const std::int64_t quantised = std::clamp<std::int64_t>(m_raw.retained - begin, 0, count);
      each_raw_run(m_raw, begin, quantised, [&](const RawRun& run) {
        const QuantisedPlace to = quantised_place(m_raw, run, values);
        with_value_type(m_raw.dtype, [&](auto zero) {
          pack_rows(row_type(m_raw, values), reinterpret_cast<const decltype(zero)*>(from),
                    run.rows, m_raw.dim, to.codes, to.scale);
        });
        from += run.rows * row_bytes;
      });
      begin += quantised;
      count -= quantised;
    }
    each_element_run(values, begin, count, [&](void* target, std::int64_t rows) {
      std::memcpy(target, from, static_cast<std::size_t>(rows * row_bytes));
      from += rows * row_bytes;
    });
  }
  /// Calls work(first element, rows) for each run: (row, dim). No row may be quantised.
  template <class Work>
  void each_element_run(bool values, std::int64_t begin, std::int64_t count,
                        const Work& work) const {
    each_raw_run(m_raw, begin, count, [&](const RawRun& run) {
      const void* const first = with_value_type(m_raw.dtype, [&](auto zero) {
        return static_cast<const void*>(wide_row<decltype(zero)>(m_raw, run, values));
      });
      work(const_cast<void*>(first), run.rows);
    });
  }

 private:
  const RawRows& m_raw;
};

}  // namespace kvzap::cache
