// What ranks of `kvzap eval` tell one another: prompts, and what became of them.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/comparison.hpp>
#include <vector>

#include "commands/eval_prompts.hpp"

namespace kvzap::driver {

/// A prompt that one rank, or all ranks together, are to answer next.
struct EvalJob {
  std::int64_t prompt = -1;  // its number; -1: none
  std::int64_t file = 0;     // of its row: which of the files that were given
  std::int64_t line = 0;
  /// Else it follows the context of the job before.
  bool has_new_context = false;
  EvalTokens tokens;
};

/// Rank 0's jobs to all ranks. Collective.
void broadcast(std::vector<EvalJob>& jobs, const Communicator& comm);

/// As numbers, bit by bit, and back. Stop reasons and seconds of the engine do not travel.
std::vector<std::int64_t> packed(const std::vector<SettingAnswer>& answers);
std::vector<SettingAnswer> unpacked(const std::vector<std::int64_t>& numbers);

}  // namespace kvzap::driver
