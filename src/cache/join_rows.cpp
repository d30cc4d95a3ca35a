#include "cache/join_rows.hpp"

#include "cache/cache_impl.hpp"

namespace kvzap::cache {
namespace {

/// Copies ring rows to (row, head, dim). Element i is dimension i % dim of a head of a row.
template <class Value>
struct CopyRing {
  RaggedLayer<Value> cached;
  Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> keys, values;
  std::int64_t oldest = 0, first_out = 0;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t dim = cached.head_dim;
    const std::int64_t d = i % dim, head = i / dim % cached.heads, row = i / dim / cached.heads;
    copy(row, head, d, d + 1);
  }
  KOKKOS_FUNCTION void copy(std::int64_t row, std::int64_t head, std::int64_t begin,
                            std::int64_t end) const {
    const Block block{cached.window, cached.head_dim};
    const std::int64_t slot = (oldest + row - cached.ring_first) % cached.window;
    const Value* const from = &cached.ring(head, 0) + block.row_offset(slot);
    for (std::int64_t d = begin; d < end; ++d) {
      keys(first_out + row, head, d) = from[d];
      values(first_out + row, head, d) = from[block.values_offset() + d];
    }
  }
};

}  // namespace

template <class Value>
void join_rows(const ExecutionSpace& exec, const RaggedLayer<Value>& cached, std::int64_t oldest,
               const Kokkos::View<const Value***, Kokkos::LayoutRight, MemorySpace>& new_keys,
               const Kokkos::View<const Value***, Kokkos::LayoutRight, MemorySpace>& new_values,
               std::int64_t first_new, std::int64_t count,
               const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>& keys,
               const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>& values,
               std::int64_t first_out) {
  if (cached.heads == 0) return;
  const std::int64_t of_ring = cached.tokens - oldest;
  if (of_ring < 0 || of_ring > cached.ring_rows() ||
      static_cast<std::int64_t>(keys.extent(0)) < first_out + of_ring + count) {
    throw Error(fmt::format("join_rows: {} rows of a ring that has {}, and {} new ones, into {}",
                            of_ring, cached.ring_rows(), count, keys.extent(0)));
  }
  const CopyRing<Value> kernel{cached, keys, values, oldest, first_out};
  if constexpr (base::runs_on_host) {
    Kokkos::parallel_for(
        "kvzap::join_rows", Range(exec, 0, of_ring * cached.heads), [=](std::int64_t i) {
          kernel.copy(i / kernel.cached.heads, i % kernel.cached.heads, 0, kernel.cached.head_dim);
        });
  } else {
    Kokkos::parallel_for("kvzap::join_rows",
                         Range(exec, 0, of_ring * cached.heads * cached.head_dim), kernel);
  }
  const std::int64_t row_size = std::int64_t{cached.heads} * cached.head_dim;
  const std::int64_t target = (first_out + of_ring) * row_size;
  copy_elements(exec, keys.data() + target, new_keys.data() + first_new * row_size,
                count * row_size);
  copy_elements(exec, values.data() + target, new_values.data() + first_new * row_size,
                count * row_size);
}

#define KVZAP_INSTANTIATE(Value)                                                           \
  template void join_rows<Value>(                                                          \
      const ExecutionSpace&, const RaggedLayer<Value>&, std::int64_t,                      \
      const Kokkos::View<const Value***, Kokkos::LayoutRight, MemorySpace>&,               \
      const Kokkos::View<const Value***, Kokkos::LayoutRight, MemorySpace>&, std::int64_t, \
      std::int64_t, const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>&,       \
      const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>&, std::int64_t);
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::cache
