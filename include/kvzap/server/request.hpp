// A request to a server's scheduler, and the listener that receives its answers.
#pragma once

#include <cstdint>
#include <kvzap/engine/prompt_lookup.hpp>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/server/executor.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvzap::server {

/// A part of a prompt.
struct Segment {
  /// How the tokens of a segment are judged.
  enum class Kind {
    context,   // at the segment's end; in sparse prefill chunk by chunk
    question,  // over the pruned context; only PruneMode::always judges them
    generated  // an earlier answer of the model, judged like one that it generates now
  };
  Kind kind = Kind::context;
  std::vector<TokenId> tokens;
  /// Lengths of beginnings that other prompts are expected to share, ascending. Used for a context
  /// that is judged as a whole: the scheduler also keeps the unjudged state of these beginnings.
  std::vector<std::int64_t> cuts = {};
  /// Other prompts are expected to share a beginning of unknown length, such as a document whose
  /// question is in the same text. The scheduler also keeps the state of the whole context before
  /// it is judged, from which it can cut beginnings.
  bool branches = false;
};

/// Returns the number of tokens in all segments.
std::int64_t tokens_of(const std::vector<Segment>& prompt);

/// How the hidden states of a prompt become one vector: that of its last token, or their mean.
enum class Pooling { last, mean };

/// One prompt, and how to answer it.
struct GenerationRequest {
  /// Has at least one token.
  std::vector<Segment> prompt;
  /// Number of answers to the prompt. Answer i draws with the seed of `sampling` + i.
  int choices = 1;
  /// 0: the prompt runs, and the answer has no token.
  std::int64_t max_new_tokens = 128;
  /// An answer ends with the first of these ids, which is its last token.
  std::vector<TokenId> stop_ids;
  SamplingOptions sampling;
  /// Number of likeliest tokens whose log probabilities are reported beside each token's own.
  /// Negative: no log probabilities.
  int top_logprobs = -1;
  /// Report the log probabilities of the prompt's tokens, too. The prompt then runs from its
  /// beginning, in pieces whose logits take a bounded memory.
  bool prompt_logprobs = false;
  /// The pruning of this request: the engine's policy, with its own amount and mode. Absent: the
  /// engine's pruning.
  std::optional<Pruning> pruning;
  /// How the cache stores rows that have left the window. Absent: as the engine does.
  std::optional<PageFormat> page_format;
  /// Whose request it is. The scheduler shares the prefill among clients, not among requests.
  std::string client;
  /// Whether the ending of answer 0 has Ending::kept.
  bool returns_kept = false;
  /// Report the vector of the prompt: its hidden states after the final norm. The prompt then runs
  /// from its beginning and leaves no state. Needs max_new_tokens = 0.
  std::optional<Pooling> pooling = {};
};

/// Natural logarithms of probabilities, before temperature, penalties and filters.
struct TokenLogprobs {
  float logprob = 0;
  /// The likeliest tokens first; the lower id first if two are equally likely.
  std::vector<std::pair<TokenId, float>> top;
};

/// How much of a prompt has run.
struct PromptProgress {
  std::int64_t total = 0;      // tokens
  std::int64_t cached = 0;     // of them, in the cache from an earlier request
  std::int64_t processed = 0;  // run or cached
  double seconds = 0;          // since the prompt left the queue
};

/// The tokens of a prompt and the rows that each still has at the end of an answer.
struct KeptTokens {
  std::vector<TokenId> tokens;
  std::vector<std::int64_t> rows;  // of each token: see TokenRows
  std::int64_t full = 0;           // rows of a token without eviction
};

/// Why an answer ends. `cut`: its listener returned false.
enum class EndReason { stop_id, cut, max_new_tokens, context_full };

/// An answer's counts at its end.
struct Ending {
  EndReason reason = EndReason::stop_id;
  std::int64_t prompt_tokens = 0;
  /// Prompt tokens that were in the cache from an earlier request.
  std::int64_t cached_tokens = 0;
  std::int64_t new_tokens = 0;
  double evict_ratio = 0;
  /// Bytes of the sequence's keys and values over all ranks.
  std::int64_t kv_bytes = 0;
  /// The same without eviction.
  std::int64_t full_kv_bytes = 0;
  /// The stop text before which the listener has cut the answer. The scheduler leaves it empty.
  std::string stop;
  DraftCounts drafts;
  /// If GenerationRequest::returns_kept; null after renumbered positions and for prompts
  /// that are longer than SchedulerOptions::max_kept_tokens.
  std::shared_ptr<const KeptTokens> kept;
};

/// Why a request has no answer.
struct RequestError {
  std::string what;
  /// The server is at fault, not the request.
  bool is_servers = false;
  /// The request's field that is at fault; "": none, or not known.
  std::string field = {};
};

/// Receives the answers to a request. The scheduler's thread calls it, so it must return quickly.
class Listener {
 public:
  virtual ~Listener() = default;
  /// Receives the progress of the prompt of answer `choice`: when it leaves the queue, and after
  /// each of its steps.
  virtual void on_progress(int /*choice*/, const PromptProgress& /*progress*/) {}
  /// Receives a token of answer `choice`. Returns false to end the answer with this token.
  virtual bool on_token(int choice, TokenId token, const TokenLogprobs* logprobs) = 0;
  /// Receives the next tokens of a prompt with GenerationRequest::prompt_logprobs. The first token
  /// of a prompt has no log probability.
  virtual void on_prompt(const std::vector<TokenId>& /*tokens*/,
                         const std::vector<std::optional<TokenLogprobs>>& /*logprobs*/) {}
  /// Receives the vector of a prompt with GenerationRequest::pooling, before its end:
  /// (hidden_size).
  virtual void on_embedding(std::vector<float> /*vector*/) {}
  /// Receives the end of answer `choice`.
  virtual void on_end(int choice, const Ending& ending) = 0;
  /// Receives an error. Nothing else follows.
  virtual void on_error(const RequestError& error) = 0;
};

}  // namespace kvzap::server
