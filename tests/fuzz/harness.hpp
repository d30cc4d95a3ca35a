// What all fuzz targets share. A target is one source: it says in run_one() what becomes of an
// input.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>

namespace kvzap::fuzz {

/// A file in the folder for temporary files ($TMPDIR; scripts/fuzz has one in memory).
class InputFile {
 public:
  InputFile();
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Ends the process if there is no memory for it.
  void assign(std::string_view content);
  /// Under which this process opens it.
  const std::filesystem::path& path() const { return m_path; }

 private:
  int m_descriptor = -1;
  std::filesystem::path m_path;
};

/// A folder whose files are links to others.
class InputFolder {
 public:
  InputFolder();
  ~InputFolder();
  InputFolder(const InputFolder&) = delete;
  InputFolder& operator=(const InputFolder&) = delete;

  /// From now on `name` is that file, whatever becomes of its content.
  void link(const char* name, const InputFile& file) const;
  const std::filesystem::path& path() const { return m_path; }

 private:
  std::filesystem::path m_path;
};

/// Gives the input to the reader. What the reader refuses it says by kvzap::Error, the one
/// exception that may leave this function. Everything else is a finding, as is memory beyond 4
/// times the input and 64 MB, or a message that no terminal or log should be given.
void run_one(std::string_view input);

/// What a message is expected to name, file names for most readers. Empty: nothing.
extern const std::initializer_list<std::string_view> named_in_messages;

/// Ends the process as a finding.
[[noreturn]] void finding(const std::string& what);

/// finding() unless `holds`.
inline void require(bool holds, const char* what) {
  if (!holds) finding(what);
}

}  // namespace kvzap::fuzz
