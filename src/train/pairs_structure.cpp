#include "train/pairs_structure.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>

#include "files/temporary_file.hpp"
#include "io/container.hpp"
#include "io/hdf5_file.hpp"
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

// Data sets that are written with the structure.
struct FixedData {
  std::vector<std::pair<const char*, std::vector<std::int64_t>>> integers;
  io::Hdf5Handle subset_type;
  std::string subsets;
};

// Returns an id that distinguishes this file from all others, including files of the same command.
// Their chunks lie elsewhere, so their recovery files would damage this file.
std::int64_t new_id() {
  std::random_device device;
  const std::uint64_t high = device(), low = device();
  return static_cast<std::int64_t>((high << 32 | low) >> 1);
}

FixedData fixed_data(const PairsPlan& plan) {
  std::vector<std::int64_t> positions, lines, tokens;
  std::size_t size = 1;
  for (const auto& text : plan.texts) size = std::max(size, text.subset.size());
  std::string subsets;
  for (const auto& text : plan.texts) {
    positions.insert(positions.end(), text.positions.begin(), text.positions.end());
    lines.push_back(text.line);
    tokens.push_back(text.tokens);
    subsets += text.subset + std::string(size - text.subset.size(), '\0');
  }
  FixedData data{{{"/id", {new_id()}},
                  {"/positions", std::move(positions)},
                  {"/texts/begin", text_begins(plan)},
                  {"/texts/line", std::move(lines)},
                  {"/texts/tokens", std::move(tokens)}},
                 io::text_type(size),
                 std::move(subsets)};
  io::checked_hdf5(H5Tset_strpad(data.subset_type, H5T_STR_NULLPAD), "H5Tset_strpad");
  return data;
}

void write_attributes(hid_t file, const PairsPlan& plan) {
  PairsLayout layout;
  PairsInfo& info = layout.info;
  info.model = plan.model;
  info.dtype = plan.dtype;
  info.hidden_size = plan.hidden_size;
  info.layers = plan.layers;
  info.kv_heads = plan.kv_heads;
  info.planned_pairs = text_begins(plan).back();
  info.planned_texts = static_cast<std::int64_t>(plan.texts.size());
  layout.command = command_text(plan);
  write_pairs_attributes(file, layout);
}

}  // namespace

std::vector<std::int64_t> text_begins(const PairsPlan& plan) {
  std::vector<std::int64_t> begins{0};
  for (const auto& text : plan.texts) {
    begins.push_back(begins.back() + static_cast<std::int64_t>(text.positions.size()));
  }
  return begins;
}

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
  const io::Hdf5Handle copy = io::new_set(file, "chunk", type, extents, create);
  const std::vector<char> zeros(static_cast<std::size_t>(extents[0] * extents[1]) *
                                H5Tget_size(type));
  io::checked_hdf5(H5Dwrite(copy, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, zeros.data()), "H5Dwrite");
  io::checked_hdf5(H5Fflush(file, H5F_SCOPE_GLOBAL), "H5Fflush");
  const hsize_t origin[2] = {0, 0};
  hsize_t bytes = 0;
  io::checked_hdf5(H5Dget_chunk_storage_size(copy, origin, &bytes), "H5Dget_chunk_storage_size");
  std::vector<char> packed(static_cast<std::size_t>(bytes));
  std::uint32_t left_out = 0;
#if H5_VERSION_GE(2, 0, 0)
  std::size_t size = packed.size();
  const herr_t status = H5Dread_chunk(copy, H5P_DEFAULT, origin, &left_out, packed.data(), &size);
#else
  const herr_t status = H5Dread_chunk(copy, H5P_DEFAULT, origin, &left_out, packed.data());
#endif
  io::checked_hdf5(status, "H5Dread_chunk");
  return packed;
}

namespace {

// Writing a first chunk makes HDF5 set up the index of all chunks.
void write_first_chunk(hid_t data_set, const std::vector<char>& zeros) {
  const hsize_t origin[2] = {0, 0};
  io::checked_hdf5(H5Dwrite_chunk(data_set, H5P_DEFAULT, 0, origin, zeros.size(), zeros.data()),
                   "H5Dwrite_chunk");
}

void write_objects(hid_t file, const PairsPlan& plan, const FixedData& fixed) {
  const io::Hdf5Handle plain = io::in_one_run(H5D_ALLOC_TIME_LATE);
  io::new_group(file, "/texts");
  for (const auto& [name, values] : fixed.integers) {
    io::new_set(file, name, H5T_STD_I64LE, {values.size()}, plain);
  }
  io::new_set(file, "/texts/subset", fixed.subset_type, {plan.texts.size()}, plain);

  const std::int64_t planned_pairs = text_begins(plan).back();
  const Chunk chunk = chunk_of(plan, planned_pairs);
  const auto pairs = static_cast<hsize_t>(planned_pairs);
  const auto columns = static_cast<hsize_t>(plan.hidden_size);
  const auto heads = static_cast<hsize_t>(plan.kv_heads);
  const auto chunk_pairs = static_cast<hsize_t>(chunk.pairs);
  // Chunks that are not compressed need a filter, too: without one HDF5 allocates all at once.
  const io::Hdf5Handle hidden_creation =
      io::in_chunks({chunk_pairs, static_cast<hsize_t>(chunk.columns)}, plan.compression);
  const io::Hdf5Handle score_creation = io::in_chunks({chunk_pairs, heads}, plan.compression);
  const io::Hdf5Handle hidden_type = io::type_in_file(plan.dtype);
  std::vector<char> hidden_zeros, score_zeros;
  io::new_group(file, "/layers");
  for (int l = 0; l < plan.layers; ++l) {
    io::new_group(file, fmt::format("/layers/{}", l));
    const io::Hdf5Handle hidden = io::new_set(file, pairs_data_set(l, "hidden"), hidden_type,
                                              {pairs, columns}, hidden_creation);
    const io::Hdf5Handle scores = io::new_set(file, pairs_data_set(l, "scores"), H5T_IEEE_F32LE,
                                              {pairs, heads}, score_creation);
    if (l == 0) hidden_zeros = packed_zeros(hidden);
    if (l == 0) score_zeros = packed_zeros(scores);
    write_first_chunk(hidden, hidden_zeros);
    write_first_chunk(scores, score_zeros);
  }
}

void write_fixed_data(hid_t file, const FixedData& fixed) {
  const auto open = [&](const char* name) {
    return io::Hdf5Handle(H5Dopen2(file, name, H5P_DEFAULT), H5Dclose, "H5Dopen2");
  };
  for (const auto& [name, values] : fixed.integers) io::write_content(open(name), values);
  io::checked_hdf5(H5Dwrite(open("/texts/subset"), fixed.subset_type, H5S_ALL, H5S_ALL, H5P_DEFAULT,
                            fixed.subsets.data()),
                   "H5Dwrite");
}

// Reserves disk space for everything but the chunks.
void reserve_structure(const fs::path& path, const PairsPlan& plan, const FixedData& fixed) {
  const std::int64_t pairs = text_begins(plan).back();
  const Chunk chunk = chunk_of(plan, pairs);
  const std::int64_t chunks = (pairs / chunk.pairs + 1) * (plan.hidden_size / chunk.columns + 2);
  std::int64_t bytes = (std::int64_t{1} << 18) + pairs * std::int64_t{8};
  bytes += plan.layers * (chunks * std::int64_t{32} + (std::int64_t{1} << 14));
  bytes += static_cast<std::int64_t>(plan.texts.size()) *
           (std::int64_t{24} + static_cast<std::int64_t>(H5Tget_size(fixed.subset_type)));
  const files::FileDescriptor descriptor(path, O_RDWR | O_CLOEXEC);
  if (descriptor.get() < 0) throw files::system_error("cannot be opened", errno);
  io::reserve(descriptor.get(), 0, bytes);
}

}  // namespace

void write_structure(const fs::path& path, const PairsPlan& plan) {
  const FixedData fixed = fixed_data(plan);
  reserve_structure(path, plan, fixed);
  {
    io::Hdf5Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, creation_access()),
                        H5Fclose, "H5Fcreate");
    write_attributes(file, plan);
    io::checked_hdf5(file.close(), "H5Fclose");
  }
  {
    io::Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, structure_access()), H5Fclose,
                        "H5Fopen");
    write_objects(file, plan, fixed);
    io::checked_hdf5(file.close(), "H5Fclose");
  }
  const auto metadata_bytes = static_cast<std::int64_t>(fs::file_size(path));
  io::Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, io::serial_access()), H5Fclose,
                      "H5Fopen");
  write_fixed_data(file, fixed);
  io::set_attribute(file, "metadata_bytes", metadata_bytes);
  io::checked_hdf5(file.close(), "H5Fclose");
}

FixedRegion fixed_region(hid_t file) {
  FixedRegion region{std::numeric_limits<std::int64_t>::max(), 0};
  for (const char* name : fixed_data_sets) {
    const io::Hdf5Handle data_set(H5Dopen2(file, name, H5P_DEFAULT), H5Dclose, "H5Dopen2");
    const std::int64_t begin = io::place_of(data_set);
    region.begin = std::min(region.begin, begin);
    region.end =
        std::max(region.end, begin + static_cast<std::int64_t>(H5Dget_storage_size(data_set)));
  }
  return region;
}

}  // namespace kvzap::train
