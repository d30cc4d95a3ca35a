// Read access to the rows of a cache, for kernels and for the host, and access to their scores.
#include <numeric>

#include "cache/cache_impl.hpp"
#include "cache/layer_rows.hpp"

namespace kvzap::cache {
namespace {

/// Consecutive copies of a head's rows.
template <class Value>
struct Gathered {
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> keys;
  Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace> values;
  Kokkos::View<std::int64_t*, MemorySpace> positions;
  Kokkos::View<float*, MemorySpace> scores;
};

template <class Value>
Gathered<Value> gather(const ExecutionSpace& exec, const LayerRows& rows, int head,
                       std::int64_t total) {
  const auto keys = allocate_view<decltype(Gathered<Value>::keys)>(
      "kvzap::host_rows::keys", total, std::int64_t{rows.layer.head_dim});
  const auto values = allocate_view<decltype(Gathered<Value>::values)>(
      "kvzap::host_rows::values", total, std::int64_t{rows.layer.head_dim});
  const auto positions =
      allocate_view<decltype(Gathered<Value>::positions)>("kvzap::host_rows::positions", total);
  const auto scores =
      allocate_view<decltype(Gathered<Value>::scores)>("kvzap::host_rows::scores", total);
  Kokkos::parallel_for(
      "kvzap::host_rows::gather", Range(exec, 0, total), KOKKOS_LAMBDA(std::int64_t row) {
        const auto found = rows.at(head, row);
        positions(row) = found.position;
        scores(row) = *found.score;
        rows.read(head, row, &keys(row, 0), &values(row, 0));
      });
  return {keys, values, positions, scores};
}

template <class View, class Vector>
void bring(const View& view, Vector& vector) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, view);
  vector.assign(host.data(), host.data() + host.size());
}

template <class Scores, class Positions>
void copy_scores(const ExecutionSpace& exec, const LayerRows& rows, int heads, std::int64_t longest,
                 const Scores& scores, const Positions& positions) {
  const bool with_positions = positions.extent(1) > 0;
  Kokkos::parallel_for(
      "kvzap::row_scores", Range(exec, 0, heads * longest), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / longest;
        const std::int64_t row = i % longest;
        if (row >= rows.layer.rows(head)) return;
        const auto found = rows.at(head, row);
        scores(head, row) = *found.score;
        if (with_positions) positions(head, row) = found.position;
      });
}

template <class Scores>
void change_scores(const ExecutionSpace& exec, const LayerRows& rows, int heads,
                   std::int64_t longest, const Scores& scores) {
  Kokkos::parallel_for(
      "kvzap::set_row_scores", Range(exec, 0, heads * longest), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / longest;
        const std::int64_t row = i % longest;
        if (row < rows.layer.rows(head)) *rows.at(head, row).score = scores(head, row);
      });
}

std::int64_t check_row_scores(Store& store, SequenceId sequence, int layer_index, std::size_t heads,
                              std::size_t columns) {
  std::int64_t longest = 0;
  store.layer_at(sequence, layer_index);
  for (int h = 0; h < store.shape.heads[layer_index]; ++h) {
    longest = std::max(longest, store.rows(sequence, layer_index, h));
  }
  if (static_cast<int>(heads) != store.shape.heads[layer_index] ||
      static_cast<std::int64_t>(columns) < longest) {
    throw Error(
        fmt::format("cache: scores or positions are ({}, {}); expected ({}, at least {}) = (head, "
                    "row)",
                    heads, columns, store.shape.heads[layer_index], longest));
  }
  return longest;
}

}  // namespace

CachedLayer Store::cached_layer(SequenceId sequence, int layer_index) {
  LayerStore& from = layer_at(sequence, layer_index);
  const int heads = shape.heads[layer_index];
  if (shape.has_bounds(layer_index)) bound_pages(sequence_at(sequence), from);
  CachedLayer layer;
  layer.has_bounds = shape.has_bounds(layer_index);
  layer.addresses = pool.addresses();
  layer.metadata_addresses = pool.metadata_addresses();
  layer.page_table =
      Kokkos::subview(sequence_at(sequence).table,
                      std::make_pair(from.first_head, from.first_head + heads), Kokkos::ALL);
  layer.retained = from.device_retained;
  layer.ring = from.ring;
  layer.bounds = from.retained;
  layer.tokens = from.tokens;
  layer.ring_first = from.ring_first;
  layer.heads = heads;
  layer.window = from.window;
  layer.page_rows = shape.page_rows;
  layer.head_dim = shape.dim(layer_index);
  layer.dtype = dtype;
  layer.format = shape.format;
  return layer;
}

}  // namespace kvzap::cache

namespace kvzap {

using cache::LayerRows;

auto KVCache::host_rows(SequenceId sequence, int layer_index, int head) -> HostRows {
  cache::Store& store = *m_store;
  const std::int64_t total = store.rows(sequence, layer_index, head);
  const ExecutionSpace exec;
  store.enter(exec, store.sequence_at(sequence));
  const auto source = LayerRows::of(store, sequence, layer_index);
  HostRows host;
  with_value_type(store.dtype, [&](auto zero) {
    const auto gathered = cache::gather<decltype(zero)>(exec, source, head, total);
    base::fence(exec, "kvzap::host_rows: the host reads the gathered rows");
    cache::bring(gathered.keys, host.keys);
    cache::bring(gathered.values, host.values);
    cache::bring(gathered.positions, host.positions);
    cache::bring(gathered.scores, host.scores);
  });
  return host;
}

std::int64_t KVCache::ring_rows(const Checkpoint& checkpoint, int layer) const {
  m_store->check_layer(layer);
  return std::min<std::int64_t>(checkpoint.tokens.at(layer) - checkpoint.ring_first.at(layer),
                                m_store->shape.ring_rows(layer));
}

std::int64_t KVCache::retained_rows(const Checkpoint& checkpoint, int layer, int head) const {
  m_store->checked_head(layer, head);
  return checkpoint.retained.at(
      std::accumulate(m_store->shape.heads.begin(), m_store->shape.heads.begin() + layer, head));
}

std::int64_t KVCache::ring_first(SequenceId sequence, int layer) const {
  return m_store->layer_at(sequence, layer).ring_first;
}

std::vector<std::int64_t> KVCache::positions(SequenceId sequence, int layer, int head) {
  return host_rows(sequence, layer, head).positions;
}

void KVCache::row_scores(const ExecutionSpace& exec, SequenceId sequence, int layer_index,
                         const ScoresOut& scores, const PositionsOut& positions) {
  cache::Store& store = *m_store;
  const std::int64_t longest =
      cache::check_row_scores(store, sequence, layer_index, scores.extent(0), scores.extent(1));
  if (positions.extent(1) > 0) {
    cache::check_row_scores(store, sequence, layer_index, positions.extent(0), positions.extent(1));
  }
  if (longest == 0) return;
  store.enter(exec, store.sequence_at(sequence));
  const auto rows = LayerRows::of(store, sequence, layer_index);
  cache::copy_scores(exec, rows, store.shape.heads[layer_index], longest, scores, positions);
}

void KVCache::set_row_scores(const ExecutionSpace& exec, SequenceId sequence, int layer_index,
                             const ScoresView& scores) {
  cache::Store& store = *m_store;
  store.check_outside_step(sequence, "set_row_scores");
  const std::int64_t longest =
      cache::check_row_scores(store, sequence, layer_index, scores.extent(0), scores.extent(1));
  if (longest == 0) return;
  store.enter(exec, store.sequence_at(sequence));
  store.own_pages(exec, store.sequence_at(sequence), layer_index);
  const auto rows = LayerRows::of(store, sequence, layer_index);
  cache::change_scores(exec, rows, store.shape.heads[layer_index], longest, scores);
}

}  // namespace kvzap
