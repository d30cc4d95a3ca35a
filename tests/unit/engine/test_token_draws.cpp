// Draws of tokens on hosts and by kernels of devices, against sorted vocabularies.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/sampler.hpp>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/launch_graph.hpp"
#include "base/machine.hpp"
#include "base/team.hpp"
#include "engine/draw_token.hpp"
#include "engine/token_draws.hpp"

namespace {

using kvzap::MemorySpace;
using kvzap::TokenDraw;
using kvzap::TokenId;
namespace base = kvzap::base;
namespace engine = kvzap::engine;
using kvzap::linalg::Matrix;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr double all_but_one = 1 - 0x1p-53;

using Row = std::vector<float>;

/// A draw, and the distance of its random number and filters from the next boundary, relative to
/// the sum of weights.
struct Expected {
  TokenId token = -1;
  double margin = 1;
};

Expected draw_by_sorting(const Row& logits, const TokenDraw& draw) {
  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  for (const float logit : logits) {
    if (std::isnan(logit)) return {};
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  const float largest = logits[order.front()];
  if (!std::isfinite(largest)) return {};
  Expected expected;
  if (draw.temperature == 0) return {order.front(), 1};
  if (draw.top_k > 0 && draw.top_k < static_cast<std::int64_t>(order.size())) {
    order.resize(draw.top_k);
  }
  std::vector<double> weights;
  std::vector<long double> sums;
  long double sum = 0;
  for (const TokenId id : order) {
    weights.push_back(std::exp((static_cast<double>(logits[id]) - largest) / draw.temperature));
    sums.push_back(sum += weights.back());
  }
  const auto look_at = [&](long double bound) {
    const auto next = std::lower_bound(sums.begin(), sums.end(), bound);
    long double distance = sums.back();
    if (next != sums.end()) distance = std::min(distance, *next - bound);
    if (next != sums.begin()) distance = std::min(distance, bound - *(next - 1));
    expected.margin = std::min(expected.margin, static_cast<double>(distance / sums.back()));
  };
  if (draw.top_p < 1) {
    const long double enough = draw.top_p * sums.back();
    look_at(enough);
    const auto last = std::lower_bound(sums.begin(), sums.end(), enough);
    if (last != sums.end()) sums.erase(last + 1, sums.end());
  }
  if (draw.min_p > 0) {
    std::size_t kept = 0;
    while (kept < sums.size() && weights[kept] >= draw.min_p) ++kept;
    for (const double weight : weights) {
      if (weight == draw.min_p) continue;  // 1, without rounding
      expected.margin = std::min(expected.margin, std::fabs(weight / draw.min_p - 1));
    }
    sums.resize(kept);
  }
  const long double target = draw.uniform * sums.back();
  if (draw.uniform > 0) look_at(target);
  const auto drawn = std::upper_bound(sums.begin(), sums.end(), target);
  expected.token = order[std::min(drawn, sums.end() - 1) - sums.begin()];
  return expected;
}

/// Draws a token of each row.
std::vector<TokenId> draw(const std::vector<Row>& rows, const std::vector<TokenDraw>& draws,
                          engine::TokenDraws& room) {
  const auto count = static_cast<std::int64_t>(rows.size());
  const auto vocabulary = static_cast<std::int64_t>(rows.front().size());
  const kvzap::ExecutionSpace exec;
  const Matrix logits("logits", count, vocabulary);
  const auto host = Kokkos::create_mirror_view(logits);
  for (std::int64_t r = 0; r < count; ++r) {
    std::copy(rows[r].begin(), rows[r].end(), host.data() + r * vocabulary);
  }
  Kokkos::deep_copy(logits, host);
  const Kokkos::View<std::int64_t*, MemorySpace> tokens("tokens", count);
  Kokkos::deep_copy(tokens, -7);
  room.reserve(count, vocabulary);
  for (std::int64_t r = 0; r < count; ++r) room.rows()[r] = {count - 1 - r, draws[count - 1 - r]};
  room.place(exec);
  room.run(exec, logits, tokens);
  exec.fence();
  const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, tokens);
  return {found.data(), found.data() + count};
}

/// Rows of one vocabulary, and their draws.
struct Batch {
  std::vector<Row> rows;
  std::vector<TokenDraw> draws;

  void add(const Row& row, const TokenDraw& one) {
    rows.push_back(row);
    draws.push_back(one);
  }
};

/// Returns the number of rows without a boundary near, whose tokens must be those of sorting.
int compare(const Batch& batch) {
  int clear = 0;
  std::vector<Expected> expected;
  for (std::size_t r = 0; r < batch.rows.size(); ++r) {
    expected.push_back(draw_by_sorting(batch.rows[r], batch.draws[r]));
  }
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    engine::TokenDraws room;
    const std::vector<TokenId> found = draw(batch.rows, batch.draws, room);
    for (std::size_t r = 0; r < found.size(); ++r) {
      if (expected[r].margin < 1e-9) continue;
      ++clear;
      const TokenDraw& one = batch.draws[r];
      EXPECT_EQ(found[r], expected[r].token)
          << (device ? "device" : "host") << ", " << batch.rows[r].size() << " tokens, row " << r
          << ", temperature " << one.temperature << ", top-k " << one.top_k << ", top-p "
          << one.top_p << ", min-p " << one.min_p << ", random number " << one.uniform;
    }
  }
  base::machine().set_device(before);
  return clear / 2;
}

using Random = std::mt19937_64;

/// Logits of several kinds: a model's, ties, few tokens, equal ones, outliers, a wide range.
Row some_logits(std::size_t count, int kind, Random& random) {
  std::normal_distribution<float> normal(0, 4);
  Row row(count);
  for (float& logit : row) {
    logit = normal(random);
    if (kind == 1) logit = std::round(logit);
    if (kind == 2 && random() % 50 > 0) logit = -infinity;
    if (kind == 3) logit = random() % 2 == 0 ? 0.0f : -0.0f;
    if (kind == 5) logit *= 1e36f;
    if (kind == 6) logit = random() % 3 == 0 ? 1e-40f * logit : 1e-3f * logit;
  }
  if (kind == 4) row[random() % count] = 1e30f;
  if (kind == 2) row[random() % count] = 3;
  return row;
}

TokenDraw some_draw(std::size_t count, Random& random) {
  const auto one_of = [&](const auto& list) { return list[random() % std::size(list)]; };
  const double temperatures[] = {1, 0.7, 0.7, 1, 0, 0.01, 5e-324, 1e-30, 30, 1e300};
  const auto all = static_cast<std::int64_t>(count);
  const std::int64_t ks[] = {0, 0, 0, 1, 2, 40, 1000, all / 2, all - 1, all, all + 5};
  const double ps[] = {1, 1, 1, 0.95, 0.9, 0.5, 0.01, 1e-300, all_but_one};
  const double mins[] = {0, 0, 0, 0.05, 0.5, 1e-9, 1};
  const double uniform = random() % 16 == 0   ? 0
                         : random() % 16 == 0 ? all_but_one
                                              : static_cast<double>(random() >> 11) * 0x1p-53;
  TokenDraw draw;
  draw.temperature = one_of(temperatures);
  draw.top_k = std::max<std::int64_t>(0, one_of(ks));
  draw.top_p = one_of(ps);
  draw.min_p = one_of(mins);
  draw.uniform = uniform;
  return draw;
}

TEST(TokenDraws, AgreeWithSorting) {
  Random random(11);
  for (const std::size_t count : {1, 2, 31, 64, 1000, 2047, 2048, 2049, 5000}) {
    Batch batch;
    for (int r = 0; r < 300; ++r)
      batch.add(some_logits(count, r % 7, random), some_draw(count, random));
    const int clear = compare(batch);
    EXPECT_GT(clear, 200) << count;
  }
}

TEST(TokenDraws, AgreeWithSortingLargeVocabularies) {
  Random random(12);
  for (const std::size_t count : {32000, 151936, 200003}) {
    Batch batch;
    for (int r = 0; r < 21; ++r)
      batch.add(some_logits(count, r % 7, random), some_draw(count, random));
    EXPECT_GT(compare(batch), 10) << count;
  }
}

// Rows in several launches, because their sorted chunks do not fit at once.
TEST(TokenDraws, TakeSeveralLaunches) {
  Random random(13);
  Batch batch;
  const Row row = some_logits(262144, 0, random);
  for (int r = 0; r < 20; ++r) batch.add(row, {0.8, 0, 0.95, 0, (r + 0.5) / 20});
  EXPECT_EQ(compare(batch), 20);
}

TEST(TokenDraws, DoNotDependOnTeams) {
  Random random(14);
  Batch batch;
  for (int r = 0; r < 100; ++r)
    batch.add(some_logits(5000, r % 7, random), some_draw(5000, random));
  for (const base::TeamShape shape : {base::TeamShape{1, 1}, {4, 1}, {8, 4}, {3, 2}}) {
    base::set_team_shape(shape);
    EXPECT_GT(compare(batch), 60);
  }
  base::set_team_shape({0, 0});
}

// Equal logits have exact sums, so random numbers on boundaries are defined, too.
TEST(TokenDraws, TakeTheSmallerOfEqualIdsFirst) {
  constexpr int count = 4096;
  const Row row(count, 2.5f);
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    engine::TokenDraws room;
    std::vector<TokenDraw> draws;
    std::vector<TokenId> expected;
    for (const TokenId token : {0, 1, 511, 512, 1023, 2047, 2048, 4095}) {
      draws.push_back({1, 0, 1, 0, token / 4096.0});
      draws.push_back({0.5, 0, 0.5, 1, (token / 2) / 2048.0});
      draws.push_back({2, 1024, 1, 0.5, (token / 4) / 1024.0});
      expected.insert(expected.end(), {token, token / 2, token / 4});
    }
    EXPECT_EQ(draw(std::vector<Row>(draws.size(), row), draws, room), expected);
  }
  base::machine().set_device(before);
}

TEST(TokenDraws, RefuseLogitsThatAreNoNumbers) {
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    for (const int count : {1, 100, 3000}) {
      std::vector<Row> rows(6, Row(count, 1.0f));
      rows[0][count / 2] = std::nanf("");
      rows[1][count - 1] = -std::nanf("");
      rows[2][count / 3] = infinity;
      rows[3].assign(count, -infinity);
      rows[4].assign(count, std::numeric_limits<float>::max());
      rows[5].assign(count, -std::numeric_limits<float>::max());
      engine::TokenDraws room;
      for (const double temperature : {0.0, 0.8}) {
        const std::vector<TokenDraw> draws(rows.size(), {temperature, 0, 1, 0, 0});
        EXPECT_EQ(draw(rows, draws, room), (std::vector<TokenId>{-1, -1, -1, -1, 0, 0}));
      }
    }
  }
  base::machine().set_device(before);
}

// The random numbers of a seed are those of the sampler, and stay where nothing was drawn.
TEST(TokenDraws, FollowTheSampler) {
  Random random(15);
  const Row logits = some_logits(3000, 0, random);
  kvzap::SamplingOptions options;
  options.temperature = 1.1;
  options.top_p = 0.9;
  options.top_k = 700;
  options.seed = 77;
  kvzap::Sampler by_logits(options), by_draws(options);
  const bool before = base::machine().on_device();
  base::machine().set_device(true);
  engine::TokenDraws room;
  for (int i = 0; i < 40; ++i) {
    const std::string state = by_draws.state();
    const auto next = by_draws.next_draws(3);
    EXPECT_EQ(by_draws.state(), state);
    const auto tokens = draw(std::vector<Row>(3, logits), next, room);
    for (int d = 0; d < 1 + i % 3; ++d) {
      EXPECT_EQ(tokens[d], by_logits(logits));
      by_draws.use_draw();
    }
    EXPECT_EQ(by_draws.state(), by_logits.state());
  }
  base::machine().set_device(before);
}

// Settings are read when the launches are made, not when they are recorded.
TEST(TokenDraws, CanBeRecorded) {
  Random random(16);
  const bool before = base::machine().on_device();
  base::machine().set_device(true);
  if (base::machine().on_device() && base::LaunchGraph::is_available()) {
    constexpr int count = 2500;
    const kvzap::ExecutionSpace exec;
    const Matrix logits("logits", 2, count);
    const Kokkos::View<std::int64_t*, MemorySpace> tokens("tokens", 2);
    engine::TokenDraws room;
    room.reserve(1, count);
    base::LaunchGraph graph;
    ASSERT_TRUE(graph.record(exec, [&] { room.run(exec, logits, tokens); }));
    for (int i = 0; i < 20; ++i) {
      const Row row = some_logits(count, 0, random);
      const auto host = Kokkos::create_mirror_view(logits);
      for (int c = 0; c < count; ++c) host(0, c) = host(1, c) = row[c];
      Kokkos::deep_copy(logits, host);
      Kokkos::deep_copy(tokens, -7);
      room.rows()[0] = {i % 2, some_draw(count, random)};
      room.place(exec);
      graph.launch(exec);
      exec.fence();
      const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, tokens);
      EXPECT_EQ(found(i % 2), engine::read_and_draw(row.data(), row.size(), room.rows()[0].draw));
      EXPECT_EQ(found(1 - i % 2), -7);
    }
  }
  base::machine().set_device(before);
}

}  // namespace
