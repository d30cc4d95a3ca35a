#include "options/arguments.hpp"

#include <fmt/format.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/decimal.hpp"
#include "base/fnv.hpp"
#include "base/nearest.hpp"
#include "base/quote.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "options/one_file.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

constexpr int exit_usage = 2;

// --- Kokkos

struct KokkosFlag {
  const char* name = "";
  enum Value { none, text, number } value = none;
  int since = 0;          // KOKKOS_VERSION
  int until = 1'000'000;  // exclusive
};

/// Flags of Kokkos 3.4 to 5. Flags with an `until` have a newer name.
constexpr KokkosFlag kokkos_flags[] = {{"--kokkos-help", KokkosFlag::none},
                                       {"--kokkos-disable-warnings", KokkosFlag::none},
                                       {"--kokkos-print-configuration", KokkosFlag::none, 30700},
                                       {"--kokkos-tune-internals", KokkosFlag::none},
                                       {"--kokkos-num-threads", KokkosFlag::number, 30700},
                                       {"--kokkos-threads", KokkosFlag::number, 0, 40000},
                                       {"--kokkos-numa", KokkosFlag::number, 0, 40000},
                                       {"--kokkos-device-id", KokkosFlag::number},
                                       {"--kokkos-device", KokkosFlag::number, 0, 40000},
                                       {"--kokkos-map-device-id-by", KokkosFlag::text, 30700},
                                       {"--kokkos-num-devices", KokkosFlag::text, 0, 40000},
                                       {"--kokkos-ndevices", KokkosFlag::text, 0, 40000},
                                       {"--kokkos-tools-libs", KokkosFlag::text, 30700},
                                       {"--kokkos-tools-library", KokkosFlag::text},
                                       {"--kokkos-tools-args", KokkosFlag::text},
                                       {"--kokkos-tools-help", KokkosFlag::none}};

/// Returns the error in a flag that begins with --kokkos-, or "". Kokkos itself would ignore the
/// flag.
std::string fault_of_kokkos_flag(const std::string& flag) {
  const std::string name = flag.substr(0, flag.find('='));
  std::vector<std::string> known;
  for (const KokkosFlag& entry : kokkos_flags) {
    if (KOKKOS_VERSION < entry.since || KOKKOS_VERSION >= entry.until) continue;
    if (name == entry.name) {
      const std::string value = flag.substr(std::min(flag.size(), name.size() + 1));
      if (entry.value == KokkosFlag::none) return "";
      if (value.empty()) return fmt::format("{} needs a value; expected {}=VALUE", name, name);
      int number = 0;  // Kokkos reports a wrong value without naming it, or not at all
      const bool is_number =
          base::read_whole(value, number) == base::DecimalFault::none && number >= 0;
      return entry.value == KokkosFlag::number && !is_number
                 ? fmt::format("{} is {}; expected a whole number of 0 or more", name,
                               in_quotes(value))
                 : "";
    }
    known.emplace_back(entry.name);
  }
  // Compares without the common prefix, which would make all flags similar.
  constexpr std::size_t prefix = std::string_view("--kokkos-").size();
  std::vector<std::string> ends;
  ends.reserve(known.size());
  for (const std::string& one : known) ends.push_back(one.substr(prefix));
  const std::string nearest = base::nearest_name(name.substr(prefix), ends);
  return fmt::format(
      "unknown option {}; {}", name,
      nearest.empty()
          ? fmt::format("Kokkos {}.{}.{} knows {}", KOKKOS_VERSION / 10000,
                        KOKKOS_VERSION / 100 % 100, KOKKOS_VERSION % 100, fmt::join(known, ", "))
          : "did you mean --kokkos-" + nearest + "?");
}

// --- options of llama.cpp

struct ForeignOption {
  std::vector<std::string_view> names;
  const char* what_instead;
};

const std::vector<ForeignOption>& foreign_options() {
  static const std::vector<ForeignOption> options = {
      {{"-ngl", "--n-gpu-layers", "--gpu-layers"},
       "the whole model is on the device that kvzap was built for, which kvzap --version names"},
      {{"-tb", "--threads-batch"}, "-t sets the threads of prefill and decode alike"},
      {{"-b", "--batch-size", "-ub", "--ubatch-size"},
       "--prefill sparse reads the context in pieces of --chunk tokens"},
      {{"-fa", "--flash-attn"},
       "attention never holds the scores of a whole context; there is nothing to switch on"},
      {{"-ctk", "--cache-type-k", "-ctv", "--cache-type-v"},
       "--kv-type q8, q4 or q8,q4 (keys, values) is the type of the cache, and --threshold or "
       "--evict-ratio makes it smaller"},
      {{"-i", "--interactive", "-if", "--interactive-first", "-cnv", "--conversation"}, "{chat}"},
      {{"-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"},
       "mpirun -n N kvzap deals the KV heads of each layer to N ranks and their devices"},
      {{"--mlock", "--no-mmap"}, "weights are read into memory, not mapped"},
      {{"-s"}, "--seed N"},
      {{"-hf", "-hfr", "--hf-repo"},
       "-m takes a folder or a GGUF file; huggingface-cli download NAME --local-dir DIR makes "
       "one"}};
  return options;
}

/// Returns the replacement of an option that users know from llama.cpp, or "".
std::string what_instead_of(const std::string& name, bool has_chat) {
  for (const ForeignOption& option : foreign_options()) {
    if (std::find(option.names.begin(), option.names.end(), name) == option.names.end()) continue;
    const std::string_view text = option.what_instead;
    if (text == "{chat}") {
      return has_chat ? "kvzap chat is a conversation in the terminal"
                      : "--question asks about the context, and may be repeated";
    }
    return std::string(text);
  }
  return "";
}

// --- arguments one by one

/// Returns whether an option takes its value from the next argument.
bool awaits_value(const CLI::App& command, const std::string& argument) {
  const auto takes_value = [&](const std::string& name) {
    const CLI::Option* option = command.get_option_no_throw(name);
    return option && option->get_expected_max() > 0;
  };
  if (argument.rfind("--", 0) == 0) {
    return argument.find('=') == std::string::npos && takes_value(argument);
  }
  // "-q", "-n", "-n5", "-qn"
  for (std::size_t i = 1; i < argument.size(); ++i) {
    if (takes_value({'-', argument[i]})) return i + 1 == argument.size();
  }
  return false;
}

/// Removes flags of Kokkos from the arguments, and refuses arguments that CLI11 would misread.
/// CLI11 reads -ngl as -n with the value gl, and accepts an empty value as none.
std::vector<std::string> sift(const CLI::App& app, const std::vector<std::string>& arguments,
                              Reading& reading) {
  std::vector<std::string> own;
  const CLI::App* command = &app;
  bool is_value = false;
  bool is_option = true;  // false after --
  for (const std::string& argument : arguments) {
    const bool was_value = std::exchange(is_value, false);
    if (was_value || !is_option || argument.size() < 2 || argument.front() != '-') {
      if (!was_value && command == &app) {
        const auto commands =
            app.get_subcommands([&](const CLI::App* one) { return one->get_name() == argument; });
        if (!commands.empty()) command = commands.front();
      }
      own.push_back(argument);
      continue;
    }
    if (argument == "--") is_option = false;
    if (argument.rfind("--kokkos-", 0) == 0) {
      if (reading.error.empty()) reading.error = fault_of_kokkos_flag(argument);
      reading.kokkos.push_back(argument);
      continue;
    }
    const std::string name = argument.substr(0, argument.find('='));
    const CLI::Option* const option = command->get_option_no_throw(name);
    if (!option && reading.error.empty()) {
      const auto chats =
          app.get_subcommands([](const CLI::App* one) { return one->get_name() == "chat"; });
      const std::string instead = what_instead_of(name, !chats.empty());
      if (!instead.empty()) reading.error = fmt::format("{} is no option here: {}", name, instead);
    }
    const bool is_empty = name.size() + 1 == argument.size() && name.rfind("--", 0) == 0;
    if (option && is_empty) {
      if (option->get_expected_max() == 0 && reading.error.empty()) {
        reading.error = fmt::format("{} is ''; expected no value, true or false", name);
      }
      own.push_back(name);
      own.emplace_back();
      continue;
    }
    is_value = awaits_value(*command, argument);
    own.push_back(argument);
  }
  return own;
}

/// "run, bench or policies"
std::string names_of_commands(const CLI::App& app) {
  std::vector<std::string_view> names;
  const auto commands = app.get_subcommands([](const CLI::App* one) {
    return one->get_name() != "completion" && one->get_name() != "manual";
  });
  for (const CLI::App* command : commands) names.emplace_back(command->get_name());
  return base::alternatives(names);
}

/// Returns the argument that the parser could not place, or else the parser's own message.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const auto given = app.get_subcommands();
  const CLI::App& command = given.empty() ? app : *given.front();
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) return explain(command, error);
  const std::string& first = unknown.front();
  const std::string name = first.substr(0, first.find('='));
  if (name.rfind('-', 0) != 0) {
    return &command != &app ? fmt::format("unexpected argument {}; quote a text of several words",
                                          in_quotes(first))
                            : fmt::format("unknown subcommand {}; expected {}", in_quotes(first),
                                          names_of_commands(app));
  }
  const std::string nearest =
      nearest_option(command, name.substr(std::min(name.size(), std::size_t{2})));
  const bool is_long = name.rfind("--", 0) == 0;
  return fmt::format("unknown option {}{}", name,
                     is_long && !nearest.empty() ? "; did you mean --" + nearest + "?" : "");
}

std::string encoded(const std::string& value) {
  return fmt::format("\n{}:{}", value.size(), value);
}

/// Decodes texts that encoded() has concatenated, from `begin` on.
std::vector<std::string> decoded(const std::string& text, std::size_t begin) {
  std::vector<std::string> values;
  while (begin < text.size()) {
    const std::size_t colon = text.find(':', begin);
    const std::size_t size = std::stoull(text.substr(begin + 1, colon - begin - 1));
    values.push_back(text.substr(colon + 1, size));
    begin = colon + 1 + size;
  }
  return values;
}

/// "'a' and 'b'", "not given"
std::string shown(const std::string& value_of_option) {
  const std::size_t begin = std::min(value_of_option.find('\n'), value_of_option.size());
  std::string text;
  for (const std::string& value : decoded(value_of_option, begin)) {
    text += (text.empty() ? "" : " and ") + in_quotes(value);
  }
  return text.empty() ? "not given" : text;
}

/// Returns the options of the given command with their current values, each preceded by its length.
std::vector<std::string> values_of(const CommandLine& line) {
  const auto commands = line.app.get_subcommands();
  std::vector<std::string> values;
  if (commands.empty()) return values;
  const CLI::App& command = *commands.front();
  values.push_back("the command" + encoded(command.get_name()));
  for (const CLI::Option* option : command.get_options()) {
    std::string text = option->get_name();
    for (const std::string& value : option->results()) text += encoded(value);
    values.push_back(text);
  }
  return values;
}

// --- files

/// Returns the files of a model or a surrogate: the parts of a GGUF file, or the files in a folder.
std::vector<std::string> files_of(const std::string& folder) {
  static constexpr std::string_view names[] = {
      "config.json",           "generation_config.json", "tokenizer.json",
      "tokenizer_config.json", "chat_template.json",     "model.safetensors.index.json"};
  std::vector<std::string> files;
  if (gguf::is_gguf(folder)) {
    for (const fs::path& part : gguf::parts_of(folder)) files.push_back(part.string());
    return files;
  }
  std::error_code failed;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const fs::path& path = entry->path();
    if (path.extension() == ".safetensors" || path.extension() == ".jinja" ||
        std::find(std::begin(names), std::end(names), path.filename().string()) !=
            std::end(names)) {
      files.push_back(path.string());
    }
  }
  return files;
}

/// Throws Error if another option also names a file that `command` writes, or if that file belongs
/// to the model or the surrogate.
void check_files(const CLI::App& command) {
  struct Named {
    std::string flag;
    std::string option;
    std::string file;
  };
  static constexpr std::string_view outputs[] = {"json", "snapshot", "dump", "output", "plot"};
  std::vector<Named> written, read, folders;
  for (const CLI::Option* option : command.get_options()) {
    const std::vector<std::string>& names = option->get_lnames();
    const bool is_file = option->get_type_name().rfind("FILE", 0) == 0 ||
                         option->get_type_name().rfind("DECK", 0) == 0;
    if (option->count() == 0) continue;
    const std::string name = names.empty() ? option->get_name(true) : names.front();
    const std::string flag = names.empty()                  ? name
                             : option->get_snames().empty() ? "--" + name
                                                            : "-" + option->get_snames().front();
    if (name == "model" || name == "surrogate")
      folders.push_back({flag, name, option->results().front()});
    if (!is_file) continue;
    const bool is_output =
        std::find(std::begin(outputs), std::end(outputs), name) != std::end(outputs);
    for (const std::string& file : option->results()) {
      if (file.empty()) continue;
      (is_output ? written : read).push_back({flag, name, file});
    }
  }
  const auto check = [](const Named& one, const Named& other) {
    if (!name_one_file(one.file, other.file)) return;
    throw Error(one.file == other.file
                    ? fmt::format("{} and {} both name the file {}", one.flag, other.flag, one.file)
                    : fmt::format("{} {} and {} {} name the same file", one.flag, one.file,
                                  other.flag, other.file));
  };
  std::stable_sort(written.begin(), written.end(), [](const Named& a, const Named& b) {
    return std::find(std::begin(outputs), std::end(outputs), a.option) <
           std::find(std::begin(outputs), std::end(outputs), b.option);
  });
  for (auto one = written.begin(); one != written.end(); ++one) {
    for (auto other = std::next(one); other != written.end(); ++other) check(*one, *other);
    for (const Named& input : read) {
      // A snapshot may replace the one from which its run resumed. Standard input is not standard
      // output.
      if (input.file == "-" || (input.option == "resume" && one->option == "snapshot")) continue;
      check(*one, input);
    }
    for (const Named& folder : folders) {
      for (const std::string& file : files_of(folder.file)) {
        if (!name_one_file(one->file, file)) continue;
        throw Error(fmt::format("{} {} would replace a file of {} {}", one->flag, one->file,
                                folder.flag, folder.file));
      }
    }
  }
}

}  // namespace

Reading read_arguments(CommandLine& line, const std::vector<std::string>& arguments) {
  Reading reading;
  const auto fail = [&](const std::string& message) {
    reading.ends = true;
    reading.status = exit_usage;
    reading.error = message;
  };
  if (arguments.empty()) {
    // As in git: prints help, and returns a status that tells a script that nothing was done.
    reading.ends = true;
    reading.status = exit_usage;
    reading.out = line.app.help();
    return reading;
  }
  std::vector<std::string> own = sift(line.app, arguments, reading);
  std::reverse(own.begin(), own.end());  // CLI11 expects them in reverse order
  try {
    line.app.parse(own);
    if (!reading.error.empty()) fail(reading.error);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help or --version
      std::ostringstream out;
      line.app.exit(error, out, out);
      reading.ends = true;
      reading.error.clear();
      reading.out = out.str();
    } else {
      fail(reading.error.empty() ? usage_message(line.app, error) : reading.error);
    }
  }
  return reading;
}

void agree_on_reading(Reading& reading, const Communicator& comm) {
  if (comm.size() == 1) return;
  const bool has_error = !reading.error.empty();
  const auto hash = static_cast<std::int64_t>(base::fnv1a(reading.out));
  const auto all = comm.all_gather({reading.ends ? 1 : 0, has_error ? 1 : 0, hash});
  const bool is_same = std::all_of(all.begin(), all.end(), [&](const auto& one) {
    return one[0] == all[0][0] && one[1] == 0 && one[2] == all[0][2];
  });
  if (is_same) return;
  const auto failed =
      std::find_if(all.begin(), all.end(), [](const auto& one) { return one[1] != 0; });
  if (failed != all.end()) {
    const int rank = static_cast<int>(failed - all.begin());
    comm.broadcast(reading.error, rank);
    if (rank > 0) reading.error = fmt::format("rank {}: {}", rank, reading.error);
  } else {
    const auto ending =
        std::find_if(all.begin(), all.end(), [](const auto& one) { return one[0] != 0; });
    reading.error = fmt::format(
        "arguments differ between ranks: rank {} asks for help or the version; other ranks do not, "
        "or ask for other help",
        ending - all.begin());
  }
  reading.ends = true;
  reading.status = exit_usage;
  reading.out.clear();
}

void read_deck_of_command(CommandLine& line, const Communicator& comm) {
  comm.agree([&] {
    const auto commands = line.app.get_subcommands();
    const CLI::Option* const deck =
        commands.empty() ? nullptr : commands.front()->get_option_no_throw("--config");
    if (deck && deck->count() > 0) read_deck(*commands.front(), deck->as<std::string>());
    if (!commands.empty()) check_files(*commands.front());
  });
}

void check_same_on_ranks(const CommandLine& line, const Communicator& comm) {
  if (comm.size() == 1) return;
  const std::vector<std::string> own = values_of(line);
  std::string all;
  for (const std::string& value : own) all += encoded(value);
  const auto hashes = comm.all_gather({static_cast<std::int64_t>(base::fnv1a(all))});
  if (std::all_of(hashes.begin(), hashes.end(),
                  [&](const auto& hash) { return hash == hashes[0]; }))
    return;
  comm.broadcast(all, 0);
  comm.agree([&] {
    const std::vector<std::string> root = decoded(all, 0);
    for (std::size_t i = 0; i < std::min(root.size(), own.size()); ++i) {
      if (root[i] == own[i]) continue;
      throw Error(fmt::format(
          "arguments differ between ranks: {} is {} on rank 0 and {} on rank {}",
          own[i].substr(0, own[i].find('\n')), shown(root[i]), shown(own[i]), comm.rank()));
    }
  });
}

}  // namespace kvzap::driver
