// Opens kvzap's HDF5 files, in one process or on all ranks together, and reserves their space.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <string>

#include "io/hdf5.hpp"

namespace kvzap::io {

Hdf5Handle property_list(hid_t kind);

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
  /// Notes what work() throws.
  void attempt(const std::function<void()>& work);
  /// Throws AgreedError with the prefix "KIND FILE: " if a call has failed on any rank. Collective.
  void agree(const Communicator& comm, const std::filesystem::path& file,
             const std::string& kind) const;

 private:
  std::string m_failure;
};

/// Opens a file for reading and writing on all ranks. `kind`: the word for it in messages.
/// Collective.
Hdf5Handle open_together(const std::filesystem::path& file, const Communicator& comm,
                         const std::string& kind);

/// Transfer property list for collective transfers: all ranks take part, each with its own part.
Hdf5Handle transfer_together(const Communicator& comm);

/// Allocates disk space before anything is written: the bytes begin … begin + bytes - 1 of the
/// file, which may grow. A full disk must show early. HDF5 cannot close a file whose metadata it
/// fails to write (the identifier is left dangling), and a collective write that fails on one rank
/// may leave the others waiting. Throws Error if there is no space.
void reserve(int descriptor, std::int64_t begin, std::int64_t bytes);

}  // namespace kvzap::io
