#include "train/layer_pairs.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
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

LayerPairs read_layer(const PairSource& source, int layer, const PairSplit& split) {
  const PairsInfo& info = source.info();
  const std::int64_t inputs = info.hidden_size, heads = info.kv_heads;
  LayerPairs pairs;
  pairs.dtype = info.dtype;
  const auto row_bytes = inputs * static_cast<std::int64_t>(size_of(info.dtype));
  try {
    pairs.hidden_bytes = decltype(pairs.hidden_bytes)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::train::hidden"), info.pairs,
        row_bytes);
    pairs.scores = linalg::Matrix(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::train::scores"), info.pairs, heads);
  } catch (const std::exception&) {
    throw Error(fmt::format("out of memory: no room for the {} bytes of a layer's {} pairs",
                            info.pairs * (row_bytes + heads * sizeof(float)), info.pairs));
  }
  if constexpr (base::runs_on_host) {
    base::advise_huge_pages(pairs.hidden_bytes.data(), pairs.hidden_bytes.size());
  }
  const std::int64_t block = std::min(pairs_of_block(info), info.pairs);
  std::vector<char> rows(static_cast<std::size_t>(block * row_bytes));
  std::vector<float> scores(static_cast<std::size_t>(block * heads));
  std::int64_t kept = 0;
  for (std::int64_t begin = 0; begin < info.pairs; begin += block) {
    const std::int64_t count = std::min(block, info.pairs - begin);
    source.read(layer, begin, count, rows.data(), scores.data());
    std::int64_t good = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const char* const row = rows.data() + i * row_bytes;
      const float* const score = scores.data() + i * heads;
      if (!are_finite(info.dtype, row, inputs) || !are_finite(DType::f32, score, heads)) {
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
        std::copy_n(row, row_bytes, rows.data() + good * row_bytes);
        std::copy_n(score, heads, scores.data() + good * heads);
      }
      ++good;
    }
    copy_block(pairs.hidden_bytes, kept, rows.data(), good);
    copy_block(pairs.scores, kept, scores.data(), good);
    kept += good;
  }
  return pairs;
}

}  // namespace kvzap::train
