#include "train/mlp_step.hpp"

#include <algorithm>
#include <string>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"

namespace kvzap::train {
namespace {

linalg::Matrix mlp_matrix(const std::string& label, std::int64_t rows, std::int64_t columns) {
  linalg::Matrix matrix(label, rows, columns);
  if constexpr (base::runs_on_host)
    base::advise_huge_pages(matrix.data(), matrix.size() * sizeof(float));
  return matrix;
}

linalg::Vector mlp_vector(const std::string& label, std::int64_t length) {
  linalg::Vector vector(label, length);
  if constexpr (base::runs_on_host)
    base::advise_huge_pages(vector.data(), vector.size() * sizeof(float));
  return vector;
}

linalg::Matrix first_rows(const linalg::Matrix& matrix, std::int64_t count) {
  return linalg::Matrix(matrix.data(), count, matrix.extent(1));
}

std::int64_t length_of(std::int64_t inputs, std::int64_t hidden, std::int64_t heads) {
  return hidden * (inputs + 1) + heads * (hidden + 1);
}

}  // namespace

MlpStep::MlpStep(std::int64_t inputs, std::int64_t hidden, std::int64_t heads, std::int64_t rows)
    : m_inputs(inputs),
      m_hidden(hidden),
      m_heads(heads),
      m_parameters(mlp_vector("kvzap::train::parameters", length_of(inputs, hidden, heads))),
      m_gradient(mlp_vector("kvzap::train::gradient", size())),
      m_first(mlp_vector("kvzap::train::first_moment", size())),
      m_second(mlp_vector("kvzap::train::second_moment", size())),
      m_x(mlp_matrix("kvzap::train::x", rows, inputs)),
      m_slope(mlp_matrix("kvzap::train::slope", rows, hidden)),
      m_activation(mlp_matrix("kvzap::train::activation", rows, hidden)),
      m_back(mlp_matrix("kvzap::train::back", rows, hidden)),
      m_output(mlp_matrix("kvzap::train::output", rows, heads)),
      m_row_loss("kvzap::train::row_loss", rows),
      m_loss("kvzap::train::loss", 1),
      m_squares("kvzap::train::squares", std::max<std::int64_t>(1, parts_of(size()))) {}

std::int64_t MlpStep::bytes(std::int64_t inputs, std::int64_t hidden, std::int64_t heads,
                            std::int64_t rows) {
  return static_cast<std::int64_t>(sizeof(float)) *
         (4 * length_of(inputs, hidden, heads) + rows * (inputs + 3 * hidden + heads));
}

MlpStep::Parts MlpStep::parts_of_vector(const linalg::Vector& all) const {
  float* at = all.data();
  Parts parts;
  parts.weight1 = linalg::Matrix(at, m_hidden, m_inputs);
  at += m_hidden * m_inputs;
  parts.bias1 = linalg::Vector(at, m_hidden);
  at += m_hidden;
  parts.weight2 = linalg::Matrix(at, m_heads, m_hidden);
  at += m_heads * m_hidden;
  parts.bias2 = linalg::Vector(at, m_heads);
  return parts;
}

linalg::Matrix MlpStep::forward(const ExecutionSpace& exec, const ConstArrayView& hidden,
                                const Order& order, std::int64_t begin, std::int64_t count) {
  const Parts p = parts_of_vector(m_parameters);
  const linalg::Matrix x = first_rows(m_x, count), slope = first_rows(m_slope, count);
  const linalg::Matrix activation = first_rows(m_activation, count);
  linalg::Matrix output = first_rows(m_output, count);
  gather_rows(exec, hidden, order, begin, x);
  linalg::multiply_large(exec, linalg::Op::plain, x, linalg::Op::transposed, p.weight1, 0, slope);
  gelu_with_slope(exec, slope, p.bias1, activation);
  linalg::multiply_large(exec, linalg::Op::plain, activation, linalg::Op::transposed, p.weight2, 0,
                         output);
  return output;
}

void MlpStep::differentiate(const ExecutionSpace& exec, const ConstArrayView& hidden,
                            const linalg::ConstMatrix& scores, const Order& order,
                            std::int64_t begin, std::int64_t count) {
  const Parts p = parts_of_vector(m_parameters), g = parts_of_vector(m_gradient);
  const linalg::Matrix output = forward(exec, hidden, order, begin, count);
  const auto terms = static_cast<double>(count) * static_cast<double>(m_heads);
  const Order rows = Kokkos::subview(order, std::make_pair(begin, begin + count));
  residual(exec, output, p.bias2, scores, rows, static_cast<float>(2 / terms), m_row_loss);
  add_sum(exec, m_row_loss, count, m_loss);

  const linalg::Matrix x = first_rows(m_x, count), slope = first_rows(m_slope, count);
  const linalg::Matrix activation = first_rows(m_activation, count),
                       back = first_rows(m_back, count);
  linalg::multiply_large(exec, linalg::Op::transposed, output, linalg::Op::plain, activation, 0,
                         g.weight2);
  sum_rows(exec, output, g.bias2);
  linalg::multiply_large(exec, linalg::Op::plain, output, linalg::Op::plain, p.weight2, 0, back);
  times_with_sums(exec, back, slope, g.bias1);
  linalg::multiply_large(exec, linalg::Op::transposed, back, linalg::Op::plain, x, 0, g.weight1);
}

void MlpStep::update(const ExecutionSpace& exec, double clip, const AdamStep& step) {
  const std::int64_t parts = clip > 0 ? square_parts(exec, m_gradient, m_squares) : 0;
  clip_factor(exec, m_squares, parts, clip);
  adamw_step(exec, {m_parameters, m_first, m_second}, m_gradient, m_squares, step);
}

linalg::ConstMatrix MlpStep::predict(const ExecutionSpace& exec, const ConstArrayView& hidden,
                                     const Order& order, std::int64_t begin, std::int64_t count) {
  const linalg::Matrix output = forward(exec, hidden, order, begin, count);
  add_bias_rows(exec, output, parts_of_vector(m_parameters).bias2);
  return output;
}

}  // namespace kvzap::train
