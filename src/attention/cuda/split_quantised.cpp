#include "attention/cuda/launch.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {
namespace {

template <RowType keys, RowType values>
bool attend_typed(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                  const CachedLayer& cached, const AttentionCall& call) {
  const auto launch_parts = [&](auto dim) {
    const cuda::QuantisedTiles<keys, values, decltype(dim)::value> tiles{
        {cached.addresses.data(), cached.page_rows, cached.format.values_are_keys}};
    return cuda::launch_split(exec, spans, parts, tiles, call);
  };
  if constexpr (keys == RowType::q8 && values == RowType::q8) {
    return with_head_dim<64, 96, 128, 256>(call.dim, launch_parts);
  } else {  // a row of 96 codes of 4 bits is no sequence of words for 32 dimensions
    return with_head_dim<64, 128, 256>(call.dim, launch_parts);
  }
}

}  // namespace

bool attend_quantised_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                            const CachedLayer& cached, const AttentionCall& call) {
  constexpr RowType q8 = RowType::q8, q4 = RowType::q4;
  for (const RowType type : {cached.format.keys, cached.format.values}) {
    if (type != q8 && type != q4) return false;  // the portable kernel attends rows of 3 and 2 bits
  }
  if (cached.format.keys == q8 && cached.format.values == q8) {
    return attend_typed<q8, q8>(exec, spans, parts, cached, call);
  }
  if (cached.format.keys == q8) return attend_typed<q8, q4>(exec, spans, parts, cached, call);
  if (cached.format.values == q8) return attend_typed<q4, q8>(exec, spans, parts, cached, call);
  return attend_typed<q4, q4>(exec, spans, parts, cached, call);
}

}  // namespace kvzap::attention::tensor_cores
