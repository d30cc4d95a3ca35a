// Whether kernels written for NVIDIA's tensor cores can run.
#pragma once

namespace kvzap::base::cuda {

/// Returns the bytes of shared memory that a block may have if this process' device is a GPU of
/// NVIDIA's with compute capability 8.0 or more, otherwise 0.
int most_block_memory();

/// Returns the multiprocessors of that device.
int multiprocessors();

/// Whether kernels for tensor cores can run.
inline bool has_tensor_cores() { return most_block_memory() > 0; }

}  // namespace kvzap::base::cuda
