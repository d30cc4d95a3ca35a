#include "io/checked_objects.hpp"

#include <fmt/ranges.h>

#include <cstring>
#include <utility>

namespace kvzap::io::checked {

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

namespace {

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

}  // namespace

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

std::int64_t content_bytes(const OpenSet& set, std::size_t element_bytes) {
  std::int64_t bytes = static_cast<std::int64_t>(element_bytes);
  // If any extent is 0 the data set has no bytes, however large the other extents are.
  if (std::find(set.extents.begin(), set.extents.end(), 0) != set.extents.end()) return 0;
  for (const std::int64_t extent : set.extents) bytes = product(bytes, extent);
  return bytes;
}

H5D_layout_t layout_of(const Hdf5Handle& create, const std::string& path) {
  const H5D_layout_t layout = checked_hdf5(H5Pget_layout(create), "H5Pget_layout");
  if (layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED && layout != H5D_COMPACT) {
    throw Error(fmt::format("data set '{}' is made of other data sets", path));
  }
  if (layout == H5D_CONTIGUOUS &&
      checked_hdf5(H5Pget_external_count(create), "H5Pget_external_count") > 0) {
    throw Error(fmt::format("the content of data set '{}' is in another file", path));
  }
  return layout;
}

}  // namespace kvzap::io::checked
