// Surrogates trained on several ranks are those of one rank, to the bit.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <kvzap/lab/train.hpp>
#include <memory>
#include <string>

#include "unit/temporary_folder.hpp"
#include "unit/train/memory_pairs.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;

std::string bytes_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

class TrainOnRanks : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::string path;
    if (m_comm.is_root()) {
      m_folder = std::make_unique<test::TemporaryFolder>();
      path = m_folder->path().string();
    }
    std::int64_t length = static_cast<std::int64_t>(path.size());
    m_comm.broadcast(&length, sizeof(length), 0);
    path.resize(length);
    m_comm.broadcast(path.data(), path.size(), 0);
    m_path = path;
    m_options.mlp = GetParam();
    m_options.mlp_options.epochs = 3;
    m_options.mlp_options.batch = 32;
    m_options.validation = 0.2;
  }
  void TearDown() override { m_comm.barrier(); }

  Communicator m_comm = Communicator::world();
  std::unique_ptr<test::TemporaryFolder> m_folder;
  fs::path m_path;
  TrainingOptions m_options;
  test::MemoryPairs m_pairs = test::MemoryPairs::random(300, 5, 16, 2);
};

TEST_P(TrainOnRanks, FilesAndReportsDoNotDependOnRanks) {
  const auto report = train_surrogate(m_pairs, m_options, m_path / "together", m_comm);
  EXPECT_EQ(report.layers.size(), 5);
  if (m_comm.is_root()) {
    const auto alone = train_surrogate(m_pairs, m_options, m_path / "alone", Communicator::self());
    for (const char* name : {"model.safetensors", "config.json"}) {
      EXPECT_EQ(bytes_of(m_path / "together" / name), bytes_of(m_path / "alone" / name)) << name;
    }
    for (int l = 0; l < 5; ++l) {
      EXPECT_EQ(report.layers[l].r2, alone.layers[l].r2);
      EXPECT_EQ(report.layers[l].predicted, alone.layers[l].predicted);
    }
  }
}

TEST_P(TrainOnRanks, AStopOfOneRankStopsAllAndAnyNumberGoesOn) {
  const int last = m_comm.size() - 1;
  int asked = 0;
  const auto stop = [&] { return m_comm.rank() == last && asked++ >= 1; };
  EXPECT_TRUE(train_surrogate(m_pairs, m_options, m_path / "stopped", m_comm, stop).stopped);
  m_options.resume = true;
  if (m_comm.is_root()) {
    const auto self = Communicator::self();
    EXPECT_FALSE(train_surrogate(m_pairs, m_options, m_path / "stopped", self).stopped);
    m_options.resume = false;
    train_surrogate(m_pairs, m_options, m_path / "alone", self);
    EXPECT_EQ(bytes_of(m_path / "stopped/model.safetensors"),
              bytes_of(m_path / "alone/model.safetensors"));
  }
}

TEST_P(TrainOnRanks, ErrorsOfOneRankReachAll) {
  for (std::int64_t p = 0; p < 300; ++p) m_pairs.score(4, p, 0) = std::nanf("");
  try {
    train_surrogate(m_pairs, m_options, m_path / "bad", m_comm);
    ADD_FAILURE() << "no error was thrown";
  } catch (const AgreedError& error) {
    EXPECT_NE(std::string(error.what()).find("layer 4"), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Train, TrainOnRanks, ::testing::Values(false, true));

}  // namespace
}  // namespace kvzap
