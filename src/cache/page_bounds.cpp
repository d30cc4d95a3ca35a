// Bounds of the keys of full pages, for attention that reads some of the pages.
#include "base/host_threads.hpp"
#include "cache/cache_impl.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::cache {
namespace {

// Takes a value into a bound. NaN stays, so that a page with one is always read.
float smaller(float bound, float value) { return value < bound || value != value ? value : bound; }
float larger(float bound, float value) { return value > bound || value != value ? value : bound; }

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

}  // namespace

// Gives full pages their bounds that have none yet. A page that sequences share gets the same ones
// from each.
void Store::bound_pages(LayerStore& layer) {
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

}  // namespace kvzap::cache
