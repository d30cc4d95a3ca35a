// The state of a decoder for heads that several ranks work on.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "engine/decoder_state.hpp"
#include "engine/page_placement.hpp"
#include "engine/shared_heads.hpp"

namespace kvzap {

/// The shared heads of the current step.
struct Decoder::Shared {
  Shared(const HeadPartition& partition, int rank, std::int64_t group, std::int64_t head_dim,
         DType dtype)
      : places(partition, group, head_dim),
        teams(partition, rank),
        team_keys(dtype),
        team_values(dtype) {}

  engine::SharedHeads places;
  engine::HeadTeams teams;
  // (layer * KV heads + head): ranks that have pages of sequences of the step, beside the owner.
  std::vector<std::vector<int>> helpers;
  struct LayerPlan {
    bool is_shared = false;
    std::vector<int> remote_heads;  // heads that this rank helps with
    // Floats of a token's records that each rank gets from this one, and gives to it.
    std::vector<std::int64_t> sent, received;
  };
  std::vector<LayerPlan> layers;
  // (span): whether a team shares its tokens. Empty: it shares none.
  std::vector<bool> split_spans;
  // Keys and values of the step's tokens of the head that this rank helps with: (token, dim).
  engine::ValueBuffer team_keys, team_values;

  // For policies that read W_O: this rank's inputs, as they are sent, and those of its own heads:
  // (input, hidden_size).
  linalg::Vector o_inputs, o_sent, o_of_heads;

  // Reused by every layer.
  std::vector<engine::ColumnCopy> copies;
  std::vector<engine::AttendedMerge> merges;
  std::vector<const float*> records;
  std::vector<std::int64_t> sent, received;  // of a call
  std::vector<AttentionSpan> spans;

  /// Returns whether this rank attends to a part of a step's tokens of another rank's head.
  bool helps_team(int layer) const {
    return !split_spans.empty() && teams.of_rank(layer).place > 0;
  }

  void release() {
    team_keys.release();
    team_values.release();
    o_inputs = o_sent = o_of_heads = {};
  }

  bool helps(int layer, int head, int n_kv_heads, int rank) const {
    if (helpers.empty()) return false;
    const auto& ranks = helpers[layer * n_kv_heads + head];
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }
};

}  // namespace kvzap
