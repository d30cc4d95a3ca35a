#include "commands/run/chat_commands.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <random>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "files/ascii.hpp"
#include "files/decimal.hpp"
#include "files/nearest.hpp"
#include "files/quote.hpp"
#include "model/find_model.hpp"

namespace kvzap::driver {

const char* const chat_help =
    "/regenerate      drop the last answer and draw another one\n"
    "/undo            drop the last question and its answer\n"
    "/set             print the settings of answers\n"
    "/set NAME VALUE  change one: n, temperature, top-k, top-p, min-p, seed, …\n"
    "/file PATH       put the text of a file before the next message\n"
    "/stats           tokens, kept rows, evict ratio, bytes, tokens/s\n"
    "/save FILE       write the conversation to an HDF5 file; asks before it overwrites\n"
    "/save! FILE      overwrite without a question\n"
    "/load FILE       continue such a file instead of this conversation\n"
    "/reset           start again from the context\n"
    "/help            print this list\n"
    "/exit            leave, as Ctrl-D does (also /quit and /bye)\n"
    "A line is a message. After a \\ at its end, the message continues in the next line.\n"
    "All text between \"\"\" and \"\"\" is one message, and so is pasted text.\n"
    "Ctrl-C ends an answer; twice leaves.\n";

namespace {

struct CommandName {
  const char* name;
  Wish wish;
  const char* needs;  // argument; nullptr: none, "": optional
  std::int64_t number = 0;
};
constexpr CommandName names[] = {{"/regenerate", Wish::regenerate, nullptr},
                                 {"/undo", Wish::undo, nullptr},
                                 {"/set", Wish::set, ""},
                                 {"/file", Wish::file, "report.txt"},
                                 {"/stats", Wish::stats, nullptr},
                                 {"/save", Wish::save, "chat.h5"},
                                 {"/save!", Wish::save, "chat.h5", 1},
                                 {"/load", Wish::load, "chat.h5"},
                                 {"/reset", Wish::reset, nullptr},
                                 {"/help", Wish::help, nullptr},
                                 {"/exit", Wish::leave, nullptr},
                                 {"/quit", Wish::leave, nullptr},
                                 {"/bye", Wish::leave, nullptr}};

ChatCommand refused(const std::string& reason) { return {Wish::refused, reason}; }

/// Commands of ollama and llama.cpp that have another name here.
constexpr std::pair<std::string_view, const char*> foreign_names[] = {
    {"/?", "/help"},    {"/clear", "/reset"},      {"/new", "/reset"},
    {"/read", "/file"}, {"/regen", "/regenerate"}, {"/retry", "/regenerate"}};

/// Returns the names that begin with `name`, or else the one that means the same elsewhere or is
/// spelt most similarly.
std::vector<std::string> similar_commands(std::string name) {
  std::vector<std::string> all, found;
  name = files::lower_case(name);
  for (const auto& [foreign, own] : foreign_names) {
    if (name == foreign) return {own};
  }
  for (const CommandName& command : names) all.emplace_back(command.name);
  for (const std::string& candidate : all) {
    if (name.size() > 1 && candidate.rfind(name, 0) == 0) found.push_back(candidate);
  }
  if (found.empty()) {
    const std::string nearest = files::nearest_name(name, all);
    if (!nearest.empty()) found.push_back(nearest);
  }
  return found;
}

/// Returns the file that an argument names: a file of that name, or else the name that a shell
/// would read there. Terminals paste a dropped file's name in quotes or with backslashes.
std::string file_of(const std::string& argument) {
  std::error_code ignored;
  if (std::filesystem::exists(argument, ignored)) return argument;
  std::string name;
  char quote = '\0';
  for (std::size_t i = 0; i < argument.size(); ++i) {
    const char c = argument[i];
    if (c == quote) {
      quote = '\0';
    } else if (quote == '\0' && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == '\\' && quote != '\'' && i + 1 < argument.size()) {
      name += argument[++i];
    } else {
      name += c;
    }
  }
  return model::with_home(quote == '\0' ? name : argument);  // an apostrophe is no quote
}

}  // namespace

ChatCommand chat_command_of(const std::string& line) {
  const std::size_t end = std::min(line.find_first_of(" \t"), line.size());
  const std::size_t begin = line.find_first_not_of(" \t", end);
  const std::string name = line.substr(0, end);
  std::string argument;
  if (begin != std::string::npos) {
    argument = line.substr(begin, line.find_last_not_of(" \t") + 1 - begin);
  }
  const char* const other = "a message that begins with / goes between \"\"\" and \"\"\"";
  for (const CommandName& command : names) {
    if (name != command.name) continue;
    if (!command.needs && !argument.empty()) {
      return refused(fmt::format("{} takes no argument ({})", name, other));
    }
    if (command.needs && *command.needs != '\0' && argument.empty()) {
      return refused(fmt::format("{} needs a file: {} {}", name, name, command.needs));
    }
    // The system would cut the name at a NUL.
    if (command.needs && argument.find('\0') != std::string::npos) {
      return refused(fmt::format("error: {}: a file's name has no NUL", name));
    }
    const bool is_file = command.needs && *command.needs != '\0';
    return {command.wish, is_file ? file_of(argument) : argument, command.number};
  }
  std::string hint;
  for (const std::string& similar : similar_commands(name)) {
    hint += (hint.empty() ? "; did you mean " : " or ") + similar;
  }
  return refused(fmt::format("{} is no command{}; /help lists them ({})", name,
                             hint.empty() ? "" : hint + "?", other));
}

namespace {

using Value = std::variant<double*, std::int64_t*, std::uint64_t*>;
struct Setting {
  std::string name;
  Value value;
};

std::vector<Setting> settings_of(AnswerSettings& settings) {
  SamplingOptions& sampling = settings.sampling;
  return {{"n", &settings.new_tokens},
          {"temperature", &sampling.temperature},
          {"top-k", &sampling.top_k},
          {"top-p", &sampling.top_p},
          {"min-p", &sampling.min_p},
          {"seed", &sampling.seed},
          {"repeat-penalty", &sampling.repetition_penalty},
          {"repeat-last-n", &sampling.repeat_last_n},
          {"presence-penalty", &sampling.presence_penalty},
          {"frequency-penalty", &sampling.frequency_penalty}};
}

std::string line_of(const Setting& setting) {
  return std::visit(
      [&](const auto* value) { return fmt::format("{:18}{}\n", setting.name, *value); },
      setting.value);
}

/// Returns the name of a setting for another spelling of it: that of a flag, of a field of the
/// server's protocol, or of a field of SamplingOptions.
std::string setting_name(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  name.erase(0, std::min(name.find_first_not_of('-'), name.size()));
  if (name == "temp") return "temperature";
  for (const char* same : {"n-predict", "num-predict", "max-tokens", "max-new-tokens"}) {
    if (name == same) return "n";
  }
  if (name == "repetition-penalty") return "repeat-penalty";
  return name;
}

void read_value(const std::string& name, const std::string& text, const Value& value) {
  const auto fault = std::visit(
      [&](auto* number) {
        using Number = std::decay_t<decltype(*number)>;
        if constexpr (std::is_same_v<Number, double>) {
          return files::read_real(text, *number);
        } else {
          return files::read_whole<Number>(text, *number);
        }
      },
      value);
  if (fault == files::DecimalFault::none) return;
  const char* const kind =
      std::holds_alternative<double*>(value) ? "a number" : "a whole number within range";
  throw Error(fmt::format("/set {} is {}; expected {}", name, files::in_quotes(text), kind));
}

}  // namespace

std::string settings_text(const AnswerSettings& settings) {
  AnswerSettings copy = settings;
  std::string text;
  for (const Setting& setting : settings_of(copy)) text += line_of(setting);
  return text;
}

std::string change_setting(AnswerSettings& settings, std::string text, std::int64_t limit) {
  constexpr std::string_view foreign = "parameter ";  // ollama: /set parameter NAME VALUE
  if (text.compare(0, foreign.size(), foreign) == 0) text.erase(0, foreign.size());
  const std::size_t end = std::min(text.find_first_of(" \t="), text.size());
  const std::size_t begin = text.find_first_not_of(" \t=", end);
  const std::string name = setting_name(text.substr(0, end));
  AnswerSettings changed = settings;
  const std::vector<Setting> all = settings_of(changed);
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Setting& setting) { return setting.name == name; });
  if (found == all.end()) {
    std::vector<std::string> known;
    for (const Setting& setting : all) known.push_back(setting.name);
    throw Error(fmt::format("/set {} is no setting; expected {}", files::in_quotes(name),
                            fmt::join(known, ", ")));
  }
  if (begin != std::string::npos) {
    // As the flags: the end of the context, and a random seed. Only rank 0 draws.
    const std::string value = text.substr(begin);
    if (value == "-1" && name == "n" && limit > 0) {
      changed.new_tokens = limit;
    } else if (value == "-1" && name == "seed") {
      changed.sampling.seed = std::random_device()();
    } else {
      read_value(name, value, found->value);
    }
    if (changed.new_tokens < 0) {
      throw Error(fmt::format("/set n is {}; expected 0 or more", changed.new_tokens));
    }
    check(changed.sampling,
          [](std::string_view field) { return "/set " + setting_name(std::string(field)); });
    const std::string line = line_of(*found);
    settings = changed;
    return line;
  }
  return line_of(*found);
}

}  // namespace kvzap::driver
