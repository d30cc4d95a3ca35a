#include "engine/likely_tokens.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "base/machine.hpp"
#include "base/simd.hpp"

namespace kvzap::engine {
namespace {

constexpr std::size_t block = 64;
// exp of less adds less than 1e-12 to a sum above 1, even for 10 million tokens.
constexpr double least_exponent = -45;

KVZAP_BODY std::size_t end_of(std::size_t index, std::size_t count) {
  return count < (index + 1) * block ? count : (index + 1) * block;
}

/// Writes the largest logit of each block, -infinity for NaN. Returns whether there is a NaN.
KVZAP_BODY bool largest_of_blocks_body(const float* logits, std::size_t count, float* most) {
  std::uint32_t any_nan = 0;
  for (std::size_t b = 0; b * block < count; ++b) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    float largest = none;
    std::uint32_t nan = 0, some = 0;
    const std::size_t end = end_of(b, count);
#pragma omp simd reduction(max : largest) reduction(| : nan, some)
    for (std::size_t i = b * block; i < end; ++i) {
      largest = logits[i] > largest ? logits[i] : largest;
      nan |= logits[i] != logits[i] ? 1u : 0u;
      some |= logits[i] > none ? 1u : 0u;
    }
    // Clang begins OpenMP's maximum with the least finite number.
    most[b] = some != 0 ? largest : none;
    any_nan |= nan;
  }
  return any_nan != 0;
}

/// exp(x), -745 < x <= 0, within 4e-16 of it: 2^n times the Taylor series of the rest. Without
/// branches, so loops vectorize.
KVZAP_BODY double exp_of(double x) {
  constexpr double round_to_integer = 6755399441055744.0;  // 1.5 * 2^52
  const double biased = x * 1.4426950408889634 + round_to_integer;
  const double n = biased - round_to_integer;
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 479001600;  // 12!
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 1.0 / 2;
  p = p * r + 1;
  p = p * r + 1;
  std::int64_t bits, zero;
  std::memcpy(&bits, &biased, sizeof(bits));
  std::memcpy(&zero, &round_to_integer, sizeof(zero));
  const std::int64_t scale_bits = (bits - zero + 1023) << 52;
  double scale;
  std::memcpy(&scale, &scale_bits, sizeof(scale));
  return p * scale;
}

/// The sum of exp((logit - largest) * inverse) over blocks; most: the largest logit of each.
KVZAP_BODY double sum_of_weights_body(const float* logits, std::size_t count, const float* most,
                                      double largest, double inverse) {
  double total = 0;
  for (std::size_t b = 0; b * block < count; ++b) {
    if ((most[b] - largest) * inverse < least_exponent) continue;
    double sum = 0;
    const std::size_t end = end_of(b, count);
#pragma omp simd reduction(+ : sum)
    for (std::size_t i = b * block; i < end; ++i) {
      const double exponent = (static_cast<double>(logits[i]) - largest) * inverse;
      sum += exp_of(exponent < -700 ? -700 : exponent);
    }
    total += sum;
  }
  return total;
}

}  // namespace

namespace {

KVZAP_KERNEL(bool, largest_of_blocks, (const float* logits, std::size_t count, float* most),
             (logits, count, most))
KVZAP_KERNEL(double, sum_of_weights,
             (const float* logits, std::size_t count, const float* most, double largest,
              double inverse),
             (logits, count, most, largest, inverse))

}  // namespace

void LikelyTokens::read(const float* logits, std::size_t count) {
  m_logits = logits;
  m_count = count;
  m_most.resize((count + block - 1) / block);
  m_has_nan = largest_of_blocks(logits, count, m_most.data());
  m_largest = -std::numeric_limits<float>::infinity();
  for (const float most : m_most) m_largest = std::max(m_largest, most);
}

bool LikelyTokens::is_finite() const { return !m_has_nan && std::isfinite(m_largest); }

TokenId LikelyTokens::best() const {
  const auto first = std::find(m_most.begin(), m_most.end(), m_largest) - m_most.begin();
  const float* const begin = m_logits + first * static_cast<std::ptrdiff_t>(block);
  return static_cast<TokenId>(std::find(begin, m_logits + m_count, m_largest) - m_logits);
}

const std::vector<TokenId>& LikelyTokens::sorted(std::size_t count) {
  const auto more_likely = [&](TokenId a, TokenId b) {
    return m_logits[a] != m_logits[b] ? m_logits[a] > m_logits[b] : a < b;
  };
  count = std::min(count, m_count);
  m_order.clear();
  if (count > m_most.size()) {
    m_order.resize(m_count);
    std::iota(m_order.begin(), m_order.end(), 0);
  } else if (count > 0) {
    m_selected = m_most;
    const auto last = m_selected.begin() + static_cast<std::ptrdiff_t>(count) - 1;
    std::nth_element(m_selected.begin(), last, m_selected.end(), std::greater<>());
    const float least = *last;
    for (std::size_t b = 0; b < m_most.size(); ++b) {
      if (!(m_most[b] >= least)) continue;
      for (std::size_t i = b * block; i < end_of(b, m_count); ++i) {
        if (m_logits[i] >= least) m_order.push_back(static_cast<TokenId>(i));
      }
    }
  }
  // Many may be equal to the bound, above all tokens that must not be drawn.
  if (m_order.size() > 2 * count) {
    const auto end = m_order.begin() + static_cast<std::ptrdiff_t>(count);
    std::nth_element(m_order.begin(), end, m_order.end(), more_likely);
    m_order.erase(end, m_order.end());
  }
  std::sort(m_order.begin(), m_order.end(), more_likely);
  return m_order;
}

double LikelyTokens::total(double temperature) const {
  const double inverse = std::min(1 / temperature, 1e300);  // of which 0 times is 0
  return sum_of_weights(m_logits, m_count, m_most.data(), m_largest, inverse);
}

}  // namespace kvzap::engine
