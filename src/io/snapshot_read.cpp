// Reads snapshots. One process reads a whole file to inspect it. Each rank reads its own heads to
// continue with them in a cache.
#include <fmt/format.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/kokkos_compat.hpp"
#include "cache/raw_rows.hpp"
#include "files/crc32c.hpp"
#include "io/container.hpp"
#include "io/snapshot_describe.hpp"
#include "io/snapshot_file.hpp"
#include "io/snapshot_rows.hpp"

namespace kvzap {

struct SnapshotReader::Impl {
  explicit Impl(const std::filesystem::path& from) : path(from), file(from) {}
  std::filesystem::path path;
  io::SnapshotFile file;
};

namespace {

namespace fs = std::filesystem;
using io::RowKind;
using io::SnapshotFile;
using io::SnapshotGroup;
using io::SnapshotLayout;

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rows are taken from the file as they lie there, little-endian"
#endif

// Rows stay in the processor's cache until their checksum is taken and they are copied to their
// place. A device gets larger pieces.
constexpr std::int64_t bytes_at_once =
    base::runs_on_host ? std::int64_t{512} << 10 : std::int64_t{16} << 20;

// Converts keys or values to float from their form in the file.
void widen_rows(DType dtype, const char* bytes, std::int64_t elements, float* target) {
  with_value_type(dtype, [&](auto element) {
    using Element = decltype(element);
    cache::convert_elements(static_cast<const Element*>(static_cast<const void*>(bytes)), target,
                            elements);
  });
}

// Reads quantised keys or values of a head; kind: keys or values. Calls take(begin, count, rows)
// for runs of rows. Returns the number of rows.
template <class Take>
std::int64_t each_quantised_piece(const SnapshotFile& file, int group, int head, RowKind kind,
                                  std::vector<char>& buffer, const Take& take) {
  const SnapshotLayout& layout = file.layout();
  const bool is_keys = kind == RowKind::keys;
  const RowKind codes = is_keys ? RowKind::key_codes : RowKind::value_codes;
  const RowKind scales = is_keys ? RowKind::key_scales : RowKind::value_scales;
  const std::int64_t rows = layout.rows(group, codes, head);
  std::vector<bfloat16> scale(static_cast<std::size_t>(rows));
  file.read_head(group, scales, head, bytes_at_once, buffer,
                 [&](std::int64_t begin, std::int64_t count, const char* bytes) {
                   std::memcpy(scale.data() + begin, bytes,
                               static_cast<std::size_t>(count) * sizeof(bfloat16));
                 });
  file.read_head(
      group, codes, head, bytes_at_once, buffer,
      [&](std::int64_t begin, std::int64_t count, const char* bytes) {
        take(begin, count,
             QuantisedRows{static_cast<const std::uint8_t*>(static_cast<const void*>(bytes)),
                           scale.data() + begin, static_cast<int>(layout.head_dim),
                           is_keys ? layout.format.keys : layout.format.values});
      });
  return rows;
}

// ---- Into a cache -------------------------------------------------------------------------------

/// Reads consecutive bytes of a file into several runs of memory.
class ScatteredRead {
 public:
  ScatteredRead(int descriptor, std::int64_t begin) : m_descriptor(descriptor), m_begin(begin) {}
  /// Reads the next `bytes` bytes of the file into `target`.
  void add(void* target, std::int64_t bytes) {
    // Every system accepts at least this many runs in one call.
    constexpr std::size_t most_runs = 1024;
    m_runs.push_back({target, static_cast<std::size_t>(bytes)});
    m_bytes += bytes;
    if (m_runs.size() == most_runs || m_bytes >= bytes_at_once) finish();
  }
  /// Returns the checksum of all bytes.
  std::uint32_t finish() {
    std::size_t first = 0;
    std::vector<iovec> left = m_runs;
    while (m_bytes > 0) {
      const ssize_t count = ::preadv(m_descriptor, left.data() + first,
                                     static_cast<int>(left.size() - first), m_begin);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw files::system_error("cannot be read", errno);
      if (count == 0) {
        throw Error(fmt::format("it ends at byte {}; {} more were expected", m_begin, m_bytes));
      }
      m_begin += count;
      m_bytes -= count;
      for (auto done = static_cast<std::size_t>(count); done > 0;) {
        iovec& run = left[first];
        const std::size_t part = std::min(done, run.iov_len);
        run.iov_base = static_cast<char*>(run.iov_base) + part;
        run.iov_len -= part;
        done -= part;
        if (run.iov_len == 0) ++first;
      }
    }
    for (const iovec& run : m_runs) m_crc = files::crc32c(run.iov_base, run.iov_len, m_crc);
    m_runs.clear();
    return m_crc;
  }

 private:
  int m_descriptor;
  std::int64_t m_begin;
  std::int64_t m_bytes = 0;
  std::vector<iovec> m_runs;
  std::uint32_t m_crc = 0;
};

/// Fills a sequence, or a checkpoint of it, with this rank's heads of a file.
class SnapshotImport {
 public:
  using Cache = KVCache;
  using Checkpoint = Cache::Checkpoint;

  SnapshotImport(const SnapshotFile& file, Cache& cache, const HeadPartition& partition, int rank)
      : m_file(file),
        m_layout(file.layout()),
        m_shape(cache.shape()),
        m_access(cache),
        m_partition(partition),
        m_rank(rank) {}

  void sequence(SequenceId id) {
    for (int layer = 0; layer < m_layout.n_layers(); ++layer) {
      const std::vector<int>& heads = m_partition.heads(layer, m_rank);
      const SnapshotGroup& group = m_layout.groups[static_cast<std::size_t>(layer)];
      const int parts = this->parts(layer);
      std::vector<std::int64_t> rows;  // (head of the cache)
      for (const int head : heads) {
        rows.insert(rows.end(), parts, m_layout.rows(layer, RowKind::positions, head));
      }
      m_access.import_layer(m_exec, id, layer, m_layout.tokens, group.ring_first, rows);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const int first = static_cast<int>(h) * parts;
        const auto positions = m_file.positions(layer, heads[h], m_buffer);
        check_context(layer, heads[h], positions);
        cache::ImportedRows imported;
        imported.positions = positions.data();
        for (int local = first; local < first + parts; ++local) {
          m_access.import_rows(m_exec, id, layer, local, 0, rows[local], imported);
        }
        take_rows(layer, heads[h], [&](auto begin, auto count, const auto& some) {
          for (int local = first; local < first + parts; ++local) {
            m_access.import_rows(m_exec, id, layer, local, begin, count, some);
          }
        });
        elements(id, layer, heads[h], first);
      }
      if (group.state_values > 0) {
        take_state(layer, [&](std::int64_t first, std::int64_t count) {
          return m_access.state(id, layer, first, count);
        });
      }
    }
  }

  Checkpoint checkpoint(SequenceId id, const AppendCounts& counts) {
    const int n_layers = m_layout.n_layers();
    const std::vector<std::int64_t> tokens(static_cast<std::size_t>(n_layers),
                                           m_layout.context_tokens);
    std::vector<std::int64_t> ring_first;
    std::vector<std::int64_t> retained;
    for (int layer = 0; layer < n_layers; ++layer) {
      const SnapshotGroup& group = m_layout.groups[n_layers + layer];
      ring_first.push_back(group.ring_first);
      for (const int head : m_partition.heads(layer, m_rank)) {
        retained.insert(retained.end(), parts(layer),
                        group.retained[static_cast<std::size_t>(head)]);
      }
    }
    Checkpoint checkpoint =
        m_access.import_checkpoint(m_exec, id, tokens, ring_first, retained, counts);
    for (int layer = 0; layer < n_layers; ++layer) {
      const std::vector<int>& heads = m_partition.heads(layer, m_rank);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const int group = n_layers + layer;
        m_file.positions(group, heads[h], m_buffer);
        const int first = static_cast<int>(h) * parts(layer);
        const auto write = [&](int part, auto begin, auto count, const auto& some) {
          m_access.import_rows(m_exec, checkpoint, layer, first + part, begin, count, some);
        };
        take_rows(group, heads[h], [&](auto begin, auto count, const auto& some) {
          for (int part = 0; part < parts(layer); ++part) write(part, begin, count, some);
        });
        for (const RowKind kind : io::vector_kinds(m_layout.format, false)) {
          take_elements(group, heads[h], kind, 0, write);
        }
      }
      if (m_layout.groups[n_layers + layer].state_values > 0) {
        take_state(n_layers + layer, [&](std::int64_t first, std::int64_t count) {
          return m_access.state(checkpoint, layer, first, count);
        });
      }
    }
    return checkpoint;
  }

  std::vector<SnapshotQueries> queries() {
    std::vector<SnapshotQueries> all;
    if (!m_file.header().has_recent_queries) return all;
    for (int layer = 0; layer < m_layout.n_layers(); ++layer) {
      SnapshotQueries queries;
      if (m_file.has(layer, RowKind::recent_queries)) {
        const SnapshotGroup& group = m_layout.groups[static_cast<std::size_t>(layer)];
        queries.first = group.query_first;
        queries.tokens = group.query_tokens;
        for (const int head : m_partition.heads(layer, m_rank)) {
          m_file.read_head(
              layer, RowKind::recent_queries, head, bytes_at_once, m_buffer,
              [&](std::int64_t, std::int64_t count, const char* bytes) {
                const auto* from = static_cast<const float*>(static_cast<const void*>(bytes));
                queries.values.insert(queries.values.end(), from, from + count * m_layout.head_dim);
              });
        }
      }
      all.push_back(std::move(queries));
    }
    return all;
  }

 private:
  int parts(int layer) const { return io::parts_of_head(m_shape, m_partition, layer, m_rank); }

  // The context's rows in pages must be older than its ring.
  void check_context(int layer, int head, const std::vector<std::int32_t>& positions) const {
    if (!m_layout.has_context) return;
    const SnapshotGroup& group = m_layout.groups[m_layout.n_layers() + layer];
    const std::int64_t retained = group.retained[static_cast<std::size_t>(head)];
    const std::int64_t before = m_layout.context_tokens - group.ring_rows;
    if (retained > 0 && positions[static_cast<std::size_t>(retained - 1)] >= before) {
      throw Error(fmt::format(
          "context, layer {}, head {}: the last of {} rows in pages has position {}; expected less "
          "than {}",
          layer, head, retained, positions[static_cast<std::size_t>(retained - 1)], before));
    }
  }

  // Reads scores. Also reads rows that no cache stores, to check them.
  template <class Write>
  void take_rows(int group, int head, const Write& write) {
    m_file.read_head(group, RowKind::scores, head, bytes_at_once, m_buffer,
                     [&](std::int64_t begin, std::int64_t count, const char* bytes) {
                       cache::ImportedRows some;
                       some.scores = static_cast<const float*>(static_cast<const void*>(bytes));
                       write(begin, count, some);
                     });
    m_file.read_head(group, RowKind::judged, head, bytes_at_once, m_buffer,
                     [](std::int64_t, std::int64_t, const char*) {});
  }

  // Reads keys or values that are not quantised. The first of them is row `before` of the head.
  // Calls write(part, first row, rows, elements) for each of the cache's heads that are this one.
  template <class Write>
  void take_elements(int group, int head, RowKind kind, std::int64_t before, const Write& write) {
    m_file.read_head(
        group, kind, head, bytes_at_once, m_buffer,
        [&](std::int64_t begin, std::int64_t count, const char* bytes) {
          const void* values = bytes;
          if (m_layout.dtype != m_access.dtype()) {
            const std::int64_t elements = count * m_layout.groups[group].row_dim;
            values = converted(elements, [&](auto* target) {
              with_value_type(m_layout.dtype, [&](auto element) {
                using Element = decltype(element);
                cache::convert_elements(
                    static_cast<const Element*>(static_cast<const void*>(bytes)), target, elements);
              });
            });
          }
          const int layer = group % m_layout.n_layers();
          for (int part = 0; part < parts(layer); ++part) {
            cache::ImportedRows some;
            (kind == RowKind::keys ? some.keys : some.values) = part_of(values, layer, part, count);
            write(part, before + begin, count, some);
          }
        });
  }

  // Returns the elements of one of the heads whose elements follow one another in each row.
  const void* part_of(const void* rows, int layer, int part, std::int64_t count) {
    const std::size_t n = parts(layer), size = m_shape.dim(layer) * size_of(m_access.dtype());
    if (n == 1) return rows;
    m_part.resize(static_cast<std::size_t>(count) * size);
    for (std::size_t row = 0; row < static_cast<std::size_t>(count); ++row) {
      std::memcpy(m_part.data() + row * size,
                  static_cast<const char*>(rows) + (row * n + part) * size, size);
    }
    return m_part.data();
  }

  // Calls fill(target) with space for values of the cache's type. Returns that space.
  template <class Fill>
  const void* converted(std::int64_t values, const Fill& fill) {
    m_converted.resize(static_cast<std::size_t>(values) * size_of(m_access.dtype()));
    void* const target = m_converted.data();
    with_value_type(m_access.dtype(),
                    [&](auto zero) { fill(static_cast<decltype(zero)*>(target)); });
    return target;
  }

  // Reads quantised keys or values. Returns their number.
  template <class Write>
  std::int64_t take_quantised(int group, int head, RowKind kind, const Write& write) {
    const bool is_keys = kind == RowKind::keys;
    const auto type_in = [&](const PageFormat& format) {
      return is_keys ? format.keys : format.values;
    };
    const bool fits = type_in(m_layout.format) == type_in(m_access.format());
    return each_quantised_piece(
        m_file, group, head, kind, m_buffer,
        [&](std::int64_t begin, std::int64_t count, const QuantisedRows& rows) {
          cache::ImportedRows some;
          if (fits) {
            (is_keys ? some.key_codes : some.value_codes) = rows.codes;
            (is_keys ? some.key_scales : some.value_scales) = rows.scales;
          } else {
            (is_keys ? some.keys : some.values) = converted(
                count * rows.dim, [&](auto* target) { cache::unpack_rows(rows, count, target); });
          }
          write(begin, count, some);
        });
  }

  // Reads this rank's part of a layer's state into the memory that memory(first, count) returns.
  template <class Memory>
  void take_state(int group, const Memory& memory) {
    const SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
    std::int64_t before = 0;  // values of earlier ranges
    for (const auto& [first, last] :
         m_partition.state_heads(group % m_layout.n_layers(), m_rank, of.state_heads)) {
      const std::int64_t own_begin = first * of.state_values, own_end = last * of.state_values;
      // Whole parts of KV heads, because of their checksums.
      for (int head = 0; head < static_cast<int>(m_layout.n_kv_heads); ++head) {
        const std::int64_t part = m_layout.first_row(group, RowKind::state, head);
        const std::int64_t values = m_layout.rows(group, RowKind::state, head);
        if (part >= own_end || part + values <= own_begin) continue;
        m_file.read_head(group, RowKind::state, head, bytes_at_once, m_buffer,
                         [&](std::int64_t begin, std::int64_t count, const char* bytes) {
                           const std::int64_t from = std::max(part + begin, own_begin);
                           const std::int64_t to = std::min(part + begin + count, own_end);
                           if (from >= to) return;
                           const auto* all =
                               static_cast<const float*>(static_cast<const void*>(bytes));
                           Kokkos::deep_copy(memory(before + from - own_begin, to - from),
                                             Kokkos::View<const float*, Kokkos::HostSpace>(
                                                 all + from - part - begin, to - from));
                         });
      }
      before += own_end - own_begin;
    }
  }

  // Reads keys and values of a head of the sequence. Where rows have the same layout in pages as in
  // the file, reads them directly into their pages.
  void elements(SequenceId id, int layer, int head, int local) {
    const auto write_part = [&](int part, auto begin, auto count, const auto& some) {
      m_access.import_rows(m_exec, id, layer, local + part, begin, count, some);
    };
    const auto write = [&](auto begin, auto count, const auto& some) {
      write_part(0, begin, count, some);
    };
    const bool has_quantised = m_layout.groups[static_cast<std::size_t>(layer)].quantised;
    for (const RowKind kind : io::vector_kinds(m_layout.format, false)) {
      const std::int64_t before = has_quantised ? take_quantised(layer, head, kind, write) : 0;
      if (parts(layer) == 1 && m_access.is_in_place() && m_layout.dtype == m_access.dtype() &&
          m_file.place(layer, kind) >= 0 && (has_quantised || !m_access.format().quantised())) {
        const auto raw = m_access.raw_rows(id, layer, local);
        ScatteredRead read(m_file.descriptor(),
                           m_file.place(layer, kind) + m_layout.first_row(layer, kind, head) *
                                                           m_file.row_bytes(layer, kind));
        cache::RawWriter(raw).each_element_run(kind == RowKind::values, before, raw.rows() - before,
                                               [&](void* target, std::int64_t rows) {
                                                 read.add(target,
                                                          rows * m_file.row_bytes(layer, kind));
                                               });
        m_file.check_crc(layer, kind, head, read.finish());
        continue;
      }
      take_elements(layer, head, kind, before, write_part);
    }
  }

  const SnapshotFile& m_file;
  const SnapshotLayout& m_layout;
  const CacheShape& m_shape;
  cache::RowAccess m_access;
  const HeadPartition& m_partition;
  int m_rank;
  ExecutionSpace m_exec;
  std::vector<char> m_buffer;
  std::vector<char> m_converted;
  std::vector<char> m_part;
};

void check_loadable(const SnapshotHeader& header, const KVCache& cache,
                    const HeadPartition& partition, const Communicator& comm) {
  if (header.content != SnapshotContent::all) {
    throw Error(fmt::format(
        "it has {} alone, without keys and values: no run can resume from it",
        header.content == SnapshotContent::scores ? "positions and scores" : "positions"));
  }
  const CacheShape& shape = cache.shape();
  const auto expect = [](const char* what, std::int64_t found, std::int64_t expected) {
    if (found != expected) {
      throw Error(fmt::format("{} is {}; expected {}, as in the cache", what, found, expected));
    }
  };
  expect("n_layers", header.n_layers, static_cast<std::int64_t>(shape.heads.size()));
  expect("n_kv_heads", header.n_kv_heads, partition.n_kv_heads());
  expect("head_dim", header.head_dim, shape.head_dim);
  expect("window", header.window, shape.window);
  if (header.format.values_are_keys != shape.format.values_are_keys) {
    throw Error(fmt::format("data sets of values {}; expected {}, as in the cache",
                            header.format.values_are_keys ? "are missing" : "exist",
                            shape.format.values_are_keys ? "none" : "some"));
  }
  for (int layer = 0; layer < static_cast<int>(shape.heads.size()); ++layer) {
    const std::int64_t found = header.own_rings[static_cast<std::size_t>(layer)];
    const std::int64_t expected = shape.own_ring(layer).rows;
    if (found != expected) {
      throw Error(fmt::format("layer {}: own_ring is {}; expected {}, as in the cache", layer,
                              found, expected));
    }
  }
  if (partition.n_ranks() != comm.size() || partition.n_layers() != header.n_layers) {
    throw Error(fmt::format("the partition is for {} ranks and {} layers; expected {} and {}",
                            partition.n_ranks(), partition.n_layers(), comm.size(),
                            header.n_layers));
  }
  for (int layer = 0; layer < partition.n_layers(); ++layer) {
    const std::size_t heads = partition.heads(layer, comm.rank()).size();
    const int parts = io::parts_of_head(shape, partition, layer, comm.rank());
    const std::int64_t row_dim = header.row_dims[static_cast<std::size_t>(layer)];
    if (row_dim != std::int64_t{shape.dim(layer)} * parts) {
      throw Error(
          fmt::format("layer {}: a row's key has {} values; expected {} of each of {} heads, "
                      "as in the cache",
                      layer, row_dim, shape.dim(layer), parts));
    }
    if (heads * parts != static_cast<std::size_t>(shape.heads[static_cast<std::size_t>(layer)])) {
      throw Error(fmt::format("layer {}: the partition gives rank {} {} KV heads; its cache has {}",
                              layer, comm.rank(), heads,
                              shape.heads[static_cast<std::size_t>(layer)]));
    }
    const StateShape state = shape.has_state(layer) ? shape.states[layer] : StateShape();
    const std::int64_t values = header.state_values[static_cast<std::size_t>(layer)];
    const std::int64_t dealt = partition.count_state_heads(
        layer, comm.rank(), header.state_heads[static_cast<std::size_t>(layer)]);
    if (values != state.values || dealt != state.heads) {
      throw Error(
          fmt::format("layer {}: {} heads of its state, {} values each, belong to rank {}; "
                      "expected {} and {}, as in the cache",
                      layer, dealt, values, comm.rank(), state.heads, state.values));
    }
  }
}

// Runs work on each rank. If memory is exhausted on one rank, throws AgreedOutOfMemory on all.
template <class Work>
void agree_on_loading(const Communicator& comm, const fs::path& file, const Work& work) {
  bool out_of_memory = false;
  try {
    files::agree_on_file(comm, file, [&] {
      try {
        work();
      } catch (const OutOfMemory&) {
        out_of_memory = true;
        throw;
      } catch (const std::bad_alloc&) {
        out_of_memory = true;
        throw;
      }
    });
  } catch (const AgreedError& error) {
    if (comm.all_reduce_max(out_of_memory ? 1 : 0) == 0) throw;
    throw AgreedOutOfMemory(error.what());
  }
}

}  // namespace

SnapshotReader::SnapshotReader(const fs::path& file)
    : m_impl(io::about_file("snapshot", file, [&] { return std::make_unique<Impl>(file); })) {}
SnapshotReader::~SnapshotReader() = default;
SnapshotReader::SnapshotReader(SnapshotReader&&) noexcept = default;
SnapshotReader& SnapshotReader::operator=(SnapshotReader&&) noexcept = default;

const fs::path& SnapshotReader::file() const { return m_impl->path; }
const SnapshotHeader& SnapshotReader::header() const { return m_impl->file.header(); }

SnapshotRows SnapshotReader::rows(int layer, int head, bool with_values) const {
  return io::about_file("snapshot", file(), [&] {
    const SnapshotFile& from = m_impl->file;
    const SnapshotHeader& header = from.header();
    if (layer < 0 || layer >= header.n_layers || head < 0 || head >= header.n_kv_heads) {
      throw Error(fmt::format("there is no layer {}, head {}; it has {} layers and {} KV heads",
                              layer, head, header.n_layers, header.n_kv_heads));
    }
    SnapshotRows rows;
    std::vector<char> buffer;
    const auto positions = from.positions(layer, head, buffer);
    rows.positions.assign(positions.begin(), positions.end());
    const auto total = positions.size();
    if (from.has(layer, RowKind::scores)) {
      rows.scores.resize(total);
      from.read_head(layer, RowKind::scores, head, bytes_at_once, buffer,
                     [&](std::int64_t begin, std::int64_t count, const char* bytes) {
                       widen_rows(DType::f32, bytes, count, rows.scores.data() + begin);
                     });
    }
    rows.judged.resize(total);
    from.read_head(layer, RowKind::judged, head, bytes_at_once, buffer,
                   [&](std::int64_t begin, std::int64_t count, const char* bytes) {
                     std::copy_n(bytes, count, rows.judged.begin() + begin);
                   });
    for (const RowKind kind : {RowKind::keys, RowKind::values}) {
      if (!with_values || !from.has(layer, kind)) continue;
      auto& elements = kind == RowKind::keys ? rows.keys : rows.values;
      const std::int64_t row_dim = header.row_dims[static_cast<std::size_t>(layer)];
      elements.resize(total * static_cast<std::size_t>(row_dim));
      float* target = elements.data();
      if (from.layout().groups[static_cast<std::size_t>(layer)].quantised) {
        each_quantised_piece(from, layer, head, kind, buffer,
                             [&](std::int64_t, std::int64_t count, const QuantisedRows& quantised) {
                               cache::unpack_rows(quantised, count, target);
                               target += count * header.head_dim;
                             });
      }
      from.read_head(layer, kind, head, bytes_at_once, buffer,
                     [&](std::int64_t, std::int64_t count, const char* bytes) {
                       widen_rows(header.dtype, bytes, count * row_dim, target);
                       target += count * row_dim;
                     });
    }
    if (from.layout().format.values_are_keys) rows.values = rows.keys;
    return rows;
  });
}

std::vector<std::string> SnapshotReader::verify(
    const std::function<void(int layer, int layers)>& progress) const {
  const SnapshotFile& from = m_impl->file;
  std::vector<std::string> damages;
  from.check_sealed([&](const std::string& sentence) { damages.push_back(sentence); });
  std::vector<char> buffer;
  const int layers = static_cast<int>(header().n_layers);
  const int groups = static_cast<int>(from.layout().groups.size());
  for (int group = 0; group < groups; ++group) {
    if (progress) progress(group % layers, layers);
    for (int k = 0; k < io::n_row_kinds; ++k) {
      const auto kind = static_cast<RowKind>(k);
      if (!from.has(group, kind)) continue;
      for (int head = 0; head < header().n_kv_heads; ++head) {
        try {
          if (kind == RowKind::positions) {
            from.positions(group, head, buffer);
          } else {
            from.read_head(group, kind, head, bytes_at_once, buffer,
                           [](std::int64_t, std::int64_t, const char*) {});
          }
        } catch (const std::bad_alloc&) {
          damages.push_back(fmt::format("{}: {}: out of memory", from.name_of_head(group, head),
                                        io::name_of(kind)));
        } catch (const Error& error) {
          damages.emplace_back(error.what());
        }
      }
    }
  }
  return damages;
}

LoadedSnapshot load_snapshot(const SnapshotReader& reader, KVCache& cache,
                             const HeadPartition& partition, const Communicator& comm) {
  const SnapshotFile& file = reader.impl().file;
  const auto all =
      comm.all_gather({static_cast<std::int64_t>(file.fingerprint()), file.header().file_bytes});
  files::agree_on_file(comm, reader.file(), [&] {
    if (std::any_of(all.begin(), all.end(), [&](const auto& one) { return one != all[0]; })) {
      throw Error("ranks have opened different files, or it was replaced meanwhile");
    }
    check_loadable(reader.header(), cache, partition, comm);
  });
  LoadedSnapshot loaded;
  try {
    agree_on_loading(comm, reader.file(), [&] {
      loaded.sequence = cache.add_sequence();
      SnapshotImport from(file, cache, partition, comm.rank());
      from.sequence(loaded.sequence);
      const SnapshotLayout& layout = file.layout();
      // The counts are sums over ranks. Rank 0 continues from them.
      if (comm.is_root()) cache::RowAccess(cache).import_counts(loaded.sequence, layout.counts);
      if (layout.has_context) {
        loaded.context.emplace(from.checkpoint(
            loaded.sequence, comm.is_root() ? layout.context_counts : AppendCounts{}));
      }
      loaded.recent_queries = from.queries();
    });
  } catch (...) {
    if (loaded.sequence >= 0) cache.free_sequence(loaded.sequence);
    throw;
  }
  return loaded;
}

}  // namespace kvzap
