#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/lab/train.hpp>

#include "train/random.hpp"

namespace kvzap {

PairSplit split_pairs(const PairsInfo& info, double share, std::uint64_t seed) {
  if (!(share >= 0 && share < 1)) {
    throw Error(
        fmt::format("the validation share is {}; expected at least 0 and less than 1", share));
  }
  if (info.pairs < 1) throw Error("there are no pairs to train on");
  PairSplit split;
  split.is_validation.assign(static_cast<std::size_t>(info.pairs), false);
  split.training = info.pairs;
  if (share == 0) return split;

  // Pairs of one text are similar, so a text stays on one side of the split.
  const std::int64_t texts = static_cast<std::int64_t>(info.text_begin.size()) - 1;
  split.by_text = texts >= 2 && static_cast<double>(texts) * share >= 1;
  const std::int64_t units = split.by_text ? texts : info.pairs;
  const auto begin_of = [&](std::int64_t unit) {
    return split.by_text ? info.text_begin[static_cast<std::size_t>(unit)] : unit;
  };
  const auto about = std::llround(share * static_cast<double>(units));
  const std::int64_t wanted = std::max<std::int64_t>(1, std::min<std::int64_t>(about, units - 1));
  const std::vector<std::int64_t> order =
      train::permutation(units, train::seed_of(seed, train::RandomStream::split, 0, 0));
  for (std::int64_t i = 0; i < wanted; ++i) {
    const std::int64_t unit = order[static_cast<std::size_t>(i)];
    for (std::int64_t p = begin_of(unit); p < begin_of(unit + 1); ++p) {
      split.is_validation[static_cast<std::size_t>(p)] = true;
      ++split.validation;
    }
  }
  split.training = info.pairs - split.validation;
  if (split.training < 1) {
    throw Error(
        fmt::format("nothing is left to train on: of {} pairs {} are kept back for "
                    "validation",
                    info.pairs, split.validation));
  }
  return split;
}

}  // namespace kvzap
