// Messages between the ranks of `kvzap eval`: prompts and answers.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/comparison.hpp>
#include <vector>

#include "commands/lab/eval_prompts.hpp"

namespace kvzap::driver {

/// The next prompt of one rank, or of all ranks together.
struct EvalJob {
  std::int64_t prompt = -1;  // number of the prompt; -1: none
  std::int64_t file = 0;     // index of the task file
  std::int64_t line = 0;     // in that file
  /// If false, the prompt has the context of the previous job.
  bool has_new_context = false;
  EvalTokens tokens;
};

/// Copies rank 0's jobs to all ranks. Collective.
void broadcast(std::vector<EvalJob>& jobs, const Communicator& comm);

/// Converts answers to integers, bit by bit, and back. Omits the engine's stop reasons and seconds.
std::vector<std::int64_t> packed(const std::vector<SettingAnswer>& answers);
std::vector<SettingAnswer> unpacked(const std::vector<std::int64_t>& numbers);

}  // namespace kvzap::driver
