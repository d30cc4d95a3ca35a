#include "options/arguments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "files/fnv.hpp"
#include "files/quote.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "options/one_file.hpp"
#include "options/sifting.hpp"
#include "options/strict_values.hpp"
#include "options/usage.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Returns the argument that the parser could not place, or else the parser's own message.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const auto given = app.get_subcommands();
  const CLI::App& command = given.empty() ? app : *given.front();
  const CLI::Option* const model = command.get_option_no_throw("--model");
  if (dynamic_cast<const CLI::RequiredError*>(&error) && command.get_name() == "inspect" &&
      model->count() > 0) {
    return "FILE is required; did you mean: kvzap inspect " +
           files::shell_quoted(model->results().front());
  }
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) return explain(command, error);
  return fmt::format("unexpected argument {}; kvzap {} --help shows how many it takes",
                     in_quotes(unknown.front()), command.get_name());
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
  static constexpr std::string_view names[] = {"config.json",
                                               "generation_config.json",
                                               "tokenizer.json",
                                               "tokenizer.model",
                                               "tiktoken.model",
                                               "tekken.json",
                                               "vocab.json",
                                               "merges.txt",
                                               "tokenizer_config.json",
                                               "added_tokens.json",
                                               "special_tokens_map.json",
                                               "chat_template.json",
                                               "model.safetensors.index.json"};
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

/// The options that name a file to write, in the order in which messages name them.
constexpr std::string_view outputs[] = {"json",   "snapshot", "dump",
                                        "output", "plot",     "query-statistics"};

std::ptrdiff_t place_of_output(std::string_view name) {
  return std::find(std::begin(outputs), std::end(outputs), name) - std::begin(outputs);
}

/// Throws Error if another option also names a file that `command` writes, or if that file belongs
/// to the model or the surrogate.
void check_files(const CLI::App& command) {
  struct Named {
    std::string flag;
    std::string option;
    std::string file;
  };
  std::vector<Named> written, read, folders;
  for (const CLI::Option* option : command.get_options()) {
    const std::vector<std::string>& names = option->get_lnames();
    if (option->count() == 0) continue;
    const std::string name = names.empty() ? option->get_name(true) : names.front();
    const std::string type = option->get_type_name().substr(0, 4);
    const bool is_file = type == "FILE" || type == "DECK" || (type == "DIR" && is_output(name));
    const std::string flag = names.empty()                  ? name
                             : option->get_snames().empty() ? "--" + name
                                                            : "-" + option->get_snames().front();
    if (name == "model" || name == "surrogate")
      folders.push_back({flag, name, option->results().front()});
    if (!is_file) continue;
    for (const std::string& file : option->results()) {
      if (file.empty()) continue;
      (is_output(name) ? written : read).push_back({flag, name, file});
    }
  }
  const auto check = [](const Named& one, const Named& other) {
    if (!name_one_file(one.file, other.file)) return;
    throw UsageError(
        one.file == other.file
            ? fmt::format("{} and {} both name the file {}", one.flag, other.flag, one.file)
            : fmt::format("{} {} and {} {} name the same file", one.flag, one.file, other.flag,
                          other.file));
  };
  std::stable_sort(written.begin(), written.end(), [](const Named& a, const Named& b) {
    return place_of_output(a.option) < place_of_output(b.option);
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
        throw UsageError(fmt::format("{} {} would replace a file of {} {}", one->flag, one->file,
                                     folder.flag, folder.file));
      }
    }
  }
}

}  // namespace

bool is_output(std::string_view name) {
  return place_of_output(name) < std::end(outputs) - std::begin(outputs);
}

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
  const Sifted sifted = sift(line.app, arguments);
  reading.kokkos = sifted.kokkos;
  reading.notes = sifted.notes;
  if (sifted.help || sifted.wants_version) {
    reading.ends = true;
    reading.out = sifted.help ? sifted.help->help() : line.app.version() + "\n";
    return reading;
  }
  if (!sifted.error.empty()) {
    fail(sifted.error);
    return reading;
  }
  std::vector<std::string> own = sifted.own;
  std::reverse(own.begin(), own.end());  // CLI11 expects them in reverse order
  try {
    line.app.parse(own);
  } catch (const CLI::ParseError& error) {
    fail(usage_message(line.app, error));
  }
  return reading;
}

void agree_on_reading(Reading& reading, const Communicator& comm) {
  if (comm.size() == 1) return;
  const bool has_error = !reading.error.empty();
  const auto hash = static_cast<std::int64_t>(files::fnv1a(reading.out));
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
  agree_on_usage(comm, [&] {
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
  const auto hashes = comm.all_gather({static_cast<std::int64_t>(files::fnv1a(all))});
  if (std::all_of(hashes.begin(), hashes.end(),
                  [&](const auto& hash) { return hash == hashes[0]; }))
    return;
  comm.broadcast(all, 0);
  agree_on_usage(comm, [&] {
    const std::vector<std::string> root = decoded(all, 0);
    for (std::size_t i = 0; i < std::min(root.size(), own.size()); ++i) {
      if (root[i] == own[i]) continue;
      throw UsageError(fmt::format(
          "arguments differ between ranks: {} is {} on rank 0 and {} on rank {}",
          own[i].substr(0, own[i].find('\n')), shown(root[i]), shown(own[i]), comm.rank()));
    }
  });
}

}  // namespace kvzap::driver
