// Files of pairs: what was appended comes back, on any number of ranks, whenever the writer ended;
// and headers that lie.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/lab/pairs.hpp>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace kvzap {
namespace {

namespace fs = std::filesystem;

class PairsFileTest : public ::testing::Test {
 protected:
  PairsFileTest() {
    std::string pattern = (fs::temp_directory_path() / "kvzap-XXXXXX").string();
    if (m_comm.is_root() && ::mkdtemp(pattern.data()) == nullptr) pattern.clear();
    m_comm.broadcast(pattern.data(), pattern.size(), 0);
    m_folder = pattern;
  }
  ~PairsFileTest() override {
    m_comm.barrier();
    std::error_code ignored;
    if (m_comm.is_root()) fs::remove_all(m_folder, ignored);
  }

  fs::path file() const { return m_folder / "pairs.h5"; }
  std::set<std::string> names() const {
    m_comm.barrier();
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(m_folder)) {
      names.insert(entry.path().filename().string());
    }
    m_comm.barrier();
    return names;
  }

  Communicator m_comm = Communicator::world();
  fs::path m_folder;
};

PairsPlan some_plan(DType dtype = DType::bf16) {
  PairsPlan plan;
  plan.model = "models/some";
  plan.dtype = dtype;
  plan.hidden_size = 20;
  plan.layers = 3;
  plan.kv_heads = 4;
  plan.command = {{"--seed", "1"}, {"texts", "0123"}};
  plan.chunk_pairs = 8;
  plan.chunk_columns = 6;
  plan.flush_share = 1e9;  // at once
  std::int64_t line = 1;
  for (const std::int64_t pairs : {5, 3, 8, 1, 30, 0, 7, 2}) {
    PairsPlan::Text text;
    text.line = line++;
    text.subset = pairs % 2 == 0 ? "even" : "";
    text.tokens = 2 * pairs;
    for (std::int64_t p = 0; p < pairs; ++p) text.positions.push_back(2 * p + 1);
    plan.texts.push_back(text);
  }
  return plan;
}

std::uint16_t hidden_bits(int layer, std::int64_t pair, std::int64_t column) {
  return static_cast<std::uint16_t>(7919 * layer + 131 * pair + column);
}
float score_of(int layer, std::int64_t pair, int head) {
  if (pair == 4 && head == 1) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(layer) + 0.25F * static_cast<float>(pair) -
         1e-3F * static_cast<float>(head);
}

std::vector<std::int64_t> begins_of(const PairsPlan& plan) {
  std::vector<std::int64_t> begins{0};
  for (const auto& text : plan.texts) {
    begins.push_back(begins.back() + static_cast<std::int64_t>(text.positions.size()));
  }
  return begins;
}

TextPairs pairs_of(const PairsPlan& plan, std::int64_t text, const std::vector<int>& heads) {
  const std::vector<std::int64_t> begins = begins_of(plan);
  TextPairs result;
  for (int l = 0; l < plan.layers; ++l) {
    std::vector<std::uint16_t> hidden;
    TextPairs::Layer layer;
    for (std::int64_t p = begins[text]; p < begins[text + 1]; ++p) {
      for (std::int64_t c = 0; c < plan.hidden_size; ++c) hidden.push_back(hidden_bits(l, p, c));
      for (const int head : heads) layer.scores.push_back(score_of(l, p, head));
    }
    layer.hidden.resize(2 * hidden.size());
    std::copy_n(reinterpret_cast<const char*>(hidden.data()), layer.hidden.size(),
                layer.hidden.begin());
    result.layers.push_back(layer);
  }
  return result;
}

std::vector<std::vector<int>> heads_on(int ranks) {
  const HeadPartition partition = HeadPartition::even(1, 4, ranks);
  std::vector<std::vector<int>> heads;
  for (int rank = 0; rank < ranks; ++rank) heads.push_back(partition.heads(0, rank));
  return heads;
}

std::unique_ptr<PairsWriter> open_writer(const fs::path& file, const PairsPlan& plan,
                                         const Communicator& comm) {
  return PairsWriter::open(file, plan, heads_on(comm.size()), comm);
}

void append(PairsWriter& writer, const PairsPlan& plan, const Communicator& comm,
            std::int64_t end) {
  while (writer.texts() < end) {
    writer.append(pairs_of(plan, writer.texts(), heads_on(comm.size())[comm.rank()]));
  }
}

// Appends up to text number `end`; returns how many texts the file has for good.
std::int64_t continue_to(const fs::path& file, const PairsPlan& plan, const Communicator& comm,
                         std::int64_t end) {
  const auto writer = open_writer(file, plan, comm);
  append(*writer, plan, comm, end);
  writer->close();
  return writer->safe_texts();
}

void expect_pairs(const fs::path& file, const PairsPlan& plan, std::int64_t texts) {
  const auto pairs = PairsFile::open(file);
  const PairsInfo& info = pairs->info();
  const std::vector<std::int64_t> begins = begins_of(plan);
  EXPECT_EQ(info.texts, texts);
  EXPECT_EQ(info.pairs, begins[texts]);
  EXPECT_EQ(info.planned_texts, static_cast<std::int64_t>(plan.texts.size()));
  EXPECT_EQ(info.planned_pairs, begins.back());
  EXPECT_EQ(info.text_begin, std::vector<std::int64_t>(begins.begin(), begins.begin() + texts + 1));
  EXPECT_EQ(info.model, plan.model);
  EXPECT_EQ(info.command, plan.command);
  std::vector<std::uint16_t> hidden(info.pairs * plan.hidden_size);
  std::vector<float> scores(info.pairs * plan.kv_heads);
  for (int l = 0; l < plan.layers; ++l) {
    const std::int64_t half = info.pairs / 2;
    pairs->read(l, 0, half, hidden.data(), scores.data());
    pairs->read(l, half, info.pairs - half, hidden.data() + half * plan.hidden_size, nullptr);
    pairs->read(l, half, info.pairs - half, nullptr, scores.data() + half * plan.kv_heads);
    for (std::int64_t p = 0; p < info.pairs; ++p) {
      for (std::int64_t c = 0; c < plan.hidden_size; ++c) {
        ASSERT_EQ(hidden[p * plan.hidden_size + c], hidden_bits(l, p, c))
            << "layer " << l << ", pair " << p << ", column " << c;
      }
      for (int h = 0; h < plan.kv_heads; ++h) {
        ASSERT_EQ(scores[p * plan.kv_heads + h], score_of(l, p, h))
            << "layer " << l << ", pair " << p << ", head " << h;
      }
    }
  }
  std::vector<std::int64_t> positions;
  for (std::int64_t t = 0; t < texts; ++t) {
    positions.insert(positions.end(), plan.texts[t].positions.begin(),
                     plan.texts[t].positions.end());
  }
  EXPECT_EQ(pairs->positions(0, info.pairs), positions);
}

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(PairsFileTest, HoldsWhatWasAppended) {
  for (const int compression : {0, 1, 9}) {
    PairsPlan plan = some_plan();
    plan.compression = compression;
    const fs::path path = m_folder / ("pairs" + std::to_string(compression));
    const auto writer = open_writer(path, plan, m_comm);
    EXPECT_EQ(writer->planned_texts(), 8);
    append(*writer, plan, m_comm, 8);
    writer->close();
    expect_pairs(path, plan, 8);
    EXPECT_EQ(writer->bytes(), static_cast<std::int64_t>(fs::file_size(path)));
    EXPECT_LT(writer->bytes(), 60000);  // nothing of the room that was taken for chunks is left
  }
  EXPECT_EQ(names(), (std::set<std::string>{"pairs0", "pairs1", "pairs9"}));
}

TEST_F(PairsFileTest, GoesOnWhereItWasClosed) {
  const PairsPlan plan = some_plan();
  for (std::int64_t end = 1; end <= 8; ++end) {
    const auto writer = open_writer(file(), plan, m_comm);
    EXPECT_LT(writer->texts(), end);
    append(*writer, plan, m_comm, end);
    writer->close();
    expect_pairs(file(), plan, writer->safe_texts());
  }
  expect_pairs(file(), plan, 8);
  const auto writer = open_writer(file(), plan, m_comm);
  EXPECT_EQ(writer->texts(), 8);
  if (m_comm.is_root()) {
    ASSERT_EQ(writer->notes().size(), 1u);
    EXPECT_NE(writer->notes()[0].find("nothing to do"), std::string::npos);
  }
}

PairsPlan shortened(PairsPlan plan, std::size_t texts) {
  plan.texts.resize(texts);
  plan.command["--max-texts"] = std::to_string(texts);
  return plan;
}

// At each text, whether its pairs fill a chunk or not.
TEST_F(PairsFileTest, EndsWithAShorterPlan) {
  const PairsPlan plan = some_plan();
  for (std::int64_t begun = 0; begun < 7; ++begun) {
    const fs::path path = m_folder / ("pairs" + std::to_string(begun));
    const std::int64_t safe = continue_to(path, plan, m_comm, begun);
    const PairsPlan shorter = shortened(plan, static_cast<std::size_t>(begun) + 1);
    EXPECT_EQ(continue_to(path, shorter, m_comm, begun + 1), begun + 1) << "after " << safe;
    PairsPlan expected = shorter;
    expected.command = plan.command;
    expect_pairs(path, expected, begun + 1);
    EXPECT_TRUE(PairsFile::open(path)->info().is_complete());
    EXPECT_EQ(open_writer(path, shorter, m_comm)->texts(), begun + 1);
    const std::string error = error_of([&] { open_writer(path, plan, m_comm); });
    EXPECT_NE(error.find("the number of texts is " + std::to_string(begun + 1) + ", now 8"),
              std::string::npos)
        << error;
  }
  std::set<std::string> files;
  for (int begun = 0; begun < 7; ++begun) files.insert("pairs" + std::to_string(begun));
  EXPECT_EQ(names(), files);
}

TEST_F(PairsFileTest, StaysAsItIsUnderAShorterPlanThanItsTexts) {
  const PairsPlan plan = some_plan();
  const std::int64_t safe = continue_to(file(), plan, m_comm, 5);
  ASSERT_GT(safe, 1);
  auto writer = open_writer(file(), shortened(plan, 1), m_comm);
  EXPECT_EQ(writer->texts(), safe);
  EXPECT_EQ(writer->planned_texts(), 1);
  if (m_comm.is_root()) {
    ASSERT_EQ(writer->notes().size(), 1u);
    EXPECT_NE(writer->notes()[0].find("of 8 texts, and 1 are requested: there is nothing to do"),
              std::string::npos)
        << writer->notes()[0];
  }
  EXPECT_NE(error_of([&] { writer->append({}); }).find("no further text"), std::string::npos);
  writer.reset();
  expect_pairs(file(), plan, safe);
  PairsPlan other = shortened(plan, 2);
  other.texts[1].tokens += 1;
  EXPECT_NE(error_of([&] { open_writer(file(), other, m_comm); }).find("text 2 is another"),
            std::string::npos);
  EXPECT_EQ(continue_to(file(), plan, m_comm, 8), 8);
  expect_pairs(file(), plan, 8);
}

TEST_F(PairsFileTest, RemovesLockFilesOfMpi) {
  const PairsPlan plan = some_plan();
  open_writer(file(), plan, m_comm)->close();
  if (m_comm.is_root()) {
    for (const char* name : {"pairs.h5-12-345.lock", "pairs.h5-12-.lock", "pairs.h5-1-2-3.lock",
                             "other.h5-1-2.lock", "pairs.h5-1-2.log"}) {
      std::ofstream(m_folder / name);
    }
  }
  m_comm.barrier();
  continue_to(file(), plan, m_comm, 8);
  EXPECT_EQ(names(), (std::set<std::string>{"pairs.h5", "pairs.h5-12-.lock", "pairs.h5-1-2-3.lock",
                                            "other.h5-1-2.lock", "pairs.h5-1-2.log"}));
}

// The writer ends without closing, at each text, with HDF5's own data in whatever state.
TEST_F(PairsFileTest, IsWholeAfterAnyEnd) {
  const PairsPlan plan = some_plan();
  for (std::int64_t end = 1; end <= 8; ++end) {
    std::int64_t safe = 0;
    {
      const auto writer = open_writer(file(), plan, m_comm);
      append(*writer, plan, m_comm, end);
      safe = writer->safe_texts();
    }
    m_comm.barrier();
    if (m_comm.is_root()) {
      std::fstream stream(file(), std::ios::in | std::ios::out | std::ios::binary);
      stream.write("broken", 6);  // the signature
      stream.seekp(700);
      stream.write(std::string(900, 'x').data(), 900);
    }
    m_comm.barrier();
    const auto writer = open_writer(file(), plan, m_comm);
    EXPECT_EQ(writer->texts(), safe);
    if (safe > 0) expect_pairs(file(), plan, safe);
    writer->close();
  }
  const auto writer = open_writer(file(), plan, m_comm);
  append(*writer, plan, m_comm, 8);
  writer->close();
  expect_pairs(file(), plan, 8);
  EXPECT_EQ(names(), (std::set<std::string>{"pairs.h5"}));
}

TEST_F(PairsFileTest, RefusesAFileOfAnotherCommand) {
  const PairsPlan plan = some_plan();
  open_writer(file(), plan, m_comm)->close();
  const auto error = [&](const std::function<void(PairsPlan&)>& change) {
    PairsPlan other = plan;
    change(other);
    return error_of([&] { open_writer(file(), other, m_comm); });
  };
  EXPECT_NE(error([](PairsPlan& p) { p.command["--seed"] = "2"; }).find("--seed is 1, now 2"),
            std::string::npos);
  EXPECT_NE(error([](PairsPlan& p) { p.command["--new"] = "2"; }).find("--new is not set, now 2"),
            std::string::npos);
  EXPECT_NE(error([](PairsPlan& p) { p.dtype = DType::f16; }).find("dtype is bf16, now f16"),
            std::string::npos);
  EXPECT_NE(error([](PairsPlan& p) { p.texts.back().positions[0] = 99; }).find("positions"),
            std::string::npos);
  EXPECT_NE(error([](PairsPlan& p) { p.texts[2].subset = "other"; }).find("text 3 is another"),
            std::string::npos);
  const std::string same = error([](PairsPlan& p) { p.model = "moved"; });
  EXPECT_EQ(same, "no error");
}

TEST_F(PairsFileTest, RefusesARecoveryFileOfAnotherFile) {
  const PairsPlan plan = some_plan();
  PairsPlan other = plan;
  other.command["--seed"] = "2";
  open_writer(file(), plan, m_comm)->close();
  open_writer(m_folder / "other.h5", other, m_comm)->close();
  if (m_comm.is_root()) fs::rename(m_folder / "other.h5", file());
  m_comm.barrier();
  EXPECT_NE(error_of([&] { open_writer(file(), plan, m_comm); }).find("is of another file"),
            std::string::npos);
  EXPECT_EQ(PairsFile::open(file())->info().command, other.command);
}

// Two files of one command differ in where chunks lie: an image of one would spoil the other.
TEST_F(PairsFileTest, RefusesARecoveryFileOfAnotherFileOfTheSameCommand) {
  const PairsPlan plan = some_plan();
  continue_to(m_folder / "other.h5", plan, m_comm, 3);
  const std::int64_t safe = continue_to(file(), plan, m_comm, 5);
  if (m_comm.is_root()) fs::rename(m_folder / "other.h5.recovery", m_folder / "pairs.h5.recovery");
  m_comm.barrier();
  EXPECT_NE(error_of([&] { open_writer(file(), plan, m_comm); }).find("is of another file"),
            std::string::npos);
  expect_pairs(file(), plan, safe);
}

TEST_F(PairsFileTest, RefusesARecoveryFileOfALaterState) {
  const PairsPlan plan = some_plan();
  const std::int64_t safe = continue_to(file(), plan, m_comm, 3);
  if (m_comm.is_root()) fs::copy_file(file(), m_folder / "copy.h5");
  m_comm.barrier();
  continue_to(file(), plan, m_comm, 5);
  if (m_comm.is_root()) {
    fs::copy_file(m_folder / "pairs.h5.recovery", m_folder / "copy.h5.recovery");
  }
  m_comm.barrier();
  const std::string error = error_of([&] { open_writer(m_folder / "copy.h5", plan, m_comm); });
  EXPECT_NE(error.find("was it copied before it?"), std::string::npos) << error;
  expect_pairs(m_folder / "copy.h5", plan, safe);
  m_comm.barrier();
  if (m_comm.is_root()) fs::remove(m_folder / "copy.h5.recovery");
  m_comm.barrier();
  EXPECT_EQ(continue_to(m_folder / "copy.h5", plan, m_comm, safe), safe);
  continue_to(m_folder / "copy.h5", plan, m_comm, 8);
  expect_pairs(m_folder / "copy.h5", plan, 8);
}

TEST_F(PairsFileTest, AnOlderRecoveryFileUndoesNoCompleteFile) {
  const PairsPlan plan = some_plan();
  continue_to(file(), plan, m_comm, 3);
  if (m_comm.is_root()) fs::copy_file(m_folder / "pairs.h5.recovery", m_folder / "old");
  m_comm.barrier();
  continue_to(file(), plan, m_comm, 8);
  if (m_comm.is_root()) fs::rename(m_folder / "old", m_folder / "pairs.h5.recovery");
  m_comm.barrier();
  EXPECT_EQ(open_writer(file(), plan, m_comm)->texts(), 8);
  expect_pairs(file(), plan, 8);
  EXPECT_EQ(names(), (std::set<std::string>{"pairs.h5"}));
}

// What is taken before chunks are written, and they do not fill, comes back before a disk is full.
TEST_F(PairsFileTest, TakesRoomForTheNextChunksAlone) {
  PairsPlan plan = some_plan();
  constexpr std::int64_t texts = 40, pairs = 8;
  plan.hidden_size = 512;
  plan.chunk_columns = 0;
  plan.flush_share = 0;
  plan.texts.assign(texts, plan.texts[2]);
  ASSERT_EQ(static_cast<std::int64_t>(plan.texts[0].positions.size()), pairs);
  const std::int64_t bytes =
      texts * pairs * plan.layers * (plan.hidden_size * 2 + plan.kv_heads * 4);
  const auto writer = open_writer(file(), plan, m_comm);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  constexpr std::int64_t overhead = std::int64_t{1} << 18;
  limit.rlim_cur = fs::file_size(file()) + static_cast<rlim_t>(bytes + overhead);
  m_comm.barrier();
  ::setrlimit(RLIMIT_FSIZE, &limit);
  append(*writer, plan, m_comm, texts);
  writer->close();
  ::setrlimit(RLIMIT_FSIZE, &before);
  expect_pairs(file(), plan, texts);
}

// The image is written with every text: no chunks of hidden states in it.
TEST_F(PairsFileTest, KeepsChunksOutOfTheRecoveryFile) {
  PairsPlan plan = some_plan(DType::f32);
  plan.hidden_size = 4096;
  plan.chunk_columns = 0;
  plan.compression = 0;
  open_writer(file(), plan, m_comm)->close();
  EXPECT_LT(fs::file_size(m_folder / "pairs.h5.recovery"), 50000u);
}

TEST_F(PairsFileTest, TellsOfAFullDisk) {
  PairsPlan plan = some_plan();
  plan.hidden_size = 4096;
  plan.chunk_columns = 0;
  const auto writer = open_writer(file(), plan, m_comm);
  const auto size = fs::file_size(file());
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = size + 200000;
  m_comm.barrier();
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const std::string error = error_of([&] {
    const int rank = m_comm.rank();
    while (writer->texts() < 8) {
      writer->append(pairs_of(plan, writer->texts(), heads_on(m_comm.size())[rank]));
    }
  });
  EXPECT_NE(error.find("no room for"), std::string::npos) << error;
  ::setrlimit(RLIMIT_FSIZE, &before);
  m_comm.barrier();
  const auto again = open_writer(m_folder / "again.h5", plan, m_comm);
  append(*again, plan, m_comm, 8);
  again->close();
}

// ---- Headers that lie: rank 0 alone -------------------------------------------------------------

class HostilePairsFile : public PairsFileTest {
 protected:
  void SetUp() override {
    const PairsPlan plan = some_plan();
    const auto writer = open_writer(file(), plan, m_comm);
    append(*writer, plan, m_comm, 8);
    writer->close();
  }

  // The error after `change` to the open file.
  std::string after(const std::function<void(hid_t)>& change) const {
    const fs::path copy = m_folder / "changed.h5";
    fs::copy_file(file(), copy, fs::copy_options::overwrite_existing);
    const hid_t hdf5 = H5Fopen(copy.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    change(hdf5);
    H5Fclose(hdf5);
    return error_of([&] { PairsFile::open(copy); });
  }

  std::string with_attribute(const char* name, std::int64_t value) const {
    return after([&](hid_t hdf5) {
      const hid_t attribute = H5Aopen(hdf5, name, H5P_DEFAULT);
      H5Awrite(attribute, H5T_NATIVE_INT64, &value);
      H5Aclose(attribute);
    });
  }

  static void replace(hid_t hdf5, const char* name, hid_t type, std::vector<hsize_t> extents) {
    H5Ldelete(hdf5, name, H5P_DEFAULT);
    const hid_t space = H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr);
    H5Dclose(H5Dcreate2(hdf5, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Sclose(space);
  }
};

#define EXPECT_SAYS(error, words) EXPECT_NE((error).find(words), std::string::npos) << (error)

TEST_F(HostilePairsFile, IsRefused) {
  if (!m_comm.is_root()) return;
  EXPECT_SAYS(with_attribute("kvzap_pairs_version", 2), "expected 1, found 2");
  EXPECT_SAYS(with_attribute("hidden_size", -1), "'hidden_size' is -1; expected");
  EXPECT_SAYS(with_attribute("hidden_size", 21), "expected (56, 21)");
  EXPECT_SAYS(with_attribute("layers", 4), "'/layers/3' is missing");
  EXPECT_SAYS(with_attribute("layers", std::int64_t{1} << 40), "'layers' is");
  EXPECT_SAYS(with_attribute("kv_heads", 3), "expected (56, 3)");
  EXPECT_SAYS(with_attribute("planned_pairs", std::int64_t{1} << 39), "/texts/begin");
  EXPECT_SAYS(with_attribute("planned_pairs", std::numeric_limits<std::int64_t>::max()),
              "'planned_pairs' is");
  EXPECT_SAYS(with_attribute("pairs", 57), "'pairs' is 57");
  EXPECT_SAYS(with_attribute("pairs", 55), "/texts/begin");
  EXPECT_SAYS(with_attribute("texts", 9), "'texts' is 9");
  EXPECT_SAYS(with_attribute("written", 3), "'written' is 3");
  EXPECT_SAYS(after([](hid_t hdf5) { H5Adelete(hdf5, "dtype"); }), "'dtype' is missing");
  EXPECT_SAYS(after([](hid_t hdf5) {
                H5Adelete(hdf5, "layers");
                const float value = 3;
                const hid_t space = H5Screate(H5S_SCALAR);
                const hid_t attribute =
                    H5Acreate2(hdf5, "layers", H5T_NATIVE_FLOAT, space, H5P_DEFAULT, H5P_DEFAULT);
                H5Awrite(attribute, H5T_NATIVE_FLOAT, &value);
                H5Aclose(attribute);
                H5Sclose(space);
              }),
              "expected integers");
  EXPECT_SAYS(after([](hid_t hdf5) {
                replace(hdf5, "/layers/1/scores", H5T_IEEE_F64LE, {56, 4});
              }),
              "expected f32");
  EXPECT_SAYS(after([](hid_t hdf5) {
                replace(hdf5, "/layers/1/hidden", H5T_STD_U16LE, {56, 20});
              }),
              "expected bf16");
  EXPECT_SAYS(after([](hid_t hdf5) { replace(hdf5, "/positions", H5T_STD_I64LE, {55}); }),
              "'/positions' has extents (55)");
  EXPECT_SAYS(after([](hid_t hdf5) {
                H5Ldelete(hdf5, "/layers/0/hidden", H5P_DEFAULT);
                H5Lcreate_external("/etc/passwd", "/x", hdf5, "/layers/0/hidden", H5P_DEFAULT,
                                   H5P_DEFAULT);
              }),
              "a link to elsewhere");
  EXPECT_SAYS(after([](hid_t hdf5) {
                const std::int64_t begins[] = {0, 5, 4, 16, 17, 47, 47, 54, 56};
                const hid_t data_set = H5Dopen2(hdf5, "/texts/begin", H5P_DEFAULT);
                H5Dwrite(data_set, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, begins);
                H5Dclose(data_set);
              }),
              "falls from 5 to 4");
}

TEST_F(HostilePairsFile, IsRefusedWhereItIsNoneAtAll) {
  if (!m_comm.is_root()) return;
  EXPECT_SAYS(error_of([&] { PairsFile::open(m_folder / "none.h5"); }), "there is no such file");
  EXPECT_SAYS(error_of([&] { PairsFile::open(m_folder); }), "not a regular file");
  std::ofstream(m_folder / "text") << "no HDF5";
  EXPECT_SAYS(error_of([&] { PairsFile::open(m_folder / "text"); }), "H5Fopen failed");
  const auto size = fs::file_size(file());
  for (const auto left : {size - 1, size / 2, size / 8}) {
    fs::copy_file(file(), m_folder / "cut", fs::copy_options::overwrite_existing);
    fs::resize_file(m_folder / "cut", left);
    EXPECT_SAYS(error_of([&] { PairsFile::open(m_folder / "cut"); }), "H5Fopen failed");
  }
}

// Whatever a byte of HDF5's own data says: an error or pairs, never a crash, and nothing left open.
// (HDF5 1.10 loses memory of its own when it finds a wrong checksum, and may say "infinite loop
// closing library" as the program ends; a single H5Gopen2 that fails is enough for it.)
TEST_F(HostilePairsFile, SurvivesDamage) {
  if (!m_comm.is_root()) return;
  std::ifstream stream(file(), std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(stream), {}};
  const auto left_open = H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL);
  std::uint64_t state = 1;
  for (int round = 0; round < 300; ++round) {
    std::string changed = whole;
    state = state * 6364136223846793005u + 1442695040888963407u;
    changed[(state >> 20) % changed.size()] ^= static_cast<char>(1 + (state >> 56) % 255);
    std::ofstream(m_folder / "damaged", std::ios::binary) << changed;
    try {
      const auto pairs = PairsFile::open(m_folder / "damaged");
      const PairsInfo& info = pairs->info();
      std::vector<char> hidden(info.pairs * info.hidden_size * size_of(info.dtype));
      std::vector<float> scores(info.pairs * info.kv_heads);
      for (int l = 0; l < info.layers; ++l) {
        pairs->read(l, 0, info.pairs, hidden.data(), scores.data());
      }
      EXPECT_THROW(pairs->read(0, info.pairs, 1, hidden.data(), nullptr), Error);
      EXPECT_THROW(pairs->read(info.layers, 0, 1, hidden.data(), nullptr), Error);
    } catch (const Error& error) {
      EXPECT_SAYS(std::string(error.what()), "pairs file");
    }
    ASSERT_EQ(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL), left_open) << "round " << round;
  }
}

}  // namespace
}  // namespace kvzap
