// Fuzzes the reader of snapshots. An input is a list of edits to one of the files in snapshots/.
// HDF5 itself changes attributes, elements, extents and names; the target changes rows and the seal
// byte by byte, and seals the file again. So kvzap has to check every number of a file, and HDF5
// sees only files that it wrote: HDF5 1.10 crashes on hostile files before kvzap reads anything.
#include <fuzzer/FuzzedDataProvider.h>
#include <hdf5.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "files/crc32c.hpp"
#include "files/quote.hpp"
#include "harness.hpp"
#include "io/seal.hpp"
#include "io/snapshot_file.hpp"

namespace kvzap::fuzz {

const std::initializer_list<std::string_view> named_in_messages = {};

namespace {

using Data = FuzzedDataProvider;

struct Attribute {
  std::string object, name;
};

struct Base {
  std::string bytes;  // without its seal
  std::vector<io::SealedExtent> extents;
  std::vector<std::string> objects;  // paths
  std::vector<Attribute> attributes;
};

hid_t open_image(const std::string& bytes) {
  const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  H5Pset_fapl_core(access, 4096, false);
  H5Pset_file_image(access, const_cast<char*>(bytes.data()), bytes.size());
  const hid_t file = H5Fopen("image", H5F_ACC_RDWR, access);
  H5Pclose(access);
  return file;
}

Base read_base(const std::string& file) {
  Base base;
  std::ifstream stream(file, std::ios::binary);
  base.bytes.assign(std::istreambuf_iterator<char>(stream), {});
  require(!base.bytes.empty(), "snapshots/ is not there");
  InputFile copy;
  copy.assign(base.bytes);
  std::ifstream opened(copy.path());
  const files::FileDescriptor descriptor(copy.path(), 0);
  const auto seal = io::read_seal(descriptor.get());
  require(seal.has_value(), "a snapshot of snapshots/ has no seal");
  base.extents = seal->extents;
  base.bytes.resize(static_cast<std::size_t>(seal->sealed_bytes));
  const hid_t image = open_image(base.bytes);
  const auto visit = [](hid_t root, const char* name, const H5O_info_t*, void* target) -> herr_t {
    auto& into = *static_cast<Base*>(target);
    into.objects.emplace_back(name);
    const hid_t object = H5Oopen(root, name, H5P_DEFAULT);
    H5O_info_t info;
    H5Oget_info2(object, &info, H5O_INFO_NUM_ATTRS);
    for (hsize_t i = 0; i < info.num_attrs; ++i) {
      char attribute[256] = {};
      H5Aget_name_by_idx(object, ".", H5_INDEX_NAME, H5_ITER_INC, i, attribute, 255, H5P_DEFAULT);
      into.attributes.push_back({name, attribute});
    }
    H5Oclose(object);
    return 0;
  };
  H5Ovisit2(image, H5_INDEX_NAME, H5_ITER_INC, visit, &base, H5O_INFO_BASIC);
  H5Fclose(image);
  return base;
}

const std::vector<Base>& bases() {
  static const std::vector<Base> all = [] {
    std::vector<Base> read;
    for (const char* const name : {"all", "compressed", "positions", "packed"}) {
      read.push_back(read_base(std::string(KVZAP_FUZZ_FOLDER "/snapshots/") + name + ".h5"));
    }
    return read;
  }();
  return all;
}

std::int64_t number(Data& data) {
  static constexpr std::int64_t values[] = {0,     1,         -1,        2,         3,
                                            65535, 65536,     INT32_MAX, INT32_MIN, 4294967296,
                                            4096,  1LL << 40, 1LL << 62, INT64_MAX, INT64_MIN};
  if (data.ConsumeBool()) return data.PickValueInArray(values);
  return data.ConsumeBool() ? data.ConsumeIntegralInRange<std::int64_t>(-8, 64)
                            : data.ConsumeIntegral<std::int64_t>();
}

void edit_attribute(Data& data, hid_t file, const Attribute& which) {
  const hid_t object = H5Oopen(file, which.object.c_str(), H5P_DEFAULT);
  if (object < 0) return;  // an earlier edit has taken it away
  const hid_t attribute = H5Aexists(object, which.name.c_str()) > 0
                              ? H5Aopen(object, which.name.c_str(), H5P_DEFAULT)
                              : -1;
  if (attribute >= 0) {
    const hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    const hssize_t count = H5Sget_simple_extent_npoints(space);
    const int kind = data.ConsumeIntegralInRange(0, 9);
    if (kind == 0) {
      H5Adelete(object, which.name.c_str());
    } else if (kind == 1) {  // of another type or shape
      H5Adelete(object, which.name.c_str());
      const hid_t types[] = {H5T_STD_I8LE, H5T_STD_U64BE, H5T_IEEE_F32LE, H5T_STD_I64LE, H5T_C_S1};
      const hsize_t extents[2] = {data.ConsumeIntegralInRange<hsize_t>(0, 9),
                                  data.ConsumeIntegralInRange<hsize_t>(0, 3)};
      const hid_t shape = H5Screate_simple(data.ConsumeIntegralInRange(0, 2), extents, nullptr);
      const hid_t made = H5Acreate2(object, which.name.c_str(), data.PickValueInArray(types), shape,
                                    H5P_DEFAULT, H5P_DEFAULT);
      if (made >= 0) H5Aclose(made);
      H5Sclose(shape);
    } else if (H5Tget_class(type) == H5T_INTEGER) {
      std::vector<std::int64_t> values(static_cast<std::size_t>(std::max<hssize_t>(count, 1)));
      H5Aread(attribute, H5T_NATIVE_INT64, values.data());
      values[data.ConsumeIntegralInRange<std::size_t>(0, values.size() - 1)] = number(data);
      H5Awrite(attribute, H5T_NATIVE_INT64, values.data());
    } else if (H5Tget_class(type) == H5T_FLOAT && count == 1) {
      const auto bits = data.ConsumeIntegral<std::uint64_t>();
      double value = 0;
      std::memcpy(&value, &bits, sizeof(value));
      H5Awrite(attribute, H5T_NATIVE_DOUBLE, &value);
    } else if (H5Tget_class(type) == H5T_STRING && count == 1) {
      const std::string text = data.ConsumeRandomLengthString(200);
      if (H5Tis_variable_str(type) > 0) {
        const char* const held = text.c_str();
        H5Awrite(attribute, type, &held);
      } else {
        std::string fixed = text;
        fixed.resize(H5Tget_size(type) + 1);
        H5Awrite(attribute, type, fixed.data());
      }
    }
    H5Sclose(space);
    H5Tclose(type);
    H5Aclose(attribute);
  }
  H5Oclose(object);
}

// An element of a data set, by its bytes.
void edit_element(Data& data, hid_t file, const std::string& path) {
  const hid_t set = H5Dopen2(file, path.c_str(), H5P_DEFAULT);
  if (set < 0) return;
  const hid_t type = H5Dget_type(set), space = H5Dget_space(set);
  const std::size_t element = H5Tget_size(type);
  const hssize_t count = H5Sget_simple_extent_npoints(space);
  if (count > 0 && count < 4096 && element <= 16 && H5Tget_class(type) != H5T_STRING) {
    std::string bytes(static_cast<std::size_t>(count) * element, '\0');
    if (H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()) >= 0) {
      const std::int64_t value = number(data);
      const auto at =
          data.ConsumeIntegralInRange<std::size_t>(0, static_cast<std::size_t>(count) - 1);
      std::memcpy(bytes.data() + at * element, &value, std::min(element, sizeof(value)));
      H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data());
    }
  }
  H5Sclose(space);
  H5Tclose(type);
  H5Dclose(set);
}

// Another data set of that name.
void replace_set(Data& data, hid_t file, const std::string& path) {
  H5Ldelete(file, path.c_str(), H5P_DEFAULT);
  const hid_t types[] = {H5T_STD_I8LE,   H5T_STD_I32LE, H5T_STD_I64LE, H5T_STD_U32LE, H5T_STD_U8LE,
                         H5T_IEEE_F32LE, H5T_STD_U16LE, H5T_STD_I64BE, H5T_C_S1};
  hsize_t extents[3] = {};
  const int rank = data.ConsumeIntegralInRange(0, 3);
  for (hsize_t& extent : extents) extent = data.ConsumeIntegralInRange<hsize_t>(0, 20);
  if (data.ConsumeIntegralInRange(0, 7) == 0)
    extents[0] = 1ULL << data.ConsumeIntegralInRange(20, 62);
  const hid_t space = H5Screate_simple(rank, extents, nullptr);
  const hid_t create = H5Pcreate(H5P_DATASET_CREATE);
  switch (data.ConsumeIntegralInRange(0, 3)) {
    case 0:
      H5Pset_layout(create, H5D_COMPACT);
      break;
    case 1:
      if (rank > 0) {
        hsize_t chunk[3] = {data.ConsumeIntegralInRange<hsize_t>(1, 9), 1, 1};
        H5Pset_chunk(create, rank, chunk);
        if (data.ConsumeBool()) H5Pset_shuffle(create);
        if (data.ConsumeBool()) H5Pset_deflate(create, 1);
        if (data.ConsumeBool()) H5Pset_fletcher32(create);
      }
      break;
    case 2:
      H5Pset_external(create, "/proc/self/maps", 0, H5F_UNLIMITED);
      break;
    default:
      break;
  }
  const hid_t made = H5Dcreate2(file, path.c_str(), data.PickValueInArray(types), space,
                                H5P_DEFAULT, create, H5P_DEFAULT);
  if (made >= 0) H5Dclose(made);
  H5Pclose(create);
  H5Sclose(space);
}

void edit_structure(Data& data, hid_t file, const Base& base) {
  const std::string path =
      base.objects[data.ConsumeIntegralInRange<std::size_t>(0, base.objects.size() - 1)];
  const std::string other =
      base.objects[data.ConsumeIntegralInRange<std::size_t>(0, base.objects.size() - 1)];
  if (path == ".") return;
  switch (data.ConsumeIntegralInRange(0, 6)) {
    case 0:
      H5Ldelete(file, path.c_str(), H5P_DEFAULT);
      break;
    case 1:
      H5Ldelete(file, other.c_str(), H5P_DEFAULT);
      H5Lmove(file, path.c_str(), file, other.c_str(), H5P_DEFAULT, H5P_DEFAULT);
      break;
    case 2:
      H5Ldelete(file, path.c_str(), H5P_DEFAULT);
      H5Lcreate_hard(file, other.c_str(), file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT);
      break;
    case 3:
      H5Ldelete(file, path.c_str(), H5P_DEFAULT);
      H5Lcreate_soft(other.c_str(), file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT);
      break;
    case 4:
      H5Ldelete(file, path.c_str(), H5P_DEFAULT);
      H5Lcreate_external("/dev/null", "/", file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT);
      break;
    default:
      replace_set(data, file, path);
  }
}

std::string image_of(hid_t file) {
  H5Fflush(file, H5F_SCOPE_LOCAL);
  const ssize_t size = H5Fget_file_image(file, nullptr, 0);
  std::string bytes(static_cast<std::size_t>(std::max<ssize_t>(size, 0)), '\0');
  H5Fget_file_image(file, bytes.data(), bytes.size());
  return bytes;
}

std::int64_t varied(Data& data, std::int64_t value) {
  if (data.ConsumeBool()) return number(data);
  const auto by = data.ConsumeIntegral<std::int8_t>();
  return value > INT64_MAX - 127 || value < INT64_MIN + 128 ? value : value + by;
}

void append_seal(Data& data, const Base& base, std::string& bytes) {
  io::Seal seal;
  seal.sealed_bytes = static_cast<std::int64_t>(bytes.size());
  seal.extents = base.extents;
  const int edits = data.ConsumeIntegralInRange(0, 15) - 12;
  for (int i = 0; i < edits && !seal.extents.empty(); ++i) {
    auto& extent =
        seal.extents[data.ConsumeIntegralInRange<std::size_t>(0, seal.extents.size() - 1)];
    if (data.ConsumeBool()) {
      extent.begin = varied(data, extent.begin);
    } else {
      extent.bytes = varied(data, extent.bytes);
    }
    if (data.ConsumeIntegralInRange(0, 3) == 0) extent.crc = data.ConsumeIntegral<std::uint32_t>();
    if (data.ConsumeIntegralInRange(0, 7) == 0) seal.extents.push_back(extent);
  }
  std::int64_t at = 0;
  const std::int64_t end = seal.sealed_bytes;
  for (io::SealedExtent& extent : seal.extents) {
    if (extent.begin < at || extent.begin > end || extent.bytes < 0 ||
        extent.bytes > end - extent.begin) {
      break;
    }
    seal.crc =
        files::crc32c(bytes.data() + at, static_cast<std::size_t>(extent.begin - at), seal.crc);
    if (extent.crc) {
      extent.crc =
          files::crc32c(bytes.data() + extent.begin, static_cast<std::size_t>(extent.bytes));
    }
    at = extent.begin + extent.bytes;
  }
  seal.crc = files::crc32c(bytes.data() + at, static_cast<std::size_t>(end - at), seal.crc);
  const std::vector<char> sealed = io::seal_bytes(seal);
  bytes.append(sealed.begin(), sealed.end());
}

void read(const std::filesystem::path& file) {
  using io::RowKind;
  const io::SnapshotFile snapshot(file);
  const SnapshotHeader& header = snapshot.header();
  require(header.n_layers > 0 && header.n_kv_heads > 0 && header.head_dim > 0, "empty extents");
  snapshot.check_sealed([](const std::string&) {});
  std::vector<char> buffer;
  const int groups = static_cast<int>(snapshot.layout().groups.size());
  for (int group = 0; group < groups; ++group) {
    for (int kind = 0; kind < io::n_row_kinds; ++kind) {
      if (!snapshot.has(group, static_cast<RowKind>(kind))) continue;
      for (int head = 0; head < std::min<std::int64_t>(header.n_kv_heads, 100); ++head) {
        // Read the next head also if this one is damaged.
        try {
          if (static_cast<RowKind>(kind) == RowKind::positions) {
            snapshot.positions(group, head, buffer);
          } else {
            snapshot.read_head(group, static_cast<RowKind>(kind), head, 4096, buffer,
                               [](std::int64_t, std::int64_t, const char*) {});
          }
        } catch (const Error&) {
        }
      }
    }
  }
}

}  // namespace

void run_one(std::string_view input) {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  Data data(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
  const Base& base = bases()[data.ConsumeIntegralInRange<std::size_t>(0, bases().size() - 1)];
  const hid_t image = open_image(base.bytes);
  const int edits = data.ConsumeIntegralInRange(0, 5);
  for (int i = 0; i < edits; ++i) {
    switch (data.ConsumeIntegralInRange(0, 3)) {
      case 0:
        edit_structure(data, image, base);
        break;
      case 1:
        edit_element(
            data, image,
            base.objects[data.ConsumeIntegralInRange<std::size_t>(0, base.objects.size() - 1)]);
        break;
      default:
        edit_attribute(data, image,
                       base.attributes[data.ConsumeIntegralInRange<std::size_t>(
                           0, base.attributes.size() - 1)]);
    }
  }
  std::string bytes = image_of(image);
  H5Fclose(image);
  // Change bytes of rows, also of compressed ones.
  const int flips = base.extents.empty() ? 0 : data.ConsumeIntegralInRange(0, 3);
  for (int i = 0; i < flips; ++i) {
    const auto& extent =
        base.extents[data.ConsumeIntegralInRange<std::size_t>(0, base.extents.size() - 1)];
    const auto at = static_cast<std::size_t>(extent.begin) +
                    data.ConsumeIntegralInRange<std::size_t>(
                        0, static_cast<std::size_t>(std::max<std::int64_t>(extent.bytes - 1, 0)));
    if (at < bytes.size()) bytes[at] = static_cast<char>(data.ConsumeIntegral<std::uint8_t>());
  }
  append_seal(data, base, bytes);
  // Damage: the seal must keep the file away from HDF5.
  if (data.ConsumeIntegralInRange(0, 15) == 1) {
    bytes[data.ConsumeIntegralInRange<std::size_t>(0, bytes.size() - 9)] ^=
        static_cast<char>(data.ConsumeIntegralInRange(1, 255));
  }
  static InputFile file;
  file.assign(bytes);
  try {
    read(file.path());
  } catch (const Error& error) {
    throw Error(files::shown(error.what(), 1000));  // as SnapshotReader does, which needs the cache
  }
}

}  // namespace kvzap::fuzz
