#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "files/json_field.hpp"
#include "files/number_table.hpp"
#include "policy/registry.hpp"

namespace kvzap {
namespace {

/// Gives the rows that are left after rounding down to the heads with the largest fractions.
void round_up_largest(const std::vector<float>& shares, std::int64_t left,
                      std::vector<std::int64_t>& rows) {
  std::vector<std::size_t> order(shares.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto fraction = [&](std::size_t head) {
    return shares[head] - static_cast<float>(rows[head]);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return fraction(a) > fraction(b); });
  order.resize(std::min(order.size(), static_cast<std::size_t>(std::max<std::int64_t>(0, left))));
  for (const std::size_t head : order) ++rows[head];
}

}  // namespace

std::vector<float> HeadRatios::of_layer(double evict_ratio, int layer) const {
  const auto count = static_cast<std::size_t>(heads);
  if (is_curve() && evict_ratio <= 0) return std::vector<float>(count, 0.0F);
  const double point = std::clamp(std::nearbyint(evict_ratio * 100), 1.0, double{curve_tables}) - 1;
  const auto table = is_curve() ? static_cast<std::size_t>(point) : 0;
  const std::size_t first =
      (table * static_cast<std::size_t>(layers) + static_cast<std::size_t>(layer)) * count;
  if (layer < 0 || layer >= layers || first + count > ratios.size()) {
    throw Error(fmt::format("budget: there are evict ratios of the heads of {} layers, none of {}",
                            layers, layer));
  }
  const auto begin = ratios.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + heads};
}

std::vector<std::int64_t> HeadRatios::rows(double evict_ratio, int layer,
                                           std::int64_t tokens) const {
  if (tokens <= 0) return std::vector<std::int64_t>(static_cast<std::size_t>(heads), 0);
  // In float, as LUKVPress computes.
  std::vector<float> shares = of_layer(evict_ratio, layer);
  for (float& share : shares) share = (1 - share) * static_cast<float>(tokens);
  const float sum = std::accumulate(shares.begin(), shares.end(), 0.0F);
  std::vector<std::int64_t> result;
  for (const float share : shares) {
    result.push_back(std::min(tokens, static_cast<std::int64_t>(share)));
  }
  const auto total =
      std::clamp<std::int64_t>(std::llrint(std::nearbyint(sum)), heads, heads * tokens);
  round_up_largest(shares, total - std::accumulate(result.begin(), result.end(), std::int64_t{0}),
                   result);
  for (std::int64_t& rows : result) rows = std::clamp<std::int64_t>(rows, 1, tokens);
  return result;
}

}  // namespace kvzap

namespace kvzap::policy {
namespace {

struct PerHeadParameters : PolicyParameters {
  std::string ratios = optional_file(
      "ratios", "evict ratios of (layer, KV head), or of layers: JSON lists or a .npy file");
  std::string curve = optional_file(
      "curve", "evict ratios of (1 to 99 %, layer, KV head), as LU-KV publishes them: a .npy file");
  std::int64_t sink = integer("sink", 4, {0, 1 << 24}, "first tokens that stay before all others");
  std::int64_t window =
      integer("window", 1, {0, 1 << 24}, "newest tokens that stay before all others");
};

/// Reads the table of a file, whose shape must be (layers, heads) or (layers), of a curve
/// (99, layers, heads), with all layers of the model or those that run.
HeadRatios read_head_ratios(const std::string& file, bool is_curve, const PolicySetup& setup) {
  const files::NumberTable table = files::read_number_table(file);
  const std::size_t place = is_curve ? 1 : 0;
  const std::int64_t layers = place < table.shape.size() ? table.shape[place] : 0;
  HeadRatios result;
  result.layers =
      static_cast<int>(setup.has_layers(layers) ? layers : setup.config.num_hidden_layers);
  result.heads = static_cast<int>(setup.config.num_key_value_heads);
  std::vector<std::int64_t> expected = {result.layers, result.heads};
  if (is_curve) expected.insert(expected.begin(), HeadRatios::curve_tables);
  const bool is_of_layers = !is_curve && table.shape.size() == 1;
  if (is_of_layers) expected.pop_back();
  if (table.shape != expected) {
    files::throw_unexpected(
        file + ": shape",
        fmt::format("{} for {} layers with {} KV heads each", files::text_of_shape(expected),
                    result.layers, result.heads),
        files::text_of_shape(table.shape));
  }
  for (std::size_t i = 0; i < table.values.size(); ++i) {
    const double ratio = table.values[i];
    if (!(ratio >= 0 && ratio <= 1)) {
      std::string place;
      auto index = static_cast<std::int64_t>(i);
      for (std::size_t d = expected.size(); d-- > 0; index /= expected[d]) {
        place = fmt::format("[{}]", index % expected[d]) + place;
      }
      files::throw_unexpected(file + ": " + place, "an evict ratio from 0 to 1",
                              fmt::format("{}", ratio));
    }
    const int copies = is_of_layers ? result.heads : 1;
    result.ratios.insert(result.ratios.end(), static_cast<std::size_t>(copies),
                         static_cast<float>(ratio));
  }
  return result;
}

void check_choice(const PolicyChoice& choice, bool is_curve) {
  const auto refuse = [](bool condition, const std::string& why) {
    if (condition) throw Error("per-head has no meaning here: " + why);
  };
  const Budget& budget = choice.budget;
  refuse(!is_curve && (budget.has_amount() || !std::isnan(choice.threshold)),
         "the file of ratios gives the amount; give neither a threshold nor another budget");
  refuse(is_curve && budget.amount != Budget::Amount::evict_ratio,
         "an evict ratio selects the ratios of a curve; give one, and no other amount");
  refuse(budget.pool != Budget::Pool::head || budget.counts_pools,
         fmt::format("policy {} has a budget over many heads; give layerwise=on, or another policy",
                     choice.info->name));
  refuse(choice.make && choice.make()->needs().budget,
         fmt::format("the scores of policy {} depend on one number of rows for all heads",
                     choice.info->name));
}

}  // namespace

/// Budgets of layers and heads from a table, as kvpress' LUKVPress (LU-KV, arXiv 2602.08585). With
/// the evict ratios r(h) of a layer's heads and n tokens, the shares are s(h) = n (1 - r(h)). The
/// layer keeps round(sum over h of s(h)) rows: each head floor(s(h)), and those with the largest
/// fractions one more; at least one. Sinks and window stay first, then the rows with the largest
/// scores.
///
/// `curve` is LU-KV's file, (99, layers, KV heads): row round(100 r) - 1 belongs to the evict ratio
/// r of the model. `ratios` has one table, (layers, KV heads), and is the amount itself; (layers)
/// gives all heads of a layer the same ratio.
///
/// Deviations: LUKVPress masks rows and downloads its one curve; rows are freed here. Of equal
/// fractions the lowest head rounds up. Cuts after the context are even. Other modifiers are
/// refused; LUKVPress accepts CriticalKVPress, whose first stage would take the even budget.
///
/// Cost: that of the policy; a selection of each head.
ModifierInfo per_head() {
  ModifierInfo info;
  info.name = "per-head";
  info.paper = "LU-KV, arXiv 2602.08585";
  info.effect = "every head has its own evict ratio, from a file";
  info.amount = "ratios";
  info.gives_budget = true;
  info.is_alone = true;
  info.apply_with<PerHeadParameters>(
      [](PolicyChoice& choice, const auto& p, const PolicySetup& setup) {
        if (p.ratios.empty() == p.curve.empty()) {
          throw Error("per-head needs one of ratios=FILE and curve=FILE");
        }
        const bool is_curve = !p.curve.empty();
        check_choice(choice, is_curve);
        HeadRatios ratios = read_head_ratios(is_curve ? p.curve : p.ratios, is_curve, setup);
        ratios.sink = p.sink;
        ratios.window = p.window;
        Budget& budget = choice.budget;
        if (!is_curve) {
          budget.amount = Budget::Amount::evict_ratio;
          budget.evict_ratio = std::accumulate(ratios.ratios.begin(), ratios.ratios.end(), 0.0) /
                               static_cast<double>(ratios.ratios.size());
        }
        budget.head_ratios = std::make_shared<const HeadRatios>(std::move(ratios));
      });
  return info;
}

}  // namespace kvzap::policy
