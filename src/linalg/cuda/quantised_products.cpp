#include "linalg/cuda/quantised_products.hpp"

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

// A block reads all of x: with many rows of it and many outputs, one block takes more of these.
template <cuda::CodeKind codes, cuda::ScaleKind scales>
void launch_rows(const ExecutionSpace& exec, const cuda::QuantisedProduct& product) {
  const bool has_many =
      product.rows > 2 && product.outputs >= many_panels * quantised::panel_outputs;
  if (product.rows <= 8) {
    if (has_many) return launch_panels<codes, scales, 1, 4>(exec, product);
    return launch_panels<codes, scales, 1, 1>(exec, product);
  }
  if (has_many) return launch_panels<codes, scales, 2, 4>(exec, product);
  launch_panels<codes, scales, 2, 1>(exec, product);
}

// The pairs of kinds that formats have.
bool launch_kinds(const ExecutionSpace& exec, const cuda::QuantisedProduct& product) {
  using C = cuda::CodeKind;
  using S = cuda::ScaleKind;
  using Launch = void (*)(const ExecutionSpace&, const cuda::QuantisedProduct&);
  struct Kinds {
    C codes;
    S scales;
    Launch launch;
  };
  constexpr Kinds all[] = {
      {C::centred_nibbles, S::half, launch_rows<C::centred_nibbles, S::half>},
      {C::nibbles, S::half_minimum, launch_rows<C::nibbles, S::half_minimum>},
      {C::centred_five_bits, S::half, launch_rows<C::centred_five_bits, S::half>},
      {C::five_bits, S::half_minimum, launch_rows<C::five_bits, S::half_minimum>},
      {C::bytes, S::half, launch_rows<C::bytes, S::half>},
      {C::nibbles, S::group_minimum, launch_rows<C::nibbles, S::group_minimum>},
      {C::five_bits, S::group_minimum, launch_rows<C::five_bits, S::group_minimum>},
      {C::six_bits, S::group_of_16, launch_rows<C::six_bits, S::group_of_16>},
      {C::table, S::half, launch_rows<C::table, S::half>},
      {C::table, S::exponent, launch_rows<C::table, S::exponent>},
      {C::nibbles, S::half_zero, launch_rows<C::nibbles, S::half_zero>}};
  for (const Kinds& kinds : all) {
    if (kinds.codes != product.panels.codes || kinds.scales != product.panels.scales) continue;
    if (product.panels.block != quantised::group_inputs * cuda::groups_of_block(kinds.scales))
      break;
    kinds.launch(exec, product);
    return true;
  }
  return false;
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
    cuda::QuantisedProduct product{};
    product.panels = section.panels;
    product.x = x.data();
    product.x_stride = static_cast<std::int64_t>(x.stride(0));
    product.bias = bias.extent(0) > 0 ? bias.data() + section.first : nullptr;
    product.y_row_stride = static_cast<std::int64_t>(y.stride(0));
    product.y_stride = static_cast<std::int64_t>(y.stride(1));
    product.y = y.data() + section.first * product.y_stride;
    product.rows = static_cast<std::int32_t>(x.extent(0));
    product.outputs = static_cast<std::int32_t>(section.outputs);
    product.inputs = static_cast<std::int32_t>(x.extent(1));
    if (product.outputs == 0) continue;
    if (!launch_kinds(exec, product)) {
      throw Error("quantised weights: no kernel for this pair of codes and scales");
    }
  }
  return true;
}

}  // namespace kvzap::linalg::tensor_cores
