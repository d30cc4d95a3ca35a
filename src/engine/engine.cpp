#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <kvzap/core/array_view.hpp>
#include <kvzap/engine/engine.hpp>
#include <numeric>

#include "cache/gather_rows.hpp"
#include "engine/typed_engine.hpp"
#include "linalg/gemm.hpp"

namespace kvzap {
namespace engine {

template <class Value>
std::unique_ptr<Engine::Checkpoint> TypedEngine<Value>::checkpoint(SequenceId sequence) {
  auto taken = std::make_unique<TypedCheckpoint>();
  agree_on_memory(communicator(), [&] {
    const auto state = std::make_shared<CacheState>(m_decoder.cache().checkpoint(sequence));
    taken->cache_state = state;
    taken->state = m_states.at(sequence).copy({});
    is_pinned(sequence);  // forgets the checkpoints that are gone
    m_pins[sequence].push_back(state);
  });
  return taken;
}

template <class Value>
void TypedEngine<Value>::restore(SequenceId sequence, const Checkpoint& checkpoint) {
  const auto& taken = dynamic_cast<const TypedCheckpoint&>(checkpoint);
  SequenceState& state = m_states.at(sequence);
  SequenceState again = taken.state.copy({});
  m_decoder.cache().restore(sequence, *taken.cache_state);
  again.policy = std::move(state.policy);
  again.pruning = state.pruning;
  state = std::move(again);
}

template <class Value>
std::vector<CacheReport> TypedEngine<Value>::reports(const std::vector<SequenceId>& sequences) {
  auto& cache = m_decoder.cache();
  const ModelConfig& config = m_model->config();
  const HeadPartition& partition = m_model->partition();
  const auto& placement = m_decoder.placement();
  const CacheBytes bytes = this->bytes();
  std::vector<std::int64_t> mine;
  std::vector<std::int64_t> sums;
  for (const std::size_t value : {bytes.live, bytes.allocated, bytes.returned, m_meter.peak()}) {
    sums.push_back(static_cast<std::int64_t>(value));
  }
  for (const SequenceId sequence : sequences) {
    for (int l = 0; l < partition.n_layers(); ++l) {
      for (int h = 0; h < cache.shape().heads[l]; ++h) mine.push_back(cache.rows(sequence, l, h));
    }
    sums.push_back(cache.counts(sequence).non_finite + m_states.at(sequence).non_finite);
    sums.push_back(static_cast<std::int64_t>(cache.live_bytes(sequence)));
  }
  const auto all = communicator().all_gather(mine);
  communicator().all_reduce_sum(sums.data(), sums.size());
  std::array<double, 2> seconds = {m_decoder.seconds().scoring + m_repeat_seconds,
                                   m_decoder.seconds().pruning + m_evict_seconds};
  communicator().all_reduce_max(seconds.data(), seconds.size());

  std::vector<CacheReport> reports(sequences.size());
  std::vector<std::size_t> next(all.size(), 0);  // index of the next value of each rank
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    CacheReport& report = reports[i];
    report.tokens = cache.tokens(sequences[i], 0) + m_states.at(sequences[i]).closed_up;
    report.kept.assign(partition.n_layers(), std::vector<std::int64_t>(partition.n_kv_heads()));
    for (int r = 0; r < communicator().size(); ++r) {
      for (int l = 0; l < partition.n_layers(); ++l) {
        for (const int head : partition.heads(l, r)) {
          report.kept[l][head] = all[r][next[r]++] + placement.rows_away(sequences[i], l, head);
        }
      }
    }
    if (cache.shape().has_layers_without_pages()) {
      for (int l = 0; l < partition.n_layers(); ++l) {
        report.prunes.push_back(cache.shape().has_pages(l));
      }
    }
    report.full_bytes =
        2 * report.full_rows() * config.head_dim * static_cast<std::int64_t>(sizeof(Value));
    report.live_bytes = sums[0];
    report.allocated_bytes = sums[1];
    report.returned_bytes = sums[2];
    report.peak_allocated_bytes = sums[3];
    report.non_finite_scores = sums[4 + 2 * i];
    report.own_bytes = sums[5 + 2 * i];
    const std::size_t row =
        page_row_values(cache.shape().head_dim, sizeof(Value), cache.shape().format);
    report.own_bytes += placement.rows_away(sequences[i]) * static_cast<std::int64_t>(row);
    report.moved_pages = placement.pages_moved();
    report.score_seconds = seconds[0];
    report.prune_seconds = seconds[1];
  }
  return reports;
}

template <class Value>
std::vector<std::int64_t> TypedEngine<Value>::rows_away(SequenceId sequence) const {
  const HeadPartition& partition = m_model->partition();
  std::vector<std::int64_t> rows;
  for (int l = 0; l < partition.n_layers(); ++l) {
    for (const int head : partition.heads(l, m_model->rank())) {
      rows.push_back(m_decoder.placement().rows_away(sequence, l, head));
    }
  }
  return rows;
}

template <class Value>
void TypedEngine<Value>::gather_pages(SequenceId sequence) {
  if (!m_decoder.placement().has_pages_away(sequence)) return;
  const std::vector<std::int64_t> before = rows_away(sequence);
  // None of the pages has moved since the checkpoints were taken: see is_pinned.
  const auto tell_checkpoints = [&] {
    const std::vector<std::int64_t> after = rows_away(sequence);
    const auto pins = m_pins.find(sequence);
    if (pins == m_pins.end()) return;
    for (const auto& pin : pins->second) {
      const auto state = pin.lock();
      for (std::size_t h = 0; state && h < before.size(); ++h) {
        state->retained[h] += before[h] - after[h];
      }
    }
  };
  try {
    m_decoder.placement().recall(sequence);
  } catch (...) {
    tell_checkpoints();
    throw;
  }
  tell_checkpoints();
}

template <class Value>
std::vector<std::vector<float>> TypedEngine<Value>::scores(SequenceId sequence, int layer) {
  require_all_rows(sequence);
  return scores_in(m_decoder.cache(), sequence, layer);
}

template <class Value>
std::vector<float> TypedEngine<Value>::scores_of_rank(SequenceId sequence, int layer) {
  std::vector<float> scores;
  const auto take = [&](const std::vector<std::vector<float>>& heads) {
    for (const auto& head : heads) scores.insert(scores.end(), head.begin(), head.end());
  };
  take(scores_in(m_decoder.cache(), sequence, layer));
  auto& placement = m_decoder.placement();
  const SequenceId guest = placement.guest_of(sequence);
  if (guest >= 0) take(scores_in(placement.guest_cache(), guest, layer));
  return scores;
}

template <class Value>
std::vector<std::vector<float>> TypedEngine<Value>::scores_in(KVCache& cache, SequenceId sequence,
                                                              int layer) {
  const int heads = cache.shape().heads[layer];
  std::int64_t longest = 0;
  for (int h = 0; h < heads; ++h) longest = std::max(longest, cache.rows(sequence, layer, h));
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> of_rows(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::row_scores"), heads, longest);
  const ExecutionSpace exec;
  cache.row_scores(exec, sequence, layer, of_rows);
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), of_rows);
  std::vector<std::vector<float>> result(heads);
  for (int h = 0; h < heads; ++h) {
    result[h].assign(host.data() + h * longest,
                     host.data() + h * longest + cache.rows(sequence, layer, h));
  }
  return result;
}

template <class Value>
std::vector<float> TypedEngine<Value>::rows(SequenceId sequence, int layer, int head_on_rank,
                                            bool values) {
  require_all_rows(sequence);
  auto& cache = m_decoder.cache();
  const std::int64_t count = cache.rows(sequence, layer, head_on_rank);
  const linalg::Matrix out(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::rows"),
                           count, cache.shape().head_dim);
  const ExecutionSpace exec;
  cache::gather_rows(exec, cache.layer(sequence, layer), head_on_rank, {}, 0, count, values, out);
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), out);
  return {host.data(), host.data() + host.size()};
}

template <class Value>
SequenceState TypedEngine<Value>::new_state(
    const std::shared_ptr<const SequencePruning>& pruning) const {
  SequenceState state;
  state.pruning = pruning;
  if (!pruning->uses_policy) return state;
  state.policy = pruning->policy->make();
  const PolicyNeeds needs = state.policy->needs();
  if (needs.recent > 0) {
    // With several scoring steps, the newest tokens of one step may be too few.
    state.recent =
        recent_queries(needs.recent, pruning->pruning.decode.every > 0 ||
                                         pruning->pruning.prefill == PrefillMode::sparse);
  }
  return state;
}

template <class Value>
RecentQueries TypedEngine<Value>::recent_queries(std::int64_t count, bool every_layer) const {
  const int group = static_cast<int>(m_model->config().query_group());
  std::vector<int> query_heads;
  for (const int heads : pruned_heads()) query_heads.push_back(heads * group);
  // A policy may ask for more than there can be.
  return RecentQueries(std::min(count, m_model->config().longest_context()), query_heads,
                       static_cast<int>(m_model->config().head_dim), every_layer);
}

}  // namespace engine

double CacheReport::evict_ratio(int layer) const {
  const auto& heads = kept.at(layer);
  if (tokens == 0 || heads.empty() || !is_pruned(layer)) return 0;
  std::int64_t evicted = 0;
  for (std::int64_t rows : heads) evicted += tokens - rows;
  return static_cast<double>(evicted) / (static_cast<double>(heads.size()) * tokens);
}

double CacheReport::evict_ratio() const {
  double sum = 0;
  int layers = 0;
  for (int l = 0; l < static_cast<int>(kept.size()); ++l) {
    sum += evict_ratio(l);
    layers += is_pruned(l) ? 1 : 0;
  }
  return layers == 0 ? 0 : sum / layers;
}

std::int64_t CacheReport::rows() const {
  std::int64_t sum = 0;
  for (const auto& heads : kept) sum = std::accumulate(heads.begin(), heads.end(), sum);
  return sum;
}

std::int64_t CacheReport::full_rows() const {
  std::int64_t sum = 0;
  for (int l = 0; l < static_cast<int>(kept.size()); ++l) {
    const auto& heads = kept[l];
    sum = is_pruned(l) ? sum + static_cast<std::int64_t>(heads.size()) * tokens
                       : std::accumulate(heads.begin(), heads.end(), sum);
  }
  return sum;
}

StepRule Engine::rule(bool judges) const {
  return engine::scorer_rule(judges, m_options.threshold(), m_options.pruning.sink);
}

std::vector<std::string> Engine::write_snapshot(const std::filesystem::path& file,
                                                const std::string& model_name,
                                                SequenceId sequence) {
  SnapshotInfo info;
  info.model = model_name;
  return write_snapshot(file, std::move(info), {}, sequence);
}

std::unique_ptr<Engine> Engine::create(std::shared_ptr<const Model> model,
                                       std::shared_ptr<Scorer> scorer, const CacheOptions& options,
                                       const Communicator& comm) {
  if (options.page_rows < 1) {
    throw Error(fmt::format("page_rows is {}; expected at least 1", options.page_rows));
  }
  engine::check_for_engine(options, scorer != nullptr, model->config());
  return with_value_type(model->dtype(), [&](auto zero) -> std::unique_ptr<Engine> {
    return std::make_unique<engine::TypedEngine<decltype(zero)>>(std::move(model),
                                                                 std::move(scorer), options, comm);
  });
}

// NOLINTBEGIN(bugprone-macro-parentheses): a type takes none
#define KVZAP_INSTANTIATE(Value)                                                                \
  template engine::SequenceState engine::TypedEngine<Value>::new_state(                         \
      const std::shared_ptr<const engine::SequencePruning>&) const;                             \
  template engine::RecentQueries engine::TypedEngine<Value>::recent_queries(std::int64_t, bool) \
      const;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace kvzap
