#include "io/snapshot_structure.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <string>
#include <variant>

#include "files/crc32c.hpp"
#include "files/fully.hpp"
#include "files/temporary_file.hpp"
#include "io/hdf5_file.hpp"

namespace kvzap::io {
namespace {

// Bytes of a chunk of a compressed data set: enough to compress well, and little enough to read one
// head without much of its neighbours.
constexpr std::int64_t chunk_bytes = std::int64_t{256} << 10;

// Bytes that one call copies.
constexpr std::int64_t copied_bytes = std::int64_t{1} << 20;

std::string time_of_writing() {
  std::time_t now = std::time(nullptr);
  if (const char* epoch = std::getenv("SOURCE_DATE_EPOCH"); epoch && *epoch) {
    char* end = nullptr;
    const long long given = std::strtoll(epoch, &end, 10);
    if (*end == '\0') now = static_cast<std::time_t>(given);
  }
  std::tm parts = {};
  ::gmtime_r(&now, &parts);
  char text[32];
  const std::size_t length = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return {text, length};
}

// An attribute takes at most 65,536 bytes of an object's header. Texts are stored elsewhere.
void write_root(hid_t file, const SnapshotLayout& layout, const SnapshotInfo& info) {
  const bool is_new = layout.format.quantised() || layout.format.values_are_keys;
  const std::int64_t version = is_new ? newest_version : oldest_version;
  write_attribute(file, "kvzap_format_version", version);
  const std::string created = info.created.empty() ? time_of_writing() : info.created;
  const std::string kv_type = name_of(layout.format, layout.dtype);
  const AttributeWriter write(file);
  list_root(layout, info, version, created, kv_type, layout.n_layers(), write);
  for (const auto& [name, value] : info.further) {
    std::visit([&, &name = name](const auto& held) { write_attribute(file, name, held); }, value);
  }
}

// Extents of the chunks of rows: a query head each, or as many rows as fit chunk_bytes.
std::vector<hsize_t> chunk_of_rows(std::vector<hsize_t> extents, std::int64_t row_bytes) {
  const auto most = static_cast<hsize_t>(std::max<std::int64_t>(1, chunk_bytes / row_bytes));
  extents[0] = extents.size() == 3 ? 1 : std::min(extents[0], most);
  return extents;
}

// Creates a small data set with its content. All data sets in one run are allocated at once, so
// that their places are known and the same cache gives the same bytes.
template <class Element>
Hdf5Handle content_set(hid_t file, const std::string& path, const std::vector<hsize_t>& extents,
                       const std::vector<Element>& content) {
  const Hdf5Handle create = in_one_run(H5D_ALLOC_TIME_EARLY);
  Hdf5Handle set = new_set(file, path, element_type<Element>().file, extents, create);
  write_content(set, content);
  return set;
}

template <class Element>
void content_set(hid_t file, const std::string& path, const std::vector<Element>& content) {
  content_set(file, path, {content.size()}, content);
}

// Compression may add a little, and fills the last chunk of each data set.
std::int64_t bytes_in_memory_at_most(const SnapshotLayout& layout, const SnapshotInfo& info) {
  const std::int64_t bytes = snapshot_bytes_at_most(layout, info);
  if (layout.compress == 0) return bytes;
  return bytes + bytes / 64 +
         static_cast<std::int64_t>(layout.groups.size()) * n_row_kinds * chunk_bytes;
}

// Copies bytes from one file to the same place in another. Returns their checksum.
std::uint32_t copy_bytes(int from, int to, std::int64_t begin, std::int64_t end) {
  std::vector<char> buffer(static_cast<std::size_t>(std::min(copied_bytes, end - begin)));
  std::uint32_t crc = 0;
  while (begin < end) {
    const std::int64_t bytes = std::min(copied_bytes, end - begin);
    files::read_fully(from, buffer.data(), bytes, begin);
    files::write_fully(to, buffer.data(), bytes, begin);
    crc = files::crc32c(buffer.data(), static_cast<std::size_t>(bytes), crc);
    begin += bytes;
  }
  return crc;
}

// The default driver resolves symbolic links, and a file in memory has no real path.
Hdf5Handle memory_access() {
  Hdf5Handle access = serial_access();
  checked_hdf5(H5Pset_fapl_stdio(access), "H5Pset_fapl_stdio");
  return access;
}

}  // namespace

RowElement element_of_rows(RowKind kind, DType dtype) {
  const auto copy_of = [](hid_t type) { return Hdf5Handle(H5Tcopy(type), H5Tclose, "H5Tcopy"); };
  switch (type_of(kind)) {
    case NumberType::int32:
      return {copy_of(H5T_STD_I32LE), "int32"};
    case NumberType::uint8:
      return {copy_of(H5T_STD_U8LE), "uint8"};
    case NumberType::bf16:
      return {type_in_file(DType::bf16), "bf16"};
    case NumberType::dtype:
      return {type_in_file(dtype), fmt::format("{} as attribute 'dtype' says", name_of(dtype))};
    case NumberType::float32:
      break;
  }
  return {copy_of(H5T_IEEE_F32LE), "float32"};
}

std::int64_t snapshot_bytes_at_most(const SnapshotLayout& layout, const SnapshotInfo& info) {
  // A group and its data sets take about 6 KiB, with quantised rows 9 KiB.
  std::size_t bytes = (64u << 10) + (16u << 10) * layout.groups.size();
  bytes += layout.groups.size() * static_cast<std::size_t>(layout.n_kv_heads + 1) * 64;
  for (const std::string* text : {&info.model, &info.options, &info.run_state, &info.prune}) {
    bytes += text->size() + 4096;
  }
  bytes += info.token_ids.size() * sizeof(TokenId) + info.logits.size() * sizeof(float);
  bytes += 1024 * info.state.size();
  for (const auto& [name, value] : info.further) {
    bytes += 4 * name.size() + 1024;
    if (const auto* text = std::get_if<std::string>(&value)) bytes += text->size() + 4096;
  }
  return layout.row_bytes() + static_cast<std::int64_t>(bytes);
}

SnapshotStructure::SnapshotStructure(const SnapshotLayout& layout, const SnapshotInfo& info)
    : m_layout(layout),
      m_memory(bytes_in_memory_at_most(layout, info)),
      m_places(layout.groups.size() * n_row_kinds, -1),
      m_checksum_places(layout.groups.size(), -1) {
  const Hdf5Handle access = memory_access();
  m_file = Hdf5Handle(H5Fcreate(m_memory.path().c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access),
                      H5Fclose, "H5Fcreate");
  write_root(m_file, layout, info);
  {
    const Hdf5Handle state = new_group(m_file, "/state");
    const AttributeWriter write(state);
    list_counts(layout.counts, write);
    for (const auto& [name, value] : info.state) write_attribute(state, name, value);
  }
  content_set(m_file, "/token_ids", info.token_ids);
  if (!info.logits.empty()) content_set(m_file, "/logits", info.logits);
  new_group(m_file, "/layers");
  if (layout.has_context) {
    const Hdf5Handle context = new_group(m_file, "/context");
    write_attribute(context, "tokens", layout.context_tokens);
    const AttributeWriter write(context);
    list_counts(layout.context_counts, write);
    new_group(m_file, "/context/layers");
  }
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) make_group(group);
  if (layout.compress == 0) close();
}

void SnapshotStructure::make_group(int group) {
  const SnapshotGroup& of = m_layout.groups[group];
  const std::string path = m_layout.path(group);
  const Hdf5Handle handle = new_group(m_file, path);
  write_attribute(handle, "ring_first", of.ring_first);
  if (of.own_ring > 0) write_attribute(handle, "own_ring", of.own_ring);
  if (of.row_dim != m_layout.head_dim) write_attribute(handle, "row_dim", of.row_dim);
  content_set(m_file, path + "/offsets", of.offsets);
  if (m_layout.is_of_context(group)) content_set(m_file, path + "/retained", of.retained);
  const std::vector<RowKind> kinds = m_layout.kinds(group);
  std::string names;
  for (const RowKind kind : kinds) {
    names += fmt::format("{}{}", names.empty() ? "" : " ", name_of(kind));
    make_rows(group, kind);
  }
  const auto heads = static_cast<std::size_t>(m_layout.n_kv_heads);
  const std::vector<std::uint32_t> none(kinds.size() * heads, 0);
  const Hdf5Handle checksums = content_set(m_file, path + "/crc32c", {kinds.size(), heads}, none);
  write_attribute(checksums, "kinds", names);
  m_checksum_places[group] = place_of(checksums);
}

void SnapshotStructure::make_rows(int group, RowKind kind) {
  const std::vector<std::uint64_t> wanted = m_layout.extents(group, kind);
  const std::vector<hsize_t> extents(wanted.begin(), wanted.end());
  const std::int64_t row_bytes = m_layout.row_bytes(group, kind);
  std::int64_t bytes = row_bytes;
  for (std::size_t i = 0; i + (extents.size() > 1 ? 1 : 0) < extents.size(); ++i) {
    bytes *= static_cast<std::int64_t>(extents[i]);
  }
  const bool in_run = m_layout.compress == 0 || bytes == 0;
  const Hdf5Handle create = in_run
                                ? in_one_run(H5D_ALLOC_TIME_EARLY)
                                : in_chunks(chunk_of_rows(extents, row_bytes), m_layout.compress);
  const Hdf5Handle set = new_set(m_file, m_layout.path(group) + "/" + name_of(kind),
                                 element_of_rows(kind, m_layout.dtype).type, extents, create);
  if (kind == RowKind::recent_queries) {
    write_attribute(set, "first", m_layout.groups[group].query_first);
  } else if (kind == RowKind::state) {
    write_attribute(set, "heads", m_layout.groups[group].state_heads);
  }
  if (!in_run || bytes == 0) return;
  const std::int64_t place = place_of(set);
  m_places[static_cast<std::size_t>(group) * n_row_kinds + static_cast<std::size_t>(kind)] = place;
  m_extents.push_back({place, bytes, {}});
}

void SnapshotStructure::write_rows(int group, RowKind kind, std::int64_t first, std::int64_t rows,
                                   const void* data) {
  if (rows == 0) return;
  const std::vector<std::uint64_t> extents = m_layout.extents(group, kind);
  std::vector<hsize_t> start(extents.size(), 0);
  std::vector<hsize_t> count(extents.begin(), extents.end());
  // Whole query heads, or rows.
  const std::uint64_t unit = extents.size() == 3 ? extents[1] : 1;
  start[0] = static_cast<hsize_t>(first) / unit;
  count[0] = static_cast<hsize_t>(rows) / unit;
  write_part(open_rows(group, kind), element_of_rows(kind, m_layout.dtype).type, start, count,
             data);
}

// Keeps the data set open until the next group. A chunk that is not full waits in the data set's
// cache; writing it twice would leave a hole in the file.
hid_t SnapshotStructure::open_rows(int group, RowKind kind) {
  if (m_open_group != group) m_open.clear();
  m_open_group = group;
  Hdf5Handle& open = m_open[kind];
  if (open < 0) {
    const std::string path = m_layout.path(group) + "/" + name_of(kind);
    open = Hdf5Handle(H5Dopen2(m_file, path.c_str(), H5P_DEFAULT), H5Dclose, "H5Dopen2");
  }
  return open;
}

void SnapshotStructure::move_rows([[maybe_unused]] int group, [[maybe_unused]] int descriptor) {
#if H5_VERSION_GE(1, 10, 5)
  checked_hdf5(H5Fflush(m_file, H5F_SCOPE_GLOBAL), "H5Fflush");
  for (const RowKind kind : m_layout.kinds(group)) {
    const hid_t set = open_rows(group, kind);
    const Hdf5Handle create(H5Dget_create_plist(set), H5Pclose, "H5Dget_create_plist");
    if (checked_hdf5(H5Pget_layout(create), "H5Pget_layout") != H5D_CHUNKED) continue;
    const Hdf5Handle space(H5Dget_space(set), H5Sclose, "H5Dget_space");
    hsize_t chunks = 0;
    checked_hdf5(H5Dget_num_chunks(set, space, &chunks), "H5Dget_num_chunks");
    for (hsize_t i = 0; i < chunks; ++i) {
      haddr_t place = HADDR_UNDEF;
      hsize_t bytes = 0;
      checked_hdf5(H5Dget_chunk_info(set, space, i, nullptr, nullptr, &place, &bytes),
                   "H5Dget_chunk_info");
      SealedExtent extent{static_cast<std::int64_t>(place), static_cast<std::int64_t>(bytes), {}};
      extent.crc =
          copy_bytes(m_memory.descriptor(), descriptor, extent.begin, extent.begin + extent.bytes);
      m_memory.punch(extent.begin, extent.bytes);
      m_extents.push_back(extent);
    }
  }
#else
  throw Error("compressed snapshots take HDF5 1.10.5 or newer");
#endif
}

void SnapshotStructure::close() {
  m_open.clear();
  if (m_file >= 0) checked_hdf5(m_file.close(), "H5Fclose");
}

void SnapshotStructure::set_checksums(int group, const std::vector<std::uint32_t>& crcs) {
  close();
  files::write_fully(m_memory.descriptor(), crcs.data(),
                     static_cast<std::int64_t>(crcs.size() * sizeof(std::uint32_t)),
                     m_checksum_places[group]);
}

std::int64_t SnapshotStructure::write(int descriptor) {
  close();
  // Tests whether HDF5 accepts the file. The test reads the copy in memory: HDF5 1.10 crashes at
  // the end of the program if a file cannot be closed. The bytes on disk are compared with this
  // copy.
  Hdf5Handle hdf5(H5Fopen(m_memory.path().c_str(), H5F_ACC_RDONLY, memory_access()), H5Fclose,
                  "H5Fopen");
  Hdf5Handle layers(H5Gopen2(hdf5, "/layers", H5P_DEFAULT), H5Gclose, "H5Gopen2");
  checked_hdf5(layers.close(), "H5Gclose");
  checked_hdf5(hdf5.close(), "H5Fclose");
  std::sort(m_extents.begin(), m_extents.end(),
            [](const SealedExtent& a, const SealedExtent& b) { return a.begin < b.begin; });
  Seal seal;
  seal.sealed_bytes = m_memory.bytes();
  seal.extents = m_extents;
  seal.crc = crc_beside(m_memory.descriptor(), seal.sealed_bytes, m_extents);
  std::int64_t at = 0;
  for (const SealedExtent& extent : m_extents) {
    copy_bytes(m_memory.descriptor(), descriptor, at, extent.begin);
    at = extent.begin + extent.bytes;
  }
  copy_bytes(m_memory.descriptor(), descriptor, at, seal.sealed_bytes);
  const std::vector<char> bytes = seal_bytes(seal);
  files::write_fully(descriptor, bytes.data(), static_cast<std::int64_t>(bytes.size()),
                     seal.sealed_bytes);
  const std::int64_t end = seal.sealed_bytes + static_cast<std::int64_t>(bytes.size());
  int code = 0;
  do {
    code = ::ftruncate(descriptor, static_cast<off_t>(end)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0) throw files::system_error("cannot be cut to its length", code);
  return end;
}

}  // namespace kvzap::io
