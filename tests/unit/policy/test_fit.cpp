// Modifier fit: values of kept rows, against a ridge regression in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/machine.hpp"
#include "policy/registry.hpp"
#include "unit/policy/fake_layer.hpp"

namespace kvzap {
namespace {

using test::FakeLayer;
using test::LayerData;

using Numbers = std::vector<double>;

class NoScores final : public Policy {
 public:
  void score(PolicyLayer& /*layer*/, const ScoreView& /*scores*/) override {}
};

struct FitRule {
  int queries = 1024;
  double ridge = 5;  // so large that the search ends at the solution
};

std::unique_ptr<Policy> fitted(const FitRule& rule) {
  ModelConfig config{};
  PolicyChoice choice;
  choice.make = [] { return std::make_unique<NoScores>(); };
  const HeadPartition partition = HeadPartition::even(1, 1, 1);
  policy::fit().apply(choice,
                      PolicyArguments({{"queries", std::to_string(rule.queries)},
                                       {"ridge", std::to_string(rule.ridge)}}),
                      {config, partition, DType::f32, {}, Communicator::self()});
  return choice.make();
}

/// A step that repeats positions begin … end - 1 of a context, after a prompt of 5 tokens.
LayerData repeat_of(int context, int begin, int end, int group, unsigned seed = 1) {
  test::LayerShape shape;
  shape.kv_heads = 3;
  shape.group = group;
  shape.head_dim = 8;
  shape.new_tokens = 5 + end - begin;
  shape.tokens = context + shape.new_tokens;
  shape.stays = 1;
  LayerData data = test::random_layer(shape, seed);
  // Every head has all rows of the context.
  for (int h = 0; h < shape.kv_heads; ++h) {
    std::mt19937 random(seed + 100 + static_cast<unsigned>(h));
    std::normal_distribution<float> normal;
    data.positions[h].resize(shape.tokens);
    std::iota(data.positions[h].begin(), data.positions[h].end(), 0);
    data.keys[h].resize(shape.tokens * shape.head_dim);
    data.values[h].resize(shape.tokens * shape.head_dim);
    for (float& x : data.keys[h]) x = 2 * normal(random);
    for (float& x : data.values[h]) x = normal(random);
  }
  data.repeats_begin = begin;
  data.repeats_end = end;
  return data;
}

std::vector<std::uint8_t> some_rows(int context, double share, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<std::uint8_t> keep(context);
  for (auto& each : keep) each = uniform(random) < share ? 1 : 0;
  keep[0] = 1;
  keep[1] = 0;
  return keep;
}

/// The problem of a head: shares (query, kept row), and targets and values (…, dim).
struct Problem {
  std::int64_t queries = 0, kept = 0, dim = 0;
  Numbers shares, targets, values;

  /// The sum of squares that fit makes small, but for the weight of the ridge.
  double error(const Numbers& of_values) const {
    double sum = 0;
    for (std::int64_t q = 0; q < queries; ++q) {
      for (std::int64_t d = 0; d < dim; ++d) {
        double left = targets[q * dim + d];
        for (std::int64_t k = 0; k < kept; ++k) {
          left -= shares[q * kept + k] * of_values[k * dim + d];
        }
        sum += left * left;
      }
    }
    return sum;
  }
  double weight(double ridge) const {
    return ridge * std::inner_product(shares.begin(), shares.end(), shares.begin(), 0.0) /
           static_cast<double>(kept);
  }
  double objective(const Numbers& of_values, double ridge) const {
    double moved = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      moved += (of_values[i] - values[i]) * (of_values[i] - values[i]);
    }
    return error(of_values) + weight(ridge) * moved;
  }
};

/// Softmax of the scores of some rows, with the sink of the query head.
Numbers shares_of(const LayerData& data, std::int64_t token, int query_head,
                  const std::vector<std::int64_t>& rows) {
  Numbers shares;
  for (const std::int64_t row : rows) {
    const double score = data.attention_score(token, query_head, row);
    shares.push_back(data.soft_cap > 0 ? data.soft_cap * std::tanh(score / data.soft_cap) : score);
  }
  const double sink =
      data.sinks.empty() ? -std::numeric_limits<double>::infinity() : data.sinks[query_head];
  double sum = std::exp(sink);
  for (double& share : shares) sum += share = std::exp(share);
  for (double& share : shares) share /= sum;
  return shares;
}

/// Adds the queries of a step: of each `every` tokens of the context the last one's.
void add_queries(Problem& problem, const LayerData& data, int head, int every,
                 const std::vector<std::uint8_t>& keep) {
  std::vector<std::int64_t> all(keep.size()), kept;
  std::iota(all.begin(), all.end(), 0);
  for (const std::int64_t row : all) {
    if (keep[row]) kept.push_back(row);
  }
  problem.dim = data.head_dim;
  problem.kept = static_cast<std::int64_t>(kept.size());
  problem.values.clear();
  for (const std::int64_t row : kept) {
    problem.values.insert(problem.values.end(), data.value(head, row),
                          data.value(head, row) + data.head_dim);
  }
  for (std::int64_t p = data.repeats_begin; p < data.repeats_end; ++p) {
    if (p % every != every - 1) continue;
    for (int member = 0; member < data.group; ++member) {
      const std::int64_t token = data.tokens - (data.repeats_end - p);
      const int query_head = head * data.group + member;
      const Numbers of_kept = shares_of(data, token, query_head, kept);
      const Numbers of_all = shares_of(data, token, query_head, all);
      problem.shares.insert(problem.shares.end(), of_kept.begin(), of_kept.end());
      for (int d = 0; d < data.head_dim; ++d) {
        double sum = 0;
        for (const std::int64_t row : all) sum += of_all[row] * data.value(head, row)[d];
        problem.targets.push_back(sum);
      }
      ++problem.queries;
    }
  }
}

/// Gaussian elimination on the normal equations.
Numbers solution(const Problem& problem, double ridge) {
  const std::int64_t n = problem.kept, dim = problem.dim;
  Numbers a(n * n), x(n * dim);
  for (std::int64_t q = 0; q < problem.queries; ++q) {
    const double* const share = &problem.shares[q * n];
    for (std::int64_t d = 0; d < dim; ++d) {
      double left = problem.targets[q * dim + d];
      for (std::int64_t k = 0; k < n; ++k) left -= share[k] * problem.values[k * dim + d];
      for (std::int64_t k = 0; k < n; ++k) x[k * dim + d] += share[k] * left;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t k = 0; k < n; ++k) a[i * n + k] += share[i] * share[k];
    }
  }
  for (std::int64_t i = 0; i < n; ++i) a[i * n + i] += problem.weight(ridge);
  for (std::int64_t i = 0; i < n; ++i) {  // positive definite: no pivots to look for
    for (std::int64_t below = 0; below < n; ++below) {
      if (below == i) continue;
      const double by = a[below * n + i] / a[i * n + i];
      for (std::int64_t k = i; k < n; ++k) a[below * n + k] -= by * a[i * n + k];
      for (std::int64_t d = 0; d < dim; ++d) x[below * dim + d] -= by * x[i * dim + d];
    }
  }
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t d = 0; d < dim; ++d) {
      x[i * dim + d] = problem.values[i * dim + d] + x[i * dim + d] / a[i * n + i];
    }
  }
  return x;
}

/// Both forms of the kernels.
class Fit : public ::testing::TestWithParam<bool> {
 protected:
  Fit() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~Fit() override { base::machine().set_device(m_device); }

  /// Returns the new values of the rows that stay.
  static Numbers run(ValueMerger& merger, const LayerData& data, int head,
                     const std::vector<std::uint8_t>& keep) {
    const auto rows = static_cast<std::int64_t>(keep.size());
    const auto brought = [&](const std::vector<float>& from) {
      const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> to("rows", rows, data.head_dim);
      const auto host = Kokkos::create_mirror_view(to);
      std::copy_n(from.begin(), rows * data.head_dim, host.data());
      Kokkos::deep_copy(to, host);
      return to;
    };
    const ExecutionSpace exec;
    const MergedValues& merged = merger.merge({exec, data.layer, head, brought(data.keys[head]),
                                               brought(data.values[head]), keep.data()});
    exec.fence();
    Numbers result;
    if (merged.rows.empty()) return result;
    std::int64_t next = 0;
    const auto values = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), merged.values);
    for (std::int64_t row = 0; row < rows; ++row) {
      if (!keep[row]) continue;
      EXPECT_EQ(row, merged.rows.at(next));
      for (int d = 0; d < data.head_dim; ++d) result.push_back(values(next, d));
      ++next;
    }
    EXPECT_EQ(next, static_cast<std::int64_t>(merged.rows.size()));
    return result;
  }

  static void expect_near(const Numbers& expected, const Numbers& found, double tolerance) {
    ASSERT_EQ(expected.size(), found.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(expected[i], found[i], tolerance) << "value " << i;
    }
  }

 private:
  bool m_device;
};
INSTANTIATE_TEST_SUITE_P(Forms, Fit, ::testing::Values(false, true));

TEST_P(Fit, ValuesAreTheRidgeRegression) {
  for (const int group : {1, 3}) {
    const LayerData data = repeat_of(60, 0, 60, group);
    for (const FitRule& rule : {FitRule{1000, 5}, FitRule{20 * group, 5}}) {
      const auto policy = fitted(rule);
      FakeLayer(data).observe(*policy, 64);
      const auto merger = policy->context_merger()();
      for (int head = 0; head < 3; ++head) {
        const auto keep = some_rows(60, 0.2 + 0.3 * head, head + 1);
        Problem problem;
        add_queries(problem, data, head, rule.queries == 1000 ? 1 : 3, keep);
        expect_near(solution(problem, rule.ridge), run(*merger, data, head, keep), 3e-4);
      }
    }
  }
}

// Blocks of a step and heads on other ranks change nothing.
TEST_P(Fit, DoesNotDependOnTheStep) {
  const LayerData data = repeat_of(300, 3, 300, 2);
  const auto keep = some_rows(300, 0.3, 7);
  const auto whole = fitted({});
  FakeLayer(data).observe(*whole, 1000);
  const Numbers expected = run(*whole->context_merger()(), data, 2, keep);
  for (const int block : {1, 7, 64}) {
    const auto parts = fitted({});
    FakeLayer(data, {2}, Communicator::self()).observe(*parts, block);
    EXPECT_EQ(expected, run(*parts->context_merger()(), data, 2, keep)) << block;
  }
}

TEST_P(Fit, LogitsComeInTiles) {
  const LayerData data = repeat_of(800, 0, 800, 3);  // 798 queries; a host's tile has 654
  const auto policy = fitted({});
  FakeLayer(data).observe(*policy, 500);
  const auto keep = some_rows(800, 0.05, 4);
  Problem problem;
  add_queries(problem, data, 1, 3, keep);
  ASSERT_GT(problem.queries * 800, std::int64_t{1} << 19);
  expect_near(solution(problem, 5), run(*policy->context_merger()(), data, 1, keep), 3e-4);
}

// However few queries are asked for, the last token's are there.
TEST_P(Fit, OneTokenHasQueries) {
  const LayerData data = repeat_of(40, 7, 40, 4);
  const auto policy = fitted({1, 5});
  FakeLayer(data).observe(*policy, 16);
  const auto keep = some_rows(40, 0.5, 4);
  Problem problem;
  add_queries(problem, data, 2, 40, keep);
  ASSERT_EQ(problem.queries, 4);
  expect_near(solution(problem, 5), run(*policy->context_merger()(), data, 2, keep), 3e-4);
}

TEST_P(Fit, SeveralStepsRepeatTheContext) {
  const LayerData first = repeat_of(50, 2, 30, 2), second = repeat_of(50, 30, 50, 2, 1);
  const auto keep = some_rows(50, 0.4, 3);
  // Positions 2, 5, …, 47.
  const auto policy = fitted({34, 5});
  FakeLayer(first).observe(*policy, 16);
  FakeLayer(second).observe(*policy, 16);
  LayerData context = first;
  for (int h = 0; h < 3; ++h) {  // one cache for both steps
    std::copy_n(second.keys[h].begin(), 50 * 8, context.keys[h].begin());
    std::copy_n(second.values[h].begin(), 50 * 8, context.values[h].begin());
  }
  const auto merger = policy->context_merger()();
  for (int head = 0; head < 3; ++head) {
    Problem problem;
    LayerData with_queries = context;
    add_queries(problem, with_queries, head, 3, keep);
    LayerData later = second;
    later.keys = context.keys;
    later.values = context.values;
    add_queries(problem, later, head, 3, keep);
    expect_near(solution(problem, 5), run(*merger, context, head, keep), 3e-4);
  }
}

TEST_P(Fit, SinksAndSoftCapsTakePart) {
  LayerData data = repeat_of(60, 0, 60, 2);
  data.soft_cap = 2;
  data.sinks = {0.5F, 3, -1, 2, 0, 1};
  const auto policy = fitted({});
  FakeLayer(data).observe(*policy, 64);
  const auto merger = policy->context_merger()();
  for (int head = 0; head < 3; ++head) {
    const auto keep = some_rows(60, 0.5, head + 11);
    Problem problem;
    add_queries(problem, data, head, 1, keep);
    expect_near(solution(problem, 5), run(*merger, data, head, keep), 3e-4);
  }
}

// The search ends after some steps. It must have gained what there is to gain.
TEST_P(Fit, TheSearchComesCloseEnough) {
  const LayerData data = repeat_of(200, 0, 200, 2);
  for (const double ridge : {0.1, 0.01, 0.001}) {
    const auto policy = fitted({1024, ridge});
    FakeLayer(data).observe(*policy, 64);
    const auto merger = policy->context_merger()();
    const auto keep = some_rows(200, 0.3, 5);
    Problem problem;
    add_queries(problem, data, 1, 1, keep);
    const Numbers found = run(*merger, data, 1, keep);
    const double least = problem.objective(solution(problem, ridge), ridge);
    const double before = problem.error(problem.values);
    EXPECT_LT(least, 0.5 * before);
    EXPECT_LT(problem.objective(found, ridge), least + 0.01 * (before - least)) << ridge;
  }
}

TEST_P(Fit, RowsThatAreNotFiniteLeaveTheValues) {
  const LayerData data = repeat_of(40, 0, 40, 2);
  const auto policy = fitted({});
  FakeLayer(data).observe(*policy, 64);
  const auto merger = policy->context_merger()();
  const auto keep = some_rows(40, 0.5, 2);
  Problem problem;
  add_queries(problem, data, 0, 1, keep);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    LayerData broken = data;
    broken.values[0][8 + 3] = bad;  // of row 1, which goes
    expect_near(problem.values, run(*merger, broken, 0, keep), 0);
  }
}

TEST_P(Fit, WithoutQueriesNothingChanges) {
  // Queries would be those at positions 19 and 39.
  const LayerData data = repeat_of(40, 21, 39, 2);
  const auto policy = fitted({4, 1});
  FakeLayer(data).observe(*policy, 64);
  EXPECT_TRUE(run(*policy->context_merger()(), data, 0, some_rows(40, 0.5, 2)).empty());
}

}  // namespace
}  // namespace kvzap
