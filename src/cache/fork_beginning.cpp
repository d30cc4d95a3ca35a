// Forks the beginning of a sequence.
#include "cache/cache_impl.hpp"
#include "cache/layer_rows.hpp"

namespace kvzap::cache {
namespace {

/// Fills the ring of a fork with rows of the source: those after the fork's retained rows.
template <class Value>
struct FillRing {
  LayerRows source;
  const std::int64_t* retained = nullptr;  // of the fork, (head)
  Value* ring = nullptr;                   // of the fork, (head, vectors * window * dim)
  float* ring_scores = nullptr;            // (head, window)
  std::int64_t first = 0;                  // position of the ring's oldest row
  std::int64_t rows = 0;                   // of the ring

  /// Counts rows that are not at their position, because the source has evicted one.
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& wrong) const {
    const std::int64_t head = i / rows, row = i % rows;
    const auto found = source.at(head, retained[head] + row);
    if (found.position != first + row) {
      ++wrong;
      return;
    }
    const Block block{source.layer.window, source.layer.head_dim, source.layer.format.vectors()};
    const std::int64_t slot = (found.position - source.layer.ring_first) % block.capacity;
    Value* const key = ring + head * block.size() + block.row_offset(slot);
    ring_scores[head * block.capacity + slot] = *found.score;
    source.read(head, retained[head] + row, key, key + block.values_offset());
  }
};

// Returns the position of the oldest row that a layer's ring has at `tokens` tokens.
std::int64_t oldest_in_ring(const LayerStore& layer, std::int64_t tokens) {
  if (layer.restarts) return tokens - tokens % layer.window;
  return std::max<std::int64_t>(layer.ring_first, tokens - layer.window);
}

// Returns whether a ring without pages still has the rows that it had at `tokens` tokens.
bool reaches_back(const LayerStore& layer, std::int64_t tokens) {
  const std::int64_t oldest = oldest_in_ring(layer, tokens);
  // Rows of an earlier chunk may be overwritten, whatever their number.
  const std::int64_t first = layer.restarts ? layer.ring_first : layer.tokens - layer.window;
  return oldest == tokens || oldest >= first;
}

// Gives a new layer the pages that the first `tokens` tokens of another one fill.
void begin_layer(const Store& store, LayerStore& layer, const LayerStore& from, SequenceId source,
                 std::int64_t tokens) {
  const std::int64_t fewest = from.restarts ? 0 : from.ring_first;
  if (tokens < fewest || tokens > from.tokens) {
    throw Error(fmt::format("cache fork_beginning: {} tokens of sequence {}; expected {} to {}",
                            tokens, source, fewest, from.tokens));
  }
  if (!from.has_pages) {
    layer.add_tokens(tokens);
    if (reaches_back(from, tokens)) return;
    throw Error(
        fmt::format("cache fork_beginning: sequence {} has lost rows of positions {} to {}, which "
                    "a ring of its first {} tokens has",
                    source, oldest_in_ring(from, tokens), tokens - 1, tokens));
  }
  // Rows that have left the ring since.
  const std::int64_t later = oldest_in_ring(from, from.tokens) - oldest_in_ring(from, tokens);
  layer.tokens = tokens;
  layer.ring_first = from.ring_first;
  if (!base::machine().on_device()) layer.bounded = from.bounded;
  for (std::size_t h = 0; h < layer.pages.size(); ++h) {
    layer.retained(h) = std::max<std::int64_t>(0, from.retained(h) - later);
    const auto pages = static_cast<std::ptrdiff_t>(store.pages_for(layer.retained(h)));
    layer.pages[h].assign(from.pages[h].begin(), from.pages[h].begin() + pages);
  }
}

// Fills the ring of a layer of begin_layer. Waits.
void fill_ring(Store& store, const ExecutionSpace& exec, const LayerStore& layer, SequenceId source,
               int layer_index) {
  const LayerStore& from = store.layer_at(source, layer_index);
  if (!from.has_pages) {  // both have the same slots
    copy_elements(exec, layer.ring.data(), from.ring.data(), from.ring.size());
    copy_elements(exec, layer.ring_scores.data(), from.ring_scores.data(), from.ring_scores.size());
    return;
  }
  const std::int64_t rows = layer.in_ring();
  const std::int64_t first = layer.tokens - rows;
  const auto count = static_cast<std::int64_t>(layer.pages.size()) * rows;
  std::int64_t wrong = 0;
  if (count > 0) {
    with_value_type(store.dtype, [&](auto zero) {
      FillRing<decltype(zero)> kernel;
      kernel.source = LayerRows::of(store, source, layer_index);
      kernel.retained = layer.device_retained.data();
      kernel.ring = reinterpret_cast<decltype(zero)*>(layer.ring.data());
      kernel.ring_scores = layer.ring_scores.data();
      kernel.rows = rows;
      kernel.first = first;
      Kokkos::parallel_reduce("kvzap::fork_beginning", Range(exec, 0, count), kernel, wrong);
    });
  }
  if (wrong == 0) return;
  throw Error(
      fmt::format("cache fork_beginning: sequence {} has evicted rows of positions {} to {}, which "
                  "the ring of its first {} tokens has",
                  source, first, layer.tokens - 1, layer.tokens));
}

}  // namespace

}  // namespace kvzap::cache

namespace kvzap {

SequenceId KVCache::fork_beginning(const ExecutionSpace& exec, SequenceId source,
                                   std::int64_t tokens) {
  return m_store->make_fork(
      exec, source, "fork_beginning",
      [&](cache::Sequence& copy, const cache::Sequence& from) {
        const std::int64_t all = from.layers.front().tokens;
        if (m_store->first_state.back() > 0 && tokens > 0 && tokens < all) {
          throw Error(
              fmt::format("cache fork_beginning: the states of sequence {} are of all its {} "
                          "tokens; expected these or none, found {}",
                          source, all, tokens));
        }
        for (std::size_t l = 0; l < copy.layers.size(); ++l) {
          cache::begin_layer(*m_store, copy.layers[l], from.layers[l], source, tokens);
        }
      },
      [&](const cache::Sequence& copy, const cache::Sequence& from) {
        for (std::size_t l = 0; l < copy.layers.size(); ++l) {
          cache::fill_ring(*m_store, exec, copy.layers[l], source, static_cast<int>(l));
        }
        if (tokens == 0) {
          Kokkos::deep_copy(exec, copy.states, 0);
        } else {
          cache::copy_elements(exec, copy.states.data(), from.states.data(), from.states.size());
        }
      });
}

}  // namespace kvzap
