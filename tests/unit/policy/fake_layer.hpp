// A layer of a sequence made of plain arrays, for tests of eviction policies, and the loop by which
// a decoder asks a policy.
#pragma once

#include <algorithm>
#include <cmath>
#include <kvzap/engine/policy.hpp>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvzap::test {

inline double log_sum_exp_of(const std::vector<double>& scores) {
  double largest = -std::numeric_limits<double>::infinity();
  for (double score : scores) largest = std::max(largest, score);
  double sum = 0;
  for (double score : scores) sum += std::exp(score - largest);
  return largest + std::log(sum);
}

/// A layer of the whole model, whatever rank has which head. Rows of a head by position: cached
/// ones, then one for each new token.
struct LayerData {
  int layer = 0;
  int layers = 1;
  int kv_heads = 1;
  int group = 1;
  int head_dim = 1;
  int value_dim = 0;  // 0: head_dim; the others are zeros
  std::int64_t hidden_size = 1;
  std::int64_t tokens = 0;
  std::int64_t new_tokens = 0;
  std::int64_t question = 0;
  std::int64_t keep = 0;
  double evict_ratio = 0;
  std::int64_t repeats_begin = 0, repeats_end = 0;

  std::vector<std::vector<std::int64_t>> positions;  // (KV head)(row)
  std::vector<std::vector<float>> keys;              // (KV head)(row, head_dim): after RoPE
  std::vector<std::vector<float>> values;            // (KV head)(row, head_dim)
  std::vector<std::vector<float>> cached_scores;     // (KV head)(cached row); empty: NaN
  std::vector<float> queries;         // (token of the sequence, query head, head_dim): after RoPE
  std::vector<float> hidden;          // (token of the sequence, hidden_size)
  std::vector<float> output_weights;  // (query head, head_dim, hidden_size)
  std::vector<float> inverse_frequencies;  // (head_dim / 2)
  float rope_scale = 1;                    // which is in queries and keys
  float soft_cap = 0;                      // only in PolicyLayer::Extents, as the sinks
  std::vector<float> sinks;                // (query head), or empty

  std::int64_t rows(int head) const { return static_cast<std::int64_t>(positions[head].size()); }
  std::int64_t cached(int head) const { return rows(head) - new_tokens; }
  int query_heads() const { return kv_heads * group; }
  const float* key(int head, std::int64_t row) const { return &keys[head][row * head_dim]; }
  const float* value(int head, std::int64_t row) const { return &values[head][row * head_dim]; }
  const float* query(std::int64_t token, int query_head) const {
    return &queries[(token * query_heads() + query_head) * head_dim];
  }
  /// The scaled score that a query gives a row.
  double attention_score(std::int64_t token, int query_head, std::int64_t row) const {
    const float* const q = query(token, query_head);
    const float* const k = key(query_head / group, row);
    double sum = 0;
    for (int d = 0; d < head_dim; ++d) sum += static_cast<double>(q[d]) * k[d];
    return sum / std::sqrt(static_cast<double>(head_dim));
  }
  /// Rows that a query sees: those up to its own position.
  std::int64_t seen(std::int64_t token, int head) const {
    const auto& of_head = positions[head];
    return std::upper_bound(of_head.begin(), of_head.end(), token) - of_head.begin();
  }
  double log_sum_exp(std::int64_t token, int query_head) const {
    std::vector<double> scores(seen(token, query_head / group));
    for (std::size_t r = 0; r < scores.size(); ++r) {
      scores[r] = attention_score(token, query_head, static_cast<std::int64_t>(r));
    }
    return log_sum_exp_of(scores);
  }
};

/// What random_layer makes.
struct LayerShape {
  int kv_heads = 2;
  int group = 2;
  int head_dim = 64;
  std::int64_t hidden_size = 48;
  std::int64_t tokens = 100;
  std::int64_t new_tokens = 100;
  /// Chance that a row of an earlier token is still there; heads differ in which and how many.
  double stays = 0.7;
  int layer = 0;
  int layers = 1;
};

/// Normally distributed rows and queries; keys around a mean of their own in each head, as those of
/// real models are.
inline LayerData random_layer(const LayerShape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  LayerData data;
  data.layer = shape.layer;
  data.layers = shape.layers;
  data.kv_heads = shape.kv_heads;
  data.group = shape.group;
  data.head_dim = shape.head_dim;
  data.hidden_size = shape.hidden_size;
  data.tokens = shape.tokens;
  data.new_tokens = shape.new_tokens;
  data.keep = shape.tokens;
  for (int h = 0; h < shape.kv_heads; ++h) {
    std::vector<std::int64_t> positions;
    const double stays = shape.stays * (h + 1) / shape.kv_heads;
    for (std::int64_t t = 0; t < shape.tokens; ++t) {
      const bool is_new = t >= shape.tokens - shape.new_tokens;
      if (is_new || uniform(random) < stays) positions.push_back(t);
    }
    std::vector<float> mean(shape.head_dim);
    for (float& x : mean) x = normal(random);
    std::vector<float> keys, values;
    for (std::size_t r = 0; r < positions.size(); ++r) {
      for (int d = 0; d < shape.head_dim; ++d) {
        keys.push_back(mean[d] + normal(random));
        values.push_back(normal(random));
      }
    }
    data.positions.push_back(std::move(positions));
    data.keys.push_back(std::move(keys));
    data.values.push_back(std::move(values));
  }
  data.cached_scores.resize(shape.kv_heads);
  data.queries.resize(shape.tokens * data.query_heads() * shape.head_dim);
  for (float& x : data.queries) x = normal(random);
  data.hidden.resize(shape.tokens * shape.hidden_size);
  for (float& x : data.hidden) x = normal(random);
  data.output_weights.resize(data.query_heads() * shape.head_dim * shape.hidden_size);
  for (float& x : data.output_weights) x = normal(random) / 8;
  for (int i = 0; i < shape.head_dim / 2; ++i) {
    data.inverse_frequencies.push_back(std::pow(10000.0f, -2.0f * i / shape.head_dim));
  }
  return data;
}

/// The layer as a rank with some of the heads sees it. Reading rows that are not there yet, or a
/// block's or the recent tokens' data that no one asked for, throws.
class FakeLayer final : public PolicyLayer {
 public:
  /// All heads.
  explicit FakeLayer(const LayerData& data, const Communicator& comm = Communicator::self())
      : FakeLayer(data, all_heads(data.kv_heads), comm) {}
  FakeLayer(const LayerData& data, std::vector<int> heads, const Communicator& comm)
      : PolicyLayer(ExecutionSpace(), comm), m_data(data), m_seen(data.tokens) {
    m_extents.layer = data.layer;
    m_extents.layers = data.layers;
    m_extents.kv_heads = data.kv_heads;
    m_extents.group = data.group;
    m_extents.head_dim = data.head_dim;
    m_extents.value_dim = data.value_dim == 0 ? data.head_dim : data.value_dim;
    m_extents.hidden_size = data.hidden_size;
    m_extents.rope_scale = data.rope_scale;
    m_extents.tokens = data.tokens;
    m_extents.new_tokens = data.new_tokens;
    m_extents.question = data.question;
    m_extents.keep = data.keep;
    m_extents.evict_ratio = data.evict_ratio;
    m_extents.repeats_begin = data.repeats_begin;
    m_extents.repeats_end = data.repeats_end;
    m_extents.soft_cap = data.soft_cap;
    std::vector<float> sinks;
    for (int head : heads) {
      m_extents.rows.push_back(data.rows(head));
      if (data.sinks.empty()) continue;
      const auto first = data.sinks.begin() + std::ptrdiff_t{head} * data.group;
      sinks.insert(sinks.end(), first, first + data.group);
    }
    m_extents.sinks =
        to_device<Kokkos::View<const float*, MemorySpace>, float>(sinks.data(), sinks.size());
    m_extents.heads = std::move(heads);
  }

  PositionView positions(int head, std::int64_t begin, std::int64_t count) override {
    check(head, begin, count);
    const auto& all = m_data.positions[number(head)];
    return to_device<PositionView, std::int64_t>(all.data() + begin, count);
  }
  RowsView keys(int head, std::int64_t begin, std::int64_t count) override {
    return rows_of(m_data.keys, head, begin, count);
  }
  RowsView values(int head, std::int64_t begin, std::int64_t count) override {
    return rows_of(m_data.values, head, begin, count);
  }
  Kokkos::View<const float*, MemorySpace> cached_scores(int head) override {
    const int h = number(head);
    std::vector<float> scores = m_data.cached_scores[h];
    if (scores.empty()) scores.assign(m_data.cached(h), std::nanf(""));
    return to_device<Kokkos::View<const float*, MemorySpace>, float>(scores.data(), scores.size());
  }
  TokenBlock recent() override {
    if (m_seen != m_data.tokens) throw std::logic_error("recent() outside of score");
    const std::int64_t count = std::min(m_needs.recent, m_data.tokens);
    if (count == 0) throw std::logic_error("recent() without a need for it");
    TokenBlock result;
    result.first = m_data.tokens - count;
    result.count = count;
    result.queries = queries_of(result.first, count);
    return result;
  }
  void attention_mass(const TokenBlock& block, MassReduction reduction, const MassView& mass,
                      const MassFactors& factors) override {
    if (!m_needs.log_sum_exp) throw std::logic_error("attention_mass without log-sum-exps");
    // Strided views are copied on the device first: between memory spaces a copy needs whole ones.
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> sums(
        "kvzap::test::mass", mass.extent(0), mass.extent(1));
    Kokkos::deep_copy(sums, mass);
    const Kokkos::View<float*, MemorySpace> query_factors("kvzap::test::factors",
                                                          factors.queries.extent(0));
    if (query_factors.size() > 0) Kokkos::deep_copy(query_factors, factors.queries);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), sums);
    const auto rows = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), factors.rows);
    const auto of_queries = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), query_factors);
    const std::vector<int> members = members_of(block);
    for (std::int64_t i = 0; i < block.count; ++i) {
      const std::int64_t token = block.first + i;
      for (int local = 0; local < heads() * static_cast<int>(members.size()); ++local) {
        const int head = local / static_cast<int>(members.size());
        const int query_head =
            number(head) * m_data.group + members[static_cast<std::size_t>(local) % members.size()];
        const auto& probabilities = attention(token, query_head).probabilities;
        for (std::size_t r = 0; r < probabilities.size(); ++r) {
          double p = probabilities[r];
          if (rows.size() > 0) p *= rows(local, r);
          if (of_queries.size() > 0) p *= of_queries(i);
          float& sum = host(head, r);
          sum = static_cast<float>(reduction == MassReduction::sum ? sum + p
                                                                   : std::max<double>(sum, p));
        }
      }
    }
    Kokkos::deep_copy(sums, host);
    Kokkos::deep_copy(mass, sums);
  }
  RowsView output_weights(int query_head) override {
    const std::int64_t size = m_data.head_dim * m_data.hidden_size;
    const int all = number(query_head / m_data.group) * m_data.group + query_head % m_data.group;
    return to_rows(&m_data.output_weights[all * size], m_data.head_dim, m_data.hidden_size);
  }
  Kokkos::View<const float*, MemorySpace> inverse_frequencies() override {
    return to_device<Kokkos::View<const float*, MemorySpace>, float>(
        m_data.inverse_frequencies.data(), m_data.inverse_frequencies.size());
  }

  /// A step that fails once so many of its new tokens have been shown, in one block.
  void fail(Policy& policy, std::int64_t shown) {
    show(policy, shown, m_data.tokens - m_data.new_tokens + shown);
  }

  /// A step in which a policy is only shown blocks of so many of the new tokens.
  void observe(Policy& policy, std::int64_t block_tokens) {
    show(policy, block_tokens, m_data.tokens);
  }

  /// Does what a decoder does in a step: blocks of so many of the new tokens (0: all in one), then
  /// scores. Gives those of each head on this rank, of rows(head) rows.
  std::vector<std::vector<float>> run(Policy& policy, std::int64_t block_tokens = 0) {
    show(policy, block_tokens > 0 ? block_tokens : m_data.new_tokens, m_data.tokens);
    m_seen = m_data.tokens;
    const auto& all_rows = extents().rows;
    const std::int64_t most =
        all_rows.empty() ? 0 : *std::max_element(all_rows.begin(), all_rows.end());
    // A part of a larger matrix, and nothing in it that a policy might rely on.
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> room("kvzap::test::scores",
                                                                       heads(), most + 3);
    Kokkos::deep_copy(room, std::nanf(""));
    const Policy::ScoreView scores =
        Kokkos::subview(room, Kokkos::ALL, std::pair<std::int64_t, std::int64_t>(1, most + 1));
    policy.score(*this, scores);
    exec().fence();
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), room);
    std::vector<std::vector<float>> result(heads());
    for (int h = 0; h < heads(); ++h) {
      for (std::int64_t r = 0; r < rows(h); ++r) result[h].push_back(host(h, r + 1));
    }
    return result;
  }

 private:
  static std::vector<int> all_heads(int count) {
    std::vector<int> heads(count);
    std::iota(heads.begin(), heads.end(), 0);
    return heads;
  }
  int number(int head) const { return m_extents.heads.at(head); }

  /// Blocks of so many of the new tokens, up to position `end`.
  void show(Policy& policy, std::int64_t step, std::int64_t end) {
    m_needs = policy.needs();
    if (!m_needs.blocks) return;
    for (std::int64_t t = m_data.tokens - m_data.new_tokens; t < end; t += step) {
      const std::int64_t count = std::min(step, end - t);
      m_seen = t + count;
      policy.observe(*this, block(t, count));
    }
  }

  /// Throws if the rows are not all there: of the step, up to the block that is observed.
  void check(int head, std::int64_t begin, std::int64_t count) const {
    const std::int64_t there = m_data.rows(number(head)) - (m_data.tokens - m_seen);
    if (begin < 0 || count < 0 || begin + count > there) {
      throw std::logic_error("rows " + std::to_string(begin) + " and " + std::to_string(count) +
                             " more of " + std::to_string(there));
    }
  }
  template <class View, class Value>
  static View to_device(const Value* values, std::int64_t count) {
    const Kokkos::View<Value*, MemorySpace> result("kvzap::test::values", count);
    const auto host = Kokkos::create_mirror_view(result);
    std::copy_n(values, count, host.data());
    Kokkos::deep_copy(result, host);
    return result;
  }
  static RowsView to_rows(const float* values, std::int64_t rows, std::int64_t columns) {
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> result("kvzap::test::rows", rows,
                                                                         columns);
    const auto host = Kokkos::create_mirror_view(result);
    std::copy_n(values, rows * columns, host.data());
    Kokkos::deep_copy(result, host);
    return result;
  }
  RowsView rows_of(const std::vector<std::vector<float>>& all, int head, std::int64_t begin,
                   std::int64_t count) const {
    check(head, begin, count);
    return to_rows(all[number(head)].data() + begin * m_data.head_dim, count, m_data.head_dim);
  }

  /// The members of each group whose queries a block has: all, or one.
  std::vector<int> members_of(const TokenBlock& block) const {
    if (static_cast<int>(block.queries.extent(1)) == heads() * m_data.group) {
      std::vector<int> all(static_cast<std::size_t>(m_data.group));
      std::iota(all.begin(), all.end(), 0);
      return all;
    }
    if (static_cast<int>(block.queries.extent(1)) != heads()) {
      throw std::logic_error("queries of some members of a group");
    }
    const Kokkos::View<float*, MemorySpace> query("kvzap::test::query", block.queries.extent(2));
    Kokkos::deep_copy(query, Kokkos::subview(block.queries, 0, 0, Kokkos::ALL));
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), query);
    for (int member = 0; member < m_data.group; ++member) {
      const float* const own = m_data.query(block.first, number(0) * m_data.group + member);
      if (std::equal(own, own + m_data.head_dim, host.data())) return {member};
    }
    throw std::logic_error("queries that are none of the layer's");
  }

  TokenBlock::QueryView queries_of(std::int64_t first, std::int64_t count) const {
    const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> result(
        "kvzap::test::queries", count, heads() * m_data.group, m_data.head_dim);
    const auto host = Kokkos::create_mirror_view(result);
    for (std::int64_t t = 0; t < count; ++t) {
      for (int local = 0; local < heads() * m_data.group; ++local) {
        const int all = number(local / m_data.group) * m_data.group + local % m_data.group;
        for (int d = 0; d < m_data.head_dim; ++d) {
          host(t, local, d) = m_data.query(first + t, all)[d];
        }
      }
    }
    Kokkos::deep_copy(result, host);
    return result;
  }
  /// A query's attention to the rows that it sees: computed once, for steps ask again and again.
  struct QueryAttention {
    double log_sum_exp = 0;
    std::vector<double> probabilities;
  };
  const QueryAttention& attention(std::int64_t token, int query_head) {
    const auto [found, is_new] = m_attention.try_emplace({token, query_head});
    QueryAttention& result = found->second;
    if (is_new) {
      const std::int64_t count = m_data.seen(token, query_head / m_data.group);
      result.probabilities.resize(count);
      for (std::int64_t r = 0; r < count; ++r) {
        result.probabilities[r] = m_data.attention_score(token, query_head, r);
      }
      result.log_sum_exp = log_sum_exp_of(result.probabilities);
      for (double& p : result.probabilities) p = std::exp(p - result.log_sum_exp);
    }
    return result;
  }
  TokenBlock block(std::int64_t first, std::int64_t count) {
    TokenBlock result;
    result.first = first;
    result.count = count;
    result.hidden = to_rows(&m_data.hidden[first * m_data.hidden_size], count, m_data.hidden_size);
    result.queries = queries_of(first, count);
    if (m_needs.log_sum_exp) {
      const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> lse(
          "kvzap::test::log_sum_exp", count, heads() * m_data.group);
      const auto host = Kokkos::create_mirror_view(lse);
      for (std::int64_t t = 0; t < count; ++t) {
        for (int local = 0; local < heads() * m_data.group; ++local) {
          const int all = number(local / m_data.group) * m_data.group + local % m_data.group;
          host(t, local) = static_cast<float>(attention(first + t, all).log_sum_exp);
        }
      }
      Kokkos::deep_copy(lse, host);
      result.log_sum_exp = lse;
    }
    return result;
  }

  LayerData m_data;
  std::map<std::pair<std::int64_t, int>, QueryAttention> m_attention;
  PolicyNeeds m_needs;
  std::int64_t m_seen;  // tokens of the sequence whose rows are there
};

}  // namespace kvzap::test
