// Replaces the library's answer: the kernels of this executable are emulated.
#include <cstdlib>

#include "base/cuda/has_tensor_cores.hpp"

namespace kvzap::base::cuda {

// That of compute capability 9.0, or KVZAP_BLOCK_MEMORY.
int most_block_memory() {
  const char* const given = std::getenv("KVZAP_BLOCK_MEMORY");
  return given ? std::atoi(given) : 227 << 10;
}

// So few that some tests have more blocks, and others fewer, or KVZAP_MULTIPROCESSORS.
int multiprocessors() {
  const char* const given = std::getenv("KVZAP_MULTIPROCESSORS");
  return given ? std::atoi(given) : 8;
}

}  // namespace kvzap::base::cuda
