// Pairs in memory, to train from in tests.
#pragma once

#include <cmath>
#include <cstring>
#include <kvzap/lab/pairs.hpp>
#include <random>
#include <vector>

namespace kvzap::test {

class MemoryPairs final : public PairSource {
 public:
  MemoryPairs(std::int64_t pairs, int layers, std::int64_t hidden_size, int kv_heads,
              DType dtype = DType::bf16) {
    m_info.model = "a model";
    m_info.dtype = dtype;
    m_info.hidden_size = hidden_size;
    m_info.layers = layers;
    m_info.kv_heads = kv_heads;
    m_info.pairs = pairs;
    m_hidden.assign(layers, std::vector<float>(pairs * hidden_size));
    m_scores.assign(layers, std::vector<float>(pairs * kv_heads));
  }

  MemoryPairs(const MemoryPairs& other)
      : PairSource(), m_info(other.m_info), m_hidden(other.m_hidden), m_scores(other.m_scores) {}
  MemoryPairs& operator=(const MemoryPairs&) = delete;

  /// Hidden states around `mean`, scores that are a smooth function of them with some noise. A
  /// value depends on the seed and its place alone.
  static MemoryPairs random(std::int64_t pairs, int layers, std::int64_t hidden_size, int kv_heads,
                            DType dtype = DType::bf16, float mean = 0) {
    MemoryPairs all(pairs, layers, hidden_size, kv_heads, dtype);
    for (int l = 0; l < layers; ++l) {
      std::mt19937 random(static_cast<unsigned>(l + 1));
      const auto number = [&] { return static_cast<float>(random() >> 8) / 8388608.0f - 1; };
      std::vector<float> weights(kv_heads * hidden_size);
      for (float& w : weights) w = number();
      for (float& x : all.m_hidden[l]) x = all.rounded(mean + 2 * number());
      for (std::int64_t i = 0; i < pairs; ++i) {
        for (int h = 0; h < kv_heads; ++h) {
          float sum = 0;
          for (std::int64_t c = 0; c < hidden_size; ++c) {
            sum += weights[h * hidden_size + c] * (all.m_hidden[l][i * hidden_size + c] - mean);
          }
          sum /= std::sqrt(static_cast<float>(hidden_size));
          all.m_scores[l][i * kv_heads + h] = sum + std::fabs(sum) - 3 + 0.1f * number();
        }
      }
    }
    return all;
  }

  float& hidden(int layer, std::int64_t pair, std::int64_t column) {
    return m_hidden.at(layer).at(pair * m_info.hidden_size + column);
  }
  float& score(int layer, std::int64_t pair, int head) {
    return m_scores.at(layer).at(pair * m_info.kv_heads + head);
  }
  PairsInfo& edit_info() { return m_info; }
  const PairsInfo& info() const override { return m_info; }

  /// A value as the file would have it.
  float rounded(float value) const {
    if (m_info.dtype == DType::bf16) return bfloat16(value);
    return m_info.dtype == DType::f16 ? static_cast<float>(half(value)) : value;
  }

  void read(int layer, std::int64_t begin, std::int64_t count, void* hidden,
            float* scores) const override {
    const std::int64_t columns = m_info.hidden_size, heads = m_info.kv_heads;
    for (std::int64_t i = 0; hidden && i < count * columns; ++i) {
      const float value = m_hidden.at(layer).at(begin * columns + i);
      switch (m_info.dtype) {
        case DType::f32:
          static_cast<float*>(hidden)[i] = value;
          break;
        case DType::f16:
          static_cast<half*>(hidden)[i] = half(value);
          break;
        case DType::bf16:
          static_cast<bfloat16*>(hidden)[i] = bfloat16(value);
          break;
      }
    }
    if (scores) std::copy_n(m_scores.at(layer).begin() + begin * heads, count * heads, scores);
  }

 private:
  PairsInfo m_info;
  std::vector<std::vector<float>> m_hidden, m_scores;
};

}  // namespace kvzap::test
