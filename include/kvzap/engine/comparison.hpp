// Comparison of several prunings of one context. The model reads the context once, every setting
// scores it, and the answers of all settings are generated in one batch.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/generate.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// The part of the prefill that a setting shares with others.
enum class PrefillShare {
  context,  // one dense prefill of the context
  whole,    // one dense prefill of context and question together
  none  // nothing: settings with sparse prefill (of the question, too, if it decides), or with cuts
        // while they answer, read by themselves
};
/// Returns the part that a setting shares. A full cache shares the context's prefill.
PrefillShare prefill_share(const LoadedPruning& setting);

/// The answers under one setting.
struct SettingAnswer {
  /// Token ids of each try.
  std::vector<std::vector<TokenId>> tokens;
  std::vector<StopReason> stop_reasons;
  /// The cache after pruning and the question, before the first generated token. full_bytes,
  /// live_bytes, score_seconds and prune_seconds are those of this setting alone. score_seconds is
  /// the scoring of the context, even if other settings share it.
  CacheReport pruned;
  /// The cache at the end of the first try, with the rows of the question and of the generated
  /// tokens. With PruneMode::always some of them have been evicted.
  CacheReport cache;
  /// Log probabilities (natural) of the continuation's tokens, if a continuation was given.
  std::vector<double> log_probabilities;
  /// Seconds of the group's shared prefill, plus the scoring and pruning of this setting. Excludes
  /// the scoring for other settings.
  double prefill_seconds = 0;
  /// Seconds of this setting in the later steps, the question's included, over all tries. The time
  /// of a step is divided evenly among its sequences.
  double decode_seconds = 0;
};

/// Options for the answers to one question.
struct ComparisonOptions : StopRules {
  SamplingOptions sampling;
  /// Answers drawn for each setting. The seed of try t is sampling.seed + t. Without a temperature
  /// all tries equal the first one.
  int tries = 1;
  /// If not empty, these tokens are fed instead of generated ones, and their likelihood is
  /// measured, up to max_tokens. Up to 64 of them run together, unless the setting evicts rows
  /// while it reads them.
  std::vector<TokenId> continuation;
};

/// Reads a context once for many settings and answers questions under each of them. Rows and tokens
/// equal those of a Generator whose engine has the setting alone, up to the rounding of sums.
///
/// The context's rows stay in memory while the context is in use. In addition, each distinct policy
/// takes 4 bytes per row and KV head. If policies depend on the question, their prefill of context
/// and question takes the same memory again while they answer. The answer of each setting is
/// generated from a fork that evicts its own rows. Up to `batch` sequences run together. If the
/// engine runs out of memory (CacheOptions::kv_limit), the comparison halves that number. Memory
/// that is free between contexts stays in the engine's pool; Engine::trim releases it.
///
/// Every rank must make the same calls in the same order.
class Comparison {
 public:
  /// `engine` must not prune by itself. Settings that prune have its window. `batch`: largest
  /// number of sequences that generate together; 0: no limit. Policies that learn from texts must
  /// have been calibrated. Throws Error that names the setting if an engine with this setting alone
  /// would refuse it.
  Comparison(std::unique_ptr<Engine> engine, std::vector<LoadedPruning> settings,
             std::int64_t batch = 0);
  ~Comparison();

  /// Reads a context and discards the previous one. `progress` receives "prefill" and "repeat".
  /// Throws the errors of Engine::step; then there is no context.
  void prefill(const std::vector<TokenId>& context, const ProgressCallback& progress = {});
  /// Answers a question about the context under every setting. Returns the answers in the order of
  /// the settings. If the question is empty, the answer continues the context. May be called again.
  /// `progress` receives "answer" and the number of answers. Throws AgreedOutOfMemory if there is
  /// no memory for even one setting, AgreedError if logits are not finite, and the errors of
  /// Engine::step.
  std::vector<SettingAnswer> answer(const std::vector<TokenId>& question,
                                    const ComparisonOptions& options,
                                    const ProgressCallback& progress = {});

  const std::vector<LoadedPruning>& settings() const;
  Engine& engine();

 private:
  struct State;
  std::unique_ptr<State> m_state;
};

}  // namespace kvzap
