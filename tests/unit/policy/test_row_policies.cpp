// Policies that score rows by keys, values and positions, and by attention within chunks, against
// the same in double precision, row by row.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "policy/registry.hpp"
#include "policy/torch_random.hpp"
#include "safetensors_writer.hpp"
#include "unit/policy/row_policies.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::FakeLayer;
using test::LayerData;
using test::LayerShape;
using test::make_policy;

using Doubles = std::vector<double>;
using Scores = std::vector<std::vector<float>>;
using Expected = std::vector<Doubles>;

double norm_of(const float* x, int dim) {
  double sum = 0;
  for (int d = 0; d < dim; ++d) sum += static_cast<double>(x[d]) * x[d];
  return std::sqrt(sum);
}

/// For each row of each head.
Expected by_row(const LayerData& data, const std::function<double(int, std::int64_t)>& score) {
  Expected result(data.kv_heads);
  for (int h = 0; h < data.kv_heads; ++h) {
    for (std::int64_t r = 0; r < data.rows(h); ++r) result[h].push_back(score(h, r));
  }
  return result;
}

void expect_near(const Scores& scores, const Expected& expected, double tolerance) {
  ASSERT_EQ(scores.size(), expected.size());
  double largest = 1e-30;
  for (const Doubles& of_head : expected) {
    for (double x : of_head) largest = std::max(largest, std::fabs(x));
  }
  for (std::size_t h = 0; h < expected.size(); ++h) {
    ASSERT_EQ(scores[h].size(), expected[h].size()) << "head " << h;
    for (std::size_t r = 0; r < expected[h].size(); ++r) {
      EXPECT_NEAR(scores[h][r], expected[h][r], tolerance * largest)
          << "head " << h << ", row " << r;
    }
  }
}

/// Layers of many kinds: head_dims with and without a remainder, groups, gaps, uneven heads, few
/// rows.
std::vector<LayerData> layers() {
  std::vector<LayerData> result;
  const auto add = [&](int kv_heads, int group, int head_dim, std::int64_t tokens,
                       std::int64_t new_tokens) {
    LayerShape shape;
    shape.kv_heads = kv_heads;
    shape.group = group;
    shape.head_dim = head_dim;
    shape.tokens = tokens;
    shape.new_tokens = new_tokens;
    shape.layer = 2;
    shape.layers = 4;
    result.push_back(test::random_layer(shape, 100 + static_cast<unsigned>(result.size())));
    result.back().keep = tokens / 2;
    result.back().evict_ratio = 0.5;
  };
  add(2, 2, 64, 300, 300);
  add(3, 1, 80, 700, 40);
  add(1, 4, 128, 517, 517);
  add(2, 1, 6, 90, 1);
  add(2, 2, 16, 1, 1);
  add(2, 2, 16, 3, 1);
  return result;
}

std::string kind_of(const LayerData& data) {
  return "head_dim " + std::to_string(data.head_dim) + ", " + std::to_string(data.new_tokens) +
         " of " + std::to_string(data.tokens) + " tokens new";
}

/// Both forms of the kernels.
class RowPolicies : public ::testing::TestWithParam<bool> {
 protected:
  RowPolicies() : m_device(base::machine().on_device()) { base::machine().set_device(GetParam()); }
  ~RowPolicies() override { base::machine().set_device(m_device); }

 private:
  bool m_device;
};

INSTANTIATE_TEST_SUITE_P(Kernels, RowPolicies, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

TEST_P(RowPolicies, KeyNorm) {
  for (const LayerData& data : layers()) {
    SCOPED_TRACE(kind_of(data));
    const auto policy = make_policy(policy::knorm(), data);
    expect_near(
        FakeLayer(data).run(*policy),
        by_row(data,
               [&](int h, std::int64_t r) { return -norm_of(data.key(h, r), data.head_dim); }),
        1e-6);
  }
}

TEST_P(RowPolicies, KeyDifference) {
  for (const LayerData& data : layers()) {
    SCOPED_TRACE(kind_of(data));
    const int dim = data.head_dim;
    std::vector<Doubles> anchors(data.kv_heads, Doubles(dim));
    for (int h = 0; h < data.kv_heads; ++h) {
      for (std::int64_t r = 0; r < data.rows(h); ++r) {
        for (int d = 0; d < dim; ++d) {
          anchors[h][d] += data.key(h, r)[d] / norm_of(data.key(h, r), dim);
        }
      }
    }
    const auto policy = make_policy(policy::keydiff(), data);
    expect_near(FakeLayer(data).run(*policy),
                by_row(data,
                       [&](int h, std::int64_t r) {
                         double product = 0, squares = 0;
                         for (int d = 0; d < dim; ++d) {
                           product += data.key(h, r)[d] * anchors[h][d];
                           squares += anchors[h][d] * anchors[h][d];
                         }
                         return -product / norm_of(data.key(h, r), dim) / std::sqrt(squares);
                       }),
                2e-6);
  }
}

TEST(RandomPolicy, DependsOnSeedLayerHeadAndPositionAlone) {
  const LayerData data = layers()[1];
  const auto policy = make_policy(policy::random(), data);
  const Scores all = FakeLayer(data).run(*policy);
  std::set<float> different;
  double sum = 0;
  std::int64_t count = 0;
  for (const auto& of_head : all) {
    for (float score : of_head) {
      EXPECT_GE(score, 0.0f);
      EXPECT_LT(score, 1.0f);
      different.insert(score);
      sum += score;
      ++count;
    }
  }
  EXPECT_GE(static_cast<std::int64_t>(different.size()), count - 2);
  EXPECT_NEAR(sum / static_cast<double>(count), 0.5, 0.05);

  // The same rows on another rank, among other rows.
  LayerData fewer = data;
  fewer.positions[2].erase(fewer.positions[2].begin() + 5);
  fewer.keys[2].erase(fewer.keys[2].begin(), fewer.keys[2].begin() + fewer.head_dim);
  const Scores moved =
      FakeLayer(fewer, {2}, Communicator::self()).run(*make_policy(policy::random(), data));
  std::vector<float> expected = all[2];
  expected.erase(expected.begin() + 5);
  EXPECT_EQ(moved[0], expected);

  LayerData deeper = data;
  deeper.layer = 3;
  EXPECT_NE(FakeLayer(deeper).run(*policy), all);
  EXPECT_NE(FakeLayer(data).run(*make_policy(policy::random(), data, {{"seed", "1"}})), all);
}

TEST_P(RowPolicies, StreamingLlm) {
  for (const LayerData& data : layers()) {
    SCOPED_TRACE(kind_of(data));
    const auto policy = make_policy(policy::streaming_llm(), data, {{"sink", "3"}});
    expect_near(FakeLayer(data).run(*policy),
                by_row(data,
                       [&](int h, std::int64_t r) {
                         const std::int64_t pruned = data.rows(h) - data.keep;
                         return r < 3 || r >= 3 + pruned ? 1.0 : 0.0;
                       }),
                0);
  }
}

/// The deviations of rows on the scale of the next partition, through a softmax.
Doubles lag_scores(const float* rows, int dim, std::int64_t sink, std::int64_t lag,
                   std::int64_t partitions) {
  Doubles result;
  for (std::int64_t p = 0; p + 1 < partitions; ++p) {
    const float* const own = rows + (sink + p * lag) * dim;
    const float* const next = own + lag * dim;
    Doubles deviations;
    for (std::int64_t r = 0; r < lag; ++r) {
      Doubles x;
      for (int d = 0; d < dim; ++d) {
        double least = next[d], largest = next[d];
        for (std::int64_t i = 1; i < lag; ++i) {
          least = std::min<double>(least, next[i * dim + d]);
          largest = std::max<double>(largest, next[i * dim + d]);
        }
        x.push_back((own[r * dim + d] - least) / (largest - least));
      }
      const double mean = std::accumulate(x.begin(), x.end(), 0.0) / dim;
      double squares = 0;
      for (double value : x) squares += (value - mean) * (value - mean);
      deviations.push_back(std::sqrt(squares / (dim - 1)));
    }
    double sum = 0;
    for (double value : deviations) sum += std::exp(value);
    for (double value : deviations) result.push_back(std::exp(value) / sum);
  }
  return result;
}

TEST_P(RowPolicies, LagKv) {
  const std::int64_t sink = 4, lag = 24;
  for (const bool cross_scoring : {false, true}) {
    for (const LayerData& data : layers()) {
      SCOPED_TRACE(kind_of(data));
      const auto policy = make_policy(
          policy::lagkv(), data, {{"lag", "24"}, {"cross-scoring", cross_scoring ? "on" : "off"}});
      const Scores scores = FakeLayer(data).run(*policy);
      for (int h = 0; h < data.kv_heads; ++h) {
        const std::int64_t rows = data.rows(h);
        Doubles expected(rows, 1.0);
        if (rows < sink + 2 * lag) {
          for (std::int64_t r = sink; r < rows; ++r) {
            expected[r] = static_cast<double>(r - sink) / static_cast<double>(rows - sink);
          }
        } else {
          const std::int64_t partitions = (rows - sink) / lag;
          const Doubles of_keys =
              lag_scores(data.keys[h].data(), data.head_dim, sink, lag, partitions);
          const Doubles of_values =
              lag_scores(data.values[h].data(), data.head_dim, sink, lag, partitions);
          for (std::size_t i = 0; i < of_keys.size(); ++i) {
            expected[sink + i] = (of_keys[i] + of_values[i]) / 2;
          }
          if (!cross_scoring) {
            const Doubles unranked = expected;
            for (std::int64_t i = 0; i < static_cast<std::int64_t>(of_keys.size()); ++i) {
              int below = 0;
              for (std::int64_t j = i / lag * lag; j < i / lag * lag + lag; ++j) {
                below += unranked[sink + j] < unranked[sink + i];
              }
              expected[sink + i] = static_cast<double>(below) / lag;
            }
          }
        }
        expect_near({scores[h]}, {expected}, 1e-6);
      }
    }
  }
}

TEST(LagKv, TiesAreRankedByPosition) {
  LayerShape shape;
  shape.kv_heads = 1;
  shape.tokens = shape.new_tokens = 20;
  LayerData data = test::random_layer(shape, 5);
  const auto size = static_cast<std::size_t>(data.head_dim);
  for (auto* rows : {&data.keys[0], &data.values[0]}) {
    for (std::size_t i = size; i < 8 * size; ++i) (*rows)[i] = (*rows)[i % size];
  }
  const auto policy = make_policy(policy::lagkv(), data, {{"lag", "8"}, {"sink", "0"}});
  const Scores scores = FakeLayer(data).run(*policy);
  for (int r = 0; r < 8; ++r) EXPECT_EQ(scores[0][r], static_cast<float>(r) / 8);
}

TEST(LagKv, DimensionsWithoutARangeCountAsZero) {
  LayerShape shape;
  shape.kv_heads = 1;
  shape.tokens = shape.new_tokens = 16;
  LayerData data = test::random_layer(shape, 6);
  const auto policy = [&] {
    return make_policy(policy::lagkv(), data,
                       {{"lag", "8"}, {"sink", "0"}, {"cross-scoring", "on"}});
  };
  // In the second partition all values of dimension 2 are the same.
  for (int r = 8; r < 16; ++r) data.keys[0][r * data.head_dim + 2] = 1;
  const Scores scores = FakeLayer(data).run(*policy());
  double sum = 0;
  for (int r = 0; r < 8; ++r) sum += scores[0][r];
  EXPECT_NEAR(sum, 1, 1e-6);
  // What the rows before have there makes no difference.
  for (int r = 0; r < 8; ++r) data.keys[0][r * data.head_dim + 2] *= 5;
  EXPECT_EQ(FakeLayer(data).run(*policy()), scores);
}

TEST_P(RowPolicies, LagKvDoesNotCountThePaddingOfValues) {
  LayerShape shape;
  shape.head_dim = 20;
  LayerData data = test::random_layer(shape, 7);
  LayerData padded = data;
  padded.head_dim = 28;
  padded.value_dim = data.head_dim;
  for (int h = 0; h < data.kv_heads; ++h) {
    const std::int64_t rows = data.rows(h);
    // Keys have no range, so values alone decide.
    data.keys[h].assign(rows * data.head_dim, 1.0f);
    padded.keys[h].assign(rows * padded.head_dim, 1.0f);
    padded.values[h].clear();
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* const value = data.value(h, r);
      padded.values[h].insert(padded.values[h].end(), value, value + data.head_dim);
      padded.values[h].resize((r + 1) * padded.head_dim, 0.0f);
    }
  }
  const auto run = [](const LayerData& layer) {
    const auto policy =
        make_policy(policy::lagkv(), layer, {{"lag", "8"}, {"cross-scoring", "on"}});
    return FakeLayer(layer).run(*policy);
  };
  EXPECT_EQ(run(padded), run(data));
}

TEST_P(RowPolicies, Cur) {
  for (const std::string type : {"kv-product", "kv-avg", "key", "value"}) {
    for (const bool local : {true, false}) {
      for (const LayerData& data : layers()) {
        SCOPED_TRACE(kind_of(data) + ", " + type);
        const auto policy = make_policy(
            policy::cur(), data,
            {{"leverage-type", type}, {"local", local ? "on" : "off"}, {"window", "10"}});
        const auto share = [&](const std::vector<float>& rows, std::int64_t r) {
          const auto square = [&](std::int64_t i) {
            const double norm = norm_of(&rows[i * data.head_dim], data.head_dim);
            return norm * norm;
          };
          if (!local) return square(r);
          const auto count = static_cast<std::int64_t>(rows.size()) / data.head_dim;
          double sum = 0;
          for (std::int64_t i = r / 10 * 10; i < std::min(count, r / 10 * 10 + 10); ++i) {
            sum += square(i);
          }
          return square(r) / sum;
        };
        Expected expected = by_row(data, [&](int h, std::int64_t r) {
          const double k = share(data.keys[h], r), v = share(data.values[h], r);
          return type == "key" ? k : type == "value" ? v : type == "kv-avg" ? (k + v) / 2 : k * v;
        });
        for (Doubles& of_head : expected) {
          const double sum = std::accumulate(of_head.begin(), of_head.end(), 0.0);
          for (double& score : of_head) score /= sum;
          std::fill_n(of_head.begin(), std::min<std::size_t>(4, of_head.size()), 1.0);
        }
        expect_near(FakeLayer(data).run(*policy), expected, 1e-7);
      }
    }
  }
}

TEST_P(RowPolicies, CurWithProjection) {
  for (const LayerData& data : layers()) {
    SCOPED_TRACE(kind_of(data));
    policy::TorchNormals normals(3);
    std::vector<float> projection;
    for (int layer = 0; layer <= data.layer; ++layer) {
      projection = normals.draw(static_cast<std::int64_t>(data.head_dim) * 20);
    }
    const auto policy = make_policy(policy::cur(), data,
                                    {{"random-leverage", "on"},
                                     {"local", "off"},
                                     {"seed", "3"},
                                     {"sink", "0"},
                                     {"leverage-type", "key"}});
    Expected expected = by_row(data, [&](int h, std::int64_t r) {
      double squares = 0;
      for (int j = 0; j < 20; ++j) {
        double sum = 0;
        for (int d = 0; d < data.head_dim; ++d) {
          sum += static_cast<double>(data.key(h, r)[d]) * projection[d * 20 + j];
        }
        squares += sum * sum / 20;
      }
      return squares;
    });
    for (Doubles& of_head : expected) {
      const double sum = std::accumulate(of_head.begin(), of_head.end(), 0.0);
      for (double& score : of_head) score /= sum;
    }
    expect_near(FakeLayer(data).run(*policy), expected, 1e-5);
  }
}

TEST_P(RowPolicies, QFilter) {
  const test::TemporaryFolder folder;
  for (const LayerData& data : layers()) {
    SCOPED_TRACE(kind_of(data));
    std::vector<float> filters(data.layers * data.kv_heads * data.head_dim);
    for (std::size_t i = 0; i < filters.size(); ++i) {
      filters[i] = static_cast<float>(bfloat16(std::sin(static_cast<float>(i))));
    }
    const auto file = folder.path() / "model.safetensors";
    test::write_safetensors(
        file, {{"q_filters", test::stored_tensor(
                                 "BF16", {data.layers, data.kv_heads, data.head_dim}, filters)}});
    const auto policy = make_policy(policy::qfilter(), data, {{"filters", file.string()}});
    const Expected expected = by_row(data, [&](int h, std::int64_t r) {
      double sum = 0;
      for (int d = 0; d < data.head_dim; ++d) {
        sum += static_cast<double>(data.key(h, r)[d]) *
               filters[(data.layer * data.kv_heads + h) * data.head_dim + d];
      }
      return -sum;
    });
    expect_near(FakeLayer(data).run(*policy), expected, 1e-5);
  }
}

TEST(QFilterPolicy, RejectsFiltersOfAnotherModel) {
  const test::TemporaryFolder folder;
  const LayerData data = layers()[0];
  const auto file = folder.path() / "filters.safetensors";
  test::write_safetensors(
      file, {{"q_filters", test::stored_tensor("F32", {2, 2, 3}, std::vector<float>(12))}});
  test::expect_error(
      [&] {
        make_policy(policy::qfilter(), data, {{"filters", file.string()}});
      },
      {"filters.safetensors", "q_filters", "[4, 2, 64]", "[2, 2, 3]"});
  test::write_safetensors(file, {{"other", test::stored_tensor("F32", {1}, {0})}});
  test::expect_error(
      [&] {
        make_policy(policy::qfilter(), data, {{"filters", file.string()}});
      },
      {"filters.safetensors", "q_filters"});
}

TEST(TorchNormals, AreThoseOfTorch) {
  // torch.manual_seed(7); torch.randn(40); torch.randn(16); torch.randn(1, 2, 8, 3)
  const auto check = [](const std::vector<float>& drawn, std::size_t begin,
                        const std::vector<float>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(drawn[begin + i], expected[i], 2e-6) << begin + i;
    }
  };
  policy::TorchNormals normals(7);
  const std::vector<float> first = normals.draw(40);
  ASSERT_EQ(first.size(), 40u);
  check(first, 0, {-0.82013452f, 0.39563116f, 0.89890850f, -1.38840389f});
  check(first, 22,
        {1.03910768f, -0.72451073f, -0.13543689f, 0.74711823f, 0.61181575f, 1.86778355f});
  check(first, 36, {-0.10073432f, 0.23701459f, 0.63268209f, -0.09167717f});
  check(normals.draw(16), 0, {-0.38211593f, -1.16689408f, 0.36357585f});
  check(normals.draw(48), 45, {1.61323392f, 0.93316483f, -0.97716010f});
}

TEST(TorchNormals, LayersMayBeAskedForInAnyOrder) {
  policy::TorchNormals stream(11);
  std::vector<std::vector<float>> expected;
  for (int layer = 0; layer < 4; ++layer) expected.push_back(stream.draw(50));
  policy::LayerNormals normals(11);
  for (int layer : {2, 3, 0, 3, 1}) EXPECT_EQ(normals.draw(layer, 50), expected[layer]) << layer;
}

/// (scores - mean) / standard deviation over rows of all heads.
void standardize(Expected& scores) {
  double count = 0, sum = 0, squares = 0;
  for (const Doubles& of_head : scores) {
    count += static_cast<double>(of_head.size());
    for (double x : of_head) sum += x;
  }
  for (const Doubles& of_head : scores) {
    for (double x : of_head) squares += (x - sum / count) * (x - sum / count);
  }
  const double deviation = count > 1 ? std::sqrt(squares / (count - 1)) : 0;
  for (Doubles& of_head : scores) {
    for (double& x : of_head) x = (x - sum / count) / std::max(deviation, 1e-6);
  }
}

/// Solves a x = b by elimination, a (n, n) symmetric and positive.
Doubles solve(std::vector<Doubles> a, Doubles b) {
  const std::size_t n = b.size();
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = i + 1; j < n; ++j) {
      const double factor = a[j][i] / a[i][i];
      for (std::size_t k = i; k < n; ++k) a[j][k] -= factor * a[i][k];
      b[j] -= factor * b[i];
    }
  }
  for (std::size_t i = n; i-- > 0;) {
    for (std::size_t k = i + 1; k < n; ++k) b[i] -= a[i][k] * b[k];
    b[i] /= a[i][i];
  }
  return b;
}

/// Of rows begin … begin + count - 1 of each head, standardized.
Expected leverage_of(const LayerData& data, int dimension, unsigned seed,
                     const std::function<std::pair<std::int64_t, std::int64_t>(int)>& part) {
  const int dim = data.head_dim, half = dim / 2;
  policy::TorchNormals normals(seed);
  std::vector<float> sketch;
  for (int layer = 0; layer <= data.layer; ++layer) {
    sketch = normals.draw(static_cast<std::int64_t>(data.kv_heads) * dim * dimension);
  }
  Expected result(data.kv_heads);
  for (int h = 0; h < data.kv_heads; ++h) {
    const auto [begin, count] = part(h);
    std::vector<Doubles> keys(count, Doubles(dim));
    Doubles mean(dim);
    for (std::int64_t r = 0; r < count; ++r) {
      for (int d = 0; d < half; ++d) {
        const double angle =
            static_cast<float>(data.positions[h][begin + r]) * data.inverse_frequencies[d];
        const double x = data.key(h, begin + r)[d], y = data.key(h, begin + r)[half + d];
        keys[r][d] = x * std::cos(angle) + y * std::sin(angle);
        keys[r][half + d] = y * std::cos(angle) - x * std::sin(angle);
      }
      for (int d = 0; d < dim; ++d) mean[d] += keys[r][d] / static_cast<double>(count);
    }
    std::vector<Doubles> x(count, Doubles(dimension));
    std::vector<Doubles> gram(dimension, Doubles(dimension));
    for (std::int64_t r = 0; r < count; ++r) {
      for (int k = 0; k < dimension; ++k) {
        for (int d = 0; d < dim; ++d) {
          x[r][k] += (keys[r][d] - mean[d]) * sketch[(h * dim + d) * dimension + k] /
                     std::sqrt(static_cast<double>(dimension));
        }
      }
      for (int k = 0; k < dimension; ++k) {
        for (int l = 0; l < dimension; ++l) gram[k][l] += x[r][k] * x[r][l];
      }
    }
    for (int k = 0; k < dimension; ++k) gram[k][k] += 1e-2;
    for (std::int64_t r = 0; r < count; ++r) {
      const Doubles solved = solve(gram, x[r]);
      double score = 0;
      for (int k = 0; k < dimension; ++k) score += x[r][k] * solved[k];
      result[h].push_back(score);
    }
  }
  standardize(result);
  return result;
}

TEST_P(RowPolicies, Leverage) {
  for (const LayerData& data : layers()) {
    if (data.tokens == 1) continue;  // see FewRowsAreScored
    SCOPED_TRACE(kind_of(data));
    const auto policy =
        make_policy(policy::leverage(), data, {{"sketch-dimension", "12"}, {"seed", "9"}});
    expect_near(
        FakeLayer(data).run(*policy),
        leverage_of(data, 12, 9, [&](int h) { return std::pair(std::int64_t{0}, data.rows(h)); }),
        3e-5);
  }
}

TEST_P(RowPolicies, LeverageFarFromTheBeginning) {
  LayerShape shape;
  shape.tokens = shape.new_tokens = 150;
  shape.head_dim = 32;
  LayerData data = test::random_layer(shape, 8);
  data.tokens += 100000;
  for (auto& positions : data.positions) {
    for (auto& position : positions) position += 100000;
  }
  const auto policy = make_policy(policy::leverage(), data, {{"sketch-dimension", "20"}});
  expect_near(
      FakeLayer(data).run(*policy),
      leverage_of(data, 20, 0, [&](int h) { return std::pair(std::int64_t{0}, data.rows(h)); }),
      3e-5);
}

TEST(LeveragePolicy, FactorizesSingularMatrices) {
  // Large keys along one line: rounding makes eigenvalues negative, and the jitter grows.
  LayerShape shape;
  shape.tokens = shape.new_tokens = 60;
  LayerData data = test::random_layer(shape, 8);
  std::fill(data.inverse_frequencies.begin(), data.inverse_frequencies.end(), 0.0f);
  for (auto& keys : data.keys) {
    const std::vector<float> drawn = keys;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t row = i / data.head_dim, d = i % data.head_dim;
      const float along = row == 0 ? 10.0f : drawn[row * data.head_dim];
      keys[i] = 3e4f * (drawn[d] + along * drawn[data.head_dim + d]);
    }
  }
  const auto policy = make_policy(policy::leverage(), data);
  for (const auto& of_head : FakeLayer(data).run(*policy)) {
    for (float score : of_head) EXPECT_TRUE(std::isfinite(score));
    EXPECT_EQ(std::max_element(of_head.begin(), of_head.end()), of_head.begin());
  }
}

/// Tokens begin … end - 1, all of them of this step; standardized.
Expected non_causal_of(const LayerData& data, std::int64_t chunk, std::int64_t begin,
                       std::int64_t end, bool scaled) {
  const std::int64_t count = end - begin;
  const std::int64_t padded_count = (count + chunk - 1) / chunk * chunk;
  const double scale = scaled ? 1.0 : std::sqrt(static_cast<double>(data.head_dim));
  Expected result(data.kv_heads);
  for (int h = 0; h < data.kv_heads; ++h) {
    const std::int64_t first_row = data.rows(h) - data.tokens + begin;
    Doubles attention(padded_count);
    for (int q = h * data.group; q < (h + 1) * data.group; ++q) {
      for (std::int64_t i = 0; i < padded_count; ++i) {
        const std::int64_t first = i / chunk * chunk;
        Doubles scores(chunk);
        for (std::int64_t j = 0; j < chunk; ++j) {
          const bool is_key = first + j < count;
          scores[j] = !is_key ? -1e-9
                      : i >= count
                          ? 0.0
                          : scale * data.attention_score(begin + i, q, first_row + first + j);
        }
        const double largest = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double score : scores) sum += std::exp(score - largest);
        for (std::int64_t j = 0; j < chunk; ++j) {
          attention[first + j] += std::exp(scores[j] - largest) / sum / data.group;
        }
      }
    }
    Doubles raw(count + 2);
    for (std::int64_t i = 0; i < count; ++i) {
      raw[i + 1] = attention[i] * norm_of(data.value(h, first_row + i), data.head_dim);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      result[h].push_back((raw[i] + raw[i + 1] + raw[i + 2]) / 3);
    }
  }
  standardize(result);
  return result;
}

/// A layer whose rows are all of this step, with queries that do not make softmax one-hot.
LayerData prefill(std::int64_t tokens, int head_dim, unsigned seed) {
  LayerShape shape;
  shape.kv_heads = 2;
  shape.group = 3;
  shape.head_dim = head_dim;
  shape.tokens = shape.new_tokens = tokens;
  shape.layer = 1;
  shape.layers = 2;
  LayerData data = test::random_layer(shape, seed);
  for (float& x : data.queries) x /= 4;
  data.evict_ratio = 0.3;
  return data;
}

TEST_P(RowPolicies, NonCausal) {
  for (const bool scaled : {false, true}) {
    for (const std::int64_t tokens : {64, 100, 17, 2}) {
      const LayerData data = prefill(tokens, tokens == 100 ? 80 : 64, 40);
      const auto policy = make_policy(policy::non_causal(), data,
                                      {{"chunk", "32"}, {"scaled", scaled ? "on" : "off"}});
      const Expected expected = non_causal_of(data, 32, 0, tokens, scaled);
      for (const std::int64_t block : {0, 1, 13, 64}) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens in blocks of " + std::to_string(block));
        expect_near(FakeLayer(data).run(*policy, block), expected, 1e-5);
      }
    }
  }
}

TEST_P(RowPolicies, NonCausalLeavesRowsOfEarlierStepsTheirScores) {
  LayerShape shape;
  shape.tokens = 90;
  shape.new_tokens = 50;
  LayerData data = test::random_layer(shape, 21);
  for (int h = 0; h < data.kv_heads; ++h) {
    for (std::int64_t r = 0; r < data.cached(h); ++r) {
      data.cached_scores[h].push_back(r == 3 ? std::nanf("") : 0.01f * static_cast<float>(r));
    }
  }
  data.cached_scores[1].back() = 50;
  const auto policy = make_policy(policy::non_causal(), data, {{"chunk", "16"}});
  Expected expected = non_causal_of(data, 16, 40, 90, false);
  for (int h = 0; h < data.kv_heads; ++h) {
    const auto& stored = data.cached_scores[h];
    expected[h].insert(expected[h].begin(), stored.begin(), stored.end());
    expected[h][3] = 50;
  }
  expect_near(FakeLayer(data).run(*policy, 7), expected, 1e-5);

  // A token by itself, and one whose queries were not shown, have the largest score.
  shape.new_tokens = 1;
  data = test::random_layer(shape, 22);
  for (int h = 0; h < data.kv_heads; ++h) data.cached_scores[h].assign(data.cached(h), -2.0f);
  data.cached_scores[0][0] = -1;
  expected = by_row(data, [&](int h, std::int64_t r) {
    return r + 1 == data.rows(h) || (h == 0 && r == 0) ? -1.0 : -2.0;
  });
  expect_near(FakeLayer(data).run(*policy), expected, 0);
}

TEST_P(RowPolicies, Compactor) {
  for (const std::int64_t tokens : {100, 45, 30}) {
    const LayerData data = prefill(tokens, 32, 41);
    const std::int64_t begin = 8, end = tokens - 4;
    for (const double blending : {-1.0, 0.0, 0.7}) {
      const auto policy = make_policy(
          policy::compactor(), data,
          {{"chunk", "32"}, {"sketch-dimension", "12"}, {"blending", fmt::format("{}", blending)}});
      Expected expected = non_causal_of(data, 32, begin, end, false);
      const Expected leverage =
          leverage_of(data, 12, 0, [&](int) { return std::pair(begin, end - begin); });
      double largest = -1e30;
      for (int h = 0; h < data.kv_heads; ++h) {
        for (std::size_t r = 0; r < expected[h].size(); ++r) {
          expected[h][r] += (blending < 0 ? 0.3 : blending) * leverage[h][r];
          largest = std::max(largest, expected[h][r]);
        }
      }
      for (Doubles& of_head : expected) {
        of_head.insert(of_head.begin(), begin, largest);
        of_head.insert(of_head.end(), tokens - end, largest);
      }
      for (const std::int64_t block : {0, 9}) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens in blocks of " + std::to_string(block));
        expect_near(FakeLayer(data).run(*policy, block), expected, 3e-5);
      }
    }
  }
}

/// All that need no file.
std::vector<PolicyInfo> infos() {
  return {policy::knorm(),   policy::random(),    policy::streaming_llm(),
          policy::keydiff(), policy::lagkv(),     policy::leverage(),
          policy::cur(),     policy::compactor(), policy::non_causal()};
}

TEST_P(RowPolicies, FewRowsAreScored) {
  for (const PolicyInfo& info : infos()) {
    for (std::int64_t tokens = 1; tokens < 20; ++tokens) {
      for (const std::int64_t new_tokens : {tokens, std::int64_t{1}}) {
        SCOPED_TRACE(info.name + ", " + std::to_string(tokens) + " tokens");
        LayerShape shape;
        shape.kv_heads = 3;
        shape.tokens = tokens;
        shape.new_tokens = new_tokens;
        shape.stays = 0.5;
        LayerData data = test::random_layer(shape, 50);
        data.keep = (tokens + 1) / 2;
        data.evict_ratio = 0.5;
        const auto policy = make_policy(info, data);
        const Scores scores = FakeLayer(data).run(*policy, 5);
        for (const auto& of_head : scores) {
          for (float score : of_head) EXPECT_TRUE(std::isfinite(score));
        }
      }
    }
  }
}

TEST_P(RowPolicies, AStepThatFailedIsForgotten) {
  LayerShape shape;
  shape.tokens = 90;
  shape.new_tokens = 60;
  const LayerData failed = test::random_layer(shape, 51);
  shape.tokens = 300;
  shape.new_tokens = 260;
  const LayerData data = test::random_layer(shape, 52);
  for (const PolicyInfo& info : {policy::non_causal(), policy::compactor()}) {
    SCOPED_TRACE(info.name);
    const Scores expected = FakeLayer(data).run(*make_policy(info, data), 100);
    for (const std::int64_t shown : {25, 60}) {
      const auto policy = make_policy(info, data);
      FakeLayer(failed).fail(*policy, shown);
      EXPECT_EQ(FakeLayer(data).run(*policy, 100), expected);
    }
  }
}

TEST_P(RowPolicies, HeadsAreScoredApart) {
  const LayerData data = layers()[1];
  for (const PolicyInfo& info : infos()) {
    SCOPED_TRACE(info.name);
    EXPECT_EQ(info.scores_parts,
              info.name != "leverage" && info.name != "compactor" && info.name != "non-causal");
    const auto policy = make_policy(info, data);
    const Scores all = FakeLayer(data).run(*policy);
    EXPECT_TRUE(FakeLayer(data, {}, Communicator::self()).run(*policy).empty());
    if (!info.scores_parts) continue;
    EXPECT_EQ(FakeLayer(data, {0, 2}, Communicator::self()).run(*policy), (Scores{all[0], all[2]}));
  }
}

TEST(RowPolicyInfos, NameTheirParameters) {
  std::vector<PolicyInfo> all = infos();
  all.push_back(policy::qfilter());
  for (const PolicyInfo& info : all) {
    SCOPED_TRACE(info.name);
    EXPECT_FALSE(info.paper.empty());
    EXPECT_FALSE(info.formula.empty());
    EXPECT_FALSE(info.needs.empty());
    EXPECT_FALSE(info.cost.empty());
    EXPECT_EQ(info.judges_tokens,
              info.name == "knorm" || info.name == "random" || info.name == "qfilter");
    for (const PolicyParameter& parameter : info.parameters) {
      EXPECT_FALSE(parameter.help.empty()) << parameter.name;
    }
  }
}

}  // namespace
}  // namespace kvzap
