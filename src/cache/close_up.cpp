// close_up: the remaining rows of a sequence get consecutive positions.
#include "cache/cache_impl.hpp"

namespace kvzap {
namespace {

using cache::Range;

/// Rotates the keys of all heads of all layers, `rows` each, and renumbers their rows. A single
/// kernel does all of it, so that a failed launch changes nothing.
template <class Value, PageOrder order>
void turn_keys(const ExecutionSpace& exec, std::int64_t heads, std::int64_t rows,
               const cache::Block<order>& block, const PagePool::AddressView& addresses,
               const PagePool::AddressView& notes, const cache::PageTable& table,
               const Kokkos::View<const float*, MemorySpace>& inverse_frequencies) {
  const int half = block.dim / 2;
  Kokkos::parallel_for(
      "kvzap::close_up::turn", Range(exec, 0, heads * rows), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / rows;
        const std::int64_t row = i % rows;
        const std::int64_t slot = row % block.capacity;
        const PageId page = table(head, row / block.capacity);
        std::int32_t& position = cache::page_positions(notes(page))[slot];
        const std::int64_t shift = row - position;
        if (shift == 0) return;
        position = static_cast<std::int32_t>(row);
        Value* const key = reinterpret_cast<Value*>(addresses(page)) + block.row_offset(slot);
        const std::int64_t stride = block.dim_stride();
        for (int j = 0; j < half; ++j) {
          const float angle = static_cast<float>(shift) * inverse_frequencies(j);
          const float cosine = base::math::cos(angle);
          const float sine = base::math::sin(angle);
          const float x = static_cast<float>(key[j * stride]);
          const float y = static_cast<float>(key[(j + half) * stride]);
          key[j * stride] = Value(x * cosine - y * sine);
          key[(j + half) * stride] = Value(y * cosine + x * sine);
        }
      });
}

}  // namespace

template <class Value, PageOrder order>
std::int64_t KVCache<Value, order>::close_up(
    const ExecutionSpace& exec, SequenceId id,
    const Kokkos::View<const float*, MemorySpace>& inverse_frequencies, std::int64_t rows) {
  check_outside_step(id, "close_up");
  settle(id);
  Sequence& sequence = sequence_at(id);
  if (2 * static_cast<int>(inverse_frequencies.extent(0)) != m_shape.head_dim) {
    throw Error(fmt::format("cache close_up: {} frequencies; expected half of head_dim {}",
                            inverse_frequencies.extent(0), m_shape.head_dim));
  }
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    const LayerStore& layer = sequence.layers[l];
    check_pages(static_cast<int>(l), "close_up");
    if (m_shape.heads[l] > 0 && layer.tokens != layer.ring_first) {
      throw Error(
          fmt::format("cache close_up: the ring of layer {} of sequence {} has rows", l, id));
    }
    for (int h = 0; h < m_shape.heads[l]; ++h) {
      if (rows < 0) rows = layer.retained(h);
      if (layer.retained(h) == rows) continue;
      throw Error(fmt::format("cache close_up: head {} of layer {} has {} rows; expected {}", h, l,
                              layer.retained(h), rows));
    }
  }
  if (rows < 0) {
    throw Error("cache close_up: no heads on this rank; expected to be told the number of rows");
  }

  if (all_heads() > 0 && rows > 0) {
    enter(exec, sequence);
    for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
      own_pages(exec, sequence, static_cast<int>(l));
    }
    const auto addresses = m_pool.addresses(exec);
    turn_keys<Value, order>(exec, all_heads(), rows,
                            cache::Block<order>{m_shape.page_rows, m_shape.head_dim}, addresses,
                            m_pool.note_addresses(), sequence.table, inverse_frequencies);
  }
  for (LayerStore& layer : sequence.layers) layer.tokens = layer.ring_first = rows;
  sequence.checkpoints.clear();
  return rows;
}

#define KVZAP_INSTANTIATE(Value, order)                                                  \
  template std::int64_t KVCache<Value, order>::close_up(                                 \
      const ExecutionSpace&, SequenceId, const Kokkos::View<const float*, MemorySpace>&, \
      std::int64_t);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
