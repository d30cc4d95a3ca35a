#include "io/container.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "io/hdf5_file.hpp"

namespace kvzap::io {
namespace {

// HDF5 has no predefined 16-bit floating-point types before version 2, but it can describe any bit
// layout.
Hdf5Handle float_type(DType dtype, H5T_order_t byte_order) {
  Hdf5Handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose, "H5Tcopy");
  if (dtype != DType::f32) {
    const std::size_t mantissa = dtype == DType::f16 ? 10 : 7;
    const std::size_t exponent = 15 - mantissa;
    const std::size_t bias = (std::size_t{1} << (exponent - 1)) - 1;
    // Fields first: they must lie within the precision after every call.
    checked_hdf5(H5Tset_fields(type, 15, mantissa, exponent, 0, mantissa), "H5Tset_fields");
    checked_hdf5(H5Tset_precision(type, 16), "H5Tset_precision");
    checked_hdf5(H5Tset_ebias(type, bias), "H5Tset_ebias");
    checked_hdf5(H5Tset_size(type, size_of(dtype)), "H5Tset_size");
  }
  checked_hdf5(H5Tset_order(type, byte_order), "H5Tset_order");
  return type;
}

void create_attribute(hid_t object, const std::string& name, hid_t file_type, hid_t memory_type,
                      const void* value) {
  if (name.empty() || name.find('\0') != std::string::npos) {
    throw Error("an attribute's name is empty or has a NUL in it");
  }
  if (checked_hdf5(H5Aexists(object, name.c_str()), "H5Aexists") > 0) {
    throw Error(fmt::format("attribute '{}' is given by the caller and by the format", name));
  }
  const Hdf5Handle space(H5Screate(H5S_SCALAR), H5Sclose, "H5Screate");
  const Hdf5Handle attribute(
      H5Acreate2(object, name.c_str(), file_type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
      "H5Acreate2");
  checked_hdf5(H5Awrite(attribute, memory_type, value), "H5Awrite");
}

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
    const Hdf5Handle memory = text_type(H5T_VARIABLE, H5Tget_cset(type));
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

// Returns nothing if the attribute has a type that none of our files has.
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

}  // namespace

Hdf5Handle simple_space(const std::vector<hsize_t>& extents) {
  return {H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose,
          "H5Screate_simple"};
}

template <>
ElementType element_type<std::int32_t>() {
  return {H5T_STD_I32LE, H5T_NATIVE_INT32, "int32"};
}
template <>
ElementType element_type<std::int64_t>() {
  return {H5T_STD_I64LE, H5T_NATIVE_INT64, "int64"};
}
template <>
ElementType element_type<std::uint32_t>() {
  return {H5T_STD_U32LE, H5T_NATIVE_UINT32, "uint32"};
}
template <>
ElementType element_type<float>() {
  return {H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, "float32"};
}

Hdf5Handle type_in_file(DType dtype) { return float_type(dtype, H5T_ORDER_LE); }
Hdf5Handle type_in_memory(DType dtype) { return float_type(dtype, H5Tget_order(H5T_NATIVE_FLOAT)); }

Hdf5Handle text_type(std::size_t bytes, H5T_cset_t characters) {
  Hdf5Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "H5Tcopy");
  checked_hdf5(H5Tset_size(type, bytes), "H5Tset_size");
  checked_hdf5(H5Tset_cset(type, characters), "H5Tset_cset");
  return type;
}

void write_attribute(hid_t object, const std::string& name, std::int64_t value) {
  create_attribute(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
}

void write_attribute(hid_t object, const std::string& name, float value) {
  create_attribute(object, name, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, &value);
}

void write_attribute(hid_t object, const std::string& name, double value) {
  create_attribute(object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value);
}

void write_attribute(hid_t object, const std::string& name, const std::string& value) {
  if (value.find('\0') != std::string::npos) {
    throw Error(fmt::format("attribute '{}' has a NUL in its text", name));
  }
  const Hdf5Handle type = text_type(H5T_VARIABLE);
  const char* const text = value.c_str();
  create_attribute(object, name, type, type, &text);
}

void set_attribute(hid_t object, const char* name, std::int64_t value) {
  const Hdf5Handle attribute(H5Aopen(object, name, H5P_DEFAULT), H5Aclose, "H5Aopen");
  checked_hdf5(H5Awrite(attribute, H5T_NATIVE_INT64, &value), "H5Awrite");
}

std::int64_t integer(hid_t object, const char* name, std::int64_t least, std::int64_t most) {
  const auto value = attribute<std::int64_t>(object, name, H5T_INTEGER);
  if (value < least || value > most) {
    throw Error(fmt::format("attribute '{}' is {}; expected {} to {}", name, value, least, most));
  }
  return value;
}

double number(hid_t object, const char* name) { return attribute<double>(object, name, H5T_FLOAT); }

std::string text(hid_t object, const char* name) {
  return attribute<std::string>(object, name, H5T_STRING);
}

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

std::int64_t read_version(hid_t file, const char* name, std::int64_t oldest, std::int64_t newest,
                          const char* writer) {
  if (checked_hdf5(H5Aexists(file, name), "H5Aexists") == 0) {
    throw Error(
        fmt::format("not written by {}: an HDF5 file without attribute '{}'", writer, name));
  }
  const auto version = attribute<std::int64_t>(file, name, H5T_INTEGER);
  if (version < oldest || version > newest) {
    std::vector<std::int64_t> known(static_cast<std::size_t>(newest - oldest + 1));
    std::iota(known.begin(), known.end(), oldest);
    throw Error(fmt::format("attribute '{}': expected {}, found {}", name, fmt::join(known, " or "),
                            version));
  }
  return version;
}

Hdf5Handle new_group(hid_t file, const std::string& path) {
  return {H5Gcreate2(file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose,
          "H5Gcreate2"};
}

Hdf5Handle in_one_run(H5D_alloc_time_t when) {
  Hdf5Handle create = property_list(H5P_DATASET_CREATE);
  checked_hdf5(H5Pset_layout(create, H5D_CONTIGUOUS), "H5Pset_layout");
  checked_hdf5(H5Pset_alloc_time(create, when), "H5Pset_alloc_time");
  checked_hdf5(H5Pset_fill_time(create, H5D_FILL_TIME_NEVER), "H5Pset_fill_time");
  checked_hdf5(H5Pset_obj_track_times(create, false), "H5Pset_obj_track_times");
  return create;
}

Hdf5Handle in_chunks(const std::vector<hsize_t>& chunk, int level) {
  if (H5Zfilter_avail(H5Z_FILTER_DEFLATE) <= 0 || H5Zfilter_avail(H5Z_FILTER_SHUFFLE) <= 0) {
    throw Error("this HDF5 has no deflate or no shuffle filter, so that nothing can be compressed");
  }
  Hdf5Handle create = property_list(H5P_DATASET_CREATE);
  checked_hdf5(H5Pset_chunk(create, static_cast<int>(chunk.size()), chunk.data()), "H5Pset_chunk");
  if (level > 0) checked_hdf5(H5Pset_shuffle(create), "H5Pset_shuffle");
  checked_hdf5(H5Pset_deflate(create, static_cast<unsigned>(level)), "H5Pset_deflate");
  checked_hdf5(H5Pset_obj_track_times(create, false), "H5Pset_obj_track_times");
  return create;
}

Hdf5Handle new_set(hid_t file, const std::string& path, hid_t type,
                   const std::vector<hsize_t>& extents, hid_t create) {
  const Hdf5Handle space = simple_space(extents);
  return {H5Dcreate2(file, path.c_str(), type, space, H5P_DEFAULT, create, H5P_DEFAULT), H5Dclose,
          "H5Dcreate2"};
}

std::int64_t place_of(hid_t set) {
  const haddr_t place = H5Dget_offset(set);
  if (place == HADDR_UNDEF) throw Error(hdf5_failure("H5Dget_offset"));
  return static_cast<std::int64_t>(place);
}

namespace {

// Returns the first part of the path that the file does not have; empty if it has all.
std::string missing_part(hid_t file, const std::string& path) {
  for (std::size_t end = 0; end != std::string::npos;) {
    const std::string parent = path.substr(0, end);
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    const htri_t exists = H5Lexists(file, part.c_str(), H5P_DEFAULT);
    if (exists < 0) {
      throw Error(fmt::format("'{}' is no group: {}", parent, hdf5_failure("H5Lexists")));
    }
    if (exists == 0) return part;
    H5L_info_t link;
    checked_hdf5(H5Lget_info(file, part.c_str(), &link, H5P_DEFAULT), "H5Lget_info");
    if (link.type != H5L_TYPE_HARD) {
      throw Error(
          fmt::format("'{}' is a link to elsewhere; expected an object of this file", part));
    }
  }
  return {};
}

void expect_object(hid_t file, const std::string& path) {
  const std::string missing = missing_part(file, path);
  if (!missing.empty()) throw Error(fmt::format("'{}' is missing", missing));
}

// Finds out how a data set is stored.
void read_storage(OpenSet& set, const std::string& path) {
  const Hdf5Handle create(H5Dget_create_plist(set.handle), H5Pclose, "H5Dget_create_plist");
  set.layout = checked_hdf5(H5Pget_layout(create), "H5Pget_layout");
  if (set.layout != H5D_CONTIGUOUS && set.layout != H5D_CHUNKED && set.layout != H5D_COMPACT) {
    throw Error(fmt::format("data set '{}' is made of other data sets", path));
  }
  if (set.layout == H5D_CONTIGUOUS &&
      checked_hdf5(H5Pget_external_count(create), "H5Pget_external_count") > 0) {
    throw Error(fmt::format("the content of data set '{}' is in another file", path));
  }
  if (set.layout != H5D_CHUNKED) return;
  std::vector<hsize_t> chunk(set.extents.size());
  const int rank = static_cast<int>(chunk.size());
  if (H5Pget_chunk(create, rank, chunk.data()) != rank) throw Error(hdf5_failure("H5Pget_chunk"));
  for (const hsize_t extent : chunk) {
    set.chunk.push_back(static_cast<std::int64_t>(std::min<hsize_t>(extent, largest)));
  }
  const int filters = checked_hdf5(H5Pget_nfilters(create), "H5Pget_nfilters");
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0, config = 0;
    std::size_t values = 0;
    set.filters.push_back(checked_hdf5(H5Pget_filter2(create, static_cast<unsigned>(i), &flags,
                                                      &values, nullptr, 0, nullptr, &config),
                                       "H5Pget_filter2"));
  }
}

}  // namespace

bool has_object(hid_t file, const std::string& path) { return missing_part(file, path).empty(); }

Hdf5Handle open_group(hid_t file, const std::string& path) {
  expect_object(file, path);
  const hid_t group = H5Gopen2(file, path.c_str(), H5P_DEFAULT);
  if (group < 0) throw Error(fmt::format("'{}' is no group: {}", path, hdf5_failure("H5Gopen2")));
  return {group, H5Gclose, "H5Gopen2"};
}

OpenSet open_set(hid_t file, const std::string& path, const ExpectedType& type,
                 std::string_view type_name, const std::vector<std::int64_t>& extents, Rows rows) {
  expect_object(file, path);
  const hid_t id = H5Dopen2(file, path.c_str(), H5P_DEFAULT);
  if (id < 0) throw Error(fmt::format("'{}' is no data set: {}", path, hdf5_failure("H5Dopen2")));
  OpenSet set{Hdf5Handle(id, H5Dclose, "H5Dopen2"), {}, H5D_CONTIGUOUS, {}, {}};
  const Hdf5Handle found_type(H5Dget_type(set.handle), H5Tclose, "H5Dget_type");
  const H5T_class_t found_class = H5Tget_class(found_type);
  const hid_t* const exact = std::get_if<hid_t>(&type);
  if (exact ? checked_hdf5(H5Tequal(found_type, *exact), "H5Tequal") == 0
            : found_class != std::get<H5T_class_t>(type)) {
    throw Error(fmt::format("data set '{}' holds {} of {} bytes; expected {}", path,
                            class_name(found_class), H5Tget_size(found_type), type_name));
  }
  const Hdf5Handle space(H5Dget_space(set.handle), H5Sclose, "H5Dget_space");
  const int rank = checked_hdf5(H5Sget_simple_extent_ndims(space), "H5Sget_simple_extent_ndims");
  std::vector<hsize_t> found(static_cast<std::size_t>(std::max(rank, 1)));
  checked_hdf5(H5Sget_simple_extent_dims(space, found.data(), nullptr),
               "H5Sget_simple_extent_dims");
  found.resize(static_cast<std::size_t>(rank));
  bool fits = found.size() == extents.size();
  for (std::size_t i = 0; fits && i < found.size(); ++i) {
    const auto expected = static_cast<hsize_t>(extents[i]);
    const bool more = i == 0 && rows == Rows::at_least && found[i] > expected;
    fits = found[i] <= static_cast<hsize_t>(largest) &&
           (extents[i] < 0 || found[i] == expected || more);
  }
  if (!fits || H5Sget_simple_extent_type(space) != H5S_SIMPLE) {
    std::vector<std::string> expected;
    expected.reserve(extents.size());
    for (const std::int64_t extent : extents) {
      expected.push_back(extent < 0 ? "any" : std::to_string(extent));
    }
    throw Error(fmt::format("data set '{}' has extents ({}); expected ({}){}", path,
                            fmt::join(found, ", "), fmt::join(expected, ", "),
                            rows == Rows::at_least ? ", or more rows" : ""));
  }
  set.extents.assign(found.begin(), found.end());
  read_storage(set, path);
  return set;
}

std::int64_t content_bytes(const OpenSet& set, std::size_t element_bytes) {
  std::int64_t bytes = static_cast<std::int64_t>(element_bytes);
  // If any extent is 0 the data set has no bytes, however large the other extents are.
  if (std::find(set.extents.begin(), set.extents.end(), 0) != set.extents.end()) return 0;
  for (const std::int64_t extent : set.extents) bytes = product(bytes, extent);
  return bytes;
}

Hdf5Handle selection(hid_t set, const std::vector<hsize_t>& start,
                     const std::vector<hsize_t>& count) {
  Hdf5Handle space(H5Dget_space(set), H5Sclose, "H5Dget_space");
  if (std::find(count.begin(), count.end(), 0) != count.end()) {
    checked_hdf5(H5Sselect_none(space), "H5Sselect_none");
  } else {
    checked_hdf5(
        H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr),
        "H5Sselect_hyperslab");
  }
  return space;
}

void read_part(hid_t set, hid_t memory_type, const std::vector<hsize_t>& start,
               const std::vector<hsize_t>& count, void* data) {
  const Hdf5Handle space = selection(set, start, count), memory = simple_space(count);
  checked_hdf5(H5Dread(set, memory_type, memory, space, H5P_DEFAULT, data), "H5Dread");
}

void write_part(hid_t set, hid_t memory_type, const std::vector<hsize_t>& start,
                const std::vector<hsize_t>& count, const void* data) {
  const Hdf5Handle space = selection(set, start, count), memory = simple_space(count);
  checked_hdf5(H5Dwrite(set, memory_type, memory, space, H5P_DEFAULT, data), "H5Dwrite");
}

}  // namespace kvzap::io
