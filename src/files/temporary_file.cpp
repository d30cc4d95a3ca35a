#include "files/temporary_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <string_view>
#include <system_error>

namespace kvzap::files {
namespace {

namespace fs = std::filesystem;

// After this long without a write, a file of another node's run is a leftover: a live run writes at
// least every few seconds.
constexpr std::int64_t seconds_of_day = std::int64_t{24} * 60 * 60;

// The error of fsync; 0 if it succeeded.
int error_of_sync(int descriptor) {
  while (::fsync(descriptor) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

void file_to_disk(const fs::path& file) {
  // MPI-IO and HDF5 leave data in the caches of the node that wrote it.
  const FileDescriptor descriptor(file, O_RDWR | O_CLOEXEC);
  if (descriptor.get() < 0) throw system_error("cannot be opened", errno);
  bring_to_disk(descriptor.get());
}

void folder_to_disk(const fs::path& folder) {
  const FileDescriptor descriptor(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // A folder may be writable but not readable, and some file systems cannot sync folders. The
  // rename is then as durable as that file system makes it.
  if (descriptor.get() < 0 && errno == EACCES) return;
  if (descriptor.get() < 0) throw system_error("its folder cannot be opened", errno);
  const int code = error_of_sync(descriptor.get());
  if (code != 0 && code != EINVAL && code != ENOTSUP && code != EBADF) {
    throw system_error("its name cannot be brought to the disk", code);
  }
}

// The parts of a temporary file's name.
struct Writer {
  std::string node;  // "" in names of older versions
  std::int64_t process;
};

std::optional<std::int64_t> number(std::string_view digits) {
  constexpr std::size_t most_digits = 18;
  if (digits.empty() || digits.size() > most_digits) return std::nullopt;
  std::int64_t value = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return std::nullopt;
    value = 10 * value + (c - '0');
  }
  return value;
}

// Reads `name` without the target's name and ".tmp-": NODE-PROCESS-NUMBER or PROCESS-NUMBER.
std::optional<Writer> writer_of(std::string_view name) {
  const std::size_t last = name.rfind('-');
  if (last == std::string_view::npos || !number(name.substr(last + 1))) return std::nullopt;
  name = name.substr(0, last);
  const std::size_t middle = name.rfind('-');
  const std::size_t begin = middle == std::string_view::npos ? 0 : middle + 1;
  const auto process = number(name.substr(begin));
  if (!process || *process == 0 || *process > std::numeric_limits<pid_t>::max()) {
    return std::nullopt;
  }
  return Writer{std::string(name.substr(0, begin == 0 ? 0 : middle)), *process};
}

// A zombie counts as dead: in containers without init no process reaps it, so it would stay
// forever.
bool is_alive(std::int64_t process) {
  if (::kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) return false;
  std::ifstream stream(fmt::format("/proc/{}/stat", process));
  std::string text;  // "PROCESS (NAME) STATE ...", and the name may have anything in it
  std::getline(stream, text);
  const std::size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos) return true;  // nothing is known of it
  const char state = name_end + 2 < text.size() ? text[name_end + 2] : ' ';
  return state != 'Z' && state != 'X';
}

std::optional<std::int64_t> modified_at(const fs::path& file) {
  struct stat status = {};
  const bool exists = ::lstat(file.c_str(), &status) == 0;
  if (!exists || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) return std::nullopt;
  return status.st_mtime;
}

fs::path temporary_name(const fs::path& target, int attempt) {
  fs::path name = target;
  name += fmt::format(".tmp-{}-{}-{}", node_name(), ::getpid(), attempt);
  return name;
}

constexpr int max_attempts = 100;

// Gives `file` the owner and the mode of the file that it replaces. Nobody gets more rights than
// before: without the group, the mode of others also holds for the new group. A file system
// without owners or modes keeps those of its own.
void take_over_access(const fs::path& file, const fs::path& replaced) {
  struct stat status = {};
  struct stat own = {};
  if (::stat(replaced.c_str(), &status) != 0 || ::stat(file.c_str(), &own) != 0) return;
  const bool has_owner =
      own.st_uid == status.st_uid || ::chown(file.c_str(), status.st_uid, status.st_gid) == 0;
  const bool has_group = own.st_gid == status.st_gid || has_owner ||
                         ::chown(file.c_str(), static_cast<uid_t>(-1), status.st_gid) == 0;
  mode_t mode = status.st_mode & 0777u;
  if (!has_group) mode = (mode & ~mode_t{070}) | (mode & 07u) << 3u;
  static_cast<void>(::chmod(file.c_str(), mode));
}

}  // namespace

Error system_error(const std::string& what, int code) {
  return Error(fmt::format("{}: {}", what, std::generic_category().message(code)));
}

void agree_on_file(const Communicator& comm, const fs::path& file,
                   const std::function<void()>& local_work, const std::string& kind) {
  comm.agree([&] {
    try {
      local_work();
    } catch (const std::bad_alloc&) {
      throw Error(fmt::format("{} {}: out of memory", kind, file.string()));
    } catch (const std::exception& error) {
      throw Error(fmt::format("{} {}: {}", kind, file.string(), error.what()));
    }
  });
}

fs::path target_of_links(const fs::path& file) {
  fs::path target = file;
  constexpr int most = 40;  // the limit of the system
  for (int i = 0; i < most; ++i) {
    std::error_code none;
    if (!fs::is_symlink(fs::symlink_status(target, none))) return target;
    const fs::path next = fs::read_symlink(target, none);
    if (none) throw system_error("cannot be read as a link", none.value());
    target = next.is_absolute() ? next : target.parent_path() / next;
  }
  throw system_error("cannot be followed", ELOOP);
}

void bring_to_disk(int descriptor) {
  if (const int code = error_of_sync(descriptor)) {
    throw system_error("cannot be brought to the disk", code);
  }
}

DurableCalls DurableCalls::of_system() {
  return {file_to_disk, [](const fs::path& from, const fs::path& to) { fs::rename(from, to); },
          folder_to_disk};
}

// Containers on one node may share its name and yet have separate process ids. The first PID
// namespace has the same number on every Linux.
std::string node_name() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) return "unknown";
  std::string name = host.data();
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  constexpr std::string_view first = "pid:[4026531836]";
  std::array<char, 64> processes{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", processes.data(), processes.size());
  if (length > 0) {
    const std::string_view text(processes.data(), static_cast<std::size_t>(length));
    const std::size_t begin = text.find('['), end = text.find(']');
    if (text != first && begin != std::string_view::npos && end != std::string_view::npos) {
      name += fmt::format("-{}", text.substr(begin + 1, end - begin - 1));
    }
  }
  return name;
}

TemporaryFile::TemporaryFile(const fs::path& target, const Communicator& comm, DurableCalls calls,
                             std::string kind)
    : m_target(target), m_comm(comm), m_calls(std::move(calls)), m_kind(std::move(kind)) {}

TemporaryFile::~TemporaryFile() {
  if (!m_exists) return;
  std::error_code ignored;
  fs::remove(m_path, ignored);
}

// MPI_File_open may hang if it fails on some ranks only. So each rank first tries alone to open the
// file.
void TemporaryFile::create() {
  std::string name;
  agree_on_file(
      m_comm, m_target,
      [&] {
        if (!m_comm.is_root()) return;
        create_on_root();
        name = m_path.string();
      },
      m_kind);
  m_comm.broadcast(name, 0);
  m_path = name;
  agree_on_file(
      m_comm, m_target,
      [&] {
        const FileDescriptor descriptor(m_path, O_RDWR | O_CLOEXEC);
        if (descriptor.get() < 0) throw system_error("the new file cannot be opened", errno);
      },
      m_kind);
}

void TemporaryFile::create_on_root() {
  const fs::path target = fs::absolute(target_of_links(m_target));
  m_final = target;
  // The status of the path itself: /dev/stdout may lead to a pipe, which has no name.
  const fs::file_status status = fs::status(m_target);
  // Renaming onto a device would replace it.
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw Error("cannot be written: it exists and is not a regular file");
  }
  // The content of a file that others may not read stays private from the first byte on.
  constexpr mode_t for_owner = 0600, for_all = 0666;
  const mode_t mode = fs::exists(status) ? for_owner : for_all;
  for (int attempt = 0;; ++attempt) {
    m_path = temporary_name(target, attempt);
    const FileDescriptor descriptor(m_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor.get() >= 0) break;
    if (errno != EEXIST || attempt == max_attempts) {
      throw system_error("no file can be created in its folder", errno);
    }
  }
  m_exists = true;
}

namespace {

// Decides which leftovers still have a writer. On this node the process id answers: if the process
// does not exist, the file is a leftover. If another program has got that id, the file stays, which
// is harmless. Processes of other nodes cannot be checked, so only time decides. It is measured
// against this run's new file, because both times come from the file server, whose clock may differ
// from the local one. (A lock held by the writer would be exact, but HDF5 takes its own locks, and
// on parallel file systems locks often do not reach other nodes.)
std::vector<std::string> remove_leftovers_of(const fs::path& target, const fs::path& own) {
  std::vector<std::string> notes;
  const std::string prefix = target.filename().string() + ".tmp-";
  const std::string node = node_name();
  const auto now = modified_at(own);
  std::error_code error;
  fs::directory_iterator entry(own.parent_path(), error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const fs::path file = entry->path();
    const std::string name = file.filename().string();
    if (name.compare(0, prefix.size(), prefix) != 0 || file.filename() == own.filename()) {
      continue;
    }
    const auto writer = writer_of(std::string_view(name).substr(prefix.size()));
    const auto then = modified_at(file);
    if (!writer || !then) continue;
    const bool is_old = now && *now - *then >= seconds_of_day;
    const bool is_ours = writer->node == node;
    if (is_ours ? is_alive(writer->process) : !is_old) {
      if (!is_ours) {
        notes.push_back(
            fmt::format("{} is of another node's run, which may be alive; remove it if it is not",
                        file.string()));
      } else if (is_old) {
        notes.push_back(
            fmt::format("{} is of process {}, and older than a day; remove it if that is another "
                        "program by now",
                        file.string(), writer->process));
      }
      continue;
    }
    std::error_code failure;
    const bool removed = fs::remove_all(file, failure) > 0 && !failure;
    if (removed) {
      notes.push_back(fmt::format("removed {}, which a run that was ended while writing had left",
                                  file.string()));
    } else if (failure) {
      notes.push_back(
          fmt::format("{} was left by a run that was ended while writing, and cannot be "
                      "removed: {}",
                      file.string(), failure.message()));
    }  // else another run was faster
  }
  return notes;
}

}  // namespace

std::vector<std::string> TemporaryFile::remove_leftovers() const {
  return m_exists ? remove_leftovers_of(m_final, m_path) : std::vector<std::string>();
}

void TemporaryFile::move_to_target() {
  // Each node has written a part.
  agree_on_file(
      m_comm, m_target, [&] { m_calls.sync_file(m_path); }, m_kind);
  agree_on_file(
      m_comm, m_target,
      [&] {
        if (!m_comm.is_root()) return;
        take_over_access(m_path, m_final);
        m_calls.rename(m_path, m_final);
        m_exists = false;
        m_calls.sync_folder(m_path.parent_path());
      },
      m_kind);
}

void replace_file(const fs::path& file, const std::string& kind,
                  const std::function<void(const fs::path&)>& write) {
  const auto self = Communicator::self();
  try {
    TemporaryFile temporary(file, self, DurableCalls::of_system(), kind);
    temporary.create();
    agree_on_file(
        self, file,
        [&] {
          temporary.remove_leftovers();
          write(temporary.path());
        },
        kind);
    temporary.move_to_target();
  } catch (const AgreedError& error) {
    throw Error(error.what());  // other ranks do not know of it
  }
}

void write_file(const fs::path& file, const std::string& kind,
                const std::function<void(std::ostream&)>& write) {
  replace_file(file, kind, [&](const fs::path& path) {
    std::ofstream stream(path, std::ios::binary);
    errno = 0;  // streams write large blocks at once and the rest when the file is closed
    write(stream);
    stream.close();
    if (!stream) throw system_error("cannot be written", errno == 0 ? EIO : errno);
  });
}

void write_text(const fs::path& file, const std::string& text, const std::string& kind) {
  write_file(file, kind, [&](std::ostream& stream) { stream << text; });
}

void make_folder(const fs::path& folder, const std::function<void(const fs::path&)>& fill) {
  struct Temporary {
    fs::path path;
    bool exists = false;
    ~Temporary() {
      std::error_code ignored;
      if (exists) fs::remove_all(path, ignored);
    }
  } temporary;
  const fs::path target = fs::absolute(folder / "").parent_path();
  for (int attempt = 0; !temporary.exists; ++attempt) {
    temporary.path = temporary_name(target, attempt);
    temporary.exists = ::mkdir(temporary.path.c_str(), 0777) == 0;
    if (!temporary.exists && (errno != EEXIST || attempt == max_attempts)) {
      throw system_error(fmt::format("{}: cannot create the folder", folder.string()), errno);
    }
  }
  remove_leftovers_of(target, temporary.path);
  fill(temporary.path);
  // rename would replace an empty folder that another program has just made.
  std::error_code ignored;
  const bool is_taken = fs::exists(fs::symlink_status(target, ignored));
  if (is_taken || ::rename(temporary.path.c_str(), target.c_str()) != 0) {
    throw system_error(fmt::format("{}: cannot create the folder", folder.string()),
                       is_taken ? EEXIST : errno);
  }
  temporary.exists = false;
  folder_to_disk(target.parent_path());
}

std::vector<std::string> check_file_writable(const fs::path& file, const std::string& kind) {
  const auto self = Communicator::self();
  try {
    TemporaryFile temporary(file, self, DurableCalls::of_system(), kind);
    temporary.create();
    return temporary.remove_leftovers();
  } catch (const AgreedError& error) {
    throw Error(error.what());
  }
}

}  // namespace kvzap::files
