// Layers in which several ranks work on a head: with more ranks than KV heads, which share the
// weights of q, k, v and o, or if pages of a head lie on other ranks than its owner's.
#include <algorithm>
#include <numeric>

#include "engine/decoder_shared.hpp"
#include "engine/step_kernels.hpp"
#include "model/model_weights.hpp"

namespace kvzap {
namespace {

using engine::range;
using linalg::Matrix;

// Shorter spans are left to the owner.
constexpr std::int64_t least_split = 64;

}  // namespace

// Finds the layers that have shared heads in this step, and reserves their buffers for blocks of m
// tokens.
void Decoder::plan_shared(const StepBatch& batch, std::int64_t m) {
  const HeadPartition& partition = m_model.partition();
  if (partition.n_ranks() == 1) return;
  const ModelConfig& config = m_model.config();
  if (!m_shared) {
    m_shared = std::make_unique<Shared>(partition, m_comm.rank(), config.query_group(),
                                        config.head_dim, m_cache.dtype());
  }
  Shared& shared = *m_shared;
  const int n_layers = partition.n_layers(), n_heads = partition.n_kv_heads();
  shared.layers.resize(n_layers);
  for (auto& layer : shared.layers) {
    layer.is_shared = partition.deals_projections();
    layer.remote_heads.clear();
  }
  shared.helpers.clear();
  shared.split_spans.clear();
  // Policies see the attention of all tokens.
  const auto splits = [&](const StepBatch::Span& span) {
    return partition.deals_projections() && !span.rule.policy && span.count >= least_split;
  };
  if (std::any_of(batch.spans().begin(), batch.spans().end(), splits)) {
    for (const StepBatch::Span& span : batch.spans()) shared.split_spans.push_back(splits(span));
  }
  if (m_placement->is_plain() && shared.split_spans.empty()) return reserve_shared(batch, m);
  shared.helpers.resize(std::size_t(n_layers) * n_heads);
  const auto add = [](std::vector<int>& ranks, int rank) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  };
  for (int l = 0; l < n_layers; ++l) {
    if (!is_pruned(l)) continue;
    for (int h = 0; h < n_heads; ++h) {
      auto& ranks = shared.helpers[l * n_heads + h];
      for (const StepBatch::Span& span : batch.spans()) {
        for (const auto& run : m_placement->runs(span.sequence, l, h)) {
          add(ranks, run.rank);
          shared.layers[l].is_shared = true;
        }
      }
      const auto& team = shared.teams.members(l, h);
      for (std::size_t i = 1; !shared.split_spans.empty() && i < team.size(); ++i) {
        add(ranks, team[i]);
      }
      std::sort(ranks.begin(), ranks.end());
      if (shared.helps(l, h, n_heads, m_comm.rank())) shared.layers[l].remote_heads.push_back(h);
    }
  }
  reserve_shared(batch, m);
}

// Replaces a span by the parts of its tokens that this rank's place in a team gives: cached rows
// for all of them, new rows for its own part.
template <class Spans>
void Decoder::push_split(Spans& spans, const typename Spans::value_type& whole, int layer) const {
  const auto& team = m_shared->teams.of_rank(layer);
  const auto [first, last] = even_range(whole.queries, team.size, team.place);
  const auto push = [&](std::int64_t begin, std::int64_t end, bool sees_new) {
    if (begin == end) return;
    auto& span = spans.emplace_back(whole);
    span.first_query += begin;
    span.queries = end - begin;
    span.new_rows = sees_new ? whole.seen_new_rows(end - 1) : 0;
  };
  push(0, first, false);
  push(first, last, true);
  push(last, whole.queries, false);
}

// Whether a team shares the tokens of a span of the batch in a layer.
bool Decoder::is_split(std::size_t span, int layer) const {
  return m_shared && !m_shared->split_spans.empty() && m_shared->split_spans[span] &&
         is_pruned(layer) && m_shared->teams.of_rank(layer).size > 1;
}

bool Decoder::is_shared(int layer) const {
  return m_shared && m_shared->layers[layer].is_shared && !m_cache.shape().has_state(layer);
}

// The largest number of heads in a layer that this rank helps with.
int Decoder::most_remote_heads() const {
  std::size_t most = 0;
  for (std::size_t l = 0; m_shared && l < m_shared->layers.size(); ++l) {
    most = std::max(most, m_shared->layers[l].remote_heads.size());
  }
  return static_cast<int>(most);
}

// The inputs of o on this rank.
std::int64_t Decoder::attended_columns(int layer) const {
  if (is_shared(layer)) return m_shared->places.inputs(layer, m_comm.rank());
  const ModelConfig& config = m_model.config();
  return m_cache.shape().heads[layer] * config.query_group() * config.head_dim;
}

// Calls visit(piece, place) for each record that `source` sends to `target`, in order. place: of
// the head among the source's own heads, or n + its place among remote heads, n own ones.
template <class Visit>
void Decoder::for_each_record(int layer, int source, int target, const Visit& visit) const {
  const HeadPartition& partition = m_model.partition();
  const int n_heads = partition.n_kv_heads();
  const auto& pieces = m_shared->places.pieces(layer, target);
  if (pieces.empty()) return;
  int place = 0;
  const auto visit_head = [&](int head) {
    for (const auto& piece : pieces) {
      if (piece.head == head) visit(piece, place);
    }
    ++place;
  };
  for (const int head : partition.heads(layer, source)) visit_head(head);
  for (int h = 0; !m_shared->helpers.empty() && h < n_heads; ++h) {
    if (m_shared->helps(layer, h, n_heads, source)) visit_head(h);
  }
}

void Decoder::plan_records(int layer) {
  auto& plan = m_shared->layers[layer];
  const auto count = [&](int source, int target) {
    std::int64_t floats = 0;
    for_each_record(layer, source, target,
                    [&](const auto& piece, int) { floats += m_shared->places.record(piece); });
    return floats;
  };
  plan.sent.clear();
  plan.received.clear();
  for (int r = 0; r < m_comm.size(); ++r) {
    plan.sent.push_back(count(m_comm.rank(), r));
    plan.received.push_back(count(r, m_comm.rank()));
  }
}

void Decoder::reserve_shared(const StepBatch& batch, std::int64_t m) {
  Scratch& scratch = *m_scratch;
  Shared& shared = *m_shared;
  const ModelConfig& config = m_model.config();
  const std::int64_t group = config.query_group(), size = group * config.head_dim;
  std::int64_t dealt = 0, gathered = 0, remote_heads = 0, own = 0, inputs = 0, sent = 0,
               received = 0;
  const auto sum_of = [](const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  };
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    if (!is_shared(l)) continue;
    const auto& widths = shared.places.widths(l);
    dealt = std::max(dealt, widths[m_comm.rank()]);
    gathered = std::max(gathered, sum_of(widths));
    remote_heads =
        std::max(remote_heads, static_cast<std::int64_t>(shared.layers[l].remote_heads.size()));
    own = std::max<std::int64_t>(own, m_cache.shape().heads[l]);
    inputs = std::max(inputs, shared.places.inputs(l, m_comm.rank()));
    plan_records(l);
    sent = std::max(sent, sum_of(shared.layers[l].sent));
    received = std::max(received, sum_of(shared.layers[l].received));
  }
  if (gathered == 0) return;
  scratch.exchange.reserve(m_comm, m * std::max(dealt, sent), m * std::max(gathered, received));
  if (shares_output_weights()) {
    const std::int64_t hidden = config.hidden_size;
    base::reserve_scratch(shared.o_inputs, inputs * hidden, "kvzap::decoder::o_inputs");
    base::reserve_scratch(shared.o_sent, inputs * hidden, "kvzap::decoder::o_sent");
    base::reserve_scratch(shared.o_of_heads, own * size * hidden, "kvzap::decoder::o_of_heads");
    scratch.exchange.reserve(m_comm, inputs * hidden, own * size * hidden);
  }
  if (!shared.split_spans.empty()) {
    for (auto* rows : {&shared.team_keys, &shared.team_values}) {
      rows->reserve(static_cast<std::int64_t>(batch.tokens().size()) * config.head_dim,
                    "kvzap::decoder::team_rows");
    }
    scratch.reserve(Scratch::team_rows, m * 2 * config.head_dim);
    for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
      if (is_pruned(l)) m_placement->no_rows(l);
    }
  }
  scratch.reserve(Scratch::dealt, m * dealt);
  scratch.reserve(Scratch::gathered, m * gathered);
  scratch.reserve(Scratch::log_sums, m * own * group);
  scratch.reserve(Scratch::attended, m * inputs);
  scratch.reserve(Scratch::gates, m * inputs);
  scratch.reserve(Scratch::remote_queries, m * remote_heads * size);
  scratch.reserve(Scratch::remote_norm, remote_heads * size);
  scratch.reserve(Scratch::remote_attended, m * remote_heads * size);
  scratch.reserve(Scratch::remote_log_sums, m * remote_heads * group);
  scratch.reserve(Scratch::sent, m * sent);
  scratch.reserve(Scratch::received, m * received);
}

// Whether a policy of the step reads W_O, of which ranks have parts of heads.
bool Decoder::shares_output_weights() const {
  return m_model.partition().deals_projections() && m_model.weights().are_here() &&
         std::any_of(m_policies->needs.begin(), m_policies->needs.end(),
                     [](const PolicyNeeds& needs) { return needs.output_weights; });
}

// Returns W_O of this rank's own heads: (hidden_size, query heads * head_dim). Collective.
ArrayView Decoder::gather_output_weights(int layer) {
  Shared& shared = *m_shared;
  const HeadPartition& partition = m_model.partition();
  const std::int64_t hidden = m_model.config().hidden_size;
  const std::int64_t size = shared.places.group() * shared.places.head_dim();
  const auto& own = shared.places.pieces(layer, m_comm.rank());
  shared.sent.assign(m_comm.size(), 0);
  shared.received.assign(m_comm.size(), 0);
  const auto is_of = [&](const auto& piece, int rank) {
    const auto& heads = partition.heads(layer, rank);
    return std::find(heads.begin(), heads.end(), piece.head) != heads.end();
  };
  for (int r = 0; r < m_comm.size(); ++r) {
    for (const auto& piece : own) shared.sent[r] += is_of(piece, r) ? piece.columns() * hidden : 0;
    for (const auto& piece : shared.places.pieces(layer, r)) {
      shared.received[r] += is_of(piece, m_comm.rank()) ? piece.columns() * hidden : 0;
    }
  }
  locally([&] {
    engine::take_inputs(
        m_scratch->exec, m_model.weights().layers[layer].o, 0,
        Matrix(shared.o_inputs.data(), shared.places.inputs(layer, m_comm.rank()), hidden));
    shared.copies.clear();
    float* to = shared.o_sent.data();
    for (int r = 0; r < m_comm.size(); ++r) {
      for (const auto& piece : own) {
        if (!is_of(piece, r)) continue;
        const std::int64_t count = piece.columns() * hidden;
        shared.copies.push_back({shared.o_inputs.data() + piece.column * hidden, 0, to, 0, count});
        to += count;
      }
    }
    engine::copy_columns(m_scratch->exec, 1, shared.copies);
  });
  // A rank owns one head at most, and parts of it arrive in order.
  m_scratch->exchange.exchange(m_scratch->exec, m_comm, shared.o_sent.data(), shared.sent,
                               shared.o_of_heads.data(), shared.received);
  ArrayView view;
  view.data = shared.o_of_heads.data();
  view.extents = {hidden, 1, m_cache.shape().heads[layer] * size};
  view.strides = {1, 1, hidden};
  return view;
}

// Gathers the outputs of q, k and v, and takes those of this rank's own heads, unless it has
// computed them itself, and the queries of its remote heads. `computed`: this rank's outputs.
// Collective.
void Decoder::gather_projections(int layer, const Matrix& computed, const Matrix& qkv) {
  Scratch& scratch = *m_scratch;
  Shared& shared = *m_shared;
  const HeadPartition& partition = m_model.partition();
  const auto& widths = shared.places.widths(layer);
  const std::int64_t m = computed.extent(0), dim = m_model.config().head_dim;
  const std::int64_t size = m_model.config().query_group() * dim;
  const float* const gathered = scratch.buffers[Scratch::gathered].data();
  shared.sent.assign(widths.begin(), widths.end());
  for (std::int64_t& count : shared.sent) count *= m;
  scratch.exchange.all_gather(scratch.exec, m_comm, computed.data(), shared.sent,
                              scratch.buffers[Scratch::gathered].data());
  locally([&] {
    std::vector<std::int64_t> firsts(widths.size(), 0);
    std::partial_sum(shared.sent.begin(), shared.sent.end() - 1, firsts.begin() + 1);
    shared.copies.clear();
    const auto take = [&](std::int64_t begin, std::int64_t columns, const Matrix& to,
                          std::int64_t column) {
      for (const auto& segment : shared.places.segments(layer)) {
        const std::int64_t first = std::max(begin, segment.begin);
        const std::int64_t last = std::min(begin + columns, segment.end);
        if (first >= last) continue;
        shared.copies.push_back(
            {gathered + firsts[segment.rank] + segment.column + first - segment.begin,
             widths[segment.rank], to.data() + column + first - begin,
             static_cast<std::int64_t>(to.extent(1)), last - first});
      }
    };
    if (partition.deals_projections()) {
      const std::int64_t all = partition.n_kv_heads();
      const auto& heads = partition.heads(layer, m_comm.rank());
      const auto own = static_cast<std::int64_t>(heads.size());
      for (std::int64_t h = 0; h < own; ++h) {
        take(heads[h] * size, size, qkv, h * size);
        take(all * size + heads[h] * dim, dim, qkv, own * size + h * dim);
        take(all * (size + dim) + heads[h] * dim, dim, qkv, own * (size + dim) + h * dim);
      }
    }
    const std::vector<int>& remote_heads = m_shared->layers[layer].remote_heads;
    const auto n = static_cast<std::int64_t>(remote_heads.size());
    const Matrix queries = scratch.matrix(Scratch::remote_queries, m, n * size);
    for (std::int64_t g = 0; g < n; ++g) take(remote_heads[g] * size, size, queries, g * size);
    if (n > 0 && shared.helps_team(layer)) {
      const std::int64_t all = partition.n_kv_heads(), head = shared.teams.of_rank(layer).head;
      const Matrix rows = scratch.matrix(Scratch::team_rows, m, 2 * dim);
      take(all * size + head * dim, dim, rows, 0);
      take(all * (size + dim) + head * dim, dim, rows, dim);
    }
    engine::copy_columns(scratch.exec, m, shared.copies);
  });
}

// Norms and turns the queries of remote heads as those of own heads.
void Decoder::transform_remote_heads(int layer, const Rows& block,
                                     engine::HeadTransform transform) {
  const std::vector<int>& remote_heads = m_shared->layers[layer].remote_heads;
  if (remote_heads.empty()) return;
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.weights().layers[layer];
  const std::int64_t m = block.count();
  const auto dim = static_cast<int>(config.head_dim);
  const std::int64_t size = config.query_group() * config.head_dim;
  const auto columns = static_cast<std::int64_t>(remote_heads.size()) * size;
  const Matrix queries = scratch.matrix(Scratch::remote_queries, m, columns);
  locally([&] {
    if (config.qk_norm == QkNorm::row) {
      const linalg::Vector norm =
          Kokkos::subview(scratch.buffers[Scratch::remote_norm], range(0, columns));
      const auto& all = weights.q_norm_of_all;
      m_shared->copies.clear();
      for (std::size_t g = 0; g < remote_heads.size(); ++g) {
        m_shared->copies.push_back({all.data() + remote_heads[g] * size, 0,
                                    norm.data() + static_cast<std::int64_t>(g) * size, 0, size});
      }
      engine::copy_columns(scratch.exec, 1, m_shared->copies);
      engine::norm_rows(scratch.exec, queries, scratch.matrix(Scratch::squares, m, 2),
                        {norm, {}, config.num_attention_heads * config.head_dim, 1, transform.eps});
    }
    engine::transform_heads(scratch.exec, queries, dim, 0, transform, {}, {});
    if (!m_shared->helps_team(layer)) return;
    const Matrix rows = scratch.matrix(Scratch::team_rows, m, 2 * config.head_dim);
    if (config.qk_norm == QkNorm::row) {
      const std::int64_t first = m_shared->teams.of_rank(layer).head * config.head_dim;
      const linalg::Vector norm =
          Kokkos::subview(weights.k_norm_of_all, range(first, first + config.head_dim));
      engine::norm_rows(scratch.exec, rows, scratch.matrix(Scratch::squares, m, 2),
                        {{}, norm, 1, config.num_key_value_heads * config.head_dim, transform.eps});
    }
    const std::int64_t before = block.begin * config.head_dim;
    engine::transform_heads(scratch.exec, rows, dim, 1, transform,
                            m_shared->team_keys.array(m, 1, config.head_dim, before),
                            m_shared->team_values.array(m, 1, config.head_dim, before));
  });
}

// Attention of a block over the remote pages, to Scratch::remote_attended.
void Decoder::attend_remote_heads(const StepBatch& batch, int layer, const Rows& rows) {
  const std::vector<int>& remote_heads = m_shared->layers[layer].remote_heads;
  if (remote_heads.empty()) return;
  Scratch& scratch = *m_scratch;
  Shared& shared = *m_shared;
  using Tokens = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
  const std::int64_t m = rows.count(), dim = m_model.config().head_dim;
  const auto group = static_cast<int>(m_model.config().query_group());
  const auto q_heads = static_cast<std::int64_t>(remote_heads.size()) * group;
  const Tokens queries(scratch.buffers[Scratch::remote_queries].data(), m, q_heads, dim);
  const Tokens attended(scratch.buffers[Scratch::remote_attended].data(), m, q_heads, dim);
  const Matrix lse = scratch.matrix(Scratch::remote_log_sums, m, q_heads);
  locally([&] {
    // Sequences without remote pages: no weight.
    Kokkos::deep_copy(scratch.exec, attended, 0.0f);
    Kokkos::deep_copy(scratch.exec, lse, -HUGE_VALF);
    const int team = shared.helps_team(layer) ? shared.teams.of_rank(layer).head : -1;
    for (std::size_t g = 0; g < remote_heads.size();) {
      // Neighbours in one call, but the team's head, which has new rows.
      const bool of_team = remote_heads[g] == team;
      std::size_t end = g + 1;
      while (!of_team && end < remote_heads.size() &&
             remote_heads[end] == remote_heads[end - 1] + 1 && remote_heads[end] != team) {
        ++end;
      }
      const auto count = static_cast<int>(end - g);
      const auto own = range(g * group, end * group);
      shared.spans.clear();
      for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t last) {
        const auto of = m_placement->remote_rows(batch.spans()[s].sequence, layer);
        const bool splits = of_team && is_split(s, layer);
        if (!of.any && !splits) return;
        AttentionSpan span;
        span.cached = of.any ? engine::heads_of(of.layer, remote_heads[g], count)
                             : m_placement->no_rows(layer);
        span.first_query = begin - rows.begin;
        span.queries = last - begin;
        span.new_rows = 0;
        if (!splits) return shared.spans.push_back(span);
        span.first_new = batch.spans()[s].first;
        span.new_rows = last - span.first_new;
        push_split(shared.spans, span, layer);
      });
      const auto tokens = of_team ? static_cast<std::int64_t>(batch.tokens().size()) : 0;
      const ArrayView keys = shared.team_keys.array(tokens, count, dim);
      const ArrayView values = shared.team_values.array(tokens, count, dim);
      m_attention(scratch.exec, shared.spans,
                  Kokkos::subview(queries, Kokkos::ALL, own, Kokkos::ALL), keys, values,
                  Kokkos::subview(attended, Kokkos::ALL, own, Kokkos::ALL), m_attention_path,
                  Kokkos::subview(lse, Kokkos::ALL, own),
                  static_cast<float>(m_model.config().attention_soft_cap));
      g = end;
    }
    shared.spans.clear();
  });
}

// Merges the ranks' attention over their parts of the rows. Scratch::attended becomes this rank's
// inputs of o. Collective.
void Decoder::merge_shared(int layer, std::int64_t m, const Matrix& lse) {
  Scratch& scratch = *m_scratch;
  Shared& shared = *m_shared;
  const auto& places = shared.places;
  const std::int64_t size = places.group() * places.head_dim();
  const std::int64_t own = m_cache.shape().heads[layer];
  const auto remote_heads = static_cast<std::int64_t>(shared.layers[layer].remote_heads.size());
  const int rank = m_comm.rank();
  locally([&] {
    shared.copies.clear();
    float* record = scratch.buffers[Scratch::sent].data();
    const auto pack = [&](const auto& piece, int place) {
      const bool is_own = place < own;
      const std::int64_t heads = is_own ? own : remote_heads;
      const std::int64_t index = is_own ? place : place - own;
      const float* const from =
          scratch.buffers[is_own ? Scratch::attended : Scratch::remote_attended].data();
      const float* const sums =
          is_own ? lse.data() : scratch.buffers[Scratch::remote_log_sums].data();
      const std::int64_t in_head = piece.begin - piece.head * size;
      const std::int64_t floats = places.record(piece);
      shared.copies.push_back(
          {from + index * size + in_head, heads * size, record, floats, piece.columns()});
      shared.copies.push_back({sums + index * places.group() + in_head / places.head_dim(),
                               heads * places.group(), record + piece.columns(), floats,
                               places.query_heads(piece)});
      record += m * floats;
    };
    for (int r = 0; r < m_comm.size(); ++r) for_each_record(layer, rank, r, pack);
    engine::copy_columns(scratch.exec, m, shared.copies);
  });
  const auto count = [m](const std::vector<std::int64_t>& of_token,
                         std::vector<std::int64_t>& all) {
    all = of_token;
    for (std::int64_t& floats : all) floats *= m;
  };
  count(shared.layers[layer].sent, shared.sent);
  count(shared.layers[layer].received, shared.received);
  scratch.exchange.exchange(scratch.exec, m_comm, scratch.buffers[Scratch::sent].data(),
                            shared.sent, scratch.buffers[Scratch::received].data(),
                            shared.received);
  locally([&] {
    const auto& pieces = places.pieces(layer, rank);
    const std::int64_t columns = places.inputs(layer, rank);
    shared.merges.clear();
    shared.records.clear();
    for (const auto& piece : pieces) {
      engine::AttendedMerge merge{};
      merge.to = scratch.buffers[Scratch::attended].data() + piece.column;
      merge.to_stride = columns;
      merge.columns = piece.columns();
      merge.first = piece.begin % places.head_dim();
      merge.query_heads = places.query_heads(piece);
      merge.first_part = static_cast<std::int64_t>(shared.records.size());
      const float* record = scratch.buffers[Scratch::received].data();
      for (int r = 0; r < m_comm.size(); ++r) {
        for_each_record(layer, r, rank, [&](const auto& sent, int) {
          if (sent.begin == piece.begin) shared.records.push_back(record);
          record += m * places.record(sent);
        });
      }
      merge.parts = static_cast<std::int64_t>(shared.records.size()) - merge.first_part;
      shared.merges.push_back(merge);
    }
    engine::merge_attended(scratch.exec, m, places.head_dim(), shared.merges, shared.records);
  });
}

}  // namespace kvzap
