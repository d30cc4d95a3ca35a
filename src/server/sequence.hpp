// A request in progress, its sequences, and the keys under which the prefix tree keeps their
// states.
#pragma once

#include <cstdint>
#include <kvzap/engine/continuation.hpp>
#include <kvzap/server/scheduler.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "base/stopwatch.hpp"
#include "server/prefill_order.hpp"
#include "server/prefix_tree.hpp"

namespace kvzap::server {

/// Returns the beginning of a key. Sequences with different prunings or types of rows share no key.
PrefixKey key_of(const GenerationRequest& request);
/// Number of key elements of a segment: its tokens and marks.
std::int64_t key_length(const Segment& segment);
void append_segment(PrefixKey& key, const Segment& segment);
/// Adds generated tokens. `begins`: they are the first of the answer.
void append_answer(PrefixKey& key, const std::vector<TokenId>& tokens, bool begins);
/// Length of the longest kept state from which a prompt can continue. At least one token has to
/// run, because its logits give the first token of the answer.
std::int64_t longest_start(const PrefixKey& prompt);

/// A request in progress.
struct Job {
  GenerationRequest request;
  std::shared_ptr<Listener> listener;
  std::shared_ptr<Scheduler::Ticket> ticket;
  Executor::Traits traits;
  std::shared_ptr<ClientShare> share;
  base::Clock::time_point start = base::Clock::now();
  std::int64_t prompt_tokens = 0;
  PrefixKey key;                 // of the whole prompt
  std::int64_t key_begin = 0;    // its elements before those of the first segment
  bool has_one_context = false;  // its first segment is the only context
  int open = 0;                  // answers that have not ended
  std::int64_t reported = 0;     // tokens of the prompt, with GenerationRequest::prompt_logprobs
  bool has_run = false;          // one of its sequences
  bool is_dead = false;          // cancelled or failed: its listener is not called again
};

/// One answer of a request, waiting or running.
struct Sequence {
  std::shared_ptr<Job> job;
  int choice = 0;
  int handle = -1;  // of a running sequence
  PrefixKey key;    // of the tokens that have run
  /// No row was evicted or forgotten since the key had this length: the state can be cut back to
  /// it.
  std::int64_t whole_from = 0;
  std::int64_t tokens = 0;
  std::int64_t cached = 0;
  base::Clock::time_point start;  // of the prompt
  // The next token of the prompt.
  std::size_t segment = 0;
  std::size_t offset = 0;
  std::optional<Continuation> said;  // the answer, once it has begun
  std::size_t fed = 0;               // tokens of the answer that have run
  std::int64_t to_read = 0;          // tokens outside kept states; an estimate while it waits
  std::int64_t alone_until = 0;      // tokens up to which no other sequence shares its steps
  int passed_over = 0;               // steps of others while it was the oldest and got no rows
  base::Clock::time_point last_token;
  bool has_ended = false;
  EndReason reason = EndReason::stop_id;
  double evict_ratio = 0;
  std::int64_t kv_bytes = 0, full_kv_bytes = 0;
  std::vector<double> pooled;  // GenerationRequest::pooling, of the tokens that have run

  const std::vector<TokenId>& answered() const;
  const GenerationRequest& request() const { return job->request; }
  const PageFormat& page_format() const { return *request().page_format; }
  bool is_prompt_run() const { return segment == request().prompt.size(); }
  /// Whether the next step yields a new token.
  bool is_decoding() const { return is_prompt_run() && fed + 1 == answered().size(); }
  /// Whether the log probabilities of the prompt's next tokens are to be reported.
  bool reports_prompt() const {
    return request().prompt_logprobs && !is_prompt_run() && job->reported < job->prompt_tokens;
  }
  /// Whether a step that it shared has failed at tokens that it has not run since.
  bool runs_alone() const { return tokens < alone_until; }
  /// Whether a step can check drafts of its answer.
  bool drafts() const {
    return page_format().quantised() ? job->traits.drafts_packed : job->traits.drafts;
  }
  std::int64_t prompt_left() const { return is_prompt_run() ? 0 : job->prompt_tokens - tokens; }
  /// Tokens that run before the next new token.
  std::int64_t left_to_read() const;

  /// Number of tokens of a segment that were not, or will not be, taken from a kept state.
  std::int64_t fresh_tokens(std::size_t segment_index) const;
  /// The key after `count` more tokens of the current segment: a beginning of the prompt's key.
  PrefixKey prompt_key_after(std::int64_t count) const;
  /// Returns to the state before the first token. Keeps the answer so far.
  void rewind();
  /// Skips the first `length` elements of the prompt's key. If only the judging of a context would
  /// remain after them, returns false and changes nothing.
  bool skip(std::int64_t length);
};

}  // namespace kvzap::server
