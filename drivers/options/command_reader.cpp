#include "options/command_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <string_view>
#include <system_error>

#include "files/ascii.hpp"
#include "files/quote.hpp"
#include "model/find_model.hpp"
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

/// Returns whether a text begins with a number: "8", "-1", ".5", "4,8".
bool begins_with_number(std::string_view text) {
  if (text.substr(0, 1) == "-") text.remove_prefix(1);
  if (text.substr(0, 1) == ".") text.remove_prefix(1);
  return !text.empty() && text.front() >= '0' && text.front() <= '9';
}

/// Returns whether a file of this name is a text, even if there is none yet.
bool ends_as_text(const std::string& ending) {
  return is_one_of(ending, {".txt", ".md", ".rst", ".jsonl", ".json", ".csv", ".tsv", ".toml"});
}

/// Returns whether `text` is one of the names that the option allows.
bool is_choice(const CLI::Option& option, const std::string& text) {
  // "TEXT:{Q4_0,Q4_1}"
  const std::string type = option.get_type_name();
  const std::size_t begin = type.find('{');
  if (begin == std::string::npos) return false;
  const std::string names = "," + type.substr(begin + 1, type.find('}', begin) - begin - 1) + ",";
  return files::lower_case(names).find("," + files::lower_case(text) + ",") != std::string::npos;
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
    if (!joined && takes_value(*option)) joined = value_at(*option, flag, arguments, at + 1);
    add_own(*option, flag, joined);
    return at + (takes_value(*option) && joined && equals == std::string::npos ? 2 : 1);
  }
  if (const ForeignFlag* const foreign = find_foreign_flag(m_command, plain_spelling(flag))) {
    return read_foreign(*foreign, flag, joined, arguments, at + 1);
  }
  if (has_typography) {
    m_arguments.push_back({"", arguments[at]});
    return at + 1;
  }
  // "-n5", "-qn 5". Only numbers may follow at once: -ptc and -cd are other programs' options.
  if (argument.rfind("--", 0) != 0) {
    for (std::size_t i = 1; i < argument.size(); ++i) {
      const CLI::Option* const option = m_command.get_option_no_throw({'-', argument[i]});
      const bool is_last = i + 1 == argument.size();
      if (!option) break;
      if (!takes_value(*option) && !is_last) continue;
      if (takes_value(*option) && !is_last && !begins_with_number(argument.substr(i + 1))) break;
      m_arguments.push_back({argument, {}});
      if (!takes_value(*option) || !is_last) return at + 1;
      m_arguments.back().value = value_at(*option, argument, arguments, at + 1);
      return at + (m_arguments.back().value ? 2 : 1);
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

/// Returns the value at `at` of an option; nothing, and refuses the option, if there is none.
std::optional<std::string> CommandReader::value_at(const CLI::Option& option,
                                                   const std::string& flag,
                                                   const Arguments& arguments, std::size_t at) {
  if (at == arguments.size()) {
    refuse([flag] { return flag + " needs a value"; });
    return {};
  }
  const std::string& next = arguments[at];
  const std::string name = next.substr(0, next.find('='));
  // A script's text may be anything, so that it stays as it is.
  const bool is_flag =
      is_option(next) && option.get_type_name() != "TEXT" &&
      (next == "--" || is_help(next) || is_version(next) || next.rfind("--kokkos-", 0) == 0 ||
       own_option(m_command, name) || find_foreign_flag(m_command, plain_spelling(name)));
  if (!is_flag) return next;
  const std::string own = option.get_lnames().empty() ? flag : "--" + option.get_lnames().front();
  refuse([flag, own, next] {
    return fmt::format("{} needs a value; if {} is one: {}", flag, next,
                       files::shell_quoted(own + "=" + next));
  });
  return {};
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
  const std::string lower = files::lower_case(value);
  const bool is_harmless =
      std::find(foreign.harmless.begin(), foreign.harmless.end(), lower) != foreign.harmless.end();
  const auto applies = [&](const std::string& where) {
    return where.empty() || m_command.get_option_no_throw(where) != nullptr;
  };
  const std::string name = fmt::format("{} is an option of {}", flag, foreign.programs);
  switch (foreign.remedy) {
    case ForeignFlag::Remedy::alias:
      if (const CLI::Option* const option = m_command.get_option_no_throw(ours);
          option && applies(std::string(foreign.where))) {
        if (!given && equals == std::string::npos) {
          refuse([flag] { return flag + " needs a value"; });
        }
        if (equals != std::string::npos) {
          const bool is_off = is_one_of(lower, {"off", "false", "0"});
          given = is_off ? "off" : std::string(foreign.text.substr(equals + 1));
        }
        add_own(*option, ours, given);
      } else {
        const std::string where(foreign.where.empty() ? ours : foreign.where);
        refuse([this, name, ours, where] {
          return fmt::format("{}; {} it, as {}", name, commands_with(m_app, where), ours);
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
  const auto call_of = [&](const CLI::App& command, const std::vector<Argument>& arguments) {
    CommandReader reader(m_app, command);
    reader.m_arguments = arguments;
    // A further fault has an error of its own.
    return m_faults > 1 ? "kvzap " + command.get_name() + " …" : reader.call();
  };
  fill("{mpirun}", [&] {
    return fmt::format("mpirun -n {} {}", value.empty() ? "N" : files::shell_quoted(value),
                       call_of(m_command, m_arguments));
  });
  fill("{chat}", [&] { return call_of(*find_command(m_app, "chat"), m_arguments); });
  fill("{download}", [&] {
    std::vector<Argument> arguments = m_arguments;
    arguments.insert(arguments.begin(), Argument{"-m", model::folder_of_download(value)});
    return model::download_call(value) + " && " + call_of(m_command, arguments);
  });
  fill("{value}", [&] { return value.empty() ? std::string("FILE") : files::shell_quoted(value); });
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
  const bool has_other_context =
      known.has("--prompt") || known.has("--resume") || known.has("--config");
  const bool has_context = has_other_context || known.has("--file");
  const bool exists = fs::exists(text, ignored);
  const std::string ending = fs::path(text).extension().string();
  const bool is_of_model =
      ending == ".gguf" || ending == ".safetensors" || fs::path(text).filename() == "config.json";
  const bool is_text =
      !is_of_model &&
      (is_file ? !ending.empty() : !has_blank(text) && !exists && ends_as_text(ending));
  const CLI::Option* const files = m_command.get_option_no_throw("--file");
  const bool may_repeat =
      files && files->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  if (is_text) {
    if (ending == ".toml" && may_take("--config")) return name("--config");
    if (may_take("--tasks")) return name("--tasks");
    if (!has_other_context && (may_repeat || may_take("--file"))) return name("-f");
    return false;
  }
  const CLI::Option* const type = m_command.get_option_no_throw("--type");
  if (!exists && type && !known.has("--type") && is_choice(*type, text)) return name("--type");
  if (may_take("--surrogate") && model::is_surrogate(text)) return name("--surrogate");
  if (may_take("--model") && !known.has("--resume") && !has_blank(text)) return name("-m");
  continues = !has_blank(text);
  if (!has_context && may_take("--prompt")) return name("-p");
  if (m_command.get_option_no_throw("--question")) return name("--question");
  // kvzap convert and quantize: input and output, as in llama.cpp.
  const bool is_copy = known.has("--model") && !files &&
                       !m_command.get_option_no_throw("--tasks") &&
                       !m_command.get_option_no_throw("--surrogate");
  if (is_copy && !exists && may_take("--output")) return name("-o");
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
  const std::string& name = m_command.get_name();
  const bool is_known = std::all_of(m_arguments.begin(), m_arguments.end(), [&](const auto& one) {
    const bool is_long = one.flag.rfind("--", 0) == 0;
    const std::string flag = one.flag.substr(0, is_long ? one.flag.find('=') : 2);  // "-n5"
    return flag.empty() || flag == "--" || m_command.get_option_no_throw(flag);
  });
  const auto arguments = has_positionals(m_command) ? m_arguments : placed();
  return is_known && arguments ? shell_call(name, *arguments) : "kvzap " + name + " …";
}

std::string CommandReader::suggestion() const {
  if (!m_fault) return "did you mean: " + call();
  return fmt::format("did you mean kvzap {}? The next error: {}", m_command.get_name(), m_fault());
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
