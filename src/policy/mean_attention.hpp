// How far back each KV head looks, from its mean query and key over a few texts.
#pragma once

#include <kvzap/engine/policies.hpp>

namespace kvzap::policy {

/// The scores that kvpress' duo_attention_on_the_fly computes in place of a learned pattern. Of
/// each text, as long as it is: the mean over its tokens of a head's queries and keys, before RoPE
/// and after the norms that some models have there. Then, as if each of `tokens` positions had the
/// mean query and the mean key, turned by RoPE: the attention of the last query, a_j, and
///
///   score = mean over i of sum over j <= i of a_j,
///
/// which is near 0 if it all goes to the newest positions and near 1 if it all goes to the first.
/// A KV head has the mean over its query heads, and over texts.
///
/// Cost, on top of running the texts: a pass over queries and keys, and tokens * head_dim
/// operations per query head, layer and text. Memory: one block's queries, one head's keys.
class MeanAttention final : public Calibration {
 public:
  /// tokens: positions that the means are repeated at, >= 1.
  MeanAttention(std::filesystem::path texts, std::int64_t tokens)
      : m_texts(std::move(texts)), m_tokens(tokens) {}

  const std::filesystem::path& texts() const override { return m_texts; }
  void begin() override;
  std::unique_ptr<Policy> watch() override;
  void finish(const Communicator& comm) override;

  /// (layer, KV head), of all ranks: in (0, 1]. Empty until `finish`.
  const std::vector<std::vector<double>>& scores() const { return m_scores; }

 private:
  class Watcher;

  std::filesystem::path m_texts;
  std::int64_t m_tokens;
  std::int64_t m_watched = 0;  // texts
  int m_kv_heads = 1;
  std::vector<double> m_sums;  // (layer, KV head): over texts, of the heads on this rank
  std::vector<std::vector<double>> m_scores;
};

}  // namespace kvzap::policy
