// Attributes, groups and data sets of files that may be damaged, each checked when it is opened.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <kvzap/engine/snapshot.hpp>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "io/hdf5_objects.hpp"

namespace kvzap::io::checked {

inline constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

/// Limit on the size of inflated content relative to its bytes in the file: deflate compresses no
/// more.
inline constexpr std::int64_t most_gain = 1100;

/// Returns a * b of numbers that are not negative, or `largest`.
inline std::int64_t product(std::int64_t a, std::int64_t b) {
  return b != 0 && a > largest / b ? largest : a * b;
}

const char* class_name(H5T_class_t type);

/// Returns nothing if the attribute has a type that none of our files has.
std::optional<SnapshotAttribute> value_of(hid_t attribute);

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

std::int64_t integer(hid_t object, const char* name, std::int64_t least, std::int64_t most);
std::string text(hid_t object, const char* name);
/// Returns all attributes of an object.
std::map<std::string, SnapshotAttribute> attributes(hid_t object);

/// Returns whether `parent` itself has such an object: external links would make HDF5 read other
/// files.
bool has_child(hid_t parent, const std::string& name, const std::string& path);
Hdf5Handle open_group(hid_t parent, const std::string& name, const std::string& path);

struct OpenSet {
  Hdf5Handle handle;
  std::vector<std::int64_t> extents;
};

/// `extents`: the expected extents. A negative one matches any.
OpenSet open_set(hid_t parent, const std::string& name, const std::string& path, hid_t type,
                 const char* type_name, const std::vector<std::int64_t>& extents);
/// Returns the bytes of a data set's content.
std::int64_t content_bytes(const OpenSet& set, std::size_t element_bytes);
/// Returns the layout of a data set's content in the file. `create`: its creation properties.
/// Throws Error if it is in another file.
H5D_layout_t layout_of(const Hdf5Handle& create, const std::string& path);

// Reads the content of a small data set at once. `file_bytes` limits it.
template <class Element>
std::vector<Element> content(hid_t parent, const std::string& name, const std::string& path,
                             const std::vector<std::int64_t>& extents, std::int64_t file_bytes) {
  const ElementType type = element_type<Element>();
  const OpenSet set = open_set(parent, name, path, type.file, type.name, extents);
  const Hdf5Handle create(H5Dget_create_plist(set.handle), H5Pclose, "H5Dget_create_plist");
  const std::int64_t bytes = content_bytes(set, sizeof(Element));
  if (layout_of(create, path) == H5D_CHUNKED || bytes > file_bytes) {
    throw Error(fmt::format("data set '{}' has {} bytes, in chunks or more than the file's {}",
                            path, bytes, file_bytes));
  }
  if (bytes > 0 && H5Dget_storage_size(set.handle) != static_cast<hsize_t>(bytes)) {
    throw Error(fmt::format("data set '{}' has {} bytes in the file; expected {}", path,
                            H5Dget_storage_size(set.handle), bytes));
  }
  std::vector<Element> elements(static_cast<std::size_t>(bytes) / sizeof(Element));
  if (bytes > 0) {
    checked_hdf5(H5Dread(set.handle, type.memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, elements.data()),
                 fmt::format("H5Dread of '{}'", path).c_str());
  }
  return elements;
}

}  // namespace kvzap::io::checked
