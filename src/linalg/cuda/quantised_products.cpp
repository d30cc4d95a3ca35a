#include "linalg/cuda/quantised_products.hpp"

#include "base/cuda/has_tensor_cores.hpp"
#include "base/cuda/launch.hpp"
#include "linalg/cuda/quantised_kernel.hpp"

namespace kvzap::linalg::tensor_cores {
namespace {

// Panels that fill a GPU even if a block takes several.
constexpr int many_panels = 1024;

template <cuda::CodeKind codes, cuda::ScaleKind scales, int tiles, int panels>
void launch_panels(const ExecutionSpace& exec, const cuda::QuantisedProduct& product) {
  static std::atomic<bool> is_prepared{false};
  constexpr int outputs = quantised::panel_outputs * panels;
  base::cuda::launch(
      exec, is_prepared, cuda::multiply_panels<codes, scales, tiles, panels>,
      {(product.outputs + outputs - 1) / outputs, 1, 32 * cuda::warps, cuda::panel_memory(tiles)},
      product);
}

// A block reads all of x and splits it into two terms: with many rows of it and many outputs, one
// block takes more of these. Blocks of more than 8 rows take two panels where one each is more than
// run at once.
template <cuda::CodeKind codes, cuda::ScaleKind scales>
void launch_rows(const ExecutionSpace& exec, const cuda::QuantisedProduct& product) {
  const bool has_many =
      product.rows > 2 && product.outputs >= many_panels * quantised::panel_outputs;
  if (product.rows <= 8) {
    if (has_many) return launch_panels<codes, scales, 1, 4>(exec, product);
    return launch_panels<codes, scales, 1, 1>(exec, product);
  }
  if (has_many) return launch_panels<codes, scales, 2, 4>(exec, product);
  if (product.outputs > base::cuda::multiprocessors() * quantised::panel_outputs) {
    return launch_panels<codes, scales, 2, 2>(exec, product);
  }
  launch_panels<codes, scales, 2, 1>(exec, product);
}

template <cuda::CodeKind codes, cuda::ScaleKind scales>
void launch_choices(const ExecutionSpace& exec, const cuda::ChosenProduct& product, int choices) {
  static std::atomic<bool> is_prepared{false};
  constexpr int outputs = quantised::panel_outputs;
  base::cuda::launch(exec, is_prepared, cuda::multiply_chosen<codes, scales>,
                     {(product.any.outputs + outputs - 1) / outputs, choices, 32 * cuda::warps,
                      cuda::panel_memory(1)},
                     product);
}

// The pairs of kinds that formats have.
struct Kinds {
  cuda::CodeKind codes;
  cuda::ScaleKind scales;
  void (*rows)(const ExecutionSpace&, const cuda::QuantisedProduct&);
  void (*choices)(const ExecutionSpace&, const cuda::ChosenProduct&, int);
};

template <cuda::CodeKind codes, cuda::ScaleKind scales>
constexpr Kinds kinds{codes, scales, launch_rows<codes, scales>, launch_choices<codes, scales>};

const Kinds& kinds_of(const quantised::Panels& panels) {
  using C = cuda::CodeKind;
  using S = cuda::ScaleKind;
  static constexpr Kinds all[] = {kinds<C::centred_nibbles, S::half>,
                                  kinds<C::nibbles, S::half_minimum>,
                                  kinds<C::centred_five_bits, S::half>,
                                  kinds<C::five_bits, S::half_minimum>,
                                  kinds<C::bytes, S::half>,
                                  kinds<C::nibbles, S::group_minimum>,
                                  kinds<C::five_bits, S::group_minimum>,
                                  kinds<C::six_bits, S::group_of_16>,
                                  kinds<C::table, S::half>,
                                  kinds<C::table, S::exponent>,
                                  kinds<C::nibbles, S::half_zero>};
  for (const Kinds& own : all) {
    if (own.codes != panels.codes || own.scales != panels.scales) continue;
    if (panels.block == quantised::group_inputs * cuda::groups_of_block(own.scales)) return own;
  }
  throw Error("quantised weights: no kernel for this pair of codes and scales");
}

cuda::QuantisedProduct product_of(const ConstMatrix& x, const quantised::Panels& panels,
                                  const Matrix& y) {
  cuda::QuantisedProduct product{};
  product.panels = panels;
  product.x = x.data();
  product.x_stride = static_cast<std::int64_t>(x.stride(0));
  product.y = y.data();
  product.y_row_stride = static_cast<std::int64_t>(y.stride(0));
  product.y_stride = static_cast<std::int64_t>(y.stride(1));
  product.rows = static_cast<std::int32_t>(x.extent(0));
  product.outputs = static_cast<std::int32_t>(y.extent(1));
  product.inputs = static_cast<std::int32_t>(x.extent(1));
  return product;
}

}  // namespace

bool has_vectors(const ConstMatrix& x) {
  constexpr std::size_t width = sizeof(cuda::Float4) / sizeof(float);
  return reinterpret_cast<std::uintptr_t>(x.data()) % sizeof(cuda::Float4) == 0 &&
         x.stride(0) % width == 0 && x.extent(1) % width == 0;
}

bool multiply_quantised(const ExecutionSpace& exec, const ConstMatrix& x,
                        const quantised::Matrix& weights, const ConstVector& bias,
                        const Matrix& y) {
  if (weights.has_floats() || x.extent(0) > most_rows || !has_vectors(x)) return false;
  for (const quantised::Section& section : weights.sections()) {
    if (section.outputs == 0) continue;
    const auto columns = std::make_pair(section.first, section.first + section.outputs);
    cuda::QuantisedProduct product =
        product_of(x, section.panels, Kokkos::subview(y, Kokkos::ALL, columns));
    if (bias.extent(0) > 0) product.bias = bias.data() + section.first;
    kinds_of(section.panels).rows(exec, product);
  }
  return true;
}

bool multiply_chosen(const ExecutionSpace& exec, const ConstMatrix& x, const ChosenSection& section,
                     const Matrix& y) {
  if (quantised::is_float(section.panels.codes) || !has_vectors(x)) return false;
  if (y.extent(1) == 0) return true;
  cuda::ChosenProduct product{product_of(x, section.panels, y), section.places, section.chosen,
                              section.share};
  product.any.rows = 1;
  kinds_of(section.panels).choices(exec, product, static_cast<int>(y.extent(0)));
  return true;
}

}  // namespace kvzap::linalg::tensor_cores
