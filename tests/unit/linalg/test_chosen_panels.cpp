// Products of rows with quantised maps that a kernel chooses, against double precision.
#include <gtest/gtest.h>

#include "linalg/device/chosen_products.hpp"
#include "unit/linalg/stored_rows.hpp"

namespace {

using namespace kvzap;
using namespace stored;  // NOLINT(google-build-using-namespace): all of its words

constexpr std::int64_t maps = 5, tokens = 3, share = 2, rows = tokens * share;

class ChosenPanels : public ::testing::TestWithParam<const char*> {
 protected:
  /// Maps of two formats, with gaps between the rows of x and y.
  void check(const std::vector<Weights>& weights, bool biased) {
    const std::int64_t outputs = weights.front().matrix->outputs();
    const std::int64_t inputs = weights.front().matrix->inputs();
    std::vector<linalg::LinearWeights> all;
    std::vector<linalg::ConstVector> biases;
    for (const Weights& own : weights) {
      all.emplace_back(DType::bf16, own.matrix);
      const linalg::Vector bias("bias", biased ? outputs : 0);
      const auto host = Kokkos::create_mirror_view(bias);
      for (std::size_t n = 0; n < bias.extent(0); ++n) host(n) = uniform(m_random);
      Kokkos::deep_copy(bias, host);
      biases.emplace_back(bias);
    }
    std::vector<const linalg::LinearWeights*> pointers;
    for (const auto& map : all) pointers.push_back(&map);
    EXPECT_EQ(linalg::ChosenMaps::serve(pointers),
              weights.front().matrix->is_in_order() || weights.front().matrix->has_floats());
    const linalg::Matrix wide_x = random_rows(tokens, inputs + 4, m_random);
    const linalg::Matrix x(
        Kokkos::subview(wide_x, Kokkos::ALL, std::make_pair(std::int64_t{0}, inputs)));
    const linalg::Matrix wide("wide", rows, outputs + 3);
    const linalg::Matrix y(
        Kokkos::subview(wide, Kokkos::ALL, std::make_pair(std::int64_t{0}, outputs)));
    const Kokkos::View<std::int64_t*, MemorySpace> chosen("chosen", rows);
    const auto host_chosen = Kokkos::create_mirror_view(chosen);
    for (std::int64_t i = 0; i < rows; ++i) host_chosen(i) = (i * 3 + 1) % maps;
    Kokkos::deep_copy(chosen, host_chosen);
    const ExecutionSpace exec;
    linalg::ChosenMaps(pointers, biases)(exec, x, share, chosen, y);
    exec.fence();
    const auto host_x = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), wide_x);
    const auto host_y = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), wide);
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t map = host_chosen(i);
      const auto bias = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), biases[map]);
      for (std::int64_t n = 0; n < outputs; ++n) {
        double sum = biased ? bias(n) : 0, size = std::fabs(sum);
        for (std::int64_t k = 0; k < inputs; ++k) {
          const double product = double{weights[map].values[n][k]} * double{host_x(i / share, k)};
          sum += product;
          size += std::fabs(product);
        }
        ASSERT_NEAR(host_y(i, n), sum, 2e-5 * size) << i << ' ' << n;
      }
      for (int n = 0; n < 3; ++n) ASSERT_EQ(host_y(i, outputs + n), 0);
    }
  }

  /// `maps` maps, each made of the rows of the format and of another.
  template <class Make>
  std::vector<Weights> make(const Make& make_one) {
    const std::string name = GetParam();
    std::vector<Weights> weights;
    for (std::int64_t m = 0; m < maps; ++m) {
      std::vector<StoredRows> parts{{name, 37, 768, m_random}};
      if (name != "F8_E4M3") {  // codes of a matrix are floats or integers
        parts.emplace_back(name == "Q4_0" ? "Q8_0" : "Q4_0", 20, 768, m_random);
      }
      weights.push_back(make_one(parts));
    }
    return weights;
  }

  std::mt19937 m_random{17};
};

TEST_P(ChosenPanels, AgreeByTensorCoresAndLoops) {
  for (const bool biased : {false, true}) {
    for (const Ranges& columns : {Ranges{{0, 768}}, Ranges{{0, 500}}}) {
      check(make([&](const auto& parts) { return Weights(parts, columns); }), biased);
    }
  }
}

// Ranges of columns, and inputs in an order of each map's own.
TEST_P(ChosenPanels, AgreeWithInputsElsewhere) {
  const Ranges cut{{64, 192}, {320, 384}, {384, 500}};
  check(make([&](const auto& parts) { return Weights(parts, cut); }), true);
  check(make([&](const auto& parts) {
          return Weights::shuffled(parts, some_places(768, 700, m_random));
        }),
        false);
}

INSTANTIATE_TEST_SUITE_P(All, ChosenPanels, ::testing::ValuesIn(names),
                         [](const auto& test) { return std::string(test.param); });

TEST(ChosenMaps, ServeMapsOfOneForm) {
  std::mt19937 random(18);
  const auto map = [&](const char* name, std::int64_t outputs, std::int64_t inputs,
                       DType dtype = DType::bf16) {
    const Weights own({{name, outputs, inputs, random}}, {{0, inputs}});
    return linalg::LinearWeights(dtype, own.matrix);
  };
  const auto one = map("Q4_0", 20, 64), same = map("Q4_0", 20, 64);
  EXPECT_TRUE(linalg::ChosenMaps::serve({&one, &same}));
  const linalg::LinearWeights plain(linalg::WeightLayout::rows, DType::bf16, 20, 64,
                                    linalg::Bytes("weights", 20 * 64 * 2));
  EXPECT_TRUE(linalg::ChosenMaps::serve({&plain, &plain}));
  const auto format = map("Q4_1", 20, 64), outputs = map("Q4_0", 21, 64);
  const auto inputs = map("Q4_0", 20, 96), dtype = map("Q4_0", 20, 64, DType::f16);
  for (const auto* other : {&format, &outputs, &inputs, &dtype, &plain}) {
    EXPECT_FALSE(linalg::ChosenMaps::serve({&one, other}));
    EXPECT_FALSE(linalg::ChosenMaps::serve({other, &one}));
  }
}

}  // namespace
