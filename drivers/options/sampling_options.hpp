// Sampling: options of the command line and settings of the model's files.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/model/model_config.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace kvzap::driver {

/// Sampling flags that SamplingOptions does not have.
struct SamplingFlags {
  std::optional<double> repeat_penalty;  // absent: the penalty of generation_config.json
  bool greedy_plain = false;
};

/// Declares --temp, --top-k, --top-p, --min-p, --repeat-penalty, --repeat-last-n,
/// --presence-penalty, --frequency-penalty and --greedy-plain. (Each command declares --seed with
/// its own help.)
void declare_sampling(CLI::App& app, SamplingOptions& sampling, SamplingFlags& flags,
                      const std::string& group);

/// Declares --lookup, and throws Error for a value out of range.
void declare_lookup(CLI::App& app, std::int64_t& lookup, const std::string& group);
void check_lookup(std::int64_t lookup);

/// Names fields of SamplingOptions as flags: "--top-k".
const SamplingNames& sampling_flag_names();

/// Throws Error that names the flag for values out of range.
void check_sampling(const SamplingOptions& sampling, const SamplingFlags& flags);

/// Returns the settings of the model's files. With --greedy-plain returns only the tokens that end
/// an answer. Throws the errors of GenerationConfig::load.
GenerationConfig rules_of_answers(const std::string& folder, std::int64_t vocab_size,
                                  const SamplingFlags& flags);

/// Returns the options in force: the flags, and the model's settings for flags that are not given.
SamplingOptions sampling_in_force(SamplingOptions sampling, const SamplingFlags& flags,
                                  const GenerationConfig& rules);

/// Prints the file's unknown fields on standard error, and, if `talks`, the fields that change the
/// answers. For rank 0.
void print_rules(const GenerationConfig& rules, const SamplingFlags& flags, bool talks);

/// Returns a line about settings that a command ignores because it uses only the model's logits;
/// empty if there are none.
std::string rules_left_aside(const std::string& folder, std::int64_t vocab_size);

/// Returns the options in force for a report, under the names of their flags.
nlohmann::ordered_json sampling_json(const SamplingOptions& sampling, const SamplingFlags& flags);

}  // namespace kvzap::driver
