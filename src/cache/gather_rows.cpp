#include "cache/gather_rows.hpp"

#include "cache/layer_rows.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/pack_row.hpp"

namespace kvzap::cache {
namespace {

using Rows = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

/// The keys of a head, or its values, by position.
template <class Value>
struct Source {
  RaggedLayer layer;
  RowRun<Value> fresh;
  int head;
  bool values;

  KOKKOS_INLINE_FUNCTION HeadRows<Value> rows() const {
    return {layer, head, RingOrder::positions, fresh};
  }
  KOKKOS_INLINE_FUNCTION const Value* first_of(const RowRun<Value>& run) const {
    return values ? run.values : run.keys;
  }
  KOKKOS_INLINE_FUNCTION bool is_packed(std::int64_t row) const {
    return layer.is_packed(head, row);
  }
  KOKKOS_INLINE_FUNCTION QuantisedRows quantised_at(std::int64_t row) const {
    return layer.quantised(head, row / layer.page_rows, values);
  }
};

template <class Value>
void gather_by_kernel(const ExecutionSpace& exec, const Source<Value>& source, std::int64_t begin,
                      std::int64_t count, const Rows& out) {
  const int dim = source.layer.head_dim;
  // One thread per dimension of a row: neighbouring threads read and write neighbouring bytes.
  Kokkos::parallel_for(
      "kvzap::gather_rows", Range(exec, 0, count * dim), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = begin + i / dim;
        const int d = static_cast<int>(i % dim);
        if (source.is_packed(row)) {
          out(i / dim, d) = source.quantised_at(row).at(row % source.layer.page_rows, d);
          return;
        }
        const auto run = source.rows().run(row, row + 1);
        out(i / dim, d) = static_cast<float>(source.first_of(run)[d * run.dim_stride]);
      });
}

template <class Value>
[[maybe_unused]] void gather_on_host(const Source<Value>& source, std::int64_t begin,
                                     std::int64_t end, float* target) {
  const std::int64_t dim = source.layer.head_dim;
  for (; begin < end && source.is_packed(begin); ++begin, target += dim) {
    linalg::unpack_row_to(source.quantised_at(begin), begin % source.layer.page_rows, target);
  }
  const HeadRows<Value> rows = source.rows();
  for (std::int64_t row = begin; row < end;) {
    const auto run = rows.run(row, end);
    const Value* const first = source.first_of(run);
    if (run.dim_stride == 1 && run.row_stride == dim) {
      linalg::widen(first, target, run.rows * dim);
    } else {
      for (std::int64_t r = 0; r < run.rows; ++r) {
        const Value* const from = first + r * run.row_stride;
        if (run.dim_stride == 1) {
          linalg::widen(from, target + r * dim, dim);
        } else {
          for (std::int64_t d = 0; d < dim; ++d) {
            target[r * dim + d] = static_cast<float>(from[d * run.dim_stride]);
          }
        }
      }
    }
    target += run.rows * dim;
    row += run.rows;
  }
}

template <class Value>
void gather(const ExecutionSpace& exec, const Source<Value>& source, std::int64_t begin,
            std::int64_t count, const Rows& out) {
  if constexpr (base::runs_on_host) {
    if (!use_portable_path()) {
      constexpr std::int64_t piece = 256;  // rows
      const std::int64_t pieces = (count + piece - 1) / piece;
      const std::int64_t dim = source.layer.head_dim;
      float* const target = out.data();
      Kokkos::parallel_for("kvzap::gather_rows", Range(exec, 0, pieces), [=](std::int64_t p) {
        const std::int64_t first = p * piece;
        gather_on_host(source, begin + first, begin + std::min(first + piece, count),
                       target + first * dim);
      });
      return;
    }
  }
  gather_by_kernel(exec, source, begin, count, out);
}

}  // namespace

void gather_rows(const ExecutionSpace& exec, const RaggedLayer& cached, const RowRange& range,
                 const ConstArrayView& new_rows, bool values, const Rows& out) {
  const std::int64_t dim = cached.head_dim;
  if (static_cast<std::int64_t>(out.extent(0)) < range.count ||
      static_cast<std::int64_t>(out.extent(1)) != dim) {
    throw Error(fmt::format("gather_rows: out is ({}, {}); expected (at least {}, {}) = (row, dim)",
                            out.extent(0), out.extent(1), range.count, dim));
  }
  if (range.count <= 0) return;
  with_value_type(cached.dtype, [&](auto zero) {
    using Value = decltype(zero);
    Source<Value> source{cached, {}, range.head, values};
    if (new_rows) {
      const Value* const first = new_rows.values<Value>() + range.head * new_rows.strides[1];
      source.fresh = {first, first, new_rows.extents[0], new_rows.strides[0], new_rows.strides[2]};
    }
    gather(exec, source, range.begin, range.count, out);
  });
}

void gather_positions(const ExecutionSpace& exec, const RaggedLayer& cached, const RowRange& range,
                      std::int64_t first_new_position,
                      const Kokkos::View<std::int64_t*, MemorySpace>& out) {
  if (static_cast<std::int64_t>(out.extent(0)) < range.count) {
    throw Error(fmt::format("gather_positions: out has {} elements; expected at least {}",
                            out.extent(0), range.count));
  }
  const LayerRows rows{cached, nullptr};
  Kokkos::parallel_for(
      "kvzap::gather_positions", Range(exec, 0, range.count), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = range.begin + i;
        const std::int64_t after = row - rows.layer.rows(range.head);
        out(i) = after >= 0 ? first_new_position + after : rows.at(range.head, row).position;
      });
}

}  // namespace kvzap::cache
