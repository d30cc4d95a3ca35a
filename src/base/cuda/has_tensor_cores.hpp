// Whether kernels written for NVIDIA's tensor cores can run.
#pragma once

namespace kvzap::base::cuda {

/// Whether this process' device is a GPU of NVIDIA's with compute capability 8.0 or more.
bool has_tensor_cores();

}  // namespace kvzap::base::cuda
