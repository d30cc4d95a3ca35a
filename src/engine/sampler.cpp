#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/sampler.hpp>
#include <locale>
#include <numeric>
#include <sstream>

namespace kvzap {
namespace {

// Tokens that are put in order at first, and by how many times more if they do not suffice.
constexpr std::size_t first_sorted = 256;
constexpr std::size_t growth = 8;

}  // namespace

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

std::string Sampler::state() const {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << m_random;
  return text.str();
}

void Sampler::set_state(const std::string& state) {
  std::istringstream text(state);
  text.imbue(std::locale::classic());
  std::mt19937_64 random;
  if (!(text >> random) || !(text >> std::ws).eof()) {
    throw Error("the state of the random numbers is not that of a std::mt19937_64");
  }
  m_random = random;
}

TokenId Sampler::operator()(const std::vector<float>& logits) {
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  if (logits.empty() || !std::isfinite(logits[best])) return -1;
  if (m_options.temperature == 0) return static_cast<TokenId>(best);

  const auto more_likely = [&](TokenId a, TokenId b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const auto weight = [&](TokenId id) {
    return std::exp((static_cast<double>(logits[id]) - logits[best]) / m_options.temperature);
  };
  m_order.resize(logits.size());
  std::iota(m_order.begin(), m_order.end(), 0);
  const bool limited =
      m_options.top_k > 0 && m_options.top_k < static_cast<std::int64_t>(m_order.size());
  // The most probable tokens in order, as many as it takes, and the sums of their weights. Few hold
  // nearly all of the probability, so that sorting the others would be most of the work.
  m_cumulative.clear();
  const auto sort_up_to = [&](std::size_t count) {
    const auto begin = m_order.begin() + static_cast<std::ptrdiff_t>(m_cumulative.size());
    const auto end = m_order.begin() + static_cast<std::ptrdiff_t>(count);
    if (end != m_order.end()) std::nth_element(begin, end, m_order.end(), more_likely);
    std::sort(begin, end, more_likely);
    double sum = m_cumulative.empty() ? 0 : m_cumulative.back();
    for (auto id = begin; id != end; ++id) m_cumulative.push_back(sum += weight(*id));
  };
  const auto sort_until = [&](const auto& is_enough) {
    std::size_t count = std::min(first_sorted, m_order.size());
    sort_up_to(count);
    while (count < m_order.size() && !is_enough(m_cumulative.back())) {
      count = count < m_order.size() / growth ? count * growth : m_order.size();
      sort_up_to(count);
    }
  };
  double total = 0;
  if (limited) {
    sort_up_to(static_cast<std::size_t>(m_options.top_k));
    total = m_cumulative.back();
  } else {
    for (std::size_t id = 0; id < logits.size(); ++id) total += weight(static_cast<TokenId>(id));
  }
  // std::uniform_real_distribution differs between libraries; 53 random bits do not.
  const double uniform = static_cast<double>(m_random() >> 11) * 0x1p-53;
  if (m_options.top_p < 1) {
    const double enough = m_options.top_p * total;
    if (!limited) sort_until([&](double sum) { return sum >= enough; });
    const auto last = std::lower_bound(m_cumulative.begin(), m_cumulative.end(), enough);
    if (last != m_cumulative.end()) m_cumulative.erase(last + 1, m_cumulative.end());
    total = m_cumulative.back();
  }
  const double target = uniform * total;
  if (!limited && m_options.top_p == 1) sort_until([&](double sum) { return sum > target; });
  const auto drawn = std::upper_bound(m_cumulative.begin(), m_cumulative.end(), target);
  const auto last = m_cumulative.end() - 1;
  return m_order[static_cast<std::size_t>(std::min(drawn, last) - m_cumulative.begin())];
}

}  // namespace kvzap
