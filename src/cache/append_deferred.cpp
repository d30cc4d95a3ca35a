// Appends of one token without waiting: one kernel judges and moves the rows that leave the rings
// of all sequences of a step.
#include "base/launch.hpp"
#include "base/staged.hpp"
#include "base/team.hpp"
#include "cache/cache_impl.hpp"
#include "cache/quantised_place.hpp"
#include "linalg/device/lane_rows.hpp"

namespace kvzap::cache {
namespace {

/// The kernel's view of a sequence, which is the same for all layers of a step if their rings have
/// the same size. Heads are numbered through all layers.
struct SpanArgs {
  void* rings;                // of these layers: (head, vectors * window * dim)
  float* ring_scores;         // (head, window)
  const PageId* table;        // (head, page)
  std::int64_t* retained;     // (head)
  std::int64_t* totals;       // evicted, not finite
  void* saved;                // (head * saved_rows, vectors * most_dim), or null
  float* saved_scores;        // (head * saved_rows)
  std::int64_t table_stride;  // of heads
  std::int64_t row;           // of keys, values and scores
  std::int32_t saved_rows;
  std::int32_t token;  // position of the token
  std::int32_t ring_first;
  float threshold;
  std::int32_t sink;
  std::uint8_t judge, leaving, scored;
};

// Threads and lanes of a team on a device.
constexpr base::TeamShape step_shape{4, 32};

/// Arguments of the kernel. The kernel holds pointers rather than views, because Kokkos passes
/// large kernels through a buffer and waits for it. The arguments of more than a few sequences lie
/// in memory.
struct StepArgs {
  static constexpr int most_own = 2;
  SpanArgs own[most_own] = {};
  const SpanArgs* shared = nullptr;
  const void* keys = nullptr;     // (row, head, dim) with strides
  const void* values = nullptr;   // the same
  const float* scores = nullptr;  // (head, row) with strides
  const std::uintptr_t* addresses = nullptr;
  const std::uintptr_t* metadata_addresses = nullptr;
  std::int64_t key_row = 0, key_head = 0, key_dim = 0;
  std::int64_t value_row = 0, value_head = 0, value_dim = 0;
  std::int64_t score_head = 0, score_row = 0;
  int heads = 0, first_head = 0, first_ring = 0, dim = 0, most_dim = 0, window = 1, page_rows = 1;
  PageFormat format;
  std::int32_t scratch_bytes = 0;
};

/// Appends one token of a layer to each of several sequences. The row that leaves the ring is
/// judged and, if kept, moves to the end of its head's pages, quantised if these hold quantised
/// rows; the new row takes its slot.
template <class Value>
struct StepKernel : StepArgs {
  explicit StepKernel(const StepArgs& args) : StepArgs(args) {}

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int number = team.league_rank() / heads;
    const std::int64_t local = team.league_rank() % heads;
    const SpanArgs& span = shared ? shared[number] : own[number];
    const std::int64_t head = first_head + local;
    const std::int64_t ring = first_ring + local;
    const std::int64_t slot = (span.token - span.ring_first) % window;
    const std::int64_t position = span.token - window;  // of the row that leaves
    const bool leaving = span.leaving != 0;
    const EvictionRule rule{span.threshold, span.sink, span.judge != 0};
    const Block ring_block{window, dim, format.vectors()};
    const Block page_block{page_rows, dim, format.vectors()};
    float* const ring_score = span.ring_scores + ring * window + slot;
    const float score = leaving || span.saved ? *ring_score : 0.0f;
    const bool keep = leaving && rule.keeps(score, position);
    const std::int64_t row = span.retained[head];
    const PageId page = keep ? span.table[head * span.table_stride + row / page_rows] : 0;
    const bool packs = keep && format.keys != RowType::wide;
    Value* const from =
        static_cast<Value*>(span.rings) + ring * ring_block.size() + ring_block.row_offset(slot);
    Value* const to = keep && !packs ? reinterpret_cast<Value*>(addresses[page]) +
                                           page_block.row_offset(row % page_rows)
                                     : nullptr;
    Value* const saved = span.saved ? static_cast<Value*>(span.saved) +
                                          format.vectors() * span.saved_rows *
                                              (std::int64_t{first_head} * most_dim + local * dim)
                                    : nullptr;
    const Value* const key =
        static_cast<const Value*>(keys) + span.row * key_row + local * key_head;
    const Value* const value =
        static_cast<const Value*>(values) + span.row * value_row + local * value_head;
    if (packs) {
      pack(team, from, addresses[page], row % page_rows);
      // The ring's row has been read.
      team.team_barrier();
    }
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, format.vectors() * dim), [&](int i) {
      const bool is_value = i >= dim;
      const int d = is_value ? i - dim : i;
      Value& old = from[d + (is_value ? ring_block.values_offset() : 0)];
      if (to) {
        to[d + (is_value ? page_block.values_offset() : 0)] = old;
      }
      if (saved) saved[i] = old;
      old = is_value ? value[d * value_dim] : key[d * key_dim];
    });
    team.team_barrier();
    Kokkos::single(Kokkos::PerTeam(team), [&] {
      if (saved) span.saved_scores[head * span.saved_rows] = score;
      *ring_score = span.scored ? scores[local * score_head + span.row * score_row] : no_score();
      if (keep) {
        const std::uintptr_t metadata = metadata_addresses[page];
        page_positions(metadata)[row % page_rows] = static_cast<std::int32_t>(position);
        page_scores(metadata, page_rows)[row % page_rows] = score;
        span.retained[head] = row + 1;
      }
      if (!leaving || !rule.judge) return;
      if (!keep) Kokkos::atomic_add(&span.totals[0], std::int64_t{1});
      if (!EvictionRule::is_finite(score)) Kokkos::atomic_add(&span.totals[1], std::int64_t{1});
    });
  }

  /// Packs key and value of a ring's row, by a thread of the team each.
  KOKKOS_INLINE_FUNCTION void pack(const base::TeamMember& team, const Value* from,
                                   std::uintptr_t page, std::int64_t slot) const {
    auto* const scratch =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    const Block ring_block{window, dim, format.vectors()};
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, format.vectors()), [&](int t) {
      const bool of_values = t == 1;
      const Value* const source = from + (of_values ? ring_block.values_offset() : std::int64_t{0});
      const QuantisedPlace place({format, page_rows, dim}, page, slot, of_values);
      linalg::pack_row(
          linalg::LaneLoops{team}, of_values ? format.values : format.keys,
          [&](int d) { return static_cast<float>(source[d]); }, dim, scratch + t * dim, place.codes,
          place.scale);
    });
  }
};

void launch(DType dtype, const ExecutionSpace& exec, int spans, const StepArgs& args) {
  with_value_type(dtype, [&](auto zero) {
    StepKernel<decltype(zero)> kernel(args);
    static_assert(sizeof(kernel) <= base::most_arguments);
    const auto bytes = [&](int /*threads*/) {
      return kernel.format.quantised() ? 2 * sizeof(float) * kernel.dim : 0;
    };
    kernel.scratch_bytes = static_cast<std::int32_t>(bytes(1));
    base::parallel_for("kvzap::append::step",
                       base::team_policy<base::SmallTeamPolicy>(exec, spans * kernel.heads,
                                                                step_shape, kernel, bytes),
                       kernel);
  });
}

/// Writes the kernel's arguments to memory. They are arguments of this kernel themselves, so
/// nothing waits.
struct WriteArgs {
  static constexpr int most = 3;
  SpanArgs args[most] = {};
  SpanArgs* target = nullptr;
  KOKKOS_FUNCTION void operator()(int i) const { target[i] = args[i]; }
};

/// New entries of page tables, passed as arguments of a kernel.
struct NewEntries {
  static constexpr int most = 16;
  struct Entry {
    PageId* target;
    PageId page;
  };
  Entry entry[most] = {};
  int count = 0;
  KOKKOS_FUNCTION void operator()(int i) const { *entry[i].target = entry[i].page; }

  void link(const ExecutionSpace& exec) {
    if (count == 0) return;
    base::parallel_for("kvzap::append::link", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, count),
                       *this);
    count = 0;
  }
};

// An append_deferred in phases, for at least one sequence and one head.
class DeferredAppend {
 public:
  DeferredAppend(Store& store, const ExecutionSpace& exec, const AppendSpan* spans, std::size_t n,
                 int layer)
      : m_store(store),
        m_work(store.work),
        m_exec(exec),
        m_spans(spans),
        m_n(n),
        m_layer(layer),
        m_heads(store.shape.heads[layer]) {}

  void run(const NewPairs& pairs) {
    StepArgs kernel;
    std::memset(static_cast<void*>(kernel.own), 0, sizeof(kernel.own));
    const bool passed = m_n <= std::size_t{StepArgs::most_own};
    if (!passed) {
      or_out_of_memory("an append", 0, m_store.pool, [&] { m_store.reserve_args(m_n); });
    }
    SpanArgs* const all = passed ? kernel.own : reinterpret_cast<SpanArgs*>(m_work.new_args.data());
    plan(all, [&] {
      if (!passed) {
        kernel.shared = reinterpret_cast<const SpanArgs*>(m_work.span_args.data());
        write_args();
      }
      fill(kernel, pairs);
      launch(m_store.dtype, m_exec, static_cast<int>(m_n), kernel);
    });
  }

  /// Does what is not the kernel's: takes pages and links them, and writes the kernel's arguments
  /// of each span to `all`. Then calls use(), and if that succeeds counts the tokens.
  template <class Use>
  void plan(SpanArgs* all, const Use& use) {
    for (std::size_t i = 0; i < m_n; ++i) m_store.enter(m_exec, sequence(i));
    PageLease lease(m_store, m_layer);
    or_out_of_memory("an append", 0, m_store.pool, [&] { take_pages_for(lease); });
    link_pages(lease);
    std::memset(static_cast<void*>(all), 0, m_n * sizeof(SpanArgs));
    for (std::size_t i = 0; i < m_n; ++i) fill(all[i], i);
    use();
    lease.commit();
    record();
  }

  void fill(StepArgs& kernel, const NewPairs& pairs) const {
    const auto& [keys, values, scores] = pairs;
    kernel.keys = keys.data;
    kernel.values = values.data;
    kernel.scores = scores.data();
    kernel.addresses = m_store.pool.addresses(m_exec).data();
    kernel.metadata_addresses = m_store.pool.metadata_addresses().data();
    kernel.key_row = keys.strides[0];
    kernel.key_head = keys.strides[1];
    kernel.key_dim = keys.strides[2];
    kernel.value_row = values.strides[0];
    kernel.value_head = values.strides[1];
    kernel.value_dim = values.strides[2];
    kernel.score_head = scores.stride(0);
    kernel.score_row = scores.stride(1);
    kernel.heads = m_heads;
    kernel.first_head = layer(0).first_head;
    kernel.dim = m_store.shape.dim(m_layer);
    kernel.most_dim = m_store.most_dim();
    kernel.first_ring = m_store.ring_places[m_layer].first;
    kernel.window = layer(0).window;
    kernel.page_rows = m_store.shape.page_rows;
    kernel.format = m_store.shape.format;
  }

 private:
  Sequence& sequence(std::size_t span) const { return *m_work.called[span]; }
  LayerStore& layer(std::size_t span) const { return sequence(span).layers[m_layer]; }
  // Returns whether a row leaves the ring and is judged.
  bool leaving(std::size_t span) const {
    const LayerStore& store = layer(span);
    return store.has_pages && store.tokens - store.ring_first >= store.window;
  }

  void take_pages_for(PageLease& lease) {
    std::size_t missing = 0;
    for (std::size_t i = 0; i < m_n; ++i) {
      if (!leaving(i) || m_store.uses_spare_pages(sequence(i))) continue;
      std::size_t longest = 0;
      for (int h = 0; h < m_heads; ++h) {
        const PageNeeds needs = m_store.list_room(layer(i), h, 1);
        missing += needs.missing;
        longest = std::max(longest, needs.listed);
      }
      m_store.widen_table(m_exec, sequence(i), longest);
    }
    lease.take(m_exec, missing);
  }

  // Gives a page to every head that may need one for the row that leaves its ring. A kernel writes
  // new pages to the tables.
  void link_pages(PageLease& lease) {
    NewEntries entries;
    for (std::size_t i = 0; i < m_n; ++i) {
      if (!leaving(i)) continue;
      Sequence& own = sequence(i);
      const bool of_spare = m_store.uses_spare_pages(own);
      const std::int64_t stride = own.table.stride(0);
      for (int h = 0; h < m_heads; ++h) {
        const std::vector<PageId>& list = layer(i).pages[h];
        const std::size_t old_size = list.size();
        const PageId old_last = list.empty() ? -1 : list.back();
        m_store.take_pages(m_exec, own, m_layer, h, 1, lease, of_spare);
        if (list.size() == old_size && list.back() == old_last) continue;
        const std::size_t index = list.size() - 1;
        const int head = layer(i).first_head + h;
        own.host_table(head, index) = list.back();
        entries.entry[entries.count++] = {own.table.data() + head * stride + index, list.back()};
        if (entries.count == NewEntries::most) entries.link(m_exec);
      }
    }
    entries.link(m_exec);
  }

  void fill(SpanArgs& args, std::size_t i) const {
    const Sequence& own = sequence(i);
    const LayerStore& store = layer(i);
    const EvictionRule& rule = m_spans[i].rule;
    const RingBlock& rings = own.rings[m_store.ring_places[m_layer].block];
    args.rings = rings.rows.data();
    args.ring_scores = rings.scores.data();
    args.table = own.table.data();
    args.retained = own.lengths.data();
    args.totals = own.lengths.data() + own.lengths.extent(0) - 2;
    args.table_stride = own.table.stride(0);
    args.row = m_spans[i].first_row;
    args.token = static_cast<std::int32_t>(store.tokens);
    args.ring_first = static_cast<std::int32_t>(store.ring_first);
    args.threshold = rule.threshold;
    args.sink = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(rule.sink, 0, std::numeric_limits<std::int32_t>::max()));
    args.judge = rule.judges() ? 1 : 0;
    args.leaving = leaving(i) ? 1 : 0;
    args.scored = m_spans[i].scored ? 1 : 0;
    if (own.step < 0) return;
    const StepState& state = m_store.step_states[own.step];
    const SavedRange range = m_store.saved_range(own, store, m_layer, 1);
    if (range.count == 0) return;
    const std::int64_t row = range.row - store.first_head * state.saved_rows;
    args.saved = m_store.saved.data() + range.byte -
                 store.first_head * state.saved_rows * m_store.most_pair_bytes();
    args.saved_scores = m_store.saved_scores.data() + row;
    args.saved_rows = static_cast<std::int32_t>(state.saved_rows);
  }

  // Copies the arguments to the kernel's memory. Only the first layer of a step needs this, and
  // each layer whose rings have another size than those of the layer before.
  void write_args() {
    if (m_work.span_args_on) {
      follow(*m_work.span_args_on, m_exec, "kvzap::append: arguments are in use elsewhere");
    }
    m_work.span_args_on = m_exec;
    const std::size_t bytes = m_n * sizeof(SpanArgs);
    if (m_work.n_written == m_n &&
        std::memcmp(m_work.new_args.data(), m_work.written_args.data(), bytes) == 0) {
      return;
    }
    m_work.n_written = 0;
    SpanArgs* const target = reinterpret_cast<SpanArgs*>(m_work.span_args.data());
    for (std::size_t i = 0; i < m_n; i += WriteArgs::most) {
      WriteArgs write;
      const std::size_t count = std::min<std::size_t>(WriteArgs::most, m_n - i);
      std::memcpy(static_cast<void*>(write.args), m_work.new_args.data() + i * sizeof(SpanArgs),
                  count * sizeof(SpanArgs));
      write.target = target + i;
      base::parallel_for("kvzap::append::span_args",
                         Kokkos::RangePolicy<ExecutionSpace>(m_exec, 0, static_cast<int>(count)),
                         write);
    }
    std::memcpy(m_work.written_args.data(), m_work.new_args.data(), bytes);
    m_work.n_written = m_n;
  }

  void record() {
    for (std::size_t i = 0; i < m_n; ++i) {
      LayerStore& store = layer(i);
      if (leaving(i)) {
        for (int h = 0; h < m_heads; ++h) {
          store.keep_bounds(h, store.retained(h) / m_store.shape.page_rows);
          ++store.retained(h);
        }
        store.deferred = true;
        if (m_spans[i].rule.judges()) {
          if (sequence(i).step >= 0) m_store.step_states[sequence(i).step].judges[m_layer] = true;
          sequence(i).collected.judged += m_heads;
          sequence(i).total.judged += m_heads;
        }
      }
      sequence(i).pending = true;
      store.add_tokens(1);
    }
  }

  Store& m_store;
  Workspace& m_work;
  const ExecutionSpace& m_exec;
  const AppendSpan* m_spans;
  std::size_t m_n;
  int m_layer;
  int m_heads;
};

void check_single_tokens(Store& store, const AppendSpan* spans, std::size_t n, int layer,
                         const NewPairs& pairs) {
  store.check_spans(spans, n, layer, pairs);
  for (std::size_t i = 0; i < n; ++i) {
    if (spans[i].rows != 1) {
      throw Error(fmt::format("cache append: {} tokens in one step; expected 1", spans[i].rows));
    }
  }
}

void defer_spans(Store& store, const ExecutionSpace& exec, const AppendSpan* spans, std::size_t n,
                 int layer, const NewPairs& pairs) {
  check_single_tokens(store, spans, n, layer, pairs);
  if (n == 0) return;
  if (store.shape.heads[layer] > 0) {
    DeferredAppend(store, exec, spans, n, layer).run(pairs);
    return;
  }
  for (std::size_t i = 0; i < n; ++i) store.work.called[i]->layers[layer].add_tokens(1);
}

}  // namespace

/// Planned appends to all layers. A layer's arguments keep their place in the device's memory from
/// step to step, which recorded launches rely on.
class AppendPlans {
 public:
  /// Forgets all plans and makes room for those of n sequences.
  void begin(std::size_t layers, std::size_t n) {
    m_n = n;
    m_kernels.assign(layers, StepArgs());
    m_args.reserve(static_cast<std::int64_t>(layers * n), "kvzap::append::plans");
    std::memset(static_cast<void*>(m_args.host()), 0, layers * n * sizeof(SpanArgs));
  }
  SpanArgs* args(int layer) { return m_args.host() + layer * m_n; }
  StepArgs& kernel(int layer) {
    m_kernels[layer].shared = m_args.device().data() + layer * m_n;
    return m_kernels[layer];
  }
  void copy(const ExecutionSpace& exec) const {
    m_args.copy(exec, static_cast<std::int64_t>(m_kernels.size() * m_n));
  }
  void launch(DType dtype, const ExecutionSpace& exec, int layer) const {
    if (m_kernels[layer].heads == 0) return;
    cache::launch(dtype, exec, static_cast<int>(m_n), m_kernels[layer]);
  }

 private:
  std::size_t m_n = 0;
  std::vector<StepArgs> m_kernels;  // (layer); without heads: none
  base::Staged<SpanArgs> m_args;    // (layer, sequence)
};

// Reserves memory for the arguments of `n` sequences, beside the arguments that were written last.
void Store::reserve_args(std::size_t n) {
  if (n <= std::size_t{StepArgs::most_own}) return;
  const std::size_t bytes = n * sizeof(SpanArgs);
  if (work.new_args.size() < bytes) work.new_args.resize(2 * bytes);
  if (work.written_args.size() < work.new_args.size()) {
    work.written_args.resize(work.new_args.size());
  }
  if (work.span_args.extent(0) < bytes) {
    work.n_written = 0;
    base::reserve_scratch(work.span_args, 2 * bytes, "kvzap::append::span_args");
  }
}

}  // namespace kvzap::cache

namespace kvzap {

void KVCache::append_deferred(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans,
                              int layer, const ConstArrayView& keys, const ConstArrayView& values,
                              const ScoresView& scores) {
  cache::defer_spans(*m_store, exec, spans.data(), spans.size(), layer, {keys, values, scores});
}

void KVCache::append_deferred(const ExecutionSpace& exec, SequenceId sequence, int layer,
                              const ConstArrayView& keys, const ConstArrayView& values,
                              const ScoresView& scores, const EvictionRule& rule) {
  const AppendSpan span{sequence, 0, keys.extents[0], rule, cache::has_scores(scores)};
  cache::defer_spans(*m_store, exec, &span, 1, layer, {keys, values, scores});
}

void KVCache::plan_appends(std::size_t sequences) {
  cache::Store& store = *m_store;
  cache::or_out_of_memory("an append", 0, store.pool, [&] {
    if (!store.plans) store.plans = std::make_shared<cache::AppendPlans>();
    store.plans->begin(store.shape.heads.size(), sequences);
    store.waits.assign(store.shape.heads.size(), false);
  });
}

void KVCache::plan_append(const ExecutionSpace& exec, const std::vector<AppendSpan>& spans,
                          int layer, const ConstArrayView& keys, const ConstArrayView& values,
                          const ScoresView& scores) {
  cache::Store& store = *m_store;
  const cache::NewPairs pairs{keys, values, scores};
  cache::check_single_tokens(store, spans.data(), spans.size(), layer, pairs);
  if (store.shape.heads[layer] == 0) {
    for (cache::Sequence* const sequence : store.work.called) sequence->layers[layer].add_tokens(1);
    return;
  }
  cache::DeferredAppend append(store, exec, spans.data(), spans.size(), layer);
  append.plan(store.plans->args(layer), [&] { append.fill(store.plans->kernel(layer), pairs); });
  store.waits[layer] = true;
}

void KVCache::copy_plans(const ExecutionSpace& exec) { m_store->plans->copy(exec); }

void KVCache::append_planned(const ExecutionSpace& exec, int layer) {
  m_store->plans->launch(m_store->dtype, exec, layer);
  m_store->waits[layer] = false;
}

void KVCache::note_planned(bool have_run) {
  m_store->waits.assign(m_store->waits.size(), !have_run);
}

}  // namespace kvzap
