#include "engine/adapters.hpp"

#include "engine/step_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

namespace {

std::int64_t outputs_of(const Adapters::Weights& weights) {
  std::int64_t outputs = 0;
  for (const auto& part : weights.out) outputs += part.outputs();
  return outputs;
}

}  // namespace

void Adapters::reserve(const Step& step, const Weights& weights) {
  const std::int64_t m = step.most_rows();
  base::reserve_scratch(m_latents, m * weights.in.outputs(), "kvzap::decoder::adapters");
  base::reserve_scratch(m_outputs, m * outputs_of(weights), "kvzap::decoder::adapters");
}

void Adapters::add(Step& step, const Weights& weights, const Matrix& x,
                   const linalg::RoundedRows& rounded, const Matrix& y) {
  if (weights.out.empty() || y.extent(1) == 0) return;
  const auto m = static_cast<std::int64_t>(x.extent(0));
  const Matrix latents(m_latents.data(), m, weights.in.outputs());
  const Matrix outputs(m_outputs.data(), m, y.extent(1));
  step.linear(step.exec, x, rounded, weights.in, {}, latents);
  std::int64_t latent = 0, output = 0;
  for (const auto& part : weights.out) {
    const auto own = [](const Matrix& matrix, std::int64_t first, std::int64_t count) {
      return Matrix(Kokkos::subview(matrix, Kokkos::ALL, range(first, first + count)));
    };
    if (part.outputs() > 0) {
      step.linear(step.exec, own(latents, latent, part.inputs()), part, {},
                  own(outputs, output, part.outputs()));
    }
    latent += part.inputs();
    output += part.outputs();
  }
  engine::add(step.exec, y, outputs);
}

}  // namespace kvzap::engine
