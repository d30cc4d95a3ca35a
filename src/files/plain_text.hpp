// Text of users: UTF-8 that a model can read. Names the content of other files and how to read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::files {

/// Largest text that a file may have, more than the context of any model takes. Reading an endless
/// file, such as /dev/zero, stops here.
inline constexpr std::uintmax_t most_text_bytes = std::uintmax_t{1} << 30;

/// A format of files, by their first bytes.
struct FileContent {
  std::string_view name;  // "a PDF document"
  /// What to do: a command in which {} stands for the file, or a sentence.
  std::string_view remedy;
};

/// Returns the format of a file that begins with `bytes`, unless they may be text. Git LFS pointers
/// are text but stand for another file, so they count, as do formats that are made of text (PDF,
/// PostScript, RTF).
std::optional<FileContent> content_of(std::string_view bytes);

/// Returns the first bytes of a file, enough for content_of; none if it cannot be read.
std::string first_bytes(const std::filesystem::path& file);

/// Returns "NAME; REMEDY", with `file` in the remedy. Standard input has no name ("").
std::string text_of(const FileContent& content, const std::string& file);

/// Throws Error "SOURCE: expected UTF-8 text, found …" for a text in memory that is not UTF-8.
void require_utf8(std::string_view text, const std::string& source);

/// Throws Error "SOURCE: expected UTF-8 text, found …" for the first bytes of a file that has one
/// of the formats of content_of.
void require_no_format(std::string_view begin, const std::string& source, const std::string& file);

/// Throws Error "SOURCE: expected UTF-8 text, found …" unless `bytes` are the content of a text
/// file: UTF-8 without NUL bytes and with few control characters, and not one of the formats of
/// content_of. The message names the format or a likely encoding, and the command that makes text
/// of `file` ("": standard input).
void require_text(std::string_view bytes, const std::string& source, const std::string& file);

/// Does the same for a part of a text, such as a line, which may begin like a file of another
/// format. `follows_utf8`: whether the text before it has characters of several bytes.
void require_text_part(std::string_view bytes, const std::string& source, const std::string& file,
                       bool follows_utf8 = false);

/// Returns whether a text has characters of several bytes.
bool has_wide_characters(std::string_view text);

/// Removes a byte order mark at the text's beginning.
void drop_byte_order_mark(std::string& text);

/// Removes a byte order mark, and makes each line end in "\n", as Python's open() does.
void normalize_lines(std::string& text);

/// Returns the text of a file, or of standard input for "-": read_text, require_text and
/// normalize_lines. `flag` precedes the file's name in messages: "-f report.pdf". Throws Error.
std::string read_plain_text(const std::string& file, const std::string& flag = "",
                            std::uintmax_t most = most_text_bytes);

}  // namespace kvzap::files
