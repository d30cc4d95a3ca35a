// Snapshots: content against an oracle that knows nothing of the cache, at any number of ranks, and
// what remains after a failure.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <kvzap/engine/snapshot.hpp>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "files/crc32c.hpp"
#include "files/temporary_file.hpp"
#include "io/seal.hpp"
#include "mpi/ranks.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using test::FirstRanks;
using test::SharedFolder;

std::uint64_t hash(std::initializer_list<std::int64_t> parts) {
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  for (std::int64_t part : parts) {
    state = (state ^ static_cast<std::uint64_t>(part)) * 0xbf58476d1ce4e5b9u;
    state ^= state >> 29;
  }
  return state;
}

float uniform(std::uint64_t bits) { return static_cast<float>(bits >> 40) / 8388608.0f - 1.0f; }

constexpr int n_layers = 2;
constexpr int n_heads = 5;
constexpr int head_dim = 6;
constexpr int window = 8;
constexpr int silent_head = 3;  // of layer 1: nothing of it survives the ring
const EvictionRule rule{0.1f, 0, true};

/// What token `position` of text `text` is given, by global head.
float score(int text, int layer, int head, std::int64_t position) {
  if (layer == 1 && head == silent_head) return -100;
  // Heads keep different shares.
  return uniform(hash({1, text, layer, head, position})) + 0.3f * static_cast<float>(head - 2);
}

template <class Value>
Value element(int what, int text, int layer, int head, std::int64_t position, int d) {
  const std::uint64_t bits = hash({2, what, text, layer, head, position, d});
  if (bits % 97 == 0) return Value(std::numeric_limits<float>::infinity());
  if (bits % 89 == 0) return Value(-1e-6f);  // subnormal in binary16
  return Value(3.0f * uniform(bits));
}

/// Tokens that a sequence was given: `shared` of text 0, then more of `text`.
struct Story {
  int text;
  std::int64_t shared;
  std::int64_t tokens;
  int text_at(std::int64_t position) const { return position < shared ? 0 : text; }
  std::vector<std::int64_t> kept(int layer, int head) const {
    std::vector<std::int64_t> positions;
    for (std::int64_t p = 0; p < tokens; ++p) {
      if (p >= tokens - window || score(text_at(p), layer, head, p) >= rule.threshold) {
        positions.push_back(p);
      }
    }
    return positions;
  }
};
constexpr Story original{0, 37, 48};
constexpr Story forked{1, 37, 60};

HeadPartition uneven_partition(int ranks) {
  return HeadPartition::balanced({{9, 50, 3, 40, 8}, {1, 2, 30, 4, 100}}, ranks);
}

void append(KVCache& cache, SequenceId sequence, const HeadPartition& partition, int rank,
            const Story& story, std::int64_t from, std::int64_t to,
            const EvictionRule& judge = rule) {
  with_value_type(cache.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    for (int layer = 0; layer < n_layers; ++layer) {
      const auto& heads = partition.heads(layer, rank);
      Kokkos::View<Value***, Kokkos::LayoutRight, Kokkos::HostSpace> keys("k", to - from,
                                                                          heads.size(), head_dim);
      Kokkos::View<Value***, Kokkos::LayoutRight, Kokkos::HostSpace> values("v", to - from,
                                                                            heads.size(), head_dim);
      Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace> scores("s", heads.size(),
                                                                           to - from);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        for (std::int64_t p = from; p < to; ++p) {
          const int text = story.text_at(p);
          scores(h, p - from) = score(text, layer, heads[h], p);
          for (int d = 0; d < head_dim; ++d) {
            keys(p - from, h, d) = element<Value>(0, text, layer, heads[h], p, d);
            values(p - from, h, d) = element<Value>(1, text, layer, heads[h], p, d);
          }
        }
      }
      const auto on_device = [](const auto& view) {
        return Kokkos::create_mirror_view_and_copy(MemorySpace{}, view);
      };
      cache.append(ExecutionSpace{}, sequence, layer, on_device(keys), on_device(values),
                   on_device(scores), judge);
    }
  });
}

/// A cache with a sequence, 0, and a fork of it, 1, that went on differently.
template <class Value>
std::unique_ptr<KVCache> forked_cache(const HeadPartition& partition, int rank) {
  CacheShape shape;
  for (int layer = 0; layer < n_layers; ++layer) {
    shape.heads.push_back(static_cast<int>(partition.heads(layer, rank).size()));
  }
  shape.head_dim = head_dim;
  shape.window = window;
  shape.page_rows = 4;
  auto cache = std::make_unique<KVCache>(DTypeOf<Value>::value, shape);
  const SequenceId first = cache->add_sequence();
  append(*cache, first, partition, rank, original, 0, original.shared);
  const SequenceId second = cache->fork(first);
  append(*cache, second, partition, rank, forked, forked.shared, forked.tokens);
  append(*cache, first, partition, rank, original, original.shared, original.tokens);
  return cache;
}

SnapshotInfo some_info() {
  SnapshotInfo info;
  info.model = "models/größer";
  info.created = "2026-01-02T03:04:05Z";
  info.prune = "kvzap";
  info.threshold = rule.threshold;
  info.sink = 4;
  info.further = {{"seed", std::int64_t{-7}}, {"wall_s", 1.5}, {"note", std::string()}};
  return info;
}

/// Reads with the plain C interface. Rank 0 only.
class Reader {
 public:
  explicit Reader(const fs::path& file)
      : m_file(H5Fopen(file.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)) {
    EXPECT_GE(m_file, 0);
  }
  ~Reader() { EXPECT_GE(H5Fclose(m_file), 0); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  template <class Number>
  Number attribute(const char* name, hid_t memory_type, const std::string& object = "/") const {
    Number value{};
    const hid_t attribute = H5Aopen_by_name(m_file, object.c_str(), name, H5P_DEFAULT, H5P_DEFAULT);
    EXPECT_GE(attribute, 0) << object << " " << name;
    EXPECT_GE(H5Aread(attribute, memory_type, &value), 0) << object << " " << name;
    H5Aclose(attribute);
    return value;
  }
  std::int64_t integer(const char* name, const std::string& object = "/") const {
    return attribute<std::int64_t>(name, H5T_NATIVE_INT64, object);
  }
  std::string text(const char* name, const std::string& object = "/") const {
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    H5Tset_cset(type, H5T_CSET_UTF8);
    char* const raw = attribute<char*>(name, type, object);
    H5Tclose(type);
    const std::string text = raw ? raw : "(null)";
    H5free_memory(raw);
    return text;
  }

  bool has(const std::string& name) const {
    return H5Lexists(m_file, name.c_str(), H5P_DEFAULT) > 0;
  }

  /// Elements of a data set with `extents`; memory_type -1 takes the file's own bits.
  template <class Element>
  std::vector<Element> data(const std::string& name, const std::vector<hsize_t>& extents,
                            hid_t memory_type) const {
    const hid_t set = H5Dopen2(m_file, name.c_str(), H5P_DEFAULT);
    EXPECT_GE(set, 0) << name;
    const hid_t space = H5Dget_space(set);
    std::vector<hsize_t> found(H5Sget_simple_extent_ndims(space));
    H5Sget_simple_extent_dims(space, found.data(), nullptr);
    EXPECT_EQ(found, extents) << name;
    const hid_t own_type = H5Dget_type(set);
    std::vector<Element> content(H5Sget_simple_extent_npoints(space));
    if (memory_type < 0) {
      EXPECT_EQ(H5Tget_size(own_type), sizeof(Element));
    }
    EXPECT_GE(H5Dread(set, memory_type < 0 ? own_type : memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT,
                      content.data()),
              0);
    H5Tclose(own_type);
    H5Sclose(space);
    H5Dclose(set);
    return content;
  }

 private:
  hid_t m_file;
};

/// What a group of rows, "/layers/N" or "/context/layers/N", must hold of each head.
struct HeadOracle {
  std::vector<std::int64_t> positions;
  std::int64_t in_ring = 0;  // of those
};

/// The rows as File, and that each data set's checksums are those of its bytes.
template <class Value, class File>
void expect_rows(const Reader& reader, const std::string& group, const Story& story, int layer,
                 const std::vector<HeadOracle>& heads, SnapshotContent content,
                 const std::vector<std::vector<float>>& queries = {}) {
  SCOPED_TRACE(group);
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int32_t> positions;
  std::vector<float> scores;
  std::vector<std::uint8_t> judged;
  std::vector<File> elements[2];
  for (int head = 0; head < n_heads; ++head) {
    for (std::int64_t p : heads[head].positions) {
      positions.push_back(static_cast<std::int32_t>(p));
      scores.push_back(score(story.text_at(p), layer, head, p));
      for (int what : {0, 1}) {
        for (int d = 0; d < head_dim; ++d) {
          const auto held = element<Value>(what, story.text_at(p), layer, head, p, d);
          elements[what].push_back(File(static_cast<float>(held)));
        }
      }
    }
    judged.resize(positions.size() - static_cast<std::size_t>(heads[head].in_ring), 1);
    judged.resize(positions.size(), 0);
    offsets.push_back(static_cast<std::int64_t>(positions.size()));
  }
  EXPECT_EQ(reader.data<std::int64_t>(group + "/offsets", {n_heads + 1}, H5T_NATIVE_INT64),
            offsets);
  std::string kinds;
  std::vector<std::uint32_t> crcs;
  const auto expect = [&](const std::string& name, const std::vector<hsize_t>& extents,
                          const auto& expected) {
    using Element = typename std::decay_t<decltype(expected)>::value_type;
    const auto found = reader.data<Element>(group + "/" + name, extents, -1);
    ASSERT_EQ(found.size(), expected.size()) << name;
    const auto* const bytes = reinterpret_cast<const char*>(found.data());
    if (!found.empty()) {  // memcmp takes no null pointer
      EXPECT_EQ(std::memcmp(bytes, expected.data(), found.size() * sizeof(Element)), 0) << name;
    }
    kinds += (kinds.empty() ? "" : " ") + name;
    for (int head = 0; head < n_heads; ++head) {
      const std::size_t rows = positions.empty() || name == "recent_queries" ? 1 : positions.size();
      std::size_t begin = offsets[head] * (found.size() / rows);
      std::size_t end = offsets[head + 1] * (found.size() / rows);
      if (name == "recent_queries") {
        begin = head * found.size() / n_heads;
        end = (head + 1) * found.size() / n_heads;
      }
      crcs.push_back(
          files::crc32c(bytes + begin * sizeof(Element), (end - begin) * sizeof(Element)));
    }
  };
  expect("positions", {positions.size()}, positions);
  if (content != SnapshotContent::positions) expect("scores", {positions.size()}, scores);
  expect("judged", {positions.size()}, judged);
  if (content == SnapshotContent::all) {
    expect("keys", {positions.size(), head_dim}, elements[0]);
    expect("values", {positions.size(), head_dim}, elements[1]);
    for (int what : {0, 1}) {
      // HDF5 itself must understand the type.
      const auto converted = reader.data<float>(group + (what == 0 ? "/keys" : "/values"),
                                                {positions.size(), head_dim}, H5T_NATIVE_FLOAT);
      for (std::size_t i = 0; i < converted.size(); ++i) {
        ASSERT_EQ(converted[i], static_cast<float>(elements[what][i])) << what << " " << i;
      }
    }
    if (!queries.empty()) {
      std::vector<float> all;
      for (const auto& of : queries) all.insert(all.end(), of.begin(), of.end());
      expect("recent_queries", {2 * n_heads, all.size() / (2 * n_heads * head_dim), head_dim}, all);
    }
  } else {
    for (const char* name : {"/keys", "/values", "/recent_queries"}) {
      EXPECT_FALSE(reader.has(group + name)) << name;
    }
  }
  EXPECT_EQ(reader.has(group + "/scores"), content != SnapshotContent::positions);
  EXPECT_EQ(reader.data<std::uint32_t>(group + "/crc32c", {crcs.size() / n_heads, n_heads},
                                       H5T_NATIVE_UINT32),
            crcs);
  EXPECT_EQ(reader.text("kinds", group + "/crc32c"), kinds);
}

/// What every head of a layer still has of the story.
std::vector<HeadOracle> oracle(const Story& story, int layer) {
  std::vector<HeadOracle> heads;
  for (int head = 0; head < n_heads; ++head) {
    heads.push_back({story.kept(layer, head), std::min<std::int64_t>(window, story.tokens)});
  }
  return heads;
}

void expect_seal(const fs::path& file) {
  const files::FileDescriptor descriptor(file, O_RDONLY);
  EXPECT_TRUE(io::read_seal(descriptor.get()).has_value());
}

template <class Value, class File = Value>
void expect_content(const fs::path& file, const Story& story,
                    SnapshotContent content = SnapshotContent::all) {
  expect_seal(file);
  const Reader reader(file);
  for (int layer = 0; layer < n_layers; ++layer) {
    const std::string group = "/layers/" + std::to_string(layer);
    EXPECT_EQ(reader.integer("ring_first", group), 0);
    expect_rows<Value, File>(reader, group, story, layer, oracle(story, layer), content);
  }
}

void expect_attributes(const fs::path& file, const Story& story, std::string_view dtype) {
  const Reader reader(file);
  EXPECT_EQ(reader.integer("kvzap_format_version"), 2);
  EXPECT_EQ(reader.integer("n_layers"), n_layers);
  EXPECT_EQ(reader.integer("n_kv_heads"), n_heads);
  EXPECT_EQ(reader.integer("head_dim"), head_dim);
  EXPECT_EQ(reader.integer("window"), window);
  EXPECT_EQ(reader.integer("page_rows"), 4);
  EXPECT_EQ(reader.integer("tokens"), story.tokens);
  EXPECT_EQ(reader.integer("sink"), 4);
  EXPECT_EQ(reader.integer("seed"), -7);
  EXPECT_EQ(reader.attribute<float>("threshold", H5T_NATIVE_FLOAT), rule.threshold);
  EXPECT_EQ(reader.attribute<double>("wall_s", H5T_NATIVE_DOUBLE), 1.5);
  EXPECT_EQ(reader.text("dtype"), dtype);
  EXPECT_EQ(reader.text("model"), "models/größer");
  EXPECT_EQ(reader.text("prune"), "kvzap");
  EXPECT_EQ(reader.text("note"), "");
}

std::string file_bytes(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Runs `call` and expects AgreedError with `part` in it, on this rank.
template <class Call>
void expect_agreed_error(Call&& call, const std::string& part) {
  try {
    call();
  } catch (const AgreedError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    return;
  }
  ADD_FAILURE() << "no AgreedError was thrown; expected one with '" << part << "'";
}

template <class Value>
void check_at_every_number_of_ranks() {
  const SharedFolder folder;
  std::vector<std::string> bytes;
  const int world = Communicator::world().size();
  for (int ranks : std::set<int>{1, std::min(2, world), world}) {
    SCOPED_TRACE(ranks);
    const FirstRanks first(ranks);
    if (!first.has_this_rank()) continue;
    const Communicator comm = first.communicator();
    const HeadPartition partition = uneven_partition(ranks);
    const auto cache = forked_cache<Value>(partition, comm.rank());
    const std::string name = std::to_string(ranks) + "-ranks.h5";
    const std::string fork_name = std::to_string(ranks) + "-ranks-fork.h5";
    write_snapshot(folder / name, *cache, 0, partition, comm, some_info());
    write_snapshot(folder / fork_name, *cache, 1, partition, comm, some_info());
    if (!comm.is_root()) continue;
    expect_attributes(folder / name, original, name_of(DTypeOf<Value>::value));
    expect_attributes(folder / fork_name, forked, name_of(DTypeOf<Value>::value));
    expect_content<Value>(folder / name, original);
    expect_content<Value>(folder / fork_name, forked);
    bytes.push_back(file_bytes(folder / name));
  }
  for (const std::string& other : bytes) EXPECT_TRUE(other == bytes.front());
}

TEST(Snapshot, FloatRowsReadBack) { check_at_every_number_of_ranks<float>(); }
TEST(Snapshot, HalfRowsReadBack) { check_at_every_number_of_ranks<half>(); }
TEST(Snapshot, Bfloat16RowsReadBack) { check_at_every_number_of_ranks<bfloat16>(); }

/// What an engine, a generator and a program may add, of this rank.
struct Extras {
  SnapshotInfo info = some_info();
  std::vector<std::vector<std::vector<float>>> queries;  // (layer, head of the model)
};

constexpr std::int64_t query_tokens = 3;

Extras some_extras(const HeadPartition& partition, int rank) {
  Extras extras;
  SnapshotInfo& info = extras.info;
  info.model_hash = "sha256:abc";
  info.tokenizer_hash = "sha256:def";
  info.kvzap_version = "1.2.3";
  info.options = R"({"policy": "kvzap"})";
  info.run_state = R"({"text": ")" + std::string(1 << 20, 'x') + "\"}";
  info.token_ids = {5, 0, 7, 2147483647, 11};
  info.context_tokens = 3;
  info.logits = {0.5f, -1e30f, 3.0f};
  info.state = {{"phase", 2}, {"steps", -1}};
  for (int layer = 0; layer < n_layers; ++layer) {
    extras.queries.emplace_back();
    info.recent_queries.push_back({40 + layer, query_tokens, {}});
    for (int head = 0; head < n_heads; ++head) {
      std::vector<float> values;
      for (int i = 0; i < 2 * query_tokens * head_dim; ++i) {
        values.push_back(uniform(hash({4, layer, head, i})));
      }
      const auto& mine = partition.heads(layer, rank);
      if (std::find(mine.begin(), mine.end(), head) != mine.end()) {
        auto& held = info.recent_queries.back().values;
        held.insert(held.end(), values.begin(), values.end());
      }
      extras.queries.back().push_back(std::move(values));
    }
  }
  return extras;
}

struct Written {
  SnapshotOptions options;
  const char* name;
};

template <class Value, class File>
void expect_everything(const fs::path& file, const Story& story, std::int64_t context_tokens,
                       const Written& how, const Extras& extras) {
  expect_seal(file);
  const Reader reader(file);
  EXPECT_EQ(reader.text("content"), name_of(how.options.content));
  EXPECT_EQ(reader.integer("compress"), how.options.compress);
  EXPECT_EQ(reader.text("dtype"), name_of(DTypeOf<File>::value));
  EXPECT_EQ(reader.text("created"), extras.info.created);
  EXPECT_EQ(reader.text("model_hash"), extras.info.model_hash);
  EXPECT_EQ(reader.text("tokenizer_hash"), extras.info.tokenizer_hash);
  EXPECT_EQ(reader.text("kvzap_version"), extras.info.kvzap_version);
  EXPECT_EQ(reader.text("options"), extras.info.options);
  EXPECT_EQ(reader.text("run_state"), extras.info.run_state);
  EXPECT_EQ(reader.integer("context_tokens"), 3);
  EXPECT_EQ(reader.integer("phase", "/state"), 2);
  EXPECT_EQ(reader.integer("steps", "/state"), -1);
  EXPECT_EQ(reader.data<std::int32_t>("/token_ids", {5}, H5T_NATIVE_INT32), extras.info.token_ids);
  EXPECT_EQ(reader.data<float>("/logits", {3}, H5T_NATIVE_FLOAT), extras.info.logits);
  const Story context{story.text, story.shared, context_tokens};
  for (const auto& [group, of] : {std::pair("/state", story), std::pair("/context", context)}) {
    std::int64_t judged = 0;
    std::int64_t evicted = 0;
    for (int layer = 0; layer < n_layers; ++layer) {
      for (int head = 0; head < n_heads; ++head) {
        judged += of.tokens - window;
        evicted += of.tokens - static_cast<std::int64_t>(of.kept(layer, head).size());
      }
    }
    EXPECT_EQ(reader.integer("judged", group), judged);
    EXPECT_EQ(reader.integer("evicted", group), evicted);
    EXPECT_EQ(reader.integer("non_finite", group), 0);
  }
  EXPECT_EQ(reader.integer("tokens", "/context"), context_tokens);
  for (int layer = 0; layer < n_layers; ++layer) {
    const std::string group = "/layers/" + std::to_string(layer);
    expect_rows<Value, File>(reader, group, story, layer, oracle(story, layer), how.options.content,
                             extras.queries[layer]);
    if (how.options.content == SnapshotContent::all) {
      EXPECT_EQ(reader.integer("first", group + "/recent_queries"), 40 + layer);
    }
    std::vector<HeadOracle> rings;
    std::vector<std::int64_t> retained;
    for (const HeadOracle& head : oracle(context, layer)) {
      rings.push_back({{head.positions.end() - window, head.positions.end()}, window});
      retained.push_back(static_cast<std::int64_t>(head.positions.size()) - window);
    }
    EXPECT_EQ(reader.integer("ring_first", "/context" + group), 0);
    EXPECT_EQ(
        reader.data<std::int64_t>("/context" + group + "/retained", {n_heads}, H5T_NATIVE_INT64),
        retained);
    expect_rows<Value, File>(reader, "/context" + group, context, layer, rings,
                             how.options.content);
  }
}

/// All that a file can hold, written while the sequence that was forked goes on.
template <class Value, class File>
void check_everything(const Written& how) {
  SCOPED_TRACE(how.name);
  const SharedFolder folder;
  std::vector<std::string> bytes;
  const int world = Communicator::world().size();
  for (int ranks : std::set<int>{1, std::min(2, world), world}) {
    SCOPED_TRACE(ranks);
    const FirstRanks first(ranks);
    if (!first.has_this_rank()) continue;
    const Communicator comm = first.communicator();
    const HeadPartition partition = uneven_partition(ranks);
    const auto cache = forked_cache<Value>(partition, comm.rank());
    // Sequence 0 as it was, its fork four tokens on, and sequence 0 once more while that is
    // written.
    const Story later{original.text, original.shared, original.tokens + 4};
    auto context = std::make_optional(cache->checkpoint(0));
    append(*cache, 0, partition, comm.rank(), later, original.tokens, later.tokens);
    const SequenceId kept = cache->fork(0);
    Extras extras = some_extras(partition, comm.rank());
    const fs::path file = folder / (std::to_string(ranks) + ".h5");
    const auto writing =
        begin_snapshot(file, *cache, kept, partition, comm, extras.info, how.options, &*context);
    // Gone before the file is written.
    extras.info.recent_queries.clear();
    context.reset();
    for (int more = 0; !writing->advance(); ++more) {
      const Story goes_on{original.text, original.shared, later.tokens + more + 1};
      append(*cache, 0, partition, comm.rank(), goes_on, later.tokens + more, goes_on.tokens);
    }
    EXPECT_EQ(writing->file_bytes(), static_cast<std::int64_t>(fs::file_size(file)));
    cache->free_sequence(kept);
    if (!comm.is_root()) continue;
    expect_everything<Value, File>(file, later, original.tokens, how, extras);
    bytes.push_back(file_bytes(file));
  }
  for (const std::string& other : bytes) EXPECT_TRUE(other == bytes.front());
}

TEST(Snapshot, Everything) {
  check_everything<bfloat16, bfloat16>({{}, "as it is"});
  check_everything<half, half>({{SnapshotContent::all, 6, std::nullopt}, "compressed"});
}

TEST(Snapshot, ConvertedWhenWritten) {
  check_everything<float, half>({{SnapshotContent::all, 0, DType::f16}, "f32 to f16"});
  check_everything<half, float>({{SnapshotContent::all, 0, DType::f32}, "f16 to f32"});
  check_everything<half, bfloat16>({{SnapshotContent::all, 1, DType::bf16}, "f16 to bf16"});
}

TEST(Snapshot, Maps) {
  check_everything<float, float>({{SnapshotContent::scores, 0, std::nullopt}, "scores"});
  check_everything<half, half>({{SnapshotContent::positions, 9, std::nullopt}, "positions"});
}

// A rank whose heads lose a row of the ring empties it, others do not; the file has one for all.
TEST(Snapshot, RingsThatSomeRanksHaveEmptied) {
  const Communicator comm = Communicator::world();
  if (comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  const SharedFolder folder;
  const HeadPartition partition = uneven_partition(comm.size());
  const auto cache = forked_cache<float>(partition, comm.rank());
  for (int layer = 0; layer < n_layers; ++layer) {
    const auto& heads = partition.heads(layer, comm.rank());
    const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, Kokkos::HostSpace> keep(
        "keep", heads.size(), original.tokens);
    Kokkos::deep_copy(keep, 1);
    if (comm.is_root()) keep(0, cache->rows(0, layer, 0) - window) = 0;
    cache->evict(ExecutionSpace(), 0, layer,
                 Kokkos::create_mirror_view_and_copy(MemorySpace{}, keep));
  }
  const auto context = cache->checkpoint(0);
  const Story later{original.text, original.shared, original.tokens + 4};
  append(*cache, 0, partition, comm.rank(), later, original.tokens, later.tokens,
         EvictionRule::keep_all());
  const fs::path file = folder / "rings.h5";
  begin_snapshot(file, *cache, 0, partition, comm, some_info(), {}, &context)->finish();
  if (comm.is_root()) {
    const Reader reader(file);
    for (int layer = 0; layer < n_layers; ++layer) {
      auto heads = oracle(original, layer);
      auto& first = heads[partition.heads(layer, 0)[0]].positions;
      first.erase(first.end() - window);
      std::vector<std::int64_t> retained;
      for (HeadOracle& head : heads) {
        retained.push_back(static_cast<std::int64_t>(head.positions.size()));
        for (std::int64_t p = original.tokens; p < later.tokens; ++p) head.positions.push_back(p);
        head.in_ring = 4;
      }
      const std::string group = "/layers/" + std::to_string(layer);
      EXPECT_EQ(reader.integer("ring_first", group), original.tokens);
      expect_rows<float, float>(reader, group, later, layer, heads, SnapshotContent::all);
      EXPECT_EQ(reader.integer("ring_first", "/context" + group), original.tokens);
      EXPECT_EQ(
          reader.data<std::int64_t>("/context" + group + "/retained", {n_heads}, H5T_NATIVE_INT64),
          retained);
      expect_rows<float, float>(reader, "/context" + group, original, layer,
                                std::vector<HeadOracle>(n_heads), SnapshotContent::all);
    }
  }
  // Rows of the context that nobody has any more.
  const Story much_later{original.text, original.shared, later.tokens + window};
  append(*cache, 0, partition, comm.rank(), much_later, later.tokens, much_later.tokens,
         EvictionRule{1000, 0, true});
  expect_agreed_error(
      [&] { begin_snapshot(file, *cache, 0, partition, comm, some_info(), {}, &context); },
      "the state to cut back to");
}

TEST(Snapshot, SilentHeadHasItsRingOnly) {
  EXPECT_EQ(original.kept(1, silent_head).size(), static_cast<std::size_t>(window));
}

using FloatCache = KVCache;

// Bit by bit what the cache has, also for pairs that have none, or one that is not finite.
TEST(Snapshot, ScoresAreTheCaches) {
  const SharedFolder folder;
  const Communicator world = Communicator::world();
  for (int ranks : std::set<int>{1, std::min(2, world.size())}) {
    SCOPED_TRACE(ranks);
    const FirstRanks first(ranks);
    if (!first.has_this_rank()) continue;
    const Communicator comm = first.communicator();
    const HeadPartition partition = uneven_partition(ranks);
    const auto cache = forked_cache<float>(partition, comm.rank());
    for (int layer = 0; layer < n_layers; ++layer) {
      const auto& heads = partition.heads(layer, comm.rank());
      std::int64_t longest = 0;
      for (std::size_t h = 0; h < heads.size(); ++h) {
        longest = std::max(longest, cache->rows(0, layer, static_cast<int>(h)));
      }
      const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads.size(),
                                                                           longest);
      const auto host = Kokkos::create_mirror_view(scores);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        for (std::int64_t r = 0; r < longest; ++r) {
          const auto bits = hash({3, layer, heads[h], r});
          host(h, r) = bits % 5 == 0   ? std::numeric_limits<float>::quiet_NaN()
                       : bits % 5 == 1 ? -std::numeric_limits<float>::infinity()
                                       : uniform(bits);
        }
      }
      Kokkos::deep_copy(scores, host);
      cache->set_row_scores(ExecutionSpace(), 0, layer, scores);
    }
    const fs::path file = folder / (std::to_string(ranks) + ".h5");
    write_snapshot(file, *cache, 0, partition, comm, some_info());
    // Each rank looks at its own heads: the file is complete for all once it is written.
    const Reader reader(file);
    for (int layer = 0; layer < n_layers; ++layer) {
      const std::string group = "/layers/" + std::to_string(layer) + "/";
      const auto offsets =
          reader.data<std::int64_t>(group + "offsets", {n_heads + 1}, H5T_NATIVE_INT64);
      const auto found =
          reader.data<std::uint32_t>(group + "scores", {hsize_t(offsets.back())}, -1);
      const auto& heads = partition.heads(layer, comm.rank());
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const auto held = cache->host_rows(0, layer, static_cast<int>(h)).scores;
        const std::int64_t begin = offsets[heads[h]];
        ASSERT_EQ(static_cast<std::int64_t>(held.size()), offsets[heads[h] + 1] - begin);
        EXPECT_EQ(std::memcmp(held.data(), found.data() + begin, held.size() * sizeof(float)), 0);
      }
    }
  }
}

/// What a failure needs: a cache, and an older file that must outlive it.
class SnapshotFailure : public ::testing::Test {
 protected:
  SnapshotFailure()
      : m_partition(uneven_partition(m_comm.size())),
        m_cache(forked_cache<float>(m_partition, m_comm.rank())),
        m_file(m_folder / "cache.h5") {
    if (m_comm.is_root()) std::ofstream(m_file) << "older";
    m_comm.barrier();
  }
  void write(const fs::path& file, const SnapshotInfo& info = some_info()) {
    write_snapshot(file, *m_cache, 0, m_partition, m_comm, info);
  }
  void expect_untouched() {
    m_comm.barrier();
    EXPECT_EQ(m_folder.names(), std::set<std::string>{"cache.h5"});
    EXPECT_EQ(file_bytes(m_file), "older");
  }

  Communicator m_comm = Communicator::world();
  SharedFolder m_folder;
  HeadPartition m_partition;
  std::unique_ptr<FloatCache> m_cache;
  fs::path m_file;
};

TEST_F(SnapshotFailure, NoneReplacesTheOlderFile) {
  write(m_file);
  m_comm.barrier();
  EXPECT_EQ(m_folder.names(), std::set<std::string>{"cache.h5"});
  if (m_comm.is_root()) expect_content<float>(m_file, original);
}

TEST_F(SnapshotFailure, SmallFilesStaySmall) {
  // Space reserved for metadata is given back.
  write(m_file);
  std::uintmax_t rows = 0;
  for (int layer = 0; layer < n_layers; ++layer) {
    for (int head = 0; head < n_heads; ++head) rows += original.kept(layer, head).size();
  }
  EXPECT_LT(fs::file_size(m_file), rows * (2 * head_dim * sizeof(float) + 8 + 4) + (24u << 10));
}

TEST_F(SnapshotFailure, MissingFolder) {
  const fs::path file = m_folder / "missing/cache.h5";
  expect_agreed_error([&] { write(file); }, file.string());
  expect_agreed_error([&] { check_snapshot_writable(file, m_comm); }, file.string());
  expect_untouched();
}

TEST_F(SnapshotFailure, TargetIsNotAFile) {
  const fs::path folder = m_file.parent_path();
  expect_agreed_error([&] { write(folder); }, "not a regular file");
  expect_agreed_error([&] { check_snapshot_writable("/dev/null", m_comm); }, "not a regular file");
  expect_untouched();
}

/// Lets no file of this process grow beyond `bytes`: to a program like a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : m_handler(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &m_before);
    const rlimit limit{bytes, m_before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &m_before);
    ::signal(SIGXFSZ, m_handler);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit m_before{};
  void (*m_handler)(int);
};

TEST_F(SnapshotFailure, NoRoom) {
  for (const rlim_t bytes : {0, 50, 1000, 20000}) {
    SCOPED_TRACE(bytes);
    {
      const FileSizeLimit limit(bytes);
      expect_agreed_error([&] { write(m_file); }, m_file.string());
    }
    expect_untouched();
  }
  // HDF5 is still in working order.
  write(m_file);
  if (m_comm.is_root()) expect_content<float>(m_file, original);
}

TEST_F(SnapshotFailure, NoRoomForWhatIsCompressed) {
  SnapshotOptions options;
  options.compress = 6;
  const auto write_compressed = [&] {
    write_snapshot(m_file, *m_cache, 0, m_partition, m_comm, some_info(), options);
  };
  for (const rlim_t bytes : {0, 1000, 20000}) {
    SCOPED_TRACE(bytes);
    {
      const FileSizeLimit limit(bytes);
      expect_agreed_error(write_compressed, m_file.string());
    }
    expect_untouched();
  }
  write_compressed();
  if (m_comm.is_root()) expect_content<float>(m_file, original);
}

TEST_F(SnapshotFailure, GivenUp) {
  begin_snapshot(m_file, *m_cache, 0, m_partition, m_comm, some_info()).reset();
  expect_untouched();
}

// What stands in the file is not what was written: told before it gets its name.
TEST_F(SnapshotFailure, ChangedBehindItsBack) {
  const Communicator self = Communicator::self();
  const HeadPartition partition = uneven_partition(1);
  const auto cache = forked_cache<float>(partition, 0);
  const std::string name = "rank-" + std::to_string(m_comm.rank()) + ".h5";
  const auto writing = begin_snapshot(m_folder / name, *cache, 0, partition, self, some_info());
  fs::path unfinished;
  for (const std::string& found : m_folder.names()) {
    if (found.rfind(name + ".tmp-", 0) == 0) unfinished = m_folder / found;
  }
  // The last value that is written.
  const Story story = original;
  const float last = element<float>(1, story.text_at(story.tokens - 1), n_layers - 1, n_heads - 1,
                                    story.tokens - 1, head_dim - 1);
  const std::string wanted(reinterpret_cast<const char*>(&last), sizeof(last));
  std::string content;
  std::size_t at = std::string::npos;
  while (at == std::string::npos) {
    content = file_bytes(unfinished);
    at = content.rfind(wanted);
  }
  std::fstream stream(unfinished, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(static_cast<char>(content[at] ^ 1));
  stream.close();
  expect_agreed_error([&] { writing->finish(); },
                      "/layers/1/values of head 4 reads differently from what was written");
  expect_agreed_error([&] { writing->advance(); }, "reads differently");
  m_comm.barrier();
  EXPECT_FALSE(fs::exists(m_folder / name));
}

TEST_F(SnapshotFailure, AttributesThatCannotBeWritten) {
  SnapshotInfo info = some_info();
  info.further["head_dim"] = 1.0;
  expect_agreed_error([&] { write(m_file, info); }, "'head_dim'");
  info = some_info();
  info.model = std::string("a\0b", 3);
  expect_agreed_error([&] { write(m_file, info); }, "'model'");
  info = some_info();
  info.further[std::string(70000, 'x')] = 1.0;  // HDF5's limit is 64 KiB
  expect_agreed_error([&] { write(m_file, info); }, "H5A");
  info = some_info();
  info.state["judged"] = 1;
  expect_agreed_error([&] { write(m_file, info); }, "'judged'");
  info = some_info();
  info.recent_queries.resize(1);
  expect_agreed_error([&] { write(m_file, info); }, "recent queries of 1 layers");
  expect_untouched();
}

TEST_F(SnapshotFailure, CacheThatDoesNotFit) {
  const auto write_with = [&](const HeadPartition& partition, SequenceId sequence) {
    write_snapshot(m_file, *m_cache, sequence, partition, m_comm, some_info());
  };
  expect_agreed_error([&] { write_with(m_partition, 99); }, "no sequence 99");
  expect_agreed_error([&] { write_with(HeadPartition::even(3, n_heads, m_comm.size()), 0); },
                      "3 layers");
  expect_agreed_error(
      [&] { write_with(HeadPartition::even(n_layers, 8 * n_heads, m_comm.size()), 0); },
      "KV heads");
  expect_agreed_error(
      [&] { write_with(HeadPartition::even(n_layers, n_heads, m_comm.size() + 1), 0); }, "ranks");
  expect_untouched();
}

TEST_F(SnapshotFailure, OfOneRankIsToldToAll) {
  if (m_comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  // Sequence 1 is known everywhere but on the last rank.
  if (m_comm.rank() == m_comm.size() - 1) m_cache->free_sequence(1);
  expect_agreed_error(
      [&] { write_snapshot(m_file, *m_cache, 1, m_partition, m_comm, some_info()); },
      "no sequence 1");
  // Sequence 0 has more tokens there.
  if (m_comm.rank() == m_comm.size() - 1) {
    append(*m_cache, 0, m_partition, m_comm.rank(), original, original.tokens, original.tokens + 1);
  }
  expect_agreed_error([&] { write(m_file); }, "tokens");
  expect_untouched();
}

TEST_F(SnapshotFailure, CheckLeavesNothingBehind) {
  check_snapshot_writable(m_file, m_comm);
  check_snapshot_writable(m_folder / "new.h5", m_comm);
  expect_untouched();
}

// What a killed run left: no process has this number.
TEST_F(SnapshotFailure, RemovesLeftovers) {
  const fs::path left = m_folder / ("cache.h5.tmp-" + files::node_name() + "-99999999-0");
  const auto leave = [&] {
    m_comm.barrier();
    if (m_comm.is_root()) std::ofstream(left) << "unfinished";
    m_comm.barrier();
  };
  const auto expect_told = [&](const std::vector<std::string>& notes) {
    EXPECT_EQ(notes.size(), m_comm.is_root() ? 1u : 0u);
    for (const std::string& note : notes) {
      EXPECT_NE(note.find("removed " + left.string()), std::string::npos) << note;
    }
  };
  leave();
  expect_told(check_snapshot_writable(m_file, m_comm));
  expect_untouched();
  leave();
  expect_told(write_snapshot(m_file, *m_cache, 0, m_partition, m_comm, some_info()));
  m_comm.barrier();
  EXPECT_EQ(m_folder.names(), std::set<std::string>{"cache.h5"});
  m_comm.barrier();
  EXPECT_TRUE(check_snapshot_writable(m_file, m_comm).empty());
}

TEST(Snapshot, TimeOfWriting) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = uneven_partition(comm.size());
  const auto cache = forked_cache<float>(partition, comm.rank());
  SnapshotInfo info = some_info();
  info.created.clear();
  write_snapshot(folder / "now.h5", *cache, 0, partition, comm, info);
  ::setenv("SOURCE_DATE_EPOCH", "86399", 1);
  write_snapshot(folder / "then.h5", *cache, 0, partition, comm, info);
  ::unsetenv("SOURCE_DATE_EPOCH");
  if (!comm.is_root()) return;
  const std::string now = Reader(folder / "now.h5").text("created");
  EXPECT_TRUE(now > "2026-01-01T00:00:00Z" && now.size() == 20 && now.back() == 'Z') << now;
  EXPECT_EQ(Reader(folder / "then.h5").text("created"), "1970-01-01T23:59:59Z");
}

TEST(Snapshot, SequenceWithoutTokens) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = uneven_partition(comm.size());
  auto cache = forked_cache<half>(partition, comm.rank());
  const SequenceId empty = cache->add_sequence();
  write_snapshot(folder / "empty.h5", *cache, empty, partition, comm, some_info());
  if (comm.is_root()) expect_content<half>(folder / "empty.h5", Story{0, 0, 0});
}

/// The most bytes that this process ever had in memory, counted from here on if `anew`; -1 where
/// the system does not say.
std::int64_t peak_memory(bool anew) {
  if (anew) std::ofstream("/proc/self/clear_refs") << "5";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) * 1024;
  }
  return -1;
}

TEST(Snapshot, HeadsLargerThanOneTransfer) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  // 20 MiB of keys a head; only the first rank has two heads, so that the others run out of pieces.
  constexpr int dim = 4096;
  constexpr std::int64_t tokens = 1280;
  const int heads = comm.size() + 1;
  const HeadPartition partition = HeadPartition::even(1, heads, comm.size());
  const auto& mine = partition.heads(0, comm.rank());
  CacheShape shape;
  shape.heads = {static_cast<int>(mine.size())};
  shape.head_dim = dim;
  KVCache cache(DType::f32, shape);
  const SequenceId sequence = cache.add_sequence();
  Kokkos::View<float***, Kokkos::LayoutRight, Kokkos::HostSpace> rows("rows", tokens, mine.size(),
                                                                      dim);
  const auto expected = [](int head, std::int64_t position, int d) {
    return static_cast<float>((head * tokens + position) * 8 + d % 8);
  };
  for (std::int64_t p = 0; p < tokens; ++p) {
    for (std::size_t h = 0; h < mine.size(); ++h) {
      for (int d = 0; d < dim; ++d) rows(p, h, d) = expected(mine[h], p, d);
    }
  }
  const auto device_rows = Kokkos::create_mirror_view_and_copy(MemorySpace{}, rows);
  cache.append(ExecutionSpace{}, sequence, 0, device_rows, device_rows, {},
               EvictionRule::keep_all());
  const std::int64_t before = peak_memory(true);
  write_snapshot(folder / "large.h5", cache, sequence, partition, comm, some_info());
  // A layer's rows are 40 MiB a head.
  if (before > 0) {
    EXPECT_LT(peak_memory(false) - before, std::int64_t{16} << 20);
  }
  if (!comm.is_root()) return;
  const Reader reader(folder / "large.h5");
  for (const char* name : {"/layers/0/keys", "/layers/0/values"}) {
    const auto found = reader.data<float>(
        name, {static_cast<hsize_t>(heads * tokens), hsize_t{dim}}, H5T_NATIVE_FLOAT);
    std::size_t wrong = 0;
    for (int head = 0; head < heads; ++head) {
      for (std::int64_t p = 0; p < tokens; ++p) {
        for (int d = 0; d < dim; ++d) {
          wrong += found[(head * tokens + p) * dim + d] != expected(head, p, d);
        }
      }
    }
    EXPECT_EQ(wrong, 0u) << name;
  }
}

}  // namespace
}  // namespace kvzap
