// Adds, forks, frees, checkpoints and restores sequences; reports the content of the cache.
#include <numeric>

#include "cache/cache_impl.hpp"

namespace kvzap {
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
  if (shape.format.packed() != (shape.format.values != RowType::wide)) {
    throw Error(fmt::format(
        "cache: pages with keys of type {} and values of type {}; expected both wide or none",
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
  if (!shape.format.packed()) return 2 * value_bytes * shape.page_rows * shape.head_dim;
  return PackedPage{shape.format, shape.page_rows, shape.head_dim}.bytes();
}

}  // namespace

using cache::allocate_view;
using cache::copy_elements;

KVCache::KVCache(DType dtype, const CacheShape& shape, MemoryMeter* meter, std::size_t limit)
    : m_shape(checked(shape)),
      m_dtype(dtype),
      m_meter(meter),
      m_pool(page_bytes(m_shape, size_of(m_dtype)), meter, limit,
             (sizeof(std::int32_t) + sizeof(float)) * m_shape.page_rows),
      m_work(std::make_unique<Workspace>()) {
  for (int l = 0; l < static_cast<int>(m_shape.heads.size()); ++l) {
    const int rows = m_shape.ring_rows(l);
    const auto found = std::find(m_block_rows.begin(), m_block_rows.end(), rows);
    const auto block = static_cast<std::size_t>(found - m_block_rows.begin());
    if (found == m_block_rows.end()) {
      m_block_rows.push_back(rows);
      m_block_heads.push_back(0);
    }
    m_ring_places.push_back({block, m_block_heads[block]});
    m_block_heads[block] += m_shape.heads[l];
  }
  m_first_state.assign(m_shape.heads.size() + 1, 0);
  for (std::size_t l = 0; l < m_shape.heads.size(); ++l) {
    const StateShape state = m_shape.states.empty() ? StateShape() : m_shape.states[l];
    m_first_state[l + 1] = m_first_state[l] + state.heads * state.values;
  }
}

KVCache::~KVCache() {}  // NOLINT(modernize-use-equals-default): is instantiated below

std::size_t KVCache::bytes_per_sequence() const {
  std::size_t rows = 0;
  for (std::size_t b = 0; b < m_block_rows.size(); ++b) {
    rows += std::size_t(m_block_heads[b]) * m_block_rows[b];
  }
  return rows * ring_row_bytes(m_shape.head_dim, size_of(m_dtype)) + state_bytes();
}

auto KVCache::make_rings(const char* label) const -> std::vector<RingBlock> {
  std::vector<RingBlock> rings;
  for (std::size_t b = 0; b < m_block_rows.size(); ++b) {
    const std::size_t heads = m_block_heads[b], rows = m_block_rows[b];
    rings.push_back({allocate_view<Rings>(label, heads, rows * pair_bytes()),
                     allocate_view<RingScores>(label, heads, rows)});
  }
  return rings;
}

void KVCache::copy_rings(const ExecutionSpace& exec, const std::vector<RingBlock>& to,
                         const std::vector<RingBlock>& from) {
  for (std::size_t b = 0; b < from.size(); ++b) {
    copy_elements(exec, to[b].rows.data(), from[b].rows.data(), from[b].rows.size());
    copy_elements(exec, to[b].scores.data(), from[b].scores.data(), from[b].scores.size());
  }
}

auto KVCache::make_states(const char* label) const -> States {
  return allocate_view<States>(label, static_cast<std::size_t>(m_first_state.back()));
}

auto KVCache::state_in(const States& states, int layer) const -> State {
  check_layer(layer);
  if (!m_shape.has_state(layer)) throw Error(fmt::format("cache: layer {} has no state", layer));
  return State(states.data() + m_first_state[layer], m_shape.states[layer].heads,
               m_shape.states[layer].values);
}

auto KVCache::state(const ExecutionSpace& exec, SequenceId sequence, int layer) -> StateUpdate {
  Sequence& found = sequence_at(sequence);
  enter(exec, found);
  const State now = state_in(found.states, layer);
  if (found.step < 0) return {now, now};
  const State next = state_in(m_next_states[found.step], layer);
  const bool is_first = found.layers[layer].tokens == m_step[found.step].tokens[layer];
  return {is_first ? now : next, next};
}

auto KVCache::state(const Checkpoint& checkpoint, int layer) const -> State {
  return state_in(checkpoint.states, layer);
}

void KVCache::count_tokens(SequenceId sequence, int layer, std::int64_t count) {
  state_in(sequence_at(sequence).states, layer);  // or its error
  store(sequence, layer).add_tokens(count);
}

auto KVCache::make_sequence() const -> Sequence {
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
    sequence.layers.resize(m_shape.heads.size());
    for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
      sequence.layers[l].pages.resize(m_shape.heads[l]);
    }
  } catch (const std::exception&) {
    throw OutOfMemory(fmt::format("out of memory: no room for {} bytes of rings (window {}){}",
                                  bytes_per_sequence(), m_shape.window,
                                  m_first_state.back() > 0 ? " and states" : ""),
                      bytes_per_sequence(), m_pool.free_bytes());
  }
  Kokkos::deep_copy(sequence.host_lengths, 0);
  int first_head = 0;
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    LayerStore& layer = sequence.layers[l];
    const int own_heads = static_cast<int>(layer.pages.size());
    const auto own = std::make_pair(first_head, first_head + own_heads);
    const auto [block, first_ring] = m_ring_places[l];
    const auto own_rings = std::make_pair(first_ring, first_ring + own_heads);
    layer.first_head = first_head;
    layer.window = m_shape.ring_rows(static_cast<int>(l));
    layer.has_pages = m_shape.has_pages(static_cast<int>(l));
    layer.restarts = m_shape.own_ring(static_cast<int>(l)).restarts;
    layer.retained = Kokkos::subview(sequence.retained, own);
    layer.ring = Kokkos::subview(sequence.rings[block].rows, own_rings, Kokkos::ALL);
    layer.ring_scores = Kokkos::subview(sequence.rings[block].scores, own_rings, Kokkos::ALL);
    layer.device_retained = Kokkos::subview(sequence.lengths, own);
    layer.host_retained = Kokkos::subview(sequence.host_lengths, own);
    first_head += own_heads;
  }
  return sequence;
}

// Inserts a new sequence and counts its memory.
void KVCache::insert(SequenceId id, Sequence&& sequence) {
  m_pool.claim(bytes_per_sequence());
  try {
    m_sequences.emplace(id, std::move(sequence));
  } catch (...) {
    m_pool.unclaim(bytes_per_sequence());
    throw;
  }
  m_sequences.at(id).own_bytes = MeteredBytes(m_meter, bytes_per_sequence());
}

SequenceId KVCache::add_sequence() {
  const SequenceId id = m_next_sequence++;
  cache::or_out_of_memory("a sequence", bytes_per_sequence(), m_pool, [&] {
    Sequence sequence = make_sequence();
    Kokkos::deep_copy(sequence.states, 0);
    insert(id, std::move(sequence));
  });
  return id;
}

SequenceId KVCache::fork(const ExecutionSpace& exec, SequenceId source) {
  return make_fork(
      exec, source, "fork",
      [](Sequence& copy, const Sequence& from) {
        for (std::size_t l = 0; l < copy.layers.size(); ++l) {
          copy.layers[l].tokens = from.layers[l].tokens;
          copy.layers[l].ring_first = from.layers[l].ring_first;
          copy.layers[l].pages = from.layers[l].pages;
        }
        std::copy_n(from.retained.data(), from.retained.extent(0), copy.retained.data());
      },
      [&](const Sequence& copy, const Sequence& from) {
        copy_rings(exec, copy.rings, from.rings);
        copy_elements(exec, copy.states.data(), from.states.data(), from.states.size());
      });
}

void KVCache::free_sequence(const ExecutionSpace& exec, SequenceId sequence) {
  check_outside_step(sequence, "free_sequence");
  Sequence& found = sequence_at(sequence);
  enter(exec, found);
  for (const LayerStore& layer : found.layers) {
    for (const auto& list : layer.pages) {
      for (PageId page : list) m_pool.release(page);
    }
  }
  record_releases(exec);
  m_pool.unclaim(bytes_per_sequence());
  m_sequences.erase(sequence);
}

auto KVCache::checkpoint(const ExecutionSpace& exec, SequenceId id) -> Checkpoint {
  check_outside_step(id, "checkpoint");
  settle(id);
  return cache::or_out_of_memory("a checkpoint", bytes_per_sequence(), m_pool, [&] {
    Sequence& sequence = sequence_at(id);
    enter(exec, sequence);
    Checkpoint checkpoint;
    checkpoint.sequence = id;
    for (const LayerStore& layer : sequence.layers) {
      checkpoint.tokens.push_back(layer.tokens);
      checkpoint.ring_first.push_back(layer.ring_first);
    }
    checkpoint.retained.assign(sequence.retained.data(),
                               sequence.retained.data() + sequence.retained.extent(0));
    checkpoint.counts = sequence.total;
    checkpoint.rings = make_rings("kvzap::checkpoint::rings");
    copy_rings(exec, checkpoint.rings, sequence.rings);
    checkpoint.states = make_states("kvzap::checkpoint::states");
    copy_elements(exec, checkpoint.states.data(), sequence.states.data(), sequence.states.size());
    sequence.checkpoints.insert(m_next_checkpoint);
    checkpoint.id = m_next_checkpoint++;
    checkpoint.bytes = MeteredBytes(m_meter, bytes_per_sequence());
    return checkpoint;
  });
}

void KVCache::restore(const ExecutionSpace& exec, SequenceId id, const Checkpoint& checkpoint) {
  check_outside_step(id, "restore");
  settle(id);
  if (checkpoint.sequence != id) {
    throw Error(fmt::format("cache restore: sequence {} given a checkpoint of sequence {}", id,
                            checkpoint.sequence));
  }
  Sequence& sequence = sequence_at(id);
  // Cutting a sequence back to an earlier state drops the later rows and voids later checkpoints.
  auto& valid = sequence.checkpoints;
  const auto found = valid.find(checkpoint.id);
  if (found == valid.end()) {
    throw Error(
        fmt::format("cache restore: sequence {} was cut back past this checkpoint, or compacted "
                    "since",
                    id));
  }
  enter(exec, sequence);
  copy_rings(exec, sequence.rings, checkpoint.rings);
  copy_elements(exec, sequence.states.data(), checkpoint.states.data(), sequence.states.size());
  valid.erase(std::next(found), valid.end());
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    LayerStore& layer = sequence.layers[l];
    layer.tokens = checkpoint.tokens[l];
    layer.ring_first = checkpoint.ring_first[l];
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      layer.retained(h) = checkpoint.retained[layer.first_head + h];
      layer.host_retained(h) = layer.retained(h);
    }
    release_surplus(layer);
  }
  sequence.total = checkpoint.counts;
  record_releases(exec);
  if constexpr (!base::runs_on_host) {
    Kokkos::deep_copy(exec, sequence.lengths, sequence.host_lengths);
  }
}

std::size_t KVCache::trim() {
  if (m_released_on) {
    base::fence(*m_released_on, "kvzap::trim: kernels may still read released pages");
    m_released_on.reset();
  }
  if (!m_in_step) {
    m_pool.unclaim(m_next_state_bytes.bytes());
    m_next_states.clear();
    m_next_state_bytes = {};
  }
  const std::size_t bytes = m_pool.trim();
  release_unused_host_memory();
  return bytes;
}

std::size_t KVCache::live_bytes(SequenceId sequence) const {
  const std::size_t ring_row = page_row_values(m_shape.head_dim, size_of(m_dtype));
  const std::size_t page_row = page_row_values(m_shape.head_dim, size_of(m_dtype), m_shape.format);
  settle(sequence);
  std::size_t bytes = 0;
  for (const LayerStore& layer : sequence_at(sequence).layers) {
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      bytes += page_row * layer.retained(h) + ring_row * layer.in_ring();
    }
  }
  return bytes;
}

CacheBytes KVCache::bytes() const {
  CacheBytes bytes;
  for (const auto& [id, sequence] : m_sequences) {
    bytes.live += live_bytes(id);
    bytes.allocated += sequence.own_bytes.bytes();
  }
  bytes.allocated += m_pool.allocated_bytes() + m_next_state_bytes.bytes();
  bytes.returned = m_pool.returned_bytes();
  return bytes;
}

std::int64_t KVCache::tokens(SequenceId sequence, int layer) const {
  return store(sequence, layer).tokens;
}

std::int64_t KVCache::rows(SequenceId sequence, int layer, int head) const {
  settle(sequence);
  const LayerStore& from = store(sequence, layer);
  return from.retained(checked_head(layer, head)) + from.in_ring();
}

const std::vector<PageId>& KVCache::page_list(SequenceId sequence, int layer, int head) const {
  settle(sequence);
  return store(sequence, layer).pages[checked_head(layer, head)];
}

std::vector<SequenceId> KVCache::sequences() const {
  std::vector<SequenceId> ids;
  for (const auto& entry : m_sequences) ids.push_back(entry.first);
  return ids;
}

}  // namespace kvzap
