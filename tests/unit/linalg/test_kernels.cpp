// Every kernel that is compiled for several instruction sets has a row here: with its reference, or
// with the test that compares it. A kernel without a row fails, and so does a row without a kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <kvzap/core/types.hpp>
#include <map>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/machine.hpp"
#include "linalg/host/row_kernels.hpp"
#include "source_dir.hpp"

namespace {

namespace base = kvzap::base;
namespace fs = std::filesystem;
namespace linalg = kvzap::linalg;

/// A kernel that computes each element of target from a and b.
struct ElementKernel {
  const char* name;
  void (*apply)(const float* a, const float* b, float* target, std::int64_t count);
  double (*reference)(double a, double b);
  /// The bound of the error is relative * |expected| + absolute. 0: exact.
  double relative, absolute;
};

constexpr float cap = 3, limit = 2;

/// Makes a kernel that works in place one with a target.
template <class Kernel>
void in_place(const float* a, float* target, std::int64_t count, const Kernel& kernel) {
  std::copy_n(a, count, target);
  kernel(target, count);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

const ElementKernel element_kernels[] = {
    {"widen",
     [](const float* a, const float*, float* target, std::int64_t n) {
       linalg::widen(a, target, n);
     },
     [](double a, double) { return a; }, 0, 0},
    {"round_to_bf16",
     [](const float* a, const float*, float* target, std::int64_t n) {
       linalg::round_to_bf16(a, target, n);
     },
     [](double a, double) {
       return static_cast<double>(static_cast<float>(kvzap::bfloat16(static_cast<float>(a))));
     },
     0, 0},
    {"scale",
     [](const float* a, const float*, float* target, std::int64_t n) {
       in_place(a, target, n, [](float* x, std::int64_t count) { linalg::scale(x, count, 0.75f); });
     },
     [](double a, double) { return static_cast<double>(static_cast<float>(a * 0.75)); }, 0, 0},
    {"add",
     [](const float* a, const float* b, float* target, std::int64_t n) {
       in_place(a, target, n, [b](float* x, std::int64_t count) { linalg::add(x, b, count); });
     },
     [](double a, double b) { return static_cast<double>(static_cast<float>(a + b)); }, 0, 0},
    {"gelu",
     [](const float* a, const float*, float* target, std::int64_t n) {
       in_place(a, target, n, linalg::gelu);
     },
     [](double a, double) { return a / 2 * (1 + std::erf(a / std::sqrt(2.0))); }, 0, 3e-6},
    {"soft_cap",
     [](const float* a, const float*, float* target, std::int64_t n) {
       in_place(a, target, n,
                [](float* x, std::int64_t count) { linalg::soft_cap(x, count, cap); });
     },
     [](double a, double) { return cap * std::tanh(a / cap); }, 4 * 0x1p-23, 0},
    {"silu",
     [](const float* a, const float*, float* target, std::int64_t n) {
       in_place(a, target, n, linalg::silu);
     },
     [](double a, double) { return a * sigmoid(a); }, 1e-6, 1e-33},
    {"silu_times", linalg::silu_times, [](double a, double b) { return a * sigmoid(a) * b; }, 1e-6,
     1e-33},
    {"sigmoid_times", linalg::sigmoid_times, [](double a, double b) { return b * sigmoid(a); },
     1e-6, 1e-33},
    {"softplus_decays",
     [](const float* a, const float* b, float* target, std::int64_t n) {
       in_place(a, target, n,
                [b](float* x, std::int64_t count) { linalg::softplus_decays(x, b, 0.75f, count); });
     },
     [](double a, double b) {
       const double x = static_cast<float>(a + b);
       return std::exp(-0.75 * (std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)))));
     },
     1e-5, 1e-37},
    {"bounded_decays",
     [](const float* a, const float* b, float* target, std::int64_t n) {
       in_place(a, target, n, [b](float* x, std::int64_t count) {
         linalg::bounded_decays(x, b, 0.75f, -5.0f, count);
       });
     },
     [](double a, double b) { return std::exp(-5 * sigmoid(0.75 * static_cast<float>(a + b))); },
     2e-6, 0},
    {"gelu_tanh_times", linalg::gelu_tanh_times,
     [](double a, double b) {
       return a / 2 * (1 + std::tanh(0.7978845608028654 * (a + 0.044715 * a * a * a))) * b;
     },
     1e-6, 1e-6},
    {"clamped_silu_times",
     [](const float* a, const float* b, float* target, std::int64_t n) {
       linalg::clamped_silu_times(a, b, limit, target, n);
     },
     [](double a, double b) {
       const double gate = std::min(a, double{limit});
       return gate * sigmoid(1.702 * gate) * (std::clamp(b, double{-limit}, double{limit}) + 1);
     },
     1e-6, 1e-6},
    {"multiply_limited",
     [](const float* a, const float* b, float* target, std::int64_t n) {
       in_place(a, target, n, [b](float* x, std::int64_t count) {
         linalg::multiply_limited(x, b, limit, count);
       });
     },
     [](double a, double b) {
       const double factor = std::clamp(b, double{-limit}, double{limit});
       return static_cast<double>(static_cast<float>(std::min(a, double{limit}) * factor));
     },
     0, 0},
    {"gelu_tanh",
     [](const float* a, const float*, float* target, std::int64_t n) {
       in_place(a, target, n, linalg::gelu_tanh);
     },
     [](double a, double) {
       return a / 2 * (1 + std::tanh(0.7978845608028654 * (a + 0.044715 * a * a * a)));
     },
     1e-6, 1e-6},
    {"relu_squared",
     [](const float* a, const float*, float* target, std::int64_t n) {
       in_place(a, target, n, linalg::relu_squared);
     },
     [](double a, double) { return a > 0 ? a * a : 0.0; }, 1e-7, 0},
    {"multiply",
     [](const float* a, const float* b, float* target, std::int64_t n) {
       in_place(a, target, n, [b](float* x, std::int64_t count) { linalg::multiply(x, b, count); });
     },
     [](double a, double b) { return static_cast<double>(static_cast<float>(a * b)); }, 0, 0},
    {"xielu",
     [](const float* a, const float*, float* target, std::int64_t n) {
       in_place(a, target, n, [](float* x, std::int64_t count) {
         linalg::xielu(x, count, {0.8f, 1.3f, 0.5f});
       });
     },
     [](double a, double) { return 0.5 * a + (a > 0 ? 0.8f * a * a : 1.3f * (std::expm1(a) - a)); },
     1e-6, 1e-6},
};

/// Other kernels, by their names in KVZAP_KERNEL or their bodies' files, and the tests that compare
/// them with plain loops. These tests run on all instruction sets, or ctest's unit.LEVEL repeats
/// them.
const std::multimap<std::string, std::string> tested_elsewhere = {
    {"narrow", "RowKernels.NarrowRoundsAsTheType"},
    {"widen", "RowKernels.WidenIsExact"},
    {"max_of", "VectorKernels.MaxOfFindsTheLargestWhereverItIs"},
    {"exp_shifted", "VectorKernels.ExpShiftedIsAccurate"},
    {"rms_norm", "RowKernelsFloat.RmsNormRotateAdd"},
    {"layer_norm", "RowKernelsFloat.LayerNorm"},
    {"rotate", "RowKernelsFloat.RmsNormRotateAdd"},
    {"rotate_any_row", "RowTurn.IsOrthogonalAndSpreadsOutliers"},
    {"pack_rotated", "QuantisedRows.ReadersAndWritersAgreeElementByElement"},
    {"delta_rule", "DeltaNet.EqualsTheFormula"},
    {"convolve", "StateSpace.EqualsTheFormula"},
    {"channel_space", "StateSpace.OfMamba1EqualsTheFormula"},
    {"linalg/host/state_space.inc", "StateSpace.EqualsTheFormula"},
    {"linalg/host/row_kernels.inc", "RowKernels.WidenIsExact"},
    {"linalg/host/row_products.inc", "RowKernels.SkinnyProduct"},
    {"linalg/host/packed_kernels.inc", "Linear.EveryInstructionSet"},
    {"linalg/quantised/kernels.inc", "QuantisedFormat.UnpackedPanelsHaveTheSameValues"},
    {"linalg/quantised/product_kernels.inc", "QuantisedFormat.InstructionSetsAgree"},
    {"widen_half_zero", "QuantisedFormat.InstructionSetsAgree"},
    {"round_group", "QuantisedFormat.UnpackedPanelsHaveTheSameValues"},
    {"add_chunk_float8", "QuantisedFormat.InstructionSetsAgree"},
    {"unpack_chunk_float8", "QuantisedFormat.UnpackedPanelsHaveTheSameValues"},
    {"attention/host/decode_kernels.inc", "AttentionPaths.AgreeWithDoublePrecisionForAnyHead"},
    {"attention/host/quantised_attention.inc", "QuantisedAttention.AgreesWithDoublePrecision"},
    {"attention/host/page_choice.inc", "ReadPagesOf.AgreeWithPlainLoops"},
    {"attention/host/tile_kernels.inc", "Mass.AgreesWithDoublePrecision"},
    {"attention/host/vector_math.inc", "SimdVec.OperationsAgreeWithScalarCode"},
    {"decode_##name", "BlockFormats.DecodeToTheReferenceValues"},
    {"name", "BlockEncoders.WriteTheReferenceBlocks"},
    {"encode_iq4_nl", "BlockEncoders.WriteTheReferenceBlocks"},
    {"largest_of_blocks", "LikelyTokens.AgreeWithSorting"},
    {"sum_of_weights", "LikelyTokens.AgreeWithSorting"},
    {"products_of_rows", "Cap.WeightedLeverage"},
    {"norms_of_rows", "ExpectedAttention.OfNormalQueriesToCome"},
    {"add_magnitudes", "Modifiers.CriticalScoresAreThoseOfKvpress"},
    {"find_ranges", "RowPolicies.LagKv"},
    {"deviations_of_rows", "RowPolicies.LagKv"},
    {"rank_scores", "RowPolicies.LagKv"},
    {"turn_key_back", "RowPolicies.Leverage"},
    {"rotate_back", "ExpectedAttention.OfNormalQueriesToCome"},
    {"kvzip_maxima", "KvzipScores.AreThoseOfTheDefinition"},
    {"add_weighted", "SnapKV.ManyRows"},
    {"count_below", "Scissorhands.CountsAttentionBelowTheMean"},
    {"attend_rows", "LazyEviction.KeepsRowsThatAreAttendedToAgain"},
    {"gelu_and_slope", "TrainKernels.GeluAndItsSlopeAreExactToFloat"},
    {"times_and_sum", "MlpKernels.GradientIsThatOfFiniteDifferencesInDouble"},
    {"sum_of_squares", "MlpKernels.UpdatesAreAdamWsAndClipTheNorm"},
    {"adamw", "MlpKernels.UpdatesAreAdamWsAndClipTheNorm"},
    {"subtract", "NormalEquations.AreDoubleUpToAThousandInputs"},
    {"add_to_double", "NormalEquations.AreFloatBlockByBlockAbove"},
};

std::vector<base::SimdLevel> levels() {
  std::vector<base::SimdLevel> found;
  for (const auto level :
       {base::SimdLevel::baseline, base::SimdLevel::neon_bf16, base::SimdLevel::avx2,
        base::SimdLevel::avx512, base::SimdLevel::avx512_bf16}) {
    if (base::processor_has(level)) found.push_back(level);
  }
  return found;
}

class ElementKernels : public ::testing::TestWithParam<ElementKernel> {
 protected:
  void TearDown() override { base::machine().set_simd(m_before); }

 private:
  base::SimdLevel m_before = base::machine().simd();
};

TEST_P(ElementKernels, AgreeWithTheirReferenceOnEveryInstructionSet) {
  const ElementKernel& kernel = GetParam();
  constexpr float untouched = -12345;
  std::mt19937 random(31);
  const auto value = [&] { return static_cast<float>(random() >> 8) * 0x1p-20f - 8; };
  for (const base::SimdLevel level : levels()) {
    SCOPED_TRACE(base::name_of(level));
    base::machine().set_simd(level);
    for (const std::int64_t count : {1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 97, 255, 4096}) {
      std::vector<float> a(count + 1), b(count + 1), target(count + 2, untouched);
      std::generate(a.begin(), a.end(), value);
      std::generate(b.begin(), b.end(), value);
      kernel.apply(a.data() + 1, b.data() + 1, target.data() + 1, count);
      ASSERT_EQ(target.front(), untouched);
      ASSERT_EQ(target.back(), untouched);
      for (std::int64_t i = 0; i < count; ++i) {
        const double expected = kernel.reference(a[i + 1], b[i + 1]);
        ASSERT_NEAR(target[i + 1], expected,
                    kernel.relative * std::fabs(expected) + kernel.absolute)
            << count << " elements, " << a[i + 1] << " and " << b[i + 1];
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, ElementKernels, ::testing::ValuesIn(element_kernels),
                         [](const auto& info) { return std::string(info.param.name); });

/// Returns the names of the kernels in the sources.
std::set<std::string> kernels_in_sources() {
  static const std::regex kernel(R"(KVZAP_KERNEL\(\s*\w+,\s*([\w#]+),)");
  static const std::regex body(R"re(#define KVZAP_\w+_BODY "(\S+)")re");
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(kvzap::test::source_dir() / "src")) {
    if (entry.path().extension() != ".cpp" && entry.path().extension() != ".hpp") continue;
    if (entry.path().parent_path().filename() == "base") continue;  // defines the macros
    std::ifstream file(entry.path());
    std::stringstream content;
    content << file.rdbuf();
    const std::string text = content.str();
    for (const std::regex& pattern : {kernel, body}) {
      for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end;
           ++match) {
        names.insert((*match)[1].str());
      }
    }
  }
  return names;
}

/// Returns "Suite.Test" of every test, without the names of instantiations and types.
std::set<std::string> tests_of_this_program() {
  std::set<std::string> names;
  const auto& program = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < program.total_test_suite_count(); ++s) {
    const auto& suite = *program.GetTestSuite(s);
    static const std::regex around(R"(^[^/]*/(?=[A-Z])|/\d+$|^/)");
    const std::string name = std::regex_replace(suite.name(), around, "");
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const std::string test = suite.GetTestInfo(t)->name();
      names.insert(name + "." + test.substr(0, test.find('/')));
    }
  }
  return names;
}

TEST(Kernels, EachHasARow) {
  const std::set<std::string> found = kernels_in_sources();
  std::set<std::string> rows;
  for (const ElementKernel& kernel : element_kernels) rows.insert(kernel.name);
  for (const auto& [name, test] : tested_elsewhere) rows.insert(name);
  for (const std::string& name : found) {
    EXPECT_EQ(rows.count(name), 1u) << "kernel " << name << " has no row in test_kernels.cpp";
  }
  for (const std::string& name : rows) {
    EXPECT_EQ(found.count(name), 1u) << "row " << name << " of test_kernels.cpp has no kernel";
  }
  const std::set<std::string> tests = tests_of_this_program();
  for (const auto& [name, test] : tested_elsewhere) {
    EXPECT_EQ(tests.count(test), 1u) << name << ": no test " << test;
  }
}

}  // namespace
