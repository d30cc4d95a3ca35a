// Rows as stored in a snapshot.
#pragma once

#include <cstring>
#include <kvzap/core/cache.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "cache/raw_rows.hpp"
#include "io/snapshot_layout.hpp"

namespace kvzap::io {

/// The rows of one head for one group of the file. Any thread of the host may read them.
class SnapshotHead {
 public:
  /// The last `in_ring` of `rows` rows have not been judged.
  SnapshotHead(std::int64_t rows, std::int64_t in_ring) : m_rows(rows), m_in_ring(in_ring) {}
  SnapshotHead(const SnapshotHead&) = delete;
  SnapshotHead& operator=(const SnapshotHead&) = delete;
  virtual ~SnapshotHead() = default;

  /// Location of the recent queries of this head's query heads.
  void set_queries(const float* queries, std::int64_t row_elements) {
    m_queries = queries;
    m_query_row = row_elements;
  }

  /// The state that belongs to this head.
  using State = Kokkos::View<const float*, Kokkos::HostSpace>;
  void set_state(const State& state) { m_state = state; }

  /// Copies rows begin … begin + count - 1 in the file's format.
  void copy(RowKind kind, std::int64_t begin, std::int64_t count, char* target) const {
    switch (kind) {
      case RowKind::judged:
        for (std::int64_t row = begin; row < begin + count; ++row) {
          *target++ = row < m_rows - m_in_ring ? 1 : 0;
        }
        return;
      case RowKind::recent_queries:
        std::memcpy(target, m_queries + begin * m_query_row,
                    static_cast<std::size_t>(count * m_query_row) * sizeof(float));
        return;
      case RowKind::state:
        std::memcpy(target, m_state.data() + begin,
                    static_cast<std::size_t>(count) * sizeof(float));
        return;
      default:
        copy_cached(kind, begin, count, target);
    }
  }

 protected:
  virtual void copy_cached(RowKind kind, std::int64_t begin, std::int64_t count,
                           char* target) const = 0;

 private:
  std::int64_t m_rows, m_in_ring;
  const float* m_queries = nullptr;
  std::int64_t m_query_row = 0;
  State m_state;
};

/// Rows of a cache.
class RawHead final : public SnapshotHead {
 public:
  using Raw = cache::RawRows;
  /// Skips the first `skipped` rows. Keys and values are converted to `dtype`, those of the ring
  /// alone if the others are stored quantised. raw: the heads of the cache that are one of the
  /// file; a row has their keys, or values, one after the other.
  RawHead(std::vector<Raw> raw, std::int64_t skipped, std::int64_t in_ring, DType dtype,
          bool quantised)
      : SnapshotHead(raw.front().rows() - skipped, in_ring),
        m_raw(std::move(raw)),
        m_skipped(skipped),
        m_first_wide(quantised ? m_raw.front().rows() - in_ring : skipped),
        m_dtype(dtype) {}

 protected:
  void copy_cached(RowKind kind, std::int64_t begin, std::int64_t count,
                   char* target) const override {
    const cache::RawReader reader(m_raw.front());
    const std::int64_t row = m_skipped + begin;
    // Buffers are aligned for any of these types.
    void* const to = target;
    switch (kind) {
      case RowKind::positions:
        return reader.positions(row, count, static_cast<std::int32_t*>(to));
      case RowKind::key_codes:
      case RowKind::value_codes:
        return reader.codes(kind == RowKind::value_codes, row, count,
                            static_cast<std::uint8_t*>(to));
      case RowKind::key_scales:
      case RowKind::value_scales:
        return reader.scales(kind == RowKind::value_scales, row, count, static_cast<bfloat16*>(to));
      case RowKind::keys:
      case RowKind::values:
        return with_value_type(m_dtype, [&](auto element) {
          copy_elements(kind == RowKind::values, m_first_wide + begin, count,
                        static_cast<decltype(element)*>(to));
        });
      default:
        return reader.scores(row, count, static_cast<float*>(to));
    }
  }

 private:
  template <class Element>
  void copy_elements(bool values, std::int64_t row, std::int64_t count, Element* to) const {
    if (m_raw.size() == 1) return cache::RawReader(m_raw.front()).elements(values, row, count, to);
    for (std::int64_t i = 0; i < count; ++i) {
      for (const Raw& part : m_raw) {
        cache::RawReader(part).elements(values, row + i, 1, to);
        to += part.dim;
      }
    }
  }

  std::vector<Raw> m_raw;
  std::int64_t m_skipped;
  std::int64_t m_first_wide;
  DType m_dtype;
};

}  // namespace kvzap::io
