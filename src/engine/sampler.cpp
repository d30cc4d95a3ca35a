#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/sampler.hpp>
#include <numeric>

namespace kvzap {

Sampler::Sampler(const SamplingOptions& options) : m_options(options), m_random(options.seed) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    throw Error(fmt::format("--temp is {}; expected 0 or more", options.temperature));
  }
  if (options.top_k < 0)
    throw Error(fmt::format("--top-k is {}; expected 0 or more", options.top_k));
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw Error(fmt::format("--top-p is {}; expected more than 0 and at most 1", options.top_p));
  }
}

TokenId Sampler::operator()(const std::vector<float>& logits) {
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  if (logits.empty() || !std::isfinite(logits[best])) return -1;
  if (m_options.temperature == 0) return static_cast<TokenId>(best);

  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto more_likely = [&](TokenId a, TokenId b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  if (m_options.top_k > 0 && m_options.top_k < static_cast<std::int64_t>(order.size())) {
    std::nth_element(order.begin(), order.begin() + m_options.top_k, order.end(), more_likely);
    order.resize(m_options.top_k);
  }
  std::sort(order.begin(), order.end(), more_likely);
  std::vector<double> cumulative(order.size());
  double sum = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    sum += std::exp((static_cast<double>(logits[order[i]]) - logits[best]) / m_options.temperature);
    cumulative[i] = sum;
  }
  std::size_t kept = order.size();
  if (m_options.top_p < 1) {
    kept = std::lower_bound(cumulative.begin(), cumulative.end(), m_options.top_p * sum) -
           cumulative.begin() + 1;
    kept = std::min(kept, order.size());
  }
  // std::uniform_real_distribution differs between libraries; 53 random bits do not.
  const double uniform = static_cast<double>(m_random() >> 11) * 0x1p-53;
  const auto drawn = std::upper_bound(cumulative.begin(), cumulative.begin() + kept,
                                      uniform * cumulative[kept - 1]) -
                     cumulative.begin();
  return order[std::min<std::size_t>(drawn, kept - 1)];
}

}  // namespace kvzap
