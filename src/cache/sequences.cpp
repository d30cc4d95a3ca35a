// Adds, forks, frees, checkpoints and restores sequences; reports the content of the cache.
#include <numeric>

#include "cache/cache_impl.hpp"

namespace kvzap::cache {
namespace {

// The initial width of a sequence's page table.
constexpr std::size_t first_table_width = 16;

const CacheShape& checked(const CacheShape& shape) {
  if (shape.heads.empty() || shape.head_dim < 1 || shape.window < 1 || shape.page_rows < 1) {
    throw Error(
        fmt::format("cache: {} layers, head_dim {}, window {}, page of {} rows; expected at "
                    "least 1 of each",
                    shape.heads.size(), shape.head_dim, shape.window, shape.page_rows));
  }
  if (shape.format.quantised() != (shape.format.values != RowType::wide)) {
    throw Error(fmt::format(
        "cache: pages with keys of type {} and values of type {}; expected both wide or none",
        name_of(shape.format.keys), name_of(shape.format.values)));
  }
  if (shape.format.values_are_keys && shape.format.keys != shape.format.values) {
    throw Error(fmt::format(
        "cache: pages with keys of type {} and values of type {}; expected one type, because this "
        "model stores one vector for both",
        name_of(shape.format.keys), name_of(shape.format.values)));
  }
  for (int heads : shape.heads) {
    if (heads < 0) throw Error(fmt::format("cache: a layer with {} heads", heads));
  }
  if (!shape.own_rings.empty() && shape.own_rings.size() != shape.heads.size()) {
    throw Error(fmt::format("cache: own rings of {} layers; expected {}", shape.own_rings.size(),
                            shape.heads.size()));
  }
  for (const OwnRing& ring : shape.own_rings) {
    if (ring.rows < 0) throw Error(fmt::format("cache: a ring of {} rows", ring.rows));
    if (ring.head_dim < 0 || (ring.rows == 0 && ring.head_dim > 0)) {
      throw Error(fmt::format(
          "cache: a layer with a ring of {} rows and head_dim {}; expected a head_dim above 0, and "
          "that of all layers with pages",
          ring.rows, ring.head_dim));
    }
  }
  if (!shape.states.empty() && shape.states.size() != shape.heads.size()) {
    throw Error(fmt::format("cache: states of {} layers; expected {}", shape.states.size(),
                            shape.heads.size()));
  }
  for (const StateShape& state : shape.states) {
    if (state.heads >= 0 && state.values >= 0) continue;
    throw Error(
        fmt::format("cache: a state of {} heads, {} values each", state.heads, state.values));
  }
  return shape;
}

std::size_t page_bytes(const CacheShape& shape, std::size_t value_bytes) {
  if (!shape.format.quantised()) {
    return shape.format.vectors() * value_bytes * shape.page_rows * shape.head_dim;
  }
  return QuantisedPage{shape.format, shape.page_rows, shape.head_dim}.bytes();
}

std::size_t metadata_bytes(const CacheShape& shape, std::size_t value_bytes) {
  return page_metadata_row_bytes * shape.page_rows +
         (shape.bounds_from ? page_bounds_bytes(shape.head_dim, value_bytes, shape.format) : 0);
}

void copy_rings(const ExecutionSpace& exec, const std::vector<RingBlock>& to,
                const std::vector<RingBlock>& from) {
  for (std::size_t b = 0; b < from.size(); ++b) {
    copy_elements(exec, to[b].rows.data(), from[b].rows.data(), from[b].rows.size());
    copy_elements(exec, to[b].scores.data(), from[b].scores.data(), from[b].scores.size());
  }
}

}  // namespace

Store::Store(DType type, const CacheShape& extents, MemoryMeter* memory_meter, std::size_t limit)
    : shape(checked(extents)),
      dtype(type),
      meter(memory_meter),
      pool(page_bytes(shape, size_of(dtype)), meter, limit, metadata_bytes(shape, size_of(dtype))) {
  for (int l = 0; l < static_cast<int>(shape.heads.size()); ++l) {
    const std::pair<int, int> ring(shape.ring_rows(l), shape.dim(l));
    const auto found = std::find(block_rings.begin(), block_rings.end(), ring);
    const auto block = static_cast<std::size_t>(found - block_rings.begin());
    if (found == block_rings.end()) {
      block_rings.push_back(ring);
      block_heads.push_back(0);
    }
    ring_places.push_back({block, block_heads[block]});
    block_heads[block] += shape.heads[l];
  }
  first_state.assign(shape.heads.size() + 1, 0);
  for (std::size_t l = 0; l < shape.heads.size(); ++l) {
    const StateShape state = shape.states.empty() ? StateShape() : shape.states[l];
    first_state[l + 1] = first_state[l] + state.heads * state.values;
  }
}

int Store::most_dim() const {
  int most = shape.head_dim;
  for (const OwnRing& ring : shape.own_rings) most = std::max(most, ring.head_dim);
  return most;
}

std::size_t Store::bytes_per_sequence() const {
  std::size_t bytes = 0;
  for (std::size_t b = 0; b < block_rings.size(); ++b) {
    const auto [rows, dim] = block_rings[b];
    bytes += std::size_t(block_heads[b]) * rows * ring_row_bytes(dim, size_of(dtype), shape.format);
  }
  return bytes + state_bytes();
}

std::vector<RingBlock> Store::make_rings(const char* label) const {
  std::vector<RingBlock> rings;
  for (std::size_t b = 0; b < block_rings.size(); ++b) {
    const std::size_t heads = block_heads[b], rows = block_rings[b].first;
    const std::int64_t pair = pair_bytes(block_rings[b].second);
    rings.push_back({allocate_view<decltype(RingBlock::rows)>(label, heads, rows * pair),
                     allocate_view<decltype(RingBlock::scores)>(label, heads, rows)});
  }
  return rings;
}

States Store::make_states(const char* label) const {
  return allocate_view<States>(label, static_cast<std::size_t>(first_state.back()));
}

KVCache::State Store::state_in(const States& states, int layer) const {
  check_layer(layer);
  if (!shape.has_state(layer)) throw Error(fmt::format("cache: layer {} has no state", layer));
  return KVCache::State(states.data() + first_state[layer], shape.states[layer].heads,
                        shape.states[layer].values);
}

Sequence Store::make_sequence() const {
  Sequence sequence;
  const std::size_t heads = all_heads();
  try {
    sequence.rings = make_rings("kvzap::cache::rings");
    sequence.states = make_states("kvzap::cache::states");
    base::before_allocation(heads * sizeof(std::int64_t));
    sequence.retained = HostCounts("kvzap::cache::retained", heads);
    base::before_allocation(heads * sizeof(std::int64_t));
    sequence.lengths = Counts("kvzap::cache::lengths", heads + 2);
    sequence.host_lengths = Kokkos::create_mirror_view(sequence.lengths);
    sequence.table = allocate_view<PageTable>("kvzap::cache::page_table", heads, first_table_width);
    sequence.host_table = Kokkos::create_mirror_view(sequence.table);
    if (shape.bounds_from && base::machine().on_device()) {
      base::before_allocation(2 * heads * sizeof(std::int64_t));
      sequence.bounded = Counts("kvzap::cache::bounded", 2 * heads);
    }
    sequence.layers.resize(shape.heads.size());
    for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
      sequence.layers[l].pages.resize(shape.heads[l]);
    }
  } catch (const std::exception&) {
    throw OutOfMemory(fmt::format("out of memory: no room for {} bytes of rings (window {}){}",
                                  bytes_per_sequence(), shape.window,
                                  first_state.back() > 0 ? " and states" : ""),
                      bytes_per_sequence(), pool.free_bytes());
  }
  Kokkos::deep_copy(sequence.host_lengths, 0);
  int first_head = 0;
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    LayerStore& layer = sequence.layers[l];
    const int own_heads = static_cast<int>(layer.pages.size());
    const auto own = std::make_pair(first_head, first_head + own_heads);
    const auto [block, first_ring] = ring_places[l];
    const auto own_rings = std::make_pair(first_ring, first_ring + own_heads);
    layer.first_head = first_head;
    layer.window = shape.ring_rows(static_cast<int>(l));
    layer.has_pages = shape.has_pages(static_cast<int>(l));
    layer.restarts = shape.own_ring(static_cast<int>(l)).restarts;
    layer.retained = Kokkos::subview(sequence.retained, own);
    layer.ring = Kokkos::subview(sequence.rings[block].rows, own_rings, Kokkos::ALL);
    layer.ring_scores = Kokkos::subview(sequence.rings[block].scores, own_rings, Kokkos::ALL);
    layer.device_retained = Kokkos::subview(sequence.lengths, own);
    layer.host_retained = Kokkos::subview(sequence.host_lengths, own);
    if (shape.has_bounds(static_cast<int>(l))) {
      layer.bounded.assign(own_heads, 0);
      if (sequence.bounded.extent(0) > 0) {
        const int heads = all_heads();
        layer.device_bounded = Kokkos::subview(sequence.bounded, own);
        layer.still_bounded = Kokkos::subview(
            sequence.bounded, std::make_pair(heads + own.first, heads + own.second));
      }
    }
    first_head += own_heads;
  }
  return sequence;
}

// Inserts a new sequence and counts its memory.
void Store::insert(SequenceId id, Sequence&& sequence) {
  pool.claim(bytes_per_sequence());
  try {
    sequences.emplace(id, std::move(sequence));
  } catch (...) {
    pool.unclaim(bytes_per_sequence());
    throw;
  }
  sequences.at(id).own_bytes = MeteredBytes(meter, bytes_per_sequence());
}

std::int64_t Store::rows(SequenceId sequence, int layer, int head) {
  settle(sequence);
  const LayerStore& from = layer_at(sequence, layer);
  return from.retained(checked_head(layer, head)) + from.in_ring();
}

}  // namespace kvzap::cache

namespace kvzap {

using cache::copy_elements;

KVCache::KVCache(DType dtype, const CacheShape& shape, MemoryMeter* meter, std::size_t limit)
    : m_store(std::make_unique<cache::Store>(dtype, shape, meter, limit)) {}

KVCache::~KVCache() {}  // NOLINT(modernize-use-equals-default): is instantiated below

auto KVCache::state(const ExecutionSpace& exec, SequenceId sequence, int layer) -> StateUpdate {
  cache::Store& store = *m_store;
  cache::Sequence& found = store.sequence_at(sequence);
  store.enter(exec, found);
  const State now = store.state_in(found.states, layer);
  if (found.step < 0) return {now, now};
  const State next = store.state_in(store.next_states[found.step], layer);
  const bool is_first = store.step_states[found.step].passed[layer] == 0;
  return {is_first ? now : next, next};
}

auto KVCache::state(const Checkpoint& checkpoint, int layer) const -> State {
  return m_store->state_in(checkpoint.states, layer);
}

void KVCache::count_tokens(SequenceId sequence, int layer, std::int64_t count) {
  const CacheShape& shape = m_store->shape;
  cache::LayerStore& of_layer = m_store->layer_at(sequence, layer);
  if (shape.keeps_rows(layer) && !shape.has_state(layer)) {
    throw Error(fmt::format(
        "cache count_tokens: layer {} keeps rows alone; expected one with a state, or without rows",
        layer));
  }
  const int step = m_store->sequence_at(sequence).step;
  if (step >= 0) m_store->step_states[step].passed[layer] += count;
  if (!shape.keeps_rows(layer)) of_layer.add_tokens(count);  // else the append counts them
}

SequenceId KVCache::add_sequence() {
  cache::Store& store = *m_store;
  const SequenceId id = store.next_sequence++;
  cache::or_out_of_memory("a sequence", store.bytes_per_sequence(), store.pool, [&] {
    cache::Sequence sequence = store.make_sequence();
    Kokkos::deep_copy(sequence.states, 0);
    store.insert(id, std::move(sequence));
  });
  return id;
}

SequenceId KVCache::fork(const ExecutionSpace& exec, SequenceId source) {
  const bool on_device = base::machine().on_device();
  return m_store->make_fork(
      exec, source, "fork",
      [on_device](cache::Sequence& copy, const cache::Sequence& from) {
        for (std::size_t l = 0; l < copy.layers.size(); ++l) {
          copy.layers[l].tokens = from.layers[l].tokens;
          copy.layers[l].ring_first = from.layers[l].ring_first;
          copy.layers[l].pages = from.layers[l].pages;
          if (!on_device) copy.layers[l].bounded = from.layers[l].bounded;
        }
        std::copy_n(from.retained.data(), from.retained.extent(0), copy.retained.data());
      },
      [&](const cache::Sequence& copy, const cache::Sequence& from) {
        cache::copy_rings(exec, copy.rings, from.rings);
        copy_elements(exec, copy.states.data(), from.states.data(), from.states.size());
      });
}

void KVCache::free_sequence(const ExecutionSpace& exec, SequenceId sequence) {
  cache::Store& store = *m_store;
  store.check_outside_step(sequence, "free_sequence");
  cache::Sequence& found = store.sequence_at(sequence);
  store.enter(exec, found);
  for (const cache::LayerStore& layer : found.layers) {
    for (const auto& list : layer.pages) {
      for (PageId page : list) store.pool.release(page);
    }
  }
  store.record_releases(exec);
  store.pool.unclaim(store.bytes_per_sequence());
  store.sequences.erase(sequence);
}

auto KVCache::checkpoint(const ExecutionSpace& exec, SequenceId id) -> Checkpoint {
  cache::Store& store = *m_store;
  store.check_outside_step(id, "checkpoint");
  store.settle(id);
  return cache::or_out_of_memory("a checkpoint", store.bytes_per_sequence(), store.pool, [&] {
    cache::Sequence& sequence = store.sequence_at(id);
    store.enter(exec, sequence);
    Checkpoint checkpoint;
    checkpoint.sequence = id;
    for (const cache::LayerStore& layer : sequence.layers) {
      checkpoint.tokens.push_back(layer.tokens);
      checkpoint.ring_first.push_back(layer.ring_first);
    }
    checkpoint.retained.assign(sequence.retained.data(),
                               sequence.retained.data() + sequence.retained.extent(0));
    checkpoint.counts = sequence.total;
    checkpoint.rings = store.make_rings("kvzap::checkpoint::rings");
    cache::copy_rings(exec, checkpoint.rings, sequence.rings);
    checkpoint.states = store.make_states("kvzap::checkpoint::states");
    copy_elements(exec, checkpoint.states.data(), sequence.states.data(), sequence.states.size());
    sequence.checkpoints.insert(store.next_checkpoint);
    checkpoint.id = store.next_checkpoint++;
    checkpoint.bytes = MeteredBytes(store.meter, store.bytes_per_sequence());
    return checkpoint;
  });
}

void KVCache::restore(const ExecutionSpace& exec, SequenceId id, const Checkpoint& checkpoint) {
  cache::Store& store = *m_store;
  store.check_outside_step(id, "restore");
  store.settle(id);
  if (checkpoint.sequence != id) {
    throw Error(fmt::format("cache restore: sequence {} given a checkpoint of sequence {}", id,
                            checkpoint.sequence));
  }
  cache::Sequence& sequence = store.sequence_at(id);
  // Cutting a sequence back to an earlier state drops the later rows and voids later checkpoints.
  auto& valid = sequence.checkpoints;
  const auto found = valid.find(checkpoint.id);
  if (found == valid.end()) {
    throw Error(
        fmt::format("cache restore: sequence {} was cut back past this checkpoint, or compacted "
                    "since",
                    id));
  }
  store.enter(exec, sequence);
  cache::copy_rings(exec, sequence.rings, checkpoint.rings);
  copy_elements(exec, sequence.states.data(), checkpoint.states.data(), sequence.states.size());
  valid.erase(std::next(found), valid.end());
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    cache::LayerStore& layer = sequence.layers[l];
    layer.tokens = checkpoint.tokens[l];
    layer.ring_first = checkpoint.ring_first[l];
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      layer.retained(h) = checkpoint.retained[layer.first_head + h];
      layer.host_retained(h) = layer.retained(h);
    }
    store.release_surplus(layer);
  }
  sequence.total = checkpoint.counts;
  store.record_releases(exec);
  if constexpr (!base::runs_on_host) {
    Kokkos::deep_copy(exec, sequence.lengths, sequence.host_lengths);
  }
  for (cache::LayerStore& layer : sequence.layers) store.forget_bounds(exec, layer);
}

std::size_t KVCache::trim() {
  cache::Store& store = *m_store;
  if (store.released_on) {
    base::fence(*store.released_on, "kvzap::trim: kernels may still read released pages");
    store.released_on.reset();
  }
  if (!store.in_step) {
    store.pool.unclaim(store.next_state_bytes.bytes());
    store.next_states.clear();
    store.next_state_bytes = {};
  }
  const std::size_t bytes = store.pool.trim();
  release_unused_host_memory();
  return bytes;
}

std::size_t KVCache::live_bytes(SequenceId sequence) const {
  cache::Store& store = *m_store;
  const PageFormat& format = store.shape.format;
  const std::size_t page_row = page_row_values(store.shape.head_dim, size_of(store.dtype), format);
  store.settle(sequence);
  std::size_t bytes = 0;
  const auto& layers = store.sequence_at(sequence).layers;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const cache::LayerStore& layer = layers[l];
    const std::size_t ring_row =
        page_row_values(store.shape.dim(static_cast<int>(l)), size_of(store.dtype), format.wide());
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      bytes += page_row * layer.retained(h) + ring_row * layer.in_ring();
    }
  }
  return bytes;
}

CacheBytes KVCache::bytes() const {
  CacheBytes bytes;
  for (const auto& [id, sequence] : m_store->sequences) {
    bytes.live += live_bytes(id);
    bytes.allocated += sequence.own_bytes.bytes();
  }
  bytes.allocated += m_store->pool.allocated_bytes() + m_store->next_state_bytes.bytes();
  bytes.returned = m_store->pool.returned_bytes();
  return bytes;
}

std::int64_t KVCache::tokens(SequenceId sequence, int layer) const {
  return m_store->layer_at(sequence, layer).tokens;
}

const std::vector<PageId>& KVCache::page_list(SequenceId sequence, int layer, int head) const {
  m_store->settle(sequence);
  return m_store->layer_at(sequence, layer).pages[m_store->checked_head(layer, head)];
}

std::int64_t KVCache::rows(SequenceId sequence, int layer, int head) const {
  return m_store->rows(sequence, layer, head);
}

std::size_t KVCache::bytes_per_sequence() const { return m_store->bytes_per_sequence(); }
auto KVCache::layer(SequenceId sequence, int layer) -> Layer {
  return m_store->cached_layer(sequence, layer);
}
void KVCache::set_limit(std::size_t bytes) { m_store->pool.set_limit(bytes); }
bool KVCache::in_step() const { return m_store->in_step; }
DType KVCache::dtype() const { return m_store->dtype; }
const CacheShape& KVCache::shape() const { return m_store->shape; }
const PagePool& KVCache::pool() const { return m_store->pool; }

std::vector<SequenceId> KVCache::sequences() const {
  cache::Store& store = *m_store;
  std::vector<SequenceId> ids;
  for (const auto& entry : store.sequences) ids.push_back(entry.first);
  return ids;
}

}  // namespace kvzap
