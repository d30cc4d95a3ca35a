// Speed of snapshots: a cache of many heads of uneven lengths is written and read. The limits are
// plain parallel writes and reads of the same number of bytes in the same folder, as `dd` does
// them. Also measures the memory beside the cache, and the cost for steps while a snapshot is
// written.
//
// Files are in the system's temporary folder; TMPDIR names another one. GB/s count the file's
// bytes.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <kvzap/engine/snapshot.hpp>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/huge_pages.hpp"
#include "common.hpp"
#include "engine.hpp"

namespace kvzap::perf {
namespace {

namespace fs = std::filesystem;
using Value = Engine::Value;
using Cache = Engine::Decoder::Cache;

// As in bench_engine, a quarter of the pairs stays, and some heads keep 16 times the pairs of
// others.
constexpr double evict_ratio = 0.75;
constexpr double skew = 16;

// The size of a transfer in `dd bs=8M`.
constexpr std::size_t piece_bytes = std::size_t{8} << 20;
// The source that plain writes repeat: more than processors cache.
constexpr std::size_t source_bytes = std::size_t{256} << 20;

using Fresh = Kokkos::View<char*, Kokkos::HostSpace>;

class Descriptor {
 public:
  Descriptor(const fs::path& file, int flags) : m_descriptor(::open(file.c_str(), flags, 0666)) {
    if (m_descriptor < 0) throw Error("cannot open " + file.string());
  }
  ~Descriptor() { ::close(m_descriptor); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return m_descriptor; }

 private:
  int m_descriptor;
};

/// This rank's share of a file.
struct Share {
  explicit Share(std::int64_t bytes) {
    const std::int64_t ranks = world().size(), rank = world().rank();
    begin = bytes * rank / ranks;
    end = bytes * (rank + 1) / ranks;
  }
  std::int64_t begin, end;
};

/// Calls transfer(offset in the share, offset in the file, bytes), which returns the number of
/// transferred bytes.
void each_piece(const Share& share,
                const std::function<ssize_t(std::int64_t, std::int64_t, std::size_t)>& transfer) {
  for (std::int64_t at = share.begin; at < share.end;) {
    const auto bytes = static_cast<std::size_t>(
        std::min<std::int64_t>(share.end - at, static_cast<std::int64_t>(piece_bytes)));
    const ssize_t done = transfer(at - share.begin, at, bytes);
    if (done <= 0) throw Error("a plain transfer failed");
    at += done;
  }
}

/// All ranks write one new file, each its share, and bring it to the disk.
void plain_write(const fs::path& file, std::int64_t bytes, const std::vector<char>& source) {
  if (world().is_root()) const Descriptor created(file, O_WRONLY | O_CREAT | O_TRUNC);
  world_barrier();
  const Descriptor descriptor(file, O_WRONLY);
  each_piece(Share(bytes), [&](std::int64_t in_share, std::int64_t at, std::size_t length) {
    const std::size_t from =
        static_cast<std::size_t>(in_share) % (source.size() - piece_bytes) / 4096 * 4096;
    return ::pwrite(descriptor.get(), source.data() + from, length, at);
  });
  if (::fsync(descriptor.get()) != 0) throw Error("fsync failed");
}

/// All ranks read one file, each its share, into a buffer of 8 MiB.
void plain_read(const fs::path& file, std::int64_t bytes, std::vector<char>& buffer) {
  const Descriptor descriptor(file, O_RDONLY);
  each_piece(Share(bytes), [&](std::int64_t, std::int64_t at, std::size_t length) {
    return ::pread(descriptor.get(), buffer.data(), length, at);
  });
}

/// Reads into memory that was never touched, as in a new cache. Any reader that keeps the data pays
/// for this.
void plain_read_fresh(const fs::path& file, std::int64_t bytes, Fresh& fresh) {
  const Descriptor descriptor(file, O_RDONLY);
  const Share share(bytes);
  fresh = Fresh(Kokkos::view_alloc(Kokkos::WithoutInitializing, "fresh"), share.end - share.begin);
  base::advise_huge_pages(fresh.data(), fresh.size());
  each_piece(share, [&](std::int64_t in_share, std::int64_t at, std::size_t length) {
    return ::pread(descriptor.get(), fresh.data() + in_share, length, at);
  });
}

/// Lets the system drop its cached pages of a file, as far as they are on the disk.
void forget(const fs::path& file) {
  if (world().is_root()) {
    const Descriptor descriptor(file, O_RDONLY);
    ::posix_fadvise(descriptor.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
  world_barrier();
}

/// Waits until no data are on their way to the disk.
void settle() {
  if (world().is_root()) ::sync();
  world_barrier();
}

double status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) == 0) return 1024 * std::stod(line.substr(key.size() + 1));
  }
  return 0;
}

/// Returns the peak memory of this process while `work` runs, above its memory before or after
/// `work`, whichever is larger, because results stay.
double memory_beside(const std::function<void()>& work) {
  const double before = status_bytes("VmRSS");
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the peak
  work();
  return status_bytes("VmHWM") - std::max(before, status_bytes("VmRSS"));
}

/// A cache with a sequence of uneven heads.
struct Filled {
  Filled(const ModelConfig& config, std::int64_t tokens)
      : partition(HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                      static_cast<int>(config.num_key_value_heads),
                                      world().size())),
        shape(shape_of(config, partition)),
        cache(std::make_unique<Cache>(DTypeOf<Value>::value, shape)) {
    RandomScorer scorer(partition, world().rank(), evict_ratio, skew, 1);
    sequence = cache->add_sequence();
    fill_random(*cache, sequence, tokens, &scorer, config.hidden_size, EvictionRule{0, 0, true}, 2);
    Kokkos::fence();
  }
  static CacheShape shape_of(const ModelConfig& config, const HeadPartition& partition) {
    CacheShape shape;
    for (int l = 0; l < partition.n_layers(); ++l) {
      shape.heads.push_back(static_cast<int>(partition.heads(l, world().rank()).size()));
    }
    shape.head_dim = static_cast<int>(config.head_dim);
    shape.window = Engine::window;
    shape.page_rows = Engine::page_rows;
    return shape;
  }
  /// Returns the bytes of keys and values of the layer with most rows, over all ranks.
  double largest_layer_bytes() const {
    double largest = 0;
    for (int l = 0; l < partition.n_layers(); ++l) {
      double rows = 0;
      for (int h = 0; h < shape.heads[l]; ++h) {
        rows += static_cast<double>(cache->rows(sequence, l, h));
      }
      largest = std::max(largest, sum_over_ranks(rows));
    }
    return largest * 2 * shape.head_dim * sizeof(Value);
  }

  HeadPartition partition;
  CacheShape shape;
  std::unique_ptr<Cache> cache;
  SequenceId sequence = -1;
};

SnapshotInfo some_info() {
  SnapshotInfo info;
  info.model = "random";
  info.prune = "random";
  return info;
}

/// Times `work` and `plain` in turn, each after `before`. Reports `work`, with the rate of `plain`
/// as the limit.
void time_beside(benchmark::State& state, double bytes, const std::function<void()>& work,
                 const std::function<void()>& plain, const std::function<void()>& before) {
  const auto timed = [&](const std::function<void()>& what) {
    before();
    world_barrier();
    const double begin = now();
    what();
    return max_over_ranks(now() - begin);
  };
  double work_seconds = 0, plain_seconds = 0;
  for (auto _ : state) {
    const double first = timed(plain);
    const double ours = timed(work);
    // Disks, above all shared ones, vary from one second to the next.
    plain_seconds += 0.5 * (first + timed(plain));
    work_seconds += ours;
    state.SetIterationTime(ours);
  }
  const auto n = static_cast<double>(state.iterations());
  state.counters["GB/s"] = 1e-9 * bytes * n / work_seconds;
  state.counters["limit"] = 1e-9 * bytes * n / plain_seconds;
  state.counters["share"] = plain_seconds / work_seconds;
  state.counters["file_MB"] = 1e-6 * bytes;
}

class Stage {
 public:
  Filled& filled(const ModelConfig& config, std::int64_t tokens) {
    if (!m_filled) m_filled = std::make_unique<Filled>(config, tokens);
    return *m_filled;
  }
  const fs::path& folder() {
    if (!m_folder) m_folder = std::make_unique<TemporaryFolder>();
    return m_folder->path();
  }
  const std::vector<char>& source() {
    if (m_source.empty()) {
      m_source.resize(source_bytes + piece_bytes);
      std::minstd_rand draw;
      for (std::size_t i = 0; i + sizeof(std::uint32_t) <= m_source.size();
           i += sizeof(std::uint32_t)) {
        const auto value = static_cast<std::uint32_t>(draw());
        std::memcpy(m_source.data() + i, &value, sizeof(value));
      }
    }
    return m_source;
  }
  void clear() { m_filled.reset(); }

 private:
  std::unique_ptr<Filled> m_filled;
  std::unique_ptr<TemporaryFolder> m_folder;
  std::vector<char> m_source;
};

void report_memory(benchmark::State& state, double beside, const Filled& filled) {
  state.counters["beside_MB"] = 1e-6 * max_over_ranks(beside);
  state.counters["layer_MB"] = 1e-6 * filled.largest_layer_bytes();
}

/// Neither file exists when a measurement begins.
void run_write(benchmark::State& state, Stage& stage, Filled& filled,
               const SnapshotOptions& options) {
  const fs::path file = stage.folder() / "cache.h5", plain = stage.folder() / "plain";
  const auto write = [&] {
    write_snapshot(file, *filled.cache, filled.sequence, filled.partition, world(), some_info(),
                   options);
  };
  stage.source();
  const double beside = memory_beside(write);
  world_barrier();
  const auto bytes = static_cast<std::int64_t>(fs::file_size(file));
  time_beside(
      state, static_cast<double>(bytes), write, [&] { plain_write(plain, bytes, stage.source()); },
      [&] {
        world_barrier();
        if (world().is_root()) {
          fs::remove(file);
          fs::remove(plain);
        }
        settle();
      });
  report_memory(state, beside, filled);
}

/// Makes a new cache for each measurement, as a resumed run does. `cold`: reads from the disk.
void run_read(benchmark::State& state, Stage& stage, const Filled& filled, bool cold) {
  const fs::path file = stage.folder() / "cache.h5";
  write_snapshot(file, *filled.cache, filled.sequence, filled.partition, world(), some_info());
  world_barrier();
  const auto bytes = static_cast<std::int64_t>(fs::file_size(file));
  std::vector<char> buffer(piece_bytes);
  std::unique_ptr<Cache> cache;
  const auto read = [&] {
    const SnapshotReader reader(file);
    load_snapshot(reader, *cache, filled.partition, world());
  };
  const auto before = [&] {
    cache = std::make_unique<Cache>(DTypeOf<Value>::value, filled.shape);
    if (cold) {
      forget(file);
    } else {
      plain_read(file, bytes, buffer);
    }
  };
  before();
  const double beside = memory_beside(read);
  double fresh_seconds = 0;
  Fresh fresh;
  const auto timed_fresh = [&] {
    before();
    world_barrier();
    const double begin = now();
    plain_read_fresh(file, bytes, fresh);
    fresh_seconds += max_over_ranks(now() - begin);
    fresh = {};
  };
  timed_fresh();
  time_beside(
      state, static_cast<double>(bytes), read, [&] { plain_read(file, bytes, buffer); }, before);
  timed_fresh();
  state.counters["limit_fresh"] = 2e-9 * static_cast<double>(bytes) / fresh_seconds;
  state.counters["share_fresh"] =
      state.counters["GB/s"].value / state.counters["limit_fresh"].value;
  report_memory(state, beside, filled);
}

/// Runs decode steps while a snapshot is written, and without. Writes a fork of the sequence, as a
/// run with regular snapshots does.
void run_background(benchmark::State& state, Stage& stage, const fs::path& model,
                    std::int64_t tokens, int steps) {
  stage.clear();
  const Engine engine(model, 0);
  RandomScorer scorer(engine.partition(), world().rank(), evict_ratio, skew, 1);
  const auto decoder = engine.decoder(&scorer);
  Cache& cache = decoder->cache();
  const SequenceId sequence = cache.add_sequence();
  fill_random(cache, sequence, tokens, &scorer, engine.model().config().hidden_size,
              EvictionRule{0, 0, true}, 2);
  const StepBatch batch(sequence, {1}, {}, StepOutput::argmax);
  const auto step = [&] {
    const double begin = now();
    decoder->step(batch);
    return max_over_ranks(now() - begin);
  };
  const fs::path file = stage.folder() / "cache.h5";
  double alone = 0, beside = 0, longest = 0, begun = 0, written = 0;
  std::int64_t steps_alone = 0, steps_beside = 0;
  for (auto _ : state) {
    step();
    const double before = alone;
    for (int i = 0; i < steps; ++i, ++steps_alone) alone += step();
    world_barrier();
    const double begin = now();
    const SequenceId fork = cache.fork(sequence);
    const auto writing =
        begin_snapshot(file, cache, fork, engine.partition(), world(), some_info());
    begun += max_over_ranks(now() - begin);
    for (bool done = false; !done; ++steps_beside) {
      const double first = now();
      decoder->step(batch);
      done = writing->advance();
      const double seconds = max_over_ranks(now() - first);
      beside += seconds;
      longest = std::max(longest, seconds);
    }
    const double seconds = max_over_ranks(now() - begin);
    written += seconds;
    cache.free_sequence(fork);
    settle();
    state.SetIterationTime(seconds - (alone - before) / steps);
  }
  const auto n = static_cast<double>(state.iterations());
  const double step_alone = alone / static_cast<double>(steps_alone);
  const double step_beside = beside / static_cast<double>(steps_beside);
  state.counters["step_ms"] = 1e3 * step_alone;
  state.counters["step_ms_writing"] = 1e3 * step_beside;
  state.counters["slowdown"] = step_beside / step_alone;
  state.counters["longest_step_ms"] = 1e3 * longest;
  state.counters["begin_ms"] = 1e3 * begun / n;
  state.counters["written_s"] = written / n;
  state.counters["steps"] = static_cast<double>(steps_beside) / n;
  state.counters["file_MB"] = 1e-6 * static_cast<double>(fs::file_size(file));
}

}  // namespace

void register_benchmarks(const Options& options) {
  const auto stage = std::make_shared<Stage>();
  const fs::path folder = model_folder(options, options.config);
  const std::string model = folder.filename().string();
  const ModelConfig config = ModelConfig::load(folder);
  const std::int64_t tokens = options.quick ? 4096 : 32768;
  const int repetitions = options.quick ? 1 : 5;
  const std::string size = fmt::format("/{}/evict75_skew16/context:{}", model, tokens);
  const auto write = [&](const std::string& name, SnapshotOptions how, int times) {
    add("snapshot/write" + name + size, 1, times, [=](benchmark::State& state) {
      run_write(state, *stage, stage->filled(config, tokens), how);
    });
  };
  write("", {}, repetitions);
  for (const bool cold : {true, false}) {
    add(std::string("snapshot/read/") + (cold ? "from_disk" : "from_memory") + size, 1, repetitions,
        [=](benchmark::State& state) {
          run_read(state, *stage, stage->filled(config, tokens), cold);
        });
  }
  write("/f32", {SnapshotContent::all, 0, DType::f32}, 1);
  write("/scores_compressed", {SnapshotContent::scores, 6, {}}, 1);
  add("snapshot/background" + size, 1, options.quick ? 1 : 3, [=](benchmark::State& state) {
    run_background(state, *stage, folder, tokens, options.quick ? 4 : 20);
  });
}

}  // namespace kvzap::perf
