#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "files/ascii.hpp"
#include "files/decimal.hpp"
#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "policy/mean_attention.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using Range = PolicyRange;

// A pattern of heads for one ratio.
struct Pattern {
  std::vector<std::vector<bool>> streaming;  // (layer, KV head)
  std::int64_t sink = 0;
  std::int64_t recent = 0;
};

// Returns (layer, KV head): the shares of full attention in a file of tab-separated numbers, one
// line per layer.
std::vector<std::vector<double>> read_shares(const std::filesystem::path& file) {
  constexpr std::uintmax_t max_bytes = 4u << 20;
  std::istringstream stream(files::read_text_file(file, max_bytes));
  std::vector<std::vector<double>> shares;
  std::size_t number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    std::vector<double> row;
    for (const std::string_view word : files::words_of(line)) {
      double share = 0;
      if (files::read_real(word, share) != files::DecimalFault::none || !std::isfinite(share)) {
        throw Error(fmt::format("{}: line {} has \"{}\"; expected a number", file.string(), number,
                                files::shown(word)));
      }
      row.push_back(std::clamp(share, 0.0, 1.0));
    }
    if (!row.empty()) shares.push_back(std::move(row));
  }
  if (stream.bad()) throw Error(fmt::format("{}: reading failed", file.string()));
  return shares;
}

// Returns which heads stream: those with the smallest shares (layer, KV head), in the order (share,
// layer, head).
std::vector<std::vector<bool>> streaming_heads(const std::vector<std::vector<double>>& shares,
                                               double ratio) {
  const std::size_t heads = shares.at(0).size();
  std::vector<std::size_t> order(shares.size() * heads);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return shares[a / heads][a % heads] < shares[b / heads][b % heads];
  });
  // Rounds to even, as Python does.
  const auto count =
      static_cast<std::size_t>(std::nearbyint(static_cast<double>(order.size()) * ratio));
  std::vector<std::vector<bool>> streaming(shares.size(), std::vector<bool>(heads, false));
  for (std::size_t i = 0; i < count; ++i) {
    streaming[order[i] / heads][order[i] % heads] = true;
  }
  return streaming;
}

Pattern read_pattern(const std::filesystem::path& path, double ratio, const ModelConfig& model) {
  const auto folder = std::filesystem::is_directory(path) ? path : path.parent_path();
  const auto file = std::filesystem::is_directory(path) ? path / "full_attention_heads.tsv" : path;
  const auto config_file = folder / "config.json";
  const nlohmann::json json = files::read_json_object(config_file);
  const files::JsonField fields(json, config_file.string());
  Pattern pattern;
  pattern.sink = fields.member("sink_size").integer(0);
  pattern.recent = fields.member("recent_size").integer(0);

  const std::vector<std::vector<double>> shares = read_shares(file);
  const auto heads = static_cast<std::size_t>(model.num_key_value_heads);
  for (std::size_t l = 0; l < shares.size(); ++l) {
    if (shares[l].size() != heads) {
      throw Error(
          fmt::format("{}: layer {} has {} heads, but the model's num_key_value_heads is "
                      "{}: the pattern was made for another model",
                      file.string(), l, shares[l].size(), heads));
    }
  }
  if (static_cast<std::int64_t>(shares.size()) != model.num_hidden_layers) {
    throw Error(
        fmt::format("{}: {} layers, but the model's num_hidden_layers is {}: the pattern "
                    "was made for another model",
                    file.string(), shares.size(), model.num_hidden_layers));
  }
  pattern.streaming = streaming_heads(shares, ratio);
  return pattern;
}

// scores(head, row) = 1 before `sink` and from first_recent on, else 0.
void score_streaming(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                     int head, std::int64_t sink, std::int64_t first_recent,
                     const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::duo_attention", Range(exec, 0, static_cast<std::int64_t>(positions.extent(0))),
      KOKKOS_LAMBDA(std::int64_t row) {
        const std::int64_t position = positions(row);
        scores(head, row) = position < sink || position >= first_recent ? 1.0f : 0.0f;
      });
}

class DuoAttention final : public Policy {
 public:
  explicit DuoAttention(std::shared_ptr<const Pattern> pattern) : m_pattern(std::move(pattern)) {}

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto& streaming = m_pattern->streaming.at(static_cast<std::size_t>(layer.layer()));
    for (int head = 0; head < layer.heads(); ++head) {
      const auto number = static_cast<std::size_t>(layer.extents().heads[head]);
      if (streaming.at(number)) {
        score_streaming(layer.exec(), layer.positions(head), head, m_pattern->sink,
                        layer.extents().tokens - m_pattern->recent, scores);
      } else {
        Kokkos::deep_copy(layer.exec(), Kokkos::subview(scores, head, Kokkos::ALL), 1.0f);
      }
    }
  }

 private:
  std::shared_ptr<const Pattern> m_pattern;
};

struct DuoParameters : PolicyParameters {
  std::string pattern = optional_file(
      "pattern",
      "folder with full_attention_heads.tsv and config.json (sink_size, recent_size), or that .tsv "
      "with the config.json beside it");
  std::string texts = optional_file(
      "texts",
      "instead of pattern: file of texts that show how far back each head looks, one per line, or "
      "JSON objects with a field \"text\", one per line");
  std::int64_t tokens = integer("tokens", 500, {1, 1e6},
                                "with texts: number of positions that get a head's mean query and "
                                "key");
  double head_evict_ratio = number("head-evict-ratio", 0, {0, 1}, "share of KV heads that stream");
};

void set_up_duo_attention(PolicyChoice& choice, const DuoParameters& parameters,
                          const PolicySetup& setup) {
  if (parameters.pattern.empty() == parameters.texts.empty()) {
    throw Error(
        fmt::format("policy duo-attention needs {} of pattern=FILE, which heads stream, and "
                    "texts=FILE, from which to find out",
                    parameters.texts.empty() ? "one" : "only one"));
  }
  const double ratio = parameters.head_evict_ratio;
  if (!parameters.pattern.empty()) {
    const auto pattern =
        std::make_shared<const Pattern>(read_pattern(parameters.pattern, ratio, setup.config));
    choice.make = [pattern] { return std::make_unique<DuoAttention>(pattern); };
    return;
  }
  const auto attention = std::make_shared<MeanAttention>(parameters.texts, parameters.tokens);
  choice.learner = attention;
  choice.make = [attention, ratio]() -> std::unique_ptr<Policy> {
    if (attention->scores().empty()) {
      throw Error(
          "policy duo-attention: its texts have not been run; kvzap::learn_from_texts runs "
          "them before the first sequence");
    }
    auto pattern = std::make_shared<Pattern>();
    pattern->streaming = streaming_heads(attention->scores(), ratio);
    // The values of kvpress.
    pattern->sink = 128;
    pattern->recent = 256;
    return std::make_unique<DuoAttention>(std::move(pattern));
  };
}

}  // namespace

/// DuoAttention (arXiv 2410.10819): retrieval heads keep every row, streaming heads the first
/// `sink_size` positions and the last `recent_size`. A learned and published pattern (layer, KV
/// head) has each head's share of full attention. The round(heads * ratio) heads with the smallest
/// shares stream. Equal shares are ordered by (layer, head); kvpress leaves their order to numpy's
/// sort.
///
/// With `texts` instead of a pattern, the scores of MeanAttention replace the shares. They come
/// from running some texts. Streaming heads then have 128 and 256 positions. This is kvpress'
/// on_the_fly_scoring, which the paper does not have. kvpress uses 50 chapters of BookSum; here the
/// user supplies the texts. As in kvpress, all tokens of a text and all layers in use count.
///
/// Scores (head, row) are 1 for rows that stay and 0 for others. The paper splits heads at a share
/// of 0.5 or by a quantile; kvpress and this policy stream a fixed number of them. Cost: a pass
/// over positions; with texts, a prefill of each text before.
PolicyInfo duo_attention() {
  PolicyInfo info;
  info.name = "duo-attention";
  info.paper = "DuoAttention, arXiv 2410.10819";
  info.formula = "1 in retrieval heads and for sinks and recent rows of streaming heads, else 0";
  info.needs = "positions; a pattern of heads, or texts to find it";
  info.cost = "O(rows); with texts, a prefill of each before the context's";
  info.has_own_budget = true;
  info.set_up_with<DuoParameters>(set_up_duo_attention);
  return info;
}

}  // namespace kvzap::policy
