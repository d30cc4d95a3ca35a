// What kvzap's HDF5 files are made of: types, attributes, and opening a file on all ranks together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

#include "io/hdf5.hpp"

namespace kvzap::detail {

Hdf5Handle property_list(hid_t kind);
Hdf5Handle simple_space(const std::vector<hsize_t>& extents);

/// Of values as they are stored (little-endian), and as they lie in memory.
Hdf5Handle type_in_file(DType dtype);
Hdf5Handle type_in_memory(DType dtype);

/// New attributes. Throw Error if there is one of this name, or a NUL in the name or the text.
void write_attribute(hid_t object, const std::string& name, std::int64_t value);
void write_attribute(hid_t object, const std::string& name, float value);
void write_attribute(hid_t object, const std::string& name, double value);
void write_attribute(hid_t object, const std::string& name, const std::string& value);

/// File access by this process alone.
Hdf5Handle serial_access();

/// Outcome of collective HDF5 calls. Every rank makes each of them whatever came of the one before,
/// and the ranks compare notes afterwards.
class CollectiveOutcome {
 public:
  void note(herr_t code, const char* call);
  /// Throws AgreedError with "KIND FILE: " in front if a call has failed on any rank. Collective.
  void agree(const Communicator& comm, const std::filesystem::path& file,
             const std::string& kind = "snapshot") const;

 private:
  std::string m_failure;
};

/// The file `path` to be read and written by all ranks; messages name `file`. Collective.
Hdf5Handle open_together(const std::filesystem::path& path, const std::filesystem::path& file,
                         const Communicator& comm, const std::string& kind = "snapshot");

/// Transfers in which all ranks take part, each with a part of its own.
Hdf5Handle transfer_together(const Communicator& comm);

/// Takes the space on the disk before anything is written: bytes begin … begin + bytes - 1 of the
/// file, which may become longer. A full disk must not be found out later: HDF5 cannot close a file
/// whose metadata it fails to write (the identifier is left dangling), and a collective write that
/// fails on one rank may leave the others waiting. Throws Error if there is no room.
void reserve(int descriptor, std::int64_t begin, std::int64_t bytes);

}  // namespace kvzap::detail
