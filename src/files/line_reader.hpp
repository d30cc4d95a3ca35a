// Reads text files line by line, also those with a JSON object in each line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "files/fnv.hpp"
#include "files/temporary_file.hpp"

namespace kvzap::files {

/// The lines of a file, from the first to the last.
class LineReader {
 public:
  /// Throws Error "FILE: cannot be read; expected EXPECTED" for a folder or a file that cannot be
  /// opened. The limit on a line's bytes keeps an endless file without newlines out of memory.
  LineReader(std::filesystem::path file, std::string_view expected,
             std::size_t most_bytes = std::size_t{256} << 20);

  /// Reads the next line; returns false after the last one. Throws Error if reading fails, if the
  /// line has more than `most_bytes` bytes, or if the file is of a format of content_of.
  bool next();
  /// Reads the next line that is not blank.
  bool next_text();

  /// The line without its newline, and the first one without a byte order mark.
  const std::string& line() const { return m_line; }
  /// The line's number, from 1.
  std::int64_t number() const { return m_number; }
  /// Whether the line ends with a newline. The last line of a file may not.
  bool has_end() const { return m_has_end; }
  /// FNV-1a of all bytes up to the end of the line.
  std::uint64_t hash() const { return m_hash; }
  /// "FILE: line N".
  std::string where() const;

  /// Throws Error "FILE: line N: …" unless the line is text, as files::require_text_part does.
  void require_text() const;

  /// The JSON object in the line. Throws Error as require_text does, or "FILE: line N: …; HINT".
  nlohmann::json object(std::string_view hint) const;

 private:
  bool fill();

  std::filesystem::path m_file;
  FileDescriptor m_descriptor;
  std::size_t m_most_bytes;
  std::vector<char> m_block;
  std::string_view m_unread;  // of the block
  std::string m_line;
  std::int64_t m_number = 0;
  std::uint64_t m_hash = fnv_start;
  bool m_has_end = true;
  // Lines that require_text has seen have characters of several bytes.
  mutable bool m_has_utf8 = false;
};

}  // namespace kvzap::files
