#include "attention/cuda/launch.hpp"
#include "attention/cuda/split_kernel.hpp"
#include "attention/cuda/tensor_cores.hpp"

namespace kvzap::attention::tensor_cores {
namespace {

template <RowType keys, RowType values, int D>
bool launch_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                  const CachedLayer& cached, const AttentionCall& call) {
  using Tiles = cuda::QuantisedTiles<keys, values, D>;
  const Tiles tiles{{cached.addresses.data(), cached.page_rows, cached.format.values_are_keys}};
  return cuda::launch_split(exec, spans, parts, tiles, call);
}

template <RowType keys, RowType values>
bool attend_typed(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                  const CachedLayer& cached, const AttentionCall& call) {
  switch (call.dim) {
    case 64:
      return launch_parts<keys, values, 64>(exec, spans, parts, cached, call);
    case 96:
      if constexpr (keys == RowType::q8 && values == RowType::q8) {
        return launch_parts<keys, values, 96>(exec, spans, parts, cached, call);
      }
      return false;
    case 128:
      return launch_parts<keys, values, 128>(exec, spans, parts, cached, call);
    case 256:
      return launch_parts<keys, values, 256>(exec, spans, parts, cached, call);
    default:
      return false;
  }
}

}  // namespace

bool attend_quantised_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                            const CachedLayer& cached, const AttentionCall& call) {
  constexpr RowType q8 = RowType::q8, q4 = RowType::q4;
  if (cached.format.keys == q8 && cached.format.values == q8) {
    return attend_typed<q8, q8>(exec, spans, parts, cached, call);
  }
  if (cached.format.keys == q8) return attend_typed<q8, q4>(exec, spans, parts, cached, call);
  if (cached.format.values == q8) return attend_typed<q4, q8>(exec, spans, parts, cached, call);
  return attend_typed<q4, q4>(exec, spans, parts, cached, call);
}

}  // namespace kvzap::attention::tensor_cores
