// Records of `kvzap eval`: the result of a prompt under a setting.
#pragma once

#include <kvzap/engine/comparison.hpp>
#include <kvzap/model/tokenizer.hpp>

#include "commands/lab/eval_prompts.hpp"
#include "eval/records.hpp"
#include "eval/settings.hpp"

namespace kvzap::driver {

/// The record of an answer, with its scores by the prompt's metric.
eval::EvalRecord record_of(const EvalPrompt& prompt, const eval::EvalSetting& setting,
                           const SettingAnswer& answer, const Tokenizer& tokenizer);

}  // namespace kvzap::driver
