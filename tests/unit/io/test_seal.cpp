#include "files/fully.hpp"
#include "io/seal.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/config.hpp>
#include <optional>
#include <string>
#include <vector>

#include "files/crc32c.hpp"
#include "files/temporary_file.hpp"
#include "unit/temporary_folder.hpp"

#if KVZAP_HAVE_HDF5

namespace kvzap::io {
namespace {

using test::expect_error;

// 400 bytes, of which 100 … 149 and 149 … 159 and 300 … 399 are rows.
class SealedFile : public ::testing::Test {
 protected:
  SealedFile() {
    for (int i = 0; i < 400; ++i) m_content.push_back(static_cast<char>(i * 37 + i / 7));
    m_seal.sealed_bytes = 400;
    m_seal.extents = {{100, 49, {}}, {149, 11, 0x12345678}, {300, 100, {}}};
    const std::string beside = m_content.substr(0, 100) + m_content.substr(160, 140);
    m_seal.crc = files::crc32c(beside.data(), beside.size());
  }
  std::string whole() const {
    const std::vector<char> seal = seal_bytes(m_seal);
    return m_content + std::string(seal.begin(), seal.end());
  }
  std::optional<Seal> read(const std::string& content) const {
    m_folder.write("file", content);
    const files::FileDescriptor file(m_folder.path() / "file", O_RDONLY | O_CLOEXEC);
    return read_seal(file.get());
  }

  const test::TemporaryFolder m_folder;
  std::string m_content;
  Seal m_seal;
};

TEST_F(SealedFile, ReadsWhatWasWritten) {
  const auto seal = read(whole());
  ASSERT_TRUE(seal);
  EXPECT_EQ(seal->sealed_bytes, 400);
  EXPECT_EQ(seal->crc, m_seal.crc);
  ASSERT_EQ(seal->extents.size(), 3U);
  EXPECT_EQ(seal->extents[1].begin, 149);
  EXPECT_EQ(seal->extents[1].bytes, 11);
  EXPECT_EQ(seal->extents[1].crc, 0x12345678U);
  EXPECT_FALSE(seal->extents[2].crc);
}

// The layout that seal.hpp describes, byte by byte.
TEST_F(SealedFile, LiesAsDescribed) {
  const std::vector<char> bytes = seal_bytes(m_seal);
  ASSERT_EQ(bytes.size(), 56U + 3 * 24);
  const auto number = [&](std::size_t at, int n) {
    std::uint64_t value = 0;
    for (int i = n - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
    return value;
  };
  EXPECT_EQ(std::string(bytes.data(), 16), std::string("KVZAP-SEAL-2\0\0\0\0", 16));
  EXPECT_EQ(number(16, 8), 400U);
  EXPECT_EQ(number(24, 8), 3U);
  EXPECT_EQ(number(32, 4), m_seal.crc);
  EXPECT_EQ(number(36, 4), 0U);
  EXPECT_EQ(number(64, 8), 149U);
  EXPECT_EQ(number(72, 8), 11U);
  EXPECT_EQ(number(80, 4), 1U);
  EXPECT_EQ(number(84, 4), 0x12345678U);
  EXPECT_EQ(number(112, 4), files::crc32c(bytes.data(), 112));
  EXPECT_EQ(number(116, 4), bytes.size());
  EXPECT_EQ(std::string(bytes.data() + 120, 8), "KVZAPEND");
}

TEST_F(SealedFile, EachByteCounts) {
  const std::string intact = whole();
  for (std::size_t at = 0; at < intact.size(); ++at) {
    const bool is_row = (at >= 100 && at < 160) || (at >= 300 && at < 400);
    std::string damaged = intact;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
    bool found = false;
    try {
      found = !read(damaged);  // no seal where one must be
    } catch (const Error&) {
      found = true;
    }
    EXPECT_NE(found, is_row) << "byte " << at;
  }
}

TEST_F(SealedFile, Truncated) {
  const std::string intact = whole();
  for (std::size_t bytes = 0; bytes < intact.size(); ++bytes) {
    EXPECT_FALSE(read(intact.substr(0, bytes)));
  }
  EXPECT_FALSE(read(intact + "x"));
  // The end of the seal alone, after other content.
  expect_error([&] { read(intact.substr(300)); }, {"seal"});
}

TEST_F(SealedFile, ImpossibleExtentsWithARightChecksum) {
  const auto refuse = [&](const std::vector<SealedExtent>& extents, std::string_view part) {
    m_seal.extents = extents;
    expect_error([&] { read(whole()); }, {part});
  };
  constexpr std::int64_t largest = INT64_MAX;
  refuse({{100, 301, {}}}, "run 0 of rows in its seal");
  refuse({{401, 0, {}}}, "run 0 of rows in its seal");
  refuse({{1, largest, {}}}, "run 0 of rows in its seal");
  refuse({{largest, largest, {}}}, "run 0 of rows in its seal");
  refuse({{100, 50, {}}, {149, 10, {}}}, "run 1 of rows in its seal");
  refuse({{100, 50, {}}, {10, 10, {}}}, "run 1 of rows in its seal");
  refuse({{-1, 10, {}}}, "no file offset");
  refuse({{0, -10, {}}}, "no file offset");
  m_seal.extents = {};
  m_seal.sealed_bytes = 399;
  expect_error([&] { read(whole()); }, {"399 bytes", "found 400"});
}

TEST_F(SealedFile, CannotBeRead) {
  const files::FileDescriptor folder(m_folder.path(), O_RDONLY | O_CLOEXEC);
  expect_error([&] { read_seal(folder.get()); }, {"not a regular file"});
  m_folder.write("file", "1234");
  const files::FileDescriptor file(m_folder.path() / "file", O_RDONLY | O_CLOEXEC);
  char bytes[8];
  expect_error([&] { files::read_fully(file.get(), bytes, 8, 2); }, {"ends at byte 4", "6 more"});
}

}  // namespace
}  // namespace kvzap::io

#endif  // KVZAP_HAVE_HDF5
