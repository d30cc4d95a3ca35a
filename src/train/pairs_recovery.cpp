#include "pairs_recovery.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "base/fnv.hpp"
#include "io/temporary_file.hpp"

namespace kvzap::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::array<char, 24> magic = {"kvzap pairs recovery 1\n"};

struct Header {
  std::array<char, 24> magic;
  std::int64_t changing;
  std::int64_t fixed;
  std::uint64_t fixed_hash;
  std::uint64_t image_hash;
};

// Bytes begin … end - 1 of an open file.
std::vector<char> read_bytes(int descriptor, std::int64_t begin, std::int64_t end) {
  std::vector<char> bytes(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin)));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t count = ::pread(descriptor, bytes.data() + done, bytes.size() - done,
                                  static_cast<off_t>(begin + static_cast<std::int64_t>(done)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error("cannot be read", errno);
    if (count == 0) throw Error("it ends too early");
    done += static_cast<std::size_t>(count);
  }
  return bytes;
}

void write_bytes(int descriptor, const void* data, std::size_t size, std::int64_t begin) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t count = ::pwrite(descriptor, static_cast<const char*>(data) + done, size - done,
                                   static_cast<off_t>(begin + static_cast<std::int64_t>(done)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error("cannot be written", errno);
    if (count == 0) throw system_error("cannot be written", ENOSPC);
    done += static_cast<std::size_t>(count);
  }
}

void to_disk(int descriptor) {
  while (::fsync(descriptor) != 0) {
    if (errno != EINTR) throw system_error("cannot be brought to the disk", errno);
  }
}

std::uint64_t hash_of(const std::vector<char>& bytes) {
  return fnv1a({bytes.data(), bytes.size()});
}

template <class Work>
void naming(const fs::path& file, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", file.string(), error.what()));
  }
}

}  // namespace

PairsRecovery::PairsRecovery(const fs::path& pairs_file)
    : m_pairs_file(fs::absolute(pairs_file)), m_path(m_pairs_file) {
  m_path += ".recovery";
}

void PairsRecovery::save(const fs::path& source, std::int64_t changing, std::int64_t fixed) {
  std::vector<char> image;
  naming(source, [&] {
    const FileDescriptor file(source, O_RDONLY | O_CLOEXEC);
    if (file.get() < 0) throw system_error("cannot be opened", errno);
    image = read_bytes(file.get(), 0, changing);
    if (!m_is_hashed) m_fixed_hash = hash_of(read_bytes(file.get(), changing, fixed));
    m_is_hashed = true;
  });
  const Header header{magic, changing, fixed, m_fixed_hash, hash_of(image)};
  fs::path temporary = m_path;
  temporary += ".tmp";
  naming(temporary, [&] {
    const FileDescriptor file(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
    if (file.get() < 0) throw system_error("cannot be created", errno);
    write_bytes(file.get(), &header, sizeof(header), 0);
    write_bytes(file.get(), image.data(), image.size(), sizeof(header));
    to_disk(file.get());
  });
  naming(m_path, [&] {
    if (::rename(temporary.c_str(), m_path.c_str()) != 0) {
      throw system_error("cannot be replaced", errno);
    }
  });
  DurableCalls::of_system().sync_folder(m_path.parent_path());
}

bool PairsRecovery::restore() const {
  const FileDescriptor from(m_path, O_RDONLY | O_CLOEXEC);
  if (from.get() < 0 && errno == ENOENT) return false;
  Header header{};
  std::vector<char> image;
  naming(m_path, [&] {
    if (from.get() < 0) throw system_error("cannot be opened", errno);
    const std::vector<char> bytes = read_bytes(from.get(), 0, sizeof(header));
    std::memcpy(&header, bytes.data(), sizeof(header));
    const auto size = static_cast<std::int64_t>(fs::file_size(m_path));
    const auto begin = static_cast<std::int64_t>(sizeof(header));
    if (header.magic != magic || header.changing != size - begin ||
        header.fixed < header.changing) {
      throw Error("it is damaged or no recovery file of kvzap collect");
    }
    image = read_bytes(from.get(), begin, size);
    if (hash_of(image) != header.image_hash) throw Error("it is damaged");
  });
  const FileDescriptor to(m_pairs_file, O_RDWR | O_CLOEXEC);
  if (to.get() < 0) throw system_error("cannot be opened", errno);
  const auto size = static_cast<std::int64_t>(fs::file_size(m_pairs_file));
  if (header.fixed > size ||
      hash_of(read_bytes(to.get(), header.changing, header.fixed)) != header.fixed_hash) {
    throw Error(
        fmt::format("{} is of another file; move away whichever is not wanted", m_path.string()));
  }
  write_bytes(to.get(), image.data(), image.size(), 0);
  to_disk(to.get());
  return true;
}

void PairsRecovery::remove() const {
  fs::remove(m_path);
  fs::path temporary = m_path;
  temporary += ".tmp";
  fs::remove(temporary);
}

PairsClaim::PairsClaim(const fs::path& file)
    : m_descriptor(::open(file.c_str(), O_RDWR | O_CLOEXEC)) {
#ifdef F_OFD_SETLK
  if (m_descriptor < 0) return;
  // Of the open file and not of the process, whose other locks end when any descriptor of the file
  // is closed; far behind all data, where neither HDF5 nor MPI-IO lock anything.
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(1) << 62;
  lock.l_len = 1;
  if (::fcntl(m_descriptor, F_OFD_SETLK, &lock) != 0 && (errno == EAGAIN || errno == EACCES)) {
    ::close(m_descriptor);
    throw Error("another process is writing it");
  }
#endif
}

PairsClaim::~PairsClaim() {
  if (m_descriptor >= 0) ::close(m_descriptor);
}

}  // namespace kvzap::detail
