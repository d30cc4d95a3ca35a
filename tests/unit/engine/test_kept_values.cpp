// Rows of a cache take up the values of rows that a cut evicts: all types of rows, forks, and
// kvpress' own values.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "cache/row_access.hpp"
#include "engine/kept_values.hpp"
#include "merge_reference.hpp"
#include "policy/registry.hpp"
#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::MergeRows;
using test::MergeRule;

using Keep = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace>;

MergerMaker merging(double similarity = 0, double fraction = 1) {
  ModelConfig config{};
  PolicyChoice choice;
  choice.budget.amount = Budget::Amount::evict_ratio;
  const HeadPartition partition = HeadPartition::even(1, 1, 1);
  policy::merge().apply(choice,
                        PolicyArguments({{"similarity", std::to_string(similarity)},
                                         {"fraction", std::to_string(fraction)}}),
                        {config, partition, DType::f32, {}, Communicator::self()});
  return choice.merger;
}

/// Copies of the heads' rows as a view of the cache's type.
template <class Value>
Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> brought(
    const std::vector<MergeRows>& heads, bool values) {
  const std::size_t rows = heads[0].keep.size();
  const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> to("rows", rows, heads.size(),
                                                                    heads[0].dim);
  const auto host = Kokkos::create_mirror_view(to);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    for (std::size_t row = 0; row < rows; ++row) {
      const float* const from = values ? heads[h].value(row) : heads[h].key(row);
      for (int d = 0; d < heads[h].dim; ++d) host(row, h, d) = Value(from[d]);
    }
  }
  Kokkos::deep_copy(to, host);
  return to;
}

Keep flags(const std::vector<MergeRows>& heads) {
  const Keep keep("keep", heads.size(), heads[0].keep.size());
  const auto host = Kokkos::create_mirror_view(keep);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    for (std::size_t row = 0; row < heads[h].keep.size(); ++row) host(h, row) = heads[h].keep[row];
  }
  Kokkos::deep_copy(keep, host);
  return keep;
}

std::vector<int> numbers(std::size_t heads) {
  std::vector<int> all;
  for (std::size_t h = 0; h < heads; ++h) all.push_back(static_cast<int>(h));
  return all;
}

/// A cache that got all rows, or within a step those that stay.
struct Filled {
  template <class Value>
  static Filled of(const std::vector<MergeRows>& heads, const PageFormat& format, bool in_step,
                   const MergerMaker& make) {
    CacheShape shape{{static_cast<int>(heads.size())}, heads[0].dim, 7, 4};
    shape.format = format;
    Filled filled = {std::make_unique<KVCache>(DTypeOf<Value>::value, shape), 0};
    filled.id = filled.cache->add_sequence();
    const ExecutionSpace exec;
    const auto keys = brought<Value>(heads, false), values = brought<Value>(heads, true);
    engine::CutRows cut = {0, numbers(heads.size()), flags(heads), {}, {}};
    if (!in_step) {
      filled.cache->append(exec, filled.id, 0, keys, values, {}, {});
      return filled;
    }
    cut.new_keys = keys;
    cut.new_values = values;
    filled.cache->begin_step(exec, {{filled.id, static_cast<std::int64_t>(keys.extent(0))}});
    filled.cache->append_kept(exec, filled.id, 0, keys, values, {}, cut.keep);
    engine::KeptValues(make).merge(exec, *filled.cache, filled.id, cut);
    filled.cache->end_step();
    return filled;
  }
  /// Cuts the rows of a filled cache, or of a fork.
  void cut(const std::vector<MergeRows>& heads, const MergerMaker& make) const {
    const ExecutionSpace exec;
    const Keep keep = flags(heads);
    engine::KeptValues(make).merge(exec, *cache, id, {0, numbers(heads.size()), keep, {}, {}});
    cache->evict(exec, id, 0, keep);
  }

  std::unique_ptr<KVCache> cache;
  SequenceId id;
};

/// Both forms of the kernels.
class KeptValues : public ::testing::TestWithParam<bool> {
 protected:
  KeptValues() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~KeptValues() override { base::machine().set_device(m_device); }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, KeptValues, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

std::vector<MergeRows> random_heads(int heads, int dim, std::size_t rows, bool even) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<MergeRows> result(static_cast<std::size_t>(heads));
  for (std::size_t h = 0; h < result.size(); ++h) {
    MergeRows& head = result[h];
    head.dim = dim;
    for (std::size_t i = 0; i < rows * dim; ++i) head.keys.push_back(normal(random));
    for (std::size_t i = 0; i < rows * dim; ++i) head.values.push_back(normal(random));
    const std::size_t of = even ? 2 : h + 2;
    for (std::size_t row = 0; row < rows; ++row) head.keep.push_back(random() % of == 0);
    head.keep[h] = true;
  }
  return result;
}

/// What the cache holds of values as the merger gets them.
std::vector<MergeRows> as_held(const Filled& filled, std::vector<MergeRows> heads) {
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const auto rows = filled.cache->host_rows(filled.id, 0, static_cast<int>(h));
    heads[h].keys = rows.keys;
    heads[h].values = rows.values;
  }
  return heads;
}

/// Checks the rows of a cache after a cut. `rounding`: relative to a row's length.
void expect_cut(const Filled& filled, const std::vector<MergeRows>& before, const MergeRule& rule,
                double rounding) {
  for (std::size_t h = 0; h < before.size(); ++h) {
    SCOPED_TRACE(h);
    const MergeRows& head = before[h];
    const test::MergedRows expected = test::merged_rows(head, rule);
    const auto rows = filled.cache->host_rows(filled.id, 0, static_cast<int>(h));
    std::size_t place = 0;
    for (std::size_t row = 0; row < head.keep.size(); ++row) {
      if (!head.keep[row]) continue;
      ASSERT_LT(place, rows.positions.size());
      EXPECT_EQ(rows.positions[place], static_cast<std::int64_t>(row));
      const double length = test::length_of(head.value(row), head.dim);
      for (int d = 0; d < head.dim && !expected.is_uncertain[row]; ++d) {
        EXPECT_NEAR(rows.values[place * head.dim + d], expected.values[row * head.dim + d],
                    rounding * length + 1e-6)
            << row << ", " << d;
      }
      ++place;
    }
    EXPECT_EQ(place, rows.positions.size());
  }
}

template <class Value>
void expect_types(double rounding) {
  const auto heads = random_heads(3, 32, 61, false);
  const MergeRule rule = {0.1, 0.8};
  const PageFormat wide;
  const auto make = merging(rule.similarity, rule.fraction);
  const Filled in_step = Filled::of<Value>(heads, wide, true, make);
  std::vector<MergeRows> rounded = as_held(Filled::of<Value>(heads, wide, false, make), heads);
  expect_cut(in_step, rounded, rule, rounding);
  Filled stored = Filled::of<Value>(heads, wide, false, make);
  stored.cut(heads, make);
  expect_cut(stored, rounded, rule, rounding);
  // The two ways leave the same bits.
  for (int h = 0; h < 3; ++h) {
    EXPECT_EQ(stored.cache->host_rows(stored.id, 0, h).values,
              in_step.cache->host_rows(in_step.id, 0, h).values);
    EXPECT_EQ(stored.cache->host_rows(stored.id, 0, h).keys,
              in_step.cache->host_rows(in_step.id, 0, h).keys);
  }
}

TEST_P(KeptValues, AreThoseOfTheReferenceInEveryType) {
  expect_types<float>(1e-6);
  expect_types<half>(1e-3);
  expect_types<bfloat16>(1e-2);
}

TEST_P(KeptValues, ArePackedAnewInPages) {
  const auto heads = random_heads(2, 64, 50, true);
  for (const auto& [type, rounding] : std::vector<std::pair<RowType, double>>{
           {RowType::q8, 0.01}, {RowType::q4, 0.1}, {RowType::q3, 0.2}, {RowType::q2, 0.5}}) {
    SCOPED_TRACE(static_cast<int>(type));
    PageFormat format;
    format.keys = format.values = type;
    // Rows that stay are packed once, from the merged values.
    const Filled in_step = Filled::of<float>(heads, format, true, merging());
    expect_cut(in_step, heads, {}, rounding);
    // Packed rows are merged as they are: some wide ones are in the ring.
    Filled stored = Filled::of<float>(heads, format, false, merging());
    const auto packed = as_held(stored, heads);
    stored.cut(heads, merging());
    expect_cut(stored, packed, {}, rounding);
  }
}

TEST_P(KeptValues, OfAForkAreItsOwn) {
  for (const bool packed : {false, true}) {
    const auto heads = random_heads(2, 16, 45, true);
    PageFormat format;
    if (packed) format.keys = format.values = RowType::q8;
    const Filled whole = Filled::of<float>(heads, format, false, {});
    const auto before = as_held(whole, heads);
    const KVCache::Checkpoint checkpoint = whole.cache->checkpoint(whole.id);
    Filled fork = {nullptr, whole.cache->fork(whole.id)};
    const ExecutionSpace exec;
    const Keep keep = flags(heads);
    engine::KeptValues(merging()).merge(exec, *whole.cache, fork.id, {0, numbers(2), keep, {}, {}});
    for (int h = 0; h < 2; ++h) {
      EXPECT_NE(whole.cache->host_rows(fork.id, 0, h).values, before[h].values);
      EXPECT_EQ(whole.cache->host_rows(whole.id, 0, h).values, before[h].values);
      EXPECT_EQ(whole.cache->host_rows(fork.id, 0, h).keys, before[h].keys);
    }
    whole.cache->evict(exec, fork.id, 0, keep);
    whole.cache->restore(whole.id, checkpoint);
    for (int h = 0; h < 2; ++h) {
      EXPECT_EQ(whole.cache->host_rows(whole.id, 0, h).values, before[h].values);
    }
    // And the other way round: what a fork has does not change with its source.
    const SequenceId second = whole.cache->fork(whole.id);
    whole.cut(heads, merging());
    for (int h = 0; h < 2; ++h) {
      EXPECT_EQ(whole.cache->host_rows(second, 0, h).values, before[h].values);
      EXPECT_EQ(whole.cache->host_rows(fork.id, 0, h).values,
                whole.cache->host_rows(whole.id, 0, h).values);
    }
    // Rows of a checkpoint may have changed.
    test::expect_error([&] { whole.cache->restore(whole.id, checkpoint); }, {"checkpoint"});
    for (const SequenceId id : whole.cache->sequences()) whole.cache->free_sequence(id);
    EXPECT_EQ(whole.cache->pool().pages_in_use(), 0U);
  }
}

TEST_P(KeptValues, AreThoseOfKvpress) {
  std::ifstream file(test::source_dir() / "tests/golden/merged_values.json");
  const auto cases = nlohmann::json::parse(file);
  ASSERT_EQ(cases.size(), 8U);
  for (const auto& one : cases) {
    std::vector<MergeRows> heads;
    for (std::size_t h = 0; h < one.at("keys").size(); ++h) {
      MergeRows& head = heads.emplace_back();
      head.dim = static_cast<int>(one.at("keys")[h][0].size());
      for (const auto& row : one.at("keys")[h]) {
        for (const auto& x : row) head.keys.push_back(x.get<float>() / 256);
      }
      for (const auto& row : one.at("values")[h]) {
        for (const auto& x : row) head.values.push_back(x.get<float>() / 256);
      }
      head.keep.assign(one.at("keys")[h].size(), false);
      for (const auto& row : one.at("kept")[h]) head.keep[row.get<std::size_t>()] = true;
    }
    SCOPED_TRACE(heads[0].keep.size());
    const auto make = merging(one.at("similarity"), one.at("fraction"));
    for (const bool in_step : {false, true}) {
      const Filled filled = Filled::of<float>(heads, {}, in_step, make);
      if (!in_step) filled.cut(heads, make);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const auto rows = filled.cache->host_rows(filled.id, 0, static_cast<int>(h));
        std::size_t i = 0;
        for (const auto& row : one.at("merged")[h]) {
          for (const auto& x : row) EXPECT_NEAR(rows.values.at(i++), x.get<double>(), 2e-6);
        }
        EXPECT_EQ(i, rows.values.size());
      }
    }
  }
}

/// Returns what a test has made up.
class Given final : public ValueMerger {
 public:
  explicit Given(MergedValues values) : m_values(std::move(values)) {}
  const MergedValues& merge(const CutHead& /*head*/) override { return m_values; }

 private:
  MergedValues m_values;
};

TEST_P(KeptValues, MustBeOfRowsThatStay) {
  auto heads = random_heads(1, 8, 20, true);
  heads[0].keep.assign(20, true);
  heads[0].keep[4] = false;
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> values("values", 2, 8);
  for (const std::vector<std::int64_t>& rows :
       {std::vector<std::int64_t>{4}, {5, 3}, {20}, {-1}, {3, 4}}) {
    const MergerMaker make = [&] { return std::make_unique<Given>(MergedValues{rows, values}); };
    test::expect_error([&] { Filled::of<float>(heads, {}, false, {}).cut(heads, make); },
                       {"expected rows that stay"});
  }
  // Too few values, or too short ones.
  for (const auto& [rows, dim] : {std::pair{1, 8}, std::pair{2, 7}}) {
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> few("values", rows, dim);
    const MergerMaker make = [&] { return std::make_unique<Given>(MergedValues{{1, 2}, few}); };
    test::expect_error([&] { Filled::of<float>(heads, {}, false, {}).cut(heads, make); },
                       {"expected (at least 2, 8)"});
  }
}

TEST_P(KeptValues, CannotChangeRowsThatAStepWouldRestore) {
  const auto heads = random_heads(1, 8, 20, true);
  const Filled filled = Filled::of<float>(heads, {}, false, {});
  const ExecutionSpace exec;
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> values("values", 1, 8);
  const Kokkos::View<std::int64_t*, MemorySpace> rows("rows", 1);
  cache::RowAccess access(*filled.cache);
  filled.cache->begin_step(exec, {{filled.id, 1}});
  test::expect_error([&] { access.set_values(exec, filled.id, 0, 0, rows, values); },
                     {"in a step that began with rows"});
  filled.cache->cancel_step();
  EXPECT_EQ(as_held(filled, heads)[0].values, heads[0].values);
  access.set_values(exec, filled.id, 0, 0, rows, values);
  EXPECT_EQ(as_held(filled, heads)[0].values[0], 0);
  CacheShape latent{{1}, 8, 4, 4};
  latent.format.values_are_keys = true;
  KVCache one(DType::f32, latent);
  const SequenceId id = one.add_sequence();
  test::expect_error([&] { cache::RowAccess(one).set_values(exec, id, 0, 0, rows, values); },
                     {"the value of a row is its key"});
}

}  // namespace
}  // namespace kvzap
