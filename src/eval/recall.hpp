// Tasks for small models: the tasks on which the demo model was trained.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "eval/made_task.hpp"

namespace kvzap::eval {

const std::vector<std::string>& recall_task_names();

/// Makes row `index` of the task at the length. Throws TooShort.
MadeTask make_recall(const PromptMeter& meter, std::uint64_t seed, const std::string& task,
                     std::int64_t length, std::int64_t index);

}  // namespace kvzap::eval
