// Tasks whose answers are as long as their prompts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "eval/made_task.hpp"

namespace kvzap::eval {

const std::vector<std::string>& long_answer_task_names();

/// Makes row `index` of the task: as many statements or steps as the length holds with the answer
/// about them. Throws TooShort.
MadeTask make_long_answer(const PromptMeter& meter, std::uint64_t seed, const std::string& task,
                          std::int64_t length, std::int64_t index);

}  // namespace kvzap::eval
