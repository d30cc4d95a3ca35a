#include "cache/gather_rows.hpp"

#include "cache/cache_impl.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/pack_row.hpp"

namespace kvzap::cache {
namespace {

/// The rows of a head, as single rows and as runs with constant strides.
template <class Value>
struct HeadRows {
  const std::uintptr_t* addresses;
  const PageId* pages;
  const std::int64_t* retained;
  const Value* ring;
  const Value* fresh;  // the first new row
  std::int64_t fresh_row_stride, fresh_dim_stride;
  std::int64_t in_ring, ring_slot;  // slot of the oldest
  Block page_block, ring_block;
  PageFormat format;
  bool values;

  /// Returns whether row `row` is packed: then packed_at, not run, gives it.
  KOKKOS_INLINE_FUNCTION bool is_packed(std::int64_t row) const {
    return format.keys != RowType::wide && row < *retained;
  }
  KOKKOS_INLINE_FUNCTION PackedRows packed_at(std::int64_t row) const {
    return PackedPage{format, page_block.capacity, page_block.dim}.at(
        addresses[pages[row / page_block.capacity]], values);
  }

  /// Returns the run that begins at row `row`: at most `left` rows.
  struct Run {
    const Value* data;
    std::int64_t rows, row_stride, dim_stride;
  };
  KOKKOS_INLINE_FUNCTION Run run(std::int64_t row, std::int64_t left) const {
    const std::int64_t behind = row - *retained;
    if (behind >= in_ring) {
      return {fresh + (behind - in_ring) * fresh_row_stride, left, fresh_row_stride,
              fresh_dim_stride};
    }
    const bool in_page = behind < 0;
    const Block block = in_page ? page_block : ring_block;
    std::int64_t slot = row % page_block.capacity;
    if (!in_page) {
      slot = ring_slot + behind;
      if (slot >= ring_block.capacity) slot -= ring_block.capacity;
    }
    const Value* base =
        in_page ? reinterpret_cast<const Value*>(addresses[pages[row / page_block.capacity]])
                : ring;
    // All pages but the last are full. The ring's run ends at its last slot.
    std::int64_t rows = block.capacity - slot;
    const std::int64_t until_end = in_page ? -behind : in_ring - behind;
    rows = rows < until_end ? rows : until_end;
    return {base + block.row_offset(slot) + (values ? block.values_offset() : std::int64_t{0}),
            rows < left ? rows : left, block.dim, 1};
  }
};

template <class Value>
HeadRows<Value> rows_of(const RaggedLayer& cached, int head, const ConstArrayView& new_rows,
                        bool values) {
  HeadRows<Value> rows = {};
  rows.addresses = cached.addresses.data();
  rows.pages =
      cached.page_table.data() + head * static_cast<std::int64_t>(cached.page_table.stride(0));
  rows.retained = cached.retained.data() + head;
  rows.ring = cached.ring_of<Value>(head);
  rows.fresh = nullptr;
  rows.fresh_row_stride = rows.fresh_dim_stride = 0;
  if (new_rows) {
    rows.fresh = new_rows.values<Value>() + head * new_rows.strides[1];
    rows.fresh_row_stride = new_rows.strides[0];
    rows.fresh_dim_stride = new_rows.strides[2];
  }
  rows.in_ring = cached.ring_rows();
  rows.ring_slot = (cached.tokens - rows.in_ring - cached.ring_first) % cached.window;
  rows.page_block = {cached.page_rows, cached.head_dim};
  rows.ring_block = {cached.window, cached.head_dim};
  rows.format = cached.format;
  rows.values = values;
  return rows;
}

template <class Value>
void gather_by_kernel(const ExecutionSpace& exec, const HeadRows<Value>& rows, std::int64_t begin,
                      std::int64_t count, std::int64_t dim,
                      const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& out) {
  // One thread per dimension of a row: neighbouring threads read and write neighbouring bytes.
  Kokkos::parallel_for(
      "kvzap::gather_rows", Range(exec, 0, count * dim), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / dim;
        const std::int64_t d = i % dim;
        if (rows.is_packed(begin + row)) {
          out(row, d) = rows.packed_at(begin + row)
                            .at((begin + row) % rows.page_block.capacity, static_cast<int>(d));
          return;
        }
        const auto run = rows.run(begin + row, 1);
        out(row, d) = static_cast<float>(run.data[d * run.dim_stride]);
      });
}

template <class Value>
[[maybe_unused]] void gather_on_host(const HeadRows<Value>& rows, std::int64_t begin,
                                     std::int64_t end, std::int64_t dim, float* target) {
  for (; begin < end && rows.is_packed(begin); ++begin, target += dim) {
    linalg::unpack_row_to(rows.packed_at(begin), begin % rows.page_block.capacity, target);
  }
  for (std::int64_t row = begin; row < end;) {
    const auto run = rows.run(row, end - row);
    if (run.dim_stride == 1 && run.row_stride == dim) {
      linalg::widen(run.data, target, run.rows * dim);
    } else {
      for (std::int64_t r = 0; r < run.rows; ++r) {
        const Value* source = run.data + r * run.row_stride;
        if (run.dim_stride == 1) {
          linalg::widen(source, target + r * dim, dim);
        } else {
          for (std::int64_t d = 0; d < dim; ++d) {
            target[r * dim + d] = static_cast<float>(source[d * run.dim_stride]);
          }
        }
      }
    }
    target += run.rows * dim;
    row += run.rows;
  }
}

template <class Value>
void gather(const ExecutionSpace& exec, const HeadRows<Value>& rows, std::int64_t begin,
            std::int64_t count, std::int64_t dim,
            const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& out) {
  if constexpr (base::runs_on_host) {
    if (!use_portable_path()) {
      constexpr std::int64_t piece = 256;  // rows
      const std::int64_t pieces = (count + piece - 1) / piece;
      float* const target = out.data();
      Kokkos::parallel_for("kvzap::gather_rows", Range(exec, 0, pieces), [=](std::int64_t p) {
        const std::int64_t first = p * piece;
        gather_on_host(rows, begin + first, begin + std::min(first + piece, count), dim,
                       target + first * dim);
      });
      return;
    }
  }
  gather_by_kernel(exec, rows, begin, count, dim, out);
}

}  // namespace

void gather_rows(const ExecutionSpace& exec, const RaggedLayer& cached, int head,
                 const ConstArrayView& new_rows, std::int64_t begin, std::int64_t count,
                 bool values, const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& out) {
  const std::int64_t dim = cached.head_dim;
  if (static_cast<std::int64_t>(out.extent(0)) < count ||
      static_cast<std::int64_t>(out.extent(1)) != dim) {
    throw Error(fmt::format("gather_rows: out is ({}, {}); expected (at least {}, {}) = (row, dim)",
                            out.extent(0), out.extent(1), count, dim));
  }
  if (count <= 0) return;
  with_value_type(cached.dtype, [&](auto zero) {
    gather(exec, rows_of<decltype(zero)>(cached, head, new_rows, values), begin, count, dim, out);
  });
}

void gather_positions(const ExecutionSpace& exec, const RaggedLayer& cached, int head,
                      std::int64_t first_new_position, std::int64_t begin, std::int64_t count,
                      const Kokkos::View<std::int64_t*, MemorySpace>& out) {
  if (static_cast<std::int64_t>(out.extent(0)) < count) {
    throw Error(fmt::format("gather_positions: out has {} elements; expected at least {}",
                            out.extent(0), count));
  }
  const std::int64_t in_ring = cached.ring_rows();
  const std::int64_t first_in_ring = cached.tokens - in_ring;
  Kokkos::parallel_for(
      "kvzap::gather_positions", Range(exec, 0, count), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = begin + i;
        const std::int64_t behind = row - cached.retained(head);
        if (behind >= in_ring) {
          out(i) = first_new_position + behind - in_ring;
        } else if (behind >= 0) {
          out(i) = first_in_ring + behind;
        } else {
          const PageId page = cached.page_table(head, row / cached.page_rows);
          out(i) = page_positions(cached.metadata_addresses(page))[row % cached.page_rows];
        }
      });
}

}  // namespace kvzap::cache
