// From logits to the next token.
#pragma once

#include <kvzap/core/types.hpp>
#include <random>
#include <string>
#include <unordered_map>
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
  /// Keep the tokens that are at least this many times as likely as the likeliest; 0 keeps all.
  double min_p = 0;

  // The rest changes logits before anything else, greedy or not, by the tokens that came before.

  /// The logit of each token of the prompt or the answer is divided by it where it is positive, and
  /// multiplied otherwise; 1 changes nothing. As transformers' repetition_penalty.
  double repetition_penalty = 1;
  /// Taken off the logit of each token that the answer has already: presence_penalty once,
  /// frequency_penalty as often as it has it. As OpenAI's API and vLLM; the prompt does not count.
  double presence_penalty = 0;
  double frequency_penalty = 0;
  /// The three penalties look at so many of the most recent tokens; 0: at none, -1: at all.
  std::int64_t repeat_last_n = -1;
  /// Tokens that are never drawn.
  std::vector<TokenId> suppress_tokens = {};
  /// Sequences, none of them empty, whose last token is not drawn where the others stand before it.
  /// As transformers' bad_words_ids: a sequence of more tokens than stand there at all does
  /// nothing.
  std::vector<std::vector<TokenId>> bad_words = {};

  /// Whether anything may change logits.
  bool changes_logits() const;
  /// Whether the next token is simply that with the largest logit, so that no logits are needed.
  bool is_plain() const { return temperature == 0 && !changes_logits(); }
};

/// Draws tokens. Logits are changed in the order repetition penalty, frequency and presence
/// penalty, bad words, suppressed tokens; filters apply in the order temperature, top-k, top-p,
/// min-p: the order of transformers, which has no frequency and presence penalties. The same seed
/// gives the same draws on every platform.
class Sampler {
 public:
  /// Throws Error, naming the option, if temperature < 0, top_k < 0, top_p outside (0, 1], min_p
  /// outside [0, 1], repetition_penalty not in [1e-6, 1e6], another penalty beyond 1e6 in size,
  /// repeat_last_n < -1, any is NaN, a suppressed token is negative, or a bad word is empty or has
  /// a negative token.
  explicit Sampler(const SamplingOptions& options);

  /// Tokens of the prompt, in parts or whole, before any of the answer.
  void append_prompt(const std::vector<TokenId>& tokens);
  /// The next token of the answer (operator() does not append it by itself).
  void append(TokenId token);

  /// The next token, from the model's own logits; ties go to the smaller id. Returns -1 if a logit
  /// is NaN, the largest is not finite, or no token may be drawn.
  TokenId operator()(const std::vector<float>& original);
  /// What the options make of the logits, in float as in transformers: penalties; -inf for tokens
  /// that must not be drawn. Ids beyond the logits are passed over.
  void change(std::vector<float>& logits) const;

  /// Where the random numbers are: the text that C++ defines for std::mt19937_64, so that it fits
  /// every platform. Tokens are not part of it.
  std::string state() const;
  /// Goes on from there. Throws Error, and changes nothing, for a text that is none.
  void set_state(const std::string& state);

 private:
  struct Count {
    std::int64_t all = 0;
    std::int64_t answered = 0;
  };

  void take(TokenId token);

  SamplingOptions m_options;
  bool m_changes_logits = false;
  std::mt19937_64 m_random;
  // What came before, its prompt first; empty where no option looks at it.
  std::vector<TokenId> m_tokens;
  std::size_t m_prompt_tokens = 0;
  std::unordered_map<TokenId, Count> m_counts;  // of those that penalties look at
  // Of one call; kept because they are as long as the vocabulary.
  std::vector<float> m_changed;
  std::vector<TokenId> m_order;
  std::vector<double> m_cumulative;
};

}  // namespace kvzap
