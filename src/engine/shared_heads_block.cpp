#include "engine/shared_heads_block.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/policy_layer.hpp"

namespace kvzap::engine {

using linalg::Matrix;

namespace {

// Shorter spans are left to the owner.
constexpr std::int64_t least_split = 64;

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::vector<SharedHeads::Sizes> sizes_of(const ModelConfig& config) {
  std::vector<SharedHeads::Sizes> sizes;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const std::int64_t dim = config.head_dim_of(l);
    // (With several KV heads of a layer for one of the partition, read_weights refuses to share.)
    const std::int64_t factor = config.layer(l).kv_heads_factor;
    sizes.push_back({config.query_group_of(l) * factor, dim,
                     config.rows_of(l) == l ? dim * factor : 0, config.row_vectors()});
  }
  return sizes;
}

void add_once(std::vector<int>& ranks, int rank) {
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
}

}  // namespace

SharedHeadsBlock::SharedHeadsBlock(const Model& model, PagePlacement& placement)
    : m_partition(model.partition()),
      m_placement(placement),
      m_rank(model.rank()),
      m_vectors(model.config().row_vectors()),
      m_places(model.partition(), sizes_of(model.config())),
      m_teams(model.partition(), model.rank()),
      m_layers(model.partition().n_layers()),
      m_team_keys(model.dtype()),
      m_team_values(model.dtype()) {}

void SharedHeadsBlock::reserve(Step& step, bool gives_output_weights) {
  m_gives_output_weights =
      gives_output_weights && m_partition.deals_projections() && step.model.weights().are_here();
  plan(step);
  const std::int64_t m = step.most_rows();
  std::int64_t computed = 0, gathered = 0, columns = 0, heads = 0, own = 0, inputs = 0, sent = 0,
               received = 0, dim = 0;
  for (int l = 0; l < static_cast<int>(m_layers.size()); ++l) {
    if (!is_shared(step, l)) continue;
    const LayerPlan& layer = m_layers[l];
    const auto& widths = m_places.widths(l);
    plan_records(l);
    computed = std::max(computed, widths[m_rank]);
    gathered = std::max(gathered, sum_of(widths));
    const auto remote_heads = static_cast<std::int64_t>(layer.remote_heads.size());
    columns = std::max(columns, remote_heads * head_size(l));
    heads = std::max(heads, remote_heads * m_places.sizes(l).group);
    own = std::max(own, step.query_heads(l) * step.head_dim(l));
    dim = std::max(dim, step.head_dim(l));
    inputs = std::max(inputs, this->inputs(l));
    sent = std::max(sent, sum_of(layer.sent));
    received = std::max(received, sum_of(layer.received));
  }
  if (gathered == 0) return;
  step.exchange.reserve(step.comm, m * std::max(computed, sent), m * std::max(gathered, received));
  if (m_gives_output_weights) reserve_output_weights(step, inputs, own);
  const auto reserve_floats = [](linalg::Vector& buffer, std::int64_t count) {
    base::reserve_scratch(buffer, count, "kvzap::decoder::shared_heads");
  };
  if (splits_spans()) {
    m_team_keys.reserve(step.tokens() * dim, "kvzap::decoder::team_rows");
    if (m_vectors == 2) {
      m_team_values.reserve(step.tokens() * dim, "kvzap::decoder::team_rows");
    }
    reserve_floats(m_team_rows, m * m_vectors * dim);
    for (int l = 0; l < static_cast<int>(m_layers.size()); ++l) {
      if (step.is_pruned(l)) m_placement.no_rows(l);
    }
  }
  reserve_floats(m_computed, m * computed);
  reserve_floats(m_gathered, m * gathered);
  reserve_floats(m_queries, m * columns);
  reserve_floats(m_norm, 2 * columns);
  reserve_floats(m_attended, m * columns);
  reserve_floats(m_log_sums, m * heads);
  reserve_floats(m_sent_records, m * sent);
  reserve_floats(m_received_records, m * received);
}

void SharedHeadsBlock::release() {
  m_team_keys.release();
  m_team_values.release();
  for (linalg::Vector* const buffer :
       {&m_computed, &m_gathered, &m_team_rows, &m_queries, &m_norm, &m_attended, &m_log_sums,
        &m_sent_records, &m_received_records, &m_o_inputs, &m_o_sent, &m_o_of_heads}) {
    *buffer = {};
  }
}

void SharedHeadsBlock::plan(const Step& step) {
  for (LayerPlan& layer : m_layers) {
    layer.is_shared = m_partition.deals_projections();
    layer.remote_heads.clear();
  }
  m_helpers.clear();
  m_split_spans.clear();
  // Policies see the attention of all tokens.
  const auto splits = [&](const StepBatch::Span& span) {
    return m_partition.deals_projections() && !span.rule.policy && span.count >= least_split;
  };
  if (std::any_of(step.spans().begin(), step.spans().end(), splits)) {
    for (const StepBatch::Span& span : step.spans()) m_split_spans.push_back(splits(span));
  }
  if (!m_placement.is_plain() || splits_spans()) plan_helpers(step);
}

void SharedHeadsBlock::plan_helpers(const Step& step) {
  const int n_layers = m_partition.n_layers(), n_heads = m_partition.n_kv_heads();
  m_helpers.resize(std::size_t(n_layers) * n_heads);
  for (int l = 0; l < n_layers; ++l) {
    const int owner = step.rows_of(l);
    if (!step.is_pruned(owner)) continue;
    for (int h = 0; h < n_heads; ++h) {
      auto& ranks = m_helpers[l * n_heads + h];
      for (const StepBatch::Span& span : step.spans()) {
        for (const auto& run : m_placement.runs(span.sequence, owner, h)) {
          add_once(ranks, run.rank);
          m_layers[l].is_shared = true;
        }
      }
      const auto& team = m_teams.members(l, h);
      const bool splits = splits_spans() && has_own_rows(l);
      for (std::size_t i = 1; splits && i < team.size(); ++i) add_once(ranks, team[i]);
      std::sort(ranks.begin(), ranks.end());
      if (helps(l, h, m_rank)) m_layers[l].remote_heads.push_back(h);
    }
  }
}

bool SharedHeadsBlock::helps(int layer, int head, int rank) const {
  if (m_helpers.empty()) return false;
  const auto& ranks = m_helpers[layer * m_partition.n_kv_heads() + head];
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void SharedHeadsBlock::push_split(std::vector<AttentionSpan>& spans, const AttentionSpan& whole,
                                  int layer) const {
  const auto& team = m_teams.of_rank(layer);
  const auto [first, last] = even_range(whole.queries, team.size, team.place);
  const auto push = [&](std::int64_t begin, std::int64_t end, bool sees_new) {
    if (begin == end) return;
    AttentionSpan& span = spans.emplace_back(whole);
    span.first_query += begin;
    span.queries = end - begin;
    span.new_rows = sees_new ? whole.seen_new_rows(end - 1) : 0;
  };
  push(0, first, false);
  push(first, last, true);
  push(last, whole.queries, false);
}

int SharedHeadsBlock::most_remote_heads() const {
  std::size_t most = 0;
  for (const LayerPlan& layer : m_layers) most = std::max(most, layer.remote_heads.size());
  return static_cast<int>(most);
}

// Calls visit(piece, place) for each record that `source` sends to `target`, in order. place: of
// the head among the source's own heads, or n + its place among remote heads, n own ones.
template <class Visit>
void SharedHeadsBlock::for_each_record(int layer, int source, int target,
                                       const Visit& visit) const {
  const auto& pieces = m_places.pieces(layer, target);
  if (pieces.empty()) return;
  int place = 0;
  const auto visit_head = [&](int head) {
    for (const auto& piece : pieces) {
      if (piece.head == head) visit(piece, place);
    }
    ++place;
  };
  for (const int head : m_partition.heads(layer, source)) visit_head(head);
  for (int h = 0; !m_helpers.empty() && h < m_partition.n_kv_heads(); ++h) {
    if (helps(layer, h, source)) visit_head(h);
  }
}

void SharedHeadsBlock::plan_records(int layer) {
  LayerPlan& plan = m_layers[layer];
  const auto count = [&](int source, int target) {
    std::int64_t floats = 0;
    for_each_record(layer, source, target,
                    [&](const auto& piece, int) { floats += piece.record(); });
    return floats;
  };
  plan.sent.clear();
  plan.received.clear();
  for (int r = 0; r < m_partition.n_ranks(); ++r) {
    plan.sent.push_back(count(m_rank, r));
    plan.received.push_back(count(r, m_rank));
  }
}

void SharedHeadsBlock::reserve_output_weights(Step& step, std::int64_t inputs, std::int64_t own) {
  const std::int64_t hidden = step.config.hidden_size;
  const std::int64_t of_heads = own * hidden;
  base::reserve_scratch(m_o_inputs, inputs * hidden, "kvzap::decoder::o_inputs");
  base::reserve_scratch(m_o_sent, inputs * hidden, "kvzap::decoder::o_sent");
  base::reserve_scratch(m_o_of_heads, of_heads, "kvzap::decoder::o_of_heads");
  step.exchange.reserve(step.comm, inputs * hidden, of_heads);
}

ArrayView SharedHeadsBlock::gather_output_weights(Step& step, int layer) {
  const std::int64_t hidden = step.config.hidden_size;
  const auto& own = m_places.pieces(layer, m_rank);
  const int n_ranks = m_partition.n_ranks();
  m_sent.assign(n_ranks, 0);
  m_received.assign(n_ranks, 0);
  const auto is_of = [&](const auto& piece, int rank) {
    const auto& heads = m_partition.heads(layer, rank);
    return std::find(heads.begin(), heads.end(), piece.head) != heads.end();
  };
  for (int r = 0; r < n_ranks; ++r) {
    for (const auto& piece : own) m_sent[r] += is_of(piece, r) ? piece.columns() * hidden : 0;
    for (const auto& piece : m_places.pieces(layer, r)) {
      m_received[r] += is_of(piece, m_rank) ? piece.columns() * hidden : 0;
    }
  }
  step.locally([&] {
    const Matrix of_inputs(m_o_inputs.data(), inputs(layer), hidden);
    if (step.config.latent) {
      m_latent.of_all(step.exec, step.weights(layer), of_inputs);
    } else {
      take_inputs(step.exec, step.weights(layer).o, 0, of_inputs);
    }
    m_copies.clear();
    float* to = m_o_sent.data();
    for (int r = 0; r < n_ranks; ++r) {
      for (const auto& piece : own) {
        if (!is_of(piece, r)) continue;
        const std::int64_t count = piece.columns() * hidden;
        m_copies.push_back({m_o_inputs.data() + piece.column * hidden, 0, to, 0, count});
        to += count;
      }
    }
    copy_columns(step.exec, 1, m_copies);
  });
  // A rank owns one head at most, and parts of it arrive in order.
  step.exchange.exchange(step.exec, step.comm, m_o_sent.data(), m_sent, m_o_of_heads.data(),
                         m_received);
  ArrayView view;
  view.data = m_o_of_heads.data();
  view.extents = {hidden, 1, step.kv_heads(layer) * head_size(layer)};
  view.strides = {1, 1, hidden};
  return view;
}

Matrix SharedHeadsBlock::computed(int layer, const Matrix& qkv) const {
  if (!m_partition.deals_projections()) return qkv;
  return Matrix(m_computed.data(), qkv.extent(0), m_places.widths(layer)[m_rank]);
}

Matrix SharedHeadsBlock::remote_queries(int layer, std::int64_t m) const {
  const auto heads = static_cast<std::int64_t>(m_layers[layer].remote_heads.size());
  return Matrix(m_queries.data(), m, heads * head_size(layer));
}

void SharedHeadsBlock::gather_projections(Step& step, int layer, const Matrix& computed,
                                          const Matrix& qkv) {
  const auto& widths = m_places.widths(layer);
  const std::int64_t m = computed.extent(0), dim = step.head_dim(layer), size = head_size(layer);
  m_sent.assign(widths.begin(), widths.end());
  for (std::int64_t& count : m_sent) count *= m;
  step.exchange.all_gather(step.exec, step.comm, computed.data(), m_sent, m_gathered.data());
  step.locally([&] {
    std::vector<std::int64_t> firsts(widths.size(), 0);
    std::partial_sum(m_sent.begin(), m_sent.end() - 1, firsts.begin() + 1);
    m_copies.clear();
    const auto take = [&](std::int64_t begin, std::int64_t columns, const Matrix& to,
                          std::int64_t column) {
      for (const auto& segment : m_places.segments(layer)) {
        const std::int64_t first = std::max(begin, segment.begin);
        const std::int64_t last = std::min(begin + columns, segment.end);
        if (first >= last) continue;
        m_copies.push_back(
            {m_gathered.data() + firsts[segment.rank] + segment.column + first - segment.begin,
             widths[segment.rank], to.data() + column + first - begin,
             static_cast<std::int64_t>(to.extent(1)), last - first});
      }
    };
    const std::int64_t all = m_partition.n_kv_heads();
    if (m_partition.deals_projections()) {
      const auto& heads = m_partition.heads(layer, m_rank);
      const auto own = static_cast<std::int64_t>(heads.size());
      for (std::int64_t h = 0; h < own; ++h) {
        take(heads[h] * size, size, qkv, h * size);
        if (!has_own_rows(layer)) continue;
        take(all * size + heads[h] * dim, dim, qkv, own * size + h * dim);
        if (m_vectors == 1) continue;
        take(all * (size + dim) + heads[h] * dim, dim, qkv, own * (size + dim) + h * dim);
      }
    }
    const std::vector<int>& remote_heads = m_layers[layer].remote_heads;
    const auto n = static_cast<std::int64_t>(remote_heads.size());
    const Matrix queries = remote_queries(layer, m);
    for (std::int64_t g = 0; g < n; ++g) take(remote_heads[g] * size, size, queries, g * size);
    if (n > 0 && helps_team(layer)) {
      const std::int64_t head = m_teams.of_rank(layer).head;
      const Matrix rows(m_team_rows.data(), m, m_vectors * dim);
      take(all * size + head * dim, dim, rows, 0);
      if (m_vectors == 2) take(all * (size + dim) + head * dim, dim, rows, dim);
    }
    copy_columns(step.exec, m, m_copies);
  });
}

void SharedHeadsBlock::transform_queries(Step& step, int layer, const RowRange& rows,
                                         const HeadTransform& transform, const Matrix& sums) {
  const std::vector<int>& remote_heads = m_layers[layer].remote_heads;
  if (remote_heads.empty()) return;
  const ModelConfig& config = step.config;
  const std::int64_t size = head_size(layer);
  const Matrix queries = remote_queries(layer, rows.count());
  const auto columns = static_cast<std::int64_t>(queries.extent(1));
  // The part of these queries, at `first` of m_norm.
  const auto part_of = [&](const linalg::Vector& all, std::int64_t first) {
    const linalg::Vector part = Kokkos::subview(m_norm, range(first, first + columns));
    m_copies.clear();
    for (std::size_t g = 0; g < remote_heads.size(); ++g) {
      m_copies.push_back({all.data() + remote_heads[g] * size, 0,
                          part.data() + static_cast<std::int64_t>(g) * size, 0, size});
    }
    copy_columns(step.exec, 1, m_copies);
    return part;
  };
  const auto& weights = step.weights(layer);
  step.locally([&] {
    HeadTransform of_queries = transform;
    if (config.qk_norm == QkNorm::row) {
      norm_rows(step.exec, queries, sums,
                {part_of(weights.q_norm_of_all, 0),
                 {},
                 config.num_attention_heads * config.head_dim,
                 1,
                 transform.eps});
      clamp_qkv(step.exec, config, queries);
    } else if (transform.has_layer_norms) {
      of_queries.q_norm = part_of(weights.q_norm_of_all, 0);
      if (weights.q_norm_bias_of_all.extent(0) > 0) {
        of_queries.q_bias = part_of(weights.q_norm_bias_of_all, columns);
      }
    }
    const int dim = static_cast<int>(step.head_dim(layer));
    transform_heads(step.exec, queries, dim, 0, of_queries, {}, {});
    if (helps_team(layer)) transform_team_rows(step, layer, rows, transform, sums);
  });
}

// Norms and turns the key of the head that this rank helps with, and stores it with the value.
void SharedHeadsBlock::transform_team_rows(Step& step, int layer, const RowRange& block,
                                           const HeadTransform& transform, const Matrix& sums) {
  const std::int64_t m = block.count(), dim = step.head_dim(layer);
  const Matrix rows(m_team_rows.data(), m, m_vectors * dim);
  const auto& weights = step.weights(layer);
  const std::int64_t first = m_teams.of_rank(layer).head * dim;
  const auto part_of = [&](const linalg::Vector& all) {
    return Kokkos::subview(all, range(first, first + dim));
  };
  HeadTransform of_key = transform;
  if (step.config.qk_norm == QkNorm::row) {
    norm_rows(step.exec, rows, sums,
              {{},
               part_of(weights.k_norm_of_all),
               1,
               step.config.num_key_value_heads * dim,
               transform.eps});
    clamp_qkv(step.exec, step.config, rows);
  } else if (transform.has_layer_norms) {
    of_key.k_norm = part_of(weights.k_norm_of_all);
    const auto& bias = weights.k_norm_bias_of_all;
    if (bias.extent(0) > 0) of_key.k_bias = part_of(bias);
  }
  const std::int64_t before = block.begin * dim;
  transform_heads(step.exec, rows, static_cast<int>(dim), 1, of_key,
                  m_team_keys.array(m, 1, dim, before),
                  m_vectors == 2 ? m_team_values.array(m, 1, dim, before) : ArrayView());
}

void SharedHeadsBlock::attend(Step& step, int layer, const RowRange& rows,
                              SpanAttention& attention) {
  const std::vector<int>& remote_heads = m_layers[layer].remote_heads;
  if (remote_heads.empty()) return;
  using Heads = SpanAttention::Heads;
  const std::int64_t m = rows.count(), dim = step.head_dim(layer);
  const std::int64_t group = m_places.sizes(layer).group;
  const auto q_heads = static_cast<std::int64_t>(remote_heads.size()) * group;
  const Heads queries(m_queries.data(), m, q_heads, dim);
  const Heads attended(m_attended.data(), m, q_heads, dim);
  const Matrix lse(m_log_sums.data(), m, q_heads);
  step.locally([&] {
    // Sequences without remote pages: no weight.
    Kokkos::deep_copy(step.exec, attended, 0.0f);
    Kokkos::deep_copy(step.exec, lse, -HUGE_VALF);
    const int team = helps_team(layer) ? m_teams.of_rank(layer).head : -1;
    const ValueBuffer& team_values = m_vectors == 2 ? m_team_values : m_team_keys;
    for (std::size_t g = 0; g < remote_heads.size();) {
      // Neighbours in one call, but the team's head, which has new rows.
      const bool of_team = remote_heads[g] == team;
      std::size_t end = g + 1;
      while (!of_team && end < remote_heads.size() &&
             remote_heads[end] == remote_heads[end - 1] + 1 && remote_heads[end] != team) {
        ++end;
      }
      const auto count = static_cast<int>(end - g);
      const auto own = std::make_pair(g * group, end * group);
      list_remote_spans(step, layer, rows, {remote_heads[g], count, of_team});
      const std::int64_t tokens = of_team ? step.tokens() : 0;
      attention(step.exec, m_spans, Kokkos::subview(queries, Kokkos::ALL, own, Kokkos::ALL),
                m_team_keys.array(tokens, count, dim), team_values.array(tokens, count, dim),
                Kokkos::subview(attended, Kokkos::ALL, own, Kokkos::ALL),
                Kokkos::subview(lse, Kokkos::ALL, own));
      g = end;
    }
    m_spans.clear();
  });
}

// Lists what rows of the step see of neighbouring remote heads.
void SharedHeadsBlock::list_remote_spans(const Step& step, int layer, const RowRange& rows,
                                         const RemoteHeads& heads) {
  const int owner = step.rows_of(layer);
  m_spans.clear();
  step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t last) {
    const StepBatch::Span& of_step = step.spans()[s];
    const auto of = m_placement.remote_rows(of_step.sequence, owner);
    const bool splits = heads.of_team && is_split(step, s, layer);
    if (!of.any && !splits) return;
    AttentionSpan span;
    span.cached =
        of.any ? heads_of(of.layer, heads.first, heads.count) : m_placement.no_rows(owner);
    span.first_query = begin - rows.begin;
    span.queries = last - begin;
    span.new_rows = 0;
    if (!splits) return m_spans.push_back(span);
    span.first_new = of_step.first;
    span.new_rows = last - span.first_new;
    push_split(m_spans, span, layer);
  });
}

void SharedHeadsBlock::merge(Step& step, int layer, const Matrix& lse) {
  const auto m = static_cast<std::int64_t>(lse.extent(0));
  step.locally([&] { pack_records(step, layer, lse); });
  const auto count = [m](const std::vector<std::int64_t>& of_token,
                         std::vector<std::int64_t>& all) {
    all = of_token;
    for (std::int64_t& floats : all) floats *= m;
  };
  count(m_layers[layer].sent, m_sent);
  count(m_layers[layer].received, m_received);
  step.exchange.exchange(step.exec, step.comm, m_sent_records.data(), m_sent,
                         m_received_records.data(), m_received);
  step.locally([&] { merge_records(step, layer, m); });
}

// Copies the parts of attention that this rank has computed, in the order in which ranks get them.
void SharedHeadsBlock::pack_records(Step& step, int layer, const Matrix& lse) {
  const auto m = static_cast<std::int64_t>(lse.extent(0));
  const std::int64_t group = m_places.sizes(layer).group, dim = step.head_dim(layer);
  const std::int64_t size = head_size(layer), own = step.kv_heads(layer);
  const auto remote_heads = static_cast<std::int64_t>(m_layers[layer].remote_heads.size());
  m_copies.clear();
  float* record = m_sent_records.data();
  const auto pack = [&](const auto& piece, int place) {
    const bool is_own = place < own;
    const std::int64_t heads = is_own ? own : remote_heads;
    const std::int64_t index = is_own ? place : place - own;
    const float* const from = is_own ? step.data(Step::mixed) : m_attended.data();
    const float* const sums = is_own ? lse.data() : m_log_sums.data();
    const std::int64_t in_head = piece.begin - piece.head * size;
    const std::int64_t floats = piece.record();
    m_copies.push_back(
        {from + index * size + in_head, heads * size, record, floats, piece.columns()});
    m_copies.push_back({sums + index * group + in_head / dim, heads * group,
                        record + piece.columns(), floats, piece.query_heads});
    record += m * floats;
  };
  for (int r = 0; r < m_partition.n_ranks(); ++r) for_each_record(layer, m_rank, r, pack);
  copy_columns(step.exec, m, m_copies);
}

void SharedHeadsBlock::merge_records(Step& step, int layer, std::int64_t m) {
  m_merges.clear();
  m_records.clear();
  for (const auto& piece : m_places.pieces(layer, m_rank)) {
    AttendedMerge merge{};
    merge.to = step.data(Step::mixed) + piece.column;
    merge.to_stride = inputs(layer);
    merge.columns = piece.columns();
    merge.first = piece.begin % m_places.sizes(layer).head_dim;
    merge.query_heads = piece.query_heads;
    merge.first_part = static_cast<std::int64_t>(m_records.size());
    const float* record = m_received_records.data();
    for (int r = 0; r < m_partition.n_ranks(); ++r) {
      for_each_record(layer, r, m_rank, [&](const auto& sent, int) {
        if (sent.begin == piece.begin) m_records.push_back(record);
        record += m * sent.record();
      });
    }
    merge.parts = static_cast<std::int64_t>(m_records.size()) - merge.first_part;
    m_merges.push_back(merge);
  }
  merge_attended(step.exec, m, m_places.sizes(layer).head_dim, m_merges, m_records);
}

}  // namespace kvzap::engine
