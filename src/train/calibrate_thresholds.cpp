#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvzap/lab/calibrate_thresholds.hpp>
#include <limits>
#include <numeric>
#include <utility>

#include "model/cache_layers.hpp"

namespace kvzap {
namespace {

// Floats numbered in ascending order, so that a search can halve any range of them.
std::uint32_t place_of_float(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

float float_at_place(std::uint32_t place) {
  const std::uint32_t bits = (place & 0x80000000u) != 0 ? place & 0x7fffffffu : ~place;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Collects the scores of one text's pairs that the smallest window leaves to judge. The pairs of a
// larger window are the first of these in each head.
class JudgedScores final : public StepObserver {
 public:
  JudgedScores(const JudgedPairs& judged, const HeadPartition& partition, int rank)
      : m_judged(judged) {
    for (int l = 0; l < partition.n_layers(); ++l) {
      m_firsts.push_back(m_n_heads);
      m_n_heads += partition.heads(l, rank).size();
    }
  }

  void begin_text(std::int64_t tokens) {
    m_ends.clear();
    for (const int window : m_judged.windows) m_ends.push_back(tokens - window);
    m_scores.assign(m_n_heads, {});
    m_counts.assign(m_judged.windows.size(), std::vector<std::size_t>(m_n_heads, 0));
  }
  // The scores that this one of the windows leaves to judge.
  EvictRatioCurves::ScoresOfHeads of_window(std::size_t window) const {
    EvictRatioCurves::ScoresOfHeads first(m_n_heads);
    for (std::size_t head = 0; head < m_n_heads; ++head) {
      const auto begin = m_scores[head].begin();
      first[head].assign(begin, begin + static_cast<std::ptrdiff_t>(m_counts[window][head]));
    }
    return first;
  }
  std::int64_t non_finite() const { return m_non_finite; }

  void scores(SequenceId /*sequence*/, int layer, std::int64_t first,
              const ScoresView& scores) override {
    const std::int64_t begin = std::max<std::int64_t>(0, m_judged.sink - first);
    const std::int64_t last = *std::max_element(m_ends.begin(), m_ends.end());
    const std::int64_t end = std::min(static_cast<std::int64_t>(scores.extent(1)), last - first);
    if (begin >= end) return;
    // Copies between memory spaces need contiguous views, so the rows are packed first.
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> packed(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::calibrate::scores"),
        scores.extent(0), scores.extent(1));
    Kokkos::deep_copy(packed, scores);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), packed);
    for (std::size_t head = 0; head < host.extent(0); ++head) {
      for (std::int64_t t = begin; t < end; ++t) {
        const float score = host(head, t);
        if (!std::isfinite(score)) {
          ++m_non_finite;
          continue;
        }
        const std::size_t place = m_firsts[layer] + head;
        m_scores[place].push_back(score);
        for (std::size_t w = 0; w < m_ends.size(); ++w) {
          if (first + t < m_ends[w]) ++m_counts[w][place];
        }
      }
    }
  }

 private:
  JudgedPairs m_judged;
  std::vector<std::size_t> m_firsts;  // (layer): its first head
  std::size_t m_n_heads = 0;
  std::vector<std::int64_t> m_ends;  // (window): the first position that it keeps
  EvictRatioCurves::ScoresOfHeads m_scores;
  std::vector<std::vector<std::size_t>> m_counts;  // [window][head]: of its scores
  std::int64_t m_non_finite = 0;
};

}  // namespace

EvictRatioCurves::EvictRatioCurves(std::int64_t pairs_per_token, const Communicator& comm,
                                   std::int64_t most_scores)
    : m_pairs_per_token(pairs_per_token),
      m_comm(comm),
      m_most_scores(std::max<std::int64_t>(2, most_scores)) {}

// Rank, among all scores of the head, of the i-th kept score.
std::int64_t EvictRatioCurves::Head::rank_of(std::size_t i) const {
  const auto kept = static_cast<std::int64_t>(scores.size());
  if (kept == count) return static_cast<std::int64_t>(i);
  // Always keeps the first and the last score. The product may not fit 64 bits, so it is split.
  const std::int64_t steps = kept - 1, last = count - 1, place = static_cast<std::int64_t>(i);
  return place * (last / steps) + place * (last % steps) / steps;
}

void EvictRatioCurves::add_text(std::int64_t tokens, ScoresOfHeads scores) {
  if (tokens < 1) throw Error("thresholds: a text has no tokens");
  Text text;
  text.tokens = tokens;
  for (std::vector<float>& own : scores) {
    Head& head = text.heads.emplace_back();
    head.count = static_cast<std::int64_t>(own.size());
    std::sort(own.begin(), own.end());
    if (head.count <= m_most_scores) {
      own.shrink_to_fit();
      head.scores = std::move(own);
    } else {
      head.scores.resize(static_cast<std::size_t>(m_most_scores));
      for (std::size_t i = 0; i < head.scores.size(); ++i) head.scores[i] = own[head.rank_of(i)];
    }
  }
  m_texts.push_back(std::move(text));
}

std::int64_t EvictRatioCurves::tokens() const {
  std::int64_t sum = 0;
  for (const Text& text : m_texts) sum += text.tokens;
  return sum;
}

// Number of the head's scores below the threshold.
std::int64_t EvictRatioCurves::Head::below(float threshold) const {
  const auto found = std::lower_bound(scores.begin(), scores.end(), threshold);
  if (found == scores.end()) return count;
  const auto i = static_cast<std::size_t>(found - scores.begin());
  if (i == 0) return 0;
  // Here scores[i - 1] < threshold <= scores[i]. Scores in between are assumed to be evenly spread.
  const std::int64_t before = rank_of(i - 1) + 1;
  const std::int64_t between = rank_of(i) - before;
  if (between == 0) return before;
  const double low = scores[i - 1], high = scores[i];
  return before +
         static_cast<std::int64_t>(static_cast<double>(between) * (threshold - low) / (high - low));
}

// Evicted pairs of each text over all ranks. The sums of whole numbers are the same on every rank.
std::vector<std::int64_t> EvictRatioCurves::evicted(float threshold) const {
  std::vector<std::int64_t> counts;
  counts.reserve(m_texts.size());
  for (const Text& text : m_texts) {
    counts.push_back(0);
    for (const Head& head : text.heads) counts.back() += head.below(threshold);
  }
  m_comm.all_reduce_sum(counts.data(), counts.size());
  return counts;
}

std::vector<double> EvictRatioCurves::evict_ratios(float threshold) const {
  const std::vector<std::int64_t> counts = evicted(threshold);
  std::vector<double> ratios;
  ratios.reserve(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    ratios.push_back(static_cast<double>(counts[i]) / (static_cast<double>(m_pairs_per_token) *
                                                       static_cast<double>(m_texts[i].tokens)));
  }
  return ratios;
}

std::vector<std::vector<std::int64_t>> EvictRatioCurves::kept_rows(const HeadPartition& partition,
                                                                   float threshold) const {
  const int heads = partition.n_kv_heads();
  std::vector<std::int64_t> evicted(static_cast<std::size_t>(partition.n_layers()) * heads, 0);
  std::size_t next = 0;
  for (int l = 0; l < partition.n_layers(); ++l) {
    for (const int head : partition.heads(l, m_comm.rank())) {
      for (const Text& text : m_texts) {
        evicted[l * heads + head] += text.heads.at(next).below(threshold);
      }
      ++next;
    }
  }
  m_comm.all_reduce_sum(evicted.data(), evicted.size());
  std::vector<std::vector<std::int64_t>> kept(partition.n_layers());
  for (std::size_t i = 0; i < evicted.size(); ++i) {
    kept[i / heads].push_back(tokens() - evicted[i]);
  }
  return kept;
}

double EvictRatioCurves::mean(float threshold) const { return mean_of(evict_ratios(threshold)); }

double EvictRatioCurves::largest() const { return mean(std::numeric_limits<float>::infinity()); }

ThresholdTable::Row EvictRatioCurves::row(double evict_ratio) const {
  if (m_texts.empty()) throw AgreedError("thresholds: there are no texts");
  if (!(evict_ratio > 0 && evict_ratio < 1)) {
    throw AgreedError(
        fmt::format("evict ratio {}: expected a number above 0 and below 1", evict_ratio));
  }
  constexpr float last = std::numeric_limits<float>::max();
  const std::uint32_t lowest = place_of_float(-last), highest = place_of_float(last);
  const auto mean_at = [&](std::uint32_t place) { return mean(float_at_place(place)); };
  // Binary search for the lowest position where `reached` is true. All higher positions must be
  // true too.
  const auto first_where = [&](const auto& reached) {
    std::uint32_t low = lowest, high = highest;
    while (low < high) {
      const std::uint32_t middle = low + (high - low) / 2;
      if (reached(mean_at(middle))) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  };
  if (evict_ratio > mean_at(highest)) {
    throw AgreedError(fmt::format(
        "an evict ratio of {} cannot be reached: {:.4f} is the largest on these texts, as windows "
        "and sinks stay; give a smaller ratio, longer texts or a smaller window",
        evict_ratio, largest()));
  }
  std::uint32_t low = first_where([&](double mean) { return mean >= evict_ratio; });
  double reached = mean_at(low);
  if (low > lowest && evict_ratio - mean_at(low - 1) < reached - evict_ratio) {
    reached = mean_at(low - 1);
    low = first_where([&](double mean) { return mean >= reached; });
  }
  // Takes the middle of all thresholds that evict the same pairs. Scores that differ in their last
  // bits, for example between numbers of ranks, are then judged alike.
  const std::uint32_t above = first_where([&](double mean) { return mean > reached; });
  const std::uint32_t high = mean_at(above) > reached ? above - 1 : highest;
  ThresholdTable::Row row;
  row.evict_ratio = evict_ratio;
  if (low == lowest || high == highest) {
    row.threshold = float_at_place(low == lowest ? high : low);
  } else {
    row.threshold = static_cast<float>(0.5 * (static_cast<double>(float_at_place(low)) +
                                              static_cast<double>(float_at_place(high))));
  }
  const std::vector<double> ratios = evict_ratios(static_cast<float>(row.threshold));
  row.mean = mean_of(ratios);
  double squares = 0;
  for (const double ratio : ratios) squares += (ratio - row.mean) * (ratio - row.mean);
  if (ratios.size() > 1)
    row.deviation = std::sqrt(squares / static_cast<double>(ratios.size() - 1));
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  row.least = *least;
  row.most = *most;
  return row;
}

ScoredTexts score_texts(const std::shared_ptr<const Model>& model,
                        const std::shared_ptr<Scorer>& scorer,
                        const std::vector<std::vector<TokenId>>& texts, const JudgedPairs& judged,
                        const Communicator& comm, const ProgressCallback& progress) {
  std::int64_t tokens = 0;
  for (const auto& text : texts) {
    if (text.empty()) throw Error("thresholds: a text has no tokens");
    tokens += static_cast<std::int64_t>(text.size());
  }
  if (judged.windows.empty()) throw Error("thresholds: there are no windows");
  // Pairs are evicted as they leave the ring: at most one layer's pairs exist at a time.
  CacheOptions options;
  options.pruning.mode = PruneMode::prefill;
  options.pruning.window = 1;
  options.pruning.threshold(std::numeric_limits<double>::infinity());
  const auto engine = Engine::create(model, scorer, options, comm);
  JudgedScores observer(judged, model->partition(), comm.rank());
  engine->set_observer(&observer);

  const ModelConfig& config = engine->config();
  ScoredTexts scored;
  for (std::size_t w = 0; w < judged.windows.size(); ++w) {
    scored.curves.emplace_back(model::full_layers(config) * config.num_key_value_heads, comm);
  }
  std::int64_t before = 0;
  for (const auto& text : texts) {
    const auto count = static_cast<std::int64_t>(text.size());
    const auto of_text = [&](std::string_view /*what*/, std::int64_t done, std::int64_t total) {
      if (progress) progress("texts", before + count * done / total, tokens);
    };
    observer.begin_text(count);
    const SequenceId sequence = engine->add_sequence();
    engine->step(StepBatch(sequence, text, engine->rule(StepPart::context), StepOutput::none),
                 of_text);
    engine->free_sequence(sequence);
    for (std::size_t w = 0; w < scored.curves.size(); ++w) {
      scored.curves[w].add_text(count, observer.of_window(w));
    }
    before += count;
  }
  scored.non_finite_scores = comm.all_reduce_sum(observer.non_finite());
  return scored;
}

}  // namespace kvzap
