// Guesses of an answer's next tokens: the text that followed the same tokens before.
#pragma once

#include <array>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <unordered_map>
#include <vector>

namespace kvzap {

/// Tokens that drafts had, and those of them that the model has drawn, too.
struct DraftCounts {
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
};

/// Drafts of prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding;
/// "Inference with Reference", Yang et al., arXiv 2304.04487). A draft is the text after the most
/// recent earlier occurrence of the newest tokens, at most 3 of them and as many as occur.
///
/// Drafts adapt to how many of their tokens are accepted. A draft is twice as long as one that was
/// accepted whole, and as long as the accepted part of one that was not. The numbers 1, 2 and 3 of
/// equal tokens have their own statistics. One whose drafts fail pauses, each time for twice as
/// many tokens, up to 64. So a text without repetitions costs little, and the same tokens give the
/// same drafts.
class PromptLookup {
 public:
  /// The largest number that options take for `most`. (Ranks share out spans from 64 tokens on.)
  static constexpr std::int64_t most_tokens = 32;
  /// `most`: tokens of a draft; 0: there are no drafts.
  explicit PromptLookup(std::int64_t most = 0) : m_most(most) {}

  /// Appends the next token of the prompt or the answer.
  void append(TokenId token);
  /// Returns guesses of the next tokens, at most `most`; often none. Time O(most).
  std::vector<TokenId> draft(std::int64_t most);
  /// Tells how many tokens of the latest draft were accepted, before these are appended. `counted`:
  /// the number of its tokens that were compared.
  void judge(std::int64_t accepted);

  const DraftCounts& counts() const { return m_counts; }

 private:
  static constexpr int longest = 3;  // equal tokens
  /// Drafts after one number of equal tokens.
  struct Match {
    std::unordered_map<std::uint64_t, std::int64_t> next;  // of a hash: the token after the latest
    double rate = 1;         // running mean of accepted tokens / drafted tokens
    std::int64_t pause = 0;  // tokens after the next failure
    std::int64_t until = 0;  // tokens of the text before which no draft is made
  };

  std::uint64_t hash_of(int equal, std::int64_t end) const;
  std::int64_t find(int equal) const;

  std::int64_t m_most;
  std::int64_t m_length = 2;  // of the next draft
  std::vector<TokenId> m_tokens;
  std::array<Match, longest> m_matches;
  int m_equal = 0;             // of the latest draft
  std::int64_t m_drafted = 0;  // tokens of the latest draft
  DraftCounts m_counts;
};

}  // namespace kvzap
