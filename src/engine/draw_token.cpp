#include "engine/draw_token.hpp"

#include <algorithm>
#include <cmath>

namespace kvzap::engine {
namespace {

// Number of tokens that are sorted first, and the factor by which it grows if they do not suffice.
constexpr std::size_t first_sorted = 256;
constexpr std::size_t growth = 8;

}  // namespace

TokenId draw_token(const float* logits, std::size_t count, const TokenDraw& draw,
                   DrawScratch& scratch) {
  LikelyTokens& likely = scratch.likely;
  std::vector<double>& cumulative = scratch.cumulative;
  if (draw.temperature == 0) return likely.best();
  const auto weight = [&](TokenId id) {
    return std::exp((static_cast<double>(logits[id]) - likely.largest()) / draw.temperature);
  };
  const bool limited = draw.top_k > 0 && draw.top_k < static_cast<std::int64_t>(count);
  // Sorts only as many of the most likely tokens as needed, and sums their weights: a few tokens
  // have nearly all of the probability.
  const std::vector<TokenId>* order = nullptr;
  cumulative.clear();
  const auto sort_up_to = [&](std::size_t most) {
    order = &likely.sorted(most);
    double sum = cumulative.empty() ? 0 : cumulative.back();
    const std::size_t end = limited ? most : order->size();
    for (std::size_t i = cumulative.size(); i < end; ++i) {
      cumulative.push_back(sum += weight((*order)[i]));
    }
  };
  const auto sort_until = [&](const auto& is_enough) {
    std::size_t most = std::min(first_sorted, count);
    sort_up_to(most);
    while (cumulative.size() < count && !is_enough()) {
      most = most < count / growth ? most * growth : count;
      sort_up_to(most);
    }
  };
  double total = 0;
  if (limited) {
    sort_up_to(static_cast<std::size_t>(draw.top_k));
    total = cumulative.back();
  } else if (draw.top_p < 1 || draw.min_p == 0) {
    total = likely.total(draw.temperature);
  }
  if (draw.top_p < 1) {
    const double enough = draw.top_p * total;
    if (!limited) sort_until([&] { return cumulative.back() >= enough; });
    const auto last = std::lower_bound(cumulative.begin(), cumulative.end(), enough);
    if (last != cumulative.end()) cumulative.erase(last + 1, cumulative.end());
    total = cumulative.back();
  }
  if (draw.min_p > 0) {
    const auto is_likely = [&](TokenId id) { return weight(id) >= draw.min_p; };
    if (!limited && draw.top_p == 1) {
      sort_until([&] { return !is_likely((*order)[cumulative.size() - 1]); });
    }
    const auto sorted = order->begin() + static_cast<std::ptrdiff_t>(cumulative.size());
    const auto last = std::partition_point(order->begin(), sorted, is_likely);
    cumulative.resize(static_cast<std::size_t>(last - order->begin()));
    total = cumulative.back();
  }
  const double target = draw.uniform * total;
  if (!limited && draw.top_p == 1 && draw.min_p == 0) {
    sort_until([&] { return cumulative.back() > target; });
  }
  const auto drawn = std::upper_bound(cumulative.begin(), cumulative.end(), target);
  const auto last = cumulative.end() - 1;
  return (*order)[static_cast<std::size_t>(std::min(drawn, last) - cumulative.begin())];
}

TokenId read_and_draw(const float* logits, std::size_t count, const TokenDraw& draw) {
  thread_local DrawScratch scratch;
  scratch.likely.read(logits, count);
  return scratch.likely.is_finite() ? draw_token(logits, count, draw, scratch) : -1;
}

}  // namespace kvzap::engine
