// Writes files that appear under their names only once they are complete and on the disk.
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <vector>

#include "files/file_descriptor.hpp"

namespace kvzap::files {

/// Returns the error "what: MESSAGE", with the system's message for `code`.
Error system_error(const std::string& what, int code);

/// Calls Communicator::agree and puts "KIND FILE: " before its message.
void agree_on_file(const Communicator& comm, const std::filesystem::path& file,
                   const std::function<void()>& local_work, const std::string& kind = "snapshot");

/// Returns the final target of `file` if it is a symbolic link (or a chain of links), whether that
/// exists or not; else `file` itself. A file that replaces the target leaves the links unchanged.
/// Throws Error for a circle of links.
std::filesystem::path target_of_links(const std::filesystem::path& file);

/// Calls fsync on an open file, again after a signal. Throws Error.
void bring_to_disk(int descriptor);

/// The calls that make a file durable. They throw on failure. Tests replace them.
struct DurableCalls {
  /// Brings the data that this node has written to a file to the disk.
  std::function<void(const std::filesystem::path&)> sync_file;
  std::function<void(const std::filesystem::path& from, const std::filesystem::path& to)> rename;
  /// Brings the names in a folder to the disk.
  std::function<void(const std::filesystem::path&)> sync_folder;

  /// Returns the calls of the system.
  static DurableCalls of_system();
};

/// A new, empty file next to the target. It is removed unless it is moved to the target. If the
/// target is a symbolic link, the file that it leads to takes its place. A file that replaces
/// another one takes over its mode and, as far as the system allows, its owner and group; until
/// then its owner alone may read it. All ranks know the name
/// TARGET.tmp-NODE-PROCESS-NUMBER, with the node (node_name) and process of rank 0.
class TemporaryFile {
 public:
  /// `kind`: the word for the file in messages.
  TemporaryFile(const std::filesystem::path& target, const Communicator& comm,
                DurableCalls calls = DurableCalls::of_system(), std::string kind = "snapshot");
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  /// Creates the file. Collective. Throws AgreedError if it cannot be created, or a rank cannot
  /// open it.
  void create();

  const std::filesystem::path& path() const { return m_path; }

  /// Removes the leftovers of killed runs with the same target. On rank 0 it returns a sentence for
  /// each file that was removed, that could not be removed, or whose run may still be alive. Files
  /// of live processes are kept. Call it after create(). It throws only if memory runs out.
  std::vector<std::string> remove_leftovers() const;

  /// Moves the file to the target such that it survives a power failure: it brings the file to the
  /// disk, renames it, and brings the name to the disk. All ranks must have closed the file.
  /// Collective. Throws AgreedError if any of this fails; unless the rename has succeeded, the
  /// target is unchanged.
  void move_to_target();

 private:
  void create_on_root();

  std::filesystem::path m_target;
  const Communicator& m_comm;
  DurableCalls m_calls;
  std::string m_kind;
  std::filesystem::path m_path;
  // Used on rank 0, which alone creates, removes and renames the file:
  std::filesystem::path m_final;  // final target of the links
  bool m_exists = false;
};

/// Replaces `file` in one step. `write` fills an empty file at the path that it receives, in the
/// same folder. That file gets the name once it is on the disk. If anything fails, it is removed
/// and an older file stays. Removes files that killed runs left behind. For one process, not
/// collective. Throws Error "KIND FILE: …".
void replace_file(const std::filesystem::path& file, const std::string& kind,
                  const std::function<void(const std::filesystem::path&)>& write);

/// Calls replace_file; `write` writes to a stream, whose errors are checked.
void write_file(const std::filesystem::path& file, const std::string& kind,
                const std::function<void(std::ostream&)>& write);

/// Calls write_file with a text.
void write_text(const std::filesystem::path& file, const std::string& text,
                const std::string& kind = "file");

/// Tests whether replace_file could replace `file`, before hours of work. Leaves the file as it is.
/// Returns sentences about files that killed runs left behind (TemporaryFile::remove_leftovers).
/// Throws Error "KIND FILE: …".
std::vector<std::string> check_file_writable(const std::filesystem::path& file,
                                             const std::string& kind);

/// Makes a folder in one step. `fill` writes the files of an empty folder at the path that it
/// receives, beside the target. That folder gets the name if `fill` succeeds; otherwise it is
/// removed. Removes folders that killed processes left behind. For one process, not collective.
/// Throws Error if the folder exists or cannot be created, and what `fill` throws.
void make_folder(const std::filesystem::path& folder,
                 const std::function<void(const std::filesystem::path&)>& fill);

/// Returns a name for this node and for the PID namespace of this process.
std::string node_name();

}  // namespace kvzap::files
