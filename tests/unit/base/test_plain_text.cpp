#include <gtest/gtest.h>

#include <string>

#include "base/line_reader.hpp"
#include "base/plain_text.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::base {
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
}

TEST(PlainText, AcceptsText) {
  for (const std::string& text :
       {""s, "plain"s, "d\u00e9j\u00e0 vu \u65e5\u672c\u8a9e \U0001F600"s, "\xEF\xBB\xBFmarked"s,
        "GGUF is a format"s, "BZh compresses"s, "ID3 tags of \u97f3\u697d"s, "PAR1"s, "RIFF, WAVE"s,
        "\x1B[31mred\x1B[0m\r\n"s, "{\"a\": [0, 0]}"s}) {
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
  ASSERT_TRUE(reader.next());
  expect_error([&] { reader.require_text(); }, {"t: line 2: expected UTF-8 text"});
  folder.write("t", "\x1F\x8B\x08");
  LineReader packed(folder.path() / "t", "lines");
  expect_error([&] { packed.next(); }, {"found a gzip file"});
}

}  // namespace
}  // namespace kvzap::base
