#include "options/command_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <string_view>
#include <system_error>

#include "base/ascii.hpp"
#include "base/quote.hpp"
#include "options/kokkos_flags.hpp"
#include "options/option_names.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

bool is_one_of(const std::string& text, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), text) != names.end();
}

bool takes_value(const CLI::Option& option) { return option.get_expected_max() > 0; }

bool has_blank(const std::string& text) { return text.find_first_of(" \t\n") != text.npos; }

bool is_number(const std::string& text) {
  return text.size() > 1 && text.front() == '-' &&
         text.find_first_not_of("0123456789.", 1) == std::string::npos;
}

}  // namespace

bool is_help(const std::string& argument) {
  return is_one_of(argument, {"-h", "--help", "-help", "-?"});
}

bool is_version(const std::string& argument) {
  return is_one_of(argument, {"-V", "--version", "-version"});
}

bool is_option(const std::string& argument) {
  return argument.size() > 1 && argument.front() == '-';
}

bool has_positionals(const CLI::App& command) {
  const auto options = command.get_options();
  return std::any_of(options.begin(), options.end(),
                     [](const CLI::Option* option) { return option->get_positional(); });
}

void CommandReader::read(const Arguments& arguments) {
  if (arguments == Arguments{"help"}) m_wants_help = true;
  bool has_options = true;  // false after --
  for (std::size_t i = 0; i < arguments.size();) {
    const std::string argument = has_options ? with_plain_dashes(arguments[i]) : arguments[i];
    if (!has_options || !is_option(argument)) {
      m_arguments.push_back({"", arguments[i++]});
    } else if (argument == "--") {
      has_options = false;
      m_arguments.push_back({"--", {}});
      ++i;
    } else if (argument.rfind("--kokkos-", 0) == 0) {
      m_kokkos.push_back(argument);
      const std::string fault = fault_of_kokkos_flag(argument);
      if (!fault.empty()) refuse([fault] { return fault; });
      ++i;
    } else if (is_help(argument)) {
      m_wants_help = true;
      ++i;
    } else if (is_version(argument)) {
      m_wants_version = true;
      ++i;
    } else {
      i = read_option(arguments, i);
    }
  }
}

/// Reads the option at `at` and its value. Returns the place of the next argument.
std::size_t CommandReader::read_option(const Arguments& arguments, std::size_t at) {
  const std::string argument = with_plain_dashes(arguments[at]);
  const bool has_typography = argument != arguments[at];
  const std::size_t equals = argument.find('=');
  const std::string flag = argument.substr(0, equals);
  std::optional<std::string> joined;
  if (equals != std::string::npos) joined = argument.substr(equals + 1);

  if (const CLI::Option* const option = own_option(m_command, flag)) {
    if (joined || !takes_value(*option) || at + 1 == arguments.size()) {
      add_own(*option, flag, joined);
      return at + 1;
    }
    add_own(*option, flag, arguments[at + 1]);
    return at + 2;
  }
  if (const ForeignFlag* const foreign = find_foreign_flag(plain_spelling(flag))) {
    return read_foreign(*foreign, flag, joined, arguments, at + 1);
  }
  if (has_typography) {
    m_arguments.push_back({"", arguments[at]});
    return at + 1;
  }
  // "-n5", "-qn 5"
  if (argument.rfind("--", 0) != 0) {
    for (std::size_t i = 1; i < argument.size(); ++i) {
      const CLI::Option* const option = m_command.get_option_no_throw({'-', argument[i]});
      if (!option) break;
      if (!takes_value(*option)) {
        if (i + 1 < argument.size()) continue;
        m_arguments.push_back({argument, {}});
        return at + 1;
      }
      const bool has_next = i + 1 == argument.size() && at + 1 < arguments.size();
      m_arguments.push_back({argument, {}});
      if (has_next) m_arguments.back().value = arguments[at + 1];
      return at + (has_next ? 2 : 1);
    }
  }
  m_arguments.push_back({argument, {}});
  refuse([this, flag] {
    const bool is_long = flag.rfind("--", 0) == 0;
    const std::string nearest = nearest_option(m_command, flag.substr(is_long ? 2 : 1));
    const std::string unknown = "unknown option " + flag;
    if (!nearest.empty() && flag.size() > 3) return unknown + "; did you mean --" + nearest + "?";
    const std::string others = commands_with(m_app, flag);
    return others.empty()
               ? unknown
               : fmt::format("{} of kvzap {}; {} it", unknown, m_command.get_name(), others);
  });
  return at + 1;
}

void CommandReader::add_own(const CLI::Option& option, const std::string& given,
                            const std::optional<std::string>& value) {
  // Negated flags, such as --no-trim, keep their name.
  const bool is_exact = m_command.get_option_no_throw(given) != nullptr;
  const std::string spelt = plain_spelling(given);
  const std::string flag = is_exact ? given : spelt.rfind("--", 0) == 0 ? spelt : "-" + spelt;
  if (takes_value(option)) {
    m_arguments.push_back({flag, value});
    return;
  }
  // CLI11 accepts an empty value of a flag as none.
  if (value && value->empty()) {
    refuse([flag] { return fmt::format("{} is ''; expected no value, true or false", flag); });
  }
  m_arguments.push_back({value ? flag + "=" + *value : flag, {}});
}

/// `at`: the place after the flag. Returns the place of the next argument.
std::size_t CommandReader::read_foreign(const ForeignFlag& foreign, const std::string& flag,
                                        const std::optional<std::string>& joined,
                                        const Arguments& arguments, std::size_t at) {
  std::optional<std::string> given = joined;
  if (!given && at < arguments.size() && foreign.value != ForeignFlag::Value::none) {
    const std::string& next = arguments[at];
    const bool is_value =
        foreign.value == ForeignFlag::Value::one
            ? !is_option(next) || is_number(next)
            : is_one_of(next, {"on", "off", "auto", "true", "false", "True", "False", "0", "1"});
    if (is_value) given = arguments[at++];
  }
  const std::string value = given.value_or("");
  const std::size_t equals = foreign.text.find('=');
  const std::string ours(foreign.text.substr(0, equals));
  std::string lower = value;
  std::transform(lower.begin(), lower.end(), lower.begin(), base::lower);
  const bool is_harmless =
      std::find(foreign.harmless.begin(), foreign.harmless.end(), lower) != foreign.harmless.end();
  const auto applies = [&](const std::string& where) {
    return where.empty() || m_command.get_option_no_throw(where) != nullptr;
  };
  const std::string name = fmt::format("{} is an option of {}", flag, foreign.programs);
  switch (foreign.remedy) {
    case ForeignFlag::Remedy::alias:
      if (const CLI::Option* const option = m_command.get_option_no_throw(ours)) {
        if (equals != std::string::npos) {
          const bool is_off = is_one_of(lower, {"off", "false", "0"});
          given = is_off ? "off" : std::string(foreign.text.substr(equals + 1));
        }
        add_own(*option, ours, given);
      } else {
        refuse([this, name, ours] {
          return fmt::format("{}; {} it, as {}", name, commands_with(m_app, ours), ours);
        });
      }
      break;
    case ForeignFlag::Remedy::ignored:
      if (applies(std::string(foreign.where))) {
        m_notes.push_back(fmt::format("{} ignored: {}", flag, foreign.text));
      } else {
        refuse([this, name] {
          return fmt::format("{} that has no meaning for kvzap {}", name, m_command.get_name());
        });
      }
      break;
    case ForeignFlag::Remedy::refused:
      if (is_harmless) {
        m_notes.push_back(fmt::format("{} {} ignored: it is kvzap's default", flag, value));
      } else {
        refuse([this, name, &foreign, value] {
          return fmt::format("{}: {}", name, instead_of(foreign, value));
        });
      }
      break;
  }
  return at;
}

/// Returns what to use instead of a flag, with the user's values.
std::string CommandReader::instead_of(const ForeignFlag& foreign, const std::string& value) const {
  std::string text(foreign.text);
  const auto fill = [&](const std::string& name, const std::function<std::string()>& by) {
    const std::size_t at = text.find(name);
    if (at != std::string::npos) text.replace(at, name.size(), by());
  };
  const auto with_command = [&](const char* name) {
    const CLI::App* const command = find_command(m_app, name);
    CommandReader reader(m_app, command ? *command : m_command);
    reader.m_arguments = m_arguments;
    return reader.call();
  };
  fill("{mpirun}", [&] {
    return fmt::format("mpirun -n {} {}", value.empty() ? "N" : base::shell_quoted(value), call());
  });
  fill("{chat}", [&] { return with_command("chat"); });
  fill("{download}", [&] {
    CommandReader reader(m_app, m_command);
    reader.m_arguments = m_arguments;
    reader.m_arguments.insert(reader.m_arguments.begin(),
                              Argument{"-m", folder_of_download(value)});
    return download_call(value) + " && " + reader.call();
  });
  fill("{value}", [&] { return value.empty() ? std::string("FILE") : base::shell_quoted(value); });
  return text;
}

bool CommandReader::has(const char* flag) const {
  const CLI::Option* const option = m_command.get_option_no_throw(flag);
  if (!option) return false;
  return std::any_of(m_arguments.begin(), m_arguments.end(), [&](const Argument& argument) {
    const std::string name = argument.flag.substr(0, argument.flag.find('='));
    if (name.empty()) return false;
    const CLI::Option* given = m_command.get_option_no_throw(name);
    if (!given && name.rfind("--", 0) != 0) {  // "-n5"
      given = m_command.get_option_no_throw(name.substr(0, 2));
    }
    return given == option;
  });
}

Arguments CommandReader::own() const {
  Arguments own;
  for (const Argument& argument : m_arguments) {
    if (!argument.flag.empty()) own.push_back(argument.flag);
    if (argument.value) own.push_back(*argument.value);
  }
  return own;
}

/// Gives the positional argument at `at` a flag. `continues`: whether the argument before it was
/// placed as a text of words without quotes, to which this may belong. Returns false if there is no
/// flag for it.
bool CommandReader::place(std::vector<Argument>& arguments, std::size_t at, bool& continues) const {
  CommandReader known(m_app, m_command);  // what is given so far
  known.m_arguments = arguments;
  const std::string text = *arguments[at].value;
  const auto may_take = [&](const char* flag) {
    return m_command.get_option_no_throw(flag) && !known.has(flag);
  };
  std::error_code ignored;
  const bool is_file = fs::is_regular_file(text, ignored);
  if (at > 0 && !has_blank(text) && !is_file) {
    Argument& before = arguments[at - 1];
    const std::string& flag = before.flag;
    const bool may_go_on = is_one_of(flag, {"-p", "--prompt", "--question", "--system"});
    if (may_go_on && before.value && (continues || !has_blank(*before.value))) {
      *before.value += " " + text;
      arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(at));
      continues = true;
      return true;
    }
  }
  continues = false;
  const auto name = [&](const char* flag) {
    arguments[at].flag = flag;
    return true;
  };
  const bool has_context = known.has("--prompt") || known.has("--file") || known.has("--resume") ||
                           known.has("--config");
  const std::string ending = fs::path(text).extension().string();
  const bool is_text = is_file && !ending.empty() && ending != ".gguf" &&
                       ending != ".safetensors" && fs::path(text).filename() != "config.json";
  if (is_text && ending == ".toml" && may_take("--config")) return name("--config");
  if (is_text && may_take("--tasks")) return name("--tasks");
  if (is_text && !has_context && may_take("--file")) return name("-f");
  if (may_take("--model") && !known.has("--resume") && !has_blank(text)) return name("-m");
  continues = !has_blank(text);
  if (!has_context && may_take("--prompt")) return name("-p");
  if (m_command.get_option_no_throw("--question")) return name("--question");
  const CLI::Option* const output = m_command.get_option_no_throw("--output");
  const bool writes = output && output->get_type_name().find('{') == std::string::npos;
  if (writes && may_take("--output")) return name("-o");
  if (may_take("--type")) return name("--type");
  return false;
}

/// Returns the arguments with flags for all; nothing if one of them has no place.
std::optional<std::vector<Argument>> CommandReader::placed() const {
  std::vector<Argument> arguments;
  for (const Argument& argument : m_arguments) {
    if (argument.flag != "--") arguments.push_back(argument);
  }
  bool continues = false;
  for (std::size_t i = 0; i < arguments.size();) {
    if (!arguments[i].flag.empty()) {
      continues = false;
      ++i;
      continue;
    }
    const std::size_t count = arguments.size();
    if (!place(arguments, i, continues)) return {};
    if (arguments.size() == count) ++i;
  }
  CommandReader known(m_app, m_command);
  known.m_arguments = arguments;
  const bool needs_model = m_command.get_option_no_throw("--model") && !known.has("--model") &&
                           !known.has("--resume") && !known.has("--config");
  if (needs_model) arguments.insert(arguments.begin(), Argument{"-m", "MODEL"});
  return arguments;
}

std::string CommandReader::call() const {
  const bool may_place = !has_positionals(m_command);
  return shell_call(m_command.get_name(), may_place ? placed().value_or(m_arguments) : m_arguments);
}

std::string CommandReader::error() const {
  if (m_fault) return m_fault();
  if (has_positionals(m_command)) return "";
  const auto stray = std::find_if(m_arguments.begin(), m_arguments.end(),
                                  [](const Argument& one) { return one.flag.empty(); });
  if (stray == m_arguments.end()) return "";
  const auto better = placed();
  return fmt::format("unexpected argument {}; {}", in_quotes(*stray->value),
                     better ? "did you mean: " + shell_call(m_command.get_name(), *better)
                            : fmt::format("kvzap {} takes options alone", m_command.get_name()));
}

}  // namespace kvzap::driver
