// Measures how far each KV head looks back, from its mean query and key over a few texts.
#pragma once

#include <kvzap/engine/policies.hpp>

namespace kvzap::policy {

/// The scores that kvpress' duo_attention_on_the_fly computes instead of a learned pattern. For
/// each text, of any length, it takes the mean over tokens of a head's queries and keys, before
/// RoPE and after the norms that some models have there. Then each of `tokens` positions gets the
/// mean query and the mean key, rotated by RoPE. With a_j the attention of the last query,
///
///   score = mean over i of sum over j <= i of a_j.
///
/// This is near 0 if all attention is on the newest positions, and near 1 if all is on the first.
/// The score of a KV head is the mean over its query heads and over texts.
///
/// Cost beside running the texts: a pass over queries and keys, and tokens * head_dim operations
/// per query head, layer and text. Memory: one block's queries and one head's keys.
class MeanAttention final : public TextLearner {
 public:
  /// tokens: number of positions that get the means, >= 1.
  MeanAttention(std::filesystem::path texts, std::int64_t tokens)
      : m_texts(std::move(texts)), m_tokens(tokens) {}

  const std::filesystem::path& texts() const override { return m_texts; }
  void begin() override;
  std::unique_ptr<Policy> watch() override;
  void finish(const Communicator& comm) override;

  /// (layer, KV head) of all ranks, in (0, 1]. Empty until `finish`.
  const std::vector<std::vector<double>>& scores() const { return m_scores; }

 private:
  class Watcher;

  std::filesystem::path m_texts;
  std::int64_t m_tokens;
  std::int64_t m_watched = 0;  // texts
  int m_kv_heads = 1;
  std::vector<double> m_sums;  // (layer, KV head): sums over texts for the heads on this rank
  std::vector<std::vector<double>> m_scores;
};

}  // namespace kvzap::policy
