// compact_positions: the remaining rows of a sequence get consecutive positions.
#include <algorithm>

#include "cache/cache_impl.hpp"
#include "linalg/pack_row.hpp"

namespace kvzap::cache {
namespace {

/// Rotates the first half of a key with its second half by `shift` positions.
template <class Element>
KOKKOS_INLINE_FUNCTION void shift_key(Element* key, int half, std::int64_t shift,
                                      const float* inverse_frequencies) {
  for (int j = 0; j < half; ++j) {
    const float angle = static_cast<float>(shift) * inverse_frequencies[j];
    const float cosine = base::math::cos(angle);
    const float sine = base::math::sin(angle);
    const float x = static_cast<float>(key[j]);
    const float y = static_cast<float>(key[j + half]);
    key[j] = Element(x * cosine - y * sine);
    key[j + half] = Element(y * cosine + x * sine);
  }
}

/// Rotates a quantised key, and packs it again. `key`: space for its dimensions.
KOKKOS_INLINE_FUNCTION void shift_in(float* key, const QuantisedRows& keys, std::int64_t slot,
                                     std::int64_t shift, const float* inverse_frequencies) {
  linalg::unpack_row_to(keys, slot, key);
  shift_key(key, keys.dim / 2, shift, inverse_frequencies);
  linalg::pack_row_from(
      keys.type, key, keys.dim,
      const_cast<std::uint8_t*>(keys.codes) + slot * QuantisedRows::code_bytes(keys.type, keys.dim),
      const_cast<bfloat16*>(keys.scales) + slot);
}

/// The same; on a host with space of its own. (A template, so that devices do not compile that.)
template <class Element>
KOKKOS_INLINE_FUNCTION void shift_quantised(const QuantisedRows& keys, std::int64_t slot,
                                            [[maybe_unused]] Element* unpacked,
                                            [[maybe_unused]] std::int64_t first, std::int64_t shift,
                                            const float* inverse_frequencies) {
  if constexpr (base::runs_on_host) {
    linalg::RowBuffer buffer(keys.dim);
    shift_in(buffer.data(), keys, slot, shift, inverse_frequencies);
  } else {
    shift_in(unpacked + first, keys, slot, shift, inverse_frequencies);
  }
}

/// Rotates the keys of heads from first_head on, counted over all layers, and renumbers their rows.
/// Element i is row i % rows of a head.
template <class Value>
struct RotateKeys {
  PagePool::AddressView addresses, metadata;
  PageTable table;
  Kokkos::View<const float*, MemorySpace> inverse_frequencies;
  Kokkos::View<float*, MemorySpace> unpacked;  // (head, row, dim), for quantised rows on a device
  Block block;
  PageFormat format;
  std::int64_t first_head, rows;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t head = first_head + i / rows;
    const std::int64_t row = i % rows;
    const std::int64_t slot = row % block.capacity;
    const PageId page = table(head, row / block.capacity);
    std::int32_t& position = page_positions(metadata(page))[slot];
    const std::int64_t shift = row - position;
    if (shift == 0) return;
    position = static_cast<std::int32_t>(row);
    if (format.keys != RowType::wide) {
      shift_quantised(QuantisedPage{format, block.capacity, block.dim}.at(addresses(page), false),
                      slot, unpacked.data(), i * block.dim, shift, inverse_frequencies.data());
      return;
    }
    Value* const key = reinterpret_cast<Value*>(addresses(page)) + block.row_offset(slot);
    shift_key(key, block.dim / 2, shift, inverse_frequencies.data());
  }
};

}  // namespace

}  // namespace kvzap::cache

namespace kvzap {

std::int64_t KVCache::compact_positions(
    const ExecutionSpace& exec, SequenceId id,
    const Kokkos::View<const float*, MemorySpace>& inverse_frequencies, std::int64_t rows) {
  cache::Store& store = *m_store;
  store.check_outside_step(id, "compact_positions");
  store.settle(id);
  cache::Sequence& sequence = store.sequence_at(id);
  if (2 * static_cast<int>(inverse_frequencies.extent(0)) != store.shape.head_dim) {
    throw Error(fmt::format("cache compact_positions: {} frequencies; expected half of head_dim {}",
                            inverse_frequencies.extent(0), store.shape.head_dim));
  }
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    const cache::LayerStore& layer = sequence.layers[l];
    store.check_pages(static_cast<int>(l), "compact_positions");
    if (store.shape.heads[l] > 0 && layer.tokens != layer.ring_first) {
      throw Error(fmt::format(
          "cache compact_positions: the ring of layer {} of sequence {} has rows", l, id));
    }
    for (int h = 0; h < store.shape.heads[l]; ++h) {
      if (rows < 0) rows = layer.retained(h);
      if (layer.retained(h) == rows) continue;
      throw Error(
          fmt::format("cache compact_positions: head {} of layer {} has {} rows; expected {}", h, l,
                      layer.retained(h), rows));
    }
  }
  if (rows < 0) {
    throw Error(
        "cache compact_positions: no heads on this rank; expected to be told the number of rows");
  }

  if (store.all_heads() > 0 && rows > 0) {
    store.enter(exec, sequence);
    for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
      store.own_pages(exec, sequence, static_cast<int>(l));
    }
    const auto addresses = store.pool.addresses(exec);
    const cache::Block block{store.shape.page_rows, store.shape.head_dim,
                             store.shape.format.vectors()};
    const auto turn = [&](int first_head, int heads,
                          const Kokkos::View<float*, MemorySpace>& unpacked) {
      with_value_type(store.dtype, [&](auto zero) {
        const cache::RotateKeys<decltype(zero)> kernel{addresses,
                                                       store.pool.metadata_addresses(),
                                                       sequence.table,
                                                       inverse_frequencies,
                                                       unpacked,
                                                       block,
                                                       store.shape.format,
                                                       first_head,
                                                       rows};
        Kokkos::parallel_for("kvzap::compact_positions::rotate",
                             cache::Range(exec, 0, heads * rows), kernel);
      });
    };
    if (store.shape.format.quantised() && !base::runs_on_host) {
      // Layer by layer, because the unpacked keys of all take more memory than the cache.
      const auto most = static_cast<std::size_t>(
          *std::max_element(store.shape.heads.begin(), store.shape.heads.end()));
      const std::size_t elements = most * rows * store.shape.head_dim;
      const auto unpacked =
          cache::or_out_of_memory("keys to rotate", elements * sizeof(float), store.pool, [&] {
            return cache::allocate_view<Kokkos::View<float*, MemorySpace>>(
                "kvzap::compact_positions::unpacked", elements);
          });
      for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
        turn(sequence.layers[l].first_head, store.shape.heads[l], unpacked);
      }
    } else {
      // A single kernel does all of it, so that a failed launch changes nothing.
      turn(0, store.all_heads(), {});
    }
  }
  for (cache::LayerStore& layer : sequence.layers) {
    layer.tokens = layer.ring_first = rows;
    for (int h = 0; h < static_cast<int>(layer.pages.size()); ++h) layer.keep_bounds(h, 0);
  }
  sequence.checkpoints.clear();
  return rows;
}

}  // namespace kvzap
