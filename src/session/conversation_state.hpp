// Questions and answers about a context, as snapshots record them.
#pragma once

#include <kvzap/core/types.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::session {

struct AnsweredQuestion {
  std::string question;
  std::string text;
  Answer answer;
  /// Whether a person has ended the answer (kvzap chat). The stop reason is then "interrupted".
  bool is_interrupted = false;
  bool is_from_snapshot = false;  // answered by an earlier process, whose times are unknown
};

/// Returns the stop reason of kvzap::StopReason, or "interrupted".
std::string_view stop_reason_of(const AnsweredQuestion& answered);

/// A conversation, without its cache and the unfinished answer.
struct ConversationState {
  /// Texts of the questions and their token ids. A text is empty if the question is only the end of
  /// the chat template. Session::save may write none.
  std::vector<std::string> texts;
  std::vector<std::vector<TokenId>> questions;
  /// The finished answers, in order.
  std::vector<AnsweredQuestion> answers;
  /// The context's cache, once it is pruned.
  std::optional<CacheReport> context;
  /// Value type in which these reports count bytes.
  DType dtype = DType::f32;
  /// See identity_of_policy.
  std::string policy;
  /// System message of the chat template, if it is not the template's own.
  std::optional<std::string> system;
  /// Hash of the model's generation_config.json; "" if it has none. Absent in older snapshots.
  std::optional<std::string> generation;
  std::optional<LookedUpThreshold> looked_up;
};

/// Returns the text of the snapshot's attribute run_state.
std::string to_json_text(const ConversationState& state);
/// Parses it. Throws Error, or the JSON library's exceptions, for a state that does not fit
/// `header`.
ConversationState read_state(const nlohmann::json& value, const SnapshotHeader& header);

/// Converts the byte counts to values of type `to`.
void convert(ConversationState& state, DType to);

}  // namespace kvzap::session
