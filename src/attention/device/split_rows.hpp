// How the kernels of split_kv find and read the rows of a head, wide ones and quantised ones.
#pragma once

#include "attention/call.hpp"
#include "base/byte_permute.hpp"
#include "base/row_vector.hpp"

namespace kvzap::attention {

using base::Bytes4;
using base::Bytes8;
using base::is_vector_aligned;
using base::load_floats;
using base::RowVector;

/// The place of a span in memory. A head's rows are those of its pages, then its ring, then the
/// span's new rows. Quantised rows and wide rows form parts of their own.
struct SplitSpan {
  const PageId* table;           // (head, page), row after row
  const std::int64_t* retained;  // (head)
  const void* ring;
  std::int32_t first_new;
  std::int32_t table_stride;
  std::int32_t ring_rows;
  std::int32_t new_rows;
  std::int32_t query;
  // Numbers of parts of all earlier spans of the launch.
  std::int32_t first_wide;
  std::int32_t first_quantised;
  // Bounds for each head; quantised_parts is 0 with wide pages.
  std::int16_t wide_parts;
  std::int16_t quantised_parts;

  KOKKOS_INLINE_FUNCTION std::int64_t quantised_rows(int head) const {
    return quantised_parts > 0 ? retained[head] : 0;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t wide_rows(int head) const {
    return retained[head] - quantised_rows(head) + ring_rows + new_rows;
  }
};

/// Returns the place of a span, without numbers of parts.
inline SplitSpan place_of(const AttentionSpan& span) {
  const CachedLayer& cached = span.cached;
  SplitSpan place{};
  place.table = cached.page_table.data();
  place.retained = cached.retained.data();
  place.ring = cached.ring.data();
  place.first_new = static_cast<std::int32_t>(span.first_new);
  place.table_stride = static_cast<std::int32_t>(cached.page_table.stride(0));
  place.ring_rows = static_cast<std::int32_t>(cached.ring_rows());
  place.new_rows = static_cast<std::int32_t>(span.new_rows);
  place.query = static_cast<std::int32_t>(span.first_query);
  return place;
}

/// The page of a row in its head's list, and its place there. (Positions have 32 bits; a division
/// of 64 bits takes a hundred instructions on a GPU.)
struct PagedRow {
  std::uint32_t page, slot;
  KOKKOS_INLINE_FUNCTION PagedRow(std::int64_t row, std::int32_t page_rows)
      : page(static_cast<std::uint32_t>(row) / static_cast<std::uint32_t>(page_rows)),
        slot(static_cast<std::uint32_t>(row) - page * static_cast<std::uint32_t>(page_rows)) {}
};

struct Strides {
  std::int64_t row, head, dim;
};

inline Strides strides_of(const ConstArrayView& array) {
  return {array.strides[0], array.strides[1], array.strides[2]};
}

/// Rows of type Value: of pages, a ring, and new rows.
template <class Value>
struct WideRows {
  using Element = Value;
  using Note = std::int64_t;  // the distance of dimensions
  static constexpr bool quantised = false;
  static constexpr int width = RowVector<Value>::width;

  const std::uintptr_t* addresses;  // by page id
  const Value* new_keys;
  const Value* new_values;
  Strides new_strides;
  std::int32_t window, page_rows;
  std::int32_t vectors;  // PageFormat::vectors

  /// Finds row `row` of a head. Returns whether key and value are sequences of aligned vectors.
  KOKKOS_INLINE_FUNCTION bool find(const SplitSpan& span, int head, int dim, std::int64_t row,
                                   const Value*& key, const Value*& value,
                                   std::int64_t& stride) const {
    const std::int64_t retained = span.retained[head];
    const std::int64_t cached = retained + span.ring_rows;
    if (row >= cached) {
      const std::int64_t offset =
          (std::int64_t{span.first_new} + row - cached) * new_strides.row + head * new_strides.head;
      key = new_keys + offset;
      value = new_values + offset;
      stride = new_strides.dim;
    } else {
      const Value* base =
          static_cast<const Value*>(span.ring) + std::int64_t{vectors} * head * window * dim;
      std::int64_t slot = row - retained;
      int capacity = window;
      if (row < retained) {
        const PagedRow paged(row, page_rows);
        const PageId page = span.table[std::int64_t{head} * span.table_stride + paged.page];
        base = reinterpret_cast<const Value*>(addresses[page]);
        slot = paged.slot;
        capacity = page_rows;
      }
      key = base + slot * dim;
      value = key + std::int64_t{vectors - 1} * capacity * dim;
      stride = 1;
    }
    return stride == 1 && dim % width == 0 && is_vector_aligned(key) && is_vector_aligned(value);
  }
  /// Returns the dimension of element i of a row's vectors.
  template <bool values>
  KOKKOS_INLINE_FUNCTION static int dim_of(int i, int /*dim*/) {
    return i;
  }
  /// Reads vector v of a row as floats. whole: find() returned true.
  template <bool whole, bool values>
  KOKKOS_FORCEINLINE_FUNCTION static void load(const Value* row, std::int64_t stride, int v,
                                               int dim, float* target) {
    if constexpr (whole) {
      RowVector<Value>::load(row + v * width, target);
    } else {
      for (int e = 0; e < width; ++e) {
        const int d = v * width + e;
        target[e] = d < dim ? static_cast<float>(row[d * stride]) : 0.0f;
      }
    }
  }
  KOKKOS_INLINE_FUNCTION static float key_factor(std::int64_t /*note*/) { return 1.0f; }
  KOKKOS_INLINE_FUNCTION static float value_factor(std::int64_t /*note*/) { return 1.0f; }
};

template <class Value>
WideRows<Value> wide_rows_of(const CachedLayer& cached, const AttentionCall& call) {
  return {cached.addresses.data(),
          call.new_keys.values<Value>(),
          call.new_values.values<Value>(),
          strides_of(call.new_keys),
          cached.window,
          cached.page_rows,
          cached.format.vectors()};
}

struct RowScales {
  float key, value;
};

/// Dimensions of a vector of quantised rows.
inline constexpr int quantised_width = 8;

/// Returns the dimension of element i of the vectors of a row: `dim` or more for elements beyond
/// it. Vector v of 4-bit rows has the dimensions of bytes 4 v … 4 v + 3: of their lower halves,
/// then of their upper halves.
KOKKOS_INLINE_FUNCTION constexpr int quantised_dim_of(RowType type, int i, int dim) {
  if (type != RowType::q4) return i;
  const int half = (dim + 1) / 2;
  const int byte = i / 8 * 4 + i % 4;
  if (byte >= half) return dim;
  return i % 8 < 4 ? byte : byte + half;
}

/// Reads vector v of a row's codes as levels. whole: the row is a sequence of whole vectors.
template <bool whole, RowType type>
KOKKOS_FORCEINLINE_FUNCTION void load_levels(const std::uint8_t* row, int v, int dim,
                                             float* target) {
  if constexpr (!whole) {
    const QuantisedRows one{row, nullptr, dim, type};
    for (int e = 0; e < quantised_width; ++e) {
      const int d = quantised_dim_of(type, v * quantised_width + e, dim);
      target[e] = d < dim ? static_cast<float>(one.level_at(0, d)) : 0.0f;
    }
  } else if constexpr (type == RowType::q8) {
    const Bytes8 both = reinterpret_cast<const Bytes8*>(row)[v];
    for (int e = 0; e < 8; ++e) target[e] = base::byte_float(both.word[e / 4], e % 4) - 128.0f;
  } else if constexpr (type == RowType::q4) {
    const std::uint32_t word = reinterpret_cast<const Bytes4*>(row)[v].word;
    // The levels below 0 are those above, in reverse.
    const std::uint32_t negative = ~word & 0x88888888u;
    const std::uint32_t magnitudes = (word ^ (negative - (negative >> 3))) & 0x77777777u;
    const std::uint32_t lower = base::permute_bytes(0x2c1f1206u, 0x7f604b3au, magnitudes);
    const std::uint32_t upper = base::permute_bytes(0x2c1f1206u, 0x7f604b3au, magnitudes >> 16);
    for (int e = 0; e < 8; ++e) {
      const int nibble = e < 4 ? 2 * e : 2 * (e - 4) + 1;
      const float size = base::byte_float(nibble < 4 ? lower : upper, nibble % 4);
      target[e] = base::bits_float(base::float_bits(size) |
                                   ((negative << (28 - 4 * nibble)) & 0x80000000u));
    }
  } else {
    constexpr RowTrellis trellis = RowTrellis::of(type);
    const auto* const unit =
        reinterpret_cast<const Bytes4*>(row + v / 4 * QuantisedRows::unit_bytes(type));
    const std::uint64_t bits = std::uint64_t{unit[1].word} << 32 | unit[0].word;
    const std::uint32_t third = type == RowType::q3 ? unit[2].word >> (v % 4 * 8) : 0u;
    for (int e = 0; e < 8; ++e) {
      const auto lower = static_cast<int>((bits >> (8 * e + v % 4 * 2)) & 15u);
      const int upper = static_cast<int>((third >> e) & 1u) << 4;
      target[e] = static_cast<float>(trellis.level(lower | upper));
    }
  }
}

/// Where the quantised rows of a layer lie.
struct QuantisedPlaces {
  PageFormat format;
  const std::uintptr_t* addresses;  // by page id
  std::int32_t page_rows;

  /// Finds row `row` of a head. Returns whether it is a sequence of whole vectors.
  KOKKOS_INLINE_FUNCTION bool find(const SplitSpan& span, int head, int dim, std::int64_t row,
                                   const std::uint8_t*& key, const std::uint8_t*& value,
                                   RowScales& scales) const {
    const PagedRow paged(row, page_rows);
    const PageId page = span.table[std::int64_t{head} * span.table_stride + paged.page];
    const std::int64_t slot = paged.slot;
    const QuantisedPage of_page{format, page_rows, dim};
    const QuantisedRows of_keys = of_page.at(addresses[page], false);
    const QuantisedRows of_values = of_page.at(addresses[page], true);
    key = of_keys.codes + slot * QuantisedRows::code_bytes(format.keys, dim);
    value = of_values.codes + slot * QuantisedRows::code_bytes(format.values, dim);
    scales = {static_cast<float>(of_keys.scales[slot]), static_cast<float>(of_values.scales[slot])};
    return dim % quantised_width == 0;
  }
};

/// Quantised rows of pages, which stay rotated. Types: known at compile time.
template <RowType keys, RowType values>
struct QuantisedCodes {
  using Element = std::uint8_t;
  using Note = RowScales;
  static constexpr bool quantised = true;
  static constexpr int width = quantised_width;

  const std::uintptr_t* addresses;  // by page id
  std::int32_t page_rows;
  bool values_are_keys;

  KOKKOS_INLINE_FUNCTION bool find(const SplitSpan& span, int head, int dim, std::int64_t row,
                                   const std::uint8_t*& key, const std::uint8_t*& value,
                                   RowScales& scales) const {
    return QuantisedPlaces{{keys, values, values_are_keys}, addresses, page_rows}.find(
        span, head, dim, row, key, value, scales);
  }
  template <bool of_values>
  KOKKOS_INLINE_FUNCTION static int dim_of(int i, int dim) {
    return quantised_dim_of(of_values ? values : keys, i, dim);
  }
  template <bool whole, bool of_values>
  KOKKOS_FORCEINLINE_FUNCTION static void load(const std::uint8_t* row, RowScales /*scales*/, int v,
                                               int dim, float* target) {
    load_levels<whole, of_values ? values : keys>(row, v, dim, target);
  }
  KOKKOS_INLINE_FUNCTION static float key_factor(const RowScales& scales) { return scales.key; }
  KOKKOS_INLINE_FUNCTION static float value_factor(const RowScales& scales) { return scales.value; }
};

/// The same for any types, which each load asks for: one kernel for all pairs with 3 or 2 bits.
struct AnyQuantisedCodes : QuantisedPlaces {
  using Element = std::uint8_t;
  using Note = RowScales;
  static constexpr bool quantised = true;
  static constexpr int width = quantised_width;

  template <bool of_values>
  KOKKOS_INLINE_FUNCTION int dim_of(int i, int dim) const {
    return quantised_dim_of(of_values ? format.values : format.keys, i, dim);
  }
  template <bool whole, bool of_values>
  KOKKOS_FORCEINLINE_FUNCTION void load(const std::uint8_t* row, RowScales /*scales*/, int v,
                                        int dim, float* target) const {
    switch (of_values ? format.values : format.keys) {
      case RowType::q2:
        return load_levels<whole, RowType::q2>(row, v, dim, target);
      case RowType::q3:
        return load_levels<whole, RowType::q3>(row, v, dim, target);
      case RowType::q4:
        return load_levels<whole, RowType::q4>(row, v, dim, target);
      default:
        return load_levels<whole, RowType::q8>(row, v, dim, target);
    }
  }
  KOKKOS_INLINE_FUNCTION static float key_factor(const RowScales& scales) { return scales.key; }
  KOKKOS_INLINE_FUNCTION static float value_factor(const RowScales& scales) { return scales.value; }
};

}  // namespace kvzap::attention
