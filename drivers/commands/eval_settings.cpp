#include "commands/eval_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "commands/eval_prompts.hpp"
#include "text/utf8.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

}  // namespace

void validate_eval(const EvalOptions& o) {
  require(!o.model.empty(), "no model: give a Hugging Face folder with -m");
  require(!file_list(o.tasks).empty(), "no tasks: give JSONL files with --tasks");
  const auto files = file_list(o.tasks);
  for (const std::string& file : files) {
    require(std::count(files.begin(), files.end(), file) == 1,
            fmt::format("--tasks has {} twice", file));
    // Records are found again by it.
    require(detail::is_valid_utf8(file),
            fmt::format("--tasks: {}: the file's name is not UTF-8", file));
  }
  require(detail::is_valid_utf8(joined(o.policies, ";")),
          "--policies is not UTF-8, as settings' labels have to be");
  require(!o.policies.empty(), "no policies: give a list such as --policies \"none;snapkv;h2o\"");
  require(!o.output.empty(), "no output: give a folder with -o");
  require(o.window >= 1 && o.window <= (1 << 24),
          fmt::format("--window is {}; expected 1 to {}", o.window, 1 << 24));
  require(o.sink >= 0, fmt::format("--sink is {}; expected 0 or more", o.sink));
  require(o.chunk >= 1, fmt::format("--chunk is {}; expected at least 1", o.chunk));
  const std::pair<const char*, const std::optional<std::int64_t>*> counts[] = {
      {"-c", &o.max_context},
      {"--max-prompts", &o.max_prompts},
      {"--per-task", &o.per_task},
      {"-n", &o.new_tokens}};
  for (const auto& [flag, count] : counts) {
    require(!*count || **count >= 1,
            fmt::format("{} is {}; expected at least 1", flag, count->value_or(0)));
  }
  constexpr int most = 1 << 20;
  require(!o.new_tokens || *o.new_tokens <= most,
          fmt::format("-n is {}; expected at most {}", o.new_tokens.value_or(0), most));
  require(o.surrogate.empty() || fs::is_directory(o.surrogate),
          fmt::format("--surrogate {}: there is no such folder", o.surrogate));
  const Sampler checks_its_options(o.sampling);
  require(o.tries >= 1 && o.tries <= most,
          fmt::format("--tries is {}; expected 1 to {}", o.tries, most));
  require(o.tries == 1 || o.sampling.temperature > 0,
          fmt::format("--tries {} needs --temp above 0: greedy answers are all alike", o.tries));
  require(o.pass_k >= 0 && o.pass_k <= o.tries,
          fmt::format("--pass-k is {}; expected 1 to --tries, {}, or 0", o.pass_k, o.tries));
  require(o.batch >= 0, fmt::format("--batch is {}; expected 0 or more", o.batch));
  require(o.bootstrap_samples >= 1 && o.bootstrap_samples <= (1 << 24),
          fmt::format("--bootstrap-samples is {}; expected 1 to {}", o.bootstrap_samples, 1 << 24));
  require(o.placement.empty() || o.parallel == "heads",
          "--placement has no effect with --parallel prompts, where every rank has all heads");
}

std::vector<detail::EvalSetting> settings_of(const EvalOptions& o) {
  detail::SettingsRequest request;
  request.policies = joined(o.policies, ";");
  const std::string ratios =
      o.evict_ratios.empty() ? "0,0.25,0.5,0.75,0.9" : joined(o.evict_ratios, ",");
  request.evict_ratios = detail::parse_numbers(ratios, "--evict-ratios",
                                               "numbers of at least 0 and less than 1", 0, 1);
  if (!o.thresholds.empty()) {
    constexpr double most = std::numeric_limits<float>::max();
    request.thresholds = detail::parse_numbers(joined(o.thresholds, ","), "--thresholds",
                                               "numbers in the range of float", -most, most);
  }
  if (o.prune_after == "question") request.prune_after = PruneMoment::question;
  if (o.prune == "always") request.prune = PruneMode::always;
  if (o.prefill == "sparse") request.prefill = PrefillMode::sparse;
  request.surrogate = o.surrogate;
  return parse_settings(request);
}

EngineOptions engine_options(const EvalOptions& o, const detail::EvalSetting& setting) {
  EngineOptions run;
  run.model = o.model;
  run.dtype = o.dtype;
  run.raw = o.raw;
  run.quiet = o.quiet;
  run.pruning = setting.pruning;
  run.pruning.window = o.window;
  run.pruning.sink = o.sink;
  run.pruning.chunk = o.chunk;
  if (setting.is_none()) return run;
  run.pruning.policy = detail::policy_with_surrogate(setting.pruning.policy, o.surrogate);
  return run;
}

}  // namespace kvzap::driver
