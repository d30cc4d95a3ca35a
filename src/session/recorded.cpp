#include "session/recorded.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <utility>

#include "files/decimal.hpp"
#include "files/escaped_list.hpp"
#include "files/fnv.hpp"
#include "files/json_file.hpp"
#include "policy/pruning_text.hpp"

namespace kvzap::session {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

std::string snapshot_name(const Recorded& recorded) {
  return fmt::format("snapshot {}", recorded.reader.file().string());
}

/// The surrogate of a pruning, given by its policy or alone.
struct SurrogateIdentity {
  std::string folder;  // absolute; empty without a surrogate
  std::string hash;    // as in identity_of_policy
};

SurrogateIdentity identity_of_surrogate(const Pruning& pruning, const PruningNames& names) {
  if (!pruning.prunes()) return {};
  const PolicySpec spec = pruning.spec(names);
  if (spec.info->surrogate.empty()) return {};
  const std::string folder = spec.arguments.text(spec.info->surrogate);
  if (folder.empty()) return {};
  return {absolute_path(folder), hash_of_policy_file(folder)};
}

/// Reads the attributes of an older Session::save, which had names of its own for them.
void read_older(const SnapshotInfo& info, Recorded& recorded) {
  const auto flag = [&](const char* name) {
    const auto found = info.further.find(name);
    const auto* const value =
        found == info.further.end() ? nullptr : std::get_if<std::int64_t>(&found->second);
    return value && *value != 0;
  };
  recorded.options = options_of(Pruning::parse(further_text(info, "session_pruning")));
  recorded.options["dtype"] = name_of(recorded.reader.header().dtype);
  recorded.options["model"] = info.model;
  recorded.options["thinking"] = flag("session_thinking") ? "on" : "off";
  if (!flag("session_chat_template")) recorded.options["raw"] = true;
  if (info.further.count("session_system") > 0) {
    recorded.state.system = further_text(info, "session_system");
  }
  recorded.state.dtype = recorded.reader.header().dtype;
}

/// Throws Error if no conversation can continue from the file.
void check_header(const SnapshotHeader& header) {
  if (header.content != SnapshotContent::all) {
    throw Error(
        fmt::format("its content is {}, for analyses; a run can resume from content all, with keys "
                    "and values",
                    name_of(header.content)));
  }
  const SnapshotInfo& info = header.info;
  const auto ids = static_cast<std::int64_t>(info.token_ids.size());
  if (info.context_tokens >= 1 && info.context_tokens <= ids) return;
  throw Error(fmt::format("context_tokens is {}; expected 1 to {}, the number of its token ids",
                          info.context_tokens, ids));
}

void read(Recorded& recorded) {
  const SnapshotHeader& header = recorded.reader.header();
  const SnapshotInfo& info = header.info;
  if (!recorded.is_older() && (info.options.empty() || info.run_state.empty())) {
    throw Error(
        "was not written by kvzap run, kvzap chat or a Session: it has no options of a run");
  }
  check_header(header);
  if (recorded.is_older()) return read_older(info, recorded);
  recorded.options = files::parse_json_object(info.options, "options");
  const json state = files::parse_json_object(info.run_state, "run_state");
  try {
    recorded.state = read_state(state, header);
  } catch (const std::exception& error) {
    throw Error(fmt::format("run_state: {}", error.what()));
  }
}

/// Throws if the ranks' files differ. All ranks opened the same name, but the file may have been
/// replaced meanwhile.
void check_same_file(const SnapshotHeader& header, const std::string& file,
                     const Communicator& comm) {
  const SnapshotInfo& info = header.info;
  const std::uint64_t hash =
      files::fnv1a(fmt::format("{} {} {} {} {}", header.file_bytes, header.tokens, info.created,
                               info.options, info.run_state));
  for (const auto& other : comm.all_gather({static_cast<std::int64_t>(hash)})) {
    if (other.front() == static_cast<std::int64_t>(hash)) continue;
    // All ranks reach this, because they compare the same hashes.
    throw AgreedError(fmt::format(
        "snapshot {}: ranks do not see the same file; has it just been replaced?", file));
  }
}

/// Throws Error if the pruning's surrogate differs from the snapshot's.
void check_surrogate(const SnapshotInfo& info, const Pruning& pruning, const PruningNames& names) {
  std::string expected = further_text(info, surrogate_hash_attribute);
  if (expected.empty()) expected = further_text(info, "session_surrogate_hash");
  if (expected.empty()) return;
  SurrogateIdentity found;
  try {
    found = identity_of_surrogate(pruning, names);
  } catch (const Error&) {
    return;  // identity_of_policy will throw the same error
  }
  if (found.folder.empty() || found.hash == expected) return;
  const std::string folder = further_text(info, surrogate_folder_attribute);
  throw Error(fmt::format("{} has another surrogate: its hash is {}; expected {}{}", found.folder,
                          found.hash, expected, folder.empty() ? "" : ", that of " + folder));
}

void check_policy(const ConversationState& state, const Pruning& pruning,
                  const PruningNames& names) {
  std::string policy;
  try {
    policy = identity_of_policy(pruning, names);
  } catch (const Error& error) {
    throw Error(fmt::format("{} (if it has been moved, {} or {} says where it is now)",
                            error.what(), names(PruningField::policy),
                            names(PruningField::surrogate)));
  }
  if (policy == state.policy) return;
  throw Error(fmt::format("its policy was {}; by the files that are there now it is {}",
                          state.policy, policy));
}

}  // namespace

std::string further_text(const SnapshotInfo& info, const char* name) {
  const auto found = info.further.find(name);
  if (found == info.further.end()) return "";
  const auto* const text = std::get_if<std::string>(&found->second);
  return text ? *text : "";
}

std::vector<TokenId> Recorded::context() const {
  const auto& ids = info().token_ids;
  return {ids.begin(), ids.begin() + info().context_tokens};
}

std::string text_in(const json& options, const std::string& name) {
  if (!options.contains(name)) return "";
  const json& value = options.at(name);
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::optional<double> Recorded::real(const char* option) const {
  const std::string given = text(option);
  double number = 0;
  if (given.empty()) return {};
  if (files::read_real(given, number) == files::DecimalFault::none) return number;
  throw Error(fmt::format("options: {} is {}; expected a number", option, given));
}

std::optional<std::uint64_t> Recorded::whole(const char* option) const {
  const std::string given = text(option);
  std::uint64_t number = 0;
  if (given.empty()) return {};
  if (files::read_whole(given, number) == files::DecimalFault::none) return number;
  throw Error(fmt::format("options: {} is {}; expected a whole number", option, given));
}

void Recorded::restore_window(Pruning& pruning) const {
  if (!pruning.auto_window) return;
  pruning.auto_window = false;
  pruning.window =
      static_cast<int>(std::min<std::uint64_t>(whole("window").value_or(pruning.window), 1 << 24));
}

Pruning Recorded::pruning() const {
  std::string settings;
  for (const std::string& key : policy::setting_names()) {
    if (!options.contains(key)) continue;
    const json& value = options.at(key);
    const std::string flag = value.is_boolean() && value.get<bool>() ? "on" : "off";
    settings +=
        fmt::format("@{}={}", key, value.is_boolean() ? flag : escaped_in_settings(text(key)));
  }
  Pruning pruning = Pruning::parse(settings);
  if (options.contains("policy")) pruning = Pruning::parse(text("policy"), pruning);
  restore_window(pruning);
  // `kvzap run --surrogate` without an amount takes the recommended threshold, and records none.
  const bool has_amount = pruning.amount.has_threshold() || pruning.amount.has_budget();
  const bool takes_recommended = pruning.is_plain_kvzap() && !has_amount;
  if (state.looked_up && pruning.prunes() && (takes_recommended || pruning.looks_up_threshold())) {
    pruning.amount = {};
    pruning.threshold(state.looked_up->threshold);
  }
  return pruning;
}

std::unique_ptr<Recorded> open_recorded(const std::string& file, const Communicator& comm) {
  std::unique_ptr<Recorded> recorded;
  comm.agree([&] {
    recorded = std::make_unique<Recorded>(Recorded{SnapshotReader(file), {}, {}, {}});
    try {
      read(*recorded);
    } catch (const std::exception& error) {
      throw Error(fmt::format("snapshot {}: {}", file, error.what()));
    }
  });
  check_same_file(recorded->reader.header(), file, comm);
  return recorded;
}

void check_model_files(Recorded& recorded, const std::string& model, bool has_weights) {
  const SnapshotInfo& info = recorded.info();
  recorded.hashes = hashes_of_model(model, has_weights);
  const ModelHashes& found = recorded.hashes;
  const std::string snapshot = snapshot_name(recorded);
  const auto check = [&](const char* what, const std::string& hash, const std::string& expected) {
    if (hash.empty() || expected.empty() || hash == expected) return;
    throw Error(fmt::format("{}: {} has another {}: its hash is {}; expected {}, that of {}",
                            snapshot, model, what, hash, expected, info.model));
  };
  check("model", found.model, info.model_hash);
  check("tokenizer", found.tokenizer, info.tokenizer_hash);
  const auto& expected = recorded.state.generation;
  if (!expected || *expected == found.generation) return;
  const auto shown = [](const std::string& hash) { return hash.empty() ? "no such file" : hash; };
  throw Error(fmt::format("{}: {}/generation_config.json: expected the hash {}, found {}", snapshot,
                          model, shown(*expected), shown(found.generation)));
}

void check_policy_files(const Recorded& recorded, const Pruning& pruning,
                        const PruningNames& names) {
  try {
    check_surrogate(recorded.info(), pruning, names);
    if (!recorded.is_older()) check_policy(recorded.state, pruning, names);
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", snapshot_name(recorded), error.what()));
  }
}

ordered_json options_of(const Pruning& pruning) {
  const Pruning standard;
  ordered_json options = {{"window", standard.window},
                          {"sink", standard.sink},
                          {"prefill", name_of(standard.prefill)},
                          {"chunk", standard.chunk},
                          {"decode-every", standard.decode.every},
                          {"prune-after", name_of(standard.moment)}};
  const std::vector<std::string> parts = files::split_unescaped(pruning.text(), '@');
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::size_t equals = parts[i].find('=');
    const std::string value = files::without_escapes(parts[i].substr(equals + 1), "@");
    double number = 0;
    const bool is_number = files::read_real(value, number) == files::DecimalFault::none;
    // Infinity stays a text, because JSON has no such number.
    options[parts[i].substr(0, equals)] = is_number && json::accept(value)
                                              ? ordered_json(files::parse_own_json(value))
                                              : ordered_json(value);
  }
  if (pruning.layerwise) options["layerwise"] = true;
  if (!pruning.policy.empty()) {
    options["policy"] = escaped_in_settings(pruning.policy.text());
  }
  options["prune"] = name_of(pruning.mode_in_force());
  return options;
}

void set_hashes(SnapshotInfo& info, ConversationState& state, const ModelHashes& hashes,
                const Pruning& pruning, const PruningNames& names) {
  state.generation = hashes.generation;
  info.model_hash = hashes.model;
  info.tokenizer_hash = hashes.tokenizer;
  const SurrogateIdentity surrogate = identity_of_surrogate(pruning, names);
  if (surrogate.folder.empty()) return;
  info.further[surrogate_folder_attribute] = surrogate.folder;
  info.further[surrogate_hash_attribute] = surrogate.hash;
}

std::string identity_of_policy(const Pruning& pruning, const PruningNames& names) {
  if (!pruning.prunes()) return "";
  const PolicySpec spec = pruning.spec(names);
  std::string identity;
  const auto add = [&](const auto& policy, const PolicyArguments& arguments) {
    identity += policy.name;
    for (const PolicyParameter& parameter : policy.parameters) {
      std::string value = arguments.text(parameter.name);
      if (parameter.names_file(value)) value = hash_of_policy_file(value);
      identity += fmt::format(":{}={}", parameter.name, value);
    }
  };
  add(*spec.info, spec.arguments);
  for (const auto& [modifier, arguments] : spec.modifiers) {
    identity += "+";
    add(*modifier, arguments);
  }
  return identity;
}

PolicyText absolute_policy(const Pruning& pruning, const PruningNames& names) {
  try {
    static_cast<void>(pruning.spec(names));
  } catch (const Error&) {
    return pruning.policy;  // who runs it reports the error
  }
  return pruning.policy.with_files(
      [](const std::string&, const PolicyParameter& parameter, const std::string& value) {
        return parameter.names_file(value) ? absolute_path(value) : value;
      });
}

std::string absolute_path(const std::string& file) {
  std::error_code failed;
  const fs::path path = fs::absolute(file, failed).lexically_normal();
  return file.empty() || failed ? file : path.string();
}

}  // namespace kvzap::session
