#include "files/plain_text.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <kvzap/core/types.hpp>
#include <utility>
#include <vector>

#include "files/quote.hpp"
#include "files/text_file.hpp"

namespace kvzap::files {
namespace {

using namespace std::string_view_literals;

struct Magic {
  std::size_t offset;
  std::string_view bytes;
  FileContent content;
  /// Whether the format is made of text, so that no control character tells it from other text.
  /// White space may precede the bytes.
  bool is_text = false;
};

constexpr std::string_view as_a_model = "-m takes it";
constexpr std::string_view no_text = "kvzap reads text alone";

/// The first entry that fits counts.
constexpr Magic magics[] = {
    {0,
     "version https://git-lfs.github.com/spec/"sv,
     {"a Git LFS pointer, not the file itself", "git lfs pull downloads the file"},
     true},
    {0, "%PDF-"sv, {"a PDF document", "pdftotext {} - prints its text"}, true},
    {0, "%!PS"sv, {"a PostScript document", "ps2ascii {} prints its text"}, true},
    {0, "{\\rtf1"sv, {"an RTF document", "pandoc -f rtf -t plain {} prints its text"}, true},
    {0, "\x1F\x8B"sv, {"a gzip file", "gunzip -c {} unpacks it"}},
    {0, "BZh"sv, {"a bzip2 file", "bunzip2 -c {} unpacks it"}},
    {0,
     "\xFD"
     "7zXZ\0"sv,
     {"an xz file", "xz -dc {} unpacks it"}},
    {0, "\x28\xB5\x2F\xFD"sv, {"a zstd file", "zstd -dc {} unpacks it"}},
    {0, "7z\xBC\xAF\x27\x1C"sv, {"a 7z archive", "7z x {} unpacks it"}},
    {0, "Rar!\x1A\x07"sv, {"a RAR archive", "unrar x {} unpacks it"}},
    {257, "ustar"sv, {"a tar archive", "tar -xf {} unpacks it"}},
    {30, "mimetypeapplication/epub+zip"sv, {"an EPUB book", "pandoc -t plain {} prints its text"}},
    {30,
     "mimetypeapplication/vnd.oasis.opendocument"sv,
     {"an OpenDocument file", "pandoc -t plain {} prints its text"}},
    {0, "PK\x03\x04"sv, {"a zip archive", "unzip {} unpacks it"}},
    {0,
     "\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1"sv,
     {"an old document of Microsoft Office", "save it as text"}},
    {0, "\x89PNG"sv, {"a PNG image", no_text}},
    {0, "\xFF\xD8\xFF"sv, {"a JPEG image", no_text}},
    {0, "GIF87a"sv, {"a GIF image", no_text}},
    {0, "GIF89a"sv, {"a GIF image", no_text}},
    {8, "WEBP"sv, {"a WebP image", no_text}},
    {8, "WAVE"sv, {"a WAVE sound", no_text}},
    {4, "ftyp"sv, {"a film or an image (MP4, HEIC)", no_text}},
    {0, "OggS"sv, {"an Ogg file", no_text}},
    {0, "ID3"sv, {"an MP3 file", no_text}},
    {0,
     "\x7F"
     "ELF"sv,
     {"a program or library (ELF)", no_text}},
    {0, "\x89HDF\r\n\x1A\n"sv, {"an HDF5 file", "kvzap inspect shows one of kvzap's"}},
    {0, "GGUF"sv, {"a GGUF file, which holds a model", as_a_model}},
    {0, "SQLite format 3\0"sv, {"an SQLite database", "sqlite3 {} .dump prints its text"}},
    {0, "PAR1"sv, {"a Parquet file", no_text}},
};

/// Magic bytes that are letters alone also begin a text. Then a control character must follow soon.
bool needs_binary_bytes(const Magic& magic) {
  return !magic.is_text && std::all_of(magic.bytes.begin(), magic.bytes.end(),
                                       [](char c) { return c >= ' ' && c <= '~'; });
}

constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";

std::string_view without_margin(std::string_view bytes) {
  if (bytes.substr(0, byte_order_mark.size()) == byte_order_mark) {
    bytes.remove_prefix(byte_order_mark.size());
  }
  return bytes.substr(std::min(bytes.find_first_not_of(" \t\r\n\f"), bytes.size()));
}

bool is_control(unsigned char c) {
  constexpr std::string_view of_text = "\t\n\v\f\r\b\x1B\x1C\x1D\x1E\x1F";
  return (c < 0x20 && of_text.find(static_cast<char>(c)) == std::string_view::npos) || c == 0x7F;
}

std::string_view sample_of(std::string_view bytes) { return bytes.substr(0, 4096); }

std::int64_t controls_in(std::string_view bytes) {
  return std::count_if(bytes.begin(), bytes.end(),
                       [](char c) { return is_control(static_cast<unsigned char>(c)); });
}

bool is_office_document(std::string_view bytes) {
  for (const std::string_view name : {"word/", "xl/", "ppt/", "[Content_Types].xml"}) {
    if (sample_of(bytes).find(name) != std::string_view::npos) return true;
  }
  return false;
}

/// Returns whether valid UTF-8 has so many control characters that it is no text. A few are usual:
/// colours, overprinted letters, separators of fields.
bool is_noise(std::string_view bytes) {
  constexpr std::int64_t usual = 8;
  const std::int64_t controls = controls_in(bytes);
  return controls > usual && 10 * controls > static_cast<std::int64_t>(bytes.size());
}

/// Returns the encodings of East Asia that switch characters by escape sequences.
std::optional<FileContent> escaped_text(std::string_view bytes) {
  for (std::size_t at = 0; (at = bytes.find("\x1B$", at)) != std::string_view::npos; ++at) {
    const std::string_view sets = bytes.substr(at + 2, 2);
    if (sets.substr(0, 1) == "B" || sets.substr(0, 1) == "@" || sets == "(D") {
      return FileContent{"text in ISO-2022-JP", "iconv -f ISO-2022-JP -t UTF-8 {} converts it"};
    }
    if (sets == ")C") {
      return FileContent{"text in ISO-2022-KR", "iconv -f ISO-2022-KR -t UTF-8 {} converts it"};
    }
    if (sets == ")A" || sets == ")G") {
      return FileContent{"text in ISO-2022-CN", "iconv -f ISO-2022-CN -t UTF-8 {} converts it"};
    }
  }
  return std::nullopt;
}

/// An encoding with units of 2 or 4 bytes.
struct WideEncoding {
  std::size_t width;
  bool is_little;
  FileContent content;
};

constexpr WideEncoding wide_encodings[] = {
    {4, true, {"text in UTF-32", "iconv -f UTF-32LE -t UTF-8 {} converts it"}},
    {4, false, {"text in UTF-32", "iconv -f UTF-32BE -t UTF-8 {} converts it"}},
    {2, true, {"text in UTF-16", "iconv -f UTF-16LE -t UTF-8 {} converts it"}},
    {2, false, {"text in UTF-16", "iconv -f UTF-16BE -t UTF-8 {} converts it"}},
};

/// Returns whether texts of scripts in wide use have this character. Symbols that two characters of
/// ASCII would be are left out.
bool is_usual(std::uint32_t c) {
  constexpr std::pair<std::uint32_t, std::uint32_t> ranges[] = {
      {0x20, 0x7E},     {0xA0, 0x24F},    {0x300, 0x36F},     {0x370, 0x6FF},    {0x900, 0xE7F},
      {0x10A0, 0x10FF}, {0x1200, 0x137F}, {0x1780, 0x17FF},   {0x1E00, 0x1FFF},  {0x200B, 0x205F},
      {0x20A0, 0x20BF}, {0x2190, 0x21FF}, {0x3000, 0x30FF},   {0x4E00, 0x9FFF},  {0xAC00, 0xD7A3},
      {0xFE0F, 0xFE0F}, {0xFF00, 0xFFEF}, {0x1F300, 0x1FAFF}, {0x20000, 0x2A6DF}};
  if (c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == 0xFEFF) return true;
  return std::any_of(std::begin(ranges), std::end(ranges),
                     [&](const auto& range) { return c >= range.first && c <= range.second; });
}

/// What a sample would be in one of wide_encodings.
struct Decoded {
  double usual_share = 0;
  std::size_t blocks = 0;       // different units without their lowest byte
  bool has_lost_space = false;  // white space in the other order of bytes, which is no character
};

Decoded decoded(std::string_view sample, const WideEncoding& encoding) {
  const auto unit = [&](std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < encoding.width; ++i) {
      const std::size_t from = encoding.is_little ? encoding.width - 1 - i : i;
      value = (value << 8u) | static_cast<unsigned char>(sample[at + from]);
    }
    return value;
  };
  Decoded found;
  std::vector<std::uint32_t> blocks;
  std::int64_t usual = 0, all = 0;
  for (std::size_t at = 0; at + encoding.width <= sample.size(); at += encoding.width, ++all) {
    std::uint32_t c = unit(at);
    const bool has_pair =
        encoding.width == 2 && c >= 0xD800 && c < 0xDC00 && at + 4 <= sample.size();
    if (has_pair) {
      const std::uint32_t low = unit(at += 2);
      c = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((c - 0xD800) << 10u) + (low - 0xDC00) : 0;
    }
    usual += is_usual(c) ? 1 : 0;
    found.has_lost_space = found.has_lost_space || c == 0x0A00 || c == 0x0D00 || c == 0x2000;
    blocks.push_back(c >> 8u);
  }
  std::sort(blocks.begin(), blocks.end());
  const auto end = std::unique(blocks.begin(), blocks.end());
  found.usual_share =
      static_cast<double>(usual) / static_cast<double>(std::max<std::int64_t>(1, all));
  found.blocks = static_cast<std::size_t>(end - blocks.begin());
  return found;
}

/// Returns UTF-16 or UTF-32, by a byte order mark or by what the bytes would be. Neighbouring
/// characters share their script, so the right order of bytes has few blocks of characters.
std::optional<FileContent> wide_text(std::string_view bytes) {
  const auto begins = [&](std::string_view mark) { return bytes.substr(0, mark.size()) == mark; };
  if (begins("\xFF\xFE\0\0"sv) || begins("\0\0\xFE\xFF"sv)) {
    return FileContent{"text in UTF-32", "iconv -f UTF-32 -t UTF-8 {} converts it"};
  }
  if (begins("\xFF\xFE"sv) || begins("\xFE\xFF"sv)) {
    return FileContent{"text in UTF-16", "iconv -f UTF-16 -t UTF-8 {} converts it"};
  }
  // Any encoding of 8 bits would also be characters of UTF-16.
  const bool is_plain = bytes.find('\0') == std::string_view::npos && !is_noise(sample_of(bytes));
  if (is_plain) return std::nullopt;
  constexpr double least_share = 0.9, most_of_other = 0.75;
  for (std::size_t i = 0; i < std::size(wide_encodings); ++i) {
    const Decoded own = decoded(sample_of(bytes), wide_encodings[i]);
    const Decoded other = decoded(sample_of(bytes), wide_encodings[i ^ 1u]);
    const bool is_better = other.usual_share <= most_of_other * own.usual_share ||
                           2 * own.blocks <= other.blocks ||
                           (other.has_lost_space && !own.has_lost_space);
    if (own.usual_share >= least_share && is_better) return wide_encodings[i].content;
  }
  return std::nullopt;
}

/// Characters of several bytes, and bytes that contradict UTF-8.
struct Utf8Evidence {
  std::int64_t characters = 0;
  std::int64_t wrong = 0;
  bool has_c1 = false;  // wrong bytes 0x80 to 0x9F: letters in Windows-1252, controls in Latin-1
  bool is_cut = false;  // in the last character
};

/// A sequence with the form of a character counts as one, even if it is none (a surrogate, a longer
/// form than necessary), lacks its end at the end of the text, or is one of four bytes in part.
Utf8Evidence utf8_evidence(std::string_view bytes) {
  Utf8Evidence found;
  for (std::size_t i = 0; i < bytes.size();) {
    const auto c = static_cast<unsigned char>(bytes[i]);
    const std::size_t form = c < 0xC0 || c > 0xF7 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    std::size_t length = 1;
    while (length < form && i + length < bytes.size() &&
           (static_cast<unsigned char>(bytes[i + length]) & 0xC0u) == 0x80u) {
      ++length;
    }
    const bool at_end = form > length && i + length == bytes.size();
    found.is_cut = at_end;
    if (form == length || (length > 1 && (at_end || form == 4))) {
      ++found.characters;
    } else if (c >= 0x80) {
      ++found.wrong;
      found.has_c1 = found.has_c1 || c < 0xA0;
      length = 1;
    }
    i += length;
  }
  return found;
}

/// Returns a file's name as a word of a command, which takes no "-x" for an option.
std::string file_word(const std::string& file) {
  return shell_quoted(file.substr(0, 1) == "-" ? "./" + file : file);
}

std::string named_byte(std::string_view bytes, std::size_t at) {
  const auto line =
      1 + std::count(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(at), '\n');
  const auto c = static_cast<unsigned char>(bytes[at]);
  return fmt::format("byte {} is {}{}", at + 1, c == 0 ? "0" : fmt::format("0x{:02X}", c),
                     line > 1 ? fmt::format(", in line {}", line) : "");
}

/// Describes text in an encoding of 8 bits or with damaged characters, or binary data. `bad`: the
/// first byte that is not UTF-8. `follows_utf8`: whether text before it has such characters.
std::string text_of_other_bytes(std::string_view bytes, std::size_t bad, const std::string& file,
                                bool follows_utf8) {
  const std::string place = named_byte(bytes, bad);
  // The text around the byte tells more than the file's beginning, which may be plain ASCII.
  const std::size_t begin = bad < 2048 ? 0 : bad - 2048;
  const std::string_view sample = sample_of(bytes.substr(begin));
  if (50 * controls_in(sample) > static_cast<std::int64_t>(sample.size())) {
    return fmt::format("binary data ({}); {}", place, no_text);
  }
  const std::string name = file.empty() ? "" : " " + file_word(file);
  const Utf8Evidence found = utf8_evidence(bytes);
  if (found.characters + (follows_utf8 ? 1 : 0) >= std::max<std::int64_t>(1, found.wrong)) {
    const bool is_cut = found.is_cut && bytes.size() - bad < 4;
    return fmt::format("{} ({}); iconv -c -f UTF-8 -t UTF-8{} drops {}",
                       is_cut ? "text that is cut off in its last character" : "damaged characters",
                       place, name, is_cut ? "it" : "them");
  }
  const bool is_dense =
      10 * utf8_evidence(sample).wrong > 3 * static_cast<std::int64_t>(sample.size());
  if (is_dense) {
    return fmt::format(
        "text in another encoding, such as WINDOWS-1251, GB18030 or SHIFT_JIS ({}); iconv -f "
        "ENCODING -t UTF-8{} converts it",
        place, name);
  }
  const char* const likely = found.has_c1 ? "WINDOWS-1252" : "ISO-8859-1";
  return fmt::format(
      "text in another encoding, probably {} ({}); iconv -f {} -t UTF-8{} converts it", likely,
      place, likely, name);
}

}  // namespace

std::optional<FileContent> content_of(std::string_view bytes) {
  constexpr std::size_t most_text = 64;
  const std::string_view text = without_margin(bytes);
  for (const Magic& magic : magics) {
    const std::string_view whole = magic.is_text ? text : bytes;
    if (whole.size() < magic.offset + magic.bytes.size()) continue;
    if (whole.substr(magic.offset, magic.bytes.size()) != magic.bytes) continue;
    if (needs_binary_bytes(magic)) {
      const std::string_view begin = bytes.substr(0, magic.offset + most_text);
      const std::size_t bad = first_not_utf8(begin);
      // The last character may be cut.
      const bool is_utf8 = bad == std::string_view::npos || bad + 4 > begin.size();
      if (is_utf8 && controls_in(begin) == 0) continue;
    }
    if (magic.bytes.substr(0, 2) == "PK" && is_office_document(bytes)) {
      return FileContent{"an Office document (DOCX, XLSX or PPTX)",
                         "pandoc -t plain {} prints a DOCX's text"};
    }
    return magic.content;
  }
  if (const auto escaped = escaped_text(bytes)) return escaped;
  return wide_text(bytes);
}

std::string first_bytes(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::string bytes(512, '\0');
  stream.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(std::max<std::streamsize>(0, stream.gcount())));
  return bytes;
}

std::string text_of(const FileContent& content, const std::string& file) {
  std::string remedy(content.remedy);
  const std::size_t place = remedy.find("{}");
  if (place != std::string::npos) {
    // pdftotext alone needs a name for standard input.
    const bool needs_name = remedy.rfind("pdftotext", 0) == 0;
    std::string name = file.empty() ? (needs_name ? "-" : "") : file_word(file);
    remedy.replace(place, name.empty() ? 3 : 2, name);
  }
  return fmt::format("{}; {}", content.name, remedy);
}

void require_utf8(std::string_view text, const std::string& source) {
  const std::size_t bad = first_not_utf8(text);
  if (bad == std::string_view::npos) return;
  throw Error(fmt::format("{}: expected UTF-8 text, found byte 0x{:02X} at position {}", source,
                          static_cast<unsigned char>(text[bad]), bad + 1));
}

void require_no_format(std::string_view begin, const std::string& source, const std::string& file) {
  const auto content = content_of(begin);
  if (!content) return;
  throw Error(fmt::format("{}: expected UTF-8 text, found {}", source, text_of(*content, file)));
}

void require_text(std::string_view bytes, const std::string& source, const std::string& file) {
  require_no_format(bytes, source, file);
  require_text_part(bytes, source, file);
}

void require_text_part(std::string_view bytes, const std::string& source, const std::string& file,
                       bool follows_utf8) {
  const auto fail = [&](const std::string& found) {
    throw Error(fmt::format("{}: expected UTF-8 text, found {}", source, found));
  };
  const auto refuse_binary = [&](std::size_t at) {
    fail(fmt::format("binary data ({}); {}", named_byte(bytes, at), no_text));
  };
  const std::size_t nul = bytes.find('\0');
  if (nul != std::string_view::npos) refuse_binary(nul);
  const std::size_t bad = first_not_utf8(bytes);
  if (bad != std::string_view::npos) fail(text_of_other_bytes(bytes, bad, file, follows_utf8));
  if (!is_noise(bytes)) return;
  const auto* const control = std::find_if(
      bytes.begin(), bytes.end(), [](char c) { return is_control(static_cast<unsigned char>(c)); });
  refuse_binary(static_cast<std::size_t>(control - bytes.begin()));
}

bool has_wide_characters(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) >= 0x80; });
}

void drop_byte_order_mark(std::string& text) {
  if (text.compare(0, byte_order_mark.size(), byte_order_mark) == 0) {
    text.erase(0, byte_order_mark.size());
  }
}

void normalize_lines(std::string& text) {
  drop_byte_order_mark(text);
  if (text.find('\r') == std::string::npos) return;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_return = text[i] == '\r';
    if (is_return && i + 1 < text.size() && text[i + 1] == '\n') continue;
    text[kept++] = is_return ? '\n' : text[i];
  }
  text.resize(kept);
}

std::string read_plain_text(const std::string& file, const std::string& flag, std::uintmax_t most) {
  const bool is_input = file == "-";
  std::string text =
      is_input ? read_text(STDIN_FILENO, "standard input", most) : read_text(file, most);
  require_text(text,
               is_input       ? "standard input"
               : flag.empty() ? file
                              : fmt::format("{} {}", flag, file),
               is_input ? "" : file);
  normalize_lines(text);
  return text;
}

}  // namespace kvzap::files
