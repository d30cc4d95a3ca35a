// Rows of the host become a sequence again, and the host reads rows, in place or copied.
#include "cache/row_access.hpp"

#include "cache/cache_impl.hpp"
#include "cache/layer_rows.hpp"
#include "cache/raw_rows.hpp"
#include "linalg/pack_row.hpp"

namespace kvzap::cache {
namespace {

/// Copies of the host's rows for kernels. Views that must not be written are empty.
template <class Value>
struct ArrivedRows {
  Kokkos::View<std::int32_t*, MemorySpace> positions;
  Kokkos::View<float*, MemorySpace> scores;
  Kokkos::View<Value*, MemorySpace> keys;
  Kokkos::View<Value*, MemorySpace> values;
  Kokkos::View<std::uint8_t*, MemorySpace> key_codes, value_codes;
  Kokkos::View<bfloat16*, MemorySpace> key_scales, value_scales;
};

template <class Element>
Kokkos::View<Element*, MemorySpace> bring_to_kernels(const ExecutionSpace& exec, const char* label,
                                                     const Element* source, std::int64_t count) {
  using Target = Kokkos::View<Element*, MemorySpace>;
  if (!source) return {};
  auto target = allocate_view<Target>(label, count);
  Kokkos::deep_copy(
      exec, target,
      Kokkos::View<const Element*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(
          source, count));
  return target;
}

template <class Value>
void write_rows(const ExecutionSpace& exec, const LayerRows& rows, int head, std::int64_t begin,
                std::int64_t count, const ArrivedRows<Value>& arrived) {
  Kokkos::parallel_for(
      "kvzap::import_rows", Range(exec, 0, count), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = begin + i;
        const auto found = rows.at(head, row);
        const int dim = rows.layer.head_dim;
        if (arrived.scores.extent(0) > 0) *found.score = arrived.scores(i);
        if (arrived.positions.extent(0) > 0 && found.held_position) {
          *found.held_position = arrived.positions(i);
        }
        if (rows.layer.is_packed(head, row)) {
          const auto write = [&](bool values, const Kokkos::View<Value*, MemorySpace>& wide,
                                 const Kokkos::View<std::uint8_t*, MemorySpace>& codes,
                                 const Kokkos::View<bfloat16*, MemorySpace>& scales) {
            const RowType type = values ? rows.layer.format.values : rows.layer.format.keys;
            const std::int64_t bytes = QuantisedRows::code_bytes(type, dim);
            const QuantisedPlace to = rows.quantised(head, row, values);
            if (wide.extent(0) > 0) {
              linalg::pack_row_from(type, wide.data() + i * dim, dim, to.codes, to.scale);
            }
            if (codes.extent(0) == 0) return;
            for (std::int64_t b = 0; b < bytes; ++b) to.codes[b] = codes(i * bytes + b);
            *to.scale = scales(i);
          };
          write(false, arrived.keys, arrived.key_codes, arrived.key_scales);
          write(true, arrived.values, arrived.value_codes, arrived.value_scales);
          return;
        }
        const RowRun<Value> to = rows.template wide<Value>(head, row);
        for (int d = 0; d < dim; ++d) {
          const std::int64_t from = i * dim + d;
          if (arrived.keys.extent(0) > 0) const_cast<Value*>(to.keys)[d] = arrived.keys(from);
          if (arrived.values.extent(0) > 0) const_cast<Value*>(to.values)[d] = arrived.values(from);
        }
      });
}

void check_range(std::int64_t begin, std::int64_t count, std::int64_t rows) {
  if (begin < 0 || count < 0 || begin > rows || count > rows - begin) {
    throw Error(fmt::format("cache import_rows: {} rows from row {} on; the head has {}", count,
                            begin, rows));
  }
}

void check_values(std::int64_t first, std::int64_t count, std::size_t values) {
  if (first >= 0 && count >= 0 && first <= static_cast<std::int64_t>(values) - count) return;
  throw Error(fmt::format("cache: {} values of a state from {} on; it has {} on this rank", count,
                          first, values));
}

void write_raw(const RawRows& raw, std::int64_t begin, std::int64_t count,
               const ImportedRows& rows) {
  const RawWriter writer(raw);
  if (rows.positions) writer.positions(begin, count, rows.positions);
  if (rows.scores) writer.scores(begin, count, rows.scores);
  if (rows.keys) writer.elements(false, begin, count, rows.keys);
  if (rows.values) writer.elements(true, begin, count, rows.values);
  if (rows.key_codes) writer.quantised(false, begin, count, rows.key_codes, rows.key_scales);
  if (rows.value_codes) writer.quantised(true, begin, count, rows.value_codes, rows.value_scales);
}

/// Copies `pages` pages of a head, each with its rows and then its metadata, to the host.
Kokkos::View<const std::uint64_t*, Kokkos::HostSpace> copied_pages(const ExecutionSpace& exec,
                                                                   const LayerRows& rows,
                                                                   const PagePool& pool, int head,
                                                                   std::int64_t pages) {
  using Words = Kokkos::View<std::uint64_t*, MemorySpace>;
  const auto row_words = static_cast<std::int64_t>(pool.row_bytes() / sizeof(std::uint64_t));
  const auto metadata_words =
      static_cast<std::int64_t>(pool.metadata_bytes() / sizeof(std::uint64_t));
  const std::int64_t words = row_words + metadata_words;
  const auto copies = allocate_view<Words>("kvzap::raw_rows::pages", pages * words);
  Kokkos::parallel_for(
      "kvzap::raw_rows::copy", Range(exec, 0, pages * words), KOKKOS_LAMBDA(std::int64_t i) {
        const PageId page = rows.layer.page_table(head, i / words);
        const std::int64_t word = i % words;
        const bool is_metadata = word >= row_words;
        const auto* const from = reinterpret_cast<const std::uint64_t*>(
            is_metadata ? rows.layer.metadata_addresses(page) : rows.layer.addresses(page));
        copies(i) = from[is_metadata ? word - row_words : word];
      });
  base::fence(exec, "kvzap::raw_rows: the pages are copied");
  return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, copies);
}

/// Sets the rows of a ring, or on devices copies of them.
template <class Rows, class Scores>
void set_ring(RawRows& raw, const Rows& rows, const Scores& scores) {
  raw.ring_copy = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, rows);
  raw.score_copy = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, scores);
  raw.ring = raw.ring_copy.data();
  raw.ring_scores = raw.score_copy.data();
}

}  // namespace

void RowAccess::check_extents(int layer, std::int64_t tokens, std::int64_t ring_first) const {
  m_store.check_layer(layer);
  // Pages hold positions as 32-bit numbers.
  const CacheShape& shape = m_store.shape;
  const bool restarts = shape.own_ring(layer).restarts;
  const bool may_begin =
      shape.has_pages(layer)
          ? ring_first >= 0 && ring_first <= tokens
          : ring_first == (restarts ? tokens - tokens % shape.ring_rows(layer) : 0);
  if (tokens < 0 || tokens > std::numeric_limits<std::int32_t>::max() || !may_begin) {
    throw Error(fmt::format("cache: layer {} cannot have {} tokens and a ring from position {} on",
                            layer, tokens, ring_first));
  }
}

void RowAccess::import_layer(const ExecutionSpace& exec, SequenceId id, int layer_index,
                             std::int64_t tokens, std::int64_t ring_first,
                             const std::vector<std::int64_t>& rows) {
  m_store.check_outside_step(id, "import_layer");
  check_extents(layer_index, tokens, ring_first);
  Sequence& sequence = m_store.sequence_at(id);
  LayerStore& layer = sequence.layers[layer_index];
  const int heads = m_store.shape.heads[layer_index];
  if (layer.tokens != 0) {
    throw Error(
        fmt::format("cache import_layer: layer {} of sequence {} has had {} tokens; expected none",
                    layer_index, id, layer.tokens));
  }
  const std::int64_t in_ring = std::min<std::int64_t>(tokens - ring_first, layer.window);
  if (static_cast<int>(rows.size()) != heads) {
    throw Error(fmt::format("cache import_layer: rows of {} heads; layer {} has {} on this rank",
                            rows.size(), layer_index, heads));
  }
  for (int h = 0; h < heads; ++h) {
    if (rows[h] < in_ring || rows[h] > (layer.has_pages ? tokens : in_ring)) {
      throw Error(fmt::format(
          "cache import_layer: head {} of layer {} with {} rows; expected {} (its ring's) to {}", h,
          layer_index, rows[h], in_ring, layer.has_pages ? tokens : in_ring));
    }
  }
  m_store.settle(sequence);
  m_store.enter(exec, sequence);
  PageLease lease(m_store, layer_index);
  m_store.work.called.clear();
  or_out_of_memory("an import", 0, m_store.pool, [&] {
    m_store.work.called.push_back(&sequence);
    std::size_t missing = 0;
    std::size_t longest = 0;
    for (int h = 0; h < heads; ++h) {
      const auto needs = m_store.list_room(layer, h, rows[h] - in_ring);
      missing += needs.missing;
      longest = std::max(longest, needs.listed);
    }
    m_store.widen_table(exec, sequence, longest);
    lease.take(exec, missing);
  });
  for (int h = 0; h < heads; ++h) {
    m_store.take_pages(exec, sequence, layer_index, h, rows[h] - in_ring, lease, false);
    m_store.write_entries(sequence, layer, h, 0);
  }
  m_store.upload_table(exec, sequence, layer);
  lease.commit();
  layer.tokens = tokens;
  layer.ring_first = ring_first;
  for (int h = 0; h < heads; ++h) layer.retained(h) = rows[h] - in_ring;
  m_store.upload_lengths(exec, layer);
}

void RowAccess::import_rows(const ExecutionSpace& exec, SequenceId id, int layer_index, int head,
                            std::int64_t begin, std::int64_t count, const ImportedRows& rows) {
  m_store.check_outside_step(id, "import_rows");
  check_range(begin, count, m_store.rows(id, layer_index, head));
  if (count == 0) return;
  const auto forget_bounds = [&] {
    m_store.layer_at(id, layer_index).keep_bounds(head, begin / m_store.shape.page_rows);
  };
  if (is_in_place()) {
    forget_bounds();
    return write_raw(raw_rows(id, layer_index, head), begin, count, rows);
  }
  m_store.enter(exec, m_store.sequence_at(id));
  const int dim = m_store.shape.dim(layer_index);
  const PageFormat& format = m_store.shape.format;
  const std::size_t bytes = count * page_row_bytes(dim, size_of(m_store.dtype), format);
  const auto write = [&](auto zero) {
    using Value = decltype(zero);
    const ArrivedRows<Value> arrived{
        bring_to_kernels(exec, "kvzap::import::positions", rows.positions, count),
        bring_to_kernels(exec, "kvzap::import::scores", rows.scores, count),
        bring_to_kernels(exec, "kvzap::import::keys", static_cast<const Value*>(rows.keys),
                         count * dim),
        bring_to_kernels(exec, "kvzap::import::values", static_cast<const Value*>(rows.values),
                         count * dim),
        bring_to_kernels(exec, "kvzap::import::key_codes", rows.key_codes,
                         count * QuantisedRows::code_bytes(format.keys, dim)),
        bring_to_kernels(exec, "kvzap::import::value_codes", rows.value_codes,
                         count * QuantisedRows::code_bytes(format.values, dim)),
        bring_to_kernels(exec, "kvzap::import::key_scales", rows.key_scales, count),
        bring_to_kernels(exec, "kvzap::import::value_scales", rows.value_scales, count)};
    const auto target = LayerRows::of(m_store, id, layer_index);
    write_rows(exec, target, head, begin, count, arrived);
    base::fence(exec, "kvzap::import_rows: the host's copies may go");
  };
  or_out_of_memory("an import", bytes, m_store.pool,
                   [&] { with_value_type(m_store.dtype, write); });
  forget_bounds();
}

void RowAccess::import_counts(SequenceId id, const AppendCounts& counts) {
  m_store.settle(id);
  m_store.sequence_at(id).total = counts;
}

auto RowAccess::import_checkpoint(const ExecutionSpace& exec, SequenceId id,
                                  const std::vector<std::int64_t>& tokens,
                                  const std::vector<std::int64_t>& ring_first,
                                  const std::vector<std::int64_t>& retained,
                                  const AppendCounts& counts) -> Checkpoint {
  m_store.check_outside_step(id, "import_checkpoint");
  m_store.settle(id);
  Sequence& sequence = m_store.sequence_at(id);
  if (tokens.size() != sequence.layers.size() || ring_first.size() != sequence.layers.size() ||
      static_cast<int>(retained.size()) != m_store.all_heads()) {
    throw Error(fmt::format(
        "cache import_checkpoint: tokens of {} layers, ring_first of {}, retained rows of {} "
        "heads; expected {}, {} and {}",
        tokens.size(), ring_first.size(), retained.size(), sequence.layers.size(),
        sequence.layers.size(), m_store.all_heads()));
  }
  for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
    const LayerStore& layer = sequence.layers[l];
    check_extents(static_cast<int>(l), tokens[l], ring_first[l]);
    if (tokens[l] > layer.tokens) {
      throw Error(
          fmt::format("cache import_checkpoint: {} tokens in layer {}; the sequence itself has {}",
                      tokens[l], l, layer.tokens));
    }
    for (std::size_t h = 0; h < layer.pages.size(); ++h) {
      const std::int64_t held = retained[layer.first_head + h];
      if (held < 0 || held > layer.retained(h)) {
        throw Error(fmt::format(
            "cache import_checkpoint: {} retained rows in layer {}, head {}; the sequence itself "
            "has {}",
            held, l, h, layer.retained(h)));
      }
    }
  }
  return or_out_of_memory("a checkpoint", m_store.bytes_per_sequence(), m_store.pool, [&] {
    m_store.enter(exec, sequence);
    Checkpoint checkpoint;
    checkpoint.sequence = id;
    checkpoint.tokens = tokens;
    checkpoint.ring_first = ring_first;
    checkpoint.retained = retained;
    checkpoint.counts = counts;
    checkpoint.rings = m_store.make_rings("kvzap::checkpoint::rings");
    checkpoint.states = m_store.make_states("kvzap::checkpoint::states");
    sequence.checkpoints.insert(m_store.next_checkpoint);
    checkpoint.id = m_store.next_checkpoint++;
    checkpoint.bytes = MeteredBytes(m_store.meter, m_store.bytes_per_sequence());
    return checkpoint;
  });
}

void RowAccess::import_rows(const ExecutionSpace& exec, const Checkpoint& checkpoint, int layer,
                            int head, std::int64_t begin, std::int64_t count,
                            const ImportedRows& rows) {
  m_store.check_layer(layer);
  m_store.checked_head(layer, head);
  check_range(begin, count, m_cache.ring_rows(checkpoint, layer));
  if (count == 0) return;
  // A ring is small: the host changes a copy of the whole ring.
  const auto [block, first] = m_store.ring_places[layer];
  const auto ring = Kokkos::subview(checkpoint.rings[block].rows, first + head, Kokkos::ALL);
  const auto scores = Kokkos::subview(checkpoint.rings[block].scores, first + head, Kokkos::ALL);
  base::fence(exec, "kvzap::import_rows: the checkpoint is made");
  or_out_of_memory("an import", m_store.bytes_per_sequence(), m_store.pool, [&] {
    const auto host_ring = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, ring);
    const auto host_scores = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, scores);
    RawRows raw;
    raw.ring = host_ring.data();
    raw.ring_scores = host_scores.data();
    set_ring_extents(raw, m_cache, layer, checkpoint.tokens[layer], checkpoint.ring_first[layer]);
    write_raw(raw, begin, count, rows);
    if constexpr (!base::runs_on_host) {
      Kokkos::deep_copy(exec, ring, host_ring);
      Kokkos::deep_copy(exec, scores, host_scores);
      base::fence(exec, "kvzap::import_rows: the host's copies may go");
    }
  });
}

bool RowAccess::is_in_place() { return !use_portable_path(); }

auto RowAccess::raw_rows(SequenceId sequence, int layer_index, int head) -> RawRows {
  RawRows raw;
  m_store.settle(sequence);
  const LayerStore& from = m_store.layer_at(sequence, layer_index);
  m_store.checked_head(layer_index, head);
  const ExecutionSpace exec;
  m_store.enter(exec, m_store.sequence_at(sequence));
  base::fence(exec, "kvzap::raw_rows: the host reads rows");
  raw.retained = from.retained(head);
  const PagePool& pool = m_store.pool;
  const auto pages = static_cast<std::int64_t>(m_store.pages_for(raw.retained));
  if (!is_in_place()) {
    const auto rows = LayerRows::of(m_store, sequence, layer_index);
    raw.page_copies = copied_pages(exec, rows, pool, head, pages);
  }
  for (std::int64_t p = 0; p < pages; ++p) {
    PageAddress page = pool.address(from.pages[head][p]);
    if (raw.page_copies.size() > 0) {
      page.rows = reinterpret_cast<std::uintptr_t>(raw.page_copies.data()) + p * pool.page_bytes();
      page.metadata = page.rows + pool.row_bytes();
    }
    raw.pages.push_back(page);
  }
  raw.block = m_store.sequence_at(sequence).rings[m_store.ring_places[layer_index].block];
  set_ring(raw, Kokkos::subview(from.ring, head, Kokkos::ALL),
           Kokkos::subview(from.ring_scores, head, Kokkos::ALL));
  set_ring_extents(raw, m_cache, layer_index, from.tokens, from.ring_first);
  return raw;
}

auto RowAccess::raw_rows(const Checkpoint& checkpoint, int layer, int head) const -> RawRows {
  RawRows raw;
  m_store.checked_head(layer, head);
  const auto [block, first] = m_store.ring_places[layer];
  const ExecutionSpace exec;
  base::fence(exec, "kvzap::raw_rows: the checkpoint's copies are made");
  raw.block = checkpoint.rings[block];
  set_ring(raw, Kokkos::subview(raw.block.rows, first + head, Kokkos::ALL),
           Kokkos::subview(raw.block.scores, first + head, Kokkos::ALL));
  set_ring_extents(raw, m_cache, layer, checkpoint.tokens[layer], checkpoint.ring_first[layer]);
  return raw;
}

Kokkos::View<float*, MemorySpace> RowAccess::state(SequenceId sequence, int layer,
                                                   std::int64_t first, std::int64_t count) {
  m_store.check_outside_step(sequence, "state");
  const ExecutionSpace exec;
  check_values(first, count, m_cache.state(exec, sequence, layer).before.size());
  base::fence(exec, "kvzap::state: the host reads it");
  first += m_store.first_state[layer];
  return Kokkos::subview(m_store.sequence_at(sequence).states,
                         std::make_pair(first, first + count));
}

Kokkos::View<float*, MemorySpace> RowAccess::state(const Checkpoint& checkpoint, int layer,
                                                   std::int64_t first, std::int64_t count) const {
  check_values(first, count, m_cache.state(checkpoint, layer).size());
  const ExecutionSpace exec;
  base::fence(exec, "kvzap::state: the checkpoint's copies are made");
  first += m_store.first_state[layer];
  return Kokkos::subview(checkpoint.states, std::make_pair(first, first + count));
}

}  // namespace kvzap::cache
