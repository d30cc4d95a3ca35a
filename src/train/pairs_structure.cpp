#include "train/pairs_structure.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "files/temporary_file.hpp"
#include "train/pairs_layout.hpp"

namespace kvzap::train {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t standard_chunk_pairs = 1024;
// One rank packs a chunk. A row of several chunks keeps several ranks busy.
constexpr std::int64_t standard_chunk_columns = 512;
// Data sets that HDF5 allocates when they are written, after everything that changes in place.
constexpr const char* fixed_data_sets[] = {"/id",         "/positions",    "/texts/begin",
                                           "/texts/line", "/texts/tokens", "/texts/subset"};

std::string command_text(const PairsPlan& plan) {
  return nlohmann::json(plan.command)
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Avoids version 3 of the superblock: it would mark the file as open after a writer was killed.
io::Hdf5Handle creation_access() {
  io::Hdf5Handle access = io::serial_access();
  io::checked_hdf5(H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_LATEST),
                   "H5Pset_libver_bounds");
  return access;
}

// Allocates the chunk index at its final length from the start.
io::Hdf5Handle structure_access() {
  io::Hdf5Handle access = io::serial_access();
  io::checked_hdf5(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_LATEST),
                   "H5Pset_libver_bounds");
  return access;
}

io::Hdf5Handle create_data_set(hid_t file, const char* name, hid_t type,
                               const std::vector<hsize_t>& extents, hid_t create) {
  const io::Hdf5Handle space = io::simple_space(extents);
  return {H5Dcreate2(file, name, type, space, H5P_DEFAULT, create, H5P_DEFAULT), H5Dclose,
          "H5Dcreate2"};
}

io::Hdf5Handle subset_type(const PairsPlan& plan) {
  std::size_t size = 1;
  for (const auto& text : plan.texts) size = std::max(size, text.subset.size());
  io::Hdf5Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "H5Tcopy");
  io::checked_hdf5(H5Tset_size(type, size), "H5Tset_size");
  io::checked_hdf5(H5Tset_cset(type, H5T_CSET_UTF8), "H5Tset_cset");
  io::checked_hdf5(H5Tset_strpad(type, H5T_STR_NULLPAD), "H5Tset_strpad");
  return type;
}

struct Chunk {
  std::int64_t pairs;
  std::int64_t columns;
};

Chunk chunk_of(const PairsPlan& plan, std::int64_t planned_pairs) {
  std::int64_t pairs = plan.chunk_pairs, columns = plan.chunk_columns;
  if (pairs == 0) {
    // If all texts have the same number of pairs, a chunk holds one text.
    for (const auto& text : plan.texts) {
      pairs = std::max(pairs, static_cast<std::int64_t>(text.positions.size()));
    }
    constexpr std::int64_t least = 64;
    pairs = std::clamp(pairs, least, standard_chunk_pairs);
  }
  if (columns == 0) {
    // Chunks of equal width: the last one of a row would otherwise be padded. (576 columns in
    // chunks of 512 would take 1,024.)
    const std::int64_t chunks =
        (plan.hidden_size + standard_chunk_columns - 1) / standard_chunk_columns;
    columns = (plan.hidden_size + chunks - 1) / chunks;
  }
  return {std::min(pairs, planned_pairs), std::min(columns, plan.hidden_size)};
}

void write_attributes(hid_t file, const PairsPlan& plan, std::int64_t pairs) {
  const io::Hdf5Handle root(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose, "H5Gopen2");
  io::write_attribute(root, "kvzap_pairs_version", pairs_version);
  io::write_attribute(root, "model", plan.model);
  io::write_attribute(root, "dtype", std::string(name_of(plan.dtype)));
  io::write_attribute(root, "hidden_size", plan.hidden_size);
  io::write_attribute(root, "layers", static_cast<std::int64_t>(plan.layers));
  io::write_attribute(root, "kv_heads", static_cast<std::int64_t>(plan.kv_heads));
  io::write_attribute(root, "planned_pairs", pairs);
  io::write_attribute(root, "planned_texts", static_cast<std::int64_t>(plan.texts.size()));
  io::write_attribute(root, "command", command_text(plan));
  for (const char* name : {"pairs", "texts", "written", "metadata_bytes"}) {
    io::write_attribute(root, name, std::int64_t{0});
  }
}

}  // namespace

std::vector<char> packed_zeros(hid_t data_set) {
  const io::Hdf5Handle create(H5Dget_create_plist(data_set), H5Pclose, "H5Dget_create_plist");
  constexpr unsigned level = 1;
  io::checked_hdf5(H5Pmodify_filter(create, H5Z_FILTER_DEFLATE, H5Z_FLAG_OPTIONAL, 1, &level),
                   "H5Pmodify_filter");
  std::vector<hsize_t> extents(2);
  io::checked_hdf5(H5Pget_chunk(create, 2, extents.data()), "H5Pget_chunk");
  const io::Hdf5Handle access = io::property_list(H5P_FILE_ACCESS);
  constexpr std::size_t growth = std::size_t{1} << 16;
  io::checked_hdf5(H5Pset_fapl_core(access, growth, false), "H5Pset_fapl_core");
  const io::Hdf5Handle file(H5Fcreate("kvzap-chunk", H5F_ACC_TRUNC, H5P_DEFAULT, access), H5Fclose,
                            "H5Fcreate");
  const io::Hdf5Handle type(H5Dget_type(data_set), H5Tclose, "H5Dget_type");
  const io::Hdf5Handle copy = create_data_set(file, "chunk", type, extents, create);
  const std::vector<char> zeros(static_cast<std::size_t>(extents[0] * extents[1]) *
                                H5Tget_size(type));
  io::checked_hdf5(H5Dwrite(copy, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, zeros.data()), "H5Dwrite");
  io::checked_hdf5(H5Fflush(file, H5F_SCOPE_GLOBAL), "H5Fflush");
  const hsize_t origin[2] = {0, 0};
  hsize_t bytes = 0;
  io::checked_hdf5(H5Dget_chunk_storage_size(copy, origin, &bytes), "H5Dget_chunk_storage_size");
  std::vector<char> packed(static_cast<std::size_t>(bytes));
  std::uint32_t left_out = 0;
  io::checked_hdf5(H5Dread_chunk(copy, H5P_DEFAULT, origin, &left_out, packed.data()),
                   "H5Dread_chunk");
  return packed;
}

namespace {

// Writing a first chunk makes HDF5 set up the index of all chunks.
void write_first_chunk(hid_t data_set, const std::vector<char>& zeros) {
  const hsize_t origin[2] = {0, 0};
  io::checked_hdf5(H5Dwrite_chunk(data_set, H5P_DEFAULT, 0, origin, zeros.size(), zeros.data()),
                   "H5Dwrite_chunk");
}

void write_objects(hid_t file, const PairsPlan& plan, std::int64_t pairs) {
  const Chunk chunk = chunk_of(plan, pairs);
  const auto group = [&](const std::string& name) {
    io::Hdf5Handle(H5Gcreate2(file, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose,
                   "H5Gcreate2");
  };
  const auto creation = [] {
    io::Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
    // Without times, the same pairs give the same bytes.
    io::checked_hdf5(H5Pset_obj_track_times(create, false), "H5Pset_obj_track_times");
    return create;
  };
  const auto chunked = [&](const std::vector<hsize_t>& extents) {
    io::Hdf5Handle create = creation();
    io::checked_hdf5(H5Pset_chunk(create, static_cast<int>(extents.size()), extents.data()),
                     "H5Pset_chunk");
    if (plan.compression > 0) io::checked_hdf5(H5Pset_shuffle(create), "H5Pset_shuffle");
    // Level 0 stores without compression. It still needs a filter: without one HDF5 allocates all
    // chunks at once.
    io::checked_hdf5(H5Pset_deflate(create, static_cast<unsigned>(plan.compression)),
                     "H5Pset_deflate");
    return create;
  };
  const io::Hdf5Handle plain = creation();
  io::checked_hdf5(H5Pset_layout(plain, H5D_CONTIGUOUS), "H5Pset_layout");
  io::checked_hdf5(H5Pset_alloc_time(plain, H5D_ALLOC_TIME_LATE), "H5Pset_alloc_time");
  io::checked_hdf5(H5Pset_fill_time(plain, H5D_FILL_TIME_NEVER), "H5Pset_fill_time");
  const auto texts = static_cast<hsize_t>(plan.texts.size());
  group("/texts");
  create_data_set(file, "/id", H5T_STD_I64LE, {1}, plain);
  create_data_set(file, "/positions", H5T_STD_I64LE, {static_cast<hsize_t>(pairs)}, plain);
  create_data_set(file, "/texts/begin", H5T_STD_I64LE, {texts + 1}, plain);
  create_data_set(file, "/texts/line", H5T_STD_I64LE, {texts}, plain);
  create_data_set(file, "/texts/tokens", H5T_STD_I64LE, {texts}, plain);
  create_data_set(file, "/texts/subset", subset_type(plan), {texts}, plain);

  const io::Hdf5Handle hidden_type = io::type_in_file(plan.dtype);
  const std::vector<hsize_t> hidden_chunk{static_cast<hsize_t>(chunk.pairs),
                                          static_cast<hsize_t>(chunk.columns)};
  const std::vector<hsize_t> score_chunk{static_cast<hsize_t>(chunk.pairs),
                                         static_cast<hsize_t>(plan.kv_heads)};
  const io::Hdf5Handle hidden_creation = chunked(hidden_chunk);
  const io::Hdf5Handle score_creation = chunked(score_chunk);
  std::vector<char> hidden_zeros, score_zeros;
  group("/layers");
  for (int l = 0; l < plan.layers; ++l) {
    group(fmt::format("/layers/{}", l));
    const io::Hdf5Handle hidden = create_data_set(
        file, pairs_data_set(l, "hidden").c_str(), hidden_type,
        {static_cast<hsize_t>(pairs), static_cast<hsize_t>(plan.hidden_size)}, hidden_creation);
    const io::Hdf5Handle scores = create_data_set(
        file, pairs_data_set(l, "scores").c_str(), H5T_IEEE_F32LE,
        {static_cast<hsize_t>(pairs), static_cast<hsize_t>(plan.kv_heads)}, score_creation);
    if (l == 0) hidden_zeros = packed_zeros(hidden);
    if (l == 0) score_zeros = packed_zeros(scores);
    write_first_chunk(hidden, hidden_zeros);
    write_first_chunk(scores, score_zeros);
  }
}

void write_integers(hid_t file, const char* name, const std::vector<std::int64_t>& values) {
  const io::Hdf5Handle data_set(H5Dopen2(file, name, H5P_DEFAULT), H5Dclose, "H5Dopen2");
  io::checked_hdf5(
      H5Dwrite(data_set, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()),
      "H5Dwrite");
}

void set_attribute(hid_t object, const char* name, std::int64_t value) {
  const io::Hdf5Handle attribute(H5Aopen(object, name, H5P_DEFAULT), H5Aclose, "H5Aopen");
  io::checked_hdf5(H5Awrite(attribute, H5T_NATIVE_INT64, &value), "H5Awrite");
}

// Returns an id that distinguishes this file from all others, including files of the same command.
// Their chunks lie elsewhere, so their recovery files would damage this file.
std::int64_t new_id() {
  std::random_device device;
  const std::uint64_t high = device(), low = device();
  return static_cast<std::int64_t>((high << 32 | low) >> 1);
}

void write_fixed_data(hid_t file, const PairsPlan& plan, const std::vector<std::int64_t>& begins) {
  std::vector<std::int64_t> positions, lines, tokens;
  const io::Hdf5Handle type = subset_type(plan);
  const std::size_t size = H5Tget_size(type);
  std::string subsets;
  for (const auto& text : plan.texts) {
    positions.insert(positions.end(), text.positions.begin(), text.positions.end());
    lines.push_back(text.line);
    tokens.push_back(text.tokens);
    subsets += text.subset;
    subsets.resize((subsets.size() + size - text.subset.size()), '\0');
  }
  write_integers(file, "/id", {new_id()});
  write_integers(file, "/positions", positions);
  write_integers(file, "/texts/begin", begins);
  write_integers(file, "/texts/line", lines);
  write_integers(file, "/texts/tokens", tokens);
  const io::Hdf5Handle data_set(H5Dopen2(file, "/texts/subset", H5P_DEFAULT), H5Dclose, "H5Dopen2");
  io::checked_hdf5(H5Dwrite(data_set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, subsets.data()),
                   "H5Dwrite");
}

// Reserves disk space for everything but the chunks.
void reserve_structure(const fs::path& path, const PairsPlan& plan, std::int64_t pairs) {
  const Chunk chunk = chunk_of(plan, pairs);
  const std::int64_t chunks = (pairs / chunk.pairs + 1) * (plan.hidden_size / chunk.columns + 2);
  std::int64_t bytes = (std::int64_t{1} << 18) + pairs * std::int64_t{8};
  bytes += plan.layers * (chunks * std::int64_t{32} + (std::int64_t{1} << 14));
  bytes += static_cast<std::int64_t>(plan.texts.size()) *
           (std::int64_t{24} + static_cast<std::int64_t>(H5Tget_size(subset_type(plan))));
  const files::FileDescriptor descriptor(path, O_RDWR | O_CLOEXEC);
  if (descriptor.get() < 0) throw files::system_error("cannot be opened", errno);
  io::reserve(descriptor.get(), 0, bytes);
}

}  // namespace

std::vector<std::int64_t> text_begins(const PairsPlan& plan) {
  std::vector<std::int64_t> begins{0};
  for (const auto& text : plan.texts) {
    begins.push_back(begins.back() + static_cast<std::int64_t>(text.positions.size()));
  }
  return begins;
}

void write_structure(const fs::path& path, const PairsPlan& plan) {
  const std::vector<std::int64_t> begins = text_begins(plan);
  reserve_structure(path, plan, begins.back());
  {
    io::Hdf5Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, creation_access()),
                        H5Fclose, "H5Fcreate");
    write_attributes(file, plan, begins.back());
    io::checked_hdf5(file.close(), "H5Fclose");
  }
  {
    io::Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, structure_access()), H5Fclose,
                        "H5Fopen");
    write_objects(file, plan, begins.back());
    io::checked_hdf5(file.close(), "H5Fclose");
  }
  const auto metadata_bytes = static_cast<std::int64_t>(fs::file_size(path));
  io::Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, io::serial_access()), H5Fclose,
                      "H5Fopen");
  write_fixed_data(file, plan, begins);
  {
    const io::Hdf5Handle root(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose, "H5Gopen2");
    set_attribute(root, "metadata_bytes", metadata_bytes);
  }
  io::checked_hdf5(file.close(), "H5Fclose");
}

FixedRegion fixed_region(hid_t file) {
  FixedRegion region{std::numeric_limits<std::int64_t>::max(), 0};
  for (const char* name : fixed_data_sets) {
    const io::Hdf5Handle data_set(H5Dopen2(file, name, H5P_DEFAULT), H5Dclose, "H5Dopen2");
    const haddr_t offset = H5Dget_offset(data_set);
    if (offset == HADDR_UNDEF) throw Error(fmt::format("'{}' has no place in the file", name));
    const auto begin = static_cast<std::int64_t>(offset);
    region.begin = std::min(region.begin, begin);
    region.end =
        std::max(region.end, begin + static_cast<std::int64_t>(H5Dget_storage_size(data_set)));
  }
  return region;
}

}  // namespace kvzap::train
