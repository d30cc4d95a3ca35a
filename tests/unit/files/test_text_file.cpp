#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <string>

#include "files/text_file.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::files {
namespace {

using test::expect_error;
using test::TemporaryFolder;

TEST(TextFile, IsReadWhole) {
  const TemporaryFolder folder;
  std::string text(300'000, 'x');
  text[70'000] = '\0';
  folder.write("text", text);
  EXPECT_EQ(read_text(folder.path() / "text"), text);
  EXPECT_EQ(read_text(folder.path() / "text", text.size()), text);
  folder.write("nothing", "");
  EXPECT_EQ(read_text(folder.path() / "nothing"), "");

  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ASSERT_EQ(::write(ends[1], "text", 4), 4);
  ::close(ends[1]);
  EXPECT_EQ(read_text(ends[0], "a pipe"), "text");
  ::close(ends[0]);
}

TEST(TextFile, ErrorsNameTheFile) {
  const TemporaryFolder folder;
  folder.write("text", "12345");
  const std::string file = (folder.path() / "text").string();
  expect_error([&] { read_text(folder.path() / "text", 4); }, {file, "at most 4 bytes"});
  expect_error([&] { read_text(folder.path()); }, {folder.path().string(), "is a folder"});
  expect_error([&] { read_text(folder.path() / "none"); },
               {"none: cannot be opened: No such file or directory"});
  expect_error([&] { read_text(-1, "standard input"); },
               {"standard input: reading failed after 0 bytes: Bad file descriptor"});
}

}  // namespace
}  // namespace kvzap::files
