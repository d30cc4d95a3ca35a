// The most likely tokens of a row of logits, found without sorting or copying the others.
#pragma once

#include <cstddef>
#include <kvzap/core/types.hpp>
#include <vector>

namespace kvzap::engine {

/// Finds tokens by the largest logits of blocks of 64: the largest `count` of these bound `count`
/// tokens, and only blocks above the bound are read again. Equal logits: the smaller id first.
class LikelyTokens {
 public:
  /// Reads logits (count), which must outlive the other calls.
  void read(const float* logits, std::size_t count);

  /// Returns whether no logit is NaN and the largest one is finite.
  bool is_finite() const;
  /// Returns the largest logit, and its token.
  float largest() const { return m_largest; }
  TokenId best() const;
  /// Returns the most likely tokens in order: at least min(count, all), at most twice as many.
  const std::vector<TokenId>& sorted(std::size_t count);
  /// Returns the sum of exp((logit - largest) / temperature) over all tokens, within 1e-12 of it.
  double total(double temperature) const;

 private:
  const float* m_logits = nullptr;
  std::size_t m_count = 0;
  std::vector<float> m_most;  // (block)
  float m_largest = 0;
  bool m_has_nan = false;
  std::vector<float> m_selected;  // scratch
  std::vector<TokenId> m_order;
};

}  // namespace kvzap::engine
