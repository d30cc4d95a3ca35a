#include "base/address_space.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <kvzap/core/types.hpp>

namespace kvzap::base {

bool has_address_space(std::size_t bytes) {
  void* const room =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return room != MAP_FAILED && munmap(room, bytes) == 0;
}

void expect_address_space(std::size_t bytes, const char* library) {
  if (has_address_space(bytes)) return;
  throw Error(fmt::format("out of memory: no room for {} MiB of address space that {} needs",
                          bytes >> 20, library));
}

}  // namespace kvzap::base
