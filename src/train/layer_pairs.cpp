#include "train/layer_pairs.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "base/value_types.hpp"
#include "train/pair_rows.hpp"

namespace kvzap::train {
namespace {

template <class Value>
using HostRows = Kokkos::View<const Value**, Kokkos::LayoutRight, Kokkos::HostSpace,
                              Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

// Copies rows of a block on the host to `target`, from row `begin` on.
template <class Target, class Value>
void copy_block(const Target& target, std::int64_t begin, const Value* rows, std::int64_t count) {
  const auto columns = static_cast<std::int64_t>(target.extent(1));
  const auto there = Kokkos::subview(target, std::make_pair(begin, begin + count), Kokkos::ALL);
  Kokkos::deep_copy(there, HostRows<Value>(rows, count, columns));
}

}  // namespace

template <class Value>
LayerPairs<Value> read_layer(const PairSource& source, int layer, const PairSplit& split) {
  const PairsInfo& info = source.info();
  const std::int64_t inputs = info.hidden_size, heads = info.kv_heads;
  LayerPairs<Value> pairs;
  try {
    pairs.hidden = decltype(pairs.hidden)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::train::hidden"), info.pairs,
        inputs);
    pairs.scores = linalg::Matrix(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::train::scores"), info.pairs, heads);
  } catch (const std::exception&) {
    throw Error(fmt::format("out of memory: no room for the {} bytes of a layer's {} pairs",
                            info.pairs * (inputs * sizeof(Value) + heads * sizeof(float)),
                            info.pairs));
  }
  if constexpr (base::runs_on_host) {
    base::advise_huge_pages(pairs.hidden.data(), pairs.hidden.size() * sizeof(Value));
  }
  const std::int64_t block = std::min(pairs_of_block(info), info.pairs);
  std::vector<Value> rows(static_cast<std::size_t>(block * inputs));
  std::vector<float> scores(static_cast<std::size_t>(block * heads));
  std::int64_t kept = 0;
  for (std::int64_t begin = 0; begin < info.pairs; begin += block) {
    const std::int64_t count = std::min(block, info.pairs - begin);
    source.read(layer, begin, count, rows.data(), scores.data());
    std::int64_t good = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const Value* const row = rows.data() + i * inputs;
      const float* const score = scores.data() + i * heads;
      if (!are_finite(row, inputs) || !are_finite(score, heads)) {
        ++pairs.dropped;
        continue;
      }
      if (split.is_validation[static_cast<std::size_t>(begin + i)]) {
        pairs.validation.push_back(kept + good);
        pairs.validation_scores.insert(pairs.validation_scores.end(), score, score + heads);
      } else {
        pairs.training.push_back(kept + good);
      }
      if (good < i) {
        std::copy_n(row, inputs, rows.data() + good * inputs);
        std::copy_n(score, heads, scores.data() + good * heads);
      }
      ++good;
    }
    copy_block(pairs.hidden, kept, rows.data(), good);
    copy_block(pairs.scores, kept, scores.data(), good);
    kept += good;
  }
  return pairs;
}

#define KVZAP_READ_LAYER(Value) \
  template LayerPairs<Value> read_layer(const PairSource&, int, const PairSplit&);
KVZAP_FOR_EACH_VALUE(KVZAP_READ_LAYER)
#undef KVZAP_READ_LAYER

}  // namespace kvzap::train
