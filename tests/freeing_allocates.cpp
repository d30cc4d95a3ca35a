// Beside allocations.cpp, which CUDA's compiler takes as a source for hosts alone, without Kokkos.
#include <Kokkos_Core.hpp>
#include <memory>

#include "allocations.hpp"

namespace kvzap::test {

bool freeing_allocates() {
  auto view = std::make_unique<Kokkos::View<char*, Kokkos::HostSpace>>("kvzap::test::freed", 1);
  const std::size_t before = n_news;
  view.reset();
  return n_news != before;
}

}  // namespace kvzap::test
