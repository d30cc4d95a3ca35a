#include "io/snapshot_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "files/ascii.hpp"
#include "files/fully.hpp"
#include "io/container.hpp"
#include "io/hdf5_file.hpp"
#include "io/snapshot_structure.hpp"

namespace kvzap::io {

namespace {

namespace fs = std::filesystem;

// Quantised rows count dimensions with 32 bits.
constexpr std::int64_t most_quantised_dimensions = std::int64_t{1} << 20;

// Opens the file whose seal was checked: its name may lead to another one by now.
Hdf5Handle open_file(const fs::path& file, int descriptor) {
  const fs::path same = fmt::format("/proc/self/fd/{}", descriptor);
  std::error_code ignored;
  return open_to_read(fs::exists(same, ignored) ? same : file);
}

}  // namespace

SnapshotFile::SnapshotFile(const fs::path& file)
    : m_descriptor(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK) {
  if (m_descriptor.get() < 0) throw files::system_error("cannot be opened", errno);
  m_header.file_bytes = files::size_of_file(m_descriptor.get());
  auto seal = read_seal(m_descriptor.get());

  const QuietHdf5 quiet;
  m_file = open_file(file, m_descriptor.get());
  m_header.format_version =
      read_version(m_file, "kvzap_format_version", oldest_version, newest_version, "kvzap");
  if (!seal) {
    throw Error("truncated or changed since it was written: it does not end with a seal");
  }
  m_seal = std::move(*seal);
  m_bytes = m_seal.sealed_bytes;
  read_header();
  read_run();
  read_groups("");
  for (const SnapshotGroup& group : m_layout.groups) {
    m_header.offsets.push_back(group.offsets);
    m_header.ring_first.push_back(group.ring_first);
    m_header.own_rings.push_back(group.own_ring);
    m_header.row_dims.push_back(group.row_dim);
    m_header.state_heads.push_back(group.state_heads);
    m_header.state_values.push_back(group.state_values);
  }
  if (m_header.has_context) {
    const Hdf5Handle context = open_group(m_file, "/context");
    m_layout.context_tokens = integer(context, "tokens", 0, m_header.tokens);
    AttributeReader read(context);
    list_counts(m_layout.context_counts, read);
    read_groups("/context");
  }
  check_coverage();
  // SnapshotFile reads rows without HDF5.
  checked_hdf5(m_file.close(), "H5Fclose");
}

void SnapshotFile::read_header() {
  SnapshotHeader& header = m_header;
  SnapshotInfo& info = header.info;
  info.token_ids = content<TokenId>(m_file, "/token_ids", {-1}, m_bytes);
  AttributeReader read(m_file);
  std::string kv_type;
  list_root(m_layout, info, header.format_version, info.created, kv_type, header.n_layers, read);
  info.further = read.others();
  for (const char* name : {"kvzap_format_version", "kv_type"}) info.further.erase(name);
  if (header.format_version > oldest_version) read_format(kv_type);
  header.content = m_layout.content;
  header.compress = m_layout.compress;
  header.dtype = m_layout.dtype;
  header.format = m_layout.format;
  header.n_kv_heads = m_layout.n_kv_heads;
  header.head_dim = m_layout.head_dim;
  header.window = m_layout.window;
  header.page_rows = m_layout.page_rows;
  header.tokens = m_layout.tokens;
}

void SnapshotFile::read_format(const std::string& kv_type) {
  m_layout.format =
      about("attribute 'kv_type'", [&] { return page_format_from_name(kv_type, m_layout.dtype); });
  if (m_layout.format.quantised() && m_layout.head_dim > most_quantised_dimensions) {
    throw Error(fmt::format("attribute 'head_dim' is {}; expected at most {} with quantised rows",
                            m_layout.head_dim, most_quantised_dimensions));
  }
}

// A run needs these as well as the cache to continue.
void SnapshotFile::read_run() {
  SnapshotInfo& info = m_header.info;
  if (has_object(m_file, "/logits")) {
    info.logits = content<float>(m_file, "/logits", {-1}, m_bytes);
  }
  const Hdf5Handle state = open_group(m_file, "/state");
  AttributeReader read(state);
  list_counts(m_layout.counts, read);
  m_header.counts = m_layout.counts;
  for (const auto& [name, value] : read.others()) {
    if (const auto* number = std::get_if<std::int64_t>(&value)) info.state.emplace(name, *number);
  }
  m_header.has_context = m_layout.has_context = has_object(m_file, "/context");
}

void SnapshotFile::read_groups(const std::string& parent) {
  for (std::int64_t l = 0; l < m_header.n_layers; ++l) {
    m_layout.groups.emplace_back();
    m_sets.emplace_back();
    m_crcs.emplace_back();
    read_group(fmt::format("{}/layers/{}", parent, l),
               static_cast<int>(m_layout.groups.size()) - 1);
  }
}

void SnapshotFile::read_group(const std::string& path, int group) {
  const bool is_context = group >= m_header.n_layers;
  const Hdf5Handle handle = open_group(m_file, path);
  SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
  const std::int64_t heads = m_header.n_kv_heads;
  const auto integers = [&](const char* set, std::int64_t extent) {
    return content<std::int64_t>(m_file, path + set, {extent}, m_bytes);
  };

  const std::int64_t tokens = is_context ? m_layout.context_tokens : m_header.tokens;
  about(fmt::format("group '{}'", path), [&] {
    of.ring_first = integer(handle, "ring_first", 0, tokens);
    if (attributes(handle).count("own_ring") > 0) {
      of.own_ring = integer(handle, "own_ring", 1, largest_extent);
    }
    of.row_dim = m_layout.head_dim;
    if (of.own_ring > 0 && attributes(handle).count("row_dim") > 0) {
      of.row_dim = integer(handle, "row_dim", 1, largest_extent);
    }
  });
  of.set_ring(tokens, m_header.window);
  of.quantised = m_layout.format.quantised() && m_header.content == SnapshotContent::all &&
                 !is_context && of.own_ring == 0;
  const std::int64_t in_ring = of.ring_rows;
  const std::int64_t most_rows = is_context || of.own_ring > 0 ? in_ring : tokens;
  of.offsets = integers("/offsets", heads + 1);
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t begin = of.offsets[static_cast<std::size_t>(h)];
    const std::int64_t end = of.offsets[static_cast<std::size_t>(h) + 1];
    // Check the order first: the difference of arbitrary numbers may overflow.
    const bool in_order = begin >= 0 && end >= begin && (h > 0 || begin == 0);
    if (!in_order || end - begin < in_ring || end - begin > most_rows) {
      throw Error(
          fmt::format("data set '{}/offsets': head {} has rows from {} up to {}; expected {} "
                      "to {} rows, beginning where the head before ends",
                      path, h, begin, end, in_ring, most_rows));
    }
  }
  if (is_context) {
    of.retained = integers("/retained", heads);
    const auto layer =
        static_cast<std::size_t>(group) - static_cast<std::size_t>(m_header.n_layers);
    const SnapshotGroup& whole = m_layout.groups[layer];
    if (of.own_ring != whole.own_ring || of.row_dim != whole.row_dim) {
      throw Error(
          fmt::format("group '{}': own_ring is {} and row_dim {}; expected {} and {}, as in layer "
                      "{}",
                      path, of.own_ring, of.row_dim, whole.own_ring, whole.row_dim, layer));
    }
    for (std::size_t h = 0; h < of.retained.size(); ++h) {
      const std::int64_t most = whole.offsets[h + 1] - whole.offsets[h] - whole.ring_rows;
      if (of.retained[h] < 0 || of.retained[h] > most) {
        throw Error(fmt::format("data set '{}/retained': {} for head {}; expected 0 to {}", path,
                                of.retained[h], h, most));
      }
    }
  }

  auto& sets = m_sets[static_cast<std::size_t>(group)];
  const auto take = [&](RowKind kind) {
    sets[static_cast<std::size_t>(kind)] = open_rows(path + "/" + io::name_of(kind), group, kind);
  };
  take(RowKind::positions);
  if (m_header.content != SnapshotContent::positions) take(RowKind::scores);
  take(RowKind::judged);
  if (m_header.content == SnapshotContent::all) {
    if (group == 0) {
      m_layout.format.values_are_keys =
          m_header.format_version > oldest_version && !has_object(m_file, path + "/values");
      m_header.format = m_layout.format;
    }
    for (const RowKind kind : vector_kinds(m_layout.format, of.quantised)) take(kind);
    if (!is_context && has_object(m_file, path + "/recent_queries")) {
      m_header.has_recent_queries = m_layout.has_queries = true;
      take(RowKind::recent_queries);
    }
    if (has_object(m_file, path + "/state")) take(RowKind::state);
  }
  read_checksums(path + "/crc32c", group);
  if (!is_context) return;
  const SnapshotGroup& whole = m_layout.groups[static_cast<std::size_t>(group - m_header.n_layers)];
  if (of.state_heads != whole.state_heads || of.state_values != whole.state_values) {
    throw Error(
        fmt::format("data set '{}/state' has {} heads of {} values; expected {} of {}, as "
                    "the layer",
                    path, of.state_heads, of.state_values, whole.state_heads, whole.state_values));
  }
}

SnapshotFile::RowSet SnapshotFile::open_rows(const std::string& path, int group, RowKind kind) {
  SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
  const RowElement declared = element_of_rows(kind, m_header.dtype);
  const std::size_t element = H5Tget_size(declared.type);
  const auto known = m_layout.extents(group, kind);
  std::vector<std::int64_t> extents(known.begin(), known.end());
  if (kind == RowKind::recent_queries) extents = {-1, -1, m_header.head_dim};
  if (kind == RowKind::state) extents = {-1};
  OpenSet open = open_set(m_file, path, declared.type, declared.name, extents);
  if (kind == RowKind::recent_queries) {
    // Without tokens, the number of heads is 0 as well.
    const bool is_none = open.extents[0] == 0;
    if (open.extents[0] % m_header.n_kv_heads != 0 || is_none != (open.extents[1] == 0) ||
        open.extents[0] > largest_extent || open.extents[1] > m_header.tokens) {
      throw Error(fmt::format(
          "data set '{}' has extents ({}); expected a multiple of {} heads, and at most {} tokens",
          path, fmt::join(open.extents, ", "), m_header.n_kv_heads, m_header.tokens));
    }
    of.query_group = open.extents[0] / m_header.n_kv_heads;
    of.query_tokens = open.extents[1];
    about(fmt::format("data set '{}'", path), [&] {
      of.query_first = integer(open.handle, "first", 0, m_header.tokens - of.query_tokens);
    });
  }
  if (kind == RowKind::state) {
    about(fmt::format("data set '{}'", path), [&] {
      of.state_heads = integer(open.handle, "heads", 1, std::max<std::int64_t>(1, open.extents[0]));
      if (open.extents[0] == 0 || open.extents[0] % of.state_heads != 0) {
        throw Error(
            fmt::format("{} values; expected at least one for each of {} heads, and the "
                        "same number for all",
                        open.extents[0], of.state_heads));
      }
    });
    of.state_values = open.extents[0] / of.state_heads;
  }
  RowSet set;
  set.there = true;
  set.extents = open.extents;
  set.row_bytes = static_cast<std::int64_t>(element) * m_layout.row_elements(group, kind);
  const std::int64_t bytes = content_bytes(open, element);
  if (bytes == 0) {
    set.place = 0;
    return set;
  }
  if (open.layout == H5D_CHUNKED) {
    if (bytes / most_gain > m_bytes) {
      throw Error(fmt::format("data set '{}' has {} bytes, more than a file of {} bytes can hold",
                              path, bytes, m_bytes));
    }
    set.element_bytes = static_cast<std::int64_t>(element);
    find_chunks(set, open, path);
    return set;
  }
  const haddr_t place = open.layout == H5D_CONTIGUOUS ? H5Dget_offset(open.handle) : HADDR_UNDEF;
  if (place == HADDR_UNDEF || H5Dget_storage_size(open.handle) != static_cast<hsize_t>(bytes) ||
      place > static_cast<haddr_t>(m_bytes) || bytes > m_bytes - static_cast<std::int64_t>(place)) {
    throw Error(fmt::format("data set '{}': its {} bytes are not in the file, which has {}{}", path,
                            bytes, m_bytes,
                            place == HADDR_UNDEF ? "" : fmt::format("; it begins at {}", place)));
  }
  set.place = static_cast<std::int64_t>(place);
  return set;
}

void SnapshotFile::read_checksums(const std::string& path, int group) {
  const std::int64_t heads = m_header.n_kv_heads;
  const auto all = content<std::uint32_t>(m_file, path, {-1, heads}, m_bytes);
  const OpenSet set = open_set(m_file, path, H5T_STD_U32LE, "uint32", {-1, heads});
  const std::string kinds = text(set.handle, "kinds");
  const std::vector<std::string_view> names = files::words_of(kinds);
  if (static_cast<std::int64_t>(names.size()) != set.extents[0]) {
    throw Error(
        fmt::format("data set '{}' has checksums of {} kinds; its attribute 'kinds' names {}", path,
                    set.extents[0], names.size()));
  }
  for (int kind = 0; kind < n_row_kinds; ++kind) {
    if (!has(group, static_cast<RowKind>(kind))) continue;
    const char* const wanted = io::name_of(static_cast<RowKind>(kind));
    const auto found = std::find(names.begin(), names.end(), wanted);
    if (found == names.end()) {
      throw Error(fmt::format("data set '{}' has no checksums of '{}'", path, wanted));
    }
    const auto first = all.begin() + (found - names.begin()) * heads;
    m_crcs[static_cast<std::size_t>(group)][static_cast<std::size_t>(kind)].assign(first,
                                                                                   first + heads);
  }
}

// Every byte of the file needs a checksum. An extent that the seal leaves out has one in the seal,
// or consists of rows.
void SnapshotFile::check_coverage() const {
  std::vector<std::pair<std::int64_t, std::int64_t>> rows;
  for (const auto& sets : m_sets) {
    for (const RowSet& set : sets) {
      if (!set.there || set.place < 0) continue;
      std::int64_t bytes = set.row_bytes;
      for (std::size_t i = 0; i < std::max<std::size_t>(set.extents.size() - 1, 1); ++i) {
        bytes = product(bytes, set.extents[i]);
      }
      if (bytes > 0) rows.emplace_back(set.place, set.place + bytes);
    }
  }
  std::sort(rows.begin(), rows.end());
  auto row = rows.begin();
  for (const SealedExtent& extent : m_seal.extents) {
    if (extent.crc) continue;
    std::int64_t covered = extent.begin;
    const std::int64_t end = extent.begin + extent.bytes;
    // Rows and extents ascend, and one run of rows may cover several extents.
    while (row != rows.end() && row->second <= covered) ++row;
    for (auto r = row; r != rows.end() && r->first <= covered && covered < end; ++r) {
      covered = std::max(covered, r->second);
    }
    if (covered < end) {
      throw Error(
          fmt::format("bytes {} to {} have no checksum: the seal leaves them out, but they "
                      "are no rows",
                      covered, end));
    }
  }
}

}  // namespace kvzap::io
