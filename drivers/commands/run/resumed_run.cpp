#include "commands/run/resumed_run.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "commands/run/recorded_options.hpp"
#include "files/decimal.hpp"
#include "files/json_file.hpp"
#include "options/policy_options.hpp"
#include "options/recording.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

bool is_same_value(const std::string& a, const std::string& b) {
  if (a == b) return true;
  if ((a + b).find_first_not_of("0123456789") == std::string::npos) return false;  // 64 bits
  double x = 0, y = 0;
  return files::read_real(a, x) == files::DecimalFault::none &&
         files::read_real(b, y) == files::DecimalFault::none && x == y;
}

/// Throws UsageError for given options of `app` that do not fit the snapshot's rows.
void check_given(const CLI::App& app, const session::Recorded& recorded,
                 const std::string& snapshot) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = long_name(*option);
    const bool is_fixed = recording_of(*option) == Recording::fixed && !names_policy(name);
    if (option->count() == 0 || !is_fixed) continue;
    const std::string given = option_text(*option);
    const std::string there = recorded.text(name);
    if (is_same_value(given, there)) continue;
    throw UsageError(fmt::format(
        "--{} is {}; {} was made {}", name, given, snapshot,
        there.empty() ? "without --" + name : fmt::format("with --{} {}", name, there)));
  }
}

/// Throws UsageError for given options of the policy that do not fit. The same policy may have
/// another path.
void check_given_policy(const CLI::App& app, const RunOptions& options,
                        const session::Recorded& recorded, const std::string& snapshot) {
  const auto there = [&](const char* name) { return recorded.text(name); };
  const Pruning before = Pruning::parse(there("policy"));
  const std::string& given = options.pruning_texts.policy;
  Pruning named = given.empty() ? before : Pruning::parse(given);
  Pruning settings = named;
  settings.policy = before.policy;
  const bool is_set_alike = settings == before;  // an @ of --policy has changed the setting
  named.surrogate =
      options.pruning.surrogate.empty() ? there("surrogate") : options.pruning.surrogate;
  named.layerwise = app.get_option("--layerwise")->count() == 0 ? there("layerwise") == "true"
                                                                : options.pruning.layerwise;
  named.mode = there("prune") == "none" ? PruneMode::none : PruneMode::prefill;
  std::string identity;
  for (const char* name : policy_flags) {
    const CLI::Option& option = *app.get_option(std::string("--") + name);
    if (option.count() == 0 || option_text(option) == there(name)) continue;
    if (identity.empty()) {
      try {
        identity = session::identity_of_policy(named, flag_names());
      } catch (const Error&) {
        identity = "?";  // two policies in one
      }
    }
    if (!identity.empty() && identity == recorded.state.policy && is_set_alike) return;
    throw UsageError(fmt::format("--{} is {}; {} was made {}", name, option_text(option), snapshot,
                                 there(name).empty()
                                     ? fmt::format("without --{}", name)
                                     : fmt::format("with --{} {}", name, there(name))));
  }
}

/// Sets options that were not given to their values in the file.
void restore_options(CLI::App& app, const session::Recorded& recorded,
                     const std::string& snapshot) {
  for (const auto& [name, unused] : recorded.options.items()) {
    CLI::Option* const option = app.get_option_no_throw("--" + name);
    if (!option || recording_of(*option) == Recording::none) {
      throw Error(
          fmt::format("{}: options: --{} is no option of this version of kvzap that a run "
                      "could resume with",
                      snapshot, name));
    }
    if (option->count() > 0) continue;
    try {
      const std::string text = recorded.text(name);
      option->add_result(is_flag(*option) ? option->get_flag_value(name, text) : text);
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw Error(fmt::format("{}: options: {}: {}", snapshot, name, explain(app, error)));
    }
  }
}

}  // namespace

std::unique_ptr<session::Recorded> open_resumed(CLI::App& app, RunOptions& options,
                                                const Communicator& comm) {
  // `validate` refuses the other two.
  if (options.resume.empty() || options.resume == "-" || options.dry_run) {
    comm.agree([&] {
      resolve_pruning(options);
      if (!options.dry_run) take_recommended(options);
    });
    return nullptr;
  }
  const std::string snapshot = "snapshot " + options.resume;
  auto run = session::open_recorded(options.resume, comm);
  agree_on_usage(comm, [&] { check_given(app, *run, snapshot); });
  agree_on_usage_of_root(comm, [&] { check_given_policy(app, options, *run, snapshot); });
  comm.agree([&] {
    restore_options(app, *run, snapshot);
    resolve_pruning(options);
    run->restore_window(options.pruning);
    take_recommended(options);
    session::convert(run->state, dtype_from_name(options.dtype));
  });
  comm.agree_on_root([&] {
    std::error_code ignored;
    if (!fs::exists(options.model, ignored)) {
      throw Error(fmt::format("{}: its model, {}, is not there; give the model with -m", snapshot,
                              options.model));
    }
    session::check_model_files(*run, options.model, !options.random_weights);
    session::check_policy_files(*run, options.pruning, flag_names());
  });
  return run;
}

std::unique_ptr<session::Recorded> open_fitting(const CLI::App& app, const std::string& file,
                                                const std::string& recorded,
                                                const session::Conversation& ours, DType dtype,
                                                const Communicator& comm) {
  auto run = session::open_recorded(file, comm);
  const std::string snapshot = "snapshot " + file;
  comm.agree_on_root([&] {
    const json options = files::parse_json(recorded, "options");
    json names = options;
    names.update(run->options);
    const auto told = [](const std::string& name, const std::string& value) {
      return value.empty() ? "without --" + name : fmt::format("with --{} {}", name, value);
    };
    for (const auto& [name, unused] : names.items()) {
      const CLI::Option* const option = app.get_option_no_throw("--" + name);
      if (names_policy(name) || (option && recording_of(*option) != Recording::fixed)) continue;
      const std::string there = run->text(name), here = session::text_in(options, name);
      if (is_same_value(there, here)) continue;
      throw Error(fmt::format(
          "{} was made {}, and this conversation {}; kvzap {} --resume {} continues it with its "
          "own "
          "options",
          snapshot, told(name, there), told(name, here), option ? "chat" : "run", file));
    }
    const auto check = [&](const char* what, const std::string& found,
                           const std::string& expected) {
      if (found == expected) return;
      throw Error(fmt::format("{}: its {} is {}; expected that of this conversation, {}", snapshot,
                              what, found, expected));
    };
    const SnapshotInfo& found = run->info();
    const SnapshotInfo& info = ours.description();
    check("model's hash", found.model_hash, info.model_hash);
    check("tokenizer's hash", found.tokenizer_hash, info.tokenizer_hash);
    check("policy", run->state.policy, ours.state().policy);
    const auto threshold = [](const session::ConversationState& of) {
      return of.looked_up ? fmt::format("{}", of.looked_up->threshold) : "none";
    };
    check("looked-up threshold", threshold(run->state), threshold(ours.state()));
  });
  comm.agree([&] { session::convert(run->state, dtype); });
  return run;
}

std::optional<std::string> note_of_types(const std::string& file, const SnapshotHeader& header,
                                         const PageFormat& format, DType dtype) {
  if (format == header.format) return {};
  return fmt::format("{} has keys and values in {}; here they become {}", file,
                     name_of(header.format, header.dtype), name_of(format, dtype));
}

}  // namespace kvzap::driver
