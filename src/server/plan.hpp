// The message in which rank 0 tells all ranks of a server their next step, and the outcome of the
// step.
#pragma once

#include <cstdint>
#include <kvzap/server/executor.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::server {

/// Next tokens of a sequence.
struct PlannedSpan {
  int handle = -1;
  StepPart part = StepPart::other;
  StepOutput output = StepOutput::none;
  /// The span ends a context. A held context (StepPart::held) is judged now, and a policy is told.
  bool ends_context = false;
  /// Fork the sequence after the span, under this handle; -1: no fork.
  int keep_as = -1;
  /// Fork the sequence, whose held context ends, under this handle before the context is judged;
  /// -1: no fork.
  int spare_as = -1;
  std::vector<TokenId> tokens;
  /// Of StepOutput::drawn and all_drawn, which steps of one rank alone have: they are not sent.
  std::vector<TokenDraw> draws = {};
  bool context_follows = false;  // see StepRule
};

/// A new sequence: an empty one or a fork.
struct PlannedSequence {
  int handle = -1;
  int source = -1;  // -1: an empty sequence
  // Of an empty sequence; absent: the engine's.
  std::optional<Pruning> pruning;
  std::optional<PageFormat> page_format;
  std::int64_t tokens = -1;  // of a fork: the source's first tokens; -1: all
  std::string file = {};     // of a stored state, which the sequence continues; empty: none
};

/// A sequence to write to a file.
struct PlannedFile {
  int handle = -1;
  std::string file;
  /// Of rank 0, which alone needs it: it is not sent.
  std::shared_ptr<const SnapshotInfo> info;
};

/// Tokens of a draft that a sequence's last step has run and the answer does not have.
struct PlannedTakeBack {
  int handle = -1;
  std::int64_t tokens = 0;
};

/// One message. Rank 0 chooses the handles of sequences. The executor acts in the order of members.
/// The sequences of the spans have one engine.
struct Plan {
  std::vector<PlannedTakeBack> take_backs;
  std::vector<int> reports;  // sequences whose state is reported
  std::vector<int> frees;
  bool trims = false;
  std::vector<PlannedSequence> creates;
  std::vector<PlannedSpan> spans;
  /// Begin to write a sequence, which stays as it is meanwhile. No other one is being written.
  std::optional<PlannedFile> stores;
  /// Continue with the file that is being written.
  bool advances = false;
  /// There is no work now: ranks sleep until the next plan.
  bool sleeps = false;
  /// This is the last plan.
  bool ends = false;
  std::vector<int> counts;  // sequences whose rows are counted by token, first of all

  std::string encode() const;
  /// Throws Error for a message that `encode` cannot have made.
  static Plan decode(const std::string& message);
};

/// Gives every rank the plan of rank 0. One broadcast is enough for a decode step of some tens of
/// sequences; a longer plan needs a second one. Collective.
void share(Plan& plan, const Communicator& comm);

/// The outcome of a plan: equal on all ranks, except for logits.
struct Outcome {
  /// Sequences that could not be created for lack of memory. The step is then omitted.
  std::vector<int> not_made;
  /// The step ran out of memory and changed no sequence.
  bool out_of_memory = false;
  /// The error of a step that failed for another reason; its sequences are freed.
  std::string failure;
  /// One result for each span, if a step ran.
  std::vector<StepResult> results;
  /// Sequences that were freed, because the work after their step failed.
  std::vector<int> lost;
  /// Errors of those that did not fail for lack of memory.
  std::map<int, std::string> failures;
  /// Handles of `keep_as` and `spare_as` without a sequence, because the fork failed.
  std::vector<int> not_kept;
  std::vector<CacheReport> reports;
  /// Sequences that could not be read from their files, and why.
  std::map<int, std::string> not_read;
  /// The file that was being written is complete.
  bool has_stored = false;
  /// Why it was not written.
  std::string store_failure;
  /// Sentences about files that killed processes left behind.
  std::vector<std::string> store_notes;
  /// Of the sequences of Plan::counts; without rows if they are not known or memory is short.
  std::vector<TokenRows> counts;
};

}  // namespace kvzap::server
