// How tokens are chosen: by the command line, and by what a model's files say.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/model/model_config.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace kvzap::driver {

/// What sampling flags say beside SamplingOptions.
struct SamplingFlags {
  std::optional<double> repeat_penalty;  // absent: as generation_config.json has it
  bool greedy_plain = false;
};

/// --temp, --top-k, --top-p, --min-p, --repeat-penalty, --repeat-last-n, --presence-penalty,
/// --frequency-penalty and --greedy-plain. (--seed has help of its own in each command.)
void declare_sampling(CLI::App& app, SamplingOptions& sampling, SamplingFlags& flags,
                      const std::string& group);

/// Throws Error naming the flag for values out of range.
void check_sampling(const SamplingOptions& sampling, const SamplingFlags& flags);

/// What the model's files say of it; with --greedy-plain only which tokens end an answer. Throws
/// what GenerationConfig::load throws.
GenerationConfig rules_of_answers(const std::string& folder, std::int64_t vocab_size,
                                  const SamplingFlags& flags);

/// What is in force: the flags, and where they say nothing the rules.
SamplingOptions sampling_in_force(SamplingOptions sampling, const SamplingFlags& flags,
                                  const GenerationConfig& rules);

/// Says on standard error which fields of the file are not known, and, if `talks`, which change
/// the answers. For rank 0.
void print_rules(const GenerationConfig& rules, const SamplingFlags& flags, bool talks);

/// A line about rules that a command leaves aside that chooses tokens by the model's logits alone;
/// empty if there are none.
std::string rules_left_aside(const std::string& folder, std::int64_t vocab_size);

/// Of a report: the options in force, under the names of their flags.
nlohmann::ordered_json sampling_json(const SamplingOptions& sampling, const SamplingFlags& flags);

}  // namespace kvzap::driver
