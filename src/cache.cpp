#include <fmt/format.h>

#include "detail/kokkos_compat.hpp"

#include <algorithm>
#include <kvzap/cache.hpp>
#include <limits>
#include <numeric>

namespace kvzap {
namespace {

using ScoreMatrix = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

template <class Value>
KOKKOS_INLINE_FUNCTION void copy_row(const Value* source, std::int64_t source_stride, Value* target,
                                     std::int64_t target_stride, int dim) {
  if (source_stride == 1 && target_stride == 1) {
    for (int d = 0; d < dim; ++d) target[d] = source[d];
  } else {
    for (int d = 0; d < dim; ++d) target[d * target_stride] = source[d * source_stride];
  }
}

/// Strides of row `row` in a block of `capacity` rows.
template <PageOrder order>
struct Block {
  int capacity;
  int dim;
  KOKKOS_INLINE_FUNCTION std::int64_t row_offset(std::int64_t row) const {
    return order == PageOrder::token_major ? row * dim : row;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t dim_stride() const {
    return order == PageOrder::token_major ? 1 : capacity;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t values_offset() const { return std::int64_t{capacity} * dim; }
};

template <class Value>
std::size_t page_bytes(const CacheShape& shape) {
  // Keys, values, and the positions of the rows behind them.
  return static_cast<std::size_t>(shape.page_rows) *
         (2 * sizeof(Value) * shape.head_dim + sizeof(std::int32_t));
}

template <class Value>
KOKKOS_INLINE_FUNCTION std::int32_t* page_positions(std::uintptr_t page, int page_rows, int dim) {
  return reinterpret_cast<std::int32_t*>(page + 2 * sizeof(Value) * page_rows * dim);
}

const CacheShape& checked(const CacheShape& shape) {
  if (shape.heads.empty() || shape.head_dim < 1 || shape.window < 1 || shape.page_rows < 1) {
    throw Error(
        fmt::format("cache: {} layers, head_dim {}, window {}, page of {} rows; expected at "
                    "least 1 of each",
                    shape.heads.size(), shape.head_dim, shape.window, shape.page_rows));
  }
  for (int heads : shape.heads) {
    if (heads < 0) throw Error(fmt::format("cache: a layer with {} heads", heads));
  }
  return shape;
}

}  // namespace

template <class Value, PageOrder order>
KVCache<Value, order>::KVCache(CacheShape shape, MemoryMeter* meter)
    : m_shape(checked(shape)), m_meter(meter), m_pool(page_bytes<Value>(shape), meter) {}

template <class Value, PageOrder order>
KVCache<Value, order>::~KVCache() = default;

template <class Value, PageOrder order>
std::size_t KVCache<Value, order>::ring_bytes() const {
  const std::size_t heads =
      std::accumulate(m_shape.heads.begin(), m_shape.heads.end(), std::size_t{0});
  return heads * m_shape.window * (2 * sizeof(Value) * m_shape.head_dim + sizeof(float));
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::make_sequence() const -> Sequence {
  Sequence sequence;
  for (int heads : m_shape.heads) {
    LayerStore layer;
    try {
      layer.ring = decltype(layer.ring)(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::cache::ring"), heads,
          std::size_t{2} * m_shape.window * m_shape.head_dim);
      layer.ring_scores =
          ScoreMatrix(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::cache::ring_scores"),
                      heads, m_shape.window);
    } catch (const std::exception&) {
      throw Error(fmt::format("out of memory: no room for {} bytes of rings (window {})",
                              ring_bytes(), m_shape.window));
    }
    layer.pages.resize(heads);
    layer.survivors.assign(heads, 0);
    layer.page_table = decltype(layer.page_table)("kvzap::cache::page_table", heads, 1);
    layer.device_survivors = decltype(layer.device_survivors)("kvzap::cache::survivors", heads);
    sequence.layers.push_back(std::move(layer));
  }
  sequence.ring_bytes = MeteredBytes(m_meter, ring_bytes());
  return sequence;
}

template <class Value, PageOrder order>
SequenceId KVCache<Value, order>::add_sequence() {
  m_sequences.emplace(m_next_sequence, make_sequence());
  return m_next_sequence++;
}

template <class Value, PageOrder order>
SequenceId KVCache<Value, order>::fork(SequenceId source) {
  store(source, 0);  // checks the id
  Sequence copy = make_sequence();
  for (std::size_t l = 0; l < copy.layers.size(); ++l) {
    const LayerStore& from = m_sequences.at(source).layers[l];
    LayerStore& to = copy.layers[l];
    to.tokens = from.tokens;
    to.pages = from.pages;
    to.survivors = from.survivors;
    Kokkos::deep_copy(to.ring, from.ring);
    Kokkos::deep_copy(to.ring_scores, from.ring_scores);
    for (const auto& list : to.pages) {
      for (PageId page : list) m_pool.retain(page);
    }
    upload_tables(to);
  }
  m_sequences.emplace(m_next_sequence, std::move(copy));
  return m_next_sequence++;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::free_sequence(SequenceId sequence) {
  store(sequence, 0);
  for (const LayerStore& layer : m_sequences.at(sequence).layers) {
    for (const auto& list : layer.pages) {
      for (PageId page : list) m_pool.release(page);
    }
  }
  m_sequences.erase(sequence);
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::store(SequenceId sequence, int layer) const -> const LayerStore& {
  const auto found = m_sequences.find(sequence);
  if (found == m_sequences.end()) throw Error(fmt::format("cache: no sequence {}", sequence));
  if (layer < 0 || layer >= static_cast<int>(m_shape.heads.size())) {
    throw Error(fmt::format("cache: no layer {}; it has {}", layer, m_shape.heads.size()));
  }
  return found->second.layers[layer];
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::store(SequenceId sequence, int layer) -> LayerStore& {
  return const_cast<LayerStore&>(static_cast<const KVCache&>(*this).store(sequence, layer));
}

template <class Value, PageOrder order>
int KVCache<Value, order>::checked_head(int layer, int head) const {
  if (head < 0 || head >= m_shape.heads[layer]) {
    throw Error(fmt::format("cache: no head {} in layer {}; it has {} on this rank", head, layer,
                            m_shape.heads[layer]));
  }
  return head;
}

// Makes room for `new_survivors` more rows of a head: pages that are missing, and an own copy of
// the last page if rows are to be written into one that another list holds too.
template <class Value, PageOrder order>
void KVCache<Value, order>::reserve(LayerStore& layer, int head, std::int64_t new_survivors) {
  if (new_survivors == 0) return;
  auto& pages = layer.pages[head];
  const std::int64_t filled = layer.survivors[head] % m_shape.page_rows;
  if (filled != 0 && m_pool.reference_count(pages.back()) > 1) {
    const PageId own = m_pool.allocate();
    using Bytes = Kokkos::View<char*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    Kokkos::deep_copy(
        Bytes(reinterpret_cast<char*>(m_pool.address(own)), m_pool.page_bytes()),
        Bytes(reinterpret_cast<char*>(m_pool.address(pages.back())), m_pool.page_bytes()));
    m_pool.release(pages.back());
    pages.back() = own;
  }
  const std::int64_t rows = layer.survivors[head] + new_survivors;
  const std::size_t needed = (rows + m_shape.page_rows - 1) / m_shape.page_rows;
  while (pages.size() < needed) pages.push_back(m_pool.allocate());
}

template <class Value, PageOrder order>
void KVCache<Value, order>::upload_tables(LayerStore& layer) {
  std::size_t longest = 1;
  for (const auto& list : layer.pages) longest = std::max(longest, list.size());
  if (layer.page_table.extent(1) < longest) {
    layer.page_table = decltype(layer.page_table)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::cache::page_table"),
        layer.pages.size(), longest + longest / 2);
  }
  auto table = Kokkos::create_mirror_view(layer.page_table);
  auto survivors = Kokkos::create_mirror_view(layer.device_survivors);
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    for (std::size_t p = 0; p < layer.pages[h].size(); ++p) table(h, p) = layer.pages[h][p];
    survivors(h) = layer.survivors[h];
  }
  Kokkos::deep_copy(layer.page_table, table);
  Kokkos::deep_copy(layer.device_survivors, survivors);
}

template <class Value, PageOrder order>
AppendCounts KVCache<Value, order>::append(const ExecutionSpace& exec, SequenceId sequence,
                                           int layer_index, const RowsView& keys,
                                           const RowsView& values, const ScoresView& scores,
                                           const EvictionRule& rule) {
  LayerStore& layer = store(sequence, layer_index);
  const int heads = m_shape.heads[layer_index];
  const int dim = m_shape.head_dim;
  const int window = m_shape.window;
  const int page_rows = m_shape.page_rows;
  const std::int64_t count = keys.extent(0);
  for (const RowsView& view : {keys, values}) {
    if (static_cast<std::int64_t>(view.extent(0)) != count ||
        static_cast<int>(view.extent(1)) != heads || static_cast<int>(view.extent(2)) != dim) {
      throw Error(
          fmt::format("cache append: keys or values are ({}, {}, {}); expected ({}, {}, {}) = "
                      "(token, head, dim)",
                      view.extent(0), view.extent(1), view.extent(2), count, heads, dim));
    }
  }
  const bool scored = scores.extent(0) > 0 && scores.extent(1) > 0;
  if (scored && (static_cast<int>(scores.extent(0)) != heads ||
                 static_cast<std::int64_t>(scores.extent(1)) != count)) {
    throw Error(fmt::format("cache append: scores are ({}, {}); expected ({}, {}) = (head, token)",
                            scores.extent(0), scores.extent(1), heads, count));
  }
  if (layer.tokens + count > std::numeric_limits<std::int32_t>::max()) {
    throw Error(fmt::format("cache append: {} tokens exceed the largest position {}",
                            layer.tokens + count, std::numeric_limits<std::int32_t>::max()));
  }

  // Rows that leave the ring have positions first .. first + exits - 1; the older ones are in the
  // ring, the younger ones (if more than a window of rows arrive at once) only pass by.
  const std::int64_t old_tokens = layer.tokens;
  const std::int64_t in_ring = std::min<std::int64_t>(old_tokens, window);
  const std::int64_t first = old_tokens - in_ring;
  const std::int64_t exits = std::max<std::int64_t>(0, in_ring + count - window);
  const auto ring = layer.ring;
  const auto ring_scores = layer.ring_scores;
  const Block<order> ring_block{window, dim};
  const Block<order> page_block{page_rows, dim};
  const float unscored = std::numeric_limits<float>::quiet_NaN();
  const auto new_score = KOKKOS_LAMBDA(int head, std::int64_t token) {
    return scored ? scores(head, token) : unscored;
  };

  AppendCounts counts;
  if (exits > 0 && heads > 0) {
    // Judge: target(h * exits + e) is the running number of the kept row among the layer's, or -1.
    Kokkos::View<std::int64_t*, MemorySpace> target(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::append::target"), heads * exits);
    Kokkos::View<std::int64_t*, MemorySpace> offsets("kvzap::append::offsets", heads + 1);
    using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
    const auto score_of = KOKKOS_LAMBDA(int head, std::int64_t exit) {
      return exit < in_ring ? ring_scores(head, (first + exit) % window)
                            : new_score(head, exit - in_ring);
    };
    Kokkos::parallel_scan(
        "kvzap::append::judge", Range(exec, 0, heads * exits),
        KOKKOS_LAMBDA(std::int64_t i, std::int64_t & kept, bool final) {
          const int head = static_cast<int>(i / exits);
          const std::int64_t exit = i % exits;
          const bool keep = rule.keeps(score_of(head, exit), first + exit);
          if (final) {
            if (exit == 0) offsets(head) = kept;
            target(i) = keep ? kept : -1;
            if (i == heads * exits - 1) offsets(heads) = kept + (keep ? 1 : 0);
          }
          if (keep) ++kept;
        });
    if (rule.judge) {
      counts.judged = heads * exits;
      Kokkos::parallel_reduce(
          "kvzap::append::count_non_finite", Range(exec, 0, heads * exits),
          KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum) {
            if (!EvictionRule::is_finite(score_of(static_cast<int>(i / exits), i % exits))) ++sum;
          },
          counts.non_finite);
    }
    detail::fence(exec, "kvzap::append: the number of kept rows decides how many pages are taken");
    const auto host_offsets = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, offsets);
    if (rule.judge) counts.evicted = counts.judged - host_offsets(heads);

    // Allocate.
    Kokkos::View<std::int64_t*, MemorySpace> old_survivors(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::append::old_survivors"), heads);
    Kokkos::deep_copy(old_survivors, layer.device_survivors);
    if (host_offsets(heads) > 0) {
      for (int h = 0; h < heads; ++h) {
        const std::int64_t kept = host_offsets(h + 1) - host_offsets(h);
        reserve(layer, h, kept);
        layer.survivors[h] += kept;
      }
      upload_tables(layer);

      // Admit: kept rows move into their pages, dropped ones are never touched.
      const auto addresses = m_pool.addresses();
      const auto table = layer.page_table;
      Kokkos::parallel_for(
          "kvzap::append::admit", Range(exec, 0, heads * exits), KOKKOS_LAMBDA(std::int64_t i) {
            if (target(i) < 0) return;
            const int head = static_cast<int>(i / exits);
            const std::int64_t exit = i % exits;
            const std::int64_t row = old_survivors(head) + target(i) - offsets(head);
            const std::uintptr_t page = addresses(table(head, row / page_rows));
            const std::int64_t slot = row % page_rows;
            Value* page_keys = reinterpret_cast<Value*>(page) + page_block.row_offset(slot);
            Value* page_values = page_keys + page_block.values_offset();
            page_positions<Value>(page, page_rows, dim)[slot] =
                static_cast<std::int32_t>(first + exit);
            if (exit < in_ring) {
              const Value* source = &ring(head, 0) + ring_block.row_offset((first + exit) % window);
              copy_row(source, ring_block.dim_stride(), page_keys, page_block.dim_stride(), dim);
              copy_row(source + ring_block.values_offset(), ring_block.dim_stride(), page_values,
                       page_block.dim_stride(), dim);
            } else {
              const std::int64_t token = exit - in_ring;
              copy_row(&keys(token, head, 0), keys.stride(2), page_keys, page_block.dim_stride(),
                       dim);
              copy_row(&values(token, head, 0), values.stride(2), page_values,
                       page_block.dim_stride(), dim);
            }
          });
    }
  }

  // The last rows to arrive take the ring slots of those that left.
  const std::int64_t entering = std::min<std::int64_t>(count, window);
  Kokkos::parallel_for(
      "kvzap::append::ring",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0,
                                                                           heads * entering),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int head = static_cast<int>(i / entering);
        const std::int64_t token = count - entering + i % entering;
        const std::int64_t slot = (old_tokens + token) % window;
        Value* target = &ring(head, 0) + ring_block.row_offset(slot);
        copy_row(&keys(token, head, 0), keys.stride(2), target, ring_block.dim_stride(), dim);
        copy_row(&values(token, head, 0), values.stride(2), target + ring_block.values_offset(),
                 ring_block.dim_stride(), dim);
        ring_scores(head, slot) = new_score(head, token);
      });
  layer.tokens += count;
  return counts;
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::checkpoint(SequenceId sequence) -> Checkpoint {
  store(sequence, 0);
  Checkpoint checkpoint;
  checkpoint.sequence = sequence;
  for (const LayerStore& layer : m_sequences.at(sequence).layers) {
    typename Checkpoint::LayerState state;
    state.tokens = layer.tokens;
    state.survivors = layer.survivors;
    state.ring = decltype(state.ring)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::checkpoint::ring"),
        layer.ring.extent(0), layer.ring.extent(1));
    state.ring_scores = ScoreMatrix(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::checkpoint::ring_scores"),
        layer.ring_scores.extent(0), layer.ring_scores.extent(1));
    Kokkos::deep_copy(state.ring, layer.ring);
    Kokkos::deep_copy(state.ring_scores, layer.ring_scores);
    checkpoint.layers.push_back(std::move(state));
  }
  checkpoint.bytes = MeteredBytes(m_meter, ring_bytes());
  checkpoint.id = m_next_checkpoint++;
  m_sequences.at(sequence).checkpoints.insert(checkpoint.id);
  return checkpoint;
}

template <class Value, PageOrder order>
void KVCache<Value, order>::restore(SequenceId sequence, const Checkpoint& checkpoint) {
  store(sequence, 0);
  if (checkpoint.sequence != sequence) {
    throw Error(fmt::format("cache restore: sequence {} given a checkpoint of sequence {}",
                            sequence, checkpoint.sequence));
  }
  // Rows that came after an earlier state are gone once the sequence has been cut back to it, and
  // so are the checkpoints between.
  auto& valid = m_sequences.at(sequence).checkpoints;
  const auto found = valid.find(checkpoint.id);
  if (found == valid.end()) {
    throw Error(
        fmt::format("cache restore: sequence {} was cut back past this checkpoint", sequence));
  }
  valid.erase(std::next(found), valid.end());
  auto& layers = m_sequences.at(sequence).layers;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    LayerStore& layer = layers[l];
    const auto& state = checkpoint.layers[l];
    layer.tokens = state.tokens;
    Kokkos::deep_copy(layer.ring, state.ring);
    Kokkos::deep_copy(layer.ring_scores, state.ring_scores);
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      layer.survivors[h] = state.survivors[h];
      const std::size_t keep = (state.survivors[h] + m_shape.page_rows - 1) / m_shape.page_rows;
      while (layer.pages[h].size() > keep) {
        m_pool.release(layer.pages[h].back());
        layer.pages[h].pop_back();
      }
    }
    upload_tables(layer);
  }
}

template <class Value, PageOrder order>
std::size_t KVCache<Value, order>::trim() {
  const std::size_t bytes = m_pool.trim();
  release_unused_host_memory();
  return bytes;
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::layer(SequenceId sequence, int layer_index) -> Layer {
  const LayerStore& from = store(sequence, layer_index);
  Layer layer;
  layer.addresses = m_pool.addresses();
  layer.page_table = from.page_table;
  layer.survivors = from.device_survivors;
  layer.ring = from.ring;
  layer.tokens = from.tokens;
  layer.heads = m_shape.heads[layer_index];
  layer.window = m_shape.window;
  layer.page_rows = m_shape.page_rows;
  layer.head_dim = m_shape.head_dim;
  return layer;
}

template <class Value, PageOrder order>
std::int64_t KVCache<Value, order>::tokens(SequenceId sequence, int layer) const {
  return store(sequence, layer).tokens;
}

template <class Value, PageOrder order>
std::int64_t KVCache<Value, order>::rows(SequenceId sequence, int layer, int head) const {
  const LayerStore& from = store(sequence, layer);
  return from.survivors[checked_head(layer, head)] +
         std::min<std::int64_t>(from.tokens, m_shape.window);
}

template <class Value, PageOrder order>
auto KVCache<Value, order>::host_rows(SequenceId sequence, int layer_index, int head) -> HostRows {
  const LayerStore& from = store(sequence, layer_index);
  const std::int64_t total = rows(sequence, layer_index, head);
  const std::int64_t survivors = from.survivors[head];
  const std::int64_t first_in_ring =
      from.tokens - std::min<std::int64_t>(from.tokens, m_shape.window);
  const int dim = m_shape.head_dim;
  const int page_rows = m_shape.page_rows;
  const int window = m_shape.window;
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> keys(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::host_rows::keys"), total, dim);
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> values(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::host_rows::values"), total, dim);
  Kokkos::View<std::int64_t*, MemorySpace> positions(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::host_rows::positions"), total);
  const auto addresses = m_pool.addresses();
  const auto table = from.page_table;
  const auto ring = from.ring;
  const Block<order> ring_block{window, dim};
  const Block<order> page_block{page_rows, dim};
  const ExecutionSpace exec;
  Kokkos::parallel_for(
      "kvzap::host_rows::gather",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, total),
      KOKKOS_LAMBDA(std::int64_t row) {
        const Value* source;
        Block<order> block = ring_block;
        if (row < survivors) {
          const std::uintptr_t page = addresses(table(head, row / page_rows));
          block = page_block;
          source = reinterpret_cast<const Value*>(page) + block.row_offset(row % page_rows);
          positions(row) = page_positions<Value>(page, page_rows, dim)[row % page_rows];
        } else {
          positions(row) = first_in_ring + row - survivors;
          source = &ring(head, 0) + block.row_offset(positions(row) % window);
        }
        copy_row(source, block.dim_stride(), &keys(row, 0), 1, dim);
        copy_row(source + block.values_offset(), block.dim_stride(), &values(row, 0), 1, dim);
      });
  detail::fence(exec, "kvzap::host_rows: the host reads the gathered rows");
  HostRows host;
  const auto host_keys = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, keys);
  const auto host_values = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, values);
  const auto host_positions = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, positions);
  host.keys.assign(host_keys.data(), host_keys.data() + host_keys.size());
  host.values.assign(host_values.data(), host_values.data() + host_values.size());
  host.positions.assign(host_positions.data(), host_positions.data() + host_positions.size());
  return host;
}

template <class Value, PageOrder order>
std::vector<std::int64_t> KVCache<Value, order>::positions(SequenceId sequence, int layer,
                                                           int head) {
  return host_rows(sequence, layer, head).positions;
}

template <class Value, PageOrder order>
CacheBytes KVCache<Value, order>::bytes() const {
  CacheBytes bytes;
  const std::size_t row = 2 * sizeof(Value) * m_shape.head_dim;
  for (const auto& [id, sequence] : m_sequences) {
    for (const LayerStore& layer : sequence.layers) {
      const std::int64_t ring = std::min<std::int64_t>(layer.tokens, m_shape.window);
      for (std::int64_t survivors : layer.survivors) bytes.live += row * (survivors + ring);
    }
    bytes.allocated += sequence.ring_bytes.bytes();
  }
  bytes.allocated += m_pool.allocated_bytes();
  bytes.returned = m_pool.returned_bytes();
  return bytes;
}

template <class Value, PageOrder order>
const std::vector<PageId>& KVCache<Value, order>::page_list(SequenceId sequence, int layer,
                                                            int head) const {
  return store(sequence, layer).pages[checked_head(layer, head)];
}

template <class Value, PageOrder order>
std::vector<SequenceId> KVCache<Value, order>::sequences() const {
  std::vector<SequenceId> ids;
  for (const auto& entry : m_sequences) ids.push_back(entry.first);
  return ids;
}

template class KVCache<float, PageOrder::token_major>;
template class KVCache<float, PageOrder::dim_major>;
template class KVCache<half, PageOrder::token_major>;
template class KVCache<half, PageOrder::dim_major>;
template class KVCache<bfloat16, PageOrder::token_major>;
template class KVCache<bfloat16, PageOrder::dim_major>;

}  // namespace kvzap
