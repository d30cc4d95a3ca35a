#include <gtest/gtest.h>

#include <string>

#include "files/line_reader.hpp"
#include "files/plain_text.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::files {
namespace {

using test::expect_error;
using test::TemporaryFolder;
using namespace std::string_literals;

std::string utf_16(const std::string& ascii, bool is_little) {
  std::string text;
  for (const char c : ascii) text += is_little ? ""s + c + '\0' : ""s + '\0' + c;
  return text;
}

std::string utf_32(const std::string& ascii, bool is_little) {
  std::string text;
  for (const char c : ascii) text += is_little ? ""s + c + "\0\0\0"s : "\0\0\0"s + c;
  return text;
}

std::string in_units(const std::u32string& text, std::size_t width, bool is_little) {
  std::string bytes;
  for (const char32_t c : text) {
    for (std::size_t i = 0; i < width; ++i) {
      bytes += static_cast<char>(c >> (8 * (is_little ? i : width - 1 - i)));
    }
  }
  return bytes;
}

TEST(PlainText, NamesUtf16AndUtf32OfAnyScript) {
  for (const std::u32string text :
       {U"\u0412\u043e\u0439\u043d\u0430 \u0438 \u043c\u0438\u0440.\n",
        U"\u6625\u7720\u4e0d\u899a\u66c9\uff0c\u4e00\u8655\u805e\u557c\u9ce5\u3002\n",
        U"\u543e\u8f29\u306f\u732b\u3067\u3042\u308b\u3002\u30ab\u30bf\u30ab\u30ca\n",
        U"\uB3D9\uD574 \uBB3C\uACFC\n", U"\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\n",
        U"one line\n"}) {
    for (const std::size_t width : {2u, 4u}) {
      for (const bool is_little : {true, false}) {
        const std::string name = std::to_string(8 * width);
        expect_error([&] { require_text(in_units(text, width, is_little), "f", "f"); },
                     {"text in UTF-" + name, "iconv -f UTF-" + name + (is_little ? "LE" : "BE")});
      }
    }
  }
  // Letters in pairs would be ideographs.
  for (const std::string& bytes : {"hel\0lo\n"s, "path/one\0path/two\0"s, "{\"a\":\0{}}"s}) {
    expect_error([&] { require_text(bytes, "f", "f"); }, {"binary data (byte "});
  }
}

TEST(PlainText, NamesWhatIsNoText) {
  const std::string words = "The quiet harbour sleeps below the pale saddle. ";
  struct Case {
    std::string bytes;
    std::string_view found, remedy;
  };
  const Case cases[] = {
      {"%PDF-1.4\nplain ASCII", "a PDF document", "pdftotext FILE - prints"},
      {"\x1F\x8B\x08\0\0"s, "a gzip file", "gunzip -c FILE unpacks"},
      {"PK\x03\x04"s + words, "a zip archive", "unzip FILE"},
      {"PK\x03\x04......[Content_Types].xml"s, "an Office document", "pandoc -t plain FILE"},
      {"PK\x03\x04"s + std::string(26, '\0') + "mimetypeapplication/epub+zip", "EPUB", "pandoc"},
      {"\xFF\xFE"s + utf_16(words, true), "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE"},
      {"\xFE\xFF"s + utf_16(words, false), "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE"},
      {utf_16(words, true), "UTF-16", "iconv -f UTF-16LE"},
      {utf_16(words, false), "UTF-16", "iconv -f UTF-16BE"},
      {"\xFF\xFE\0\0"s + utf_32(words, true), "UTF-32", "iconv -f UTF-32 -t"},
      {utf_32(words, true), "UTF-32", "iconv -f UTF-32LE"},
      {utf_32(words, false), "UTF-32", "iconv -f UTF-32BE"},
      {"caf\xE9 au lait", "probably ISO-8859-1 (byte 4 is 0xE9)", "iconv -f ISO-8859-1"},
      {"a\n\x93quoted\x94", "probably WINDOWS-1252 (byte 3 is 0x93, in line 2)", "WINDOWS-1252"},
      {"\xCF\xF0\xE8\xE2\xE5\xF2, \xEC\xE8\xF0", "WINDOWS-1251, GB18030", "iconv -f ENCODING"},
      {"caf\u00e9, na\u00efve, d\u00e9j\u00e0 v\xC3 cut", "damaged characters",
       "iconv -c -f UTF-8"},
      {"It\u2019s \u2026 \xE2\x80", "cut off in its last character (byte 12 is 0xE2)",
       "iconv -c -f UTF-8 -t UTF-8 FILE drops it"},
      {"\xE2\x82", "cut off in its last character", "iconv -c"},
      {"caf\u00e9 \xC3", "cut off in its last character", "iconv -c"},
      {"caf\xE9", "probably ISO-8859-1", ""},
      {"one \u201Cbad\u201D \xFF byte", "damaged characters", "iconv -c"},
      {"a \xED\xA0\x80 b", "damaged characters (byte 3 is 0xED)", "iconv -c"},
      {"a\xC0\x80 b", "damaged characters", ""},
      {"x\xF4\x90y", "damaged characters", ""},
      {"O\xF9 \xE7"
       "a\xA0: l\xE0\xA0\xBB \xE9lan",
       "probably ISO-8859-1", ""},
      {"\x1B$B$3$l\x1B(B\n", "text in ISO-2022-JP", "iconv -f ISO-2022-JP -t UTF-8 FILE"},
      {"\x1B$)C\x0E"
       "5?GX",
       "text in ISO-2022-KR", ""},
      {"{\\rtf1\\ansi text}", "an RTF document", "pandoc -f rtf -t plain FILE"},
      {"\n \n%PDF-1.4", "a PDF document", "pdftotext FILE"},
      {"\xEF\xBB\xBF%PDF-1.4", "a PDF document", "pdftotext FILE"},
      {"%!PS-Adobe-3.0\n", "a PostScript document", "ps2ascii FILE"},
      {"\x01\x02\x0E\x0F\x10\x11\x12\x13\x14\x15", "binary data (byte 1 is 0x01)", ""},
      {"\x89PNG\r\n\x1A\n"s, "a PNG image", "kvzap reads text alone"},
      {"\xFF\xD8\xFF\xE0"s, "a JPEG image", ""},
      {"\x7F"s + "ELF\x02\x01", "a program or library", ""},
      {"\x89HDF\r\n\x1A\n"s, "an HDF5 file", "kvzap inspect"},
      {"GGUF\x03\0\0\0"s, "a GGUF file", "-m takes it"},
      {"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer", "git lfs pull"},
      {words + "\0"s, "binary data (byte 49 is 0)", ""},
      {"\x01\x02\x03\xFF\xFB\x0E"s, "binary data", ""},
  };
  for (const Case& one : cases) {
    expect_error([&] { require_text(one.bytes, "-f FILE", "FILE"); },
                 {"-f FILE: expected UTF-8 text, found ", one.found, one.remedy});
  }
  expect_error([&] { require_text("%PDF-1.7", "standard input", ""); }, {"pdftotext - - prints"});
  expect_error([&] { require_text("\x1F\x8B", "standard input", ""); }, {"gunzip -c unpacks"});
  expect_error([&] { require_text("\x1F\x8B", "-f -a.gz", "-a.gz"); },
               {"gunzip -c ./-a.gz unpacks"});
  expect_error([&] { require_text("caf\xE9 x", "-f -a", "-a"); }, {"-t UTF-8 ./-a converts"});
}

TEST(PlainText, AcceptsText) {
  for (const std::string& text :
       {""s, "plain"s, "d\u00e9j\u00e0 vu \u65e5\u672c\u8a9e \U0001F600"s, "\xEF\xBB\xBFmarked"s,
        "GGUF is a format"s, "BZh compresses"s, "ID3 tags of \u97f3\u697d"s, "PAR1"s, "RIFF, WAVE"s,
        "\x1B[31mred\x1B[0m\r\n"s, "N\bNA\bA\f\n"s, "one\x1Ftwo\x1E"s, "a\x01"s,
        "{\"a\": [0, 0]}"s}) {
    EXPECT_NO_THROW(require_text(text, "x", "x")) << text;
  }
}

TEST(PlainText, LinesEndAsInPython) {
  std::string text =
      "\xEF\xBB\xBF"
      "a\r\nb\rc\n\r\r\n";
  normalize_lines(text);
  EXPECT_EQ(text, "a\nb\nc\n\n\n");
  TemporaryFolder folder;
  folder.write("t",
               "\xEF\xBB\xBF"
               "one\r\ntwo");
  EXPECT_EQ(read_plain_text((folder.path() / "t").string()), "one\ntwo");
  folder.write("t", "caf\xE9");
  expect_error([&] { read_plain_text((folder.path() / "t").string(), "-f"); },
               {"-f ", "/t: expected UTF-8"});
}

TEST(PlainText, FilesOfLines) {
  TemporaryFolder folder;
  folder.write("t", "\xEF\xBB\xBFone\ntwo \xFF\n");
  LineReader reader(folder.path() / "t", "lines");
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.line(), "one");
  reader.require_text();
  ASSERT_TRUE(reader.next());
  expect_error([&] { reader.require_text(); }, {"t: line 2: expected UTF-8 text"});
  // Earlier lines show that the file is UTF-8.
  folder.write("t", "caf\u00e9\n\xC3 x\n");
  LineReader damaged(folder.path() / "t", "lines");
  ASSERT_TRUE(damaged.next());
  damaged.require_text();
  ASSERT_TRUE(damaged.next());
  expect_error([&] { damaged.require_text(); }, {"t: line 2", "damaged characters"});
  folder.write("t", "\x1F\x8B\x08");
  LineReader packed(folder.path() / "t", "lines");
  expect_error([&] { packed.next(); }, {"found a gzip file"});
}

}  // namespace
}  // namespace kvzap::files
