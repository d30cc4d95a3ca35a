#include "commands/run/resumed_run.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "commands/run/recorded_options.hpp"
#include "files/decimal.hpp"
#include "files/fnv.hpp"
#include "files/json_file.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string value_text(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.dump();
}

bool is_same_value(const std::string& a, const std::string& b) {
  if (a == b) return true;
  if ((a + b).find_first_not_of("0123456789") == std::string::npos) return false;  // 64 bits
  double x = 0, y = 0;
  return files::read_real(a, x) == files::DecimalFault::none &&
         files::read_real(b, y) == files::DecimalFault::none && x == y;
}

/// Throws UsageError for given options of `app` that do not fit the snapshot's rows.
void check_given(const CLI::App& app, const json& recorded, const std::string& snapshot) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = long_name(*option);
    if (option->count() == 0 || !is_recorded(name) || may_change(name) || names_policy(name))
      continue;
    const std::string given = option_text(*option);
    const std::string there = recorded.contains(name) ? value_text(recorded.at(name)) : "";
    if (is_same_value(given, there)) continue;
    throw UsageError(fmt::format(
        "--{} is {}; {} was made {}", name, given, snapshot,
        there.empty() ? "without --" + name : fmt::format("with --{} {}", name, there)));
  }
}

/// Throws UsageError for given options of the policy that do not fit. The same policy may have
/// another path.
void check_given_policy(const CLI::App& app, const RunOptions& options, const json& recorded,
                        const RunState& state, const std::string& snapshot) {
  const auto there = [&](const char* name) {
    return recorded.contains(name) ? value_text(recorded.at(name)) : "";
  };
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
        identity = identity_of_policy(named);
      } catch (const Error&) {
        identity = "?";  // two policies in one
      }
    }
    if (!identity.empty() && identity == state.policy && is_set_alike) return;
    throw UsageError(fmt::format("--{} is {}; {} was made {}", name, option_text(option), snapshot,
                                 there(name).empty()
                                     ? fmt::format("without --{}", name)
                                     : fmt::format("with --{} {}", name, there(name))));
  }
}

/// Sets options that were not given to their values in the file.
void restore_options(CLI::App& app, const json& recorded, const std::string& snapshot) {
  for (const auto& [name, value] : recorded.items()) {
    CLI::Option* option = is_recorded(name) ? app.get_option_no_throw("--" + name) : nullptr;
    if (!option) {
      throw Error(
          fmt::format("{}: options: --{} is no option of this version of kvzap that a run "
                      "could resume with",
                      snapshot, name));
    }
    if (option->count() > 0) continue;
    try {
      const std::string text = value_text(value);
      option->add_result(is_flag(*option) ? option->get_flag_value(name, text) : text);
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw Error(fmt::format("{}: options: {}: {}", snapshot, name, explain(app, error)));
    }
  }
}

/// Throws Error if no run can resume from the file, whatever its options.
void check_header(const SnapshotHeader& header, const std::string& snapshot) {
  const auto fail = [&](const std::string& what) {
    throw Error(fmt::format("{}: {}", snapshot, what));
  };
  if (header.content != SnapshotContent::all) {
    fail(
        fmt::format("its content is {}, for analyses; a run can resume from content all, with keys "
                    "and values",
                    kvzap::name_of(header.content)));
  }
  const SnapshotInfo& info = header.info;
  if (info.options.empty() || info.run_state.empty()) {
    fail("was not written by kvzap run: it has no options of a run");
  }
  const auto ids = static_cast<std::int64_t>(info.token_ids.size());
  if (info.context_tokens < 1 || info.context_tokens > ids) {
    fail(fmt::format("context_tokens is {}; expected 1 to {}, the number of its token ids",
                     info.context_tokens, ids));
  }
}

/// Throws if the ranks' files differ. All ranks opened the same name, but the file may have been
/// replaced meanwhile.
void check_same_file(const SnapshotHeader& header, const std::string& snapshot,
                     const Communicator& comm) {
  const SnapshotInfo& info = header.info;
  const std::uint64_t hash =
      files::fnv1a(fmt::format("{} {} {} {} {}", header.file_bytes, header.tokens, info.created,
                               info.options, info.run_state));
  for (const auto& other : comm.all_gather({static_cast<std::int64_t>(hash)})) {
    if (other.front() == static_cast<std::int64_t>(hash)) continue;
    // All ranks reach this, because they compare the same hashes.
    throw AgreedError(snapshot + ": ranks do not see the same file; has it just been replaced?");
  }
}

/// Throws Error if the folder's model or tokenizer differs from the snapshot's.
void check_model(const RunOptions& options, const SnapshotInfo& info, const ModelHashes& found,
                 const std::string& snapshot) {
  const auto check = [&](const char* what, const std::string& hash, const std::string& expected) {
    if (hash.empty() || expected.empty() || hash == expected) return;
    throw Error(fmt::format("{}: {} has another {}: its hash is {}; expected {}, that of {}",
                            snapshot, options.model, what, hash, expected, info.model));
  };
  check("model", found.model, info.model_hash);
  check("tokenizer", found.tokenizer, info.tokenizer_hash);
}

/// Throws Error if the folder's generation_config.json has changed, because answers would end
/// elsewhere.
void check_generation(const RunOptions& options, const RunState& state, const ModelHashes& found,
                      const std::string& snapshot) {
  if (!state.generation || *state.generation == found.generation) return;
  const auto shown = [](const std::string& hash) { return hash.empty() ? "no such file" : hash; };
  throw Error(fmt::format("{}: {}/generation_config.json: expected the hash {}, found {}", snapshot,
                          options.model, shown(*state.generation), shown(found.generation)));
}

/// Throws Error if the folder's surrogate differs from the snapshot's.
void check_surrogate(const RunOptions& options, const SnapshotInfo& info,
                     const std::string& snapshot) {
  const std::string expected = further_text(info, surrogate_hash_attribute);
  if (expected.empty()) return;
  SurrogateIdentity found;
  try {
    found = identity_of_surrogate(options.pruning);
  } catch (const Error&) {
    return;  // identity_of_policy will throw the same error
  }
  if (found.folder.empty() || found.hash == expected) return;
  throw Error(fmt::format("{}: {} has another surrogate: its hash is {}; expected {}, that of {}",
                          snapshot, found.folder, found.hash, expected,
                          further_text(info, surrogate_folder_attribute)));
}

json parsed(const std::string& text, const std::string& snapshot, const char* attribute) {
  return files::parse_json_object(text, fmt::format("{}: {}", snapshot, attribute));
}

/// Opens the file on all ranks. `recorded` receives its options. Collective.
std::unique_ptr<ResumedRun> open_run(const std::string& file, json& recorded,
                                     const Communicator& comm) {
  const std::string snapshot = "snapshot " + file;
  std::unique_ptr<ResumedRun> run;
  comm.agree([&] {
    SnapshotReader reader(file);
    const SnapshotHeader& header = reader.header();
    check_header(header, snapshot);
    recorded = parsed(header.info.options, snapshot, "options");
    RunState state;
    try {
      state = read_run_state(parsed(header.info.run_state, snapshot, "run_state"), header);
    } catch (const std::exception& error) {
      const std::string what = error.what();
      throw Error(what.rfind(snapshot, 0) == 0 ? what
                                               : fmt::format("{}: run_state: {}", snapshot, what));
    }
    run = std::make_unique<ResumedRun>(ResumedRun{std::move(reader), std::move(state), {}});
  });
  check_same_file(run->reader.header(), snapshot, comm);
  return run;
}

}  // namespace

Prompt ResumedRun::prompt() const {
  const SnapshotInfo& info = reader.header().info;
  return {{info.token_ids.begin(), info.token_ids.begin() + info.context_tokens}, state.questions};
}

std::unique_ptr<ResumedRun> open_resumed(CLI::App& app, RunOptions& options,
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
  json recorded;
  std::unique_ptr<ResumedRun> run = open_run(options.resume, recorded, comm);
  const SnapshotInfo& info = run->reader.header().info;
  agree_on_usage(comm, [&] { check_given(app, recorded, snapshot); });
  agree_on_usage_of_root(comm,
                         [&] { check_given_policy(app, options, recorded, run->state, snapshot); });
  comm.agree([&] {
    restore_options(app, recorded, snapshot);
    resolve_pruning(options);
    take_recommended(options);
    convert(run->state, dtype_from_name(options.dtype));
  });
  comm.agree_on_root([&] {
    std::error_code ignored;
    if (!fs::exists(options.model, ignored)) {
      throw Error(fmt::format("{}: its model, {}, is not there; give the model with -m", snapshot,
                              options.model));
    }
    run->hashes = hashes_of_model(options.model, !options.random_weights);
    check_model(options, info, run->hashes, snapshot);
    check_generation(options, run->state, run->hashes, snapshot);
    check_surrogate(options, info, snapshot);
    std::string policy;
    try {
      policy = identity_of_policy(options.pruning);
    } catch (const Error& error) {
      throw Error(
          fmt::format("{}: {} (if it has been moved, --policy or --surrogate says where it is now)",
                      snapshot, error.what()));
    }
    if (policy == run->state.policy) return;
    throw Error(fmt::format("{}: its policy was {}; by the files that are there now it is {}",
                            snapshot, run->state.policy, policy));
  });
  return run;
}

std::unique_ptr<ResumedRun> open_fitting(const std::string& file, const std::string& recorded,
                                         const SnapshotInfo& info, const RunState& state,
                                         DType dtype, const Communicator& comm) {
  json theirs;
  std::unique_ptr<ResumedRun> run = open_run(file, theirs, comm);
  const std::string snapshot = "snapshot " + file;
  comm.agree_on_root([&] {
    const json ours = files::parse_json(recorded, "options");
    json names = ours;
    names.update(theirs);
    const auto text = [](const json& of, const std::string& name) {
      return of.contains(name) ? value_text(of.at(name)) : "";
    };
    const auto told = [](const std::string& name, const std::string& value) {
      return value.empty() ? "without --" + name : fmt::format("with --{} {}", name, value);
    };
    for (const auto& [name, unused] : names.items()) {
      if (may_change(name) || names_policy(name)) continue;
      const std::string there = text(theirs, name), here = text(ours, name);
      if (is_same_value(there, here)) continue;
      throw Error(
          fmt::format("{} was made {}, and this conversation {}; kvzap chat --resume {} "
                      "continues it with its own options",
                      snapshot, told(name, there), told(name, here), file));
    }
    const auto check = [&](const char* what, const std::string& found,
                           const std::string& expected) {
      if (found == expected) return;
      throw Error(fmt::format("{}: its {} is {}; expected that of this conversation, {}", snapshot,
                              what, found, expected));
    };
    const SnapshotInfo& found = run->reader.header().info;
    check("model's hash", found.model_hash, info.model_hash);
    check("tokenizer's hash", found.tokenizer_hash, info.tokenizer_hash);
    check("policy", run->state.policy, state.policy);
    const auto threshold = [](const RunState& of) {
      return of.looked_up ? fmt::format("{}", of.looked_up->threshold) : "none";
    };
    check("looked-up threshold", threshold(run->state), threshold(state));
  });
  comm.agree([&] { convert(run->state, dtype); });
  return run;
}

std::optional<std::string> note_of_types(const std::string& file, const SnapshotHeader& header,
                                         const PageFormat& format, DType dtype) {
  if (format == header.format) return {};
  return fmt::format("{} has keys and values in {}; here they become {}", file,
                     name_of(header.format, header.dtype), name_of(format, dtype));
}

}  // namespace kvzap::driver
