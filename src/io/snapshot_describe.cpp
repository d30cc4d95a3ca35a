#include "io/snapshot_describe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "files/temporary_file.hpp"

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
    if (heads != static_cast<std::size_t>(shape.heads[layer])) {
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

constexpr const char* extent_names =
    "head_dim, window, page_rows, tokens, tokens of the context, whether there is a context, "
    "layers with recent queries, content, types of packed keys and values, rows of each "
    "layer's own ring and values of a head of its state";

// A rank's share of the layout: extents, which are equal on all ranks, then sums, then layer by
// layer.
struct RankExtents {
  std::vector<std::int64_t> extents, sums, layers;
};

RankExtents own_extents(const KVCache& cache, SequenceId sequence, const HeadPartition& partition,
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
  RankExtents mine;
  mine.extents = {shape.head_dim,
                  shape.window,
                  shape.page_rows,
                  cache.tokens(sequence, 0),
                  context ? context->tokens.at(0) : std::int64_t{-1},
                  context ? 1 : 0,
                  static_cast<std::int64_t>(info.recent_queries.size()),
                  static_cast<std::int64_t>(options.content),
                  static_cast<std::int64_t>(shape.format.keys),
                  static_cast<std::int64_t>(shape.format.values)};
  for (int layer = 0; layer < static_cast<int>(n_layers); ++layer) {
    mine.extents.push_back(shape.own_ring(layer).rows);
    mine.extents.push_back(shape.has_state(layer) ? shape.states[layer].values : 0);
  }
  const AppendCounts& counts = cache.counts(sequence);
  mine.sums = {counts.judged, counts.evicted, counts.non_finite, 0, 0, 0};
  if (context) {
    mine.sums[3] = context->counts.judged;
    mine.sums[4] = context->counts.evicted;
    mine.sums[5] = context->counts.non_finite;
  }
  for (int layer = 0; layer < static_cast<int>(n_layers); ++layer) {
    SnapshotQueries queries;
    if (!info.recent_queries.empty()) {
      queries.first = info.recent_queries[layer].first;
      queries.tokens = info.recent_queries[layer].tokens;
    }
    mine.layers.insert(
        mine.layers.end(),
        {cache.ring_first(sequence, layer), queries.first, queries.tokens,
         queries.tokens == 0 ? 0 : query_group(info.recent_queries[layer], cache, layer),
         context ? context->ring_first.at(layer) : std::int64_t{0},
         shape.has_state(layer) ? shape.states[layer].heads : std::int64_t{0}});
    for (int head = 0; head < shape.heads[layer]; ++head) {
      mine.layers.push_back(cache.rows(sequence, layer, head));
      mine.layers.push_back(context ? cache.retained_rows(*context, layer, head) : 0);
    }
  }
  return mine;
}

std::string listed(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (const std::int64_t number : numbers) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", number);
  }
  return text;
}

// Combines the shares of all ranks. Throws if this rank's extents differ from rank 0's.
SnapshotLayout joined_layout(const std::vector<RankExtents>& all, const HeadPartition& partition,
                             int rank) {
  const RankExtents& root = all[0];
  const RankExtents& mine = all[rank];
  if (mine.extents != root.extents) {
    throw Error(fmt::format("{} are {}; on rank 0 they are {}", extent_names, listed(mine.extents),
                            listed(root.extents)));
  }
  SnapshotLayout layout;
  layout.head_dim = root.extents[0];
  layout.window = root.extents[1];
  layout.page_rows = root.extents[2];
  layout.tokens = root.extents[3];
  layout.context_tokens = root.extents[4];
  layout.has_context = root.extents[5] != 0;
  layout.has_queries = root.extents[6] != 0;
  layout.n_kv_heads = partition.n_kv_heads();
  std::vector<std::int64_t> sums(6, 0);
  for (const RankExtents& of : all) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of.sums.at(i);
  }
  layout.counts = {sums[0], sums[1], sums[2]};
  layout.context_counts = {sums[3], sums[4], sums[5]};
  const auto n_layers = static_cast<std::size_t>(partition.n_layers());
  const auto n_heads = static_cast<std::size_t>(partition.n_kv_heads());
  layout.groups.resize(n_layers * (layout.has_context ? 2 : 1));
  std::vector<std::size_t> next(all.size(), 0);
  for (std::size_t l = 0; l < n_layers; ++l) {
    SnapshotGroup& layer = layout.groups[l];
    layer.offsets.assign(n_heads + 1, 0);
    layer.own_ring = root.extents[10 + 2 * l];
    layer.state_values = root.extents[11 + 2 * l];
    for (std::size_t r = 0; r < all.size(); ++r) layer.state_heads += all[r].layers.at(next[r] + 5);
    SnapshotGroup context;
    context.own_ring = layer.own_ring;
    context.state_values = layer.state_values;
    context.state_heads = layer.state_heads;
    context.offsets.assign(n_heads + 1, 0);
    context.retained.assign(n_heads, 0);
    // Ranks whose heads lost a row of the ring have emptied their ring; others may not have. The
    // file has one ring for all, and every head has each of its rows.
    for (std::size_t r = 0; r < all.size(); ++r) {
      const std::vector<std::int64_t>& of = all[r].layers;
      const std::size_t at = next[r];
      layer.ring_first = std::max(layer.ring_first, of.at(at));
      context.ring_first = std::max(context.ring_first, of.at(at + 4));
      for (std::size_t i = 1; i < 4; ++i) {
        if (of.at(at + i) == all[0].layers.at(next[0] + i)) continue;
        throw Error(fmt::format(
            "layer {}: recent queries from position {} on, {} tokens, {} query heads of a KV head; "
            "on rank 0 {}, {}, {}",
            l, of.at(at + 1), of.at(at + 2), of.at(at + 3), all[0].layers.at(next[0] + 1),
            all[0].layers.at(next[0] + 2), all[0].layers.at(next[0] + 3)));
      }
    }
    layer.query_first = all[0].layers.at(next[0] + 1);
    layer.query_tokens = all[0].layers.at(next[0] + 2);
    layer.query_group = all[0].layers.at(next[0] + 3);
    const auto ring_from = [&](std::int64_t first) {
      return layer.in_ring(layout.context_tokens, first, layout.window);
    };
    layer.set_ring(layout.tokens, layout.window);
    context.set_ring(layout.context_tokens, layout.window);
    const std::int64_t in_ring = context.ring_rows;
    for (std::size_t r = 0; r < all.size(); ++r) {
      const std::vector<std::int64_t>& of = all[r].layers;
      const std::int64_t own_ring = ring_from(of.at(next[r] + 4));
      const std::int64_t state_heads = of.at(next[r] + 5);
      next[r] += 6;
      const auto& heads = partition.heads(static_cast<int>(l), static_cast<int>(r));
      const std::int64_t dealt =
          partition.count_state_heads(static_cast<int>(l), static_cast<int>(r), layer.state_heads);
      if (state_heads != dealt) {
        throw Error(fmt::format("layer {}: rank {} has {} of the state's {} heads; expected {}", l,
                                r, state_heads, layer.state_heads, dealt));
      }
      for (const int head : heads) {
        layer.offsets[head + 1] = of.at(next[r]++);
        context.retained[head] = of.at(next[r]++) + own_ring - in_ring;
        context.offsets[head + 1] = in_ring;
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
    if (layout.has_context) layout.groups[n_layers + l] = std::move(context);
  }
  return layout;
}

// If other ranks have emptied the context's ring, the file can store its rows only where the
// sequence still has them: behind the rows in pages.
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

SnapshotLayout describe_snapshot(const std::filesystem::path& file, KVCache& cache,
                                 SequenceId sequence, const HeadPartition& partition,
                                 const Communicator& comm, const SnapshotInfo& info,
                                 const SnapshotOptions& options,
                                 const KVCache::Checkpoint* context) {
  RankExtents mine;
  files::agree_on_file(comm, file, [&] {
    mine = own_extents(cache, sequence, partition, comm, info, options, context);
  });
  const auto extents = comm.all_gather(mine.extents);
  const auto sums = comm.all_gather(mine.sums);
  const auto layers = comm.all_gather(mine.layers);
  SnapshotLayout layout;
  files::agree_on_file(comm, file, [&] {
    std::vector<RankExtents> all;
    all.reserve(static_cast<std::size_t>(comm.size()));
    for (int rank = 0; rank < comm.size(); ++rank) {
      all.push_back({extents[rank], sums[rank], layers[rank]});
    }
    layout = joined_layout(all, partition, comm.rank());
    layout.content = options.content;
    layout.compress = options.compress;
    layout.dtype = options.dtype.value_or(cache.dtype());
    if (!options.dtype && options.content == SnapshotContent::all) {
      layout.format = cache.shape().format;
      for (int layer = 0; layer < layout.n_layers(); ++layer) {
        layout.groups[layer].packed = layout.format.packed() && cache.shape().has_pages(layer);
      }
    }
    if (context) check_context(cache, sequence, *context, partition, layout, comm.rank());
  });
  return layout;
}

}  // namespace kvzap::io
