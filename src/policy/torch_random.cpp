#include "policy/torch_random.hpp"

#include <algorithm>
#include <cmath>

namespace kvzap::policy {
namespace {

constexpr std::int64_t block = 16;

void fill_block(std::mt19937& engine, float* values) {
  // 24 bits make a float in [0, 1).
  for (int i = 0; i < block; ++i) {
    values[i] = static_cast<float>(engine() & 0xffffffu) * 0x1p-24f;
  }
}

void box_muller(float* values) {
  for (int i = 0; i < block / 2; ++i) {
    const float radius = std::sqrt(-2.0f * std::log(1.0f - values[i]));
    const float angle = 6.28318530718f * values[i + block / 2];
    values[i] = radius * std::cos(angle);
    values[i + block / 2] = radius * std::sin(angle);
  }
}

}  // namespace

std::vector<float> TorchNormals::draw(std::int64_t count) {
  const std::int64_t whole = count / block * block;
  std::vector<float> values(std::max(count, block));
  for (std::int64_t i = 0; i < whole; i += block) {
    fill_block(m_engine, &values[i]);
    box_muller(&values[i]);
  }
  if (count % block == 0) return values;
  // torch draws uniform numbers for the remainder, and then all of the last 16 once more.
  m_engine.discard(count - whole);
  float* const last = values.data() + values.size() - block;
  fill_block(m_engine, last);
  box_muller(last);
  values.resize(count);
  return values;
}

void TorchNormals::skip(std::int64_t count) {
  m_engine.discard(count + (count % block == 0 ? 0 : block));
}

std::vector<float> LayerNormals::draw(int layer, std::int64_t count) {
  if (layer < m_next) {
    m_stream = TorchNormals(m_seed);
    m_next = 0;
  }
  for (; m_next < layer; ++m_next) m_stream.skip(count);
  ++m_next;
  return m_stream.draw(count);
}

}  // namespace kvzap::policy
