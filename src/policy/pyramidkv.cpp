#include "policy/registry.hpp"
#include "policy/snapkv.hpp"

namespace kvzap::policy {
namespace {

struct PyramidParameters : SnapKvParameters {
  double beta =
      number("beta", 20, {1, 1e6}, "steepness: the last layer keeps 1/beta of the mean budget");
};

}  // namespace

/// PyramidKV (Cai et al., arXiv 2406.02069): SnapKV's scores (snapkv.cpp: formula, shapes, cost),
/// and a budget that decreases from the first layer to the last. The budget is Budget::pyramid with
/// this policy's `window` and `beta`:
///
///   n(layer) = n_max - layer (n_max - n_min) / (layers - 1),  n_min = r / beta,
///   n_max = 2 r - n_min,  r = tokens (1 - evict ratio)
///
/// If n_max exceeds the sequence, it is capped and n_min rises. If n_min is below the window, all
/// layers keep r. This is kvpress' form, which always applies the ratio; the paper's code does not
/// prune short prompts.
PolicyInfo pyramidkv() {
  PolicyInfo info;
  info.name = "pyramidkv";
  info.paper = "PyramidKV, arXiv 2406.02069";
  info.formula = "snapkv's; the budget decreases with depth";
  info.needs = "queries of the newest w tokens, keys";
  info.cost = "time O(w d rows) per query head; memory O(rows), at most 16 MiB more";
  info.make_with<PyramidParameters>(make_snapkv);
  info.shape = [](Budget& budget, const PolicyArguments& arguments) {
    const auto p = values_of<PyramidParameters>(arguments);
    budget.pyramid = true;
    budget.pyramid_window = p.window;
    budget.pyramid_beta = p.beta;
  };
  return info;
}

}  // namespace kvzap::policy
