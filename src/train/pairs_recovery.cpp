#include "pairs_recovery.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <ostream>
#include <vector>

#include "files/fnv.hpp"
#include "files/fully.hpp"
#include "files/temporary_file.hpp"
#include "io/container.hpp"

namespace kvzap::train {
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

// Reads bytes begin … end - 1 of an open file.
std::vector<char> read_bytes(int descriptor, std::int64_t begin, std::int64_t end) {
  std::vector<char> bytes(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin)));
  files::read_fully(descriptor, bytes.data(), static_cast<std::int64_t>(bytes.size()), begin);
  return bytes;
}

// Returns the end of the file that begins with these bytes: the third address of HDF5's superblock,
// version 2 or 3. (H5Fget_eoa fails for files that ranks have open together.)
std::int64_t end_of_file(const std::vector<char>& image) {
  constexpr std::size_t version = 8, address_bytes = 9, end = 28;
  std::uint64_t value = 0;
  if (image.size() < end + sizeof(value) || (image[version] != 2 && image[version] != 3) ||
      image[address_bytes] != sizeof(value)) {
    throw Error("HDF5's superblock is none that kvzap collect writes");
  }
  for (std::size_t i = sizeof(value); i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(image[end + i]);
  }
  return static_cast<std::int64_t>(
      std::min<std::uint64_t>(value, std::numeric_limits<std::int64_t>::max()));
}

std::uint64_t hash_of(const std::vector<char>& bytes) {
  return files::fnv1a({bytes.data(), bytes.size()});
}

}  // namespace

struct PairsRecovery::Image {
  Header header{};
  std::vector<char> bytes;
};

PairsRecovery::PairsRecovery(const fs::path& pairs_file)
    : m_pairs_file(fs::absolute(pairs_file)), m_path(m_pairs_file) {
  m_path += ".recovery";
}

void PairsRecovery::save(const fs::path& source, std::int64_t changing, std::int64_t fixed) {
  std::vector<char> image;
  io::about(source.string(), [&] {
    const files::FileDescriptor file(source, O_RDONLY | O_CLOEXEC);
    if (file.get() < 0) throw files::system_error("cannot be opened", errno);
    image = read_bytes(file.get(), 0, changing);
    if (!m_is_hashed) m_fixed_hash = hash_of(read_bytes(file.get(), changing, fixed));
    m_is_hashed = true;
  });
  const Header header{magic, changing, fixed, m_fixed_hash, hash_of(image)};
  files::write_file(m_path, "recovery file", [&](std::ostream& stream) {
    stream.write(static_cast<const char*>(static_cast<const void*>(&header)), sizeof(header));
    stream.write(image.data(), static_cast<std::streamsize>(image.size()));
  });
}

std::optional<PairsRecovery::Image> PairsRecovery::read() const {
  const files::FileDescriptor from(m_path, O_RDONLY | O_CLOEXEC);
  if (from.get() < 0 && errno == ENOENT) return std::nullopt;
  Image image;
  io::about(m_path.string(), [&] {
    if (from.get() < 0) throw files::system_error("cannot be opened", errno);
    Header& header = image.header;
    const std::vector<char> bytes = read_bytes(from.get(), 0, sizeof(header));
    std::memcpy(&header, bytes.data(), sizeof(header));
    const auto size = static_cast<std::int64_t>(fs::file_size(m_path));
    const auto begin = static_cast<std::int64_t>(sizeof(header));
    if (header.magic != magic || header.changing != size - begin ||
        header.fixed < header.changing) {
      throw Error("it is damaged or no recovery file of kvzap collect");
    }
    image.bytes = read_bytes(from.get(), begin, size);
    if (hash_of(image.bytes) != header.image_hash) throw Error("it is damaged");
  });
  return image;
}

bool PairsRecovery::belongs(const Image& image, int pairs_descriptor) const {
  const Header& header = image.header;
  return header.fixed <= static_cast<std::int64_t>(fs::file_size(m_pairs_file)) &&
         hash_of(read_bytes(pairs_descriptor, header.changing, header.fixed)) == header.fixed_hash;
}

bool PairsRecovery::restore() const {
  const std::optional<Image> image = read();
  if (!image) return false;
  const files::FileDescriptor to(m_pairs_file, O_RDWR | O_CLOEXEC);
  if (to.get() < 0) throw files::system_error("cannot be opened", errno);
  if (!belongs(*image, to.get())) {
    throw Error(
        fmt::format("{} is of another file; move away whichever is not wanted", m_path.string()));
  }
  const auto size = static_cast<std::int64_t>(fs::file_size(m_pairs_file));
  std::int64_t end = 0;
  io::about(m_path.string(), [&] { end = end_of_file(image->bytes); });
  if (end > size) {
    throw Error(fmt::format(
        "it has {} bytes, fewer than the {} that it had when {} was written: was it copied before "
        "it? If this file was closed in order, move the latter away to continue without it",
        size, end, m_path.string()));
  }
  files::write_fully(to.get(), image->bytes.data(), static_cast<std::int64_t>(image->bytes.size()),
                     0);
  files::bring_to_disk(to.get());
  return true;
}

void PairsRecovery::remove() const {
  try {
    const std::optional<Image> image = read();
    const files::FileDescriptor of(m_pairs_file, O_RDONLY | O_CLOEXEC);
    if (image && (of.get() < 0 || !belongs(*image, of.get()))) return;
  } catch (const Error&) {
    return;  // the image belongs to another file
  }
  fs::remove(m_path);
}

void remove_mpi_locks(const fs::path& file) {
  const fs::path target = fs::absolute(file);
  const std::string begin = target.filename().string() + "-";
  std::error_code ignored;
  std::vector<fs::path> locks;
  for (fs::directory_iterator entry(target.parent_path(), ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const std::string name = entry->path().filename().string();
    if (name.rfind(begin, 0) != 0 || entry->path().extension() != ".lock") continue;
    const std::string numbers =
        name.substr(begin.size(), name.size() - begin.size() - std::string(".lock").size());
    const std::size_t dash = numbers.find('-');
    const bool is_lock = dash != 0 && dash < numbers.size() - 1 &&
                         numbers.find_first_not_of("0123456789-") == std::string::npos &&
                         numbers.find('-', dash + 1) == std::string::npos;
    if (is_lock) locks.push_back(entry->path());
  }
  for (const fs::path& lock : locks) fs::remove(lock, ignored);
}

PairsClaim::PairsClaim(const fs::path& file)
    : m_descriptor(::open(file.c_str(), O_RDWR | O_CLOEXEC)) {
#ifdef F_OFD_SETLK
  if (m_descriptor < 0) return;
  // The lock belongs to the open file: a lock of the process would end when any descriptor of the
  // file is closed. It lies far after all data, where neither HDF5 nor MPI-IO locks bytes.
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

}  // namespace kvzap::train
