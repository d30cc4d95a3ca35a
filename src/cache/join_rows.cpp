#include "cache/join_rows.hpp"

#include "cache/cache_impl.hpp"

namespace kvzap::cache {
namespace {

/// Copies the newest cached rows to (row, head, dim). Element i is dimension i % dim of a head of a
/// row.
template <class Value>
struct CopyRing {
  RaggedLayer cached;
  Value* keys = nullptr;  // of the first row that is written
  Value* values = nullptr;
  std::int64_t rows = 0;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t dim = cached.head_dim;
    const std::int64_t d = i % dim, head = i / dim % cached.heads, row = i / dim / cached.heads;
    copy(row, head, d, d + 1);
  }
  KOKKOS_FUNCTION void copy(std::int64_t row, std::int64_t head, std::int64_t begin,
                            std::int64_t end) const {
    const std::int64_t first = cached.rows(head) - rows + row;
    const auto from = HeadRows<Value>{cached, head, RingOrder::positions}.run(first, first + 1);
    const std::int64_t to = (row * cached.heads + head) * cached.head_dim;
    for (std::int64_t d = begin; d < end; ++d) {
      keys[to + d] = from.keys[d];
      values[to + d] = from.values[d];
    }
  }
};

template <class Value>
void copy_ring(const ExecutionSpace& exec, const CopyRing<Value>& kernel) {
  const std::int64_t rows = kernel.rows, heads = kernel.cached.heads, dim = kernel.cached.head_dim;
  if constexpr (base::runs_on_host) {
    Kokkos::parallel_for("kvzap::join_rows", Range(exec, 0, rows * heads),
                         [=](std::int64_t i) { kernel.copy(i / heads, i % heads, 0, dim); });
  } else {
    Kokkos::parallel_for("kvzap::join_rows", Range(exec, 0, rows * heads * dim), kernel);
  }
}

}  // namespace

void join_rows(const ExecutionSpace& exec, const RaggedLayer& cached, std::int64_t oldest,
               const ConstArrayView& new_keys, const ConstArrayView& new_values,
               const ArrayView& keys, const ArrayView& values) {
  if (cached.heads == 0) return;
  const std::int64_t of_ring = cached.tokens - oldest;
  const std::int64_t count = new_keys.extents[0];
  if (of_ring < 0 || of_ring > cached.ring_rows() || keys.extents[0] < of_ring + count) {
    throw Error(fmt::format("join_rows: {} rows of a ring that has {}, and {} new ones, into {}",
                            of_ring, cached.ring_rows(), count, keys.extents[0]));
  }
  with_value_type(cached.dtype, [&](auto zero) {
    using Value = decltype(zero);
    const std::int64_t row_size = std::int64_t{cached.heads} * cached.head_dim;
    const auto join = [&](const ConstArrayView& from, const ArrayView& to) {
      copy_elements(exec, to.values<Value>() + of_ring * row_size, from.values<Value>(),
                    count * row_size);
    };
    join(new_keys, keys);
    join(new_values, values);
    copy_ring(exec, CopyRing<Value>{cached, keys.values<Value>(), values.values<Value>(), of_ring});
  });
}

}  // namespace kvzap::cache
