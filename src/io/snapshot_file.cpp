#include "io/snapshot_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <sstream>
#include <utility>

#include "base/crc32c.hpp"
#include "io/hdf5_objects.hpp"
#include "io/snapshot_structure.hpp"

namespace kvzap::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
// Positions and numbers of heads are 32-bit numbers in a cache.
constexpr std::int64_t largest_extent = std::numeric_limits<std::int32_t>::max();
// What is compressed may be this much larger than what it takes in the file: deflate gains no more.
constexpr std::int64_t most_gain = 1100;
constexpr std::int64_t most_chunk_bytes = std::int64_t{1} << 30;

// a * b of numbers that are not negative, or `largest`.
std::int64_t product(std::int64_t a, std::int64_t b) {
  return b != 0 && a > largest / b ? largest : a * b;
}

// ---- Attributes
// ----------------------------------------------------------------------------------

const char* class_name(H5T_class_t type) {
  switch (type) {
    case H5T_INTEGER:
      return "integers";
    case H5T_FLOAT:
      return "floating-point numbers";
    case H5T_STRING:
      return "text";
    default:
      return "of another type";
  }
}

std::string text_of(hid_t attribute, hid_t type) {
  if (checked_hdf5(H5Tis_variable_str(type), "H5Tis_variable_str") > 0) {
    const Hdf5Handle memory(H5Tcopy(H5T_C_S1), H5Tclose, "H5Tcopy");
    checked_hdf5(H5Tset_size(memory, H5T_VARIABLE), "H5Tset_size");
    checked_hdf5(H5Tset_cset(memory, H5Tget_cset(type)), "H5Tset_cset");
    char* held = nullptr;
    checked_hdf5(H5Aread(attribute, memory, &held), "H5Aread");
    std::string text;
    try {
      if (held) text = held;
    } catch (...) {
      H5free_memory(held);
      throw;
    }
    H5free_memory(held);
    return text;
  }
  std::string text(std::max<std::size_t>(H5Tget_size(type), 1), '\0');
  const hsize_t stored = H5Aget_storage_size(attribute);
  if (stored < text.size()) throw Error("its content is missing");
  checked_hdf5(H5Aread(attribute, type, text.data()), "H5Aread");
  text.resize(std::strlen(text.c_str()));
  return text;
}

// Nothing if the attribute is of a kind that no snapshot has.
std::optional<SnapshotAttribute> value_of(hid_t attribute) {
  const Hdf5Handle space(H5Aget_space(attribute), H5Sclose, "H5Aget_space");
  if (H5Sget_simple_extent_npoints(space) != 1) return {};
  const Hdf5Handle type(H5Aget_type(attribute), H5Tclose, "H5Aget_type");
  switch (H5Tget_class(type)) {
    case H5T_INTEGER: {
      std::int64_t value = 0;
      checked_hdf5(H5Aread(attribute, H5T_NATIVE_INT64, &value), "H5Aread");
      return value;
    }
    case H5T_FLOAT: {
      double value = 0;
      checked_hdf5(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value), "H5Aread");
      return value;
    }
    case H5T_STRING:
      return text_of(attribute, type);
    default:
      return {};
  }
}

template <class Value>
Value attribute(hid_t object, const char* name, H5T_class_t expected) {
  if (checked_hdf5(H5Aexists(object, name), "H5Aexists") == 0) {
    throw Error(fmt::format("attribute '{}' is missing", name));
  }
  const Hdf5Handle handle(H5Aopen(object, name, H5P_DEFAULT), H5Aclose, "H5Aopen");
  const auto value = value_of(handle);
  if (!value || !std::holds_alternative<Value>(*value)) {
    const Hdf5Handle type(H5Aget_type(handle), H5Tclose, "H5Aget_type");
    throw Error(fmt::format("attribute '{}' is {}{}; expected {}", name,
                            value ? "" : "not a single value: it is ",
                            class_name(H5Tget_class(type)), class_name(expected)));
  }
  return std::get<Value>(*value);
}

std::int64_t integer(hid_t object, const char* name, std::int64_t least, std::int64_t most) {
  const auto value = attribute<std::int64_t>(object, name, H5T_INTEGER);
  if (value < least || value > most) {
    throw Error(fmt::format("attribute '{}' is {}; expected {} to {}", name, value, least, most));
  }
  return value;
}
std::string text(hid_t object, const char* name) {
  return attribute<std::string>(object, name, H5T_STRING);
}

// All attributes of an object.
std::map<std::string, SnapshotAttribute> attributes(hid_t object) {
  struct Names {
    std::vector<std::string> names;
    static herr_t add(hid_t, const char* name, const H5A_info_t*, void* target) {
      static_cast<Names*>(target)->names.emplace_back(name);
      return 0;
    }
  } found;
  checked_hdf5(H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, nullptr, Names::add, &found),
               "H5Aiterate2");
  std::map<std::string, SnapshotAttribute> all;
  for (const std::string& name : found.names) {
    const Hdf5Handle handle(H5Aopen(object, name.c_str(), H5P_DEFAULT), H5Aclose, "H5Aopen");
    if (auto value = value_of(handle)) all.emplace(name, std::move(*value));
  }
  return all;
}

// ---- Groups and data sets
// ------------------------------------------------------------------------

// Whether `parent` itself has such an object: links to elsewhere would have other files read.
bool has_child(hid_t parent, const std::string& name, const std::string& path) {
  if (checked_hdf5(H5Lexists(parent, name.c_str(), H5P_DEFAULT), "H5Lexists") == 0) return false;
  H5L_info_t link;
  checked_hdf5(H5Lget_info(parent, name.c_str(), &link, H5P_DEFAULT), "H5Lget_info");
  if (link.type != H5L_TYPE_HARD) {
    throw Error(fmt::format("'{}' is a link to elsewhere; expected an object of this file", path));
  }
  return true;
}

Hdf5Handle open_group(hid_t parent, const std::string& name, const std::string& path) {
  if (!has_child(parent, name, path)) throw Error(fmt::format("group '{}' is missing", path));
  const hid_t group = H5Gopen2(parent, name.c_str(), H5P_DEFAULT);
  if (group < 0) throw Error(fmt::format("'{}' is no group: {}", path, hdf5_failure("H5Gopen2")));
  return {group, H5Gclose, "H5Gopen2"};
}

struct OpenSet {
  Hdf5Handle handle;
  std::vector<std::int64_t> extents;
};

// `extents`: what is expected; negative ones may be anything.
OpenSet open_set(hid_t parent, const std::string& name, const std::string& path, hid_t type,
                 const char* type_name, const std::vector<std::int64_t>& extents) {
  if (!has_child(parent, name, path)) throw Error(fmt::format("data set '{}' is missing", path));
  const hid_t id = H5Dopen2(parent, name.c_str(), H5P_DEFAULT);
  if (id < 0) throw Error(fmt::format("'{}' is no data set: {}", path, hdf5_failure("H5Dopen2")));
  OpenSet set{Hdf5Handle(id, H5Dclose, "H5Dopen2"), {}};
  const Hdf5Handle found_type(H5Dget_type(set.handle), H5Tclose, "H5Dget_type");
  if (checked_hdf5(H5Tequal(found_type, type), "H5Tequal") == 0) {
    throw Error(fmt::format("data set '{}' holds {} of {} bytes; expected {}", path,
                            class_name(H5Tget_class(found_type)), H5Tget_size(found_type),
                            type_name));
  }
  const Hdf5Handle space(H5Dget_space(set.handle), H5Sclose, "H5Dget_space");
  const int rank = checked_hdf5(H5Sget_simple_extent_ndims(space), "H5Sget_simple_extent_ndims");
  std::vector<hsize_t> found(static_cast<std::size_t>(std::max(rank, 1)));
  checked_hdf5(H5Sget_simple_extent_dims(space, found.data(), nullptr),
               "H5Sget_simple_extent_dims");
  found.resize(static_cast<std::size_t>(rank));
  bool fits = found.size() == extents.size();
  for (std::size_t i = 0; fits && i < found.size(); ++i) {
    fits = found[i] <= static_cast<hsize_t>(largest) &&
           (extents[i] < 0 || found[i] == static_cast<hsize_t>(extents[i]));
  }
  if (!fits || H5Sget_simple_extent_type(space) != H5S_SIMPLE) {
    std::vector<std::string> expected;
    expected.reserve(extents.size());
    for (const std::int64_t extent : extents) {
      expected.push_back(extent < 0 ? "any" : std::to_string(extent));
    }
    throw Error(fmt::format("data set '{}' has extents ({}); expected ({})", path,
                            fmt::join(found, ", "), fmt::join(expected, ", ")));
  }
  set.extents.assign(found.begin(), found.end());
  return set;
}

// Bytes of a data set's content.
std::int64_t content_bytes(const OpenSet& set, std::size_t element_bytes) {
  std::int64_t bytes = static_cast<std::int64_t>(element_bytes);
  // Without an element there are no bytes, however large the other extents are.
  if (std::find(set.extents.begin(), set.extents.end(), 0) != set.extents.end()) return 0;
  for (const std::int64_t extent : set.extents) bytes = product(bytes, extent);
  return bytes;
}

// How the content lies in the file. Content in other files is none of a snapshot's.
H5D_layout_t layout_of(const OpenSet& set, const Hdf5Handle& create, const std::string& path) {
  const H5D_layout_t layout = checked_hdf5(H5Pget_layout(create), "H5Pget_layout");
  if (layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED && layout != H5D_COMPACT) {
    throw Error(fmt::format("data set '{}' is made of other data sets", path));
  }
  if (layout == H5D_CONTIGUOUS &&
      checked_hdf5(H5Pget_external_count(create), "H5Pget_external_count") > 0) {
    throw Error(fmt::format("the content of data set '{}' is in another file", path));
  }
  (void)set;
  return layout;
}

// A small data set whose content is read at once. `file_bytes` bounds it.
template <class Element>
std::vector<Element> content(hid_t parent, const std::string& name, const std::string& path,
                             hid_t file_type, hid_t memory_type, const char* type_name,
                             const std::vector<std::int64_t>& extents, std::int64_t file_bytes) {
  const OpenSet set = open_set(parent, name, path, file_type, type_name, extents);
  const Hdf5Handle create(H5Dget_create_plist(set.handle), H5Pclose, "H5Dget_create_plist");
  const std::int64_t bytes = content_bytes(set, sizeof(Element));
  if (layout_of(set, create, path) == H5D_CHUNKED || bytes > file_bytes) {
    throw Error(fmt::format("data set '{}' has {} bytes, in chunks or more than the file's {}",
                            path, bytes, file_bytes));
  }
  if (bytes > 0 && H5Dget_storage_size(set.handle) != static_cast<hsize_t>(bytes)) {
    throw Error(fmt::format("data set '{}' has {} bytes in the file; expected {}", path,
                            H5Dget_storage_size(set.handle), bytes));
  }
  std::vector<Element> elements(static_cast<std::size_t>(bytes) / sizeof(Element));
  if (bytes > 0) {
    checked_hdf5(H5Dread(set.handle, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, elements.data()),
                 fmt::format("H5Dread of '{}'", path).c_str());
  }
  return elements;
}

Hdf5Handle type_of_row(RowKind kind, DType dtype, bool is_version_1) {
  if (!is_version_1 || kind != RowKind::positions) return type_of_rows(kind, dtype);
  return {H5Tcopy(H5T_STD_I64LE), H5Tclose, "H5Tcopy"};
}

std::string type_name_of_row(RowKind kind, DType dtype, bool is_version_1) {
  switch (kind) {
    case RowKind::positions:
      return is_version_1 ? "int64" : "int32";
    case RowKind::judged:
      return "uint8";
    case RowKind::keys:
    case RowKind::values:
      return fmt::format("{} as attribute 'dtype' says", name_of(dtype));
    case RowKind::scores:
    case RowKind::recent_queries:
      break;
  }
  return "float32";
}

// What HDF5 says, cut to what it says first.
Hdf5Handle open_file(const fs::path& file, int descriptor) {
  const Hdf5Handle access = serial_access();
  // The file that was checked, whatever has got its name since.
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
  if (m_descriptor.get() < 0) throw system_error("cannot be opened", errno);
  struct stat status = {};
  if (::fstat(m_descriptor.get(), &status) != 0) throw system_error("cannot be read", errno);
  if (!S_ISREG(status.st_mode)) throw Error("not a regular file");
  m_header.file_bytes = static_cast<std::int64_t>(status.st_size);
  m_seal = read_seal(m_descriptor.get());
  m_bytes = m_seal ? m_seal->sealed_bytes : m_header.file_bytes;

  const QuietHdf5 quiet;
  m_file = open_file(file, m_descriptor.get());
  const Hdf5Handle root(H5Gopen2(m_file, "/", H5P_DEFAULT), H5Gclose, "H5Gopen2");
  if (checked_hdf5(H5Aexists(root, "kvzap_format_version"), "H5Aexists") == 0) {
    throw Error("not written by kvzap: an HDF5 file without attribute 'kvzap_format_version'");
  }
  m_header.format_version = attribute<std::int64_t>(root, "kvzap_format_version", H5T_INTEGER);
  if (m_header.format_version != 1 && m_header.format_version != 2) {
    throw Error(
        fmt::format("format version {}; this kvzap reads 1 and 2", m_header.format_version));
  }
  if (m_header.format_version == 2 && !m_seal) {
    throw Error("truncated or changed since it was written: it does not end with a seal");
  }
  read_header(root);
  if (m_header.format_version == 2) read_run(root);

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
    if (m_header.format_version == 2) m_header.ring_first.push_back(group.ring_first);
  }
  if (m_header.has_context) {
    const Hdf5Handle context = open_group(root, "context", "/context");
    m_layout.context_tokens = integer(context, "tokens", 0, m_header.tokens);
    m_layout.context_counts.judged = integer(context, "judged", 0, largest);
    m_layout.context_counts.evicted = integer(context, "evicted", 0, largest);
    m_layout.context_counts.non_finite = integer(context, "non_finite", 0, largest);
    read_groups(context, "/context/layers");
  }
  if (m_seal) check_coverage();
  // Rows are read without HDF5.
  checked_hdf5(m_file.close(), "H5Fclose");
}

void SnapshotFile::read_header(hid_t root) {
  SnapshotHeader& header = m_header;
  const bool is_version_1 = header.format_version == 1;
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
  std::vector<const char*> known{"kvzap_format_version",
                                 "n_layers",
                                 "n_kv_heads",
                                 "head_dim",
                                 "window",
                                 "page_rows",
                                 "tokens",
                                 "dtype",
                                 "model",
                                 "prune",
                                 "threshold",
                                 "sink"};
  if (!is_version_1) {
    header.content = snapshot_content_from_name(text(root, "content"));
    header.compress = static_cast<int>(integer(root, "compress", 0, 9));
    header.info.kvzap_version = text(root, "kvzap_version");
    header.info.model_hash = text(root, "model_hash");
    header.info.tokenizer_hash = text(root, "tokenizer_hash");
    header.info.created = text(root, "created");
    header.info.options = text(root, "options");
    header.info.run_state = text(root, "run_state");
    known.insert(known.end(),
                 {"content", "compress", "kvzap_version", "model_hash", "tokenizer_hash", "created",
                  "options", "run_state", "context_tokens"});
  }
  for (auto& [name, value] : attributes(root)) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      header.info.further.emplace(name, std::move(value));
    }
  }
  m_layout.content = header.content;
  m_layout.compress = header.compress;
  m_layout.dtype = header.dtype;
  m_layout.head_dim = header.head_dim;
  m_layout.window = header.window;
  m_layout.page_rows = header.page_rows;
  m_layout.tokens = header.tokens;
  m_layout.n_kv_heads = header.n_kv_heads;
}

// What a run needs to go on, beside the cache.
void SnapshotFile::read_run(hid_t root) {
  SnapshotInfo& info = m_header.info;
  info.token_ids = content<TokenId>(root, "token_ids", "/token_ids", H5T_STD_I32LE,
                                    H5T_NATIVE_INT32, "int32", {-1}, m_bytes);
  info.context_tokens =
      integer(root, "context_tokens", 0, static_cast<std::int64_t>(info.token_ids.size()));
  if (has_child(root, "logits", "/logits")) {
    info.logits = content<float>(root, "logits", "/logits", H5T_IEEE_F32LE, H5T_NATIVE_FLOAT,
                                 "float32", {-1}, m_bytes);
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
  const bool is_version_1 = m_header.format_version == 1;
  const Hdf5Handle handle = open_group(parent, name, path);
  SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
  const std::int64_t heads = m_header.n_kv_heads;
  const auto integers = [&](const char* set, std::int64_t extent) {
    return content<std::int64_t>(handle, set, path + "/" + set, H5T_STD_I64LE, H5T_NATIVE_INT64,
                                 "int64", {extent}, m_bytes);
  };

  const std::int64_t tokens = is_context ? m_layout.context_tokens : m_header.tokens;
  std::int64_t in_ring = 0;
  if (!is_version_1) {
    try {
      of.ring_first = integer(handle, "ring_first", 0, tokens);
    } catch (const Error& error) {
      throw Error(fmt::format("group '{}': {}", path, error.what()));
    }
    in_ring = std::min(tokens - of.ring_first, m_header.window);
  }
  of.offsets = integers("offsets", heads + 1);
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t begin = of.offsets[static_cast<std::size_t>(h)];
    const std::int64_t end = of.offsets[static_cast<std::size_t>(h) + 1];
    // (Differences of wild numbers may not be numbers.)
    const bool in_order = begin >= 0 && end >= begin && (h > 0 || begin == 0);
    if (!in_order || end - begin < in_ring || end - begin > (is_context ? in_ring : tokens)) {
      throw Error(
          fmt::format("data set '{}/offsets': head {} has rows from {} up to {}; expected {} "
                      "to {} rows, beginning where the head before ends",
                      path, h, begin, end, in_ring, is_context ? in_ring : tokens));
    }
  }
  if (is_context) {
    of.retained = integers("retained", heads);
    const auto layer =
        static_cast<std::size_t>(group) - static_cast<std::size_t>(m_header.n_layers);
    const SnapshotGroup& whole = m_layout.groups[layer];
    const std::int64_t whole_ring = std::min(m_header.tokens - whole.ring_first, m_header.window);
    for (std::size_t h = 0; h < of.retained.size(); ++h) {
      const std::int64_t most = whole.offsets[h + 1] - whole.offsets[h] - whole_ring;
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
  const bool with_scores = is_version_1 ? has_child(handle, "scores", path + "/scores")
                                        : m_header.content != SnapshotContent::positions;
  if (with_scores) take(RowKind::scores);
  if (!is_version_1) take(RowKind::judged);
  if (m_header.content == SnapshotContent::all) {
    take(RowKind::keys);
    take(RowKind::values);
    if (!is_version_1 && !is_context &&
        has_child(handle, "recent_queries", path + "/recent_queries")) {
      m_header.has_recent_queries = m_layout.has_queries = true;
      take(RowKind::recent_queries);
    }
  }
  if (!is_version_1) read_checksums(handle, group);
}

SnapshotFile::RowSet SnapshotFile::open_rows(hid_t parent, int group, RowKind kind) {
  const bool is_version_1 = m_header.format_version == 1;
  const char* const name = detail::name_of(kind);
  const bool is_context = group >= m_header.n_layers;
  const std::string path =
      fmt::format("{}/layers/{}/{}", is_context ? "/context" : "",
                  is_context ? group - m_header.n_layers : std::int64_t{group}, name);
  SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
  const Hdf5Handle type = type_of_row(kind, m_header.dtype, is_version_1);
  const std::size_t element = H5Tget_size(type);
  std::vector<std::int64_t> extents{of.offsets.back()};
  if (kind == RowKind::keys || kind == RowKind::values) extents.push_back(m_header.head_dim);
  if (kind == RowKind::recent_queries) extents = {-1, -1, m_header.head_dim};
  OpenSet open = open_set(parent, name, path, type,
                          type_name_of_row(kind, m_header.dtype, is_version_1).c_str(), extents);
  if (kind == RowKind::recent_queries) {
    // Of no tokens there are no heads either.
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
  RowSet set;
  set.there = true;
  set.extents = open.extents;
  set.row_bytes = static_cast<std::int64_t>(element) * (extents.size() > 1 ? m_header.head_dim : 1);
  const std::int64_t bytes = content_bytes(open, element);
  if (bytes == 0) {
    set.place = 0;
    return set;
  }
  const Hdf5Handle create(H5Dget_create_plist(open.handle), H5Pclose, "H5Dget_create_plist");
  const H5D_layout_t layout = layout_of(open, create, path);
  if (layout == H5D_CHUNKED) {
    if (bytes / most_gain > m_bytes) {
      throw Error(fmt::format("data set '{}' has {} bytes, too many for what a file of {} can hold",
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

// Where the chunks of a compressed data set are: only filters that a snapshot has, and as many
// chunks as the extents take, each of whole rows (whole query heads).
void SnapshotFile::find_chunks(RowSet& set, hid_t data_set, hid_t create,
                               const std::string& path) const {
#if H5_VERSION_GE(1, 10, 5)
  const int filters = checked_hdf5(H5Pget_nfilters(create), "H5Pget_nfilters");
  bool deflates = false;
  bool shuffles = false;
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0;
    unsigned config = 0;
    std::size_t values = 0;
    const H5Z_filter_t filter =
        checked_hdf5(H5Pget_filter2(create, static_cast<unsigned>(i), &flags, &values, nullptr, 0,
                                    nullptr, &config),
                     "H5Pget_filter2");
    const bool is_shuffle = filter == H5Z_FILTER_SHUFFLE && i == 0;
    if (!is_shuffle && (filter != H5Z_FILTER_DEFLATE || deflates)) {
      throw Error(fmt::format("data set '{}' has filter {}; expected shuffle and deflate", path,
                              static_cast<int>(filter)));
    }
    deflates = deflates || filter == H5Z_FILTER_DEFLATE;
    shuffles = shuffles || is_shuffle;
  }
  const std::size_t rank = set.extents.size();
  std::vector<hsize_t> chunk(rank);
  if (H5Pget_chunk(create, static_cast<int>(rank), chunk.data()) != static_cast<int>(rank)) {
    throw Error(hdf5_failure("H5Pget_chunk"));
  }
  std::int64_t expected = 1;
  std::int64_t chunk_bytes = set.element_bytes;
  bool is_whole = true;
  for (std::size_t i = 0; i < rank; ++i) {
    const auto extent = static_cast<std::int64_t>(std::min<hsize_t>(chunk[i], largest));
    if (extent < 1 || extent > std::max<std::int64_t>(set.extents[i], 1)) {
      throw Error(fmt::format("data set '{}' has chunks of ({}); its extents are ({})", path,
                              fmt::join(chunk, ", "), fmt::join(set.extents, ", ")));
    }
    expected = product(expected, (set.extents[i] + extent - 1) / extent);
    chunk_bytes = product(chunk_bytes, extent);
    is_whole = is_whole && (i == 0 || extent == set.extents[i]);
  }
  if (chunk_bytes > most_chunk_bytes || !is_whole) {
    throw Error(
        fmt::format("data set '{}' has chunks of ({}), {} bytes; expected whole rows, at "
                    "most {} bytes",
                    path, fmt::join(chunk, ", "), chunk_bytes, most_chunk_bytes));
  }
  const Hdf5Handle space(H5Dget_space(data_set), H5Sclose, "H5Dget_space");
  hsize_t count = 0;
  checked_hdf5(H5Dget_num_chunks(data_set, space, &count), "H5Dget_num_chunks");
  if (count != static_cast<hsize_t>(expected)) {
    throw Error(fmt::format("data set '{}' has {} chunks; expected {}", path, count, expected));
  }
  set.chunk_extent = static_cast<std::int64_t>(chunk[0]);
  set.chunk_bytes = chunk_bytes;
  // By where they begin: by their number each would be looked for from the first one on.
  std::vector<hsize_t> offset(rank, 0);
  for (hsize_t i = 0; i < count; ++i) {
    unsigned skipped = 0;
    haddr_t place = HADDR_UNDEF;
    hsize_t bytes = 0;
    checked_hdf5(H5Dget_chunk_info_by_coord(data_set, offset.data(), &skipped, &place, &bytes),
                 "H5Dget_chunk_info_by_coord");
    const bool in_file = place < static_cast<haddr_t>(m_bytes) &&
                         bytes <= static_cast<hsize_t>(m_bytes) - static_cast<hsize_t>(place);
    // What deflate would have made larger stands as it is.
    const bool as_is = !deflates || (skipped & (1U << static_cast<unsigned>(filters - 1))) != 0;
    if (!in_file || bytes == 0 || (as_is && bytes != static_cast<hsize_t>(chunk_bytes)) ||
        chunk_bytes / most_gain > static_cast<std::int64_t>(bytes)) {
      throw Error(
          fmt::format("data set '{}': chunk {} has {} bytes from {} on, for {}; the file "
                      "has {}",
                      path, i, bytes, place, chunk_bytes, m_bytes));
    }
    Chunk found{static_cast<std::int64_t>(offset[0]),
                static_cast<std::int64_t>(place),
                static_cast<std::int64_t>(bytes),
                {},
                !as_is,
                shuffles && (skipped & 1U) == 0};
    const auto& extents = m_seal->extents;
    const auto extent =
        std::lower_bound(extents.begin(), extents.end(), found.place,
                         [](const SealedExtent& a, std::int64_t begin) { return a.begin < begin; });
    if (extent != extents.end() && extent->begin == found.place && extent->bytes == found.bytes) {
      found.crc = extent->crc;
    }
    set.chunks.push_back(found);
    for (std::size_t d = rank; d-- > 0;) {
      offset[d] += chunk[d];
      if (offset[d] < static_cast<hsize_t>(set.extents[d])) break;
      offset[d] = 0;
    }
  }
#else
  (void)set;
  (void)data_set;
  (void)create;
  throw Error(fmt::format("data set '{}' is compressed, which takes HDF5 1.10.5 or newer", path));
#endif
}

void SnapshotFile::read_checksums(hid_t handle, int group) {
  const bool is_context = group >= m_header.n_layers;
  const std::string path =
      fmt::format("{}/layers/{}/crc32c", is_context ? "/context" : "",
                  is_context ? group - m_header.n_layers : std::int64_t{group});
  const std::int64_t heads = m_header.n_kv_heads;
  const auto all = content<std::uint32_t>(handle, "crc32c", path, H5T_STD_U32LE, H5T_NATIVE_UINT32,
                                          "uint32", {-1, heads}, m_bytes);
  const OpenSet set = open_set(handle, "crc32c", path, H5T_STD_U32LE, "uint32", {-1, heads});
  std::istringstream kinds(text(set.handle, "kinds"));
  std::vector<std::string> names;
  for (std::string name; kinds >> name;) names.push_back(name);
  if (static_cast<std::int64_t>(names.size()) != set.extents[0]) {
    throw Error(
        fmt::format("data set '{}' has checksums of {} kinds; its attribute 'kinds' names {}", path,
                    set.extents[0], names.size()));
  }
  for (int kind = 0; kind < n_row_kinds; ++kind) {
    if (!has(group, static_cast<RowKind>(kind))) continue;
    const char* const wanted = detail::name_of(static_cast<RowKind>(kind));
    const auto found = std::find(names.begin(), names.end(), wanted);
    if (found == names.end()) {
      throw Error(fmt::format("data set '{}' has no checksums of '{}'", path, wanted));
    }
    const auto first = all.begin() + (found - names.begin()) * heads;
    m_crcs[static_cast<std::size_t>(group)][static_cast<std::size_t>(kind)].assign(first,
                                                                                   first + heads);
  }
}

// Every byte of the file is to have a checksum: what the seal leaves out must be rows, or have one
// in the seal.
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
  for (const SealedExtent& extent : m_seal->extents) {
    if (extent.crc) continue;
    std::int64_t covered = extent.begin;
    const std::int64_t end = extent.begin + extent.bytes;
    // Both ascend, and a run of rows may reach over several extents.
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

void SnapshotFile::read_chunk(const Chunk& chunk, std::vector<char>& stored) const {
  stored.resize(static_cast<std::size_t>(chunk.bytes));
  read_fully(m_descriptor.get(), stored.data(), chunk.bytes, chunk.place);
  if (!chunk.crc) return;  // covered by the seal itself
  const std::uint32_t found = crc32c(stored.data(), stored.size());
  if (found != *chunk.crc) {
    throw Error(
        fmt::format("the compressed chunk at byte {} is damaged: checksum {:08x}; expected "
                    "{:08x}",
                    chunk.place, found, *chunk.crc));
  }
}

// What shuffle and deflate have made a chunk of is undone here: HDF5 takes it that a chunk inflates
// to what its extents say, and reads on behind the end of one that does not.
const std::vector<char>& SnapshotFile::inflated(const RowSet& set, const Chunk& chunk) const {
  if (m_inflated_of == &chunk) return m_inflated;
  m_inflated_of = nullptr;
  read_chunk(chunk, m_stored);
  if (chunk.is_deflated) {
    m_inflated.resize(static_cast<std::size_t>(set.chunk_bytes));
    auto bytes = static_cast<uLongf>(m_inflated.size());
    const int code =
        ::uncompress(static_cast<Bytef*>(static_cast<void*>(m_inflated.data())), &bytes,
                     static_cast<const Bytef*>(static_cast<const void*>(m_stored.data())),
                     static_cast<uLong>(m_stored.size()));
    if (code == Z_MEM_ERROR) throw std::bad_alloc();
    if (code != Z_OK || bytes != m_inflated.size()) {
      throw Error(fmt::format("the compressed chunk at byte {} does not inflate to {} bytes",
                              chunk.place, set.chunk_bytes));
    }
  } else {
    m_inflated = m_stored;
  }
  if (chunk.is_shuffled && set.element_bytes > 1) {
    // The first bytes of all elements, then their second bytes, and so on.
    m_shuffled = m_inflated;
    const auto width = static_cast<std::size_t>(set.element_bytes);
    const std::size_t count = m_shuffled.size() / width;
    for (std::size_t byte = 0; byte < width; ++byte) {
      const char* const from = m_shuffled.data() + byte * count;
      char* const to = m_inflated.data() + byte;
      for (std::size_t i = 0; i < count; ++i) to[i * width] = from[i];
    }
  }
  m_inflated_of = &chunk;
  return m_inflated;
}

std::string SnapshotFile::name_of_head(int group, int head) const {
  const bool is_context = group >= m_header.n_layers;
  return fmt::format("{}layer {}, head {}", is_context ? "context, " : "",
                     is_context ? group - m_header.n_layers : std::int64_t{group}, head);
}

void SnapshotFile::read(int group, RowKind kind, int head, std::int64_t begin, std::int64_t count,
                        void* target) const {
  if (count == 0) return;
  const RowSet& set = set_of(group, kind);
  const std::int64_t first = m_layout.first_row(group, kind, head) + begin;
  if (set.place >= 0) {
    read_fully(m_descriptor.get(), target, count * set.row_bytes,
               set.place + first * set.row_bytes);
    return;
  }
  const std::int64_t unit = set.chunk_bytes / set.chunk_extent;  // bytes, along the first extent
  std::int64_t at = first * set.row_bytes;
  const std::int64_t end = at + count * set.row_bytes;
  auto chunk = std::lower_bound(set.chunks.begin(), set.chunks.end(),
                                at / set.chunk_bytes * set.chunk_extent,
                                [](const Chunk& a, std::int64_t b) { return a.first < b; });
  for (auto* to = static_cast<char*>(target); at < end; ++chunk) {
    const std::int64_t skipped = at - chunk->first * unit;
    const std::int64_t bytes = std::min(end - at, set.chunk_bytes - skipped);
    to = std::copy_n(inflated(set, *chunk).data() + skipped, bytes, to);
    at += bytes;
  }
}

void SnapshotFile::read_head(int group, RowKind kind, int head, std::int64_t bytes_at_once,
                             std::vector<char>& buffer, const Take& take) const {
  const std::int64_t rows = m_layout.rows(group, kind, head);
  const std::int64_t row_bytes = set_of(group, kind).row_bytes;
  std::int64_t most = std::max<std::int64_t>(1, bytes_at_once / row_bytes);
  if (kind == RowKind::recent_queries && rows > 0) {
    // Whole query heads.
    const std::int64_t tokens = m_layout.groups[static_cast<std::size_t>(group)].query_tokens;
    most = std::max<std::int64_t>(most / tokens, 1) * tokens;
  }
  most = std::min(most, rows);
  if (static_cast<std::int64_t>(buffer.size()) < most * row_bytes) {
    buffer.resize(static_cast<std::size_t>(most * row_bytes));
  }
  std::uint32_t crc = 0;
  try {
    for (std::int64_t begin = 0; begin < rows; begin += most) {
      const std::int64_t count = std::min(most, rows - begin);
      read(group, kind, head, begin, count, buffer.data());
      crc = crc32c(buffer.data(), static_cast<std::size_t>(count * row_bytes), crc);
      take(begin, count, buffer.data());
    }
  } catch (const Error& error) {
    throw Error(
        fmt::format("{}: {}: {}", name_of_head(group, head), detail::name_of(kind), error.what()));
  }
  check_crc(group, kind, head, crc);
}

void SnapshotFile::check_crc(int group, RowKind kind, int head, std::uint32_t found) const {
  const auto& crcs = m_crcs[static_cast<std::size_t>(group)][static_cast<std::size_t>(kind)];
  if (crcs.empty()) return;  // version 1
  const std::uint32_t expected = crcs[static_cast<std::size_t>(head)];
  if (found != expected) {
    throw Error(fmt::format("{}: {} are damaged: checksum {:08x}; expected {:08x}",
                            name_of_head(group, head), detail::name_of(kind), found, expected));
  }
}

std::vector<std::int32_t> SnapshotFile::positions(int group, int head,
                                                  std::vector<char>& buffer) const {
  const bool is_version_1 = m_header.format_version == 1;
  const SnapshotGroup& of = m_layout.groups[static_cast<std::size_t>(group)];
  const std::int64_t rows = m_layout.rows(group, RowKind::positions, head);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(rows));
  const std::int64_t tokens =
      group >= m_header.n_layers ? m_layout.context_tokens : m_header.tokens;
  // Positions of newest rows are known: those of the ring.
  const std::int64_t in_ring = is_version_1 ? 0 : std::min(tokens - of.ring_first, m_header.window);
  constexpr std::int64_t at_once = std::int64_t{1} << 20;
  std::string wrong;
  std::int64_t before = -1;
  read_head(group, RowKind::positions, head, at_once, buffer,
            [&](std::int64_t begin, std::int64_t count, const char* bytes) {
              for (std::int64_t i = 0; i < count; ++i) {
                std::int64_t position = 0;
                if (is_version_1) {
                  std::memcpy(&position, bytes + i * 8, 8);
                } else {
                  std::int32_t narrow = 0;
                  std::memcpy(&narrow, bytes + i * 4, 4);
                  position = narrow;
                }
                const std::int64_t row = begin + i;
                const std::int64_t from_end = rows - row;
                const bool right = from_end <= in_ring
                                       ? position == tokens - from_end
                                       : position > before && position < tokens - in_ring;
                if (!right && wrong.empty()) {
                  wrong = fmt::format(
                      "row {} has position {}, behind {}; {} tokens, {} of them in "
                      "the ring",
                      row, position, before, tokens, in_ring);
                }
                before = position;
                positions[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(position);
              }
            });
  if (!wrong.empty()) throw Error(fmt::format("{}: {}", name_of_head(group, head), wrong));
  return positions;
}

void SnapshotFile::check_sealed(const std::function<void(const std::string&)>& tell) const {
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const Error& error) {
      tell(error.what());
    }
  };
  attempt([&] {
    const auto seal = read_seal(m_descriptor.get());
    if (!seal || seal->crc != m_seal->crc) throw Error("it has changed since it was opened");
  });
  std::vector<char> buffer;
  for (const SealedExtent& extent : m_seal->extents) {
    if (!extent.crc) continue;
    attempt([&] { read_chunk({0, extent.begin, extent.bytes, extent.crc}, buffer); });
  }
}

}  // namespace kvzap::detail
