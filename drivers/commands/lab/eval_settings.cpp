#include "commands/lab/eval_settings.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <kvzap/engine/thresholds.hpp>
#include <limits>
#include <map>
#include <utility>

#include "commands/lab/eval_prompts.hpp"
#include "console/console.hpp"
#include "files/counted.hpp"
#include "files/escaped_list.hpp"
#include "files/missing_file.hpp"
#include "options/bench_options.hpp"
#include "options/policy_options.hpp"
#include "text/utf8.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

/// Returns the indices of all settings except those of a general evict ratio that the surrogate's
/// table does not cover, and adds a warning for each of these. Throws Error if these are all of the
/// general evict ratios.
std::vector<std::int64_t> covered_settings(const std::vector<eval::EvalSetting>& settings,
                                           std::vector<std::string>& warnings) {
  std::vector<std::int64_t> covered;
  std::size_t asked = 0;
  for (std::size_t i = 0; i < settings.size(); ++i) {
    const Pruning& pruning = settings[i].pruning;
    const fs::path file = ThresholdTable::file_in(pruning.plain_surrogate());
    std::error_code ignored;
    // resolve_threshold reports a missing table.
    const bool may_lack = settings[i].has_general_amount && pruning.looks_up_threshold() &&
                          pruning.amount.evict_ratio && fs::exists(file, ignored);
    if (may_lack) {
      ++asked;
      const ThresholdTable table = ThresholdTable::load(file);
      const ThresholdTable::Window& of_window = table.nearest(pruning.window);
      if (!of_window.covers(*pruning.amount.evict_ratio)) {
        warnings.push_back(fmt::format(
            "--evict-ratios: {} is left out: {} has evict ratios {} to {}", settings[i].label,
            file.string(), of_window.rows.front().evict_ratio, of_window.rows.back().evict_ratio));
        continue;
      }
    }
    covered.push_back(static_cast<std::int64_t>(i));
  }
  if (asked > 0 && warnings.size() == asked) throw Error(warnings.back());
  return covered;
}

}  // namespace

void check_options(const EvalOptions& o, const eval::OwnPolicies& own) {
  require(!o.model.empty(), "no model: give a Hugging Face folder or a GGUF file with -m");
  require(!file_list(o.tasks).empty(), "no tasks: give JSONL files with --tasks");
  for (const std::string& file : file_list(o.tasks)) require_no_stdin(file, "--tasks");
  const auto files = file_list(o.tasks);
  for (const std::string& file : files) {
    require(std::count(files.begin(), files.end(), file) == 1,
            fmt::format("--tasks has {} twice", file));
    // Records are found by this name, so it must be valid UTF-8.
    require(text::is_valid_utf8(file),
            fmt::format("--tasks: {}: the file's name is not UTF-8", file));
  }
  require(text::is_valid_utf8(joined(o.policies, ";")),
          "--policies is not UTF-8, as settings' labels have to be");
  require(!o.policies.empty(), "no policies: give a list such as --policies \"none;snapkv;h2o\"");
  require(!o.output.empty(), "no output: give a folder with -o");
  Pruning of_all;
  of_all.window = o.pruning.window;
  of_all.sink = o.pruning.sink;
  of_all.chunk = o.pruning.chunk;
  check(of_all, {}, flag_names());
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
  const std::string& surrogate = o.pruning.surrogate;
  require(
      !o.pruning.auto_window || !surrogate.empty(),
      "--window auto needs --surrogate DIR: the surrogate's table of thresholds has the windows");
  require(surrogate.empty() || fs::is_directory(surrogate),
          fmt::format("--surrogate {}: there is no such folder", surrogate));
  check(o.sampling, sampling_flag_names());
  require(o.tries >= 1 && o.tries <= most,
          fmt::format("--tries is {}; expected 1 to {}", o.tries, most));
  require(o.tries == 1 || o.sampling.temperature > 0,
          fmt::format("--tries {} needs --temp above 0: greedy answers are all alike", o.tries));
  require(o.pass_k >= 0 && o.pass_k <= o.tries,
          fmt::format("--pass-k is {}; expected 1 to --tries, {}, or 0", o.pass_k, o.tries));
  require(o.batch >= 0, fmt::format("--batch is {}; expected 0 or more", o.batch));
  require(o.bootstrap_samples >= 1 && o.bootstrap_samples <= (1 << 24),
          fmt::format("--bootstrap-samples is {}; expected 1 to {}", o.bootstrap_samples, 1 << 24));
  page_format(o.kv_type, o.dtype);
  check_page_rows(o.page_rows);
  read_pages(o.read_pages);
  require(o.placement.empty() || o.parallel == "heads",
          "--placement has no effect with --parallel prompts, where every rank has all heads");
  settings_of(o, own);
}

std::vector<eval::EvalSetting> settings_of(const EvalOptions& o, const eval::OwnPolicies& own) {
  eval::SettingsRequest request;
  request.own = own;
  request.policies = joined(o.policies, ";");
  request.evict_ratios = real_numbers(o.evict_ratios, "--evict-ratios", "0,0.25,0.5,0.75,0.9",
                                      "a number of at least 0 and less than 1",
                                      [](double ratio) { return ratio >= 0 && ratio < 1; });
  std::vector<std::string> numbers;
  for (const std::string& part : o.thresholds) {
    for (const std::string& entry : files::split_unescaped(part, ',')) {
      if (entry == "auto") {
        request.recommended = true;
      } else {
        numbers.push_back(entry);
      }
    }
  }
  if (!numbers.empty()) {
    constexpr double most = std::numeric_limits<float>::max();
    request.thresholds =
        real_numbers(numbers, "--thresholds", "", "a number in the range of float, or auto",
                     [](double threshold) { return std::fabs(threshold) <= most; });
  }
  auto general = static_cast<const EngineOptions&>(o);
  resolve_pruning(general);
  request.general = general.pruning;
  request.general.auto_window = false;  // an evaluation has one window, which is resolved before
  std::vector<eval::EvalSetting> settings;
  try {
    settings = parse_settings(request, flag_names());
  } catch (const files::MissingFile& error) {
    throw files::MissingFile(fmt::format("--policies: {}", error.what()));
  } catch (const Error& error) {
    throw UsageError(fmt::format("--policies: {}", error.what()));
  }
  for (const eval::EvalSetting& setting : settings) {
    try {
      check(setting.pruning, {}, flag_names());
      page_format(setting.kv_type, o.dtype);
    } catch (const files::MissingFile& error) {
      throw files::MissingFile(fmt::format("--policies: {}: {}", setting.label, error.what()));
    } catch (const Error& error) {
      throw UsageError(fmt::format("--policies: {}: {}", setting.label, error.what()));
    }
  }
  const bool has_threshold = std::any_of(settings.begin(), settings.end(), [](const auto& setting) {
    return setting.pruning.amount.has_threshold();
  });
  require(o.thresholds.empty() || has_threshold,
          "--thresholds has no effect without the policy kvzap in --policies");
  return settings;
}

std::vector<std::string> look_up_thresholds(std::vector<eval::EvalSetting>& settings,
                                            const EvalOptions& o, const Communicator& comm) {
  std::vector<std::string> warnings;
  std::vector<std::int64_t> kept;  // indices of settings
  comm.agree_on_root([&] { kept = covered_settings(settings, warnings); });
  comm.broadcast(kept, 0);
  std::vector<eval::EvalSetting> covered;
  for (const std::int64_t i : kept) covered.push_back(settings[static_cast<std::size_t>(i)]);
  settings = std::move(covered);
  for (eval::EvalSetting& setting : settings) {
    const std::optional<double> ratio = setting.pruning.amount.evict_ratio;
    std::optional<LookedUpThreshold> found;
    try {
      found = resolve_threshold(setting.pruning, comm, !o.raw, flag_names());
    } catch (const AgreedError& error) {
      throw AgreedError(fmt::format("--policies: {}: {}", setting.label, error.what()));
    }
    if (!found) continue;
    setting.looked_up_ratio = ratio;
    for (const std::string& warning : found->warnings) {
      const bool is_new = std::find(warnings.begin(), warnings.end(), warning) == warnings.end();
      if (is_new) warnings.push_back(warning);
    }
  }
  return warnings;
}

std::string name_of_kv_type(const eval::EvalSetting& setting, const EvalOptions& o) {
  return kv_type_name(setting.kv_type.empty() ? o.kv_type : setting.kv_type, o.dtype);
}

void print_plan(std::size_t prompts, std::size_t done,
                const std::vector<eval::EvalSetting>& settings,
                const std::vector<LoadedPruning>& prunings, const EvalOptions& o) {
  say("kvzap: {}, {}{}\n", files::counted(prompts, "prompt"),
      files::counted(settings.size(), "setting"),
      done > 0 ? fmt::format("; done already: {}", files::counted(done, "prompt")) : "");
  // Rows of one type share a prefill.
  std::map<std::pair<PrefillShare, std::string>, std::vector<std::string>> sharing;
  std::size_t prefills = 0;
  for (std::size_t i = 0; i < settings.size(); ++i) {
    const PrefillShare share = prefill_share(prunings[i]);
    auto& labels =
        sharing[{share, share == PrefillShare::none ? "" : name_of_kv_type(settings[i], o)}];
    if (share == PrefillShare::none || labels.empty()) ++prefills;
    labels.push_back(settings[i].label);
  }
  say("kvzap: {} of each prompt:\n", files::counted(prefills, "prefill"));
  const auto tell = [&](PrefillShare share, const std::string& what) {
    for (const auto& [key, labels] : sharing) {
      if (key.first != share) continue;
      constexpr std::size_t most = 3;
      std::string list;
      for (std::size_t i = 0; i < std::min(most, labels.size()); ++i) {
        list += (i == 0 ? "" : ", ") + labels[i];
      }
      if (labels.size() > most) list += fmt::format(", and {} more", labels.size() - most);
      say("kvzap:   {}: {}\n", what, list);
    }
  };
  tell(PrefillShare::context, "1 of the context is shared by");
  tell(PrefillShare::whole, "1 of context and question is shared by");
  tell(PrefillShare::none, "each needs its own");
}

}  // namespace kvzap::driver
