// Keys, values and scores of a step's tokens in one layer.
#pragma once

#include <kvzap/core/page_pool.hpp>

#include "base/scratch.hpp"
#include "engine/value_buffer.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// Every layer overwrites those of the layer before. The memory grows on demand.
class NewRows {
 public:
  NewRows(DType dtype, MemoryMeter* meter) : m_keys(dtype), m_values(dtype), m_meter(meter) {}

  /// Makes room for this number of values in the keys, and in the values if a row has two vectors,
  /// and of scores.
  void reserve(std::int64_t values, std::int64_t vectors, std::int64_t scores) {
    if (m_keys.capacity() < values) {
      release();
      m_keys.reserve(values, "kvzap::decoder::new_keys");
      if (vectors == 2) m_values.reserve(values, "kvzap::decoder::new_values");
      m_bytes = MeteredBytes(m_meter, vectors * values * size_of(m_keys.dtype()));
    }
    base::reserve_scratch(m_scores, scores, "kvzap::decoder::scores");
  }
  void release() {
    m_keys.release();
    m_values.release();
    m_scores = {};
    m_bytes = {};
  }
  const ValueBuffer& keys() const { return m_keys; }
  const ValueBuffer& values() const { return m_values; }
  const linalg::Vector& scores() const { return m_scores; }

 private:
  ValueBuffer m_keys, m_values;  // (token, head, dim)
  linalg::Vector m_scores;       // (head, token)
  MeteredBytes m_bytes;
  MemoryMeter* m_meter;
};

}  // namespace kvzap::engine
