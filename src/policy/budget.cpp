#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/budget.hpp>
#include <limits>
#include <numeric>

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "cache/agree_on_memory.hpp"
#include "files/counted.hpp"
#include "policy/composite.hpp"
#include "policy/divided_groups.hpp"
#include "policy/segments.hpp"

namespace kvzap {
namespace {

using cache::agree_on_memory;
using files::counted;
using policy::judge;
using policy::Segment;
using policy::select_alone;

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// Rounds as Python's int(n * (1 - ratio)), so that counts equal those of kvpress.
std::int64_t kept_share(std::int64_t n, double ratio) {
  return static_cast<std::int64_t>(static_cast<double>(n) * (1 - ratio));
}

// Keeps at least one row, unless there is none.
std::int64_t at_least_one(std::int64_t kept, std::int64_t n) {
  return std::min(n, std::max<std::int64_t>(1, kept));
}

std::int64_t rows_of_bytes(const Budget& budget, const Budget::Model& model) {
  return budget.bytes / model.row_bytes;
}

std::int64_t heads_of(const Budget::Model& model) {
  return static_cast<std::int64_t>(model.layers) * model.kv_heads;
}

// Rows of a head that the amount alone implies. For `pyramid`, which rounds later, it may be a
// fraction.
double mean_rows(const Budget& budget, const Budget::Model& model, int layer, std::int64_t tokens) {
  const auto n = static_cast<double>(tokens);
  switch (budget.amount) {
    case Budget::Amount::none:
      return n;
    case Budget::Amount::evict_ratio:
      return n * (1 - budget.ratio_of(layer));
    case Budget::Amount::keep_tokens:
      return static_cast<double>(std::min(tokens, budget.keep_tokens));
    case Budget::Amount::bytes: {
      const std::int64_t rows = rows_of_bytes(budget, model) / heads_of(model);
      if (rows < 1) {
        throw Error(fmt::format(
            "the budget of {} is below the minimum, {}: a row of {} in each of {} of {}",
            counted(budget.bytes, "byte"), heads_of(model) * model.row_bytes,
            counted(model.row_bytes, "byte"), counted(model.kv_heads, "head"),
            counted(model.layers, "layer")));
      }
      return static_cast<double>(std::min(tokens, rows));
    }
  }
  return n;
}

// See policy::pyramid.
std::int64_t pyramid_rows(const Budget& budget, const Budget::Model& model, int layer,
                          std::int64_t tokens) {
  const double mean = mean_rows(budget, model, layer, tokens);
  const auto round = [&](double rows) {
    // Rounds to even, as Python does. A size in bytes must not be exceeded.
    const double whole =
        budget.amount == Budget::Amount::bytes ? std::floor(rows) : std::nearbyint(rows);
    return at_least_one(static_cast<std::int64_t>(whole), tokens);
  };
  const auto n = static_cast<double>(tokens);
  const auto window = static_cast<double>(budget.pyramid_window);
  const double capacity = window + mean;
  double least = (capacity - window) / budget.pyramid_beta;
  double most = (capacity - window) * 2 - least;
  if (most >= n - window) {
    most = n - window;
    least = (capacity - window) * 2 - most;
  }
  if (!(n >= most && most >= least && least >= window)) return round(mean);
  const double step = model.layers > 1 ? (most - least) / (model.layers - 1) : 0;
  return round(most - model.place_of(layer) * step);
}

// Rows that a pool of `pool_rows` rows keeps, as a fraction of its own size.
std::int64_t kept_of_pool(const Budget& budget, int layer, std::int64_t pool_rows) {
  const double evicted = static_cast<double>(pool_rows) * budget.ratio_of(layer);
  return pool_rows - static_cast<std::int64_t>(evicted);
}

// Number of groups to keep if the rows of a group stay or are evicted together.
std::int64_t groups_kept(const Budget& budget, const Budget::Model& model, int layer,
                         std::int64_t tokens) {
  const std::int64_t groups = (tokens + budget.group - 1) / budget.group;
  if (budget.amount == Budget::Amount::evict_ratio && !budget.pyramid) {
    return at_least_one(kept_share(groups, budget.ratio_of(layer)), groups);
  }
  const std::int64_t rows =
      budget.pyramid ? pyramid_rows(budget, model, layer, tokens)
                     : static_cast<std::int64_t>(mean_rows(budget, model, layer, tokens));
  if (rows >= tokens) return groups;
  if (rows < budget.group && !budget.pyramid) {
    const bool in_bytes = budget.amount == Budget::Amount::bytes;
    throw Error(fmt::format(
        "the budget of {} is below the minimum, {}: rows are kept or evicted in groups of {}",
        in_bytes ? counted(budget.bytes, "byte") : counted(rows, "token"),
        in_bytes ? budget.group * heads_of(model) * model.row_bytes : budget.group, budget.group));
  }
  return at_least_one(rows / budget.group, groups);
}

void check(const Budget& budget) {
  const bool competes = budget.pool != Budget::Pool::head;
  if (!budget.has_amount()) throw Error("budget: it has no amount");
  if (competes && (budget.chunk != 0 || budget.group != 0)) {
    throw Error("budget: heads cannot compete where parts of the sequence have their own budgets");
  }
  if (budget.chunk != 0 && budget.group != 0) {
    throw Error("budget: groups cannot compete within parts of the sequence");
  }
  if (!budget.by_layer() && (budget.pyramid || !budget.layer_ratios.empty())) {
    throw Error("budget: layers that compete cannot have budgets of their own");
  }
  if (budget.is_composite && budget.pool != Budget::Pool::model) {
    throw Error("budget: composite tokens compete over all layers");
  }
  if (budget.head_ratios &&
      (competes || budget.amount != Budget::Amount::evict_ratio || !budget.layer_ratios.empty() ||
       budget.pyramid || budget.chunk != 0 || budget.group != 0)) {
    throw Error("budget: heads with evict ratios of their own cannot share another budget");
  }
}

Segment segment_of(const ScoredLayer& layer, int head, std::int64_t begin, std::int64_t end) {
  Segment segment;
  segment.rows = end - begin;
  segment.stride = static_cast<std::int64_t>(layer.scores.stride(1));
  if (segment.rows == 0) return segment;
  const auto head_offset = static_cast<std::int64_t>(layer.scores.stride(0)) * head;
  segment.scores = layer.scores.data() + head_offset + begin * segment.stride;
  segment.keep = layer.keep.data() + static_cast<std::int64_t>(layer.keep.stride(0)) * head + begin;
  return segment;
}

// (head of the model): rows that stay.
std::vector<std::int64_t> rows_by_head(const Budget& budget, const Budget::Model& model, int layer,
                                       std::int64_t tokens) {
  const std::int64_t rows = budget.rows_per_head(model, layer, tokens);
  if (budget.head_ratios) return budget.head_ratios->rows(budget.evict_ratio, layer, tokens);
  return std::vector<std::int64_t>(static_cast<std::size_t>(model.kv_heads), rows);
}

// Rows of a head, and how many of them stay.
struct Part {
  std::int64_t begin, end, keep;
};

// The parts of a head of `rows` rows, each with its own budget.
std::vector<Part> parts_of(const Budget& budget, const Budget::Model& model, int layer,
                           std::int64_t tokens, std::int64_t rows) {
  std::vector<Part> parts;
  for (std::int64_t begin = 0; begin < rows; begin += budget.chunk) {
    const std::int64_t end = std::min(rows, begin + budget.chunk);
    parts.push_back({begin, end, budget.rows_of_part(model, layer, tokens, rows, begin, end)});
  }
  return parts;
}

// The parts of a head of which `keep` rows stay: sinks and window, oldest first, then the best of
// the others.
std::vector<Part> protected_parts(const HeadRatios& ratios, std::int64_t rows, std::int64_t keep) {
  const std::int64_t sink = std::min(ratios.sink, rows);
  const std::int64_t window = std::max(sink, rows - ratios.window);
  const std::int64_t first = std::min(sink, keep);
  const std::int64_t last = std::min(rows - window, keep - first);
  return {{0, first, first},
          {first, sink, 0},
          {sink, window, keep - first - last},
          {window, window + last, last},
          {window + last, rows, 0}};
}

// Chooses rows in every head, or in every part of a head, by itself.
void choose_by_head(const ExecutionSpace& exec, const Budget& budget, const Budget::Model& model,
                    std::int64_t tokens, const std::vector<ScoredLayer>& layers) {
  std::vector<Segment> segments;
  std::vector<std::int64_t> keep;
  for (const ScoredLayer& layer : layers) {
    const std::vector<std::int64_t> rows_of_heads =
        rows_by_head(budget, model, layer.layer, tokens);
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      const std::int64_t rows = layer.rows[h];
      const std::int64_t kept =
          std::min(rows, rows_of_heads.at(static_cast<std::size_t>(layer.heads[h])));
      std::vector<Part> parts = {{0, rows, kept}};
      if (budget.chunk != 0) parts = parts_of(budget, model, layer.layer, tokens, rows);
      if (budget.head_ratios) parts = protected_parts(*budget.head_ratios, rows, kept);
      for (const Part& part : parts) {
        if (part.end == part.begin) continue;
        segments.push_back(segment_of(layer, static_cast<int>(h), part.begin, part.end));
        keep.push_back(part.keep);
      }
    }
  }
  select_alone(exec, keep, segments);
  judge(exec, segments);
}

// Lets safe rows count as larger than all others: the segments become a copy of the scores that has
// infinity for them. Returns the memory of the copy.
Kokkos::View<float*, MemorySpace> mark_safe(const ExecutionSpace& exec, std::int64_t all_rows,
                                            const std::vector<std::int64_t>& safe,
                                            std::vector<Segment>& segments) {
  base::before_allocation(static_cast<std::size_t>(all_rows) * sizeof(float));
  Kokkos::View<float*, MemorySpace> marked(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::budget::marked"), all_rows);
  std::vector<Segment> marking = segments;
  select_alone(exec, safe, marking);
  float* target = marked.data();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    marking[i].keep = nullptr;
    marking[i].marked = target;
    marking[i].mark = std::numeric_limits<float>::infinity();
    segments[i].scores = target;
    segments[i].stride = 1;
    target += segments[i].rows;
  }
  judge(exec, marking);
  return marked;
}

// Chooses rows when the heads of a layer, or of the model, compete.
void choose_by_pool(const ExecutionSpace& exec, const Communicator& comm, const Budget& budget,
                    const Budget::Model& model, std::int64_t tokens,
                    const std::vector<ScoredLayer>& layers) {
  const bool by_layer = budget.by_layer();
  std::vector<std::int64_t> rows_of_pool, keep;
  std::vector<Segment> segments;
  std::vector<std::int64_t> pools, orders, safe;
  Kokkos::View<float*, MemorySpace> marked;
  agree_on_memory(comm, [&] {
    rows_of_pool.assign(by_layer ? layers.size() : 1, 0);
    keep.reserve(rows_of_pool.size());
    std::int64_t all_rows = 0;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const ScoredLayer& layer = layers[l];
      const std::int64_t rows_per_head = budget.rows_per_head(model, layer.layer, tokens);
      for (std::size_t h = 0; h < layer.heads.size(); ++h) {
        const std::int64_t rows = layer.rows[h];
        segments.push_back(segment_of(layer, static_cast<int>(h), 0, rows));
        pools.push_back(by_layer ? static_cast<std::int64_t>(l) : 0);
        orders.push_back(static_cast<std::int64_t>(layer.layer) * model.kv_heads + layer.heads[h]);
        safe.push_back(std::min(rows, budget.safe_rows(rows_per_head)));
        rows_of_pool[static_cast<std::size_t>(pools.back())] += rows;
        all_rows += rows;
      }
    }
    if (budget.safeguard > 0) marked = mark_safe(exec, all_rows, safe, segments);
  });
  comm.all_reduce_sum(rows_of_pool.data(), rows_of_pool.size());

  for (std::size_t pool = 0; pool < rows_of_pool.size(); ++pool) {
    const int layer = by_layer ? layers[pool].layer : 0;
    const std::int64_t heads = by_layer ? model.kv_heads : heads_of(model);
    std::int64_t rows = heads * budget.rows_per_head(model, layer, tokens);
    if (budget.counts_pools && budget.amount == Budget::Amount::evict_ratio) {
      rows = kept_of_pool(budget, layer, heads * tokens);
    } else if (!by_layer && budget.amount == Budget::Amount::bytes) {
      rows = rows_of_bytes(budget, model);
    }
    keep.push_back(std::min(rows, rows_of_pool[pool]));
  }
  policy::select(exec, comm, pools, orders, keep, segments);
  agree_on_memory(comm, [&] { judge(exec, segments); });
}

// Chooses rows whose places in the order of their heads compete, so that all heads of a layer keep
// the same number.
void choose_composite(const ExecutionSpace& exec, const Communicator& comm, const Budget& budget,
                      const Budget::Model& model, std::int64_t tokens,
                      const std::vector<ScoredLayer>& layers) {
  std::vector<policy::CompositeScores> scores;
  std::int64_t keep = 0;
  for (const ScoredLayer& layer : layers) {
    scores.push_back(policy::composite_scores(exec, comm, layer, model.kv_heads));
    keep += budget.rows_per_head(model, layer.layer, tokens);
  }
  const bool by_ratio = budget.amount == Budget::Amount::evict_ratio;
  if (by_ratio) {
    const std::int64_t all = model.layers * tokens;
    keep = at_least_one(kept_share(all, budget.evict_ratio), all);
  } else if (budget.amount == Budget::Amount::bytes) {
    keep = rows_of_bytes(budget, model) / model.kv_heads;
  }
  agree_on_memory(comm, [&] {
    const std::vector<std::int64_t> rows_of_layers =
        policy::composite_rows(std::move(scores), keep, !by_ratio);
    std::vector<Segment> segments;
    std::vector<std::int64_t> kept;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
        segments.push_back(segment_of(layers[l], static_cast<int>(h), 0, layers[l].rows[h]));
        kept.push_back(std::min(layers[l].rows[h], rows_of_layers[l]));
      }
    }
    select_alone(exec, kept, segments);
    judge(exec, segments);
  });
}

using Sums = Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace>;

// sums(head on this rank, group) = sum of the scores of the group's rows.
void sum_groups(const ExecutionSpace& exec, const ScoredLayer& layer, std::int64_t group,
                const Kokkos::View<const std::int64_t*, MemorySpace>& rows, const Sums& sums) {
  const auto scores = layer.scores;
  const auto groups = static_cast<std::int64_t>(sums.extent(1));
  Kokkos::parallel_for(
      "kvzap::budget::sum_groups",
      Range(exec, 0, static_cast<std::int64_t>(sums.extent(0)) * groups),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / groups, begin = i % groups * group;
        const std::int64_t end = begin + group < rows(head) ? begin + group : rows(head);
        double sum = 0;
        for (std::int64_t row = begin; row < end; ++row) sum += scores(head, row);
        sums(head, i % groups) = sum;
      });
}

void keep_groups(const ExecutionSpace& exec, const ScoredLayer& layer, std::int64_t group,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& rows, std::int64_t most_rows,
                 const Kokkos::View<const std::uint8_t*, MemorySpace>& flags) {
  const auto keep = layer.keep;
  Kokkos::parallel_for(
      "kvzap::budget::keep_groups",
      Range(exec, 0, static_cast<std::int64_t>(layer.heads.size()) * most_rows),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / most_rows, row = i % most_rows;
        if (row < rows(head)) keep(head, row) = flags(row / group);
      });
}

/// Returns the sums of the scores of each group's rows: (head of the model, group), 0 for heads of
/// other ranks.
std::vector<double> sums_by_head(const ExecutionSpace& exec, const ScoredLayer& layer,
                                 std::int64_t group, int kv_heads, std::int64_t groups,
                                 const Kokkos::View<const std::int64_t*, MemorySpace>& rows) {
  const auto n_heads = layer.heads.size();
  const Sums sums(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::budget::sums"), n_heads,
                  groups);
  sum_groups(exec, layer, group, rows, sums);
  const auto host_sums = Kokkos::create_mirror_view(sums);
  Kokkos::deep_copy(exec, host_sums, sums);
  base::fence(exec, "kvzap::budget: ranks exchange sums of groups");
  std::vector<double> of_heads(static_cast<std::size_t>(kv_heads * groups), 0.0);
  for (std::size_t h = 0; h < n_heads; ++h) {
    for (std::int64_t g = 0; g < groups; ++g) {
      of_heads[static_cast<std::size_t>(layer.heads[h] * groups + g)] = host_sums(h, g);
    }
  }
  return of_heads;
}

/// Returns the groups that stay: the `kept` with the largest means, and those without a finite one.
std::vector<std::uint8_t> largest_groups(const std::vector<double>& sums, std::int64_t group,
                                         std::int64_t rows, std::int64_t kept) {
  struct Group {
    double score;
    std::int64_t index;
  };
  std::vector<Group> order;
  for (std::int64_t g = 0; g < static_cast<std::int64_t>(sums.size()); ++g) {
    const std::int64_t length = std::min(group, rows - g * group);
    order.push_back({sums[static_cast<std::size_t>(g)] / static_cast<double>(length), g});
  }
  std::sort(order.begin(), order.end(), [](const Group& a, const Group& b) {
    const bool a_is_finite = std::isfinite(a.score), b_is_finite = std::isfinite(b.score);
    if (a_is_finite != b_is_finite) return b_is_finite;
    return a_is_finite && a.score != b.score ? a.score > b.score : a.index < b.index;
  });
  std::vector<std::uint8_t> stays(sums.size(), 0);
  for (std::int64_t k = 0; k < static_cast<std::int64_t>(order.size()); ++k) {
    const Group& one = order[static_cast<std::size_t>(k)];
    stays[static_cast<std::size_t>(one.index)] = k < kept || !std::isfinite(one.score) ? 1 : 0;
  }
  return stays;
}

// Chooses groups of rows of a layer, or rows of them, the same in all heads.
void choose_groups(const ExecutionSpace& exec, const Communicator& comm, const Budget& budget,
                   const Budget::Model& model, std::int64_t tokens, const ScoredLayer& layer) {
  std::int64_t most_rows = 0;
  for (const std::int64_t rows : layer.rows) most_rows = std::max(most_rows, rows);
  most_rows = comm.all_reduce_max(most_rows);
  if (most_rows < budget.group && budget.spiky == 0) {
    Budget plain = budget;
    plain.group = 0;
    return choose_by_head(exec, plain, model, tokens, {layer});
  }
  const std::int64_t group = budget.spiky > 0 ? 1 : budget.group;  // rows with one verdict
  const std::int64_t groups = (most_rows + group - 1) / group;
  Kokkos::View<std::int64_t*, MemorySpace> rows;
  std::vector<double> of_heads, sums;
  agree_on_memory(comm, [&] {
    rows = decltype(rows)(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::budget::rows"),
                          layer.heads.size());
    const auto host_rows = Kokkos::create_mirror_view(rows);
    std::copy(layer.rows.begin(), layer.rows.end(), host_rows.data());
    Kokkos::deep_copy(exec, rows, host_rows);
    of_heads = sums_by_head(exec, layer, group, model.kv_heads, groups, rows);
    sums.assign(static_cast<std::size_t>(groups), 0.0);
  });
  // Ranks exchange each head's sums, so that every rank adds them in the same order.
  comm.all_reduce_sum(of_heads.data(), of_heads.size());
  for (std::size_t i = 0; i < of_heads.size(); ++i) sums[i % sums.size()] += of_heads[i];
  agree_on_memory(comm, [&] {
    const std::vector<std::uint8_t> stays =
        budget.spiky > 0
            ? policy::divided_groups(sums, {budget.group, budget.spiky},
                                     budget.rows_per_head(model, layer.layer, tokens))
            : largest_groups(sums, group, most_rows,
                             std::min(groups, groups_kept(budget, model, layer.layer, tokens)));
    const Kokkos::View<std::uint8_t*, MemorySpace> flags("kvzap::budget::flags", groups);
    const auto host_flags = Kokkos::create_mirror_view(flags);
    std::copy(stays.begin(), stays.end(), host_flags.data());
    Kokkos::deep_copy(exec, flags, host_flags);
    keep_groups(exec, layer, group, rows, most_rows, flags);
    base::fence(exec, "kvzap::budget: verdicts are there");
  });
}

void check_layer(const ScoredLayer& layer) {
  const std::size_t heads = layer.heads.size();
  std::int64_t most_rows = 0;
  for (const std::int64_t rows : layer.rows) most_rows = std::max(most_rows, rows);
  const auto fits = [&](const auto& view) {
    return view.extent(0) >= heads && static_cast<std::int64_t>(view.extent(1)) >= most_rows;
  };
  if (layer.rows.size() != heads || !fits(layer.scores) || !fits(layer.keep)) {
    throw Error(
        fmt::format("budget: layer {} has {} heads of up to {} rows; scores are ({}, {}), "
                    "verdicts ({}, {})",
                    layer.layer, heads, most_rows, layer.scores.extent(0), layer.scores.extent(1),
                    layer.keep.extent(0), layer.keep.extent(1)));
  }
  if (most_rows > std::numeric_limits<std::int32_t>::max()) throw Error("budget: too many rows");
}

}  // namespace

int Budget::Model::place_of(int layer) const {
  if (pruned.empty()) return layer;
  return static_cast<int>(std::lower_bound(pruned.begin(), pruned.end(), layer) - pruned.begin());
}

std::string Budget::text() const {
  switch (amount) {
    case Amount::none:
      return "own";
    case Amount::evict_ratio:
      return fmt::format("evict ratio {:g}", evict_ratio);
    case Amount::keep_tokens:
      return fmt::format("{} tokens", keep_tokens);
    case Amount::bytes:
      return fmt::format("{} bytes", bytes);
  }
  return "unknown";
}

double Budget::ratio_of(int layer) const {
  if (head_ratios) {
    const std::vector<float> ratios = head_ratios->of_layer(evict_ratio, layer);
    return std::accumulate(ratios.begin(), ratios.end(), 0.0) / static_cast<double>(ratios.size());
  }
  return layer_ratios.empty() ? evict_ratio : layer_ratios.at(static_cast<std::size_t>(layer));
}

std::int64_t Budget::rows_per_head(const Model& model, int layer, std::int64_t tokens) const {
  if (tokens <= 0) return 0;
  if (head_ratios) {
    if (head_ratios->heads != model.kv_heads) {
      throw Error(fmt::format("budget: there are evict ratios of {} heads; the model has {}",
                              head_ratios->heads, model.kv_heads));
    }
    const std::vector<std::int64_t> rows = head_ratios->rows(evict_ratio, layer, tokens);
    return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) / model.kv_heads;
  }
  if (group != 0 && spiky == 0 && tokens >= group) {
    return std::min(tokens, groups_kept(*this, model, layer, tokens) * group);
  }
  if (pyramid) return pyramid_rows(*this, model, layer, tokens);
  if (amount == Amount::evict_ratio && chunk != 0) {
    const double ratio = ratio_of(layer);
    const std::int64_t last = tokens % chunk;
    return tokens / chunk * at_least_one(kept_share(chunk, ratio), chunk) +
           at_least_one(kept_share(last, ratio), last);
  }
  if (amount == Amount::evict_ratio && pool != Pool::head && counts_pools) {
    const std::int64_t heads = by_layer() ? model.kv_heads : heads_of(model);
    return kept_of_pool(*this, layer, heads * tokens) / heads;
  }
  const auto rows = static_cast<std::int64_t>(mean_rows(*this, model, layer, tokens));
  return at_least_one(rows, tokens);
}

std::int64_t Budget::rows_of_part(const Model& model, int layer, std::int64_t tokens,
                                  std::int64_t rows, std::int64_t begin, std::int64_t end) const {
  if (rows <= 0 || end <= begin) return 0;
  if (rows == tokens && amount == Amount::evict_ratio && !pyramid) {
    return at_least_one(kept_share(end - begin, ratio_of(layer)), end - begin);
  }
  // Splits the rows that the head keeps evenly over its parts.
  const std::int64_t kept = std::min(rows, rows_per_head(model, layer, tokens));
  return kept * end / rows - kept * begin / rows;
}

std::int64_t Budget::safe_rows(std::int64_t rows) const {
  if (safeguard <= 0) return 0;
  return at_least_one(static_cast<std::int64_t>(static_cast<double>(rows) * safeguard), rows);
}

void Budget::choose(const ExecutionSpace& exec, const Communicator& comm, const Model& model,
                    std::int64_t tokens, const std::vector<ScoredLayer>& layers) const {
  check(*this);
  for (const ScoredLayer& layer : layers) check_layer(layer);
  if (group != 0) {
    for (const ScoredLayer& layer : layers) {
      choose_groups(exec, comm, *this, model, tokens, layer);
    }
  } else if (is_composite) {
    choose_composite(exec, comm, *this, model, tokens, layers);
  } else if (pool == Pool::head) {
    choose_by_head(exec, *this, model, tokens, layers);
  } else {
    choose_by_pool(exec, comm, *this, model, tokens, layers);
  }
}

}  // namespace kvzap
