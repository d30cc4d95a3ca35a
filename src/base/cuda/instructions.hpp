// What the kernels of this folder use of CUDA: products of 16-bit tiles on tensor cores (mma.sync,
// compute capability 8.0), the loads that feed them, and exchanges within a warp and a block.
// emulated.hpp has the same names for hosts, so that tests run the kernels without a device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <kvzap/core/types.hpp>
#include <type_traits>

#define KVZAP_CUDA __device__ __forceinline__
// A kernel of blocks of `threads` threads, of which a multiprocessor can hold `blocks`.
#define KVZAP_CUDA_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define KVZAP_CUDA_ARGUMENT const __grid_constant__
#define KVZAP_UNROLL _Pragma("unroll")
#define KVZAP_UNROLL_BY_4 _Pragma("unroll 4")

namespace kvzap::base::cuda {

inline constexpr unsigned whole_warp = 0xffffffffu;

KVZAP_CUDA int thread_of_block() { return static_cast<int>(threadIdx.x); }
KVZAP_CUDA int lane_of_warp() { return static_cast<int>(threadIdx.x) % 32; }
KVZAP_CUDA int warp_of_block() { return static_cast<int>(threadIdx.x) / 32; }
KVZAP_CUDA int block_x() { return static_cast<int>(blockIdx.x); }
KVZAP_CUDA int block_y() { return static_cast<int>(blockIdx.y); }
/// thread_of_block() and block_y(), read at each call: what is made of them takes no registers
/// before.
KVZAP_CUDA int thread_read_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
KVZAP_CUDA int block_y_read_anew() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(block));
  return block;
}
KVZAP_CUDA int blocks_x() { return static_cast<int>(gridDim.x); }
/// The shared memory that a launch asked for, aligned to 16 bytes.
KVZAP_CUDA unsigned char* block_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}
KVZAP_CUDA std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

KVZAP_CUDA void wait_for_warp() { __syncwarp(); }
KVZAP_CUDA void wait_for_block() { __syncthreads(); }
/// Waits for all threads of the block; returns whether any of them has `x`.
KVZAP_CUDA bool any_of_block(bool x) { return __syncthreads_or(x ? 1 : 0) != 0; }
KVZAP_CUDA bool any_of_warp(bool x) { return __any_sync(whole_warp, x) != 0; }
KVZAP_CUDA bool all_of_warp(bool x) { return __all_sync(whole_warp, x) != 0; }
/// The value that another lane passes.
template <class T>
KVZAP_CUDA T of_lane(T value, int lane) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(
        __shfl_sync(whole_warp, reinterpret_cast<unsigned long long>(value), lane));
  } else {
    return __shfl_sync(whole_warp, value, lane);
  }
}
KVZAP_CUDA void set_bits(unsigned* word, unsigned bits) { atomicOr(word, bits); }

/// Copies 16 bytes to shared memory when commit() and wait() say so; zeros unless `exists`.
KVZAP_CUDA void copy16(std::uint32_t target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(exists ? 16 : 0)
               : "memory");
}
/// Ends a group of copies of this thread.
KVZAP_CUDA void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until all groups of this thread but the last `left` are complete.
template <int left>
KVZAP_CUDA void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

/// Loads four 8 x 8 matrices of 16-bit values. Lane l gives the address of row l % 8 of matrix l /
/// 8. It receives elements (l / 4, 2 (l % 4)) and its right neighbour of each; with `transposed`
/// elements (2 (l % 4), l / 4) and its lower neighbour.
template <bool transposed>
KVZAP_CUDA void load_matrices(std::uint32_t (&target)[4], std::uint32_t address) {
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(target[0]), "=r"(target[1]), "=r"(target[2]), "=r"(target[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(target[0]), "=r"(target[1]), "=r"(target[2]), "=r"(target[3])
                 : "r"(address)
                 : "memory");
  }
}

/// sums (16, 8) += a (16, 16) b (16, 8). Lane l has of a row l / 4 and the row 8 below it, columns
/// 2 (l % 4) and its right neighbour, then those 8 to the right of them; of b column l / 4 and
/// these rows; of sums these rows of a and columns 2 (l % 4) and its right neighbour.
template <class Value>
KVZAP_CUDA void multiply(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                         std::uint32_t b1) {
  if constexpr (std::is_same_v<Value, half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// The same for sums = a b.
template <class Value>
KVZAP_CUDA void multiply_first(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
  if constexpr (std::is_same_v<Value, half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  }
}

/// Two values, rounded: the first in the lower half of a word.
template <class Value>
KVZAP_CUDA std::uint32_t rounded_pair(float lower, float upper) {
  std::uint32_t word;
  if constexpr (std::is_same_v<Value, half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
  }
  return word;
}

struct FloatPair {
  float lower, upper;
};

/// The values of a pair.
template <class Value>
KVZAP_CUDA FloatPair floats_of(std::uint32_t pair) {
  if constexpr (std::is_same_v<Value, half>) {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    return {both.x, both.y};
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

/// a - b of pairs.
template <class Value>
KVZAP_CUDA std::uint32_t difference_of_pairs(std::uint32_t a, std::uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<Value, half>, __half2, __nv_bfloat162>;
  const Pair difference =
      __hsub2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&difference);
}

/// 2^x within 2 units in the last place; results below 2^-126 are 0.
KVZAP_CUDA float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace kvzap::base::cuda
