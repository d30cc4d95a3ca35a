// Snapshots that are damaged, cut, somebody else's, or made to mislead: one clear error each.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "files/crc32c.hpp"
#include "files/fully.hpp"
#include "files/temporary_file.hpp"
#include "io/container.hpp"
#include "io/hdf5_file.hpp"
#include "io/seal.hpp"
#include "mpi/io/snapshot_stories.hpp"
#include "mpi/ranks.hpp"
#include "unit/temporary_folder.hpp"
#include "watched.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using io::Hdf5Handle;
using test::content_of_file;
using test::expect_error;
using test::stories;
using test::Story;
using test::story_cache;
using test::story_partition;
using test::TemporaryFolder;

using Cache = KVCache;

const Story& richest() { return stories()[6]; }

void write_richest(const fs::path& file, const Communicator& comm, int compress,
                   const PageFormat& format = {}) {
  const HeadPartition partition = story_partition(comm.size());
  auto told = test::tell<float>(richest(), partition, comm.rank(), format);
  SnapshotInfo info = test::story_info(richest());
  info.run_state = "{}";
  info.recent_queries = test::story_queries(richest(), partition, comm.rank());
  SnapshotOptions options;
  options.compress = compress;
  begin_snapshot(file, *told.cache, told.sequence, partition, comm, info, options, &*told.context)
      ->finish();
}

/// One process with a snapshot that has everything. (More ranks would do the same.)
class DamagedSnapshot : public ::testing::Test {
 protected:
  DamagedSnapshot() : m_partition(story_partition(1)) {}
  void SetUp() override {
    if (Communicator::world().size() > 1) GTEST_SKIP() << "one process is enough";
    write_richest(m_file, m_self, 0);
  }

  void load(const SnapshotReader& reader) {
    if (!m_cache) m_cache = story_cache<float>(m_partition, 0);
    const auto loaded = load_snapshot(reader, *m_cache, m_partition, m_self);
    m_cache->free_sequence(loaded.sequence);
  }
  /// Expects one error that names the file, of opening it, or else of loading it.
  void expect_refused(const fs::path& file, std::initializer_list<std::string_view> parts = {}) {
    try {
      const SnapshotReader reader(file);
      load(reader);
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.rfind("snapshot " + file.string() + ": ", 0), 0U) << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
      for (const std::string_view part : parts) {
        EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
      }
      return;
    }
    ADD_FAILURE() << "it was read";
  }

  const TemporaryFolder m_folder;
  const fs::path m_file = m_folder.path() / "cache.h5";
  Communicator m_self = Communicator::self();
  HeadPartition m_partition;
  std::unique_ptr<Cache> m_cache;
};

/// A file that is changed in place.
class Bytes {
 public:
  explicit Bytes(const fs::path& file) : m_descriptor(file, O_RDWR | O_CLOEXEC) {}
  void flip(std::int64_t at, int bit) {
    char byte = 0;
    files::read_fully(m_descriptor.get(), &byte, 1, at);
    byte = static_cast<char>(byte ^ (1 << bit));
    if (::pwrite(m_descriptor.get(), &byte, 1, static_cast<off_t>(at)) != 1) {
      throw Error("pwrite failed");
    }
  }
  io::Seal seal() const { return io::read_seal(m_descriptor.get()).value(); }

 private:
  files::FileDescriptor m_descriptor;
};

TEST_F(DamagedSnapshot, EachByteThatIsNotRows) {
  for (const int compress : {0, 6}) {
    write_richest(m_file, m_self, compress, compress == 0 ? PageFormat() : test::q8_and_q4);
    Bytes file(m_file);
    const auto extents = file.seal().extents;
    const auto bytes = static_cast<std::int64_t>(fs::file_size(m_file));
    std::int64_t flipped = 0;
    auto extent = extents.begin();
    for (std::int64_t at = 0; at < bytes; ++at) {
      while (extent != extents.end() && at >= extent->begin + extent->bytes) ++extent;
      if (extent != extents.end() && at >= extent->begin) continue;
      if (test::watched && at % 61 != 0 && at < bytes - 64) continue;
      const int bit = static_cast<int>(at % 8);
      file.flip(at, bit);
      expect_refused(m_file);
      file.flip(at, bit);
      ++flipped;
    }
    EXPECT_GT(flipped, test::watched ? 200 : 10000);
    EXPECT_TRUE(SnapshotReader(m_file).verify().empty());
  }
}

TEST_F(DamagedSnapshot, RandomBitsOfRows) {
  std::mt19937_64 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same bits each time
  for (const auto& [compress, format] :
       {std::pair(0, PageFormat()), std::pair(6, PageFormat()), std::pair(0, test::q8_and_q4)}) {
    write_richest(m_file, m_self, compress, format);
    Bytes file(m_file);
    const auto extents = file.seal().extents;
    std::int64_t rows = 0;
    for (const auto& extent : extents) rows += extent.bytes;
    const SnapshotReader opened(m_file);
    const int cases = test::watched ? 100 : 5000;
    for (int i = 0; i < cases; ++i) {
      std::int64_t at = std::uniform_int_distribution<std::int64_t>(0, rows - 1)(random);
      for (const auto& extent : extents) {
        if (at < extent.bytes) {
          at += extent.begin;
          break;
        }
        at -= extent.bytes;
      }
      const int bit = static_cast<int>(random() % 8);
      SCOPED_TRACE("byte " + std::to_string(at) + ", bit " + std::to_string(bit));
      file.flip(at, bit);
      EXPECT_FALSE(opened.verify().empty());
      expect_error([&] { load(opened); }, {m_file.string(), "damaged"});
      // Whoever opens it now, too.
      if (i % 16 == 0) expect_refused(m_file, {"damaged"});
      file.flip(at, bit);
    }
    EXPECT_TRUE(opened.verify().empty());
    load(opened);
  }
}

TEST_F(DamagedSnapshot, SentencesNameWhatIsDamaged) {
  // The first and the last byte of one head's keys.
  const SnapshotReader reader(m_file);
  const SnapshotRows rows = reader.rows(1, 2, true);
  const std::string content = content_of_file(m_file);
  const std::string head(reinterpret_cast<const char*>(rows.keys.data()),
                         rows.keys.size() * sizeof(float));
  const std::size_t begin = content.find(head);
  ASSERT_NE(begin, std::string::npos);
  Bytes file(m_file);
  for (const std::size_t at : {begin, begin + head.size() - 1}) {
    file.flip(static_cast<std::int64_t>(at), 3);
    const auto damages = reader.verify();
    ASSERT_EQ(damages.size(), 1U);
    EXPECT_NE(damages[0].find("layer 1, head 2: keys are damaged: checksum"), std::string::npos)
        << damages[0];
    expect_error([&] { reader.rows(1, 2, true); }, {m_file.string(), damages[0]});
    EXPECT_EQ(reader.rows(1, 2, false).positions, rows.positions);
    EXPECT_EQ(reader.rows(1, 1, true).keys.size(),
              reader.rows(1, 1, false).positions.size() * test::story_dim);
    file.flip(static_cast<std::int64_t>(at), 3);
  }
}

TEST_F(DamagedSnapshot, Cut) {
  for (const int compress : {0, 6}) {
    write_richest(m_file, m_self, compress);
    const std::string whole = content_of_file(m_file);
    for (std::size_t sixteenth = 0; sixteenth < 16; ++sixteenth) {
      SCOPED_TRACE(sixteenth);
      m_folder.write("cut.h5", whole.substr(0, whole.size() * sixteenth / 16));
      expect_refused(m_folder.path() / "cut.h5", {"truncated, or not written by kvzap"});
    }
    // Behind what HDF5 knows of, and something after the end.
    for (const std::size_t bytes : {1, 7, 8, 16, 100}) {
      m_folder.write("cut.h5", whole.substr(0, whole.size() - bytes));
      expect_refused(m_folder.path() / "cut.h5", {"does not end with a seal"});
    }
    m_folder.write("cut.h5", whole + "x");
    expect_refused(m_folder.path() / "cut.h5", {"does not end with a seal"});
  }
}

TEST_F(DamagedSnapshot, SomebodyElses) {
  const auto refuse = [&](const std::string& name, const std::string& content,
                          std::string_view part) {
    m_folder.write(name, content);
    expect_refused(m_folder.path() / name, {part});
  };
  refuse("empty", "", "not written by kvzap");
  refuse("text", "not HDF5\n", "not written by kvzap");
  refuse("zeros", std::string(100000, '\0'), "not written by kvzap");
  expect_refused(m_folder.path() / "missing", {"cannot be opened", "No such file"});
  expect_refused(m_folder.path(), {"not a regular file"});
  expect_refused("/dev/null", {"not a regular file"});
  const fs::path other = m_folder.path() / "other.h5";
  {
    const Hdf5Handle file(H5Fcreate(other.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT),
                          H5Fclose, "H5Fcreate");
    const Hdf5Handle root(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose, "H5Gopen2");
    io::write_attribute(root, "model", std::string("theirs"));
    io::write_attribute(root, "tokens", std::int64_t{3});
  }
  expect_refused(other, {"not written by kvzap", "kvzap_format_version"});
}

// ---- What carries a valid seal all the same
// ------------------------------------------------------

/// Removes an attribute.
void drop(hid_t object, const char* name) {
  io::checked_hdf5(H5Adelete(object, name), "H5Adelete");
}
template <class Value>
void set(hid_t object, const char* name, const Value& value) {
  drop(object, name);
  io::write_attribute(object, name, value);
}
void set(hid_t object, const char* name, const char* value) {
  set(object, name, std::string(value));
}
void set(hid_t object, const char* name, int value) { set(object, name, std::int64_t{value}); }

void unlink(hid_t parent, const char* name) {
  io::checked_hdf5(H5Ldelete(parent, name, H5P_DEFAULT), "H5Ldelete");
}
Hdf5Handle group(hid_t parent, const char* name) {
  return {H5Gopen2(parent, name, H5P_DEFAULT), H5Gclose, "H5Gopen2"};
}
Hdf5Handle data_set(hid_t parent, const char* name) {
  return {H5Dopen2(parent, name, H5P_DEFAULT), H5Dclose, "H5Dopen2"};
}
/// A data set in the place of another. Without content, unless the properties give it some.
Hdf5Handle replace(hid_t parent, const char* name, hid_t type, const std::vector<hsize_t>& extents,
                   hid_t create = H5P_DEFAULT) {
  if (H5Lexists(parent, name, H5P_DEFAULT) > 0) unlink(parent, name);
  const Hdf5Handle space = io::simple_space(extents);
  return {H5Dcreate2(parent, name, type, space, H5P_DEFAULT, create, H5P_DEFAULT), H5Dclose,
          "H5Dcreate2"};
}
template <class Element>
std::vector<Element> content(hid_t set, hid_t type) {
  const Hdf5Handle space(H5Dget_space(set), H5Sclose, "H5Dget_space");
  std::vector<Element> all(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)));
  io::checked_hdf5(H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, all.data()), "H5Dread");
  return all;
}
void write(hid_t set, hid_t type, const void* data) {
  io::checked_hdf5(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), "H5Dwrite");
}
/// Changes 64-bit integers of a data set.
void set_integers(hid_t parent, const char* name,
                  const std::vector<std::pair<std::size_t, std::int64_t>>& changes) {
  const Hdf5Handle set = data_set(parent, name);
  auto all = content<std::int64_t>(set, H5T_NATIVE_INT64);
  for (const auto& [index, value] : changes) all.at(index) = value;
  write(set, H5T_NATIVE_INT64, all.data());
}
std::int64_t integer_at(hid_t parent, const char* name, std::size_t index) {
  return content<std::int64_t>(data_set(parent, name), H5T_NATIVE_INT64).at(index);
}
/// Changes positions of a head of a layer, and their checksum.
/// `row` below 0 counts from the head's end.
void set_positions(hid_t root, const char* layer_name, std::size_t head, std::int64_t row,
                   std::int32_t value) {
  const Hdf5Handle layer = group(root, layer_name);
  const auto offsets = content<std::int64_t>(data_set(layer, "offsets"), H5T_NATIVE_INT64);
  const Hdf5Handle set = data_set(layer, "positions");
  auto all = content<std::int32_t>(set, H5T_NATIVE_INT32);
  const auto begin = static_cast<std::size_t>(offsets[head]);
  const auto end = static_cast<std::size_t>(offsets[head + 1]);
  ASSERT_LT(row, offsets[head + 1] - offsets[head]);
  all.at(static_cast<std::size_t>(offsets[row < 0 ? head + 1 : head] + row)) = value;
  write(set, H5T_NATIVE_INT32, all.data());
  const Hdf5Handle checksums = data_set(layer, "crc32c");
  auto crcs = content<std::uint32_t>(checksums, H5T_NATIVE_UINT32);
  crcs[head] = files::crc32c(all.data() + begin, (end - begin) * sizeof(std::int32_t));
  write(checksums, H5T_NATIVE_UINT32, crcs.data());
}

using Change = std::function<void(hid_t root)>;

class MisleadingSnapshot : public DamagedSnapshot {
 protected:
  /// The snapshot with a change, and with a seal that is right.
  fs::path changed(const Change& change, const std::vector<io::SealedExtent>& left_out = {}) const {
    return rewritten(
        [&](const fs::path& file) {
          const Hdf5Handle access = io::serial_access();
          Hdf5Handle hdf5(H5Fopen(file.c_str(), H5F_ACC_RDWR, access), H5Fclose, "H5Fopen");
          change(group(hdf5, "/"));
          io::checked_hdf5(hdf5.close(), "H5Fclose");
        },
        left_out);
  }
  /// The same with a change of the file without its seal.
  fs::path rewritten(const std::function<void(const fs::path& file)>& change,
                     const std::vector<io::SealedExtent>& left_out = {}) const {
    const fs::path file = m_folder.path() / "changed.h5";
    fs::remove(file);
    fs::copy_file(m_file, file);
    std::int64_t hdf5_bytes = 0;
    {
      const files::FileDescriptor descriptor(file, O_RDONLY);
      hdf5_bytes = io::read_seal(descriptor.get()).value().sealed_bytes;
    }
    fs::resize_file(file, static_cast<std::uintmax_t>(hdf5_bytes));
    change(file);
    io::Seal seal;
    seal.sealed_bytes = static_cast<std::int64_t>(fs::file_size(file));
    seal.extents = left_out;
    const files::FileDescriptor descriptor(file, O_RDWR);
    seal.crc = io::crc_beside(descriptor.get(), seal.sealed_bytes, seal.extents);
    const std::vector<char> bytes = io::seal_bytes(seal);
    EXPECT_EQ(::pwrite(descriptor.get(), bytes.data(), bytes.size(), seal.sealed_bytes),
              static_cast<ssize_t>(bytes.size()));
    return file;
  }
  void refuse(const char* what, std::initializer_list<std::string_view> parts,
              const Change& change) {
    SCOPED_TRACE(what);
    expect_refused(changed(change), parts);
  }
};

constexpr std::int64_t huge = std::int64_t{1} << 62;

TEST_F(MisleadingSnapshot, NothingChangedIsRead) {
  const SnapshotReader reader(changed([](hid_t) {}));
  EXPECT_TRUE(reader.verify().empty());
  load(reader);
}

TEST_F(MisleadingSnapshot, Attributes) {
  const auto with = [&](const char* name, auto value,
                        std::initializer_list<std::string_view> parts) {
    refuse(name, parts, [&](hid_t root) { set(root, name, value); });
  };
  for (const int version : {4, 1, -1}) {
    with("kvzap_format_version", version,
         {"'kvzap_format_version': expected 2 or 3, found " + std::to_string(version)});
  }
  with("kvzap_format_version", 3, {"'kv_type'"});
  with("kvzap_format_version", "2", {"'kvzap_format_version'", "text", "expected integers"});
  with("n_layers", 0, {"'n_layers' is 0", "expected 1 to"});
  with("n_layers", 3, {"'/layers/2' is missing"});
  with("n_layers", huge, {"'n_layers' is 4611686018427387904"});
  with("n_layers", std::int64_t{2147483647}, {"'/layers/2' is missing"});
  with("n_layers", 2.0, {"'n_layers'", "floating-point", "expected integers"});
  with("n_kv_heads", 4, {"'/layers/0/offsets'", "(6)", "(5)"});
  with("n_kv_heads", std::int64_t{2147483647}, {"'/layers/0/offsets'"});
  with("n_kv_heads", -5, {"'n_kv_heads' is -5"});
  with("head_dim", 7, {"'/layers/0/keys'", "7"});
  with("head_dim", std::int64_t{2147483647}, {"'/layers/0/keys'"});
  with("head_dim", huge, {"'head_dim'"});
  with("window", 0, {"'window' is 0"});
  with("window", 50, {"window is 50"});
  with("window", 4, {"window is 4"});
  with("page_rows", 0, {"'page_rows' is 0"});
  with("tokens", -1, {"'tokens' is -1"});
  with("tokens", 20, {"'ring_first' is 40"});
  with("tokens", 44, {"'first' is 42"});
  with("tokens", 46, {"'/context/layers/0/retained': 10 for head 0"});
  with("tokens", huge, {"'tokens'"});
  with("dtype", "f64", {"f64"});
  with("dtype", "f16", {"'/layers/0/keys'", "f16"});
  with("content", "some", {"'some'"});
  with("compress", 10, {"'compress' is 10"});
  with("context_tokens", 46, {"'context_tokens' is 46", "0 to 45"});
  with("threshold", "low", {"'threshold'", "text"});
  for (const char* name : {"kvzap_format_version",
                           "kvzap_version",
                           "model",
                           "model_hash",
                           "tokenizer_hash",
                           "created",
                           "options",
                           "run_state",
                           "content",
                           "compress",
                           "prune",
                           "threshold",
                           "sink",
                           "dtype",
                           "n_layers",
                           "n_kv_heads",
                           "head_dim",
                           "window",
                           "page_rows",
                           "tokens",
                           "context_tokens"}) {
    refuse(name, {name, ""}, [&](hid_t root) { drop(root, name); });
  }
  refuse("array", {"'sink' is not a single value"}, [](hid_t root) {
    drop(root, "sink");
    const Hdf5Handle space = io::simple_space({2});
    const Hdf5Handle array(H5Acreate2(root, "sink", H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT),
                           H5Aclose, "");
  });
  // What a reader does not know does not matter.
  load(SnapshotReader(changed([](hid_t root) {
    const Hdf5Handle space = io::simple_space({2});
    const Hdf5Handle array(
        H5Acreate2(root, "later", H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, "");
    io::write_attribute(root, "later still", 1.5);
  })));
}

TEST_F(MisleadingSnapshot, QuantisedRows) {
  write_richest(m_file, m_self, 0, test::q8_and_q4);
  const auto with = [&](const char* name, auto value,
                        std::initializer_list<std::string_view> parts) {
    refuse(name, parts, [&](hid_t root) { set(root, name, value); });
  };
  with("kvzap_format_version", 2, {"'/layers/0/keys'"});
  with("kv_type", "q5", {"attribute 'kv_type'", "'q5'"});
  with("kv_type", "q4", {"'/layers/0/key_codes'", "6", "3"});
  with("kv_type", "f32", {"'/layers/0/keys'"});
  with("head_dim", std::int64_t{2147483647}, {"'head_dim'", "1048576"});
  with("window", 4, {"'/layers/0/keys'"});
  for (const char* name : {"key_codes", "key_scales", "value_codes", "value_scales"}) {
    refuse(name, {name, "is missing"}, [&](hid_t root) { unlink(group(root, "layers/1"), name); });
    refuse(name, {name, "layers/0"}, [&](hid_t root) {
      replace(group(root, "layers/0"), name, H5T_STD_U8LE, {1, 6});
    });
  }
  refuse("more rows in the ring", {"'/layers/0/keys'"},
         [](hid_t root) { set(group(root, "layers/0"), "ring_first", 39); });
}

TEST_F(MisleadingSnapshot, Offsets) {
  const auto with = [&](const std::vector<std::pair<std::size_t, std::int64_t>>& changes,
                        std::initializer_list<std::string_view> parts) {
    refuse("offsets", parts,
           [&](hid_t root) { set_integers(group(root, "layers/1"), "offsets", changes); });
  };
  with({{0, 1}}, {"'/layers/1/offsets'", "head 0"});
  with({{0, -1}}, {"'/layers/1/offsets'", "head 0"});
  with({{2, -1}}, {"'/layers/1/offsets'", "head 1"});
  with({{2, 0}}, {"'/layers/1/offsets'", "head 1"});
  with({{2, huge}}, {"'/layers/1/offsets'", "head 1"});
  with({{2, huge}, {3, huge}, {4, huge}, {5, huge}}, {"'/layers/1/offsets'", "head 1"});
  with({{1, INT64_MIN}}, {"'/layers/1/offsets'", "head 0"});
  with({{0, INT64_MIN}, {1, INT64_MAX}}, {"'/layers/1/offsets'", "head 0"});
  // One row less than there are.
  refuse("last", {"'/layers/1/positions'"}, [](hid_t root) {
    const Hdf5Handle layer = group(root, "layers/1");
    set_integers(layer, "offsets", {{5, integer_at(layer, "offsets", 5) - 1}});
  });
  refuse("type", {"'/layers/0/offsets'", "expected int64"},
         [](hid_t root) { replace(group(root, "layers/0"), "offsets", H5T_STD_I32LE, {6}); });
  refuse("rank", {"'/layers/0/offsets'", "(6, 1)", "(6)"}, [](hid_t root) {
    replace(group(root, "layers/0"), "offsets", H5T_STD_I64LE, {6, 1});
  });
  refuse("absent content", {"'/layers/0/offsets'", "0 bytes in the file"},
         [](hid_t root) { replace(group(root, "layers/0"), "offsets", H5T_STD_I64LE, {6}); });
}

TEST_F(MisleadingSnapshot, DataSets) {
  const auto rows = [](hid_t layer) {
    return static_cast<hsize_t>(integer_at(layer, "offsets", 5));
  };
  for (const char* name :
       {"offsets", "positions", "scores", "judged", "keys", "values", "crc32c"}) {
    for (const char* layer : {"layers/1", "context/layers/0"}) {
      const std::string path = std::string("/") + layer + "/" + name;
      refuse(path.c_str(), {path, "is missing"},
             [&](hid_t root) { unlink(group(root, layer), name); });
    }
    refuse(name, {name, "no data set"}, [&](hid_t root) {
      const Hdf5Handle layer = group(root, "layers/0");
      unlink(layer, name);
      const Hdf5Handle made(H5Gcreate2(layer, name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                            H5Gclose, "H5Gcreate2");
    });
    refuse(name, {name, "floating-point numbers of 8 bytes"}, [&](hid_t root) {
      const Hdf5Handle layer = group(root, "layers/0");
      replace(layer, name, H5T_IEEE_F64LE, {rows(layer)});
    });
    refuse(name, {name, "link to elsewhere"}, [&](hid_t root) {
      const Hdf5Handle layer = group(root, "layers/0");
      unlink(layer, name);
      io::checked_hdf5(H5Lcreate_external("other.h5", "/x", layer, name, H5P_DEFAULT, H5P_DEFAULT),
                       "");
    });
    refuse(name, {name, "link to elsewhere"}, [&](hid_t root) {
      const Hdf5Handle layer = group(root, "layers/0");
      unlink(layer, name);
      io::checked_hdf5(H5Lcreate_soft("/layers/1", layer, name, H5P_DEFAULT, H5P_DEFAULT), "");
    });
  }
  for (const char* path : {"layers", "state", "token_ids", "layers/0"}) {
    refuse(path, {path, "is missing"}, [&](hid_t root) { unlink(root, path); });
  }
  refuse("context/layers", {"'/context/layers' is missing"},
         [&](hid_t root) { unlink(root, "context/layers"); });
  refuse("layers is a data set", {"'/layers' is no group"},
         [](hid_t root) { replace(root, "layers", H5T_STD_I64LE, {6}); });
  refuse("content in another file", {"'/layers/0/keys' is in another file"}, [&](hid_t root) {
    const Hdf5Handle layer = group(root, "layers/0");
    const Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
    H5Pset_external(create, "/etc/passwd", 0, H5F_UNLIMITED);
    replace(layer, "keys", H5T_IEEE_F32LE, {rows(layer), 6}, create);
  });
  refuse("content never written", {"'/layers/0/values'", "not in the file"}, [&](hid_t root) {
    const Hdf5Handle layer = group(root, "layers/0");
    replace(layer, "values", H5T_IEEE_F32LE, {rows(layer), 6});
  });
  refuse("chunks never written", {"'/layers/0/values' has 0 chunks"}, [&](hid_t root) {
    const Hdf5Handle layer = group(root, "layers/0");
    const Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
    const hsize_t chunk[] = {4, 6};
    H5Pset_chunk(create, 2, chunk);
    replace(layer, "values", H5T_IEEE_F32LE, {rows(layer), 6}, create);
  });
  refuse("another filter", {"'/layers/0/scores' has filter"}, [&](hid_t root) {
    const Hdf5Handle layer = group(root, "layers/0");
    const Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
    const hsize_t chunk[] = {4};
    H5Pset_chunk(create, 1, chunk);
    H5Pset_fletcher32(create);
    replace(layer, "scores", H5T_IEEE_F32LE, {rows(layer)}, create);
  });
  // HDF5 would read on after what such a chunk inflates to.
  for (const int more : {-1, 1}) {
    refuse("a chunk of another size", {"layer 0, head 0: scores", "does not inflate to"},
           [&](hid_t root) {
             const Hdf5Handle layer = group(root, "layers/0");
             const hsize_t count = rows(layer);
             const Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
             H5Pset_chunk(create, 1, &count);
             H5Pset_deflate(create, 6);
             replace(layer, "scores", H5T_IEEE_F32LE, {count}, create);
             const std::vector<Bytef> plain(count * sizeof(float) + more);
             std::vector<Bytef> deflated(plain.size() + 100);
             uLongf bytes = deflated.size();
             EXPECT_EQ(::compress(deflated.data(), &bytes, plain.data(), plain.size()), Z_OK);
             const hsize_t offset = 0;
             EXPECT_GE(H5Dwrite_chunk(data_set(layer, "scores"), H5P_DEFAULT, 0, &offset, bytes,
                                      deflated.data()),
                       0);
           });
  }
  refuse("chunks of half a row", {"'/layers/0/keys' has chunks of (4, 3)", "whole rows"},
         [&](hid_t root) {
           const Hdf5Handle layer = group(root, "layers/0");
           const Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
           const hsize_t chunk[] = {4, 3};
           H5Pset_chunk(create, 2, chunk);
           replace(layer, "keys", H5T_IEEE_F32LE, {rows(layer), 6}, create);
         });
  refuse("a small set in chunks", {"'/token_ids'", "chunks"}, [](hid_t root) {
    const Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
    const hsize_t chunk[] = {1024};
    H5Pset_chunk(create, 1, chunk);
    replace(root, "token_ids", H5T_STD_I32LE, {hsize_t{1} << 50}, create);
  });
  refuse("more ids than bytes", {"'/token_ids'", "more than the file's"},
         [](hid_t root) { replace(root, "token_ids", H5T_STD_I32LE, {hsize_t{1} << 60}); });
  refuse("logits of another type", {"'/logits'", "expected float32"},
         [](hid_t root) { replace(root, "logits", H5T_IEEE_F64LE, {3}); });
}

// Gigabytes of rows that are nowhere.
TEST_F(MisleadingSnapshot, AbsurdExtents) {
  const auto enlarge = [&](bool in_chunks, hid_t root) {
    constexpr std::int64_t most = 2147483647;
    set(root, "tokens", most);
    set(root, "n_kv_heads", 1);
    unlink(root, "context");
    const Hdf5Handle layer = group(root, "layers/0");
    set(layer, "ring_first", most);
    const std::int64_t offsets[] = {0, most};
    write(replace(layer, "offsets", H5T_STD_I64LE, {2}), H5T_NATIVE_INT64, offsets);
    const Hdf5Handle create = io::property_list(H5P_DATASET_CREATE);
    const hsize_t chunk[] = {1 << 20};
    if (in_chunks) H5Pset_chunk(create, 1, chunk);
    replace(layer, "positions", H5T_STD_I32LE, {hsize_t{most}}, create);
  };
  refuse("in one run", {"'/layers/0/positions'", "not in the file"},
         [&](hid_t root) { enlarge(false, root); });
  refuse("in chunks", {"'/layers/0/positions' has 8589934588 bytes, more than a file of"},
         [&](hid_t root) { enlarge(true, root); });
}

TEST_F(MisleadingSnapshot, RowsAndChecksums) {
  refuse("not ascending", {"layer 0, head 1: row 2 has position"},
         [](hid_t root) { set_positions(root, "layers/0", 1, 2, 0); });
  refuse("negative", {"layer 0, head 1: row 0 has position -1"},
         [](hid_t root) { set_positions(root, "layers/0", 1, 0, -1); });
  refuse("of the ring", {"layer 1, head 3", "has position 43, after 43; 45 tokens, 5 of them"},
         [](hid_t root) { set_positions(root, "layers/1", 3, -1, 43); });
  refuse("before the ring", {"layer 1, head 4", "has position 40, after"},
         [](hid_t root) { set_positions(root, "layers/1", 4, -6, 40); });
  refuse("wrong checksum", {"layer 0, head 2", "positions are damaged"}, [](hid_t root) {
    const Hdf5Handle set = data_set(root, "layers/0/crc32c");
    auto crcs = content<std::uint32_t>(set, H5T_NATIVE_UINT32);
    crcs[2] ^= 1;
    write(set, H5T_NATIVE_UINT32, crcs.data());
  });
  refuse("kinds", {"'/layers/0/crc32c' has no checksums of 'keys'"}, [](hid_t root) {
    set(data_set(root, "layers/0/crc32c"), "kinds",
        "positions scores judged kays values recent_queries");
  });
  refuse("fewer kinds", {"'/layers/0/crc32c' has checksums of 6 kinds", "names 5"}, [](hid_t root) {
    set(data_set(root, "layers/0/crc32c"), "kinds", "positions scores judged keys values");
  });
  refuse("no kinds", {"'kinds'"},
         [](hid_t root) { drop(data_set(root, "layers/0/crc32c"), "kinds"); });
  refuse("queries of a part of the heads", {"'/layers/0/recent_queries'", "(9, 3, 6)"},
         [](hid_t root) {
           replace(group(root, "layers/0"), "recent_queries", H5T_IEEE_F32LE, {9, 3, 6});
         });
  refuse("more queries than tokens", {"'/layers/0/recent_queries'", "at most 45 tokens"},
         [](hid_t root) {
           replace(group(root, "layers/0"), "recent_queries", H5T_IEEE_F32LE, {10, 46, 6});
         });
  refuse("queries from nowhere", {"'/layers/0/recent_queries'", "'first' is 43"},
         [](hid_t root) { set(data_set(root, "layers/0/recent_queries"), "first", 43); });
  refuse("context of more tokens", {"'tokens' is 46"},
         [](hid_t root) { set(group(root, "context"), "tokens", 46); });
  refuse("context of fewer tokens", {"ring_first"},
         [](hid_t root) { set(group(root, "context"), "tokens", 39); });
  for (const std::int64_t rows : {std::int64_t{-1}, std::int64_t{45}, huge}) {
    refuse("rows of the context", {"'/context/layers/0/retained'", "head 1"}, [&](hid_t root) {
      set_integers(group(root, "context/layers/0"), "retained", {{1, rows}});
    });
  }
  refuse("counts", {"'judged' is -1"}, [](hid_t root) { set(group(root, "state"), "judged", -1); });
}

// HDF5 1.10 would read beyond the heap of texts.
TEST_F(MisleadingSnapshot, TextLongerThanItsHeap) {
  const auto lengthen = [](const fs::path& file) {
    const std::size_t heap = content_of_file(file).find("GCOL");
    ASSERT_NE(heap, std::string::npos);
    constexpr std::size_t length_of_first = 24;
    Bytes(file).flip(static_cast<std::int64_t>(heap + length_of_first + 2), 0);
  };
  expect_refused(rewritten(lengthen), {"the global heap at byte", "does not fit it"});
}

// Bytes without any checksum could be changed without anybody knowing.
TEST_F(MisleadingSnapshot, SealThatLeavesOutWhatIsNoRows) {
  expect_refused(changed([](hid_t) {}, {{600, 50, {}}}), {"bytes 600 to 650 have no checksum"});
}

// ---- On several ranks
// ----------------------------------------------------------------------------

TEST(SnapshotDamage, OfOneRanksRowsIsToldToAll) {
  const test::SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = story_partition(comm.size());
  const fs::path file = folder / "cache.h5";
  write_richest(file, comm, 0);
  const SnapshotReader reader(file);
  // The last rank's first head in layer 1.
  const int head = partition.heads(1, comm.size() - 1).front();
  if (comm.is_root()) {
    const SnapshotRows rows = reader.rows(1, head, true);
    const std::string content = content_of_file(file);
    const std::size_t at = content.find(std::string(
        reinterpret_cast<const char*>(rows.values.data()), rows.values.size() * sizeof(float)));
    ASSERT_NE(at, std::string::npos);
    Bytes(file).flip(static_cast<std::int64_t>(at) + 5, 1);
  }
  comm.barrier();
  const auto cache = story_cache<float>(partition, comm.rank());
  const std::string what = "layer 1, head " + std::to_string(head) + ": values are damaged";
  EXPECT_THROW(load_snapshot(reader, *cache, partition, comm), AgreedError);
  expect_error([&] { load_snapshot(reader, *cache, partition, comm); }, {file.string(), what});
  EXPECT_TRUE(cache->sequences().empty());
  EXPECT_EQ(cache->pool().pages_in_use(), 0U);
}

}  // namespace
}  // namespace kvzap
