// What copying and freeing a whole sequence costs does not grow with the layers of the model.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <kvzap/core/cache.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/machine.hpp"

namespace kvzap {
namespace {

using Cache = KVCache;

/// What Kokkos is asked for meanwhile.
struct Costs {
  int copies = 0;
  int allocations = 0;
  int kernels = 0;
  bool operator==(const Costs& other) const {
    return copies == other.copies && allocations == other.allocations && kernels == other.kernels;
  }
};
Costs costs;

void PrintTo(const Costs& found, std::ostream* stream) {
  *stream << found.copies << " copies, " << found.allocations << " allocations, " << found.kernels
          << " kernels";
}

template <class Work>
Costs costs_of(const Work& work) {
  namespace tools = Kokkos::Tools::Experimental;
  costs = {};
  tools::set_begin_deep_copy_callback([](Kokkos_Profiling_SpaceHandle, const char*, const void*,
                                         Kokkos_Profiling_SpaceHandle, const char*, const void*,
                                         std::uint64_t) { ++costs.copies; });
  tools::set_allocate_data_callback([](const Kokkos_Profiling_SpaceHandle, const char*, const void*,
                                       const std::uint64_t) { ++costs.allocations; });
  tools::set_begin_parallel_for_callback(
      [](const char*, const std::uint32_t, std::uint64_t*) { ++costs.kernels; });
  work();
  tools::set_begin_deep_copy_callback(nullptr);
  tools::set_allocate_data_callback(nullptr);
  tools::set_begin_parallel_for_callback(nullptr);
  return costs;
}

/// Of a fork, a checkpoint, a return to it, and of freeing.
std::vector<Costs> costs_with(int layers) {
  CacheShape shape;
  shape.heads.assign(layers, 2);
  shape.head_dim = 8;
  shape.window = 4;
  shape.page_rows = 4;
  Cache cache(DType::f32, shape);
  const SequenceId sequence = cache.add_sequence();
  const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> rows("rows", 30, 2, 8);
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", 2, 30);
  const auto append = [&] {
    for (int l = 0; l < layers; ++l) {
      cache.append(ExecutionSpace(), sequence, l, rows, rows, scores, {0, 0, true});
    }
  };
  append();
  cache.free_sequence(cache.fork(sequence));  // what is made once and kept
  SequenceId copy = -1;
  Cache::Checkpoint checkpoint;
  std::vector<Costs> found;
  found.push_back(costs_of([&] { copy = cache.fork(sequence); }));
  found.push_back(costs_of([&] { checkpoint = cache.checkpoint(sequence); }));
  append();
  found.push_back(costs_of([&] { cache.restore(sequence, checkpoint); }));
  found.push_back(costs_of([&] { cache.free_sequence(copy); }));
  return found;
}

TEST(CacheCopies, OfWholeSequencesDoNotGrowWithLayers) {
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    const std::vector<Costs> few = costs_with(2);
    EXPECT_EQ(few, costs_with(11));
    for (const Costs& one : few) EXPECT_LE(one.copies, 6);
  }
  base::machine().set_device(before);
}

}  // namespace
}  // namespace kvzap
