// A file that appears under its name only once it is complete and on the disk.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

namespace kvzap::detail {

/// "what: the system's words for the error `code`".
Error system_error(const std::string& what, int code);

/// Communicator::agree with "KIND FILE: " in front of the message.
void agree_on_file(const Communicator& comm, const std::filesystem::path& file,
                   const std::function<void()>& local_work, const std::string& kind = "snapshot");

/// An open file, closed at the end.
class FileDescriptor {
 public:
  /// Of open(2); what it creates, the user's mask decides on. `get()` is negative, and errno says
  /// why, if it failed.
  FileDescriptor(const std::filesystem::path& file, int flags);
  ~FileDescriptor();
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return m_descriptor; }

 private:
  int m_descriptor;
};

/// What `file` names in the end, if it is a symbolic link (or a link to one, and so on), whether
/// that exists or not; else itself. What takes its place leaves the links as they are. Throws Error
/// for a circle of links.
std::filesystem::path target_of_links(const std::filesystem::path& file);

/// The calls that make a file last. They throw if they fail; tests put others in their place.
struct DurableCalls {
  /// Brings what this node has written to a file to the disk.
  std::function<void(const std::filesystem::path&)> sync_file;
  std::function<void(const std::filesystem::path& from, const std::filesystem::path& to)> rename;
  /// The same for the names in a folder.
  std::function<void(const std::filesystem::path&)> sync_folder;

  /// Those of the system.
  static DurableCalls of_system();
};

/// A new, empty file next to the target, removed unless it is moved there. A target that is a
/// symbolic link stands for what it leads to. All ranks know its name:
/// TARGET.tmp-NODE-PROCESS-NUMBER, with the names of rank 0's node (node_name) and process.
class TemporaryFile {
 public:
  /// `kind` is what messages call the file.
  TemporaryFile(const std::filesystem::path& target, const Communicator& comm,
                DurableCalls calls = DurableCalls::of_system(), std::string kind = "snapshot");
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  /// Collective. Throws AgreedError if the file cannot be created, or not be opened by every rank.
  void create();

  const std::filesystem::path& path() const { return m_path; }

  /// Removes what runs that were killed have left of the same target, and tells it on rank 0: a
  /// sentence for each file that was removed, or that could not be, or of which nobody can tell
  /// here whether its run is alive. Files of processes that are alive are left alone. After
  /// create(); throws nothing but for lack of memory.
  std::vector<std::string> remove_leftovers() const;

  /// Moves the file, which all ranks have closed, to the target, so that it is there after a power
  /// failure too: brings it to the disk, renames it, and brings the name to the disk. Collective;
  /// throws AgreedError if any of this fails, until the name has changed with the target as it was.
  void move_to_target();

 private:
  void create_on_root();

  std::filesystem::path m_target;
  const Communicator& m_comm;
  DurableCalls m_calls;
  std::string m_kind;
  std::filesystem::path m_path;
  // On rank 0, which alone creates, removes and renames it:
  std::filesystem::path m_final;  // what the target leads to
  bool m_exists = false;
};

/// Writes a text file that appears under its name once it is complete and on the disk. One process
/// alone. Throws Error, naming the file.
void write_text(const std::filesystem::path& file, const std::string& text);

/// What names this node, and on it the set of processes that process ids belong to.
std::string node_name();

}  // namespace kvzap::detail
