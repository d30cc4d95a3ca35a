// What is written is what SafetensorsFolder reads, and an older file stays whole if writing fails.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <kvzap/model/safetensors.hpp>

#include "model/safetensors_writer.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

namespace fs = std::filesystem;
using model::SafetensorsEntry;

class SafetensorsWriter : public ::testing::Test {
 protected:
  fs::path file() const { return m_folder.path() / "dump.safetensors"; }
  std::size_t files() const {
    return std::distance(fs::directory_iterator(m_folder.path()), fs::directory_iterator());
  }

  TemporaryFolder m_folder;
  const std::vector<float> m_scores = {1.5f, -2, 0, 3, 4, 5};
  const std::vector<std::uint8_t> m_flags = {1, 0, 1};
  const std::vector<std::int32_t> m_ids = {7, -1, 1 << 30};
};

TEST_F(SafetensorsWriter, ReaderSeesWhatWasWritten) {
  model::write_safetensors(file(),
                           {{"flags", "U8", {3}, m_flags.data()},
                            {"scores", "F32", {2, 1, 3}, m_scores.data()},
                            {"none", "I32", {0}, nullptr},
                            {"ids", "I32", {3}, m_ids.data()}},
                           {{"format", "test"}});
  EXPECT_EQ(files(), 1u);
  const auto read = SafetensorsFolder::open(file());
  EXPECT_EQ(read.names(), (std::vector<std::string>{"flags", "ids", "none", "scores"}));
  const auto expect = [&](const char* name, const char* dtype,
                          const std::vector<std::int64_t>& shape, const auto& values) {
    const TensorInfo* tensor = read.find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(tensor->stored_dtype, dtype);
    EXPECT_EQ(tensor->shape, shape);
    ASSERT_EQ(tensor->bytes, values.size() * sizeof(values[0]));
    EXPECT_EQ(std::memcmp(tensor->data, values.data(), tensor->bytes), 0) << name;
    // Mapped at a page, so that this is the place in the file.
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor->data) % sizeof(values[0]), 0u) << name;
  };
  expect("flags", "U8", {3}, m_flags);
  expect("scores", "F32", {2, 1, 3}, m_scores);
  expect("ids", "I32", {3}, m_ids);
  EXPECT_EQ(read.find("none")->bytes, 0u);
}

TEST_F(SafetensorsWriter, ReplacesAnOlderFileWhole) {
  std::ofstream(file()) << "old";
  std::string text;
  std::ifstream(file()) >> text;
  EXPECT_EQ(text, "old");
  model::write_safetensors(file(), {{"flags", "U8", {3}, m_flags.data()}}, {});
  EXPECT_EQ(SafetensorsFolder::open(file()).names(), std::vector<std::string>{"flags"});
  EXPECT_EQ(files(), 1u);
}

TEST_F(SafetensorsWriter, RefusesWhatNoReaderTakes) {
  std::ofstream(file()) << "old";
  const SafetensorsEntry good{"flags", "U8", {3}, m_flags.data()};
  SafetensorsEntry wrong_type = good, negative = good;
  wrong_type.dtype = "U7";
  negative.shape = {-3};
  for (const auto& tensors :
       {std::vector{good, good}, std::vector{wrong_type}, std::vector{negative}}) {
    try {
      model::write_safetensors(file(), tensors, {}, "--dump");
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find("--dump " + file().string() + ": "), 0u)
          << error.what();
    }
  }
  std::string text;
  std::ifstream(file()) >> text;
  EXPECT_EQ(text, "old");
  EXPECT_EQ(files(), 1u);
}

}  // namespace
}  // namespace kvzap::test
