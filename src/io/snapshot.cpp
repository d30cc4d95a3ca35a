#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <kvzap/snapshot.hpp>
#include <limits>
#include <new>
#include <system_error>
#include <vector>

#include "base/instantiate.hpp"
#include "io/hdf5_objects.hpp"
#include "io/temporary_file.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using detail::agree_on_file;
using detail::checked_hdf5;
using detail::CollectiveOutcome;
using detail::FileDescriptor;
using detail::Hdf5Handle;
using detail::open_together;
using detail::property_list;
using detail::reserve;
using detail::serial_access;
using detail::simple_space;
using detail::system_error;
using detail::TemporaryFile;
using detail::transfer_together;
using detail::type_in_file;
using detail::type_in_memory;
using detail::write_attribute;

constexpr std::int64_t format_version = 1;

// Keys (or values) that one rank hands to one collective write. Bounds what MPI-IO buffers, and
// keeps byte counts far from MPI's int.
constexpr std::int64_t max_transfer_bytes = std::int64_t{16} << 20;

// Extents of the whole sequence, over all ranks.
struct Layout {
  DType dtype;
  std::int64_t head_dim;
  std::int64_t window;
  std::int64_t page_rows;
  std::int64_t tokens;
  std::int64_t n_kv_heads;
  std::vector<std::vector<std::int64_t>> offsets;  // (layer, KV head + 1), rows

  std::int64_t row_bytes() const { return head_dim * static_cast<std::int64_t>(size_of(dtype)); }

  // Bytes of all data sets. Throws Error if they do not fit a file offset.
  std::int64_t data_bytes() const {
    const std::int64_t bytes_of_row =
        2 * row_bytes() + static_cast<std::int64_t>(sizeof(std::int64_t) + sizeof(float));
    std::int64_t bytes = 0;
    for (const auto& layer : offsets) {
      const std::int64_t left = std::numeric_limits<std::int64_t>::max() / 2 - bytes;
      if (layer.back() > left / bytes_of_row) throw Error("too large for one file");
      bytes += layer.back() * bytes_of_row +
               static_cast<std::int64_t>(layer.size() * sizeof(std::int64_t));
    }
    return bytes;
  }
};

void write_attributes(hid_t root, const Layout& layout, const SnapshotInfo& info) {
  write_attribute(root, "kvzap_format_version", format_version);
  write_attribute(root, "model", info.model);
  write_attribute(root, "prune", info.prune);
  write_attribute(root, "threshold", info.threshold);
  write_attribute(root, "sink", info.sink);
  write_attribute(root, "dtype", std::string(name_of(layout.dtype)));
  write_attribute(root, "n_layers", static_cast<std::int64_t>(layout.offsets.size()));
  write_attribute(root, "n_kv_heads", layout.n_kv_heads);
  write_attribute(root, "head_dim", layout.head_dim);
  write_attribute(root, "window", layout.window);
  write_attribute(root, "page_rows", layout.page_rows);
  write_attribute(root, "tokens", layout.tokens);
  for (const auto& [name, value] : info.further) {
    std::visit([&, &name = name](const auto& held) { write_attribute(root, name, held); }, value);
  }
}

// Bytes for everything but the data sets' content: a layer's group and data sets take about 4 KiB,
// the rest is for attributes.
std::int64_t metadata_bytes_at_most(const Layout& layout, const SnapshotInfo& info) {
  std::size_t bytes = (64u << 10) + (8u << 10) * layout.offsets.size();
  bytes += 4 * (info.model.size() + info.prune.size());
  for (const auto& [name, value] : info.further) {
    bytes += 4 * name.size() + 1024;
    if (const auto* text = std::get_if<std::string>(&value)) bytes += 4 * text->size();
  }
  return static_cast<std::int64_t>(bytes);
}

// Content of an HDF5 file with nothing in it.
std::vector<char> empty_hdf5_image() {
  const Hdf5Handle access = property_list(H5P_FILE_ACCESS);
  constexpr std::size_t growth = 4096;
  checked_hdf5(H5Pset_fapl_core(access, growth, false), "H5Pset_fapl_core");
  const Hdf5Handle file(H5Fcreate("kvzap-empty", H5F_ACC_TRUNC, H5P_DEFAULT, access), H5Fclose,
                        "H5Fcreate");
  checked_hdf5(H5Fflush(file, H5F_SCOPE_GLOBAL), "H5Fflush");
  const auto bytes = checked_hdf5(H5Fget_file_image(file, nullptr, 0), "H5Fget_file_image");
  std::vector<char> image(static_cast<std::size_t>(bytes));
  checked_hdf5(H5Fget_file_image(file, image.data(), image.size()), "H5Fget_file_image");
  return image;
}

// Reserves the file's space and makes it an HDF5 file with nothing in it.
void start_file(const fs::path& path, std::int64_t bytes) {
  const std::vector<char> image = empty_hdf5_image();
  const FileDescriptor descriptor(path, O_RDWR | O_CLOEXEC);
  if (descriptor.get() < 0) throw system_error("cannot be opened", errno);
  reserve(descriptor.get(), 0, bytes);
  const ssize_t written = ::pwrite(descriptor.get(), image.data(), image.size(), 0);
  if (written < 0) throw system_error("cannot be written", errno);
  if (static_cast<std::size_t>(written) != image.size()) {
    throw system_error("cannot be written", ENOSPC);
  }
}

std::string layer_name(std::size_t layer) { return fmt::format("/layers/{}", layer); }

// Everything but the rows, by one rank alone: with all attributes, groups and data sets in place,
// what remains for all ranks together is writing into data sets, which changes no metadata.
void write_structure(const fs::path& path, const Layout& layout, const SnapshotInfo& info) {
  start_file(path, layout.data_bytes() + metadata_bytes_at_most(layout, info));
  const Hdf5Handle access = serial_access();
  Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, access), H5Fclose, "H5Fopen");
  {
    const Hdf5Handle root(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose, "H5Gopen2");
    write_attributes(root, layout, info);
  }
  const Hdf5Handle create = property_list(H5P_DATASET_CREATE);
  checked_hdf5(H5Pset_layout(create, H5D_CONTIGUOUS), "H5Pset_layout");
  checked_hdf5(H5Pset_alloc_time(create, H5D_ALLOC_TIME_EARLY), "H5Pset_alloc_time");
  checked_hdf5(H5Pset_fill_time(create, H5D_FILL_TIME_NEVER), "H5Pset_fill_time");
  // The same cache gives the same bytes.
  checked_hdf5(H5Pset_obj_track_times(create, false), "H5Pset_obj_track_times");
  const auto group = [&](const std::string& name) {
    return Hdf5Handle(H5Gcreate2(file, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                      H5Gclose, "H5Gcreate2");
  };
  const auto data_set = [&](hid_t parent, const char* name, hid_t type,
                            const std::vector<hsize_t>& extents) {
    const Hdf5Handle space = simple_space(extents);
    return Hdf5Handle(H5Dcreate2(parent, name, type, space, H5P_DEFAULT, create, H5P_DEFAULT),
                      H5Dclose, "H5Dcreate2");
  };
  const Hdf5Handle type = type_in_file(layout.dtype);
  const auto dim = static_cast<hsize_t>(layout.head_dim);
  group("/layers");
  for (std::size_t l = 0; l < layout.offsets.size(); ++l) {
    const Hdf5Handle layer = group(layer_name(l));
    const std::vector<std::int64_t>& offsets = layout.offsets[l];
    const Hdf5Handle bounds = data_set(layer, "offsets", H5T_STD_I64LE, {offsets.size()});
    checked_hdf5(H5Dwrite(bounds, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offsets.data()),
                 "H5Dwrite");
    const auto rows = static_cast<hsize_t>(offsets.back());
    data_set(layer, "positions", H5T_STD_I64LE, {rows});
    data_set(layer, "scores", H5T_IEEE_F32LE, {rows});
    data_set(layer, "keys", type, {rows, dim});
    data_set(layer, "values", type, {rows, dim});
  }
  checked_hdf5(file.close(), "H5Fclose");
}

// A data set of rows that all ranks write together.
class SharedRows {
 public:
  SharedRows(hid_t file, const std::string& name)
      : m_data_set(H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose, "H5Dopen2"),
        m_space(H5Dget_space(m_data_set), H5Sclose, "H5Dget_space") {}

  // What this rank's next write covers: `rows` rows of `width` elements from `first` on; `rows` 0
  // takes part with nothing. A width of 0 stands for a data set with one extent.
  void select(std::int64_t first, std::int64_t rows, std::int64_t width) {
    std::vector<hsize_t> start{static_cast<hsize_t>(first)};
    std::vector<hsize_t> count{static_cast<hsize_t>(rows)};
    if (width != 0) {
      start.push_back(0);
      count.push_back(static_cast<hsize_t>(width));
    }
    m_memory = simple_space(count);
    if (rows == 0) {
      checked_hdf5(H5Sselect_none(m_memory), "H5Sselect_none");
      checked_hdf5(H5Sselect_none(m_space), "H5Sselect_none");
    } else {
      checked_hdf5(H5Sselect_hyperslab(m_space, H5S_SELECT_SET, start.data(), nullptr, count.data(),
                                       nullptr),
                   "H5Sselect_hyperslab");
    }
  }

  // Collective.
  herr_t write(hid_t memory_type, hid_t transfer, const void* data) const {
    return H5Dwrite(m_data_set, memory_type, m_memory, m_space, transfer, data);
  }

 private:
  Hdf5Handle m_data_set;
  Hdf5Handle m_space;
  Hdf5Handle m_memory;
};

// Rows of one head that go into one collective write.
struct Piece {
  int local_head;
  std::int64_t target;  // first row in the data set
  std::int64_t first;   // first row of the head
  std::int64_t rows;
};

std::vector<Piece> pieces_of(const std::vector<int>& heads,
                             const std::vector<std::int64_t>& offsets, std::int64_t max_rows) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const std::int64_t begin = offsets[heads[i]];
    const std::int64_t rows = offsets[heads[i] + 1] - begin;
    for (std::int64_t first = 0; first < rows; first += max_rows) {
      pieces.push_back(
          {static_cast<int>(i), begin + first, first, std::min(max_rows, rows - first)});
    }
  }
  return pieces;
}

// Collective.
template <class Value, PageOrder order>
void write_layer(hid_t hdf5, const fs::path& file, KVCache<Value, order>& cache,
                 SequenceId sequence, int layer, const HeadPartition& partition,
                 const Layout& layout, const Communicator& comm) {
  std::vector<SharedRows> sets;  // positions, scores, keys, values
  std::vector<Piece> pieces;
  Hdf5Handle type;
  Hdf5Handle transfer;
  agree_on_file(comm, file, [&] {
    for (const char* name : {"positions", "scores", "keys", "values"}) {
      sets.emplace_back(hdf5, layer_name(layer) + "/" + name);
    }
    pieces = pieces_of(partition.heads(layer, comm.rank()), layout.offsets[layer],
                       std::max<std::int64_t>(1, max_transfer_bytes / layout.row_bytes()));
    type = type_in_memory(layout.dtype);
    transfer = transfer_together();
#if KVZAP_HAVE_MPI
    // Each rank's rows are one run of bytes, which gathering on a few ranks would not speed up; and
    // Open MPI's gathering writes do not tell every rank of an error, and then hang.
    checked_hdf5(H5Pset_dxpl_mpio_collective_opt(transfer, H5FD_MPIO_INDIVIDUAL_IO),
                 "H5Pset_dxpl_mpio_collective_opt");
#endif
  });
  const auto rounds =
      static_cast<std::size_t>(comm.all_reduce_max(static_cast<std::int64_t>(pieces.size())));
  typename KVCache<Value, order>::HostRows rows;
  for (std::size_t round = 0; round < rounds; ++round) {
    // A rank with fewer pieces than another takes part with no rows.
    Piece piece{0, 0, 0, 0};
    agree_on_file(comm, file, [&] {
      if (round < pieces.size()) {
        piece = pieces[round];
        if (piece.first == 0) {
          rows = {};  // before the next head's rows are gathered
          rows = cache.host_rows(sequence, layer, piece.local_head);
        }
      }
      sets[0].select(piece.target, piece.rows, 0);
      sets[1].select(piece.target, piece.rows, 0);
      sets[2].select(piece.target, piece.rows, layout.head_dim);
      sets[3].select(piece.target, piece.rows, layout.head_dim);
    });
    const std::int64_t first_value = piece.first * layout.head_dim;
    CollectiveOutcome outcome;
    outcome.note(sets[0].write(H5T_NATIVE_INT64, transfer, rows.positions.data() + piece.first),
                 "H5Dwrite of positions");
    outcome.note(sets[1].write(H5T_NATIVE_FLOAT, transfer, rows.scores.data() + piece.first),
                 "H5Dwrite of scores");
    outcome.note(sets[2].write(type, transfer, rows.keys.data() + first_value), "H5Dwrite of keys");
    outcome.note(sets[3].write(type, transfer, rows.values.data() + first_value),
                 "H5Dwrite of values");
    outcome.agree(comm, file);
  }
}

template <class Value, PageOrder order>
void check_partition(const KVCache<Value, order>& cache, SequenceId sequence,
                     const HeadPartition& partition, const Communicator& comm) {
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

// Collective.
template <class Value, PageOrder order>
Layout describe(const fs::path& file, const KVCache<Value, order>& cache, SequenceId sequence,
                const HeadPartition& partition, const Communicator& comm) {
  const CacheShape& shape = cache.shape();
  constexpr std::size_t n_extents = 4;
  std::vector<std::int64_t> mine;  // the extents, then the rows of each head, layer by layer
  agree_on_file(comm, file, [&] {
    check_partition(cache, sequence, partition, comm);
    mine = {shape.head_dim, shape.window, shape.page_rows, cache.tokens(sequence, 0)};
    for (int layer = 0; layer < partition.n_layers(); ++layer) {
      for (int head = 0; head < shape.heads[layer]; ++head) {
        mine.push_back(cache.rows(sequence, layer, head));
      }
    }
  });
  const std::vector<std::vector<std::int64_t>> all = comm.all_gather(mine);
  Layout layout{DTypeOf<Value>::value,  mine[0], mine[1], mine[2], mine[3],
                partition.n_kv_heads(), {}};
  agree_on_file(comm, file, [&] {
    if (!std::equal(mine.begin(), mine.begin() + n_extents, all[0].begin())) {
      throw Error(fmt::format(
          "head_dim, window, page_rows, tokens are {}, {}, {}, {}; on rank 0 they are "
          "{}, {}, {}, {}",
          mine[0], mine[1], mine[2], mine[3], all[0][0], all[0][1], all[0][2], all[0][3]));
    }
    std::vector<std::size_t> next(all.size(), n_extents);
    for (int layer = 0; layer < partition.n_layers(); ++layer) {
      std::vector<std::int64_t> offsets(static_cast<std::size_t>(layout.n_kv_heads) + 1, 0);
      for (int rank = 0; rank < comm.size(); ++rank) {
        for (int head : partition.heads(layer, rank)) {
          offsets[head + 1] = all[rank].at(next[rank]++);
        }
      }
      for (std::size_t h = 1; h < offsets.size(); ++h) offsets[h] += offsets[h - 1];
      layout.offsets.push_back(std::move(offsets));
    }
  });
  return layout;
}

}  // namespace

template <class Value, PageOrder order>
std::vector<std::string> write_snapshot(const fs::path& file, KVCache<Value, order>& cache,
                                        SequenceId sequence, const HeadPartition& partition,
                                        const Communicator& comm, const SnapshotInfo& info,
                                        const SnapshotOptions& /*options*/) {
  const detail::QuietHdf5 quiet;
  const Layout layout = describe(file, cache, sequence, partition, comm);
  TemporaryFile temporary(file, comm);
  temporary.create();
  std::vector<std::string> notes;
  agree_on_file(comm, file, [&] { notes = temporary.remove_leftovers(); });
  agree_on_file(comm, file, [&] {
    if (comm.is_root()) write_structure(temporary.path(), layout, info);
  });
  {
    Hdf5Handle hdf5 = open_together(temporary.path(), file, comm);
    for (int layer = 0; layer < partition.n_layers(); ++layer) {
      write_layer(hdf5, file, cache, sequence, layer, partition, layout, comm);
    }
    CollectiveOutcome outcome;
    outcome.note(H5Fflush(hdf5, H5F_SCOPE_GLOBAL), "H5Fflush");
    outcome.note(hdf5.close(), "H5Fclose");
    outcome.agree(comm, file);
  }
  temporary.move_to_target();
  return notes;
}

std::vector<std::string> check_snapshot_writable(const fs::path& file, const Communicator& comm) {
  TemporaryFile temporary(file, comm);
  temporary.create();
  std::vector<std::string> notes;
  agree_on_file(comm, file, [&] { notes = temporary.remove_leftovers(); });
  return notes;
}

#define KVZAP_INSTANTIATE(Value, order)                                          \
  template std::vector<std::string> write_snapshot(                              \
      const fs::path&, KVCache<Value, order>&, SequenceId, const HeadPartition&, \
      const Communicator&, const SnapshotInfo&, const SnapshotOptions&);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
