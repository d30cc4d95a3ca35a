#include "io/snapshot_describe.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "files/temporary_file.hpp"
#include "parallel/message.hpp"

namespace kvzap::io {
namespace {

void check_partition(const KVCache& cache, SequenceId sequence, const HeadPartition& partition,
                     const Communicator& comm) {
  const CacheShape& shape = cache.shape();
  if (partition.n_ranks() != comm.size()) {
    throw Error(fmt::format("the partition is for {} ranks; expected {}", partition.n_ranks(),
                            comm.size()));
  }
  if (partition.n_layers() != static_cast<int>(shape.heads.size())) {
    throw Error(fmt::format("the partition has {} layers; the cache has {}", partition.n_layers(),
                            shape.heads.size()));
  }
  for (int layer = 0; layer < partition.n_layers(); ++layer) {
    const std::size_t heads = partition.heads(layer, comm.rank()).size();
    if (heads * parts_of_head(shape, partition, layer, comm.rank()) !=
        static_cast<std::size_t>(shape.heads[layer])) {
      throw Error(fmt::format("layer {}: the partition gives rank {} {} KV heads; its cache has {}",
                              layer, comm.rank(), heads, shape.heads[layer]));
    }
    if (cache.tokens(sequence, layer) != cache.tokens(sequence, 0)) {
      throw Error(fmt::format("layer {} has {} tokens, layer 0 has {}", layer,
                              cache.tokens(sequence, layer), cache.tokens(sequence, 0)));
    }
  }
}

// Query heads of each KV head.
std::int64_t query_group(const SnapshotQueries& queries, const KVCache& cache, int layer) {
  const CacheShape& shape = cache.shape();
  const std::int64_t per_head = queries.tokens * shape.head_dim * shape.heads[layer];
  if (queries.tokens < 0) throw Error("recent queries: a negative number of tokens");
  if (per_head == 0) return 0;
  const auto found = static_cast<std::int64_t>(queries.values.size());
  if (found == 0 || found % per_head != 0) {
    throw Error(fmt::format(
        "recent queries of layer {} have {} values; expected a multiple of {} = tokens * head_dim "
        "* KV heads",
        layer, found, per_head));
  }
  return found / per_head;
}

// Extents of the sequence that are equal on all ranks.
struct Extents {
  std::int64_t head_dim = 0, window = 0, page_rows = 0, tokens = 0;
  bool has_context = false;
  std::int64_t context_tokens = -1, layers_with_queries = 0;
  SnapshotContent content = SnapshotContent::all;
  RowType keys = RowType::wide, values = RowType::wide;
  std::vector<std::int64_t> own_rings, row_dims, state_values;  // (layer): see SnapshotGroup

  template <class Visit>
  friend void list_fields(Extents& extents, Visit& visit) {
    visit("head_dim", extents.head_dim);
    visit("the window", extents.window);
    visit("page_rows", extents.page_rows);
    visit("the number of tokens", extents.tokens);
    visit("whether there is a context", extents.has_context);
    visit("the number of the context's tokens", extents.context_tokens);
    visit("the number of layers with recent queries", extents.layers_with_queries);
    visit("the content", extents.content);
    visit("the type of keys", extents.keys);
    visit("the type of values", extents.values);
    visit("rows of the layers' own rings", extents.own_rings);
    visit("values of the layers' keys", extents.row_dims);
    visit("values of a head of the layers' states", extents.state_values);
  }
};

// A rank's share of a layer.
struct LayerShare {
  std::int64_t ring_first = 0, context_ring_first = 0;
  std::int64_t query_first = 0, query_tokens = 0, query_group = 0, state_heads = 0;
  std::vector<std::int64_t> rows, retained;  // (head of the rank): in pages, and of the context

  template <class Visit>
  friend void list_fields(LayerShare& share, Visit& visit) {
    visit("ring_first", share.ring_first);
    visit("context_ring_first", share.context_ring_first);
    visit("query_first", share.query_first);
    visit("query_tokens", share.query_tokens);
    visit("query_group", share.query_group);
    visit("state_heads", share.state_heads);
    visit("rows", share.rows);
    visit("retained", share.retained);
  }
};

// A rank's share of the layout.
struct RankShare {
  Extents extents;
  AppendCounts counts, context_counts;
  std::vector<LayerShare> layers;

  template <class Visit>
  friend void list_fields(RankShare& share, Visit& visit) {
    visit("extents", share.extents);
    list_counts(share.counts, visit);
    list_counts(share.context_counts, visit);
    visit("layers", share.layers);
  }
};

RankShare own_share(const KVCache& cache, SequenceId sequence, const HeadPartition& partition,
                    const Communicator& comm, const SnapshotInfo& info,
                    const SnapshotOptions& options, const KVCache::Checkpoint* context) {
  check_partition(cache, sequence, partition, comm);
  const CacheShape& shape = cache.shape();
  const std::size_t n_layers = shape.heads.size();
  if (!info.recent_queries.empty() && info.recent_queries.size() != n_layers) {
    throw Error(fmt::format("recent queries of {} layers; expected {}", info.recent_queries.size(),
                            n_layers));
  }
  if (options.compress < 0 || options.compress > 9) {
    throw Error(fmt::format("the level of compression is {}; expected 0 to 9", options.compress));
  }
  RankShare mine;
  Extents& extents = mine.extents;
  extents.head_dim = shape.head_dim;
  extents.window = shape.window;
  extents.page_rows = shape.page_rows;
  extents.tokens = cache.tokens(sequence, 0);
  extents.has_context = context != nullptr;
  if (context) extents.context_tokens = context->tokens.at(0);
  extents.layers_with_queries = static_cast<std::int64_t>(info.recent_queries.size());
  extents.content = options.content;
  extents.keys = shape.format.keys;
  extents.values = shape.format.values;
  mine.counts = cache.counts(sequence);
  if (context) mine.context_counts = context->counts;
  for (int layer = 0; layer < static_cast<int>(n_layers); ++layer) {
    const int parts = parts_of_head(shape, partition, layer, comm.rank());
    extents.own_rings.push_back(shape.own_ring(layer).rows);
    extents.row_dims.push_back(std::int64_t{shape.dim(layer)} * parts);
    extents.state_values.push_back(shape.has_state(layer) ? shape.states[layer].values : 0);
    LayerShare& share = mine.layers.emplace_back();
    share.ring_first = cache.ring_first(sequence, layer);
    if (context) share.context_ring_first = context->ring_first.at(layer);
    if (!info.recent_queries.empty()) {
      const SnapshotQueries& queries = info.recent_queries[layer];
      share.query_first = queries.first;
      share.query_tokens = queries.tokens;
      if (queries.tokens != 0) share.query_group = query_group(queries, cache, layer);
    }
    if (shape.has_state(layer)) share.state_heads = shape.states[layer].heads;
    for (int head = 0; head < shape.heads[layer]; head += parts) {
      share.rows.push_back(cache.rows(sequence, layer, head));
      share.retained.push_back(context ? cache.retained_rows(*context, layer, head) : 0);
    }
  }
  return mine;
}

// Lists fields as texts.
struct FieldTexts {
  static constexpr bool reads = false;
  std::vector<std::pair<const char*, std::string>> texts;

  template <class Value>
  void operator()(const char* name, Value value) {
    texts.emplace_back(name, fmt::format("{}", static_cast<std::int64_t>(value)));
  }
  void operator()(const char* name, std::vector<std::int64_t>& values) {
    texts.emplace_back(name, fmt::format("{}", fmt::join(values, ", ")));
  }
};

// Throws if this rank's extents differ from rank 0's.
void check_extents(Extents mine, Extents root) {
  FieldTexts here, there;
  list_fields(mine, here);
  list_fields(root, there);
  for (std::size_t i = 0; i < here.texts.size(); ++i) {
    if (here.texts[i].second == there.texts[i].second) continue;
    throw Error(fmt::format("{}: {}; on rank 0 {}", here.texts[i].first, here.texts[i].second,
                            there.texts[i].second));
  }
}

// Sums counts of a group over the ranks.
AppendCounts summed(const std::vector<RankShare>& all, AppendCounts RankShare::*counts) {
  AppendCounts sums;
  for (const RankShare& share : all) {
    sums.judged += (share.*counts).judged;
    sums.evicted += (share.*counts).evicted;
    sums.non_finite += (share.*counts).non_finite;
  }
  return sums;
}

// Combines the shares of a layer: group `l` of the layout, and that of its context.
std::pair<SnapshotGroup, SnapshotGroup> joined_layer(const std::vector<RankShare>& all, int l,
                                                     const HeadPartition& partition,
                                                     const SnapshotLayout& layout) {
  const auto n_heads = static_cast<std::size_t>(partition.n_kv_heads());
  const LayerShare& root = all[0].layers.at(l);
  SnapshotGroup layer, context;
  layer.own_ring = all[0].extents.own_rings.at(l);
  layer.row_dim = context.row_dim = all[0].extents.row_dims.at(l);
  layer.state_values = all[0].extents.state_values.at(l);
  layer.query_first = root.query_first;
  layer.query_tokens = root.query_tokens;
  layer.query_group = root.query_group;
  // Ranks whose heads lost a row of the ring have emptied their ring; others may not have. The
  // file has one ring for all, and every head has each of its rows.
  for (const RankShare& rank : all) {
    const LayerShare& share = rank.layers.at(l);
    layer.ring_first = std::max(layer.ring_first, share.ring_first);
    context.ring_first = std::max(context.ring_first, share.context_ring_first);
    layer.state_heads += share.state_heads;
    if (share.query_first == root.query_first && share.query_tokens == root.query_tokens &&
        share.query_group == root.query_group) {
      continue;
    }
    throw Error(fmt::format(
        "layer {}: recent queries from position {} on, {} tokens, {} query heads of a KV head; "
        "on rank 0 {}, {}, {}",
        l, share.query_first, share.query_tokens, share.query_group, root.query_first,
        root.query_tokens, root.query_group));
  }
  context.own_ring = layer.own_ring;
  context.state_values = layer.state_values;
  context.state_heads = layer.state_heads;
  layer.set_ring(layout.tokens, layout.window);
  context.set_ring(layout.context_tokens, layout.window);
  layer.offsets.assign(n_heads + 1, 0);
  context.offsets.assign(n_heads + 1, 0);
  context.retained.assign(n_heads, 0);
  for (int r = 0; r < static_cast<int>(all.size()); ++r) {
    const LayerShare& share = all[static_cast<std::size_t>(r)].layers[static_cast<std::size_t>(l)];
    const std::int64_t dealt = partition.count_state_heads(l, r, layer.state_heads);
    if (share.state_heads != dealt) {
      throw Error(fmt::format("layer {}: rank {} has {} of the state's {} heads; expected {}", l, r,
                              share.state_heads, layer.state_heads, dealt));
    }
    const std::int64_t own_ring =
        layer.in_ring(layout.context_tokens, share.context_ring_first, layout.window);
    const auto& heads = partition.heads(l, r);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      layer.offsets[heads[h] + 1] = share.rows.at(h);
      context.retained[heads[h]] = share.retained.at(h) + own_ring - context.ring_rows;
      context.offsets[heads[h] + 1] = context.ring_rows;
    }
  }
  for (std::size_t h = 0; h < n_heads; ++h) {
    if (layout.has_context && context.retained[h] > layer.offsets[h + 1]) {
      throw Error(fmt::format(
          "layer {}, head {}: the state to cut back to has {} rows in pages; the sequence has {}",
          l, h, context.retained[h], layer.offsets[h + 1]));
    }
    layer.offsets[h + 1] += layer.offsets[h];
    context.offsets[h + 1] += context.offsets[h];
  }
  return {std::move(layer), std::move(context)};
}

// Combines the shares of all ranks.
SnapshotLayout joined_layout(const std::vector<RankShare>& all, const HeadPartition& partition,
                             int rank) {
  const Extents& extents = all[0].extents;
  check_extents(all[static_cast<std::size_t>(rank)].extents, extents);
  SnapshotLayout layout;
  layout.head_dim = extents.head_dim;
  layout.window = extents.window;
  layout.page_rows = extents.page_rows;
  layout.tokens = extents.tokens;
  layout.context_tokens = extents.context_tokens;
  layout.has_context = extents.has_context;
  layout.has_queries = extents.layers_with_queries != 0;
  layout.n_kv_heads = partition.n_kv_heads();
  layout.counts = summed(all, &RankShare::counts);
  layout.context_counts = summed(all, &RankShare::context_counts);
  std::vector<SnapshotGroup> contexts;
  for (int l = 0; l < partition.n_layers(); ++l) {
    auto [layer, context] = joined_layer(all, l, partition, layout);
    layout.groups.push_back(std::move(layer));
    if (layout.has_context) contexts.push_back(std::move(context));
  }
  std::move(contexts.begin(), contexts.end(), std::back_inserter(layout.groups));
  return layout;
}

// If other ranks have emptied the context's ring, the file can store its rows only where the
// sequence still has them: after the rows in pages.
void check_context(KVCache& cache, SequenceId sequence, const KVCache::Checkpoint& context,
                   const HeadPartition& partition, const SnapshotLayout& layout, int rank) {
  for (int layer = 0; layer < layout.n_layers(); ++layer) {
    const SnapshotGroup& group = layout.groups[layout.n_layers() + layer];
    const auto& heads = partition.heads(layer, rank);
    for (int h = 0; h < static_cast<int>(heads.size()); ++h) {
      const std::int64_t held = cache.retained_rows(context, layer, h);
      const std::int64_t more = group.retained[heads[h]] - held;
      if (more == 0) continue;
      const auto positions = cache.positions(sequence, layer, h);
      const std::int64_t first = layout.context_tokens - cache.ring_rows(context, layer);
      for (std::int64_t i = 0; i < more; ++i) {
        if (positions.at(held + i) == first + i) continue;
        throw Error(fmt::format(
            "layer {}, head {}: row {} of the state to cut back to is gone, and other ranks do not "
            "have it in a ring",
            layer, heads[h], first + i));
      }
    }
  }
}

}  // namespace

int parts_of_head(const CacheShape& shape, const HeadPartition& partition, int layer, int rank) {
  const auto heads = static_cast<int>(partition.heads(layer, rank).size());
  return heads == 0 ? 1 : std::max(1, shape.heads[layer] / heads);
}

SnapshotLayout describe_snapshot(const std::filesystem::path& file, KVCache& cache,
                                 SequenceId sequence, const HeadPartition& partition,
                                 const Communicator& comm, const SnapshotInfo& info,
                                 const SnapshotOptions& options,
                                 const KVCache::Checkpoint* context) {
  RankShare mine;
  files::agree_on_file(comm, file, [&] {
    mine = own_share(cache, sequence, partition, comm, info, options, context);
  });
  const std::vector<RankShare> all = parallel::all_gather(comm, mine);
  SnapshotLayout layout;
  files::agree_on_file(comm, file, [&] {
    layout = joined_layout(all, partition, comm.rank());
    layout.content = options.content;
    layout.compress = options.compress;
    layout.dtype = options.dtype.value_or(cache.dtype());
    if (options.content == SnapshotContent::all) {
      const PageFormat& format = cache.shape().format;
      layout.format = options.dtype ? format.wide() : format;
      for (int layer = 0; layer < layout.n_layers(); ++layer) {
        layout.groups[layer].quantised =
            layout.format.quantised() && cache.shape().has_pages(layer);
      }
    }
    if (context) check_context(cache, sequence, *context, partition, layout, comm.rank());
  });
  return layout;
}

}  // namespace kvzap::io
