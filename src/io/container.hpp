// The content of kvzap's HDF5 files: attributes, groups and data sets. A writer creates them from
// the same declarations (names, types, extents, limits) by which a reader checks a file, which may
// be damaged or made to harm. Paths begin at the root: "/layers/0/keys".
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <limits>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "files/quote.hpp"
#include "io/hdf5.hpp"

namespace kvzap::io {

inline constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

/// Limit on the size of inflated content relative to its bytes in the file: deflate compresses no
/// more.
inline constexpr std::int64_t most_gain = 1100;

/// Returns a * b of numbers that are not negative, or `largest`.
inline std::int64_t product(std::int64_t a, std::int64_t b) {
  return b != 0 && a > largest / b ? largest : a * b;
}

// ---- Errors -------------------------------------------------------------------------------------

/// Returns work(). Puts "WHERE: " in front of the message of an Error.
template <class Work>
auto about(const std::string& where, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", where, error.what()));
  }
}

/// Returns work(), which reads an untrusted file. An exception becomes an Error "KIND FILE: …" in
/// one plain line.
template <class Work>
auto about_file(const char* kind, const std::filesystem::path& file, const Work& work)
    -> decltype(work()) {
  std::string what = "out of memory";
  try {
    return work();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  } catch (const std::exception& error) {
    what = files::shown(error.what(), 1000);
  }
  throw Error(fmt::format("{} {}: {}", kind, file.string(), what));
}

// ---- Types --------------------------------------------------------------------------------------

/// The type of a data set's elements in the file and in memory, and the name that errors use.
struct ElementType {
  hid_t file;
  hid_t memory;
  const char* name;
};
/// Element: std::int32_t, std::int64_t, std::uint32_t or float.
template <class Element>
ElementType element_type();

/// Types of values in the file (little-endian) and in memory.
Hdf5Handle type_in_file(DType dtype);
Hdf5Handle type_in_memory(DType dtype);
/// Texts of `bytes` bytes each or, with H5T_VARIABLE, of any length.
Hdf5Handle text_type(std::size_t bytes, H5T_cset_t characters = H5T_CSET_UTF8);

// ---- Attributes ---------------------------------------------------------------------------------
// An object may be a file, whose attributes are those of the root.

/// Add attributes. Throw Error if the name exists, or if the name or the text has a NUL.
void write_attribute(hid_t object, const std::string& name, std::int64_t value);
void write_attribute(hid_t object, const std::string& name, float value);
void write_attribute(hid_t object, const std::string& name, double value);
void write_attribute(hid_t object, const std::string& name, const std::string& value);
/// Changes an attribute.
void set_attribute(hid_t object, const char* name, std::int64_t value);

std::int64_t integer(hid_t object, const char* name, std::int64_t least, std::int64_t most);
double number(hid_t object, const char* name);
std::string text(hid_t object, const char* name);
/// Returns all attributes of an object whose types our files have.
std::map<std::string, SnapshotAttribute> attributes(hid_t object);

/// Returns the version of a file's format. Throws Error if it is another, or missing because
/// `writer` has not written the file.
std::int64_t read_version(hid_t file, const char* name, std::int64_t oldest, std::int64_t newest,
                          const char* writer);

/// Adds listed attributes to an object. A list is a function of the writer and the reader:
///
///   template <class Fields, class Visit>
///   void list_attributes(Fields& fields, Visit& visit) {
///     visit("model", fields.model);                   // a text or a float
///     visit("layers", fields.layers, 1, most_layers); // an integer, else from 0 on
///     visit("dtype", fields.dtype, dtype_from_name);  // an enumeration with name_of
///   }
class AttributeWriter {
 public:
  explicit AttributeWriter(hid_t object) : m_object(object) {}

  template <class Field, class... Limits>
  void operator()(const char* name, const Field& value, const Limits&... /*of the reader*/) const {
    if constexpr (std::is_enum_v<Field>) {
      write_attribute(m_object, name, std::string(name_of(value)));
    } else if constexpr (std::is_integral_v<Field>) {
      write_attribute(m_object, name, static_cast<std::int64_t>(value));
    } else {
      write_attribute(m_object, name, value);
    }
  }

 private:
  hid_t m_object;
};

/// Reads listed attributes of an object. Throws Error, naming the attribute, if one is missing, of
/// another type or beyond its limits.
class AttributeReader {
 public:
  explicit AttributeReader(hid_t object) : m_object(object) {}

  void operator()(const char* name, std::string& value) { value = text(m_object, listed(name)); }
  void operator()(const char* name, float& value) {
    value = static_cast<float>(number(m_object, listed(name)));
  }
  template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
  void operator()(const char* name, Integer& value, std::int64_t least = 0,
                  std::int64_t most = std::numeric_limits<Integer>::max()) {
    value = static_cast<Integer>(integer(m_object, listed(name), least, most));
  }
  template <class Named, class FromName, class = std::enable_if_t<std::is_enum_v<Named>>>
  void operator()(const char* name, Named& value, const FromName& from_name) {
    std::string found;
    (*this)(name, found);
    value = about(fmt::format("attribute '{}'", name), [&] { return from_name(found); });
  }

  /// Returns the attributes that were not listed.
  std::map<std::string, SnapshotAttribute> others() const {
    auto others = attributes(m_object);
    for (const char* name : m_listed) others.erase(name);
    return others;
  }

 private:
  const char* listed(const char* name) { return m_listed.emplace_back(name); }

  hid_t m_object;
  std::vector<const char*> m_listed;
};

// ---- Objects of a new file ----------------------------------------------------------------------

Hdf5Handle simple_space(const std::vector<hsize_t>& extents);
Hdf5Handle new_group(hid_t file, const std::string& path);
/// Creation properties of a data set in one run of bytes, allocated at `when`, or in compressed
/// chunks. No times: the same content gives the same bytes.
Hdf5Handle in_one_run(H5D_alloc_time_t when);
/// level: of deflate, 0 to 9. Level 0 stores chunks as they are.
Hdf5Handle in_chunks(const std::vector<hsize_t>& chunk, int level);
Hdf5Handle new_set(hid_t file, const std::string& path, hid_t type,
                   const std::vector<hsize_t>& extents, hid_t create);

/// Writes all elements of a data set.
template <class Element>
void write_content(hid_t set, const std::vector<Element>& content) {
  // The pointer of an empty vector may be null, which HDF5 refuses.
  if (content.empty()) return;
  const hid_t memory = element_type<Element>().memory;
  checked_hdf5(H5Dwrite(set, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, content.data()), "H5Dwrite");
}

/// Returns the byte of the file at which a data set in one run begins.
std::int64_t place_of(hid_t set);

// ---- Objects of an untrusted file ---------------------------------------------------------------

/// Returns whether the file itself has the object. Throws Error if a part of the path is no group,
/// or a link to elsewhere: external links would make HDF5 read other files.
bool has_object(hid_t file, const std::string& path);
Hdf5Handle open_group(hid_t file, const std::string& path);

struct OpenSet {
  Hdf5Handle handle;
  std::vector<std::int64_t> extents;
  H5D_layout_t layout;
  // If it is chunked: extents of a chunk, and its filters in order.
  std::vector<std::int64_t> chunk;
  std::vector<H5Z_filter_t> filters;
};

/// How many rows a data set may have: as many as expected, or more.
enum class Rows { exactly, at_least };

/// The type of the elements, or the class of all types that fit.
using ExpectedType = std::variant<hid_t, H5T_class_t>;

/// extents: the expected ones. A negative one matches any. The content must be in this file and in
/// no other data set.
OpenSet open_set(hid_t file, const std::string& path, const ExpectedType& type,
                 std::string_view type_name, const std::vector<std::int64_t>& extents,
                 Rows rows = Rows::exactly);
/// Returns the bytes of a data set's content.
std::int64_t content_bytes(const OpenSet& set, std::size_t element_bytes);

// Reads the content of a small data set at once. `file_bytes` limits it.
template <class Element>
std::vector<Element> content(hid_t file, const std::string& path,
                             const std::vector<std::int64_t>& extents, std::int64_t file_bytes) {
  const ElementType type = element_type<Element>();
  const OpenSet set = open_set(file, path, type.file, type.name, extents);
  const std::int64_t bytes = content_bytes(set, sizeof(Element));
  if (set.layout == H5D_CHUNKED || bytes > file_bytes) {
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

// ---- Parts of data sets -------------------------------------------------------------------------

/// Returns a data set's space with a selection: `count` elements from `start` on, one number each
/// for each extent. A count of 0 selects none.
Hdf5Handle selection(hid_t set, const std::vector<hsize_t>& start,
                     const std::vector<hsize_t>& count);
/// Read and write such a part. memory_type: of the elements at `data`.
void read_part(hid_t set, hid_t memory_type, const std::vector<hsize_t>& start,
               const std::vector<hsize_t>& count, void* data);
void write_part(hid_t set, hid_t memory_type, const std::vector<hsize_t>& start,
                const std::vector<hsize_t>& count, const void* data);

}  // namespace kvzap::io
