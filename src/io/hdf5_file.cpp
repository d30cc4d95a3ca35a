#include "io/hdf5_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>

#include "base/address_space.hpp"
#include "files/temporary_file.hpp"
#include "files/waiting.hpp"

namespace kvzap::io {
namespace {

// Layout of a heap: "GCOL", version and 3 bytes, size (8 bytes), objects. Layout of an object:
// index (2), references (2), 4 bytes, size (8), data up to a multiple of 8 bytes. Index 0 is the
// free space, which reaches to the end (HDF5 File Format Specification 3.0, III.E).
void check_global_heaps(const std::filesystem::path& file) {
  constexpr std::size_t most = std::size_t{1} << 24, header = 16;
  std::error_code unreadable;  // H5Fopen reports this error
  const std::uintmax_t all = std::filesystem::file_size(file, unreadable);
  if (unreadable) return;
  std::ifstream stream(file, std::ios::binary);
  std::string bytes(std::min<std::uintmax_t>(all, most), '\0');
  stream.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(stream.gcount()));
  const auto number_at = [&](std::size_t place, std::size_t width) {
    std::uint64_t number = 0;
    std::memcpy(&number, bytes.data() + place, width);
    return number;
  };
  // Heaps that overlap would make this quadratic. HDF5 writes none.
  std::size_t objects_left = bytes.size() / header;
  for (std::size_t begin = 0; begin + header <= bytes.size(); begin += 8) {
    if (bytes.compare(begin, 4, "GCOL") != 0) continue;
    const auto fail = [&](const char* what) {
      throw Error(fmt::format("the global heap at byte {} is damaged: {}", begin, what));
    };
    const std::uint64_t size = number_at(begin + 8, 8);
    // HDF5 itself reports a heap beyond the end of the file.
    if (size > bytes.size() - begin) continue;
    if (size < header) fail("its size is less than that of its header");
    std::set<std::uint64_t> indices;
    for (std::uint64_t place = header; place + header <= size;) {
      if (objects_left-- == 0) fail("it overlaps another one");
      const std::uint64_t index = number_at(begin + place, 2);
      const std::uint64_t length = number_at(begin + place + 8, 8);
      const std::uint64_t left = size - place;
      if (index == 0) {
        if (length != left) fail("its free space does not reach its end");
        break;
      }
      if (length > left - header || !indices.insert(index).second) {
        fail("an object does not fit it");
      }
      place += header + (length + 7) / 8 * 8;
    }
  }
}

}  // namespace

Hdf5Handle property_list(hid_t kind) {
  // HDF5 1.10 crashes if it gets no memory while it creates or opens a file; each file has such a
  // list. Its largest block takes 1 MiB.
  constexpr std::size_t least_bytes = std::size_t{16} << 20;
  if (kind == H5P_FILE_ACCESS) base::expect_address_space(least_bytes, "HDF5");
  return {H5Pcreate(kind), H5Pclose, "H5Pcreate"};
}

Hdf5Handle serial_access() {
  Hdf5Handle access = property_list(H5P_FILE_ACCESS);
#if H5_VERSION_GE(1, 12, 1) || (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 12, 0))
  // No other process knows the file yet, and many parallel file systems have no locks.
  checked_hdf5(H5Pset_file_locking(access, false, true), "H5Pset_file_locking");
#endif
  return access;
}

Hdf5Handle open_to_read(const std::filesystem::path& file) {
  const files::Waiting waiting(file, files::Waiting::For::input);
  check_global_heaps(file);
  const Hdf5Handle access = serial_access();  // its end would clear the reason of a failure
  const hid_t id = H5Fopen(file.c_str(), H5F_ACC_RDONLY, access);
  if (id < 0) {
    throw Error(fmt::format("truncated, or not written by kvzap: HDF5 cannot open it ({})",
                            hdf5_failure("H5Fopen")));
  }
  return {id, H5Fclose, "H5Fopen"};
}

void CollectiveOutcome::note(herr_t code, const char* call) {
  if (code < 0 && m_failure.empty()) m_failure = hdf5_failure(call);
}

void CollectiveOutcome::attempt(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (m_failure.empty()) m_failure = error.what();
  }
}

void CollectiveOutcome::agree(const Communicator& comm, const std::filesystem::path& file,
                              const std::string& kind) const {
  files::agree_on_file(
      comm, file,
      [&] {
        if (!m_failure.empty()) throw Error(m_failure);
      },
      kind);
}

Hdf5Handle open_together(const std::filesystem::path& file, const Communicator& comm,
                         const std::string& kind) {
  CollectiveOutcome outcome;
  Hdf5Handle access;
  // One rank needs no MPI-IO, which leaves a lock file behind if the process is killed.
  files::agree_on_file(
      comm, file,
      [&] { access = comm.size() > 1 ? property_list(H5P_FILE_ACCESS) : serial_access(); }, kind);
#if KVZAP_HAVE_MPI
  if (comm.size() > 1) {
    outcome.note(H5Pset_fapl_mpio(access, comm.mpi(), MPI_INFO_NULL), "H5Pset_fapl_mpio");
  }
  outcome.agree(comm, file, kind);
#endif
  const hid_t id = H5Fopen(file.c_str(), H5F_ACC_RDWR, access);
  outcome.note(id < 0 ? -1 : 0, "H5Fopen");
  outcome.agree(comm, file, kind);
  return Hdf5Handle(id, H5Fclose, "H5Fopen");
}

Hdf5Handle transfer_together([[maybe_unused]] const Communicator& comm) {
  Hdf5Handle transfer = property_list(H5P_DATASET_XFER);
#if KVZAP_HAVE_MPI
  if (comm.size() > 1) {
    checked_hdf5(H5Pset_dxpl_mpio(transfer, H5FD_MPIO_COLLECTIVE), "H5Pset_dxpl_mpio");
  }
#endif
  return transfer;
}

void reserve(int descriptor, std::int64_t begin, std::int64_t bytes) {
#ifdef __linux__
  int code = 0;
  do {
    code = ::fallocate(descriptor, 0, begin, bytes) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code == 0) return;
  if (code != EOPNOTSUPP && code != ENOSYS) {
    throw files::system_error(fmt::format("no room for {} bytes", bytes), code);
  }
#endif
  struct statvfs status = {};
  if (::fstatvfs(descriptor, &status) != 0) return;
  const auto blocks = static_cast<std::int64_t>(status.f_bavail);
  if (blocks < bytes / static_cast<std::int64_t>(status.f_frsize)) {
    throw files::system_error(fmt::format("no room for {} bytes", bytes), ENOSPC);
  }
}

}  // namespace kvzap::io
