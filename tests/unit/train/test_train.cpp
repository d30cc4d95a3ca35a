#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <kvzap/engine/surrogate.hpp>
#include <kvzap/lab/train.hpp>
#include <nlohmann/json.hpp>
#include <set>

#include "train/checkpoint.hpp"
#include "train/quality.hpp"
#include "unit/temporary_folder.hpp"
#include "unit/train/memory_pairs.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::MemoryPairs;

std::string bytes_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}
const std::set<std::string> whole_folder = {"README.md", "config.json", "model.safetensors",
                                            "training.json"};

TEST(SplitPairs, KeepsBackWholeTextsWhereThereAreEnough) {
  PairsInfo info;
  info.pairs = 1000;
  info.texts = 100;
  for (int t = 0; t <= 100; ++t) info.text_begin.push_back(10 * t);
  const PairSplit split = split_pairs(info, 0.05, 9);
  EXPECT_TRUE(split.by_text);
  EXPECT_EQ(split.validation, 50);
  EXPECT_EQ(split.training, 950);
  for (int p = 0; p < 1000; ++p) {
    EXPECT_EQ(split.is_validation[p], split.is_validation[p / 10 * 10]) << p;
  }
  EXPECT_EQ(split.is_validation, split_pairs(info, 0.05, 9).is_validation);
  EXPECT_NE(split.is_validation, split_pairs(info, 0.05, 10).is_validation);

  info.text_begin = {0, 400, 1000};
  const PairSplit by_pair = split_pairs(info, 0.05, 9);
  EXPECT_FALSE(by_pair.by_text);
  EXPECT_EQ(by_pair.validation, 50);
  info.text_begin.clear();
  EXPECT_EQ(split_pairs(info, 0, 9).validation, 0);
  EXPECT_EQ(split_pairs(info, 1e-9, 9).validation, 1);
}

TEST(SplitPairs, LeavesPairsToTrainOn) {
  PairsInfo info;
  info.pairs = 2;
  EXPECT_EQ(split_pairs(info, 0.99, 0).training, 1);
  expect_error([&] { split_pairs(info, 1, 0); }, {"share is 1"});
  expect_error([&] { split_pairs(info, -0.1, 0); }, {"share is -0.1"});
  info.pairs = 1;
  expect_error([&] { split_pairs(info, 0.5, 0); }, {"nothing is left"});
  info.pairs = 0;
  expect_error([&] { split_pairs(info, 0.5, 0); }, {"no pairs"});
}

TEST(Quality, IsPearsonsCorrelationSquared) {
  LayerReport report;
  // Head 0: y = 1, 2, 3, 4 and p = 2 y; head 1: p is constant.
  train::judge({1, 5, 2, 6, 3, 7, 4, 9}, {2, 1, 4, 1, 6, 1, 8, 1}, 2, report);
  EXPECT_NEAR(report.r2[0], 1, 1e-12);
  EXPECT_TRUE(std::isnan(report.r2[1]));
  EXPECT_NEAR(report.mse_of_head[0], (1 + 4 + 9 + 16) / 4.0, 1e-12);
  EXPECT_NEAR(report.mse, (30 / 4.0 + (16 + 25 + 36 + 64) / 4.0) / 2, 1e-12);
  EXPECT_EQ(report.validation, 4);
  EXPECT_EQ(report.oracle.size(), 8);
  train::judge({}, {}, 2, report);
  EXPECT_TRUE(std::isnan(report.mse));
  EXPECT_EQ(report.r2.size(), 2);
}

TrainingOptions quick(bool mlp) {
  TrainingOptions options;
  options.mlp = mlp;
  options.mlp_options.epochs = 3;
  options.mlp_options.batch = 32;
  options.validation = 0.2;
  options.pairs_file = "pairs.h5";
  options.command = "kvzap train";
  options.version = "0";
  return options;
}

class TrainSurrogate : public ::testing::TestWithParam<bool> {
 protected:
  TrainingReport run(const TrainingOptions& options, const fs::path& folder,
                     const StopRequest& stop = {}) {
    return train_surrogate(m_pairs, options, folder, Communicator::self(), stop);
  }

  test::TemporaryFolder m_folder;
  MemoryPairs m_pairs = MemoryPairs::random(300, 3, 16, 2);
};

TEST_P(TrainSurrogate, WritesAFolderThatKvzapReads) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TrainingOptions options = quick(GetParam());
    options.dtype = dtype;
    const fs::path folder = m_folder.path() / std::string(name_of(dtype)) / "deeper";
    const TrainingReport report = run(options, folder);
    EXPECT_FALSE(report.stopped);
    EXPECT_EQ(report.layers.size(), 3);
    EXPECT_EQ(report.validation, 60);
    EXPECT_EQ(names_in(folder), whole_folder);

    ModelConfig model;
    model.hidden_size = 16;
    model.num_key_value_heads = 2;
    model.num_hidden_layers = 3;
    Surrogate surrogate = Surrogate::load(folder, model, HeadPartition::even(3, 2, 1), 0);
    EXPECT_EQ(surrogate.kind(), GetParam() ? "mlp" : "linear");
    // The samples of the report are the validation pairs, in order.
    const PairSplit split = split_pairs(m_pairs.info(), 0.2, 0);
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden("hidden", 60, 16);
    const auto host = Kokkos::create_mirror_view(hidden);
    int row = 0;
    for (int p = 0; p < 300; ++p) {
      if (!split.is_validation[p]) continue;
      for (int c = 0; c < 16; ++c) host(row, c) = m_pairs.hidden(1, p, c);
      ++row;
    }
    Kokkos::deep_copy(hidden, host);
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", 2, 60);
    const Kokkos::View<std::int64_t*, MemorySpace> positions("positions", 60);
    surrogate.score(ExecutionSpace(), 1, positions, hidden, scores);
    const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), scores);
    const double tolerance = dtype == DType::f32 ? 1e-5 : 0.05;
    for (int i = 0; i < 60; ++i) {
      for (int h = 0; h < 2; ++h) {
        EXPECT_NEAR(found(h, i), report.layers[1].predicted[2 * i + h], tolerance);
      }
    }
    const auto json = nlohmann::json::parse(bytes_of(folder / "training.json"));
    EXPECT_EQ(json.at("format"), "kvzap.training");
    EXPECT_EQ(json.at("layers").at(2).at("sample").at("oracle").size(), 60);
    EXPECT_EQ(json.at("options").at("kind"), GetParam() ? "mlp" : "linear");
    EXPECT_NE(bytes_of(folder / "README.md").find("| 2 | 0."), std::string::npos);
  }
}

TEST_P(TrainSurrogate, GoesOnAfterBeingStoppedAnywhere) {
  const fs::path whole = m_folder.path() / "whole";
  run(quick(GetParam()), whole);
  const std::string expected = bytes_of(whole / "model.safetensors");
  for (const int patience : {0, 1, 5, 11, 26}) {
    SCOPED_TRACE(patience);
    const fs::path folder = m_folder.path() / std::to_string(patience);
    TrainingOptions options = quick(GetParam());
    int runs = 0;
    for (bool stopped = true; stopped; ++runs) {
      int asked = 0;
      // Later runs get further, so that all of them end.
      const int limit = patience + 2 * runs;
      stopped = run(options, folder, [&] { return asked++ >= limit; }).stopped;
      if (stopped) {
        EXPECT_EQ(names_in(folder), std::set<std::string>{"checkpoint"});
      }
      options.resume = true;
    }
    EXPECT_EQ(names_in(folder), whole_folder);
    EXPECT_EQ(bytes_of(folder / "model.safetensors"), expected);
    EXPECT_EQ(bytes_of(folder / "config.json"), bytes_of(whole / "config.json"));
  }
}

INSTANTIATE_TEST_SUITE_P(Train, TrainSurrogate, ::testing::Values(false, true));

using TrainFolder = TrainSurrogate;

TEST_P(TrainFolder, IsNeverReplacedUnasked) {
  const fs::path folder = m_folder.path() / "surrogate";
  TrainingOptions options = quick(GetParam());
  fs::create_directory(folder);
  std::ofstream(folder / "notes.txt") << "mine";
  expect_error([&] { run(options, folder); }, {"surrogate", "not empty", "--overwrite"});
  options.resume = true;
  expect_error([&] { run(options, folder); }, {"no checkpoint"});
  options.resume = false;
  options.overwrite = true;
  run(options, folder);
  EXPECT_EQ(bytes_of(folder / "notes.txt"), "mine");
  const std::string before = bytes_of(folder / "model.safetensors");

  // Another one, stopped: the first is whole until the second is.
  options.seed = 3;
  int asked = 0;
  EXPECT_TRUE(run(options, folder, [&] { return asked++ >= 1; }).stopped);
  EXPECT_EQ(bytes_of(folder / "model.safetensors"), before);
  options.overwrite = false;
  expect_error([&] { run(options, folder); }, {"checkpoint", "resume", "overwrite"});
  options.resume = true;
  options.seed = 4;
  options.validation = 0.3;
  expect_error([&] { run(options, folder); },
               {"another training", "seed: recorded 3, given 4", "validation: recorded 0.2"});
  options.seed = 3;
  options.validation = 0.2;
  EXPECT_FALSE(run(options, folder).stopped);
  EXPECT_NE(bytes_of(folder / "model.safetensors"), before);
  EXPECT_FALSE(fs::exists(folder / "checkpoint"));

  std::ofstream(m_folder.path() / "file") << "x";
  expect_error([&] { run(options, m_folder.path() / "file"); }, {"file", "not a folder"});
}

TEST_P(TrainFolder, IsNeverReplacedIfItIsSomethingElse) {
  TrainingOptions options = quick(GetParam());
  options.overwrite = true;
  const fs::path model = m_folder.path() / "model";
  fs::create_directory(model);
  std::ofstream(model / "config.json") << R"({"model_type": "llama"})";
  std::ofstream(model / "model.safetensors") << "weights";
  expect_error([&] { run(options, model); }, {"config.json", "belongs to no surrogate", "llama"});
  fs::remove(model / "config.json");
  expect_error([&] { run(options, model); }, {"model.safetensors", "belongs to no surrogate"});
  EXPECT_EQ(bytes_of(model / "model.safetensors"), "weights");
  EXPECT_EQ(names_in(model), std::set<std::string>{"model.safetensors"});

  const fs::path other = m_folder.path() / "other";
  fs::create_directories(other / "checkpoint");
  std::ofstream(other / "checkpoint/step-100.pt") << "days of work";
  expect_error([&] { run(options, other); }, {"checkpoint", "was not made by kvzap train"});
  EXPECT_EQ(bytes_of(other / "checkpoint/step-100.pt"), "days of work");
}

TEST_P(TrainFolder, IsBegunAnewIfATrainingWasKilledAsItBegan) {
  TrainingOptions options = quick(GetParam());
  for (const bool resume : {false, true}) {
    options.resume = resume;
    const fs::path folder = m_folder.path() / (resume ? "resumed" : "again");
    fs::create_directories(folder / "checkpoint");
    std::ofstream(folder / "checkpoint/training.json.tmp-host-1-0") << "{";
    run(options, folder);
    EXPECT_EQ(names_in(folder), whole_folder);
  }
}

TEST_P(TrainFolder, KeepsThresholdsUntilTheSurrogateIsReplaced) {
  TrainingOptions options = quick(GetParam());
  const fs::path folder = m_folder.path() / "surrogate";
  run(options, folder);
  std::ofstream(folder / "thresholds.json") << "{}";
  options.overwrite = true;
  // A folder in the way of the file: it cannot be written.
  fs::remove(folder / "model.safetensors");
  fs::create_directory(folder / "model.safetensors");
  std::ofstream(folder / "model.safetensors/x") << "x";
  expect_error([&] { run(options, folder); }, {"model.safetensors"});
  EXPECT_EQ(bytes_of(folder / "thresholds.json"), "{}");
  fs::remove_all(folder / "model.safetensors");
  run(options, folder);
  EXPECT_EQ(names_in(folder), whole_folder);
}

INSTANTIATE_TEST_SUITE_P(Train, TrainFolder, ::testing::Values(false, true));

TEST(TrainCheckpoint, KeepsEveryBitOrSaysThatItIsDamaged) {
  test::TemporaryFolder folder;
  fs::create_directory(folder.path() / "checkpoint");
  EXPECT_FALSE(train::read_checkpoint(folder.path(), 3).state);
  MlpTrainer::State state;
  state.epoch = 2;
  state.batch = 5;
  state.step = 25;
  state.loss = 0.1 + 1e-17;
  state.epoch_mse = {1.0 / 3, 2e-300};
  state.parameters = {1e-40f, 3.3f};
  state.first_moment = {1, 2};
  state.second_moment = {3, 4};
  train::write_checkpoint(folder.path(), 3, state);
  const auto found = train::read_checkpoint(folder.path(), 3).state;
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step, 25);
  EXPECT_EQ(found->loss, state.loss);
  EXPECT_EQ(found->epoch_mse, state.epoch_mse);
  EXPECT_EQ(found->parameters, state.parameters);
  EXPECT_EQ(found->second_moment, state.second_moment);

  state.loss = std::nan("");  // of an epoch that diverges; JSON has no such number
  train::write_checkpoint(folder.path(), 2, state);
  EXPECT_TRUE(std::isnan(train::read_checkpoint(folder.path(), 2).state.value().loss));

  const fs::path file = folder.path() / "checkpoint/layer-3.safetensors";
  fs::copy_file(file, folder.path() / "checkpoint/layer-4.safetensors");
  expect_error([&] { train::read_checkpoint(folder.path(), 4); }, {"layer-4", "another layer"});
  fs::resize_file(file, fs::file_size(file) - 3);
  expect_error([&] { train::read_checkpoint(folder.path(), 3); }, {"layer-3"});
}

}  // namespace
}  // namespace kvzap
