#include "io/snapshot_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "files/ascii.hpp"
#include "io/checked_objects.hpp"
#include "io/hdf5_objects.hpp"
#include "io/snapshot_structure.hpp"

namespace kvzap::io {

using checked::attribute;
using checked::attributes;
using checked::content;
using checked::content_bytes;
using checked::has_child;
using checked::integer;
using checked::largest;
using checked::layout_of;
using checked::most_gain;
using checked::open_group;
using checked::open_set;
using checked::OpenSet;
using checked::product;
using checked::text;

namespace {

namespace fs = std::filesystem;

// A cache counts positions and heads with 32 bits.
constexpr std::int64_t largest_extent = std::numeric_limits<std::int32_t>::max();

// Quantised rows count dimensions with 32 bits.
constexpr std::int64_t most_quantised_dimensions = std::int64_t{1} << 20;

// Version 3 has quantised rows.
constexpr std::int64_t oldest_version = 2, newest_version = 3;

std::string type_name_of_row(RowKind kind, DType dtype) {
  switch (kind) {
    case RowKind::positions:
      return "int32";
    case RowKind::judged:
    case RowKind::key_codes:
    case RowKind::value_codes:
      return "uint8";
    case RowKind::key_scales:
    case RowKind::value_scales:
      return "bf16";
    case RowKind::keys:
    case RowKind::values:
      return fmt::format("{} as attribute 'dtype' says", name_of(dtype));
    case RowKind::scores:
    case RowKind::recent_queries:
    case RowKind::state:
      break;
  }
  return "float32";
}

Hdf5Handle open_file(const fs::path& file, int descriptor) {
  const Hdf5Handle access = serial_access();
  // The name may lead to another file by now. The descriptor belongs to the file whose seal was
  // checked.
  const std::string same = fmt::format("/proc/self/fd/{}", descriptor);
  std::error_code ignored;
  const std::string path = fs::exists(same, ignored) ? same : file.string();
  const hid_t id = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access);
  if (id < 0) {
    throw Error(fmt::format("truncated, or not written by kvzap: HDF5 cannot open it ({})",
                            hdf5_failure("H5Fopen")));
  }
  return {id, H5Fclose, "H5Fopen"};
}

}  // namespace

SnapshotFile::SnapshotFile(const fs::path& file)
    : m_path(file), m_descriptor(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK) {
  if (m_descriptor.get() < 0) throw files::system_error("cannot be opened", errno);
  struct stat status = {};
  if (::fstat(m_descriptor.get(), &status) != 0) throw files::system_error("cannot be read", errno);
  if (!S_ISREG(status.st_mode)) throw Error("not a regular file");
  m_header.file_bytes = static_cast<std::int64_t>(status.st_size);
  auto seal = read_seal(m_descriptor.get());

  const QuietHdf5 quiet;
  m_file = open_file(file, m_descriptor.get());
  const Hdf5Handle root(H5Gopen2(m_file, "/", H5P_DEFAULT), H5Gclose, "H5Gopen2");
  if (checked_hdf5(H5Aexists(root, "kvzap_format_version"), "H5Aexists") == 0) {
    throw Error("not written by kvzap: an HDF5 file without attribute 'kvzap_format_version'");
  }
  m_header.format_version = attribute<std::int64_t>(root, "kvzap_format_version", H5T_INTEGER);
  if (m_header.format_version < oldest_version || m_header.format_version > newest_version) {
    throw Error(fmt::format("attribute 'kvzap_format_version': expected {} or {}, found {}",
                            oldest_version, newest_version, m_header.format_version));
  }
  if (!seal) {
    throw Error("truncated or changed since it was written: it does not end with a seal");
  }
  m_seal = std::move(*seal);
  m_bytes = m_seal.sealed_bytes;
  read_header(root);
  read_run(root);

  const auto layers = static_cast<std::size_t>(m_header.n_layers);
  const auto read_groups = [&](hid_t parent, const std::string& path) {
    const Hdf5Handle all = open_group(parent, "layers", path);
    for (std::size_t l = 0; l < layers; ++l) {
      const int group = static_cast<int>(m_layout.groups.size());
      m_layout.groups.emplace_back();
      m_sets.emplace_back();
      m_crcs.emplace_back();
      read_group(all, std::to_string(l), group);
    }
  };
  read_groups(root, "/layers");
  for (const SnapshotGroup& group : m_layout.groups) {
    m_header.offsets.push_back(group.offsets);
    m_header.ring_first.push_back(group.ring_first);
    m_header.own_rings.push_back(group.own_ring);
    m_header.state_heads.push_back(group.state_heads);
    m_header.state_values.push_back(group.state_values);
  }
  if (m_header.has_context) {
    const Hdf5Handle context = open_group(root, "context", "/context");
    m_layout.context_tokens = integer(context, "tokens", 0, m_header.tokens);
    m_layout.context_counts.judged = integer(context, "judged", 0, largest);
    m_layout.context_counts.evicted = integer(context, "evicted", 0, largest);
    m_layout.context_counts.non_finite = integer(context, "non_finite", 0, largest);
    read_groups(context, "/context/layers");
  }
  check_coverage();
  // SnapshotFile reads rows without HDF5.
  checked_hdf5(m_file.close(), "H5Fclose");
}

void SnapshotFile::read_header(hid_t root) {
  SnapshotHeader& header = m_header;
  header.n_layers = integer(root, "n_layers", 1, largest_extent);
  header.n_kv_heads = integer(root, "n_kv_heads", 1, largest_extent);
  header.head_dim = integer(root, "head_dim", 1, largest_extent);
  header.window = integer(root, "window", 1, largest_extent);
  header.page_rows = integer(root, "page_rows", 1, largest_extent);
  header.tokens = integer(root, "tokens", 0, largest_extent);
  header.dtype = dtype_from_name(text(root, "dtype"));
  header.info.model = text(root, "model");
  header.info.prune = text(root, "prune");
  header.info.threshold = static_cast<float>(attribute<double>(root, "threshold", H5T_FLOAT));
  header.info.sink = attribute<std::int64_t>(root, "sink", H5T_INTEGER);
  header.content = snapshot_content_from_name(text(root, "content"));
  if (header.format_version > oldest_version) read_format(root);
  header.compress = static_cast<int>(integer(root, "compress", 0, 9));
  header.info.kvzap_version = text(root, "kvzap_version");
  header.info.model_hash = text(root, "model_hash");
  header.info.tokenizer_hash = text(root, "tokenizer_hash");
  header.info.created = text(root, "created");
  header.info.options = text(root, "options");
  header.info.run_state = text(root, "run_state");
  static constexpr std::string_view known[] = {"kvzap_format_version",
                                               "n_layers",
                                               "n_kv_heads",
                                               "head_dim",
                                               "window",
                                               "page_rows",
                                               "tokens",
                                               "dtype",
                                               "kv_type",
                                               "model",
                                               "prune",
                                               "threshold",
                                               "sink",
                                               "content",
                                               "compress",
                                               "kvzap_version",
                                               "model_hash",
                                               "created",
                                               "options",
                                               "tokenizer_hash",
                                               "run_state",
                                               "context_tokens"};
  for (auto& [name, value] : attributes(root)) {
    if (std::find(std::begin(known), std::end(known), name) == std::end(known)) {
      header.info.further.emplace(name, std::move(value));
    }
  }
  m_layout.content = header.content;
  m_layout.compress = header.compress;
  m_layout.dtype = header.dtype;
  m_layout.format = header.format;
  m_layout.head_dim = header.head_dim;
  m_layout.window = header.window;
  m_layout.page_rows = header.page_rows;
  m_layout.tokens = header.tokens;
  m_layout.n_kv_heads = header.n_kv_heads;
}

void SnapshotFile::read_format(hid_t root) {
  try {
    m_header.format = page_format_from_name(text(root, "kv_type"), m_header.dtype);
  } catch (const Error& error) {
    throw Error(fmt::format("attribute 'kv_type': {}", error.what()));
  }
  if (m_header.format.quantised() && m_header.head_dim > most_quantised_dimensions) {
    throw Error(fmt::format("attribute 'head_dim' is {}; expected at most {} with quantised rows",
                            m_header.head_dim, most_quantised_dimensions));
  }
}

// A run needs these as well as the cache to continue.
void SnapshotFile::read_run(hid_t root) {
  SnapshotInfo& info = m_header.info;
  info.token_ids = content<TokenId>(root, "token_ids", "/token_ids", {-1}, m_bytes);
  info.context_tokens =
      integer(root, "context_tokens", 0, static_cast<std::int64_t>(info.token_ids.size()));
  if (has_child(root, "logits", "/logits")) {
    info.logits = content<float>(root, "logits", "/logits", {-1}, m_bytes);
  }
  const Hdf5Handle state = open_group(root, "state", "/state");
  m_layout.counts.judged = integer(state, "judged", 0, largest);
  m_layout.counts.evicted = integer(state, "evicted", 0, largest);
  m_layout.counts.non_finite = integer(state, "non_finite", 0, largest);
  m_header.counts = m_layout.counts;
  for (const auto& [name, value] : attributes(state)) {
    if (name == "judged" || name == "evicted" || name == "non_finite") continue;
    if (const auto* number = std::get_if<std::int64_t>(&value)) info.state.emplace(name, *number);
  }
  m_header.has_context = m_layout.has_context = has_child(root, "context", "/context");
}

void SnapshotFile::read_group(hid_t parent, const std::string& name, int group) {
  const bool is_context = group >= m_header.n_layers;
  const std::string path = fmt::format("{}/layers/{}", is_context ? "/context" : "", name);
  const Hdf5Handle handle = open_group(parent, name, path);
  SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
  const std::int64_t heads = m_header.n_kv_heads;
  const auto integers = [&](const char* set, std::int64_t extent) {
    return content<std::int64_t>(handle, set, path + "/" + set, {extent}, m_bytes);
  };

  const std::int64_t tokens = is_context ? m_layout.context_tokens : m_header.tokens;
  try {
    of.ring_first = integer(handle, "ring_first", 0, tokens);
    if (attributes(handle).count("own_ring") > 0) {
      of.own_ring = integer(handle, "own_ring", 1, largest_extent);
    }
  } catch (const Error& error) {
    throw Error(fmt::format("group '{}': {}", path, error.what()));
  }
  of.set_ring(tokens, m_header.window);
  of.quantised = m_layout.format.quantised() && m_header.content == SnapshotContent::all &&
                 !is_context && of.own_ring == 0;
  const std::int64_t in_ring = of.ring_rows;
  const std::int64_t most_rows = is_context || of.own_ring > 0 ? in_ring : tokens;
  of.offsets = integers("offsets", heads + 1);
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
    of.retained = integers("retained", heads);
    const auto layer =
        static_cast<std::size_t>(group) - static_cast<std::size_t>(m_header.n_layers);
    const SnapshotGroup& whole = m_layout.groups[layer];
    if (of.own_ring != whole.own_ring) {
      throw Error(fmt::format("group '{}': own_ring is {}; expected {}, as in layer {}", path,
                              of.own_ring, whole.own_ring, layer));
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
    sets[static_cast<std::size_t>(kind)] = open_rows(handle, group, kind);
  };
  take(RowKind::positions);
  if (m_header.content != SnapshotContent::positions) take(RowKind::scores);
  take(RowKind::judged);
  if (m_header.content == SnapshotContent::all) {
    take(RowKind::keys);
    take(RowKind::values);
    if (of.quantised) std::for_each(quantised_kinds.begin(), quantised_kinds.end(), take);
    if (!is_context && has_child(handle, "recent_queries", path + "/recent_queries")) {
      m_header.has_recent_queries = m_layout.has_queries = true;
      take(RowKind::recent_queries);
    }
    if (has_child(handle, "state", path + "/state")) take(RowKind::state);
  }
  read_checksums(handle, group);
  if (!is_context) return;
  const SnapshotGroup& whole = m_layout.groups[static_cast<std::size_t>(group - m_header.n_layers)];
  if (of.state_heads != whole.state_heads || of.state_values != whole.state_values) {
    throw Error(
        fmt::format("data set '{}/state' has {} heads of {} values; expected {} of {}, as "
                    "the layer",
                    path, of.state_heads, of.state_values, whole.state_heads, whole.state_values));
  }
}

SnapshotFile::RowSet SnapshotFile::open_rows(hid_t parent, int group, RowKind kind) {
  const char* const name = io::name_of(kind);
  const bool is_context = group >= m_header.n_layers;
  const std::string path =
      fmt::format("{}/layers/{}/{}", is_context ? "/context" : "",
                  is_context ? group - m_header.n_layers : std::int64_t{group}, name);
  SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
  const Hdf5Handle type = type_of_rows(kind, m_header.dtype);
  const std::size_t element = H5Tget_size(type);
  std::vector<std::int64_t> extents;
  if (kind == RowKind::recent_queries) {
    extents = {-1, -1, m_header.head_dim};
  } else if (kind == RowKind::state) {
    extents = {-1};
  } else {
    const auto known = m_layout.extents(group, kind);
    extents.assign(known.begin(), known.end());
  }
  OpenSet open =
      open_set(parent, name, path, type, type_name_of_row(kind, m_header.dtype).c_str(), extents);
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
    try {
      of.query_first = integer(open.handle, "first", 0, m_header.tokens - of.query_tokens);
    } catch (const Error& error) {
      throw Error(fmt::format("data set '{}': {}", path, error.what()));
    }
  }
  if (kind == RowKind::state) {
    try {
      of.state_heads = integer(open.handle, "heads", 1, std::max<std::int64_t>(1, open.extents[0]));
      if (open.extents[0] == 0 || open.extents[0] % of.state_heads != 0) {
        throw Error(
            fmt::format("{} values; expected at least one for each of {} heads, and the "
                        "same number for all",
                        open.extents[0], of.state_heads));
      }
    } catch (const Error& error) {
      throw Error(fmt::format("data set '{}': {}", path, error.what()));
    }
    of.state_values = open.extents[0] / of.state_heads;
  }
  RowSet set;
  set.there = true;
  set.extents = open.extents;
  set.row_bytes = static_cast<std::int64_t>(element) * m_layout.row_elements(kind);
  const std::int64_t bytes = content_bytes(open, element);
  if (bytes == 0) {
    set.place = 0;
    return set;
  }
  const Hdf5Handle create(H5Dget_create_plist(open.handle), H5Pclose, "H5Dget_create_plist");
  const H5D_layout_t layout = layout_of(create, path);
  if (layout == H5D_CHUNKED) {
    if (bytes / most_gain > m_bytes) {
      throw Error(fmt::format("data set '{}' has {} bytes, more than a file of {} bytes can hold",
                              path, bytes, m_bytes));
    }
    set.element_bytes = static_cast<std::int64_t>(element);
    find_chunks(set, open.handle, create, path);
    return set;
  }
  const haddr_t place = layout == H5D_CONTIGUOUS ? H5Dget_offset(open.handle) : HADDR_UNDEF;
  if (place == HADDR_UNDEF || H5Dget_storage_size(open.handle) != static_cast<hsize_t>(bytes) ||
      place > static_cast<haddr_t>(m_bytes) || bytes > m_bytes - static_cast<std::int64_t>(place)) {
    throw Error(fmt::format("data set '{}': its {} bytes are not in the file, which has {}{}", path,
                            bytes, m_bytes,
                            place == HADDR_UNDEF ? "" : fmt::format("; it begins at {}", place)));
  }
  set.place = static_cast<std::int64_t>(place);
  return set;
}

void SnapshotFile::read_checksums(hid_t handle, int group) {
  const bool is_context = group >= m_header.n_layers;
  const std::string path =
      fmt::format("{}/layers/{}/crc32c", is_context ? "/context" : "",
                  is_context ? group - m_header.n_layers : std::int64_t{group});
  const std::int64_t heads = m_header.n_kv_heads;
  const auto all = content<std::uint32_t>(handle, "crc32c", path, {-1, heads}, m_bytes);
  const OpenSet set = open_set(handle, "crc32c", path, H5T_STD_U32LE, "uint32", {-1, heads});
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
