// From logits to the next token.
#pragma once

#include <kvzap/types.hpp>
#include <random>
#include <string>
#include <vector>

namespace kvzap {

/// How the next token is drawn from the logits.
struct SamplingOptions {
  /// 0: greedy. Otherwise logits are divided by it.
  double temperature = 0;
  /// Keep the k most likely tokens; 0 keeps all.
  std::int64_t top_k = 0;
  /// Keep the smallest set of most likely tokens whose probabilities sum to at least top_p.
  double top_p = 1;
  std::uint64_t seed = 0;
};

/// Draws tokens; filters apply in the order temperature, top-k, top-p, as in transformers. The same
/// seed gives the same draws on every platform.
class Sampler {
 public:
  /// Throws Error if temperature < 0, top_k < 0, top_p outside (0, 1], or any is NaN.
  explicit Sampler(const SamplingOptions& options);

  /// The next token; ties go to the smaller id. Returns -1 if a logit is NaN or the largest is not
  /// finite.
  TokenId operator()(const std::vector<float>& logits);

  /// Where the random numbers are: the text that C++ defines for std::mt19937_64, so that it fits
  /// every platform.
  std::string state() const;
  /// Goes on from there. Throws Error, and changes nothing, for a text that is none.
  void set_state(const std::string& state);

 private:
  SamplingOptions m_options;
  std::mt19937_64 m_random;
  // Of one call; kept because they are as long as the vocabulary.
  std::vector<TokenId> m_order;
  std::vector<double> m_cumulative;
};

}  // namespace kvzap
