#include "commands/snapshots.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/escaped_list.hpp"
#include "base/fnv.hpp"
#include "base/json_file.hpp"
#include "base/temporary_file.hpp"
#include "console/console.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

/// Text of JSON whatever bytes a file name or a question has.
std::string dumped(const ordered_json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// --- options

/// Of inputs, outputs and the machine: no run begins with those of another.
bool is_recorded(const std::string& name) {
  static const std::set<std::string> not_recorded = {
      "help", "config", "prompt", "file",  "system",  "question",       "placement", "json",
      "dump", "resume", "append", "quiet", "dry-run", "json-token-ids", "progress",  "threads"};
  return not_recorded.count(name) == 0 && name.rfind("snapshot", 0) != 0;
}

/// The rows of a cache do not depend on them; a run may go on with others.
bool is_free(const std::string& name) {
  static const std::set<std::string> free = {"dtype",
                                             "page-rows",
                                             "trim",
                                             "n-predict",
                                             "ignore-eos",
                                             "temp",
                                             "top-k",
                                             "top-p",
                                             "seed",
                                             "raw",
                                             "token-ids",
                                             "thinking",
                                             "ctx-size",
                                             "model",
                                             "min-p",
                                             "repeat-penalty",
                                             "repeat-last-n",
                                             "presence-penalty",
                                             "frequency-penalty",
                                             "greedy-plain"};
  return free.count(name) > 0;
}

/// What names the policy; it is compared by what the names stand for.
const char* const policy_flags[] = {"policy", "surrogate", "layerwise"};
bool names_policy(const std::string& name) {
  return std::find(std::begin(policy_flags), std::end(policy_flags), name) !=
         std::end(policy_flags);
}

bool is_flag(const CLI::Option& option) { return option.get_expected_max() == 0; }

std::string name_of(const CLI::Option& option) {
  return option.get_lnames().empty() ? "" : option.get_lnames().front();
}

/// The option's value as text, or that which it has if it is not given; empty: none.
std::string text_of(const CLI::Option& option) {
  if (option.count() == 0) return option.get_default_str();
  if (is_flag(option)) return option.as<bool>() ? "true" : "false";
  return option.as<std::string>();
}

ordered_json value_of(const CLI::Option& option, const std::string& text) {
  if (is_flag(option)) return text == "true";
  const std::string type = option.get_type_name().substr(0, option.get_type_name().find(':'));
  const bool is_number = type == "INT" || type == "UINT" || type == "FLOAT" || type == "SEED";
  // Not infinity, which JSON lacks.
  if (is_number && json::accept(text)) return ordered_json::parse(text);
  return text;
}

/// What it is by default depends on others.
std::string prune_of(const RunOptions& options) {
  return std::string(kvzap::name_of(options.pruning.mode_in_force()));
}

std::string text_of(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.dump();
}

bool is_same_value(const std::string& a, const std::string& b) {
  if (a == b) return true;
  if ((a + b).find_first_not_of("0123456789") == std::string::npos) return false;  // 64 bits
  char* end_of_a = nullptr;
  char* end_of_b = nullptr;
  const double x = std::strtod(a.c_str(), &end_of_a);
  const double y = std::strtod(b.c_str(), &end_of_b);
  return !a.empty() && !b.empty() && *end_of_a == '\0' && *end_of_b == '\0' && x == y;
}

/// Throws Error for options of `app` that were given and that the snapshot's rows do not fit.
void check_given(const CLI::App& app, const json& recorded, const std::string& snapshot) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = name_of(*option);
    if (option->count() == 0 || !is_recorded(name) || is_free(name) || names_policy(name)) continue;
    const std::string given = text_of(*option);
    const std::string there = recorded.contains(name) ? text_of(recorded.at(name)) : "";
    if (is_same_value(given, there)) continue;
    throw Error(fmt::format(
        "--{} is {}; {} was made {}", name, given, snapshot,
        there.empty() ? "without --" + name : fmt::format("with --{} {}", name, there)));
  }
}

/// The same for those that name the policy, which may be found under another name.
void check_given_policy(const CLI::App& app, const RunOptions& options, const json& recorded,
                        const RunState& state, const std::string& snapshot) {
  const auto there = [&](const char* name) {
    return recorded.contains(name) ? text_of(recorded.at(name)) : "";
  };
  const Pruning before = Pruning::parse(there("policy"));
  const std::string& given = options.pruning_texts.policy;
  Pruning named = given.empty() ? before : Pruning::parse(given);
  Pruning settings = named;
  settings.policy = before.policy;
  const bool is_set_alike = settings == before;  // by what stands behind an @
  named.surrogate =
      options.pruning.surrogate.empty() ? there("surrogate") : options.pruning.surrogate;
  named.layerwise = app.get_option("--layerwise")->count() == 0 ? there("layerwise") == "true"
                                                                : options.pruning.layerwise;
  named.mode = there("prune") == "none" ? PruneMode::none : PruneMode::prefill;
  std::string identity;
  for (const char* name : policy_flags) {
    const CLI::Option& option = *app.get_option(std::string("--") + name);
    if (option.count() == 0 || text_of(option) == there(name)) continue;
    if (identity.empty()) {
      try {
        identity = identity_of_policy(named);
      } catch (const Error&) {
        identity = "?";  // two policies in one
      }
    }
    if (identity == state.policy && is_set_alike) return;
    throw Error(fmt::format("--{} is {}; {} was made {}", name, text_of(option), snapshot,
                            there(name).empty() ? fmt::format("without --{}", name)
                                                : fmt::format("with --{} {}", name, there(name))));
  }
}

/// Gives options that were not given the values that the file has of them.
void restore_options(CLI::App& app, const json& recorded, const std::string& snapshot) {
  for (const auto& [name, value] : recorded.items()) {
    CLI::Option* option = is_recorded(name) ? app.get_option_no_throw("--" + name) : nullptr;
    if (!option) {
      throw Error(
          fmt::format("{}: options: --{} is no option of this version of kvzap that a run "
                      "could go on with",
                      snapshot, name));
    }
    if (option->count() > 0) continue;
    try {
      const std::string text = text_of(value);
      option->add_result(is_flag(*option) ? option->get_flag_value(name, text) : text);
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw Error(fmt::format("{}: options: {}: {}", snapshot, name, explain(app, error)));
    }
  }
}

/// Where a file or folder is, seen from any folder; as it is if that cannot be said.
std::string absolute(const std::string& file) {
  std::error_code failed;
  const fs::path path = fs::absolute(file, failed).lexically_normal();
  return file.empty() || failed ? file : path.string();
}

/// Whether an argument of a policy names a file that is there. (Where none is needed, the standard
/// value is a word such as "none".)
bool names_file(const PolicyParameter& parameter, const std::string& value) {
  return parameter.kind == PolicyParameter::Kind::file && !value.empty() &&
         value != parameter.standard;
}

/// "name:key=value,…" with the files that it names as seen from any folder.
std::string part_of_any_folder(const std::string& part,
                               const std::vector<PolicyParameter>& parameters) {
  const std::size_t colon = part.find(':');
  if (colon == std::string::npos) return part;
  std::string text = part.substr(0, colon);
  char separator = ':';
  for (const std::string& pair : detail::split_unescaped(part.substr(colon + 1), ',')) {
    const std::size_t equals = pair.find('=');
    const std::string key = pair.substr(0, equals);
    const std::string value = detail::without_escapes(pair.substr(equals + 1), ",+");
    const bool is_file =
        std::any_of(parameters.begin(), parameters.end(), [&](const PolicyParameter& parameter) {
          return parameter.name == key && names_file(parameter, value);
        });
    text += separator;
    text += is_file ? key + "=" + escaped_in_policy(absolute(value)) : pair;
    separator = ',';
  }
  return text;
}

/// --policy, likewise.
std::string policy_of_any_folder(const RunOptions& options) {
  const std::string& given = options.pruning_texts.policy;
  PolicySpec spec;
  try {
    spec = parse_policy(options.pruning.policy_text(flag_names()));
  } catch (const Error&) {
    return given;  // the run will say what is wrong with it
  }
  const std::string settings = given.substr(detail::split_unescaped(given, '@').front().size());
  const std::vector<std::string> parts = detail::split_unescaped(options.pruning.policy, '+');
  std::string text = part_of_any_folder(parts.front(), spec.info->parameters);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    text += "+" + part_of_any_folder(parts[i], spec.modifiers.at(i - 1).first->parameters);
  }
  return escaped_in_settings(text) + settings;
}

// --- the state of a run

ordered_json json_of(const CacheReport& cache) {
  return {{"tokens", cache.tokens},
          {"kept_rows", cache.kept},
          {"non_finite_scores", cache.non_finite_scores},
          {"full_bytes", cache.full_bytes},
          {"live_bytes", cache.live_bytes},
          {"allocated_bytes", cache.allocated_bytes},
          {"returned_bytes", cache.returned_bytes},
          {"peak_allocated_bytes", cache.peak_allocated_bytes}};
}

/// Its seconds, which are of another process, are none.
CacheReport cache_of(const json& value, const SnapshotHeader& header) {
  CacheReport cache;
  value.at("tokens").get_to(cache.tokens);
  value.at("kept_rows").get_to(cache.kept);
  value.at("non_finite_scores").get_to(cache.non_finite_scores);
  value.at("full_bytes").get_to(cache.full_bytes);
  value.at("live_bytes").get_to(cache.live_bytes);
  value.at("allocated_bytes").get_to(cache.allocated_bytes);
  value.at("returned_bytes").get_to(cache.returned_bytes);
  value.at("peak_allocated_bytes").get_to(cache.peak_allocated_bytes);
  const bool fits = static_cast<std::int64_t>(cache.kept.size()) == header.n_layers &&
                    std::all_of(cache.kept.begin(), cache.kept.end(), [&](const auto& heads) {
                      return static_cast<std::int64_t>(heads.size()) == header.n_kv_heads;
                    });
  if (!fits) {
    throw Error(fmt::format("kept_rows: expected {} layers of {} KV heads", header.n_layers,
                            header.n_kv_heads));
  }
  return cache;
}

StopReason reason_from_name(const std::string& name) {
  for (const StopReason reason :
       {StopReason::stop_id, StopReason::max_new_tokens, StopReason::context_full}) {
    if (name == kvzap::name_of(reason)) return reason;
  }
  throw Error(
      fmt::format("stop_reason is {}; expected stop_id, max_new_tokens or context_full", name));
}

RunState state_of(const json& value, const SnapshotHeader& header) {
  RunState state;
  for (const json& question : value.at("questions")) {
    state.texts.push_back(question.at("text"));
    state.questions.push_back(question.at("ids"));
  }
  for (const json& answer : value.at("answers")) {
    AnsweredQuestion answered;
    if (state.answers.size() >= state.questions.size()) {
      throw Error(
          fmt::format("answers: there are more than questions, {}", state.questions.size()));
    }
    answered.question = state.texts[state.answers.size()];
    answered.text = answer.at("text");
    answer.at("ids").get_to(answered.answer.tokens);
    const std::string stop_reason = answer.at("stop_reason");
    answered.is_interrupted = stop_reason == "interrupted";
    if (!answered.is_interrupted) answered.answer.stop_reason = reason_from_name(stop_reason);
    answered.answer.question_tokens =
        static_cast<std::int64_t>(state.questions[state.answers.size()].size());
    answered.answer.cache = cache_of(answer.at("cache"), header);
    answered.is_from_snapshot = true;
    state.answers.push_back(std::move(answered));
  }
  if (state.questions.empty()) throw Error("questions: there are none");
  if (value.contains("context")) state.context = cache_of(value.at("context"), header);
  state.dtype = dtype_from_name(value.at("dtype").get<std::string>());
  value.at("policy").get_to(state.policy);
  if (value.contains("generation_hash")) state.generation = value.at("generation_hash");
  if (value.contains("threshold")) {
    const json& found = value.at("threshold");
    state.looked_up.emplace();
    found.at("evict_ratio").get_to(state.looked_up->evict_ratio);
    found.at("file").get_to(state.looked_up->file);
    // As text: it may be infinite.
    state.looked_up->threshold = std::strtod(found.at("value").get<std::string>().c_str(), nullptr);
  }
  return state;
}

/// The same rows with values of another type.
void convert(CacheReport& cache, DType from, DType to) {
  for (std::int64_t* bytes : {&cache.full_bytes, &cache.live_bytes, &cache.allocated_bytes,
                              &cache.returned_bytes, &cache.peak_allocated_bytes}) {
    *bytes =
        *bytes / static_cast<std::int64_t>(size_of(from)) * static_cast<std::int64_t>(size_of(to));
  }
}

void convert(RunState& state, DType to) {
  for (AnsweredQuestion& answered : state.answers) convert(answered.answer.cache, state.dtype, to);
  if (state.context) convert(*state.context, state.dtype, to);
  state.dtype = to;
}

/// Throws Error for what no run can go on from, whatever its options.
void check_header(const SnapshotHeader& header, const std::string& snapshot) {
  const auto fail = [&](const std::string& what) {
    throw Error(fmt::format("{}: {}", snapshot, what));
  };
  if (header.format_version < 2) {
    fail(fmt::format("its format version is {}, which lacks what a run needs to go on; expected 2",
                     header.format_version));
  }
  if (header.content != SnapshotContent::all) {
    fail(
        fmt::format("its content is {}, for analyses; a run can go on from content all, with keys "
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

/// Every rank has opened a file by this name; somebody may have replaced it meanwhile.
void check_same_file(const SnapshotHeader& header, const std::string& snapshot,
                     const Communicator& comm) {
  const SnapshotInfo& info = header.info;
  const std::uint64_t hash =
      detail::fnv1a(fmt::format("{} {} {} {} {}", header.file_bytes, header.tokens, info.created,
                                info.options, info.run_state));
  for (const auto& other : comm.all_gather({static_cast<std::int64_t>(hash)})) {
    if (other.front() == static_cast<std::int64_t>(hash)) continue;
    // The same on all ranks, as all of them see all hashes and none fits all.
    throw AgreedError(snapshot + ": ranks do not see the same file; has it just been replaced?");
  }
}

/// Throws Error if the folder's model or tokenizer is another than the snapshot's.
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

/// Throws Error if the folder's generation_config.json has changed: answers would end elsewhere.
void check_generation(const RunOptions& options, const RunState& state, const ModelHashes& found,
                      const std::string& snapshot) {
  if (!state.generation || *state.generation == found.generation) return;
  const auto shown = [](const std::string& hash) { return hash.empty() ? "no such file" : hash; };
  throw Error(fmt::format("{}: {}/generation_config.json: expected the hash {}, found {}", snapshot,
                          options.model, shown(*state.generation), shown(found.generation)));
}

/// Throws Error if the folder's surrogate is another than the snapshot's.
void check_surrogate(const RunOptions& options, const SnapshotInfo& info,
                     const std::string& snapshot) {
  const std::string expected = further_text(info, surrogate_hash_attribute);
  if (expected.empty()) return;
  SurrogateIdentity found;
  try {
    found = identity_of_surrogate(options.pruning);
  } catch (const Error&) {
    return;  // identity_of_policy will throw the same
  }
  if (found.folder.empty() || found.hash == expected) return;
  throw Error(fmt::format("{}: {} has another surrogate: its hash is {}; expected {}, that of {}",
                          snapshot, found.folder, found.hash, expected,
                          further_text(info, surrogate_folder_attribute)));
}

/// A copy that appears once it is complete. One process alone.
void copy_whole(const fs::path& from, const fs::path& to) {
  const Communicator self = Communicator::self();
  detail::TemporaryFile temporary(to, self);
  temporary.create();
  detail::agree_on_file(self, to, [&] {
    temporary.remove_leftovers();
    fs::copy_file(from, temporary.path(), fs::copy_options::overwrite_existing);
  });
  temporary.move_to_target();
}

json parsed(const std::string& text, const std::string& snapshot, const char* attribute) {
  json value = detail::parse_json(text, fmt::format("{}: {}", snapshot, attribute));
  if (!value.is_object()) {
    throw Error(fmt::format("{}: {}: expected a JSON object", snapshot, attribute));
  }
  return value;
}

/// Opens it on all ranks; `recorded` gets its options. Collective.
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
      state = state_of(parsed(header.info.run_state, snapshot, "run_state"), header);
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

std::string recorded_options(const CLI::App& app, const RunOptions& options) {
  ordered_json recorded = ordered_json::object();
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = name_of(*option);
    const std::string text = is_recorded(name) ? text_of(*option) : "";
    if (!text.empty()) recorded[name] = value_of(*option, text);
  }
  // Another run may begin in another folder.
  if (!options.model.empty()) recorded["model"] = absolute(options.model);
  const std::string& surrogate = options.pruning.surrogate;
  if (!surrogate.empty()) recorded["surrogate"] = absolute(surrogate);
  if (!options.pruning_texts.policy.empty()) recorded["policy"] = policy_of_any_folder(options);
  recorded["prune"] = prune_of(options);
  return dumped(recorded);
}

std::string options_in_force(const CLI::App& app, const RunOptions& options) {
  ordered_json all = ordered_json::object();
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = name_of(*option);
    if (name.empty() || name == "help") continue;
    const std::string text = name == "question" ? "" : text_of(*option);
    all[name] = text.empty() ? (is_flag(*option) ? ordered_json(false) : ordered_json())
                             : value_of(*option, text);
  }
  if (options.prompt) all["prompt"] = *options.prompt;
  all["question"] = options.questions.empty() ? ordered_json() : ordered_json(options.questions);
  all["trim"] = options.trim;
  all["prune"] = prune_of(options);
  return dumped(all);
}

std::string further_text(const SnapshotInfo& info, const char* name) {
  const auto found = info.further.find(name);
  if (found == info.further.end()) return "";
  const auto* const text = std::get_if<std::string>(&found->second);
  return text ? *text : "";
}

std::string identity_of_policy(const Pruning& pruning) {
  if (!pruning.prunes()) return "";
  const PolicySpec spec = parse_policy(pruning.policy_text(flag_names()));
  std::string identity;
  const auto add = [&](const auto& info, const PolicyArguments& arguments) {
    identity += info.name;
    for (const PolicyParameter& parameter : info.parameters) {
      std::string value = arguments.text(parameter.name);
      if (names_file(parameter, value)) value = hash_of_policy_file(value);
      identity += fmt::format(":{}={}", parameter.name, value);
    }
  };
  add(*spec.info, spec.arguments);
  for (const auto& [info, arguments] : spec.modifiers) {
    identity += "+";
    add(*info, arguments);
  }
  return identity;
}

SurrogateIdentity identity_of_surrogate(const Pruning& pruning) {
  if (!pruning.prunes()) return {};
  const PolicySpec spec = parse_policy(pruning.policy_text(flag_names()));
  for (const PolicyParameter& parameter : spec.info->parameters) {
    const std::string value = spec.arguments.text(parameter.name);
    if (parameter.name != "surrogate" || !names_file(parameter, value)) continue;
    return {absolute(value), hash_of_policy_file(value)};
  }
  return {};
}

std::string to_json_text(const RunState& state) {
  ordered_json value = {{"questions", ordered_json::array()}, {"answers", ordered_json::array()}};
  for (std::size_t i = 0; i < state.questions.size(); ++i) {
    value["questions"].push_back({{"text", state.texts[i]}, {"ids", state.questions[i]}});
  }
  for (const AnsweredQuestion& answered : state.answers) {
    value["answers"].push_back({{"text", answered.text},
                                {"ids", answered.answer.tokens},
                                {"stop_reason", stop_reason_of(answered)},
                                {"cache", json_of(answered.answer.cache)}});
  }
  if (state.context) value["context"] = json_of(*state.context);
  value["dtype"] = kvzap::name_of(state.dtype);
  value["policy"] = state.policy;
  if (state.generation) value["generation_hash"] = *state.generation;
  if (state.looked_up) {
    value["threshold"] = {{"evict_ratio", state.looked_up->evict_ratio},
                          {"value", fmt::format("{}", state.looked_up->threshold)},
                          {"file", state.looked_up->file}};
  }
  return dumped(value);
}

Prompt ResumedRun::prompt() const {
  const SnapshotInfo& info = reader.header().info;
  return {{info.token_ids.begin(), info.token_ids.begin() + info.context_tokens}, state.questions};
}

std::unique_ptr<ResumedRun> open_resumed(CLI::App& app, RunOptions& options,
                                         const Communicator& comm) {
  // (validate refuses the other two.)
  if (options.resume.empty() || options.resume == "-" || options.dry_run) {
    comm.agree([&] { resolve_pruning(options); });
    return nullptr;
  }
  const std::string snapshot = "snapshot " + options.resume;
  json recorded;
  std::unique_ptr<ResumedRun> run = open_run(options.resume, recorded, comm);
  const SnapshotInfo& info = run->reader.header().info;
  comm.agree([&] { check_given(app, recorded, snapshot); });
  comm.agree_on_root([&] { check_given_policy(app, options, recorded, run->state, snapshot); });
  comm.agree([&] {
    restore_options(app, recorded, snapshot);
    resolve_pruning(options);
    convert(run->state, dtype_from_name(options.dtype));
  });
  comm.agree_on_root([&] {
    std::error_code ignored;
    if (!fs::is_directory(options.model, ignored)) {
      throw Error(fmt::format("{}: its model, {}, is not there; give the model's folder with -m",
                              snapshot, options.model));
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
    const json ours = json::parse(recorded);
    json names = ours;
    names.update(theirs);
    const auto text = [](const json& of, const std::string& name) {
      return of.contains(name) ? text_of(of.at(name)) : "";
    };
    const auto told = [](const std::string& name, const std::string& value) {
      return value.empty() ? "without --" + name : fmt::format("with --{} {}", name, value);
    };
    for (const auto& [name, unused] : names.items()) {
      if (is_free(name) || names_policy(name)) continue;
      const std::string there = text(theirs, name), here = text(ours, name);
      if (is_same_value(there, here)) continue;
      throw Error(
          fmt::format("{} was made {}, and this conversation {}; kvzap chat --resume {} "
                      "goes on with it as it is",
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

Snapshots::Snapshots(const RunOptions& options, SnapshotInfo info, const Communicator& comm,
                     Progress& bar, std::function<std::string()> run_state,
                     std::vector<WrittenSnapshot>& written)
    : m_options(options),
      m_info(std::move(info)),
      m_comm(comm),
      m_bar(bar),
      m_run_state(std::move(run_state)),
      m_written(written) {
  if (!options.snapshot_content.empty()) {
    m_how.content = snapshot_content_from_name(options.snapshot_content);
  }
  // Keys and values hardly get smaller, what says where rows are does.
  m_how.compress =
      options.snapshot_compress.value_or(m_how.content == SnapshotContent::all ? 0 : 6);
  if (!options.snapshot_dtype.empty()) m_how.dtype = dtype_from_name(options.snapshot_dtype);
}

void Snapshots::write(Generator& generator) {
  if (is_on()) begin(generator, !m_options.snapshot_every);
}

void Snapshots::after_step(Generator& generator, std::int64_t tokens) {
  if (!is_on()) return;
  m_since += tokens;
  if (m_writing) {
    const auto start = detail::Clock::now();
    const bool is_done = m_writing->advance();
    m_waiting_seconds += detail::seconds_since(start);
    if (is_done) end();
  }
  const int signal = static_cast<int>(m_comm.all_reduce_max(std::int64_t{caught_signal}));
  if (signal != 0) {
    finish();
    if (m_since > 0 || m_written.empty()) begin(generator, true);
    throw Interrupted{signal};
  }
  if (m_options.snapshot_every && m_since >= *m_options.snapshot_every) begin(generator, false);
}

void Snapshots::finish() {
  if (!m_writing) return;
  const auto start = detail::Clock::now();
  m_writing->finish();
  m_waiting_seconds += detail::seconds_since(start);
  end();
}

void Snapshots::begin(Generator& generator, bool waits) {
  finish();
  std::string not_kept;
  m_comm.agree_on_root([&] { not_kept = keep_older(); });
  if (!not_kept.empty()) tell({not_kept});
  SnapshotInfo info = m_info;
  if (m_comm.is_root()) info.run_state = m_run_state();
  m_start = detail::Clock::now();
  if (waits) {
    tell(generator.write_snapshot(m_options.snapshot, std::move(info), m_how));
  } else {
    m_writing = generator.begin_snapshot(m_options.snapshot, std::move(info), m_how);
  }
  m_waiting_seconds = detail::seconds_since(m_start);
  m_since = 0;
  if (waits) end();
}

/// A file is in its place.
void Snapshots::end() {
  WrittenSnapshot written;
  written.seconds = detail::seconds_since(m_start);
  written.waiting_seconds = m_waiting_seconds;
  if (m_writing) tell(m_writing->notes());
  m_writing.reset();
  written.file = m_options.snapshot;
  m_comm.agree_on_root([&] {
    try {
      const SnapshotReader reader(m_options.snapshot);
      written.tokens = reader.header().tokens;
      written.bytes = reader.header().file_bytes;
    } catch (const Error& error) {
      // Somebody takes snapshots away as soon as they are there: no reason to end the run.
      tell({fmt::format("just written, and taken away or changed since: {}", error.what())});
    }
    remove_older();
  });
  m_written.push_back(std::move(written));
}

void Snapshots::tell(const std::vector<std::string>& notes) const {
  if (notes.empty() || m_options.quiet || !m_comm.is_root()) return;
  m_bar.clear();
  for (const std::string& note : notes) say("kvzap: warning: {}\n", note);
}

/// Whether a file is a snapshot of this model, and of so many tokens as its name says.
bool Snapshots::is_ours(const fs::path& file, std::int64_t tokens) const {
  try {
    const SnapshotReader reader(file);
    return reader.header().tokens == tokens && reader.header().info.model_hash == m_info.model_hash;
  } catch (const Error&) {
    return false;
  }
}

/// A second name for the file that is about to be replaced, cache.4096.h5 for cache.h5, or a copy
/// where the file system has no such names. Returns why there is none, if there ought to be: that
/// is no reason to end a long run.
std::string Snapshots::keep_older() const {
  if (m_options.snapshot_keep.value_or(1) == 1) return "";
  const fs::path file = m_options.snapshot;
  std::int64_t tokens = 0;
  try {
    tokens = SnapshotReader(file).header().tokens;
  } catch (const Error&) {
    return "";  // there is none, or something else
  }
  if (!is_ours(file, tokens)) return "";
  const fs::path older = file.parent_path() / fmt::format("{}.{}{}", file.stem().string(), tokens,
                                                          file.extension().string());
  std::error_code failed;
  if (fs::equivalent(file, older, failed)) return "";
  if (is_ours(older, tokens)) fs::remove(older, failed);
  // (A second name for a symbolic link would lead to what comes, not to what there is.)
  fs::create_hard_link(detail::target_of_links(file), older, failed);
  if (!failed) return "";
  std::string what = failed.message();
  if (failed != std::errc::file_exists) {
    try {
      copy_whole(file, older);
      return "";
    } catch (const std::exception& error) {
      what += fmt::format("; nor copied: {}", error.what());
    }
  }
  return fmt::format("--snapshot-keep: {} of {} tokens cannot be kept as {}: {}", file.string(),
                     tokens, older.string(), what);
}

/// Leaves --snapshot-keep of them.
void Snapshots::remove_older() const {
  if (!m_options.snapshot_keep) return;
  const fs::path file = m_options.snapshot;
  const fs::path folder = file.parent_path().empty() ? "." : file.parent_path();
  const std::string begin = file.stem().string() + ".";
  const std::string end = file.extension().string();
  std::vector<std::pair<fs::file_time_type, fs::path>> older;
  std::error_code failed;  // a folder that cannot be listed, a file that somebody has just removed
  fs::directory_iterator entry(folder, failed);
  for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    if (name.size() <= begin.size() + end.size() || name.rfind(begin, 0) != 0 ||
        name.compare(name.size() - end.size(), end.size(), end) != 0) {
      continue;
    }
    const std::string digits = name.substr(begin.size(), name.size() - begin.size() - end.size());
    constexpr std::size_t most_digits = 18;  // of 64 bits
    if (digits.size() > most_digits || digits.find_first_not_of("0123456789") != std::string::npos)
      continue;
    std::error_code gone;
    const auto written_at = entry->last_write_time(gone);
    if (!gone && is_ours(entry->path(), std::stoll(digits))) {
      older.emplace_back(written_at, entry->path());
    }
  }
  std::sort(older.begin(), older.end(), [](const auto& a, const auto& b) { return a > b; });
  for (std::size_t i = *m_options.snapshot_keep - 1; i < older.size(); ++i) {
    fs::remove(older[i].second, failed);
    if (failed) {
      tell({fmt::format("{}: cannot be removed: {}", older[i].second.string(), failed.message())});
    }
  }
}

}  // namespace kvzap::driver
