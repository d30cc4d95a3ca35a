// Bounds of the keys of full pages, for attention that reads some of the pages.
#include "base/host_threads.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/team.hpp"
#include "cache/cache_impl.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::cache {
namespace {

// Takes a value into a bound. NaN stays, so that a page with one is always read.
KOKKOS_INLINE_FUNCTION float smaller(float bound, float value) {
  return value < bound || value != value ? value : bound;
}
KOKKOS_INLINE_FUNCTION float larger(float bound, float value) {
  return value > bound || value != value ? value : bound;
}

/// Writes the largest and the smallest value of each dimension of `rows` keys. read(row, target)
/// writes a key to target (dim).
template <class Bound, class ReadKey>
void write_bounds(int rows, int dim, const ReadKey& read, Bound* bounds) {
  linalg::RowBuffer key_buffer(dim), largest_buffer(dim), smallest_buffer(dim);
  float *const key = key_buffer.data(), *const largest = largest_buffer.data(),
               *const smallest = smallest_buffer.data();
  read(0, largest);
  std::copy_n(largest, dim, smallest);
  for (int row = 1; row < rows; ++row) {
    read(row, key);
    for (int d = 0; d < dim; ++d) {
      largest[d] = larger(largest[d], key[d]);
      smallest[d] = smaller(smallest[d], key[d]);
    }
  }
  linalg::narrow(largest, bounds, dim);
  linalg::narrow(smallest, bounds + dim, dim);
}

template <class Value>
void bound_page(const CacheShape& shape, const PageAddress& page) {
  const int rows = shape.page_rows, dim = shape.head_dim;
  const std::uintptr_t bounds = page.metadata + rows * page_metadata_row_bytes;
  if (shape.format.quantised()) {
    const QuantisedRows keys = QuantisedPage{shape.format, rows, dim}.at(page.rows, false);
    write_bounds(
        rows, dim, [&](int row, float* target) { linalg::unpack_row(keys, row, target, true); },
        reinterpret_cast<bfloat16*>(bounds));
  } else {
    const auto* const keys = reinterpret_cast<const Value*>(page.rows);
    write_bounds(
        rows, dim,
        [&](int row, float* target) { linalg::widen(keys + std::int64_t{row} * dim, target, dim); },
        reinterpret_cast<Value*>(bounds));
  }
}

/// Gives the full pages of a layer their bounds that have none yet: one team a head. Only the
/// device knows how many rows heads have.
template <class Value>
struct BoundPages {
  const std::uintptr_t* rows;      // by page id
  const std::uintptr_t* metadata;  // by page id
  const PageId* table;             // (head, page)
  std::int64_t table_stride;
  const std::int64_t* retained;  // (head)
  std::int64_t* bounded;         // (head)
  PageFormat format;
  std::int32_t page_rows, dim;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int head = team.league_rank();
    const std::int64_t full = retained[head] / page_rows;
    for (std::int64_t p = bounded[head]; p < full; ++p) {
      const PageId page = table[head * table_stride + p];
      const std::uintptr_t bounds = metadata[page] + page_rows * page_metadata_row_bytes;
      if (format.quantised()) {
        const QuantisedRows keys = QuantisedPage{format, page_rows, dim}.at(rows[page], false);
        write(team, reinterpret_cast<bfloat16*>(bounds), [&](int row, int d) {
          return static_cast<float>(keys.scales[row]) * static_cast<float>(keys.level_at(row, d));
        });
      } else {
        const auto* const keys = reinterpret_cast<const Value*>(rows[page]);
        write(team, reinterpret_cast<Value*>(bounds), [&](int row, int d) {
          return static_cast<float>(keys[std::int64_t{row} * dim + d]);
        });
      }
    }
    team.team_barrier();
    Kokkos::single(Kokkos::PerTeam(team), [&] { bounded[head] = full; });
  }
  template <class Bound, class KeyAt>
  KOKKOS_INLINE_FUNCTION void write(const base::TeamMember& team, Bound* bounds,
                                    const KeyAt& key_at) const {
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, dim), [&](int d) {
      float largest = key_at(0, d), smallest = largest;
      for (int row = 1; row < page_rows; ++row) {
        const float key = key_at(row, d);
        largest = larger(largest, key);
        smallest = smaller(smallest, key);
      }
      bounds[d] = Bound(largest);
      bounds[dim + d] = Bound(smallest);
    });
  }
};

/// Lets no head have more bounds than pages(head).
template <class Pages>
void bound_fewer(const ExecutionSpace& exec, const Counts& bounded, const Pages& pages) {
  base::parallel_for(
      "kvzap::cache::bound_fewer",
      Kokkos::RangePolicy<ExecutionSpace>(exec, 0, static_cast<std::int64_t>(bounded.extent(0))),
      KOKKOS_LAMBDA(const std::int64_t h) {
        const std::int64_t most = pages(h);
        if (bounded(h) > most) bounded(h) = most;
      });
}

struct FullPages {
  Counts retained;
  std::int64_t page_rows;
  KOKKOS_FUNCTION std::int64_t operator()(std::int64_t h) const { return retained(h) / page_rows; }
};

struct Listed {
  Counts counts;
  KOKKOS_FUNCTION std::int64_t operator()(std::int64_t h) const { return counts(h); }
};

}  // namespace

void Store::forget_bounds(const ExecutionSpace& exec, LayerStore& layer) {
  layer.are_bounds_exact = false;
  if (layer.device_bounded.extent(0) == 0) return;
  bound_fewer(exec, layer.device_bounded, FullPages{layer.device_retained, shape.page_rows});
}

// Gives full pages their bounds that have none yet. A page that sequences share gets the same ones
// from each.
void Store::bound_pages(Sequence& sequence, LayerStore& layer) {
  if (layer.device_bounded.extent(0) > 0) return bound_device_pages(sequence, layer);
  settle(sequence);  // a page that is not yet full would keep the bounds of what it holds now
  const int heads = static_cast<int>(layer.pages.size());
  std::int64_t most = 0;
  for (int h = 0; h < heads; ++h) {
    const std::int64_t full = layer.retained(h) / shape.page_rows;
    layer.keep_bounds(h, full);
    most = std::max(most, full - layer.bounded[h]);
  }
  if (most == 0) return;
  base::host_for("kvzap::cache::page_bounds", heads, most * shape.page_rows * shape.head_dim,
                 [&](std::int64_t h) {
                   std::int64_t& bounded = layer.bounded[h];
                   for (; bounded < layer.retained(h) / shape.page_rows; ++bounded) {
                     const PageAddress page = pool.address(layer.pages[h][bounded]);
                     with_value_type(dtype,
                                     [&](auto zero) { bound_page<decltype(zero)>(shape, page); });
                   }
                 });
}

void Store::bound_device_pages(Sequence& sequence, LayerStore& layer) {
  const auto heads = static_cast<int>(layer.pages.size());
  const auto full = [&](int h) { return layer.retained(h) / shape.page_rows; };
  // Most steps fill no page.
  bool are_there = layer.are_bounds_exact && !layer.deferred && !layer.bounded_fewer;
  for (int h = 0; are_there && h < heads; ++h) are_there = layer.bounded[h] == full(h);
  if (are_there) return;
  const ExecutionSpace exec = sequence.last.value_or(ExecutionSpace());
  if (layer.bounded_fewer) {
    using Host = Kokkos::View<const std::int64_t*, Kokkos::HostSpace,
                              Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    Kokkos::deep_copy(exec, layer.still_bounded, Host(layer.bounded.data(), heads));
    base::fence(exec, "kvzap::cache: the host counts on after this copy");
    bound_fewer(exec, layer.device_bounded, Listed{layer.still_bounded});
    layer.bounded_fewer = false;
  }
  for (int h = 0; h < heads; ++h) layer.bounded[h] = full(h);
  layer.are_bounds_exact = !layer.deferred;
  with_value_type(dtype, [&](auto zero) {
    const BoundPages<decltype(zero)> kernel{
        pool.addresses().data(),
        pool.metadata_addresses().data(),
        sequence.table.data() + layer.first_head * sequence.table.stride(0),
        static_cast<std::int64_t>(sequence.table.stride(0)),
        layer.device_retained.data(),
        layer.device_bounded.data(),
        shape.format,
        shape.page_rows,
        shape.head_dim};
    base::parallel_for(
        "kvzap::cache::bound_pages",
        base::team_policy(exec, heads, {4, 32}, kernel, [](int) { return std::size_t{0}; }),
        kernel);
  });
}

}  // namespace kvzap::cache
