// Takes back the last tokens of the last step, for drafts that the model does not confirm.
#include "base/kokkos_compat.hpp"
#include "cache/layer_rows.hpp"

namespace kvzap::cache {
namespace {

// Cuts each head's list of retained rows where the first row with position `first` or above is.
// With `judges` it also corrects the totals of deferred appends by these rows.
void cut_heads(const ExecutionSpace& exec, Store& store, Sequence& sequence, SequenceId id,
               int layer_index, std::int64_t first, bool judges) {
  LayerStore& layer = sequence.layers[layer_index];
  const LayerRows rows = LayerRows::of(store, id, layer_index);
  const Counts retained = layer.device_retained, lengths = sequence.lengths;
  const std::int64_t evicted = static_cast<std::int64_t>(lengths.extent(0)) - 2;
  Kokkos::parallel_for(
      "kvzap::cache::cut_heads",
      Kokkos::RangePolicy<ExecutionSpace>(exec, 0, static_cast<std::int64_t>(layer.pages.size())),
      KOKKOS_LAMBDA(const std::int64_t h) {
        std::int64_t count = retained(h), non_finite = 0;
        const std::int64_t before = count;
        while (count > 0) {
          const LayerRows::Row last = rows.at(h, count - 1);
          if (last.position < first) break;
          if (!EvictionRule::is_finite(*last.score)) ++non_finite;
          --count;
        }
        retained(h) = count;
        if (!judges) return;
        Kokkos::atomic_add(&lengths(evicted), before - count);
        Kokkos::atomic_add(&lengths(evicted + 1), -non_finite);
      });
  layer.deferred = true;  // the host's copy of the lengths is an upper bound
  sequence.pending = true;
}

// Returns a layer to what it was `count` tokens ago.
void take_back_layer(const ExecutionSpace& exec, Store& store, const StepState& state,
                     int layer_index, std::int64_t count) {
  Sequence& sequence = store.sequence_at(state.id);
  LayerStore& layer = sequence.layers[layer_index];
  const std::int64_t window = layer.window;
  const std::int64_t last = layer.tokens - window;
  const std::int64_t oldest =
      std::max(state.ring_first[layer_index], state.tokens[layer_index] - window);
  const std::int64_t first = std::max(oldest, last - count);
  const bool has_heads = store.shape.heads[layer_index] > 0;
  const bool returns = last > first && has_heads && store.shape.keeps_rows(layer_index);
  // Before the ring's lengths change, which the kernel reads.
  if (returns && layer.has_pages) {
    const bool judges = state.judges[layer_index];
    cut_heads(exec, store, sequence, state.id, layer_index, first, judges);
    if (judges) {
      const std::int64_t judged = (last - first) * store.shape.heads[layer_index];
      sequence.total.judged -= judged;
      sequence.total.evicted -= judged;
    }
  }
  layer.tokens -= count;
  layer.ring_first = state.ring_first[layer_index];
  layer.add_tokens(0);
  if (!returns) return;
  SpanRows rows;
  rows.step = store.step_of(layer, layer_index, 0);
  rows.step.first = first;
  rows.step.ring_first = state.ring_first[layer_index];  // that of the saved rows
  rows.ring = {layer.ring.data(), layer.ring_scores.data()};
  const std::int64_t row = state.first_saved + layer.first_head * state.saved_rows;
  const std::int64_t skipped = first - oldest;
  row_mover(store.dtype, store.shape.format)
      .save(exec, rows,
            {store.saved.data() + row * store.most_pair_bytes() +
                 skipped * store.pair_bytes(store.shape.dim(layer_index)),
             store.saved_scores.data() + row + skipped, state.saved_rows, last - first},
            true);
}

}  // namespace
}  // namespace kvzap::cache

namespace kvzap {

void KVCache::take_back(const ExecutionSpace& exec, SequenceId id, std::int64_t count) {
  cache::Store& store = *m_store;
  cache::Sequence& sequence = store.sequence_at(id);
  const auto end = store.step_states.begin() + static_cast<std::ptrdiff_t>(store.n_ended);
  const auto state = std::find_if(store.step_states.begin(), end,
                                  [&](const cache::StepState& of) { return of.id == id; });
  const std::string what = fmt::format("cache take_back: {} tokens of sequence {}", count, id);
  if (store.in_step || state == end) throw Error(what + ", which was not in the last step");
  const int layers = static_cast<int>(sequence.layers.size());
  for (int l = 0; l < layers; ++l) {
    const cache::LayerStore& layer = sequence.layers[l];
    if (count < 0 || count > layer.tokens - state->tokens[l]) {
      throw Error(what +
                  fmt::format("; the last step has left {}", layer.tokens - state->tokens[l]));
    }
    if (state->rows > layer.window && store.shape.keeps_rows(l)) {
      throw Error(what +
                  fmt::format(", whose step was longer than a ring of {} rows", layer.window));
    }
  }
  if (!store.shape.states.empty()) throw Error(what + ", which has states");
  if (count == 0) return;
  store.settle(sequence);
  store.enter(exec, sequence);
  for (int l = 0; l < layers; ++l) cache::take_back_layer(exec, store, *state, l, count);
  const AppendCounts collected = sequence.collected;
  store.settle(sequence);
  sequence.collected = collected;
  store.upload_all(exec, sequence);
  store.record_releases(exec);
}

}  // namespace kvzap
