// One context, many ways to prune it: the model reads the context once, every setting scores it,
// and the answers of all settings are generated side by side.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/generate.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// What settings can share of the context's prefill.
enum class PrefillShare {
  context,  // one dense prefill of the context
  whole,    // one dense prefill of context and question together
  none      // a prefill of their own
};
/// What a setting shares; a full cache shares the context's prefill.
PrefillShare prefill_share(const PruneSetting& setting);

/// What became of one setting.
struct SettingAnswer {
  /// One a try.
  std::vector<std::vector<TokenId>> tokens;
  std::vector<StopReason> stop_reasons;
  /// After pruning and the question, before the first generated token; bytes and seconds are those
  /// of this setting alone: full_bytes, live_bytes, score_seconds (what scored the context, shared
  /// with other settings or not) and prune_seconds.
  CacheReport pruned;
  /// The same at the end of the first try: with the question's rows and those generated, of which
  /// PruneMode::always has evicted some.
  CacheReport cache;
  /// Log probabilities (natural) of the continuation's tokens, if one was given.
  std::vector<double> log_probabilities;
  /// The shared prefill of the group it belongs to, without what only others needed, and its own
  /// scoring and pruning.
  double prefill_seconds = 0;
  /// Its share of the steps after, the question's included: a step's time is divided evenly among
  /// its sequences. Of all tries.
  double decode_seconds = 0;
};

/// How a question is answered under every setting.
struct ComparisonOptions {
  std::int64_t max_new_tokens = 128;
  std::vector<TokenId> stop_ids;
  /// Positions that may be used at all; 0: no limit.
  std::int64_t max_tokens = 0;
  SamplingOptions sampling;
  /// Answers drawn for each setting; the seed of try t is sampling.seed + t. Without a temperature
  /// all are the first one.
  int tries = 1;
  /// Instead of generating, these tokens are fed and their likelihood taken, as far as max_tokens
  /// lets them.
  std::vector<TokenId> continuation;
};

/// Reads a context once for many settings and answers questions under each of them, with the rows
/// and the tokens that a Generator with an engine of the setting alone has (what is equal up to the
/// rounding of sums aside).
///
/// The context's rows stay as long as it is at hand, beside 4 bytes a row and KV head for each
/// policy that is not another's equal; where policies look at the question, its rows and theirs
/// exist once more while they answer. Every setting's answer is generated from a fork, of which it
/// evicts its rows: so many sequences together as `batch` allows, and half as many each time that
/// the engine (CacheOptions::kv_limit) has no memory for them. What is free between contexts stays
/// in the engine's pool (Engine::trim hands it back).
///
/// All ranks make the same calls in the same order.
class Comparison {
 public:
  /// `engine` prunes nothing by itself (CacheOptions::prune is none); its window, sink and chunk
  /// are every setting's. `batch`: sequences that generate together at most; 0: as many as there
  /// are. Policies that learn from texts have been calibrated. Throws Error for a setting that an
  /// engine of its own would refuse, naming it.
  Comparison(std::unique_ptr<Engine> engine, std::vector<PruneSetting> settings,
             std::int64_t batch = 0);
  ~Comparison();

  /// Reads a context, and forgets the one before. Throws what Engine::step throws; no context is at
  /// hand then. `progress` gets "prefill" and "repeat".
  void prefill(const std::vector<TokenId>& context, const ProgressCallback& progress = {});
  /// Answers a question about it (possibly empty: the answer then continues the context) under
  /// every setting, in their order; may be called again. `progress` gets "answer" and answers.
  /// Throws AgreedOutOfMemory where there is no room for a single setting, what Engine::step
  /// throws, and AgreedError where logits are not finite.
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
