#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <kvzap/core/array_view.hpp>
#include <kvzap/engine/engine.hpp>
#include <numeric>

#include "base/machine.hpp"
#include "cache/gather_rows.hpp"
#include "engine/engine_parts.hpp"
#include "linalg/gemm.hpp"
#include "model/cache_layers.hpp"
#include "parallel/message.hpp"

namespace kvzap {

using cache::agree_on_memory;
using engine::RecentQueries;
using engine::SequencePruning;
using engine::SequenceState;

Engine::Engine(std::shared_ptr<const Model> model, std::shared_ptr<Scorer> scorer,
               const CacheOptions& options, const Communicator& comm)
    : m_options(options),
      m_comm(comm),
      m_parts(std::make_unique<Parts>(std::move(model), std::move(scorer), options, comm)) {
  m_parts->standard = pruning_of(options);
  m_parts->decoder.placement().set_limit(options.kv_limit);
}

Engine::~Engine() = default;

Engine::Checkpoint::Checkpoint() : m_state(std::make_unique<State>()) {}
Engine::Checkpoint::~Checkpoint() = default;

const ModelConfig& Engine::config() const { return m_parts->model->config(); }

SequenceId Engine::add_sequence() {
  return on_all_ranks([&](std::optional<SequenceId>& made) {
    made = m_parts->decoder.cache().add_sequence();
    m_parts->states[*made] = new_state(m_parts->standard);
  });
}

SequenceId Engine::fork(SequenceId source) {
  return on_all_ranks([&](std::optional<SequenceId>& made) {
    made = m_parts->decoder.cache().fork(source);
    m_parts->decoder.placement().fork(source, *made);
    const SequenceState& from = m_parts->states.at(source);
    m_parts->states[*made] = from.copy(new_state(from.pruning));
  });
}

SequenceId Engine::fork_beginning(SequenceId source, std::int64_t tokens) {
  gather_pages(source);
  return on_all_ranks([&](std::optional<SequenceId>& made) {
    if (!can_hold(source)) {
      throw Error(
          fmt::format("sequence {}: its policy has state that an earlier state lacks", source));
    }
    made = m_parts->decoder.cache().fork_beginning(ExecutionSpace(), source, tokens);
    const SequenceState& from = m_parts->states.at(source);
    m_parts->states[*made] = from.copy(new_state(from.pruning));
  });
}

bool Engine::keeps_beginnings(std::int64_t tokens) const {
  const CacheShape& shape = m_parts->decoder.cache().shape();
  for (int l = 0; l < static_cast<int>(shape.heads.size()); ++l) {
    if (shape.has_state(l) && tokens > 0) return false;
    const OwnRing ring = shape.own_ring(l);
    if (!shape.keeps_rows(l) && !shape.has_state(l)) continue;
    if (ring.rows > 0 && tokens >= ring.rows + (ring.restarts ? 0 : 1)) return false;
  }
  return true;
}

void Engine::free_sequence(SequenceId sequence) {
  m_parts->decoder.cache().free_sequence(sequence);  // throws within a step
  m_parts->decoder.placement().free(sequence);
  m_parts->keeps_pages = false;
  m_parts->states.erase(sequence);
  m_parts->pins.erase(sequence);
}

std::int64_t Engine::tokens(SequenceId sequence) const {
  return m_parts->decoder.cache().tokens(sequence, 0);
}

StepRule Engine::rule(StepPart part, std::int64_t question) const {
  return engine::rule_of(*m_parts->standard, part, question);
}

StepRule Engine::rule(SequenceId sequence, StepPart part, std::int64_t question) const {
  return engine::rule_of(*m_parts->states.at(sequence).pruning, part, question);
}

bool Engine::can_hold(SequenceId sequence) const {
  return !m_parts->states.at(sequence).pruning->uses_policy;
}

bool Engine::takes_parts(const LoadedPruning& pruning) const {
  const SequencePruning own(pruning, m_parts->scorer.get());
  if (!own.uses_policy || own.policy->learner) return false;
  if (own.policy->info->repeats_context) return true;
  if (!own.chooses_rows() || own.pruning.prefill != PrefillMode::dense) return false;
  const PolicyNeeds needs = own.policy->make()->needs();
  return !needs.blocks || needs.accumulates;
}

void Engine::check(const LoadedPruning& pruning) const {
  engine::check_for_engine(pruning, m_parts->scorer != nullptr, config());
  if (pruning.prunes() && pruning.pruning.window != options().pruning.window) {
    throw Error(fmt::format("window is {}; expected {}, the rows of the engine's rings",
                            pruning.pruning.window, options().pruning.window));
  }
}

void Engine::set_pruning(SequenceId sequence, const LoadedPruning& pruning) {
  agree_on_memory(communicator(), [&] {
    check(pruning);
    if (m_parts->decoder.cache().in_step()) throw Error("a pruning cannot change within a step");
    if (tokens(sequence) > 0) {
      throw Error(
          fmt::format("sequence {} has tokens: its pruning cannot change any more", sequence));
    }
    m_parts->states.at(sequence) = new_state(pruning_of(pruning));
  });
}

std::size_t Engine::trim() {
  // First: the placement's trim shares the limit.
  const std::size_t bytes = m_parts->decoder.cache().trim();
  return bytes + m_parts->decoder.placement().trim();
}

CacheReport Engine::report(SequenceId sequence) { return reports({sequence}).front(); }

std::vector<std::int64_t> Engine::positions(SequenceId sequence, int layer, int head_on_rank) {
  require_all_rows(sequence);
  return m_parts->decoder.cache().positions(sequence, layer, head_on_rank);
}

CacheBytes Engine::bytes() const {
  CacheBytes bytes = m_parts->decoder.cache().bytes();
  const CacheBytes remote = m_parts->decoder.placement().remote_bytes();
  bytes.live += remote.live;
  bytes.allocated += remote.allocated;
  bytes.returned += remote.returned;
  return bytes;
}

std::size_t Engine::bytes_per_token(const PageFormat& format) const {
  const std::vector<int> heads = pruned_heads();
  const KVCache& cache = m_parts->decoder.cache();
  const CacheShape& shape = cache.shape();
  const PageFormat as_wide = shape.format.wide();
  const std::size_t wide = page_row_values(shape.head_dim, size_of(cache.dtype()), as_wide);
  const std::size_t metadata =
      page_row_bytes(shape.head_dim, size_of(cache.dtype()), as_wide) - wide;
  const auto page_rows = static_cast<std::size_t>(shape.page_rows);
  const std::size_t page_bounds =
      shape.bounds_from ? page_bounds_bytes(shape.head_dim, size_of(cache.dtype()), format) : 0;
  const std::size_t bounds = (page_bounds + page_rows - 1) / page_rows;
  // Pages of quantised rows have some padding.
  const std::size_t row =
      format.quantised() ? QuantisedPage{model::stored_format(m_parts->model->config(), format),
                                         shape.page_rows, shape.head_dim}
                                   .bytes() /
                               page_rows
                         : wide;
  return static_cast<std::size_t>(std::accumulate(heads.begin(), heads.end(), 0)) *
         (row + metadata + bounds);
}

std::size_t Engine::bytes_per_sequence() const {
  return m_parts->decoder.cache().bytes_per_sequence();
}
void Engine::set_kv_limit(std::size_t bytes) { m_parts->decoder.placement().set_limit(bytes); }
std::size_t Engine::free_bytes() const { return m_parts->decoder.cache().pool().free_bytes(); }
bool Engine::needs_hidden() const { return m_parts->decoder.needs_hidden(); }

void Engine::set_observer(StepObserver* observer) {
  m_parts->observer = observer;
  m_parts->decoder.set_observer(observer);
}
void Engine::set_attention_path(AttentionPath path) { m_parts->decoder.set_attention_path(path); }

// Returns the heads on this rank, per layer; none of layers that are not pruned.
std::vector<int> Engine::pruned_heads() const {
  const CacheShape& shape = m_parts->decoder.cache().shape();
  std::vector<int> heads = shape.heads;
  for (std::size_t l = 0; l < heads.size(); ++l) {
    if (!shape.has_pages(static_cast<int>(l))) heads[l] = 0;
  }
  return heads;
}

std::shared_ptr<const SequencePruning> Engine::pruning_of(const LoadedPruning& pruning) const {
  return std::make_shared<const SequencePruning>(pruning, m_parts->scorer.get());
}

// Returns null for a sequence without a policy, and for an id without a sequence.
SequenceState* Engine::state_with_policy(SequenceId sequence) {
  const auto found = m_parts->states.find(sequence);
  return found == m_parts->states.end() || !found->second.pruning->uses_policy ? nullptr
                                                                               : &found->second;
}

// Throws Error if rows lie on other ranks than the owners of their heads.
void Engine::require_all_rows(SequenceId sequence) const {
  if (!m_parts->decoder.placement().has_pages_away(sequence)) return;
  throw Error(fmt::format(
      "sequence {}: some rows lie on other ranks; call gather_pages on all ranks first", sequence));
}

std::unique_ptr<Engine::Checkpoint> Engine::checkpoint(SequenceId sequence) {
  std::unique_ptr<Checkpoint> taken(new Checkpoint);
  agree_on_memory(communicator(), [&] {
    const auto state = std::make_shared<CacheState>(m_parts->decoder.cache().checkpoint(sequence));
    taken->m_state->cache_state = state;
    taken->m_state->state = m_parts->states.at(sequence).copy({});
    is_pinned(sequence);  // forgets the checkpoints that are gone
    m_parts->pins[sequence].push_back(state);
  });
  return taken;
}

void Engine::restore(SequenceId sequence, const Checkpoint& checkpoint) {
  const auto& taken = *checkpoint.m_state;
  SequenceState& state = m_parts->states.at(sequence);
  SequenceState again = taken.state.copy({});
  m_parts->decoder.cache().restore(sequence, *taken.cache_state);
  again.policy = std::move(state.policy);
  again.pruning = state.pruning;
  state = std::move(again);
}

namespace {

/// The parts of a rank's reports that are summed over ranks.
struct ReportSums {
  std::int64_t live = 0, allocated = 0, returned = 0, peak = 0;  // bytes
  std::vector<std::int64_t> non_finite, own;  // of each sequence: scores, live bytes
  template <class Visit>
  friend void list_fields(ReportSums& sums, Visit& visit) {
    visit("live", sums.live);
    visit("allocated", sums.allocated);
    visit("returned", sums.returned);
    visit("peak", sums.peak);
    visit("non_finite", sums.non_finite);
    visit("own", sums.own);
  }
};

}  // namespace

std::vector<CacheReport> Engine::reports(const std::vector<SequenceId>& sequences) {
  auto& cache = m_parts->decoder.cache();
  const ModelConfig& config = m_parts->model->config();
  const HeadPartition& partition = m_parts->model->partition();
  const auto& placement = m_parts->decoder.placement();
  const CacheBytes bytes = this->bytes();
  std::vector<std::int64_t> mine;
  ReportSums sums;
  sums.live = static_cast<std::int64_t>(bytes.live);
  sums.allocated = static_cast<std::int64_t>(bytes.allocated);
  sums.returned = static_cast<std::int64_t>(bytes.returned);
  sums.peak = static_cast<std::int64_t>(m_parts->meter.peak());
  for (const SequenceId sequence : sequences) {
    for (int l = 0; l < partition.n_layers(); ++l) {
      // A layer may have several heads for one of the partition, with the same rows.
      const int heads = cache.shape().heads[l];
      const int each = static_cast<int>(config.layer(l).kv_heads_factor);
      for (int h = 0; h < heads; h += each) mine.push_back(cache.rows(sequence, l, h));
    }
    sums.non_finite.push_back(cache.counts(sequence).non_finite +
                              m_parts->states.at(sequence).non_finite);
    sums.own.push_back(static_cast<std::int64_t>(cache.live_bytes(sequence)));
  }
  const auto all = communicator().all_gather(mine);
  parallel::all_reduce_sum(communicator(), sums);
  std::array<double, 2> seconds = {m_parts->decoder.seconds().scoring + m_parts->repeat_seconds,
                                   m_parts->decoder.seconds().pruning + m_parts->evict_seconds};
  communicator().all_reduce_max(seconds.data(), seconds.size());

  std::vector<CacheReport> reports(sequences.size());
  std::vector<std::size_t> next(all.size(), 0);  // index of the next value of each rank
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    CacheReport& report = reports[i];
    report.tokens = cache.tokens(sequences[i], 0) + m_parts->states.at(sequences[i]).removed_tokens;
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
    report.full_bytes = config.row_vectors() * report.full_rows() * config.head_dim *
                        static_cast<std::int64_t>(size_of(m_parts->decoder.cache().dtype()));
    report.live_bytes = sums.live;
    report.allocated_bytes = sums.allocated;
    report.returned_bytes = sums.returned;
    report.peak_allocated_bytes = sums.peak;
    report.non_finite_scores = sums.non_finite[i];
    report.own_bytes = sums.own[i];
    const std::size_t row = page_row_values(
        cache.shape().head_dim, size_of(m_parts->decoder.cache().dtype()), cache.shape().format);
    report.own_bytes += placement.rows_away(sequences[i]) * static_cast<std::int64_t>(row);
    report.moved_pages = placement.pages_moved();
    report.score_seconds = seconds[0];
    report.prune_seconds = seconds[1];
  }
  return reports;
}

namespace {

/// Adds one to the count of a token for each of its rows in a layer of `cache`. Counts every
/// `each`-th head: the heads between have the same rows.
void count_rows(KVCache& cache, SequenceId sequence, int layer, int each,
                std::vector<std::int64_t>& counts) {
  const int heads = cache.shape().heads[layer];
  std::int64_t longest = 0;
  for (int h = 0; h < heads; ++h) longest = std::max(longest, cache.rows(sequence, layer, h));
  if (longest == 0) return;
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::scores"), heads, longest);
  const Kokkos::View<std::int64_t**, Kokkos::LayoutRight, MemorySpace> positions(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::positions"), heads, longest);
  const ExecutionSpace exec;
  cache.row_scores(exec, sequence, layer, scores, positions);
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), positions);
  for (int h = 0; h < heads; h += each) {
    const std::int64_t rows = cache.rows(sequence, layer, h);
    for (std::int64_t row = 0; row < rows; ++row) ++counts[host(h, row)];
  }
}

}  // namespace

TokenRows Engine::token_rows(SequenceId sequence) {
  TokenRows found;
  if (m_parts->states.at(sequence).removed_tokens > 0) return found;
  auto& cache = m_parts->decoder.cache();
  auto& placement = m_parts->decoder.placement();
  const HeadPartition& partition = m_parts->model->partition();
  for (int l = 0; l < partition.n_layers(); ++l) {
    if (cache.shape().has_pages(l)) found.full += partition.n_kv_heads();
  }
  if (found.full == 0) return found;
  agree_on_memory(communicator(), [&] {
    found.rows.assign(cache.tokens(sequence, 0), 0);
    const SequenceId remote = placement.remote_sequence_of(sequence);
    for (int l = 0; l < partition.n_layers(); ++l) {
      if (!cache.shape().has_pages(l)) continue;
      const int each = static_cast<int>(m_parts->model->config().layer(l).kv_heads_factor);
      count_rows(cache, sequence, l, each, found.rows);
      if (remote >= 0) count_rows(placement.remote_cache(), remote, l, 1, found.rows);
    }
  });
  communicator().all_reduce_sum(found.rows.data(), found.rows.size());
  return found;
}

std::vector<std::int64_t> Engine::rows_away(SequenceId sequence) const {
  const HeadPartition& partition = m_parts->model->partition();
  std::vector<std::int64_t> rows;
  for (int l = 0; l < partition.n_layers(); ++l) {
    for (const int head : partition.heads(l, m_parts->model->rank())) {
      rows.push_back(m_parts->decoder.placement().rows_away(sequence, l, head));
    }
  }
  return rows;
}

void Engine::gather_pages(SequenceId sequence) {
  if (!m_parts->decoder.placement().has_pages_away(sequence)) return;
  const std::vector<std::int64_t> before = rows_away(sequence);
  // None of the pages has moved since the checkpoints were taken: see is_pinned.
  const auto tell_checkpoints = [&] {
    const std::vector<std::int64_t> after = rows_away(sequence);
    const auto pins = m_parts->pins.find(sequence);
    if (pins == m_parts->pins.end()) return;
    for (const auto& pin : pins->second) {
      const auto state = pin.lock();
      for (std::size_t h = 0; state && h < before.size(); ++h) {
        state->retained[h] += before[h] - after[h];
      }
    }
  };
  try {
    m_parts->decoder.placement().recall(sequence);
  } catch (...) {
    tell_checkpoints();
    throw;
  }
  tell_checkpoints();
}

std::vector<std::vector<float>> Engine::scores(SequenceId sequence, int layer) {
  require_all_rows(sequence);
  return scores_in(m_parts->decoder.cache(), sequence, layer);
}

std::vector<float> Engine::scores_of_rank(SequenceId sequence, int layer) {
  std::vector<float> scores;
  const auto take = [&](const std::vector<std::vector<float>>& heads) {
    for (const auto& head : heads) scores.insert(scores.end(), head.begin(), head.end());
  };
  take(scores_in(m_parts->decoder.cache(), sequence, layer));
  auto& placement = m_parts->decoder.placement();
  const SequenceId remote = placement.remote_sequence_of(sequence);
  if (remote >= 0) take(scores_in(placement.remote_cache(), remote, layer));
  return scores;
}

std::vector<std::vector<float>> Engine::scores_in(KVCache& cache, SequenceId sequence, int layer) {
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

std::vector<float> Engine::rows(SequenceId sequence, int layer, int head_on_rank, bool values) {
  require_all_rows(sequence);
  auto& cache = m_parts->decoder.cache();
  const std::int64_t count = cache.rows(sequence, layer, head_on_rank);
  const linalg::Matrix out(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::rows"),
                           count, cache.shape().dim(layer));
  const ExecutionSpace exec;
  cache::gather_rows(exec, cache.layer(sequence, layer), {head_on_rank, 0, count}, {}, values, out);
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), out);
  return {host.data(), host.data() + host.size()};
}

namespace {

/// Whether a policy scores in several steps, so that the newest tokens of one may be too few.
bool scores_often(const SequencePruning& pruning) {
  return pruning.pruning.decode.every > 0 || pruning.pruning.prefill == PrefillMode::sparse;
}

}  // namespace

SequenceState Engine::new_state(const std::shared_ptr<const SequencePruning>& pruning) const {
  SequenceState state;
  state.pruning = pruning;
  if (!pruning->uses_policy) return state;
  state.policy = pruning->policy->make();
  const PolicyNeeds needs = state.policy->needs();
  if (needs.recent > 0) state.recent = recent_queries(needs.recent, scores_often(*pruning));
  if (pruning->policy->sums_attention) state.sums.emplace(m_parts->model->partition().n_layers());
  return state;
}

void Engine::keep_queries(SequenceState& state, bool is_in_parts) const {
  const bool lasts = is_in_parts || scores_often(*state.pruning);
  if (!state.recent || state.recent->lasts() == lasts) return;
  state.recent = recent_queries(state.recent->capacity(), lasts);
}

RecentQueries Engine::recent_queries(std::int64_t count, bool every_layer) const {
  const int group = static_cast<int>(m_parts->model->config().query_group());
  std::vector<int> query_heads;
  for (const int heads : pruned_heads()) query_heads.push_back(heads * group);
  // A policy may ask for more than there can be.
  return RecentQueries(std::min(count, m_parts->model->config().longest_context()), query_heads,
                       static_cast<int>(m_parts->model->config().head_dim), every_layer);
}

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
  return std::unique_ptr<Engine>(new Engine(std::move(model), std::move(scorer), options, comm));
}

}  // namespace kvzap
