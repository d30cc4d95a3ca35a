// Weights in the packed layout of LinearWeights: whether to pack them, and their memory.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <kvzap/core/array_view.hpp>
#include <string_view>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/onednn.hpp"
#include "linalg/host/packed_kernels.hpp"
#include "linalg/product_kinds.hpp"

namespace kvzap::linalg {

bool may_pack_weights() {
  const char* asked = std::getenv("KVZAP_PACK");
  const std::string_view name = asked ? asked : "";
  if (name.empty() || name == "on") return true;
  if (name == "off") return false;
  throw Error(fmt::format("KVZAP_PACK is \"{}\"; expected on or off", name));
}

bool packs_weights() {
  // AVX-512 needs oneDNN for many rows; without it, plain rows are as fast.
  return may_pack_weights() && has_packed_products() &&
         (base::machine().simd() <= base::SimdLevel::avx2 || onednn::is_available()) &&
         !keeps_type();
}

Bytes PackedAllocator::operator()(std::int64_t count, std::size_t value_bytes) {
  // Unused parts of a block are never touched and take only address space.
  constexpr std::int64_t block_bytes = std::int64_t{64} << 20;
  constexpr std::int64_t line = 64;
  constexpr auto page = static_cast<std::int64_t>(base::huge_page_bytes);
  const std::int64_t size =
      (count * static_cast<std::int64_t>(value_bytes) + line - 1) / line * line;
  if (m_used + size > static_cast<std::int64_t>(m_block.extent(0))) {
    const std::int64_t wanted = std::max(block_bytes, size + page);
    try {
      m_block = {};
      m_block =
          Bytes(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::packed"), wanted);
    } catch (const std::exception&) {
      throw Error(fmt::format("out of memory: no room for {} weights of {} bytes",
                              wanted / static_cast<std::int64_t>(value_bytes), value_bytes));
    }
    if constexpr (base::runs_on_host) base::advise_huge_pages(m_block.data(), wanted);
    const auto address = reinterpret_cast<std::uintptr_t>(m_block.data());
    m_used = static_cast<std::int64_t>((base::huge_page_bytes - address % base::huge_page_bytes) %
                                       base::huge_page_bytes);
    if (m_used + size > wanted) m_used = 0;
  }
  const auto range = std::make_pair(m_used, m_used + size);
  m_used += size;  // every matrix starts on a cache line
  return Kokkos::subview(m_block, range);
}

LinearWeights packed_weights(PackedAllocator& allocator, DType dtype, std::int64_t outputs,
                             std::int64_t inputs) {
  const std::size_t value_bytes = size_of(dtype);
  const std::int64_t bytes = LinearWeights::bytes_of(WeightLayout::packed, dtype, outputs, inputs);
  return {WeightLayout::packed, dtype, outputs, inputs,
          allocator(bytes / static_cast<std::int64_t>(value_bytes), value_bytes)};
}

void pack_rows(const void* rows, std::int64_t begin, std::int64_t n_rows,
               const LinearWeights& weights) {
  constexpr std::int64_t block = LinearWeights::block_outputs;
  const std::int64_t inputs = weights.inputs();
  const std::int64_t padded = LinearWeights::padded_inputs(weights.dtype(), inputs);
  with_value_type(weights.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    const auto* const source = static_cast<const Value*>(rows);
    for (std::int64_t i = 0; i < n_rows; i += block) {
      pack_block(source + i * inputs, inputs, static_cast<int>(std::min(block, n_rows - i)), inputs,
                 padded, weights.values<Value>() + (begin + i) * padded);
    }
  });
}

void unpack_row(const LinearWeights& weights, std::int64_t row, float* target) {
  constexpr std::int64_t block = LinearWeights::block_outputs;
  const std::int64_t inputs = weights.inputs();
  const std::int64_t begin =
      row / block * block * LinearWeights::padded_inputs(weights.dtype(), inputs);
  with_value_type(weights.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    constexpr std::int64_t together = std::is_same_v<Value, bfloat16> ? 2 : 1;  // inputs
    const Value* own = weights.values<Value>() + begin + row % block * together;
    std::int64_t k = 0;
    for (; k + together <= inputs; k += together, own += block * together) {
      for (std::int64_t i = 0; i < together; ++i) target[k + i] = static_cast<float>(own[i]);
    }
    if (k < inputs) target[k] = static_cast<float>(*own);
  });
}

}  // namespace kvzap::linalg
