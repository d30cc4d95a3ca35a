// One context, many ways to prune it: the model reads the context once, every setting scores it,
// and the answers of all settings are generated side by side.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/engine.hpp>
#include <kvzap/generate.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// A way to prune: what CacheOptions says of a whole engine, for one of several settings.
struct PruneSetting {
  /// Null: the full cache.
  std::shared_ptr<const PolicyChoice> policy;
  /// prefill, or always for policies that judge new tokens by themselves with a threshold.
  PruneMode prune = PruneMode::prefill;
  PruneMoment prune_after = PruneMoment::context;
  /// Sparse prefill cannot share what the dense one has computed: it runs the context by itself.
  PrefillMode prefill = PrefillMode::dense;
};

/// What settings can share of the context's prefill.
enum class PrefillShare {
  context,  // one dense prefill of the context
  whole,    // one dense prefill of context and question together
  none      // a prefill of their own
};
PrefillShare prefill_share(const PruneSetting& setting);

/// What became of one setting.
struct SettingAnswer {
  /// One a try.
  std::vector<std::vector<TokenId>> tokens;
  std::vector<StopReason> stop_reasons;
  /// After pruning, before the first generated token; bytes are those of this sequence alone:
  /// full_bytes and live_bytes.
  CacheReport pruned;
  /// Log probabilities (natural) of the continuation's tokens, if one was given.
  std::vector<double> log_probabilities;
  /// The shared prefill of the group it belongs to, and its own scoring and pruning.
  double prefill_seconds = 0;
  /// Its share of the steps after: a step's time is divided evenly among its sequences.
  double decode_seconds = 0;
};

/// How a question is answered under every setting.
struct ComparisonOptions {
  std::int64_t max_new_tokens = 128;
  std::vector<TokenId> stop_ids;
  /// Positions that may be used at all; 0: no limit.
  std::int64_t max_tokens = 0;
  SamplingOptions sampling;
  /// Answers drawn for each setting; the seed of try t is sampling.seed + t.
  int tries = 1;
  /// Instead of generating, these tokens are fed and their likelihood taken.
  std::vector<TokenId> continuation;
};

/// All ranks make the same calls in the same order.
class Comparison {
 public:
  /// `engine` prunes nothing by itself (CacheOptions::prune is none); its window, sink and chunk
  /// are every setting's. `batch`: sequences that generate together at most; 0: as many as there
  /// are. Throws Error for a setting that an engine of its own would refuse, naming it.
  Comparison(std::unique_ptr<Engine> engine, std::vector<PruneSetting> settings,
             std::int64_t batch = 0);
  ~Comparison();

  /// Reads a context, and forgets the one before.
  void prefill(const std::vector<TokenId>& context, const ProgressCallback& progress = {});
  /// Answers a question about it (possibly empty) under every setting; may be called again.
  std::vector<SettingAnswer> answer(const std::vector<TokenId>& question,
                                    const ComparisonOptions& options,
                                    const ProgressCallback& progress = {});

  const std::vector<PruneSetting>& settings() const;
  Engine& engine();

 private:
  struct State;
  std::unique_ptr<State> m_state;
};

}  // namespace kvzap
