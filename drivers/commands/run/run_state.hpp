// Progress of a run, as its snapshots record it.
#pragma once

#include <kvzap/core/types.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "commands/run/report.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {

/// Progress of a run, without its cache and the unfinished answer.
struct RunState {
  /// Texts of the questions and their token ids. A text is empty if the question is only the end of
  /// the chat template.
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
  /// Hash of the model's generation_config.json; "" if it has none. Absent in older snapshots.
  std::optional<std::string> generation;
  std::optional<LookedUpThreshold> looked_up;
};

/// Returns the text of the snapshot's attribute run_state.
std::string to_json_text(const RunState& state);
/// Parses it. Throws Error, or the JSON library's exceptions, for a state that does not fit
/// `header`.
RunState read_run_state(const nlohmann::json& value, const SnapshotHeader& header);

/// Converts the byte counts to values of type `to`.
void convert(RunState& state, DType to);

}  // namespace kvzap::driver
