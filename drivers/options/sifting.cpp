#include "options/sifting.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "files/nearest.hpp"
#include "files/quote.hpp"
#include "model/find_model.hpp"
#include "options/command_reader.hpp"
#include "options/kokkos_flags.hpp"
#include "options/option_names.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

/// "run, chat or policies"
std::string names_of_commands(const CLI::App& app) {
  std::vector<std::string_view> names;
  const auto commands = app.get_subcommands([](const CLI::App* one) {
    return one->get_name() != "completion" && one->get_name() != "manual";
  });
  for (const CLI::App* command : commands) names.emplace_back(command->get_name());
  return files::alternatives(names);
}

/// A command of another program.
struct ForeignCommand {
  std::vector<std::string_view> names;
  /// A command of kvzap; or a text with a blank, in which {download} stands for a command line.
  std::string_view text;
};

const std::vector<ForeignCommand>& foreign_commands() {
  static const std::vector<ForeignCommand> commands = {
      {{"generate", "complete", "completions", "simple", "ask", "infer", "predict", "prompt",
        "main", "llama-cli", "text-generation"},
       "run"},
      {{"cli", "interactive", "repl", "converse", "talk"}, "chat"},
      {{"server", "api", "api_server", "up", "start", "llama-server"}, "serve"},
      {{"benchmark", "llama-bench", "throughput", "latency", "perf"}, "bench"},
      {{"evaluate", "evaluation", "lm_eval", "lm-eval", "perplexity", "test"}, "eval"},
      {{"show", "info", "describe"}, "inspect"},
      {{"quantise", "llama-quantize"}, "quantize"},
      {{"compare"}, "diff"},
      {{"architectures", "supported"}, "models"},
      {{"man"}, "manual"},
      {{"methods", "presses"}, "policies"},
      {{"pull", "download", "get", "fetch"}, "kvzap downloads nothing; {download}"},
      {{"list", "ls"},
       "kvzap has no store of models: -m takes a folder or a GGUF file, and kvzap models lists the "
       "supported ones"},
      {{"ps", "stop", "kill"},
       "kvzap serve runs one model in the foreground until Ctrl-C or SIGTERM ends it"},
      {{"rm", "cp", "push", "create", "login", "signin"},
       "kvzap has no store of models: its folders and files are the user's own"}};
  return commands;
}

/// Returns an error with the most likely command, for arguments without one.
std::string without_command(const CLI::App& app, const Arguments& arguments) {
  const CommandReader* best = nullptr;
  std::vector<CommandReader> readers;
  const auto commands = app.get_subcommands(
      [](const CLI::App* one) { return one->get_option_no_throw("--model") != nullptr; });
  readers.reserve(commands.size());
  for (const CLI::App* command : commands) {
    readers.emplace_back(app, *command);
    CommandReader& reader = readers.back();
    reader.read(arguments);
    if (!reader.knows_all() || has_positionals(*command)) continue;
    if (best) continue;
    const std::string call = reader.call();
    const bool asks = command->get_name() != "run" || call.find(" -p ") != call.npos ||
                      call.find(" -f ") != call.npos || reader.has("--prompt") ||
                      reader.has("--file") || reader.has("--config") || reader.has("--resume") ||
                      reader.has("--dry-run");
    if (asks) best = &reader;
  }
  const std::string& first = arguments.front();
  const std::string flag = first.substr(0, first.find('='));
  for (std::size_t i = 0; i < readers.size() && !best; ++i) {
    if (is_option(first) && own_option(*commands[i], flag)) best = &readers[i];
  }
  if (best) return "no command is given; " + best->suggestion();
  const std::string nearest = nearest_option(app, flag.substr(flag.rfind("--", 0) == 0 ? 2 : 1));
  return fmt::format("unknown option {}; {}", flag,
                     nearest.empty() ? "expected a command: " + names_of_commands(app)
                                     : "did you mean --" + nearest + "?");
}

std::string suggestion_of(const CLI::App& app, const CLI::App& command,
                          const Arguments& arguments) {
  CommandReader reader(app, command);
  reader.read(arguments);
  return reader.wants_help() ? "did you mean: kvzap help " + command.get_name()
                             : reader.suggestion();
}

/// Returns the command that downloads the model of `kvzap pull NAME`.
std::string download_of(const Arguments& arguments) {
  std::string name, folder;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const std::string flag = "--local-dir";
    if (argument.rfind(flag + "=", 0) == 0) folder = argument.substr(flag.size() + 1);
    if (argument == flag && i + 1 < arguments.size()) {
      folder = arguments[++i];
    } else if (!is_option(argument) && name.empty()) {
      name = argument;
    }
  }
  return model::is_ollama_name(name) ? model::ollama_hint(name)
                                     : "did you mean: " + model::download_call(name, folder);
}

/// Returns whether a word is more likely a model or a prompt than a command.
bool is_no_word(const std::string& text) {
  std::error_code ignored;
  return text.find_first_of(" \t\n/\\") != std::string::npos ||
         fs::path(text).extension() == ".gguf" || fs::exists(text, ignored);
}

const ForeignCommand* find_foreign_command(const std::string& name) {
  const auto& commands = foreign_commands();
  const auto found = std::find_if(commands.begin(), commands.end(), [&](const auto& one) {
    return std::find(one.names.begin(), one.names.end(), name) != one.names.end();
  });
  return found == commands.end() ? nullptr : &*found;
}

/// Returns the command that another program calls `name`, or of which it is a misspelling.
const CLI::App* command_meant(const CLI::App& app, const std::string& name) {
  if (const ForeignCommand* const foreign = find_foreign_command(name)) {
    return find_command(app, std::string(foreign->text));
  }
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return find_command(app, files::nearest_name(name, names));
}

std::string unknown_command(const CLI::App& app, const Arguments& arguments) {
  const std::string& name = arguments.front();
  const Arguments rest(arguments.begin() + 1, arguments.end());
  const std::string unknown = "unknown command " + in_quotes(name) + "; ";
  const ForeignCommand* const foreign = find_foreign_command(name);
  if (!foreign && is_no_word(name)) return without_command(app, arguments);
  if (const CLI::App* const command = command_meant(app, name)) {
    return unknown + suggestion_of(app, *command, rest);
  }
  if (!foreign) return unknown + "expected " + names_of_commands(app);
  std::string text(foreign->text);
  const std::string_view place = "{download}";
  const std::size_t at = text.find(place);
  if (at != std::string::npos) {
    text.replace(at, place.size(), download_of(rest));
  }
  return unknown + text;
}

std::string unknown_help(const CLI::App& app, const std::string& name) {
  const CLI::App* const command = command_meant(app, name);
  return fmt::format("unknown command {}; {}", in_quotes(name),
                     command ? "did you mean: kvzap help " + command->get_name()
                             : "expected " + names_of_commands(app));
}

}  // namespace

Sifted sift(const CLI::App& app, const Arguments& arguments) {
  Sifted sifted;
  std::size_t at = 0;
  for (; at < arguments.size() && arguments[at].rfind("--kokkos-", 0) == 0; ++at) {
    sifted.kokkos.push_back(arguments[at]);
    if (sifted.error.empty()) sifted.error = fault_of_kokkos_flag(arguments[at]);
  }
  const Arguments rest(arguments.begin() + static_cast<std::ptrdiff_t>(at), arguments.end());
  if (rest.empty()) {
    if (sifted.error.empty()) sifted.error = "expected a command: " + names_of_commands(app);
    return sifted;
  }
  const std::string& first = rest.front();
  if (is_version(first) || first == "version") {
    sifted.wants_version = true;
    return sifted;
  }
  if (is_help(first) || first == "help") {
    const bool is_general =
        rest.size() == 1 || is_option(rest[1]) || rest[1] == "help" || rest[1] == "version";
    sifted.help = is_general ? &app : find_command(app, rest[1]);
    if (!sifted.help) sifted.error = unknown_help(app, rest[1]);
    return sifted;
  }
  const CLI::App* const command = find_command(app, first);
  if (!command) {
    const std::string plain = with_plain_dashes(first);
    if (sifted.error.empty()) {
      sifted.error = is_option(plain) ? without_command(app, rest) : unknown_command(app, rest);
    }
    return sifted;
  }
  CommandReader reader(app, *command);
  reader.read(Arguments(rest.begin() + 1, rest.end()));
  sifted.kokkos.insert(sifted.kokkos.end(), reader.kokkos().begin(), reader.kokkos().end());
  sifted.notes = reader.notes();
  if (reader.wants_help()) {
    sifted.help = command;
    return sifted;
  }
  sifted.wants_version = reader.wants_version();
  if (sifted.error.empty()) sifted.error = reader.error();
  sifted.own = reader.own();
  sifted.own.insert(sifted.own.begin(), first);
  return sifted;
}

}  // namespace kvzap::driver
