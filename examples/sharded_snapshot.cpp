// A cache whose KV heads are distributed over the ranks of an MPI program, and one HDF5 file that
// all of them write. Usage: mpirun -n 2 sharded_snapshot [FILE.h5]
#include <Kokkos_Core.hpp>
#include <cstdio>
#include <filesystem>
#include <kvzap/engine/snapshot.hpp>
#if KVZAP_HAVE_MPI
#include <mpi.h>
#endif

namespace {

using kvzap::MemorySpace;
constexpr int layers = 3, heads = 6, dim = 32, tokens = 500;

/// Returns the same score on any number of ranks. Later heads keep less.
float score_of(int layer, int head, int token) {
  const unsigned mixed = (layer * 7919u + head * 104729u + token) * 2654435761u;
  return static_cast<float>((mixed >> 16) % 1000) / 1000.0f - 0.1f * static_cast<float>(head);
}

int run(const std::string& file) {
  const kvzap::ExecutionSpace exec;
  const auto comm = kvzap::Communicator::world();
  const auto partition = kvzap::HeadPartition::even(layers, heads, comm.size());

  // This rank's part: the heads of each layer that the partition assigns to it.
  kvzap::CacheShape shape;
  for (int l = 0; l < layers; ++l) {
    shape.heads.push_back(static_cast<int>(partition.heads(l, comm.rank()).size()));
  }
  shape.head_dim = dim;
  shape.window = 32;
  kvzap::KVCache cache(kvzap::DType::f16, shape);
  const auto sequence = cache.add_sequence();

  kvzap::EvictionRule rule;
  rule.threshold = 0.4f;
  for (int l = 0; l < layers; ++l) {
    const auto& mine = partition.heads(l, comm.rank());
    Kokkos::View<kvzap::half***, Kokkos::LayoutRight, MemorySpace> rows("rows", tokens, mine.size(),
                                                                        dim);
    Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", mine.size(), tokens);
    auto host_rows = Kokkos::create_mirror_view(rows);
    auto host_scores = Kokkos::create_mirror_view(scores);
    for (std::size_t h = 0; h < mine.size(); ++h) {
      for (int t = 0; t < tokens; ++t) {
        host_scores(h, t) = score_of(l, mine[h], t);
        for (int d = 0; d < dim; ++d) {
          host_rows(t, h, d) = kvzap::half(static_cast<float>(100 * mine[h] + t % 100));
        }
      }
    }
    Kokkos::deep_copy(rows, host_rows);
    Kokkos::deep_copy(scores, host_scores);
    cache.append(exec, sequence, l, rows, rows, scores, rule);
  }

  // Compares the rows of all ranks with those that one process would keep.
  bool good = true;
  std::int64_t all = 0;
  for (int h = 0; h < heads; ++h) {
    std::int64_t kept = 0, expected = 0;
    for (int l = 0; l < layers; ++l) {
      const auto& mine = partition.heads(l, comm.rank());
      for (std::size_t i = 0; i < mine.size(); ++i) {
        if (mine[i] == h) kept += cache.rows(sequence, l, static_cast<int>(i));
      }
      for (int t = 0; t < tokens; ++t) {
        expected += t >= tokens - shape.window || score_of(l, h, t) >= rule.threshold;
      }
    }
    kept = comm.all_reduce_sum(kept);
    all += kept;
    good = good && kept == expected;
    if (comm.is_root()) {
      std::printf("head %d keeps %lld of %d rows\n", h, static_cast<long long>(kept),
                  layers * tokens);
    }
  }

  if constexpr (kvzap::has_snapshots) {
    kvzap::SnapshotInfo info;
    info.model = "made up";
    info.prune = "threshold";
    info.threshold = rule.threshold;
    kvzap::write_snapshot(file, cache, sequence, partition, comm, info);
    comm.agree_on_root([&] {
      const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(file));
      std::printf("%s: %lld bytes, written by %d rank%s\n", file.c_str(),
                  static_cast<long long>(bytes), comm.size(), comm.size() == 1 ? "" : "s");
      good = good && bytes > all * 2 * dim * static_cast<std::int64_t>(sizeof(kvzap::half));
    });
  } else if (comm.is_root()) {
    std::puts("no snapshot: this kvzap was built without HDF5");
  }
  if (comm.is_root()) std::puts(good ? "right" : "WRONG");
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
#if KVZAP_HAVE_MPI
  MPI_Init(&argc, &argv);
#endif
  int status = 1;
  {
    Kokkos::ScopeGuard kokkos(argc, argv);
    try {
      status = run(argc > 1 ? argv[1] : "kvzap-example.h5");
    } catch (const kvzap::AgreedError& error) {  // every rank has this error
      if (kvzap::Communicator::world().is_root()) {
        std::fprintf(stderr, "sharded_snapshot: %s\n", error.what());
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "sharded_snapshot: %s\n", error.what());
      kvzap::Communicator::world().abort(1);
    }
  }
#if KVZAP_HAVE_MPI
  MPI_Finalize();
#endif
  return status;
}
