#include "base/plain_text.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <kvzap/core/types.hpp>
#include <utility>

#include "base/quote.hpp"
#include "base/text_file.hpp"

namespace kvzap::base {
namespace {

using namespace std::string_view_literals;

struct Magic {
  std::size_t offset;
  std::string_view bytes;
  FileContent content;
};

constexpr std::string_view as_a_model = "-m takes it";
constexpr std::string_view no_text = "kvzap reads text alone";

/// The first entry that fits counts.
constexpr Magic magics[] = {
    {0,
     "version https://git-lfs.github.com/spec/"sv,
     {"a Git LFS pointer, not the file itself", "git lfs pull downloads the file"}},
    {0, "%PDF-"sv, {"a PDF document", "pdftotext {} - prints its text"}},
    {0, "\xEF\xBB\xBF%PDF-"sv, {"a PDF document", "pdftotext {} - prints its text"}},
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
  if (magic.content.name.find("Git LFS") != std::string_view::npos) return false;
  return magic.bytes != "%PDF-" && std::all_of(magic.bytes.begin(), magic.bytes.end(),
                                               [](char c) { return c >= ' ' && c <= '~'; });
}

bool is_control(unsigned char c) {
  constexpr std::string_view of_text = "\t\n\v\f\r\b\x1B";
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

constexpr std::string_view utf_16 = "text in UTF-16", utf_32 = "text in UTF-32";

/// Returns UTF-16 or UTF-32 by a byte order mark, or by the zero bytes of Latin letters.
std::optional<FileContent> wide_text(std::string_view bytes) {
  const auto begins = [&](std::string_view mark) { return bytes.substr(0, mark.size()) == mark; };
  const FileContent wide = {utf_16, "iconv -f UTF-16 -t UTF-8 {} converts it"};
  const FileContent wider = {utf_32, "iconv -f UTF-32 -t UTF-8 {} converts it"};
  if (begins("\xFF\xFE\0\0"sv) || begins("\0\0\xFE\xFF"sv)) return wider;
  if (begins("\xFF\xFE"sv) || begins("\xFE\xFF"sv)) return wide;
  const std::string_view sample = sample_of(bytes).substr(0, bytes.size() & ~std::size_t{3});
  std::int64_t zeros[4] = {};
  for (std::size_t i = 0; i < sample.size(); ++i) zeros[i % 4] += sample[i] == '\0' ? 1 : 0;
  const auto units = static_cast<std::int64_t>(sample.size() / 4);
  if (units == 0 || controls_in(sample) - zeros[0] - zeros[1] - zeros[2] - zeros[3] > units / 8) {
    return std::nullopt;
  }
  const auto most = [&](std::int64_t count) { return 10 * count >= 8 * units; };
  const auto few = [&](std::int64_t count) { return 10 * count <= units; };
  const bool top = most(zeros[2]) && most(zeros[3]), bottom = most(zeros[0]) && most(zeros[1]);
  if (most(zeros[1]) && top && few(zeros[0])) {
    return FileContent{utf_32, "iconv -f UTF-32LE -t UTF-8 {} converts it"};
  }
  if (most(zeros[2]) && bottom && few(zeros[3])) {
    return FileContent{utf_32, "iconv -f UTF-32BE -t UTF-8 {} converts it"};
  }
  // Half of the characters are enough: other scripts have no zero bytes.
  const auto half = [&](std::int64_t count) { return 4 * count >= units; };
  if (half(zeros[1]) && half(zeros[3]) && few(zeros[0]) && few(zeros[2])) {
    return FileContent{utf_16, "iconv -f UTF-16LE -t UTF-8 {} converts it"};
  }
  if (half(zeros[0]) && half(zeros[2]) && few(zeros[1]) && few(zeros[3])) {
    return FileContent{utf_16, "iconv -f UTF-16BE -t UTF-8 {} converts it"};
  }
  return std::nullopt;
}

/// Describes text in an encoding of 8 bits or with damaged characters, or binary data. `bad`: the
/// first byte that is not UTF-8.
std::string text_of_other_bytes(std::string_view bytes, std::size_t bad, const std::string& file) {
  const auto line =
      1 + std::count(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(bad), '\n');
  const std::string place =
      fmt::format("byte {} is 0x{:02X}{}", bad + 1, static_cast<unsigned char>(bytes[bad]),
                  line > 1 ? fmt::format(", in line {}", line) : "");
  // The text around the byte tells more than the file's beginning, which may be plain ASCII.
  const std::size_t begin = bad < 2048 ? 0 : bad - 2048;
  const std::string_view sample = sample_of(bytes.substr(begin));
  if (50 * controls_in(sample) > static_cast<std::int64_t>(sample.size())) {
    return fmt::format("binary data ({}); {}", place, no_text);
  }
  std::int64_t characters = 0, wrong = 0;
  bool has_c1 = false;  // 0x80 to 0x9F: letters in Windows-1252, controls in Latin-1
  for (std::size_t i = 0; i < sample.size();) {
    const auto c = static_cast<unsigned char>(sample[i]);
    if (c < 0x80) {
      ++i;
      continue;
    }
    const std::size_t length = utf8_character_bytes(sample.substr(i));
    (length == 0 ? wrong : characters) += 1;
    has_c1 = has_c1 || (length == 0 && c < 0xA0);
    i += std::max<std::size_t>(1, length);
  }
  const std::string name = file.empty() ? "" : " " + shell_quoted(file);
  if (characters > wrong) {
    return fmt::format("damaged characters ({}); iconv -c -f UTF-8 -t UTF-8{} drops them", place,
                       name);
  }
  const bool is_dense = 10 * wrong > 3 * static_cast<std::int64_t>(sample.size());
  if (is_dense) {
    return fmt::format(
        "text in another encoding, such as WINDOWS-1251, GB18030 or SHIFT_JIS ({}); iconv -f "
        "ENCODING -t UTF-8{} converts it",
        place, name);
  }
  const char* const likely = has_c1 ? "WINDOWS-1252" : "ISO-8859-1";
  return fmt::format(
      "text in another encoding, probably {} ({}); iconv -f {} -t UTF-8{} converts it", likely,
      place, likely, name);
}

}  // namespace

std::optional<FileContent> content_of(std::string_view bytes) {
  constexpr std::size_t most_text = 64;
  for (const Magic& magic : magics) {
    if (bytes.size() < magic.offset + magic.bytes.size()) continue;
    if (bytes.substr(magic.offset, magic.bytes.size()) != magic.bytes) continue;
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
    std::string name = file.empty() ? (needs_name ? "-" : "") : shell_quoted(file);
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

void require_text(std::string_view bytes, const std::string& source, const std::string& file) {
  const auto fail = [&](const std::string& found) {
    throw Error(fmt::format("{}: expected UTF-8 text, found {}", source, found));
  };
  if (const auto content = content_of(bytes)) fail(text_of(*content, file));
  const std::size_t bad = first_not_utf8(bytes);
  if (bad != std::string_view::npos) fail(text_of_other_bytes(bytes, bad, file));
  const std::size_t nul = bytes.find('\0');
  if (nul != std::string_view::npos) {
    fail(fmt::format("binary data (byte {} is 0); {}", nul + 1, no_text));
  }
}

void normalize_lines(std::string& text) {
  constexpr std::string_view mark = "\xEF\xBB\xBF";
  if (text.compare(0, mark.size(), mark) == 0) text.erase(0, mark.size());
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

}  // namespace kvzap::base
