// Parts of kvzap's HDF5 files: types, attributes, and opening a file on all ranks together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

#include "io/hdf5.hpp"

namespace kvzap::io {

Hdf5Handle property_list(hid_t kind);
Hdf5Handle simple_space(const std::vector<hsize_t>& extents);

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

/// Add attributes. Throw Error if the name exists, or if the name or the text has a NUL.
void write_attribute(hid_t object, const std::string& name, std::int64_t value);
void write_attribute(hid_t object, const std::string& name, float value);
void write_attribute(hid_t object, const std::string& name, double value);
void write_attribute(hid_t object, const std::string& name, const std::string& value);

/// File access by this process alone.
Hdf5Handle serial_access();

/// Opens a file for reading in this process alone. First checks the global heaps in its first 16
/// MiB, which hold texts of variable length. Heaps have no checksum, and HDF5 1.10 overruns its
/// buffers if the size of an object is wrong. Throws Error, which does not name the file, if an
/// object does not fit its heap or HDF5 cannot open the file.
Hdf5Handle open_to_read(const std::filesystem::path& file);

/// The outcome of collective HDF5 calls. Every rank makes each call, even after a failure, and the
/// ranks compare their outcomes afterwards.
class CollectiveOutcome {
 public:
  void note(herr_t code, const char* call);
  /// Throws AgreedError with the prefix "KIND FILE: " if a call has failed on any rank. Collective.
  void agree(const Communicator& comm, const std::filesystem::path& file,
             const std::string& kind = "snapshot") const;

 private:
  std::string m_failure;
};

/// Opens the file `path` for reading and writing on all ranks; messages name `file`. Collective.
Hdf5Handle open_together(const std::filesystem::path& path, const std::filesystem::path& file,
                         const Communicator& comm, const std::string& kind = "snapshot");

/// Transfer property list for collective transfers: all ranks take part, each with its own part.
Hdf5Handle transfer_together(const Communicator& comm);

/// Allocates disk space before anything is written: the bytes begin … begin + bytes - 1 of the
/// file, which may grow. A full disk must show early. HDF5 cannot close a file whose metadata it
/// fails to write (the identifier is left dangling), and a collective write that fails on one rank
/// may leave the others waiting. Throws Error if there is no space.
void reserve(int descriptor, std::int64_t begin, std::int64_t bytes);

}  // namespace kvzap::io
