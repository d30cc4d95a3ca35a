// One layer's MLP, its gradient and its optimizer.
#pragma once

#include <cstdint>
#include <kvzap/lab/train.hpp>

#include "train/mlp_kernels.hpp"

namespace kvzap::train {

/// Parameters of Linear(inputs, hidden) and Linear(hidden, heads), with the scratch memory of a
/// training step for batches of up to `rows`. Parameters, gradient and moments are vectors in the
/// order weight1 (hidden, inputs), bias1 (hidden), weight2 (heads, hidden), bias2 (heads).
class MlpStep {
 public:
  /// Initialises all to 0. Throws if memory is exhausted.
  MlpStep(std::int64_t inputs, std::int64_t hidden, std::int64_t heads, std::int64_t rows);

  std::int64_t size() const { return static_cast<std::int64_t>(m_parameters.extent(0)); }
  const linalg::Vector& parameters() const { return m_parameters; }
  const linalg::Vector& gradient() const { return m_gradient; }
  const linalg::Vector& first_moment() const { return m_first; }
  const linalg::Vector& second_moment() const { return m_second; }

  /// Computes the gradient of the mean squared error over `count` rows and all heads. Adds the sum
  /// of squared errors to loss(). Reads rows order(begin) … order(begin + count - 1) of hidden
  /// states and scores.
  void differentiate(const ExecutionSpace& exec, const ConstArrayView& hidden,
                     const linalg::ConstMatrix& scores, const Order& order, std::int64_t begin,
                     std::int64_t count);
  /// Takes one step of Adam, against the gradient, whose norm is clipped if `clip` > 0.
  void update(const ExecutionSpace& exec, double clip, const AdamStep& step);
  /// Returns the outputs (count, heads) of rows order(begin) …; valid until the next call.
  linalg::ConstMatrix predict(const ExecutionSpace& exec, const ConstArrayView& hidden,
                              const Order& order, std::int64_t begin, std::int64_t count);

  /// (1): sum of squared errors that `differentiate` added since the last reset.
  const Doubles& loss() const { return m_loss; }

  /// Bytes of an object with these extents.
  static std::int64_t bytes(std::int64_t inputs, std::int64_t hidden, std::int64_t heads,
                            std::int64_t rows);

 private:
  struct Parts {
    linalg::Matrix weight1, weight2;
    linalg::Vector bias1, bias2;
  };
  Parts parts_of_vector(const linalg::Vector& all) const;
  linalg::Matrix forward(const ExecutionSpace& exec, const ConstArrayView& hidden,
                         const Order& order, std::int64_t begin, std::int64_t count);

  std::int64_t m_inputs, m_hidden, m_heads;
  linalg::Vector m_parameters, m_gradient, m_first, m_second;
  linalg::Matrix m_x;           // (rows, inputs): the batch as float
  linalg::Matrix m_slope;       // (rows, hidden): input of GELU, then its slope
  linalg::Matrix m_activation;  // (rows, hidden)
  linalg::Matrix
      m_back;  // (rows, hidden): gradient with respect to the activation, then to its input
  linalg::Matrix m_output;  // (rows, heads), then the gradient with respect to it
  Doubles m_row_loss, m_loss, m_squares;
};

}  // namespace kvzap::train
